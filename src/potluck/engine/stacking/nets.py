"""Several clients' fits of the same shape as one batched computation.

The objectives, written for one client, run under `torch.func.vmap` over weights stacked along a new first axis; the
task's own objective, for nets of linear layers alone, runs on batches laid end to end. Every client keeps its own order
of examples, its own batches and its own BatchNorm statistics, and takes its t-th step when the others take theirs, so
optimiser states agree with those of training one by one up to rounding.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from potluck.core.ground.inputs import joined_inputs
from potluck.core.ground.rng import Key
from potluck.core.nets.batchnorm import takes_batch_statistics
from potluck.core.nets.calling import call_with
from potluck.core.nets.classes import own_classes_of
from potluck.core.nets.modes import mode
from potluck.core.nets.splitting import NotPlanned, split_problem, unplanned
from potluck.core.nets.weights import Weights
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import Extras, Fit, FitReport, LocalTraining, Objective, Observed
from potluck.engine.client.training import Keeper, and_seen, means, reading, schedule
from potluck.engine.numerics.device import CPU, moved, networks_in, resident
from potluck.engine.numerics.numerics import PLAIN, Numerics
from potluck.engine.stacking.end_to_end import (
    goes_end_to_end,
    losses_end_to_end,
    only_linear,
    outputs_end_to_end,
    task_criterion,
)


class CannotStack(Exception):
    """These fits cannot run as one; nothing has been changed."""


def stacking_key(fit: Fit) -> tuple[Any, ...]:
    """A key, equal for fits that differ only in weights, data and the values of their extras."""
    frozen = sorted(fit.frozen.items())
    return (
        repr(fit.net),
        [parameter.requires_grad for parameter in fit.net.parameters()],
        [module.training for module in fit.net.modules()],
        [own_classes_of(module) for net in (fit.net, *(net for _, net in frozen)) for module in net.modules()],
        _names(nn.ModuleList([fit.net, *(net for _, net in frozen)])),
        fit.losses,
        fit.training,
        fit.combine,
        fit.after_step,
        fit.trainable,
        fit.turns,
        fit.keep > 0,
        _shapes(fit.extras),
        sorted(fit.data.columns),
        [(name, repr(net)) for name, net in frozen],
    )


def train_stacked(fits: Sequence[Fit], keys: Sequence[Key], computing: Numerics = PLAIN) -> list[FitReport]:
    """Train all nets in place, as `engine.client.training.train` does with each fit and its key, and return reports.

    Args:
        fits: of one `stacking_key` fit.
        keys: of each fit's draws.
        computing: the device; precision and layout must be the defaults.

    Raises:
        CannotStack: objectives take turns, draw at random, or use operations that cannot be batched over clients.
        ValueError: a client has nothing to train on.
    """
    if fits[0].turns is not None:
        raise CannotStack("its objectives take turns")
    if fits[0].training.optimizer not in ("adam", "sgd"):
        raise CannotStack(f"its optimizer is {fits[0].training.optimizer}; 'adam' and 'sgd' can be stacked")
    if fits[0].training.persist:
        raise CannotStack("its optimiser lasts from round to round")
    if not fits[0].trained():
        raise CannotStack("there is nothing to train")
    nets = [net for fit in fits for net in (fit.net, *fit.frozen.values(), *networks_in(fit.extras))]
    with computing.applied(*nets):
        stack = _Stack(fits, keys, computing.place)
        with mode(stack.fit.net, training=True), reading(stack.fit.frozen, stack.fit.net, PLAIN):
            for step in range(stack.longest):
                stack.step(step)
        stack.unstack()
    return stack.reports()


class _Stack:
    """Stacked clients, those with the most steps first, so that the clients still training are always a prefix.

    Attributes:
        fit: the fit whose nets are run with all clients' weights.
    """

    def __init__(self, fits: Sequence[Fit], keys: Sequence[Key], device: torch.device) -> None:
        normed = takes_batch_statistics(fits[0].net)
        plans = [schedule(len(f.data), f.training, k.fold("order"), normed) for f, k in zip(fits, keys, strict=True)]
        steps = [sum(map(len, plan)) for plan in plans]
        self._order = sorted(range(len(fits)), key=lambda place: (-steps[place], place))
        self._clients = [_Client(fits[place], plans[place], keys[place], device) for place in self._order]
        fit = self.fit = self._clients[0].fit
        self._objectives = [_Objective(fit, objective) for objective in fit.losses]
        self._end_to_end: bool | None = None  # unknown before the first batch
        nets = [client.fit.net for client in self._clients]
        self._weights = _stacked([dict(net.named_parameters()) for net in nets])
        self._buffers = _stacked([dict(net.named_buffers()) for net in nets])
        self._frozen = _stacked([_frozen_tensors(client.fit) for client in self._clients])
        self._extras = moved(_stacked_tree([client.fit.extras for client in self._clients]), device)
        self._optimizer = _Optimizer(fit.training, {name: self._weights[name] for name in fit.trained()})

    @property
    def longest(self) -> int:
        """The most steps of any client."""
        return len(self._clients[0].batches)

    def step(self, number: int) -> None:
        """Take step `number` of all clients that have one."""
        active = sum(number < len(client.batches) for client in self._clients)
        weights = {name: weight[:active].detach() for name, weight in self._weights.items()}
        trained = {name: weights[name].requires_grad_() for name in self._optimizer.names}
        parts = [self._forward(rows, number, weights, active) for rows in self._by_size(number, active)]
        totals = [torch.stack([losses.sum() for losses in of_one]).sum() for of_one in zip(*parts, strict=True)]
        if self.fit.combine is None:
            totals = [torch.stack(totals).sum()]
        gradients = self._combined([_gradients(total, trained) for total in totals], active)
        self._optimizer.step(gradients, active)
        self._correct(active)

    def unstack(self) -> None:
        """Copy weights and buffers back into the nets."""
        with torch.no_grad():
            for place, client in enumerate(self._clients):
                for name, tensor in (*client.fit.net.named_parameters(), *client.fit.net.named_buffers()):
                    tensor.copy_((self._weights if name in self._weights else self._buffers)[name][place])
                client.fit.done = True

    def reports(self) -> list[FitReport]:
        """The reports, in the order of the given fits."""
        found = dict(zip(self._order, (client.report() for client in self._clients), strict=True))
        return [found[place] for place in range(len(self._clients))]

    def _by_size(self, number: int, active: int) -> list[list[int]]:
        """Indices of the active clients, by the size of their batches."""
        places: dict[int, list[int]] = {}
        for place, client in enumerate(self._clients[:active]):
            places.setdefault(len(client.batches[number]), []).append(place)
        return list(places.values())

    def _forward(self, places: list[int], number: int, weights: Weights, active: int) -> list[Tensor]:
        """The losses (clients,) of each objective for clients with batches of one size."""
        everyone = len(places) == active
        rows = slice(active) if everyone else torch.tensor(places)
        clients = [self._clients[place] for place in places]
        own = weights if everyone else _taken(weights, rows)
        buffers, extras = _taken(self._buffers, rows), _taken(self._extras, rows)
        read = _taken(self._frozen, rows)
        batch = _batches(clients, number)
        losses: list[Tensor] = []
        seen: Observed = {}
        for objective in self._objectives:
            try:
                loss, observed = self._losses(objective, own, buffers, read, batch, extras)
            except Exception as error:
                if number > 0:
                    raise
                raise CannotStack(f"{type(error).__name__}: {error}") from error  # no weights have changed yet
            losses.append(loss)
            seen |= observed
        if not everyone:
            for name, buffer in buffers.items():
                self._buffers[name][rows] = buffer
        for place, (client, loss) in enumerate(zip(clients, losses[0].detach(), strict=True)):
            client.losses.append(loss)
            client.see(number, {name: tensor[place] for name, tensor in seen.items()})
        return losses

    def _losses(
        self, objective: "_Objective", weights: Weights, buffers: Weights, read: Weights, batch: Batch, extras: Any
    ) -> tuple[Tensor, Observed]:
        """Every client's loss (clients,), and the observations (clients, batch, ...)."""
        net = objective.net
        inputs = batch.inputs if isinstance(batch.inputs, Tensor) else None
        if self._end_to_end is None:
            self._end_to_end = inputs is not None and only_linear(net) and goes_end_to_end(net, weights, inputs)
        if inputs is not None and self._end_to_end and (criterion := task_criterion(objective.plain)):
            return losses_end_to_end(criterion, outputs_end_to_end(net, weights, inputs), batch.targets), {}
        tensors = {f"net.{name}": tensor for name, tensor in (weights | buffers).items()}
        tensors |= {f"frozen.{name}": tensor for name, tensor in read.items()}
        nets = unplanned(objective)
        before = {name: buffer.clone() for name, buffer in buffers.items()} if nets else {}
        try:
            return _vmapped(objective, tensors, batch, extras)
        except NotPlanned:  # the objective cuts a net that nobody has cut before
            for name, buffer in before.items():
                buffers[name].copy_(buffer)
            for net in nets:
                split_problem(net)
            return _vmapped(objective, tensors, batch, extras)

    def _combined(self, gradients: list[Weights], active: int) -> Weights:
        """One gradient for each client, clipped."""
        combine, clip = self.fit.combine, self.fit.training.clip_norm
        with torch.no_grad():
            found = gradients[0]
            if combine is not None:
                extras = _taken(self._extras, slice(active))
                combined, seen = and_seen(vmap(combine, in_dims=(0, _axes(extras)))(gradients, extras))
                for place, client in enumerate(self._clients[:active] if seen else ()):
                    client.combined.append({name: scalars[place] for name, scalars in seen.items()})
                found = {name: gradient for name, gradient in combined.items() if name in self._optimizer.names}
            if clip is None:
                return found
            squares = [gradient.flatten(1).square().sum(1) for gradient in found.values()]
            scale = (clip / (torch.stack(squares).sum(0).sqrt() + 1e-6)).clamp(max=1)
            return {name: g * scale.view(-1, *[1] * (g.dim() - 1)) for name, g in found.items()}

    def _correct(self, active: int) -> None:
        if self.fit.after_step is None:
            return
        extras = _taken(self._extras, slice(active))
        current = {name: self._weights[name][:active] for name in self._optimizer.names}
        with torch.no_grad():
            corrected = vmap(self.fit.after_step, in_dims=(0, _axes(extras), None))(
                current, extras, self.fit.training.lr
            )
            for name, weight in current.items():
                weight.copy_(corrected[name])


class _Client:
    """One client of a stack: its batches and its report."""

    def __init__(self, fit: Fit, plan: list[list[Tensor]], key: Key, device: torch.device) -> None:
        self.fit = fit
        self._device = device
        self._data = resident(fit.data, device)
        self.key = key
        self.batches = [positions for epoch in plan for positions in epoch]
        self.losses: list[Tensor] = []
        self.combined: list[Observed] = []
        self._observer = Keeper.of_last_epoch(fit, plan, key.fold("keep"))

    def batch(self, number: int) -> Batch:
        """Batch `number`, on the device."""
        return moved(self._data.batch(self.batches[number], self.key.fold("augment", number)), self._device)

    def see(self, number: int, observed: Observed) -> None:
        """Keep the objectives' observations of a batch."""
        self._observer.see(number, self.batches[number], observed)

    def report(self) -> FitReport:
        """The engine's answer to the fit."""
        count = len(self.batches)
        losses: list[float] = torch.stack(self.losses).to(CPU).tolist()
        loss, examples = sum(losses) / count, sum(map(len, self.batches))
        return FitReport(loss, count, examples, self._observer.collected(), means(self.combined))


class _Objective(nn.Module):
    """An objective as a module, so that its nets can be called with other weights."""

    def __init__(self, fit: Fit, objective: Objective) -> None:
        super().__init__()
        self.net = fit.net
        self.frozen = nn.ModuleList(net for _, net in sorted(fit.frozen.items()))
        self.plain = objective
        self._names = sorted(fit.frozen)

    def forward(self, batch: Batch, extras: Extras) -> tuple[Tensor, Observed]:
        """The loss and the observations."""
        read = dict(zip(self._names, self.frozen, strict=True))
        found = self.plain(self.net, batch, {**extras, **read})
        return (found, {}) if isinstance(found, Tensor) else found


class _Optimizer:
    """Adam or SGD on stacked weights. Clients of a prefix have all taken equally many steps."""

    def __init__(self, training: LocalTraining, weights: Weights) -> None:
        self.names = list(weights)
        self._training = training
        self._weights = weights
        self._first, self._second = ({name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(2))
        self._steps = {name: torch.zeros((), device=w.device) for name, w in weights.items()}

    def step(self, gradients: Weights, active: int) -> None:
        """One step of the first `active` clients; weights without a gradient do not change."""
        names = [name for name in self.names if name in gradients]
        given = self._training
        weights, first, second = (
            [tensors[name][:active] for name in names] for tensors in (self._weights, self._first, self._second)
        )
        found = [gradients[name].contiguous() for name in names]
        with torch.no_grad():
            if given.optimizer == "adam":
                adam(
                    weights, found, first, second, [], [self._steps[name] for name in names],
                    lr=given.lr, weight_decay=given.weight_decay, beta1=0.9, beta2=0.999, eps=1e-8,
                    amsgrad=False, maximize=False, fused=True,
                )  # fmt: skip
            else:
                sgd(
                    weights, found, [*first] if given.momentum else [None for _ in names],  # the first is g
                    lr=given.lr, weight_decay=given.weight_decay, momentum=given.momentum,
                    dampening=0.0, nesterov=False, maximize=False, foreach=False,
                )  # fmt: skip


def _vmapped(objective: _Objective, tensors: Weights, batch: Batch, extras: Any) -> tuple[Tensor, Observed]:
    """Every client's loss and observations, by one objective written for one client.

    Args:
        objective: with the nets.
        tensors: of all its nets, by name in it, (clients, ...).
        batch: tensors (clients, batch, ...).
        extras: with tensors (clients, ...).
    """

    def one(tensors: Weights, batch: Batch, extras: Any) -> tuple[Tensor, Observed]:
        return call_with(objective, tensors, batch, extras)

    return vmap(one, in_dims=(0, 0, _axes(extras)))(tensors, batch, extras)


def _gradients(total: Tensor, trained: Weights) -> Weights:
    """The gradients of a sum of losses that share no weights: every client's own."""
    if not total.requires_grad:
        return {}
    found = torch.autograd.grad(total, list(trained.values()), allow_unused=True, retain_graph=True)
    named = zip(trained, cast("tuple[Tensor | None, ...]", found), strict=True)
    return {name: gradient for name, gradient in named if gradient is not None}


def _batches(clients: list[_Client], number: int) -> Batch:
    """The clients' batches `number`, as tensors (clients, batch, ...)."""
    found = [client.batch(number) for client in clients]
    columns = {name: torch.stack([batch.columns[name] for batch in found]) for name in found[0].columns}
    inputs = joined_inputs([batch.inputs for batch in found], torch.stack)
    return Batch(inputs, torch.stack([batch.targets for batch in found]), columns)


def _frozen_tensors(fit: Fit) -> Weights:
    """Parameters and buffers of the frozen nets, by their names in `_Objective.frozen`."""
    nets = nn.ModuleList(net for _, net in sorted(fit.frozen.items()))
    return {**dict(nets.named_parameters()), **dict(nets.named_buffers())}


def _stacked(tensors: list[dict[str, Any]]) -> Weights:
    return {name: torch.stack([one[name].detach() for one in tensors]) for name in tensors[0]}


def _stacked_tree(trees: list[Any]) -> Any:
    """Trees of tensors stacked along a first axis of clients; other leaves must be equal for all."""
    first = trees[0]
    if isinstance(first, Tensor):
        return torch.stack(trees)
    if isinstance(first, dict):
        return {key: _stacked_tree([tree[key] for tree in trees]) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(_stacked_tree([tree[place] for tree in trees]) for place in range(len(first)))
    if any(tree != first for tree in trees):
        raise CannotStack(f"its extras hold a {type(first).__name__} that differs from client to client")
    return first


def _taken(tree: Any, rows: Tensor | slice) -> Any:
    """A stacked tree restricted to some clients."""
    if isinstance(tree, Tensor):
        return tree[rows]
    if isinstance(tree, dict):
        return {key: _taken(child, rows) for key, child in tree.items()}
    return type(tree)(_taken(child, rows) for child in tree) if isinstance(tree, (list, tuple)) else tree


def _axes(tree: Any) -> Any:
    """The axes for vmap: 0 for tensors, None for everything else."""
    if isinstance(tree, Tensor):
        return 0
    if isinstance(tree, dict):
        return {key: _axes(child) for key, child in tree.items()} or None
    return type(tree)(_axes(child) for child in tree) or None if isinstance(tree, (list, tuple)) else None


def _names(net: nn.Module) -> list[tuple[str, str, Any]]:
    """Every name in the state dict, the first name of the same tensor, and its shape and type."""
    first: dict[int, str] = {}
    state: Weights = net.state_dict(keep_vars=True)
    return [(name, first.setdefault(id(tensor), name), _shapes(tensor)) for name, tensor in state.items()]


def _shapes(tree: Any) -> Any:
    """A tree with every tensor replaced by its shape and type, and every other leaf by its type."""
    if isinstance(tree, Tensor):
        return tree.shape, tree.dtype
    if isinstance(tree, dict):
        return {key: _shapes(child) for key, child in tree.items()}
    return [_shapes(child) for child in tree] if isinstance(tree, (list, tuple)) else type(tree)
