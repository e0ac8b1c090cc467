"""A net is looked at: its forward pass runs twice, on two sizes of batch, and every place is noted that cuts it in two.

A place is where a module call puts out a tensor, or is given one. It cuts the net if all that is computed behind it
from the inputs is computed from that tensor: no edge of the dataflow jumps over it.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.utils import _pytree as pytree

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.inputs import Form, Inputs
from potluck.core.nets.splitting.flow import Flow

SIZES = (2, 3)
"""The batches on which a net is looked at. Dimensions that differ between them grow with the batch."""


class CannotSplit(ConfigError):
    """The net has no such place; the text says why, in one line."""


@dataclass(eq=False)
class ModuleCall:
    """One call of a module.

    Attributes:
        path: the module's name in the net.
        number: which of its calls it is, from 1.
        start: when it begins, in begins and ends of calls.
        parent: the call inside which it happens; None in the net's own forward.
        end: when it ends.
        follows: whether all tensors that it puts out depend on the inputs, and on how many there are alone in their
            shapes. Else it has to be made: it computes something that is needed whatever the inputs are, such as a
            table of positions, or picks some of the examples.
        form: of what it puts out, see `torch.utils._pytree`.
        leaves: a `Form` for each tensor that it puts out on the smaller batch, and all else as it is.
        larger: the same of the larger batch.
    """

    path: str
    number: int
    start: int
    parent: "ModuleCall | None"
    end: int = -1
    follows: bool = True
    form: Any = None
    leaves: list[Any] = field(default_factory=list[Any])
    larger: list[Any] = field(default_factory=list[Any])

    def compare(self, other: "ModuleCall") -> None:
        """Take note of the same call on the larger batch."""
        self.larger = other.leaves
        pairs = [(a.shape, b.shape) for a, b in zip(self.leaves, other.leaves, strict=True) if isinstance(a, Form)]
        self.follows = self.follows and other.follows and all(_grows_evenly(*pair) for pair in pairs)


def _grows_evenly(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    """Whether each dimension is the same on both batches, or as many times as large as the batch is."""
    first, second = SIZES
    return len(small) == len(large) and all(
        a == b or (a * second == b * first and a % first == 0) for a, b in zip(small, large, strict=True)
    )


@dataclass(frozen=True)
class Place:
    """Where a net can be cut: everything flows through one tensor there, with a row for each example.

    Attributes:
        path: name of the module.
        side: whether it is what the module puts out, or what it is given.
        call: which call of the module, from 1.
        leaf: which of the tensors there.
        shape: of one example's.
        dtype: of the tensor.
        changed: whether the net changes the tensor in place afterwards.
        count: how many operations come before it.
        moment: when in begins and ends of module calls.
        node: the tensor's number in the dataflow.
        by_value: whether Python looks at numbers before it, so that it is only reached with numbers there.
    """

    path: str
    side: Literal["out", "in"]
    call: int
    leaf: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    changed: bool
    count: int
    moment: int
    node: int
    by_value: bool = False

    def __str__(self) -> str:
        """The module's name, with "<" before it for what it is given, and "#2" behind it for its second call."""
        return "<" * (self.side == "in") + self.path + f"#{self.call}" * (self.call > 1)


@dataclass(frozen=True, eq=False)
class SeenTensor:
    """A tensor at a module call, and how many operations come before it; see `Place`."""

    call: ModuleCall
    side: Literal["out", "in"]
    leaf: int
    count: int
    moment: int
    node: int
    tensor: Tensor


@dataclass
class Watched:
    """What one forward pass showed.

    Attributes:
        flow: the dataflow.
        calls: of modules, in the order of their beginnings.
        seen: the tensors at them that depend on the inputs.
        outputs: of the net.
        end: their number in the dataflow.
    """

    flow: Flow
    calls: list[ModuleCall]
    seen: list[SeenTensor]
    outputs: Tensor
    end: int


def watch_pass(net: nn.Module, inputs: Inputs) -> Watched:
    """Watch one forward pass of a net, which keeps the tensors that it computes.

    Args:
        net: in evaluation mode.
        inputs: (batch, ...), one tensor or several by name.

    Raises:
        CannotSplit: the net puts out anything but a tensor, or one that does not depend on the inputs.
    """
    watching = _Watching(net, Flow(net, inputs))
    handles = [
        every_module.register_module_forward_pre_hook(watching.begin),
        every_module.register_module_forward_hook(watching.finish),
    ]
    try:
        with torch.no_grad(), watching.flow:
            outputs: object = net(inputs)
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(outputs, Tensor):
        raise CannotSplit(f"it puts out {type(outputs).__name__}; expected a tensor: return the logits alone")
    if (end := watching.flow.node(outputs)) is None:
        raise CannotSplit("its outputs do not depend on its inputs")
    return Watched(watching.flow, watching.calls, watching.seen, outputs, end)


class _Watching:
    """Notes module calls and the tensors at them."""

    def __init__(self, net: nn.Module, flow: Flow) -> None:
        self.flow = flow
        self.calls: list[ModuleCall] = []
        self.seen: list[SeenTensor] = []
        self._net = net
        self._paths = {module: path for path, module in net.named_modules()}
        self._open: list[ModuleCall] = []
        self._numbers = dict[nn.Module, int]()
        self._ticks = itertools.count()

    def begin(self, module: nn.Module, args: Any) -> None:
        if module is self._net or module not in self._paths:
            return
        self._numbers[module] = number = self._numbers.get(module, 0) + 1
        call = ModuleCall(self._paths[module], number, next(self._ticks), self._open[-1] if self._open else None)
        self._open.append(call)
        self.calls.append(call)
        self._note(call, "in", call.start, args)

    def finish(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is self._net or module not in self._paths:
            return
        call = self._open.pop()
        call.end = next(self._ticks)
        leaves, call.form = pytree.tree_flatten(output)
        call.leaves = [Form(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves]
        call.follows = all(self.flow.node(x) is not None for x in leaves if isinstance(x, Tensor))
        self._note(call, "out", call.end, output)

    def _note(self, call: ModuleCall, side: Literal["out", "in"], moment: int, tree: Any) -> None:
        for leaf, x in enumerate(pytree.tree_leaves(tree)):
            if isinstance(x, Tensor) and (node := self.flow.node(x)) is not None:
                self.seen.append(SeenTensor(call, side, leaf, len(self.flow), moment, node, x))


def cutting_places(small: Watched, large: Watched, *, beside: bool = False) -> list[list[Place]]:
    """The places that cut a net, in order; those of one tensor together, the outermost module's output first.

    Args:
        small: of a batch of `SIZES[0]`.
        large: of one of `SIZES[1]`.
        beside: also those beside which the inputs are read once more, or what is computed from them without weights,
            such as a mask. A net can be run up to them, and not from there.

    Raises:
        CannotSplit: the net does something else on another size of batch.
    """
    if [(s.call.path, s.side, s.leaf) for s in small.seen] != [(s.call.path, s.side, s.leaf) for s in large.seen]:
        raise CannotSplit("its course depends on the size of the batch")
    alive, found = small.flow.live(small.end), dict[int, list[Place]]()
    last = {n: reader for n, reader in _last_readers(small.flow, alive).items() if small.flow.weighted[n] or not beside}
    for one, other in zip(small.seen, large.seen, strict=True):
        matters = alive[one.node] and one.node != small.end and small.flow.weighted[one.node]
        if matters and _rows(one, other) and not _jumped(one, last):
            found.setdefault(one.node, []).append(_place(one, small.flow))
    for places in found.values():
        places.sort(key=lambda p: (p.side == "in", p.path.count("."), -p.count))
    return sorted(found.values(), key=lambda places: (places[0].count, places[0].node))


def _last_readers(flow: Flow, alive: list[bool]) -> dict[int, int]:
    """Of each node the last one that is computed from it, among those that the outputs depend on."""
    return {source: node for node, sources in enumerate(flow.sources) if alive[node] for source in sources}


def _jumped(one: SeenTensor, last: dict[int, int]) -> bool:
    """Whether something that was made before is still read behind a tensor."""
    return any(node < one.count <= reader and node != one.node for node, reader in last.items())


def _rows(one: SeenTensor, other: SeenTensor) -> bool:
    """Whether a tensor has one row for each example, of a shape that does not depend on how many there are."""
    a, b = one.tensor, other.tensor
    rows = a.dim() > 1 and (a.shape[0], b.shape[0]) == SIZES
    return rows and a.is_floating_point() and a.shape[1:] == b.shape[1:]


def _place(seen: SeenTensor, flow: Flow) -> Place:
    return Place(
        path=seen.call.path,
        side=seen.side,
        call=seen.call.number,
        leaf=seen.leaf,
        shape=tuple(seen.tensor.shape[1:]),
        dtype=seen.tensor.dtype,
        changed=flow.changes_after(seen.tensor, seen.count),
        count=seen.count,
        moment=seen.moment,
        node=seen.node,
    )


def happening(calls: tuple[ModuleCall, ...], place: Place) -> Iterator[ModuleCall]:
    """The calls before a place that are still made when what lies before it is skipped, in order.

    All but those inside a call that is skipped as a whole.
    """
    skipped = set[ModuleCall]()
    for call in calls:
        if call.parent in skipped:
            skipped.add(call)
        elif call.end <= place.moment:
            yield call
            if call.follows:
                skipped.add(call)
