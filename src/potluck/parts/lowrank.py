"""Weights whose matrices are sent as products of two thin ones, from a truncated singular value decomposition.

A convolution's kernel counts as a matrix with a row for each output channel.
"""

from typing import Any

import torch
from torch import Tensor

from potluck.core.nets.weights import Weights
from potluck.core.schema import Schema, UpTo, floats, optional, some_of

Factored = dict[str, Weights]
"""Tensors by name: "whole" as they are, or as the product of the matrices "left" (P, K) and "right" (K, Q)."""


def factored(weights: Weights, energy: float) -> Factored:
    """Each matrix as the factors that keep more than this share of its energy, if these are smaller; the rest whole."""
    found: Factored = {"whole": {}, "left": {}, "right": {}}
    for name, tensor in weights.items():
        if (pair := low_rank(tensor, energy)) is None:
            found["whole"][name] = tensor
        else:
            found["left"][name], found["right"][name] = pair
    return found


def low_rank(tensor: Tensor, energy: float) -> tuple[Tensor, Tensor] | None:
    """U S (P, K) and V (K, Q) with the least K that keeps more than this share of the sum of squared singular values.

    None if they have no fewer numbers than the tensor, if the energy is 1, and for what is no matrix of finite floats.
    Zeros have K = 0.
    """
    if energy >= 1 or tensor.dim() < 2 or not tensor.is_floating_point():
        return None
    matrix = tensor.flatten(1)
    if min(matrix.shape) < 2 or not bool(matrix.isfinite().all()):
        return None
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    kept = s.double().square().cumsum(0)
    rank = int((kept <= energy * kept[-1]).sum()) + 1 if kept[-1] > 0 else 0
    if rank * sum(matrix.shape) >= matrix.numel():
        return None
    return (u[:, :rank] * s[:rank]).contiguous(), v[:rank].clone(memory_format=torch.contiguous_format)


def multiplied(found: Factored, model: Weights) -> Weights:
    """The tensors of what was factored, in the shapes that they have in `model`; names that it lacks are left out."""
    left, right = found["left"], found["right"]
    products = {name: (left[name] @ right[name]).view_as(model[name]) for name in left.keys() & right.keys()}
    return {name: tensor for name in model if (tensor := products.get(name, found["whole"].get(name))) is not None}


def factored_like(model: Weights) -> Schema:
    """What factored weights of these names and shapes may hold: each tensor whole, or as two factors that are smaller.

    Any may be absent.
    """
    left, right = dict[str, Any](), dict[str, Any]()
    for name, tensor in model.items():
        if tensor.dim() > 1 and tensor.is_floating_point():
            rows, columns = tensor.flatten(1).shape
            rank = UpTo((rows * columns - 1) // (rows + columns), least=0)
            left[name], right[name] = optional(floats(rows, rank)), optional(floats(rank, columns))
    return Schema(whole=some_of(model), left=Schema(**left), right=Schema(**right))
