"""Carries out the requests of `potluck.core.requests.beside_training`, on clients and on the server."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import singledispatch
from typing import Any, cast

import torch
from torch import Tensor, nn

from potluck.core.ground.inputs import Inputs
from potluck.core.ground.rng import Key, isolated
from potluck.core.nets.batchnorm import keep_statistics, measure_statistics, unlearnt
from potluck.core.nets.classes import spread_outputs
from potluck.core.nets.modes import mode
from potluck.core.nets.splitting import plan_of, split_problem
from potluck.core.nets.weights import Weights
from potluck.core.requests.beside_training import Gradient, NetPart, NormStatistics, Parted, Predict
from potluck.core.requests.fit import Fit, Request
from potluck.core.requests.inference import forward
from potluck.engine.client.training import reading, train, widened
from potluck.engine.numerics.device import CPU, moved, resident
from potluck.engine.numerics.numerics import Numerics


def carry_out(request: Request, key: Key, computing: Numerics) -> Any:
    """Compute the request on the run's device, in its precision and layout.

    Raises:
        ValueError: a fit has nothing to train on, or a gradient no examples or parameters.
        TypeError: parts are requested of a net that has none.
    """
    answer = _carried_out(request, key, computing)
    request.done = True
    return answer


@singledispatch
def _carried_out(request: Request, key: Key, computing: Numerics) -> Any:
    raise TypeError(f"{type(request).__name__} is not a request that the engine knows")


@_carried_out.register
def _(request: Fit, key: Key, computing: Numerics) -> Any:
    return train(request, key, computing)


@_carried_out.register
def _(request: Predict, key: Key, computing: Numerics) -> Tensor | tuple[Tensor, ...]:
    net, parts = request.net, request.parts
    names: tuple[NetPart, ...] = parts if isinstance(parts, tuple) else (parts,)

    def compute(inputs: Tensor) -> tuple[Tensor, ...]:
        laid = computing.to_layout(inputs)
        return (net(laid),) if names == ("outputs",) else _parts(net, laid, names)

    with isolated(key.fold("forward")), computing.applied(net), computing.cast():
        found = forward(net, resident(request.examples, computing.place), compute, request.batch_size)
    wide = tuple(widened(tensor).contiguous().to(CPU) for tensor in found)
    return wide if isinstance(parts, tuple) else wide[0]


@_carried_out.register
def _(request: Gradient, key: Key, computing: Numerics) -> Weights:
    net, whole = request.net, len(request.data)
    with ExitStack() as running:
        for context in (isolated(key.fold("forward")), computing.applied(net), mode(net, training=True)):
            running.enter_context(context)
        running.enter_context(keep_statistics(net))
        frozen = running.enter_context(reading(request.frozen, net, computing))
        weights = {name: p for name, p in net.named_parameters() if p.requires_grad}
        if not whole or not weights:
            raise ValueError(f"{whole} examples and {len(weights)} parameters; expected at least 1 of each")
        total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        extras = {**moved(request.extras, computing.place), **frozen}
        for batch in request.data.batches(request.batch_size):
            batch = moved(batch, computing.place)
            with computing.cast():
                found = request.objective(net, batch._replace(inputs=computing.to_layout(batch.inputs)), extras)
            loss = found if isinstance(found, Tensor) else found[0]
            if loss.requires_grad:
                share = loss * (len(batch.targets) / whole)
                gradients = torch.autograd.grad(share, list(weights.values()), allow_unused=True)
                for name, gradient in zip(weights, cast("tuple[Tensor | None, ...]", gradients), strict=True):
                    if gradient is not None:
                        total[name] += gradient
    return {name: gradient.contiguous().to(CPU) for name, gradient in total.items()}


@_carried_out.register
def _(request: NormStatistics, key: Key, computing: Numerics) -> int:
    batches = request.data.batches(request.batch_size, key.fold("order").generator())
    with isolated(key.fold("forward")), computing.applied(request.net), computing.cast():
        only = unlearnt(request.net) if request.layers == "unlearnt" else None
        return measure_statistics(request.net, (computing.to_layout(batch.inputs) for batch in batches), only)


def _parts(net: nn.Module, inputs: Inputs, names: tuple[NetPart, ...]) -> tuple[Tensor, ...]:
    found = _said(net, net.part_outputs(inputs)) if isinstance(net, Parted) else _by_plan(net, inputs)
    if unknown := [name for name in names if name not in found]:
        raise TypeError(f"{type(net).__name__} has no part {unknown[0]!r}; expected one of {', '.join(found)}")
    return tuple(found[name] for name in names)


def _said(net: nn.Module, found: Mapping[NetPart, Tensor]) -> Mapping[NetPart, Tensor]:
    """The parts of a net that may have outputs for some of the classes, with those of all."""
    said = ("outputs", "exits")
    return {name: spread_outputs(net, part) if name in said else part for name, part in found.items()}


def _by_plan(net: nn.Module, inputs: Inputs) -> Mapping[NetPart, Tensor]:
    """The parts of a net that does not say what they are."""
    if (problem := split_problem(net)) is not None:
        raise TypeError(f"{problem}; give its parts to potluck.models.contract.StagedNet")
    extracted, features, outputs = plan_of(net).passed(net, inputs)
    return {"extracted": extracted, "features": features, "outputs": outputs}
