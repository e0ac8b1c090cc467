"""Local training: carries out a `Fit`, one client at a time."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from potluck.core.ground.rng import Key, isolated
from potluck.core.nets.batchnorm import takes_batch_statistics
from potluck.core.nets.modes import mode
from potluck.core.nets.weights import Weights
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import Extras, Fit, FitReport, LocalTraining, Moments, Objective, Observed
from potluck.engine.numerics.device import CPU, drawing_on, moved, networks_in, resident
from potluck.engine.numerics.numerics import PLAIN, Numerics


def train(fit: Fit, key: Key, computing: Numerics = PLAIN) -> FitReport:
    """Train `fit.net` in place, and return the report.

    The order of examples, their augmentation, Dropout and the kept observations are drawn from separate keys below
    `key`, so that keeping observations does not change the training.

    Raises:
        ValueError: there is nothing to train on.
    """
    epochs = schedule(len(fit.data), fit.training, key.fold("order"), takes_batch_statistics(fit.net))
    order = [positions for epoch in epochs for positions in epoch]
    observer = Keeper.of_last_epoch(fit, epochs, key.fold("keep"))
    losses: list[Tensor] = []
    data, forward = resident(fit.data, computing.place), key.fold("forward")
    nets = fit.net, *networks_in(fit.extras)
    with (
        isolated(forward),
        drawing_on(computing.place, forward),
        computing.applied(*nets),
        turns_of(fit, computing) as turns,
    ):
        for turn, known in zip(turns, fit.moments or [], strict=False):
            turn.remember(known)
        for step, positions in enumerate(order):
            batch = moved(data.batch(positions, key.fold("augment", step)), computing.place)
            batch = batch._replace(inputs=computing.to_layout(batch.inputs))
            steps = [turn.step(batch) for turn in turns]
            observer.see(step, positions, {name: seen for _, observed in steps for name, seen in observed.items()})
            losses.append(steps[0][0])
    fit.done = True
    fit.moments = [turn.moments for turn in turns] if fit.lasts else None
    loss = float(torch.stack(losses).mean())  # the only synchronisation with the device
    combined = {name: mean for turn in turns for name, mean in means(turn.combined).items()}
    return FitReport(loss, len(order), sum(map(len, order)), observer.collected(), combined)


def schedule(examples: int, training: LocalTraining, key: Key, batch_statistics: bool) -> list[list[Tensor]]:
    """Positions of each step's batch, epoch by epoch: a new permutation every epoch, its incomplete last batch kept.

    A last batch of one example is dropped if the net uses batch statistics, which a single example does not have.
    """
    if examples == 0 or (examples == 1 and batch_statistics):
        raise ValueError(
            f"{examples} training examples; expected at least {2 if batch_statistics else 1}"
            + (" because the model has BatchNorm" if batch_statistics else "")
        )
    if batch_statistics and training.batch_size == 1:
        raise ValueError("batch_size: found 1, expected at least 2 because the model has BatchNorm")
    left = training.steps
    epochs: list[list[Tensor]] = []
    while len(epochs) < training.epochs if left is None else left > 0:
        permutation = torch.randperm(examples, generator=key.fold(len(epochs)).generator())
        batches = [b for b in permutation.split(training.batch_size) if len(b) > 1 or not batch_statistics]
        epochs.append(batches[:left])
        left = None if left is None else left - len(epochs[-1])
    return epochs


@dataclass
class Keeper:
    """Keeps observations of a uniform sample of the last epoch's examples, made as each is visited."""

    chosen: Tensor
    first_step: int
    kept: list[Observed] = field(default_factory=list)

    @classmethod
    def of_last_epoch(cls, fit: Fit, epochs: list[list[Tensor]], key: Key) -> "Keeper":
        """Draw `fit.keep` of the last epoch's examples."""
        visited = torch.cat(epochs[-1])
        drawn = torch.randperm(len(visited), generator=key.generator())[: fit.keep]
        chosen = torch.zeros(len(fit.data), dtype=torch.bool)
        chosen[visited[drawn]] = True
        return cls(chosen, first_step=sum(map(len, epochs[:-1])))

    def see(self, step: int, positions: Tensor, observed: Observed) -> None:
        """Keep the observations of the batch at `positions`, if it belongs to the last epoch."""
        if not observed or step < self.first_step:
            return
        rows = self.chosen[positions]
        if bool(rows.any()):
            self.kept.append({name: widened(tensor.detach()[rows]) for name, tensor in observed.items()})

    def collected(self) -> Observed:
        """The kept rows of every observation, in the order of visits."""
        names = self.kept[0] if self.kept else {}
        return {name: torch.cat([rows[name] for rows in self.kept]).to(CPU) for name in names}


def and_seen(combined: Weights | tuple[Weights, Observed]) -> tuple[Weights, Observed]:
    """The gradient that `Fit.combine` returned, and the scalars that it named, if any."""
    return combined if isinstance(combined, tuple) else (combined, {})


def means(seen: Sequence[Observed]) -> dict[str, float]:
    """The mean of each scalar over the steps."""
    return {name: float(torch.stack([of_step[name] for of_step in seen]).mean()) for name in (seen[0] if seen else ())}


def widened(tensor: Tensor) -> Tensor:
    """Tensors of lower precision as float32, as they are sent."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


@dataclass
class _Turn:
    """Objectives that step together, with the weights and the optimiser of their turn."""

    fit: Fit
    training: LocalTraining
    extras: Extras
    objectives: tuple[Objective, ...]
    weights: dict[str, nn.Parameter]
    optimizer: torch.optim.Optimizer
    computing: Numerics
    combined: list[Observed] = field(default_factory=list[Observed])

    @property
    def moments(self) -> Moments:
        """The optimiser's state for each weight, and the description of the weights."""
        known = {name: self.optimizer.state.get(weight, {}) for name, weight in self.weights.items()}
        state = {n: {key: found for key, found in of_one.items() if found is not None} for n, of_one in known.items()}
        return {"of": self._what, "state": moved(state, CPU)}

    def remember(self, moments: Moments) -> None:
        """Load an optimiser's state, unless it is of another optimiser, or of weights of other names or shapes."""
        if moments["of"] == self._what:
            for name, known in moments["state"].items():
                self.optimizer.state[self.weights[name]].update(moved(known, self.computing.place))

    @property
    def _what(self) -> dict[str, str]:
        optimizer = self.training.optimizer
        return {name: f"{optimizer} of {tuple(weight.shape)}" for name, weight in self.weights.items()}

    def step(self, batch: Batch) -> tuple[Tensor, Observed]:
        """Take one optimiser step; return the first objective's loss, detached, and the observations."""
        loss, observed = self.differentiate(batch)
        if self.training.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.weights.values(), self.training.clip_norm)
        self.optimizer.step()
        self._correct()
        return loss, observed

    def differentiate(self, batch: Batch) -> tuple[Tensor, Observed]:
        """Give the weights a step's gradient; return the first objective's loss, detached, and the observations."""
        with self.computing.cast():
            losses, observed = self._losses(batch)
        self.optimizer.zero_grad(set_to_none=True)
        if self.fit.combine is None:
            torch.stack(losses).sum().backward() if len(losses) > 1 else losses[0].backward()
        else:
            self._combine(losses)
        return losses[0].detach(), observed

    def _losses(self, batch: Batch) -> tuple[list[Tensor], Observed]:
        """Each objective's loss on a batch, and the observations of all."""
        losses: list[Tensor] = []
        observed: Observed = {}
        for objective in self.objectives:
            result = objective(self.fit.net, batch, self.extras)
            loss, seen = (result, {}) if isinstance(result, Tensor) else result
            losses.append(loss)
            observed |= seen
        return losses, observed

    def _combine(self, losses: list[Tensor]) -> None:
        """Take one gradient for each objective, combine them by the method's rule, and step with the result."""
        assert self.fit.combine is not None
        gradients: list[Weights] = []
        for loss in losses:
            if not loss.requires_grad:  # the loss depends on no trained parameter
                gradients.append({})
                continue
            weights = list(self.weights.values())
            found = torch.autograd.grad(loss, weights, allow_unused=True, retain_graph=True)
            named = zip(self.weights, cast("tuple[Tensor | None, ...]", found), strict=True)
            gradients.append({name: gradient for name, gradient in named if gradient is not None})
        clipped = self.training.clip_norm is not None
        with torch.no_grad():
            combined, seen = and_seen(self.fit.combine(gradients, self.extras))
        if seen:
            self.combined.append(seen)
        for name, weight in self.weights.items():
            gradient = combined.get(name)
            # Clipping works in place, and `combine` may have returned one of the extras.
            weight.grad = gradient.clone() if clipped and gradient is not None else gradient

    def _correct(self) -> None:
        if self.fit.after_step is None:
            return
        with torch.no_grad():
            current: Weights = dict(self.weights)
            corrected = self.fit.after_step(current, self.extras, self.training.lr)
            for name, weight in self.weights.items():
                weight.copy_(corrected[name])


@contextmanager
def turns_of(fit: Fit, computing: Numerics) -> Generator[list[_Turn]]:
    """Training mode, gradients for the parameters to be trained only, new optimisers; undone afterwards."""
    before = [(parameter, parameter.requires_grad) for parameter in fit.net.parameters()]
    trained = fit.trained()
    for parameter, _ in before:
        parameter.requires_grad_(False)
    for parameter in trained.values():
        parameter.requires_grad_(True)
    try:
        with mode(fit.net, training=True), reading(fit.frozen, fit.net, computing) as frozen:
            yield list(_turns(fit, {**fit.extras, **frozen}, trained, computing))
    finally:
        for parameter, was in before:
            parameter.requires_grad_(was)
            parameter.grad = None


@contextmanager
def reading(frozen: Mapping[str, nn.Module], net: nn.Module, computing: Numerics) -> Generator[Mapping[str, nn.Module]]:
    """Frozen nets in evaluation mode, in the run's layout, their weights without gradients; undone afterwards.

    Raises:
        ValueError: one shares a parameter that requires a gradient with `net`.
    """
    learning = {id(parameter) for parameter in net.parameters() if parameter.requires_grad}
    for name, one in frozen.items():
        if any(id(parameter) in learning for parameter in one.parameters()):
            raise ValueError(f"frozen: {name!r} shares weights with the net that is trained; give it a copy")
    with ExitStack() as stack:
        for one in frozen.values():
            stack.enter_context(mode(one, training=False))
            stack.enter_context(computing.applied(one))
        # On a device the net may have other parameter objects.
        before = [(parameter, parameter.requires_grad) for one in frozen.values() for parameter in one.parameters()]
        try:
            for parameter, _ in before:
                parameter.requires_grad_(False)
            yield frozen
        finally:
            for parameter, was in before:
                parameter.requires_grad_(was)


def _turns(fit: Fit, extras: Extras, trainable: dict[str, nn.Parameter], computing: Numerics) -> Iterator[_Turn]:
    """One turn for all objectives, or one for each."""
    extras = moved(extras, computing.place)
    plan: list[tuple[tuple[Objective, ...], tuple[str, ...] | None]] = [(fit.losses, fit.trainable)]
    if fit.turns is not None:
        plan = [((objective,), prefixes) for objective, prefixes in zip(fit.losses, fit.turns, strict=True)]
    optimizers: dict[tuple[tuple[str, ...], LocalTraining], torch.optim.Optimizer] = {}
    for (objectives, prefixes), training in zip(plan, fit.trainings or [fit.training] * len(plan), strict=True):
        mine = {name: weight for name, weight in trainable.items() if prefixes is None or name.startswith(prefixes)}
        if not mine:
            raise ValueError(f"{_untrained(fit.net, prefixes)}; there is nothing to train")
        of = tuple(mine), training
        if of not in optimizers:
            optimizers[of] = training.new_optimizer(list(mine.values()))
        yield _Turn(fit, training, extras, objectives, mine, optimizers[of], computing)


def _untrained(net: nn.Module, prefixes: tuple[str, ...] | None) -> str:
    """The reason why there is nothing to train."""
    if prefixes is None:
        return "every parameter of the model is frozen"
    found = any(name.startswith(prefixes) for name, _ in net.named_parameters())
    return (
        f"every parameter whose name starts with {prefixes} is frozen"
        if found
        else (f"no parameter's name starts with {prefixes}")
    )
