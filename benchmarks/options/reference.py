"""A second reading of `Fit`: what its documentation says, with torch's own optimisers, schedules and clipping.

It shares no code with the engine's training (potluck.engine.client.training). What it has in common with it are the
draws, by the keys of each request, without which the two could not be compared: "order" and the epoch's number for a
permutation, "augment" and the step's for the augmentation, "forward" for what objectives draw, "keep" for the
observations. It does not stack, and keeps lasting optimisers in this process, as `state_dict` and `load_state_dict`
have it, instead of in the client's record.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from potluck.core.ground.rng import Key, isolated
from potluck.core.nets.modes import mode
from potluck.core.requests.fit import Fit, FitReport, LocalTraining, Objective
from potluck.engine.client.runtime import ClientRuntime
from potluck.engine.client.session import Answer, Call, Failure

CLASSES = {name.lower(): found for name, found in vars(torch.optim).items() if isinstance(found, type)}


def rate(training: LocalTraining, number: int) -> float:
    """The learning rate in a round, as torch's scheduler has it after one epoch for each round before."""
    dummy, behind = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=training.lr), max(number, 1) - 1
    rule, factor, rounds = training.schedule.rule, training.schedule.factor or 0.0, training.schedule.rounds or 0
    if rule == "constant":
        return training.lr
    if rule == "exponential":
        scheduler: Any = lr_scheduler.ExponentialLR(dummy, factor)
    elif rule == "steps":
        scheduler = lr_scheduler.MultiStepLR(dummy, list(training.schedule.milestones), factor)
    else:
        scheduler, behind = lr_scheduler.CosineAnnealingLR(dummy, rounds), min(behind, rounds - 1)
    for _ in range(behind):
        dummy.step()
        scheduler.step()
    return scheduler.get_last_lr()[0]


@dataclass
class Turn:
    """Some objectives, and the optimiser of the weights that they train."""

    objectives: list[Objective]
    weights: dict[str, nn.Parameter]
    training: LocalTraining
    optimizer: torch.optim.Optimizer
    scalars: list[Mapping[str, Tensor]] = field(default_factory=list[Mapping[str, Tensor]])

    @property
    def layout(self) -> list[tuple[str, torch.Size]]:
        """The names and shapes for which a lasting optimiser is of use."""
        return [(name, weight.shape) for name, weight in self.weights.items()]


def turns_of(fit: Fit, number: int) -> list[Turn]:
    """The turns of each step: one for all objectives, or one for each."""
    trained = {name: weight for name, weight in fit.net.named_parameters() if weight.requires_grad}
    if fit.trainable is not None:
        trained = {name: weight for name, weight in trained.items() if name.startswith(fit.trainable)}
    losses = [fit.objectives] if callable(fit.objectives) else list(fit.objectives)
    if fit.turns is None:
        return [Turn(losses, trained, fit.training, optimizer_of(fit.training, trained, number))]
    turns: list[Turn] = []
    for loss, prefixes, training in zip(
        losses, fit.turns, fit.trainings or [fit.training] * len(fit.turns), strict=True
    ):
        weights = {name: weight for name, weight in trained.items() if name.startswith(prefixes)}
        twin = next(
            (turn for turn in turns if turn.weights.keys() == weights.keys() and turn.training == training), None
        )
        optimizer = twin.optimizer if twin else optimizer_of(training, weights, number)
        turns.append(Turn([loss], weights, training, optimizer))
    return turns


def optimizer_of(training: LocalTraining, weights: Mapping[str, Tensor], number: int) -> torch.optim.Optimizer:
    """A new optimiser, with torch's defaults for all that is not given."""
    given: dict[str, Any] = {"lr": rate(training, number)}
    if training.momentum:
        given["momentum"] = training.momentum
    if training.weight_decay or training.optimizer == "adamw":  # whose default is not 0
        given["weight_decay"] = training.weight_decay
    return CLASSES[training.optimizer](list(weights.values()), **given)


def batches(fit: Fit, key: Key) -> list[list[Tensor]]:
    """By epoch, the rows of each step."""
    epochs: list[list[Tensor]] = []
    norms = [layer for layer in fit.net.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    alone = not any(layer.training for layer in norms)  # an example alone has no batch statistics
    taken, limit = 0, fit.training.steps
    while taken < limit if limit is not None else len(epochs) < fit.training.epochs:
        order = torch.randperm(len(fit.data), generator=key.fold("order", len(epochs)).generator())
        size = fit.training.batch_size
        found = [order[start : start + size] for start in range(0, len(order), size)]
        found = [rows for rows in found if alone or len(rows) > 1]
        epochs.append(found if limit is None else found[: limit - taken])
        taken += len(epochs[-1])
    return epochs


class Reference(ClientRuntime):
    """Runs clients as the engine does, but for their fits and the server's."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._handler = ""
        self._lasting: dict[tuple[int, str, int], tuple[Any, dict[str, Any]]] = {}

    def run(self, call: Call) -> Answer | Failure:
        """Carry out a call; its handler's name is that of its only fit."""
        self._handler = call.handler
        return super().run(call)

    def carry_out(self, request: Any, key: Key) -> Any:
        """Carry out a request."""
        return self._fitted(request, key) if isinstance(request, Fit) else super().carry_out(request, key)

    def _fitted(self, fit: Fit, key: Key) -> FitReport:
        _, side, number, *more = key.path  # of a client, the exchange and its id come next
        assert isinstance(number, int)
        turns, name = turns_of(fit, number), fit.name or self._handler
        places = [(int(more[1]), name, place) for place in range(len(turns))] if side == "client" else []
        for turn, place in zip(turns, places, strict=False):
            layout, state = self._lasting.get(place, (None, {}))
            if turn.training.persist and layout == turn.layout:
                groups = turn.optimizer.state_dict()["param_groups"]
                turn.optimizer.load_state_dict({"state": state, "param_groups": groups})
        with isolated(key.fold("forward")), mode(fit.net, training=True):
            report = trained(fit, turns, key)
        for turn, place in zip(turns, places, strict=False):
            if turn.training.persist:
                self._lasting[place] = turn.layout, deepcopy(turn.optimizer.state_dict()["state"])
        fit.done = True
        return report


def trained(fit: Fit, turns: list[Turn], key: Key) -> FitReport:
    """Train the net, which is in training mode."""
    extras = {**fit.extras, **{name: frozen(net) for name, net in fit.frozen.items()}}
    epochs, losses, step = batches(fit, key), list[Tensor](), 0
    seen: list[dict[str, Tensor]] = []
    for rows in [rows for epoch in epochs for rows in epoch]:
        batch = fit.data.batch(rows, key.fold("augment", step))
        observed: dict[str, Tensor] = {}
        for turn in turns:
            gradients: list[dict[str, Tensor]] = []
            for objective in turn.objectives:
                found = objective(fit.net, batch, extras)
                loss, more = found if isinstance(found, tuple) else (found, {})
                observed |= {name: tensor.detach() for name, tensor in more.items()}
                gradients.append(gradient(loss, turn.weights))
                losses += [loss.detach()] if objective is turns[0].objectives[0] and turn is turns[0] else []
            apply(fit, turn, gradients, extras)
        seen.append(observed)
        step += 1
    scalars = {name: torch.stack([each[name] for each in turn.scalars]) for turn in turns for name in turn.scalars[0]}
    return FitReport(
        loss=float(torch.stack(losses).mean()),
        steps=step,
        examples=sum(len(rows) for epoch in epochs for rows in epoch),
        kept=kept(fit, seen[-len(epochs[-1]) :], sum(map(len, epochs[-1])), key),
        combined={name: float(values.mean()) for name, values in scalars.items()},
    )


def frozen(net: nn.Module) -> nn.Module:
    """A copy that is read in evaluation mode, without gradients of its weights."""
    return deepcopy(net).eval().requires_grad_(False)


def gradient(loss: Tensor, weights: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Of one objective, without the weights on which it does not depend."""
    if not loss.requires_grad:
        return {}
    found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    return {name: each for name, each in zip(weights, found, strict=True) if each is not None}


def apply(fit: Fit, turn: Turn, gradients: list[dict[str, Tensor]], extras: Mapping[str, Any]) -> None:
    """Combine the objectives' gradients, clip, step, and correct the step."""
    names = {name for each in gradients for name in each}
    combined: Any = {name: sum(each[name] for each in gradients if name in each) for name in sorted(names)}
    if fit.combine is not None:
        combined = fit.combine(gradients, extras)
    combined, scalars = combined if isinstance(combined, tuple) else (combined, {})
    turn.scalars.append(scalars)
    for name, weight in turn.weights.items():
        weight.grad = combined.get(name)
    if turn.training.clip_norm is not None:
        nn.utils.clip_grad_norm_(turn.weights.values(), turn.training.clip_norm)
    turn.optimizer.step()
    turn.optimizer.zero_grad()
    if fit.after_step is not None:
        before = {name: weight.detach() for name, weight in turn.weights.items()}
        with torch.no_grad():
            for name, value in fit.after_step(before, extras, turn.optimizer.param_groups[0]["lr"]).items():
                turn.weights[name].copy_(value)


def kept(fit: Fit, seen: list[dict[str, Tensor]], visited: int, key: Key) -> dict[str, Tensor]:
    """Observations of some examples of the last epoch, in the order in which they were visited."""
    drawn = torch.randperm(visited, generator=key.fold("keep").generator())[: fit.keep].sort().values
    return {name: torch.cat([step[name] for step in seen])[drawn] for name in (seen[0] if fit.keep else ())}


@contextmanager
def interpreting() -> Iterator[None]:
    """Inside the block, fits keep their schedules, since the reference reads them itself."""
    with patch.object(Fit, "in_round", lambda fit, number: None):
        yield
