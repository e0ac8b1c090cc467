"""What a request takes, counted once for each shape of it and size of batch, and multiplied.

A batch is counted beside the work, with the client's own objective on its own examples: weights, buffers and draws
stay as they are. So the numbers are the same whether clients are trained one by one, stacked or in processes.

Left out: the optimiser's own arithmetic, and what a handler computes itself between requests. Memory is that of
networks, gradients, the optimiser's state, activations, what an objective reads and one batch; not the data set,
Python, torch, or what torch's kernels take while they run.
"""

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from potluck.core.ground.digest import digest
from potluck.core.ground.rng import Key, isolated
from potluck.core.nets.batchnorm import takes_batch_statistics, unlearnt
from potluck.core.nets.splitting import unplanned
from potluck.core.requests.beside_training import Gradient, NormStatistics, Predict
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import Fit, LocalTraining, Request
from potluck.engine.client.requests import carry_out
from potluck.engine.client.training import schedule, turns_of
from potluck.engine.numerics.costs import Cost, CostMeter
from potluck.engine.numerics.device import drawing_on, moved, networks_in, resident
from potluck.engine.numerics.numerics import Numerics

_KEY = Key(("cost",))


class Costs:
    """The costs of requests, each shape counted when it is first met."""

    def __init__(self, computing: Numerics) -> None:
        self._computing = computing
        self._known: dict[tuple[str, int], Cost] = {}

    def of(self, request: Request) -> Cost:
        """What carrying out a request takes, before it is carried out.

        Raises:
            Exception: whatever carrying it out would raise.
        """
        sizes, shape, total = _batches(request), _shape(request), Cost()
        for size, count in sorted(sizes.items(), reverse=True):
            if (shape, size) not in self._known:
                self._known[shape, size] = self._counted(request, size)
            total += self._known[shape, size].times(count)
        return total

    def _counted(self, request: Request, size: int) -> Cost:
        """The cost of one batch."""
        count = partial(_one_step if isinstance(request, Fit) else _one_batch, request, size, self._computing)
        nets = list(_networks(request))
        with _kept(nets):
            new = sum(len(unplanned(net)) for net in nets)
            cost = count()
            # A net that is cut for the first time is looked at, which is no part of the work.
            return count() if sum(len(unplanned(net)) for net in nets) != new else cost


def _batches(request: Request) -> Counter[int]:
    """How many batches of each size the request is carried out in."""
    if isinstance(request, Fit):
        epochs = schedule(len(request.data), request.training, _KEY, takes_batch_statistics(request.net))
        return Counter(len(positions) for epoch in epochs for positions in epoch)
    if isinstance(request, NormStatistics) and request.layers == "unlearnt" and not unlearnt(request.net):
        return Counter()
    assert isinstance(request, (Predict, Gradient, NormStatistics))
    examples = request.examples if isinstance(request, Predict) else request.data
    return Counter(examples.batch_sizes(request.batch_size))


def _one_step(fit: Fit, size: int, computing: Numerics) -> Cost:
    """One step of a fit, without the step itself."""
    nets = list(_networks(fit))
    forward = _KEY.fold("forward")
    with (
        isolated(forward),
        drawing_on(computing.place, forward),
        computing.applied(*nets),
        turns_of(fit, computing) as turns,
    ):
        data = resident(fit.data, computing.place)
        batch = moved(data.batch(torch.arange(size), _KEY.fold("augment")), computing.place)
        batch = batch._replace(inputs=computing.to_layout(batch.inputs))
        states = [_state_bytes(turn.training, turn.weights.values()) for turn in _distinct(turns)]
        with CostMeter(_tensors(nets, fit.extras, batch)) as counting:
            for turn in turns:
                turn.differentiate(batch)
                turn.combined.clear()
        return Cost(counting.cost.flops, counting.cost.memory + sum(states))


def _one_batch(request: Predict | Gradient | NormStatistics, size: int, computing: Numerics) -> Cost:
    """The request on some of its examples."""
    first = torch.arange(size)
    part = (
        replace(request, examples=request.examples.take(first), batch_size=size)
        if isinstance(request, Predict)
        else replace(request, data=request.data.take(first), batch_size=size)
    )
    with CostMeter(_tensors(list(_networks(request)), getattr(request, "extras", {}))) as counting:
        carry_out(part, _KEY, computing)
    return counting.cost


def _distinct(turns: Iterable[Any]) -> list[Any]:
    """One of the turns for each optimiser."""
    return list({id(turn.optimizer): turn for turn in turns}.values())


def _state_bytes(training: LocalTraining, weights: Iterable[nn.Parameter]) -> int:
    """What an optimiser keeps of its weights, once it has taken a step; found of one weight at a time."""
    return sum(_state_bytes_of(training, weight.shape, weight.dtype, weight.device) for weight in weights)


@lru_cache(maxsize=4096)
def _state_bytes_of(training: LocalTraining, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> int:
    weight = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
    optimizer = training.new_optimizer([weight])
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    return sum(kept.nbytes for kept in optimizer.state[weight].values() if isinstance(kept, Tensor))


def _networks(request: Request) -> Iterable[nn.Module]:
    """The networks that a request runs."""
    yield request.net  # pyright: ignore[reportAttributeAccessIssue]
    yield from getattr(request, "frozen", {}).values()
    yield from networks_in(getattr(request, "extras", {}))


def _tensors(nets: Iterable[nn.Module], *trees: Any) -> list[Any]:
    return [*(tensor for net in nets for tensor in (*net.parameters(), *net.buffers())), *trees]


@contextmanager
def _kept(nets: list[nn.Module]) -> Generator[None]:
    """Buffers, such as running statistics, and frozen weights, which an objective may set, as they were afterwards."""
    before = [{name: tensor.clone() for name, tensor in _untrained(net)} for net in nets]
    try:
        yield
    finally:
        with torch.no_grad():
            for net, known in zip(nets, before, strict=True):
                for name, tensor in _untrained(net):  # other tensors, where the net was on a device meanwhile
                    tensor.copy_(known[name])


def _untrained(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from net.named_buffers()
    yield from ((name, weight) for name, weight in net.named_parameters() if not weight.requires_grad)


def _shape(request: Request) -> str:
    """A digest of all that determines the operations of a batch: not the numbers in tensors, nor how many batches."""
    form = _form({name: value for name, value in vars(request).items() if name not in _BESIDE}, frozenset())
    return digest(repr((type(request).__name__, form)).encode())


_BESIDE = ("done", "moments", "batch_size", "name", "keep")


def _form(value: Any, above: frozenset[int]) -> Any:
    """What a value is, without the numbers in it; `above` are the values that it is a part of.

    Of a function that is what it is called and what it has got from where it was made. A number other than a whole one
    counts as zero or not, since objectives leave out what weighs nothing.
    """
    if isinstance(value, (str, int, bytes, type, torch.dtype, type(None))):
        return value
    if isinstance(value, float):
        return bool(value)
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if id(value) in above:
        return None
    parts = partial(_forms, above=above | {id(value)})
    if isinstance(value, Examples):
        return [parts(_of_one(rows)) for rows in (value.inputs, value.targets, value.columns)]
    if isinstance(value, nn.Module):
        weights = [(parameter.shape, parameter.requires_grad) for parameter in value.parameters()]
        return repr(value), weights, [module.training for module in value.modules()]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return value.__module__, value.__qualname__, parts([cells, value.__defaults__, value.__kwdefaults__])
    if isinstance(value, MethodType):
        return parts([value.__func__, value.__self__])
    if isinstance(value, partial):
        return parts([value.func, value.args, value.keywords])
    return type(value).__qualname__, parts(value if isinstance(value, (Mapping, list, tuple)) else _attributes(value))


def _forms(values: Any, above: frozenset[int]) -> list[Any]:
    if isinstance(values, Mapping):
        named = {str(name): value for name, value in values.items()}
        return [(name, _form(named[name], above)) for name in sorted(named)]
    return [_form(value, above) for value in values]


def _attributes(value: Any) -> Mapping[str, Any]:
    """What an object holds; nothing, if it does not say."""
    return getattr(value, "__dict__", {})


def _of_one(rows: Any) -> Any:
    """The shape of one row of each tensor."""
    tensors = rows.values() if isinstance(rows, Mapping) else [rows]
    names = list(rows) if isinstance(rows, Mapping) else []
    return [*names, *((tuple(tensor.shape[1:]), tensor.dtype) for tensor in tensors)]
