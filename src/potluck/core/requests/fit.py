"""Local training as a value: a client yields a `Fit`, the engine trains and returns a `FitReport`.

A `Fit` is one of several requests; the others are in `potluck.core.requests.beside_training`.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.fields import Checked, Only, above, at_least, below, require
from potluck.core.nets.weights import Weights
from potluck.core.requests.examples import Batch, Examples
from potluck.core.requests.optimizers import known_optimizer, new_optimizer, takes
from potluck.core.requests.schedule import Schedule

Extras = Mapping[str, Any]
Observed = dict[str, Tensor]
Objective = Callable[[nn.Module, Batch, Extras], Tensor | tuple[Tensor, Observed]]
CombineFits = Callable[[list[Weights], Extras], Weights | tuple[Weights, Observed]]
AfterStep = Callable[[Weights, Extras, float], Weights]
Moments = dict[str, Any]
"""An optimiser's state for each weight, from which another optimiser can continue."""


@dataclass(frozen=True)
class LocalTraining(Checked):
    """Settings of training on local data.

    Adam, 0.001 and batches of 16 are the setting that the FedIN papers give to every method; their 5 epochs are not the
    default.

    Attributes:
        optimizer: "adam", "adamw", "sgd", or any other class of `torch.optim` by its name, with torch's defaults for
            options not given here.
        lr: learning rate of the first round.
        epochs: passes over the local data, the last incomplete batch included.
        steps: optimiser steps instead of epochs, if given. In a configuration, epochs that are given take the place of
            a method's own steps.
        batch_size: examples in a step.
        momentum: of SGD.
        weight_decay: L2 term added to the gradient by the optimiser; of AdamW, the share of the weights that each step
            of rate 1 takes off.
        clip_norm: limit of the gradient's global norm, applied after gradients are combined; None for no limit.
        schedule: how the learning rate falls from round to round.
        persist: whether a client keeps the optimiser's state for its next call. It is never sent; it belongs to the
            name of the `Fit`, and is discarded if names or shapes of the weights have changed.
    """

    optimizer: str = "adam"
    lr: Annotated[float, at_least(0)] = 0.001
    epochs: Annotated[int, at_least(1)] = 1
    steps: Annotated[int, at_least(1)] | None = None
    batch_size: Annotated[int, at_least(1)] = 16
    momentum: Annotated[float, at_least(0), below(1)] = 0.0
    weight_decay: Annotated[float, at_least(0)] = 0.0
    clip_norm: Annotated[float, above(0)] | None = None
    schedule: Schedule = Schedule()
    persist: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", known_optimizer(self.optimizer))
        if self.momentum and self.optimizer != "sgd":
            raise ConfigError(f"momentum: belongs to the optimizer 'sgd', found it with {self.optimizer!r}")
        if self.weight_decay and not takes(self.optimizer, "weight_decay"):
            raise ConfigError(f"weight_decay: the optimizer {self.optimizer!r} has none; expected 0")

    def at(self, number: int) -> "LocalTraining":
        """This training in one round, counted from 1: its learning rate is that round's, and constant."""
        if self.schedule.rule == "constant":
            return self
        return replace(self, lr=self.lr * self.schedule.share(number), schedule=Schedule())

    def new_optimizer(self, weights: list[nn.Parameter]) -> Optimizer:
        """A new optimiser of these weights."""
        return new_optimizer(self.optimizer, weights, self.lr, self.momentum, self.weight_decay)


ServerTraining = Annotated[LocalTraining, Only("persist", False, "since the server's optimisers are new every round")]
"""Settings of training on the server, as the annotation of a method's field."""


@dataclass(eq=False)
class Request:
    """What the engine computes for a method, with the run's numerics: a client yields it, the server calls a method."""

    kind: ClassVar[str]
    done: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if (built := _built.get()) is not None:
            built.append(self)


@dataclass(eq=False)
class Fit(Request):
    """A request to train `net` in place. Objectives are written for one client and hold no state.

    Attributes:
        net: the net to train; several nets go into an `nn.ModuleDict`.
        objectives: (net, batch, extras) to a scalar loss, or to a loss and named per-example observations
            (batch, ...). With several, each step computes the gradient of each.
        data: the examples from which batches are drawn.
        training: optimiser, length, batch size.
        extras: tensors for objectives and hooks, such as control variates or another client's features.
        combine: maps gradients by objective (without the names on which the objective does not depend) and extras to
            the optimiser's gradient, or to it and named scalars. Default: their sum.
        after_step: maps (weights, extras, lr) to the weights after an optimiser step, for corrections in step space.
        trainable: prefixes of the parameter names to train; None for all. Parameters without `requires_grad` never are.
        turns: for each objective the prefixes of the parameters that it trains, if the objectives are to step one
            after the other on each batch, each with its own optimiser, instead of together. Turns that train the same
            parameters in the same way share one optimiser.
        trainings: for each turn its optimiser, learning rate and clipping, if these differ from those of `training`,
            which determines length and batches.
        keep: how many examples of the last epoch to report observations of, drawn uniformly.
        frozen: nets that objectives only read, by the name under which they find them in their extras: a module, or
            several in an `nn.ModuleList`. They are in evaluation mode and their weights have no gradient, but gradients
            flow through them to their inputs. `Sharing.ready` gives them BatchNorm's statistics that were not sent.
        name: of the training that this is a part of, such as "distil": under `persist`, the client's fits of one name,
            in whichever handler and round, have one optimiser. None for the handler's only fit, which has its name.
    """

    kind = "fit"
    net: nn.Module
    objectives: Objective | Sequence[Objective]
    data: Examples
    training: LocalTraining
    extras: Extras = field(default_factory=dict)
    combine: CombineFits | None = None
    after_step: AfterStep | None = None
    trainable: tuple[str, ...] | None = None
    turns: Sequence[tuple[str, ...]] | None = None
    trainings: Sequence[LocalTraining] | None = None
    keep: int = 0
    frozen: Mapping[str, nn.Module] = field(default_factory=dict[str, nn.Module])
    name: str | None = None
    moments: list[Moments] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        require(self.keep >= 0, "keep", "at least 0", self.keep)
        if self.turns is not None and len(self.turns) != len(self.losses):
            raise ValueError(f"turns: expected one for each of {len(self.losses)} objectives, found {len(self.turns)}")
        if self.trainings is not None and len(self.trainings) != len(self.turns or ()):
            expected = f"one for each of {len(self.turns or ())} turns"
            raise ValueError(f"trainings: expected {expected}, found {len(self.trainings)}")
        check_frozen(self.frozen, self.extras)
        super().__post_init__()

    def in_round(self, number: int) -> None:
        """Fix the learning rates to those of a round, counted from 1."""
        self.training = self.training.at(number)
        if self.trainings is not None:
            self.trainings = [training.at(number) for training in self.trainings]

    @property
    def lasts(self) -> bool:
        """Whether an optimiser's state is to be kept for the next call."""
        return self.training.persist or any(training.persist for training in self.trainings or ())

    @property
    def losses(self) -> tuple[Objective, ...]:
        """The objectives as a tuple, even if there is only one."""
        return (self.objectives,) if callable(self.objectives) else tuple(self.objectives)

    def trains(self, name: str) -> bool:
        """Whether the parameter with this name is trained, unless it is frozen."""
        chosen = self.trainable is None or name.startswith(self.trainable)
        return chosen and (self.turns is None or any(name.startswith(prefixes) for prefixes in self.turns))

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters to train, by name, without frozen ones."""
        named = self.net.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad and self.trains(name)}


def check_frozen(frozen: Mapping[str, nn.Module], extras: Extras) -> None:
    """Check that no frozen net has the name of one of the extras.

    Raises:
        ValueError: one has.
    """
    if both := sorted(frozen.keys() & extras.keys()):
        raise ValueError(f"frozen: {both[0]!r} is also the name of one of the extras; objectives find both there")


@dataclass(frozen=True)
class FitReport:
    """The engine's answer to a `Fit`.

    Attributes:
        loss: mean over the steps of the first objective.
        steps: optimiser steps taken.
        examples: examples seen, counted once a pass.
        kept: observations of the kept examples of the last epoch, by name, (kept, ...), rows aligned.
        combined: mean over the steps of each scalar that `combine` named.
    """

    loss: float
    steps: int
    examples: int
    kept: Observed
    combined: Mapping[str, float] = field(default_factory=dict[str, float])


_built: ContextVar[list[Request] | None] = ContextVar("built", default=None)


@contextmanager
def watching() -> Generator[list[Request]]:
    """Collect every request built inside the block, so that the engine detects one that was never yielded."""
    built: list[Request] = []
    token = _built.set(built)
    try:
        yield built
    finally:
        _built.reset(token)
