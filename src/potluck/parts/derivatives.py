"""Second derivatives, for methods that train through a step of training: not every layer has them."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from potluck.core.ground.errors import explained
from potluck.core.ground.rng import Key, isolated
from potluck.core.needs import Need, Offer
from potluck.core.nets.entrance import blank_inputs

_EXAMPLES = 2  # one alone has no batch statistics


def twice() -> AbstractContextManager[Any]:
    """Around what a net computes that is differentiated twice: torch's faster kernels of attention cannot be."""
    return sdpa_kernel(SDPBackend.MATH)


def _not_twice(offer: Offer) -> str | None:
    for name in offer.nets:
        if problem := _problem_of(offer.build(name), offer):
            return f"it needs second derivatives, and {name} has none: {problem}"
    return None


def _problem_of(net: nn.Module, offer: Offer) -> str | None:
    """Why a net cannot be differentiated twice; None if it can be, or not even once, which the rehearsal tells."""
    weights = [weight for weight in net.parameters() if weight.requires_grad]

    def slopes(again: bool) -> tuple[Tensor, ...]:
        with twice():
            loss = net(blank_inputs(net, offer.input_shape, _EXAMPLES)).square().sum()
        return torch.autograd.grad(loss, weights, create_graph=again, allow_unused=True, materialize_grads=True)

    with isolated(Key(("second derivative",))):
        try:
            slopes(again=False)
        except Exception:  # the user's own code
            return None
        try:
            torch.stack([slope.square().sum() for slope in slopes(again=True)]).sum().backward()
        except RuntimeError as error:
            return explained(error)
    return None


TWICE = Need(
    "networks with second derivatives",
    _not_twice,
    "choose models without this operation (ReLU, GELU and SiLU have second derivatives), or a method that takes none,"
    " such as fedproto or fml",
)
"""Of methods that take a gradient of what a step of training leads to."""
