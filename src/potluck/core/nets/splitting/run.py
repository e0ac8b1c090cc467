"""A net is run from one place to another, by its own `forward`.

Up to a place: the net runs, and a hook ends it there. From a place: modules that the net calls before it are not called
but answered with ghosts, tensors on the meta device that have a shape and no numbers; operations between them run on
ghosts, too; and at the place the given tensor is put in. So what is behind the place is the net's own Python, in its
own mode, with its own draws, and what is before it draws nothing, changes no buffer and costs no arithmetic; but for
calls whose output does not follow from the inputs, which are made.
"""

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils import _pytree as pytree

from potluck.core.ground.inputs import Form, Inputs
from potluck.core.nets.splitting.look import SIZES, CannotSplit, ModuleCall, Place, happening

_META = torch.device("meta")


class Course:
    """How one architecture goes through its modules, for running any of its nets from place to place.

    Args:
        calls: of modules, in the order of their beginnings.
        inputs: one example's form, without the batch, or those of named inputs.
    """

    def __init__(self, calls: Sequence[ModuleCall], inputs: Form | Mapping[str, Form]) -> None:
        self.calls = tuple(calls)
        self.inputs = inputs
        self._before = dict[Place, dict[str, list[ModuleCall]]]()

    def seen(
        self,
        net: nn.Module,
        inputs: Inputs,
        places: Sequence[Place],
        keep: Callable[[Place, Tensor], Tensor],
        stop: Place | None = None,
    ) -> tuple[dict[Place, Tensor], Any]:
        """What an ordinary pass has at those of these places that it reaches, and what it puts out.

        Args:
            net: of this architecture.
            inputs: (batch, ...).
            places: where.
            keep: what is kept of the tensor at a place, called when it is there.
            stop: where the pass ends; what it has there stands for what it puts out.
        """
        found = dict[Place, Tensor]()
        with ExitStack() as running:
            running.enter_context(plain_attention())
            for place in places:
                running.enter_context(_watched(net, place, lambda x, at=place: found.setdefault(at, keep(at, x))))
            if stop is not None:
                running.enter_context(_watched(net, stop, _end))
            try:
                outputs = net(inputs)
            except _Reached as reached:
                outputs = reached.value
        return found, outputs

    def at(
        self,
        net: nn.Module,
        inputs: Inputs,
        *places: Place,
        stop: Place | None = None,
        read: Callable[[Place, Tensor], Tensor] = lambda place, x: x,
    ) -> tuple[Tensor, ...]:
        """The tensors at these places and the net's outputs, or what it has at `stop`, all of one ordinary pass.

        Args:
            net: of this architecture.
            inputs: (batch, ...).
            places: where.
            stop: where the pass ends.
            read: makes of the tensor at a place what is returned of it, as soon as it is there.

        Raises:
            CannotSplit: the pass does not come to one of them.
        """
        found, outputs = self.seen(net, inputs, places, lambda place, x: read(place, _own(place, x)), stop)
        if missing := [place for place in places if place not in found]:
            raise CannotSplit(f"{missing[0]} was not reached")
        return (*(found[place] for place in places), outputs)

    def run(self, net: nn.Module, x: Inputs, start: Place | None = None, stop: Place | None = None) -> Tensor:
        """What a net has at one place, of what it has at another.

        Args:
            net: of this architecture, with any weights, in any mode.
            x: at `start`, (batch, ...); the inputs, if there is no `start`.
            start: from where.
            stop: up to where; to the outputs, if it is None.

        Raises:
            CannotSplit: `stop` is not reached, or something behind `start` is computed from what lies before it.
        """
        with ExitStack() as running:
            running.enter_context(plain_attention())
            hidden = 0
            inputs = x
            if start is not None:
                assert isinstance(x, Tensor)  # at a place there is one
                inputs = running.enter_context(self._resumed(net, x, start))
            if stop is not None:
                hidden = 0 if start is None else self._hidden(start, stop)
                running.enter_context(_watched(net, stop, _end, hidden))
            try:
                outputs: Tensor = net(inputs)
            except _Reached as reached:
                return reached.value
        if stop is not None:
            raise CannotSplit(f"{stop} was not reached")
        if outputs.is_meta:
            raise CannotSplit(f"behind {start}, something is computed from what lies before it")
        return outputs

    def _hidden(self, start: Place, stop: Place) -> int:
        """How many calls of the module at `stop` are not made, since they lie before `start`."""
        before = sum(call.path == stop.path and call.end <= start.moment for call in self.calls)
        return before - sum(not call.follows for call in self._calls_before(start).get(stop.path, ()))

    def _calls_before(self, place: Place) -> dict[str, list[ModuleCall]]:
        """By module, the calls that are made before a place when what lies before it is skipped."""
        if place not in self._before:
            found = self._before[place] = {}
            for call in happening(self.calls, place):
                found.setdefault(call.path, []).append(call)
        return self._before[place]

    @contextmanager
    def _resumed(self, net: nn.Module, x: Tensor, start: Place) -> Generator[Inputs]:
        """Inside the block, calls before `start` are answered, and `x` is put in at it; the inputs to call with."""
        ghosts, where = _Ghosts(net, x.device), x.device if start.by_value else _META

        def put() -> Tensor:
            ghosts.end()
            return _own(start, x)

        answers = _Answers(net, start, x.shape[0], where, put)  # which torch.export follows, unlike len
        with ExitStack() as running:
            if not start.by_value:
                running.enter_context(ghosts)
            running.enter_context(answers.given(self._calls_before(start)))
            yield self._inputs_made_up(x.shape[0], where)
            if ghosts.are_made:
                raise CannotSplit(f"{start} was not reached")

    def _inputs_made_up(self, batch: int, device: torch.device) -> Inputs:
        def made_up(form: Form) -> Tensor:
            return _made_up((batch, *form.shape), form.dtype, device)

        if isinstance(self.inputs, Mapping):
            return {name: made_up(form) for name, form in self.inputs.items()}
        return made_up(self.inputs)


class _Reached(Exception):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


def _end(x: Tensor) -> None:
    raise _Reached(x)


def _own(place: Place, x: Tensor) -> Tensor:
    """The tensor at a place, or a copy if the net changes it in place afterwards."""
    return x.clone() if place.changed else x


class _Ghosts(TorchFunctionMode):
    """Until `end`, operations that are given a ghost run on ghosts alone, and leave buffers as they are."""

    def __init__(self, net: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.are_made = True
        self._is_inside = False
        self._device = device
        self._net = net

    @cached_property
    def _buffers(self) -> set[int]:
        """Which tensors are the net's buffers; going through all its modules takes longer than a small part's pass."""
        return {id(buffer) for buffer in self._net.buffers()}

    def end(self) -> None:
        """From now on, operations are what they are, and no longer pass here, which would cost some time each."""
        self.are_made = False
        if _get_current_function_mode() is self:
            self.__exit__(None, None, None)

    def __exit__(self, *error: Any) -> None:
        """Once, whether at the end of the block or before."""
        if self._is_inside:
            self._is_inside = False
            super().__exit__(*error)

    def __enter__(self) -> "_Ghosts":
        self._is_inside = True
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if not self.are_made:
            return func(*args, **kwargs)
        if args and name.endswith("_") and not name.endswith("__") and id(args[0]) in self._buffers:
            return args[0]  # such as the number of batches that a BatchNorm has seen
        leaves, form = pytree.tree_flatten((args, kwargs))
        if not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            return func(*args, **kwargs)
        if name == "__get__" and getattr(func, "__self__", None) is Tensor.device:
            return self._device  # what is made for it there, such as a mask, shall have numbers
        leaves = [_META if isinstance(leaf, torch.device) else _ghost(leaf) for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, form)
        return func(*args, **kwargs)


def _ghost(leaf: Any) -> Any:
    return torch.empty_like(leaf.detach(), device=_META) if isinstance(leaf, Tensor) and not leaf.is_meta else leaf


class _Answers:
    """Modules answer for themselves before a place, and at it a tensor is put in.

    Args:
        net: whose modules.
        start: the place.
        batch: how many examples.
        device: of the answers.
        put: gives the tensor to put in; is called once.
    """

    def __init__(
        self, net: nn.Module, start: Place, batch: int, device: torch.device, put: Callable[[], Tensor]
    ) -> None:
        self._net = net
        self._start = start
        self._batch = batch
        self._device = device
        self._put = put

    @contextmanager
    def given(self, before: Mapping[str, list[ModuleCall]]) -> Generator[None]:
        """Inside the block, these calls are answered."""
        paths = [*before, *([self._start.path] if self._start.side == "in" else [])]
        modules = {path: self._net.get_submodule(path) for path in paths}
        try:
            for path, module in modules.items():
                module.__dict__["_call_impl"] = self._answering(module, path, before.get(path, []))
            yield
        finally:
            for module in modules.values():
                module.__dict__.pop("_call_impl", None)  # the class's own comes back

    def _answering(self, module: nn.Module, path: str, calls: Sequence[ModuleCall]) -> Callable[..., Any]:
        """What takes the place of calling a module."""
        start, left = self._start, iter(calls)
        reads_it = iter([True] if start.side == "in" and path == start.path else [])

        def answer(*args: Any, **kwargs: Any) -> Any:
            if (call := next(left, None)) is not None:
                return self._answer(module, call, args, kwargs)
            if next(reads_it, False):
                args = _with_leaf(args, start.leaf, self._put())
            return type(module)._call_impl(module, *args, **kwargs)

        return answer

    def _answer(self, module: nn.Module, call: ModuleCall, args: Any, kwargs: Any) -> Any:
        """What a call before the place puts out, or with the tensor in it if the place is that."""
        if call.follows:
            output = pytree.tree_unflatten(_formed(call, self._batch, self._device), call.form)
        else:
            output = type(module)._call_impl(module, *args, **kwargs)
        is_start = self._start.side == "out" and call.end == self._start.moment
        return _with_leaf(output, self._start.leaf, self._put()) if is_start else output


def _with_leaf(tree: Any, position: int, tensor: Tensor) -> Any:
    leaves, form = pytree.tree_flatten(tree)
    leaves[position] = tensor
    return pytree.tree_unflatten(leaves, form)


def _formed(call: ModuleCall, batch: int, device: torch.device) -> list[Any]:
    """What a call puts out on a batch of this size, without its numbers."""
    return [
        _made_up(_grown(leaf.shape, larger.shape, batch), leaf.dtype, device) if isinstance(leaf, Form) else leaf
        for leaf, larger in zip(call.leaves, call.larger, strict=True)
    ]


def _made_up(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers that must not matter: with one of them in it, a sum or product is NaN, and a proof fails."""
    if device == _META:
        return torch.empty(tuple(shape), dtype=dtype, device=device)  # in no time, unlike `full`
    return torch.full(tuple(shape), torch.nan if dtype.is_floating_point else 1, dtype=dtype, device=device)


@contextmanager
def plain_attention() -> Generator[None]:
    """Inside the block, transformers of torch compute in evaluation mode as they do in training.

    Their other way has inner tensors of a kind that cannot be followed, and other last digits.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _grown(small: tuple[int, ...], large: tuple[int, ...], batch: int) -> list[int]:
    """A shape on a batch of this size, of those on batches of `SIZES`: a dimension grows evenly with the batch."""
    first, second = SIZES
    return [a + (batch - first) * (b - a) // (second - first) for a, b in zip(small, large, strict=True)]


@contextmanager
def _watched(net: nn.Module, place: Place, act: Callable[[Tensor], Any], hidden: int = 0) -> Generator[None]:
    """Inside the block, the tensor at a place is handed over; `hidden` calls of its module are not made."""
    module, calls = net.get_submodule(place.path), itertools.count(1 + hidden)

    def hand_over(tree: Any) -> None:
        if next(calls) == place.call:
            act(pytree.tree_leaves(tree)[place.leaf])

    if place.side == "in":
        handle = module.register_forward_pre_hook(lambda module, args: hand_over(args))
    else:
        handle = module.register_forward_hook(lambda module, args, output: hand_over(output))
    try:
        yield
    finally:
        handle.remove()
