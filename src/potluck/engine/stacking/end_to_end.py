"""Clients' batches laid end to end, through one net all of whose weights are in linear layers.

All other layers of such a net work row by row, whichever client a row belongs to. A linear layer computes one batched
product with all clients' weights, which is faster for small matrices than `torch.func.vmap`.
"""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from potluck.core.federation import Criterion
from potluck.core.nets.calling import call_with
from potluck.core.nets.weights import Weights
from potluck.core.requests.fit import Objective
from potluck.core.roles import Supervised

_TOLERANCE = 1e-3


def only_linear(net: nn.Module) -> bool:
    """Whether all weights are in plain linear layers, none shared, and there are no buffers."""
    layers = _linear_layers(net).values()
    held = {id(parameter) for layer in layers for parameter in layer.parameters()}
    own = sum(len(list(layer.parameters())) for layer in layers) == len(held)
    return own and held == {id(parameter) for parameter in net.parameters()} and not list(net.buffers())


def task_criterion(objective: Objective) -> Criterion | None:
    """The criterion of the task's own objective; None for any other objective, including subclasses of it."""
    if isinstance(objective, Supervised) and type(objective) is Supervised:
        return objective.criterion
    return None


def outputs_end_to_end(net: nn.Module, weights: Weights, inputs: Tensor) -> Tensor:
    """Every client's outputs (clients, batch, ...).

    Args:
        net: `only_linear`.
        weights: by name, (clients, ...).
        inputs: (clients, batch, ...).
    """
    with _side_by_side(net, weights, len(inputs)):
        outputs = net(inputs.flatten(0, 1))
    return outputs.unflatten(0, inputs.shape[:2])


def losses_end_to_end(criterion: Criterion, outputs: Tensor, targets: Tensor) -> Tensor:
    """Every client's loss (clients,) on outputs (clients, batch, ...) and targets (clients, batch, ...)."""
    if criterion is nn.functional.cross_entropy and outputs.dim() == 3 and targets.dim() == 2:
        # The usual criterion, by row first: `vmap` would split it into more steps than a small net's whole pass has.
        by_row = nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
        return by_row.view(targets.shape).mean(1)
    return vmap(criterion)(outputs, targets)


def goes_end_to_end(net: nn.Module, weights: Weights, inputs: Tensor) -> bool:
    """Whether the first two clients' outputs together equal their outputs alone.

    They do not if rows interact, or if the net draws at random. A forward function can do anything, so this is tried on
    the first batch; arguments as above.
    """
    pair = {name: weight[:2].detach() for name, weight in weights.items()}
    with torch.no_grad():
        try:
            together = outputs_end_to_end(net, pair, inputs[:2])
        except Exception:
            return False
        alone = [call_with(net, {name: w[i] for name, w in pair.items()}, own) for i, own in enumerate(inputs[:2])]
    return torch.allclose(together, torch.stack(alone), rtol=_TOLERANCE, atol=_TOLERANCE)


@contextmanager
def _side_by_side(net: nn.Module, weights: Weights, clients: int) -> Generator[None]:
    """Inside the block, linear layers read rows of `clients` clients in turn and use each client's weights."""
    layers = _linear_layers(net)
    try:
        for name, layer in layers.items():
            layer.forward = partial(_products, clients, weights[f"{name}.weight"], weights.get(f"{name}.bias"))
        yield
    finally:
        for layer in layers.values():
            layer.__dict__.pop("forward", None)  # restores the class's own forward


def _products(clients: int, weight: Tensor, bias: Tensor | None, input: Tensor) -> Tensor:
    """Rows (clients * batch, ..., in) times weights (clients, out, in), with biases (clients, out)."""
    found = _Products.apply(input.reshape(clients, -1, input.shape[-1]), weight, bias)
    return found.view(*input.shape[:-1], -1)


class _Products(torch.autograd.Function):
    """Many linear layers in one call; autograd's own would lay out the gradients of weights transposed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Rows (clients, batch, in), weights (clients, out, in), biases (clients, out) or none."""
        ctx.save_for_backward(rows, weight)
        return torch.bmm(rows, weight.mT) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of the inputs, from those of the outputs (clients, batch, out)."""
        (gradient,), (rows, weight), needed = gradients, ctx.saved_tensors, ctx.needs_input_grad
        return (
            torch.bmm(gradient, weight) if needed[0] else None,
            torch.bmm(gradient.mT, rows) if needed[1] else None,
            gradient.sum(1) if needed[2] else None,
        )


def _linear_layers(net: nn.Module) -> dict[str, nn.Linear]:
    layers = {name: module for name, module in net.named_modules() if type(module) is nn.Linear}
    return {name: layer for name, layer in layers.items() if layer._parameters}  # others have been left out of the net
