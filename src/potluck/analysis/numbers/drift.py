"""How far the weights of clients' networks are apart, layer by layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Owner = TypeVar("Owner")


@dataclass(frozen=True)
class Drift:
    """Of one layer that several networks have in the same shape.

    Attributes:
        layer: the name of its module.
        networks: how many have it.
        parameters: how many numbers it has.
        mean: mean over networks of the distance to their mean weights, over the length of that mean.
        largest: of the network that is farthest.
    """

    layer: str
    networks: int
    parameters: int
    mean: float
    largest: float


def drift(networks: Mapping[Owner, Mapping[str, NDArray[Any]]]) -> list[Drift]:
    """The drift of every layer that at least two networks have, in the order of the networks' tensors.

    Layers are the same if all their tensors have the same names and shapes; one name in several shapes is several.

    Args:
        networks: by owner the trained tensors by name.
    """
    layers: dict[tuple[str, tuple[Any, ...]], list[NDArray[Any]]] = {}
    for tensors in networks.values():
        for layer, own in _layers(tensors).items():
            shapes = tuple((name, tensor.shape) for name, tensor in own.items())
            flat = np.concatenate([tensor.astype(np.float64).ravel() for tensor in own.values()])
            layers.setdefault((layer, shapes), []).append(flat)
    return [_drift(layer, np.stack(owned)) for (layer, _), owned in layers.items() if len(owned) > 1]


def _layers(tensors: Mapping[str, NDArray[Any]]) -> dict[str, dict[str, NDArray[Any]]]:
    found: dict[str, dict[str, NDArray[Any]]] = {}
    for name, tensor in tensors.items():
        layer, _, own = name.rpartition(".")
        found.setdefault(layer, {})[own] = tensor
    return found


def _drift(layer: str, weights: NDArray[np.float64]) -> Drift:
    centre = weights.mean(0)
    length = float(np.linalg.norm(centre))
    away = np.linalg.norm(weights - centre, axis=1)
    relative = away / length if length else np.where(away > 0, np.inf, 0.0)
    return Drift(layer, len(weights), weights.shape[1], float(relative.mean()), float(relative.max()))
