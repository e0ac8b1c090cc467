"""A net is run once, and every operation in it is followed."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from potluck.core.ground.errors import explained
from potluck.core.ground.inputs import Inputs, InputShape, by_name
from potluck.core.ground.rng import Key, isolated
from potluck.core.nets.classes import own_outputs
from potluck.core.nets.entrance import blank_inputs
from potluck.core.nets.modes import mode
from potluck.core.nets.tracing import layers, operations, products
from potluck.core.nets.tracing.found import FIXED, Multiple, Runs, Trace, Unfollowed, Written
from potluck.core.nets.tracing.labels import NONE, TensorLabels, thin
from potluck.core.nets.weights import tensors_of

_BATCH = 2
_RULES: dict[str, Callable[..., None]] = {**operations.RULES, **layers.RULES, **products.RULES}


def trace(net: nn.Module, input_shape: InputShape) -> Trace:
    """The classes of channels of a net, which is run once on two examples of zeros in evaluation mode.

    Raises:
        Unfollowed: a layer does something that is not known here, or fails.
    """
    labels = TensorLabels(net)
    inputs: Inputs = blank_inputs(net, input_shape, _BATCH)
    with torch.no_grad(), isolated(Key(("trace",))), mode(net, training=False), labels.naming():
        for tensor in by_name(inputs).values():
            labels.put(tensor, torch.zeros(tensor.shape, dtype=torch.float64))
        try:
            with _Following(labels), own_outputs(net):
                outputs = net(inputs)
        except Unfollowed:
            raise
        except Exception as error:  # in the user's own code, whatever it is
            given = ", ".join(f"{name} {tuple(x.shape)}".lstrip() for name, x in by_name(inputs).items())
            raise labels.unfollowed(f"fails on inputs of shape {given}: {explained(error)}") from error
    return _found(labels, [output for output in tree_leaves(outputs) if isinstance(output, Tensor)])


class _Following(TorchFunctionMode):
    """Labels what every operation gives."""

    def __init__(self, labels: TensorLabels) -> None:
        super().__init__()
        self._labels = labels

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        if not any(self._labels.is_labelled(x) for x in given):
            return out
        name = _name_of(func)
        if name == "setitem":
            raise self._labels.unfollowed("writes into a part of a tensor")
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if name in _RULES and outputs:
            _RULES[name](self._labels, out, *args, **kwargs)
        elif outputs:
            operations.follow(self._labels, name, func, outputs, args, kwargs)
        return out


def _name_of(func: Callable[..., Any]) -> str:
    """An operation's name, without the underscores of methods in place and of operators."""
    name: str = getattr(func, "__name__", type(func).__name__)
    if name == "__get__":
        name = getattr(cast(Any, func).__self__, "__name__", name)
    return name.strip("_")


def _found(labels: TensorLabels, outputs: Sequence[Tensor]) -> Trace:
    """All of it, with classes in place of labels."""
    classifier = _rows_of(labels, outputs)
    for output in outputs:
        labels.fix(labels.of(output))
    state = tensors_of(labels.net)
    if made := [name for name, tensor in state.items() if not labels.is_parameter(tensor)]:
        raise labels.unfollowed(f"makes {made[0]}; make it in __init__")
    axes = {name: _axes_of(labels, labels.names[id(tensor)], tensor) for name, tensor in state.items()}
    return Trace(
        axes,
        tuple(Written(where, _tuple(labels, x)) for where, x in labels.written),
        tuple(Runs(where, _tuple(labels, x), unit) for where, x, unit in labels.runs),
        tuple(Multiple(where, _tuple(labels, x), of) for where, x, of in labels.multiples),
        tuple(labels.together),
        dict(labels.heads),
        frozenset(name for name, tensor in state.items() if labels.names[id(tensor)] in labels.grouped),
        {name: _rows(labels, rows) for name, rows in labels.normed.items()},
        frozenset(name for name, tensor in state.items() if labels.names[id(tensor)] in classifier),
        tuple(output.shape for output in outputs),
    )


def _rows_of(labels: TensorLabels, outputs: Sequence[Tensor]) -> set[str]:
    """Weights and biases whose first dimension has the channels of the outputs, by their first names."""
    classes = {x for output in outputs for x in labels.classes.roots(thin(labels.of(output))).flatten().tolist()}
    classes -= {FIXED, NONE}
    first = {name: axes[0] for name, axes in labels.axes.items() if 0 in axes}
    return {name for name, row in first.items() if classes.issuperset(labels.classes.roots(row).tolist())}


def _axes_of(labels: TensorLabels, name: str, tensor: Tensor) -> tuple[tuple[int, ...] | None, ...]:
    if name in labels.axes:
        return _rows(labels, [labels.axes[name].get(dim) for dim in range(tensor.dim())])
    if name in labels.elements:
        return _separated(name, labels.classes.roots(labels.elements[name]))
    return (None,) * tensor.dim()


def _separated(name: str, roots: Tensor) -> tuple[tuple[int, ...] | None, ...]:
    """Of a tensor that is labelled element by element, the dimension along which its channels lie."""
    varying = [dim for dim in range(roots.dim()) if bool((roots.amax(dim) != roots.amin(dim)).any())]
    if len(varying) > 1:
        raise Unfollowed(f"{name} has different channels along several of its dimensions")
    found: list[tuple[int, ...] | None] = [None] * roots.dim()
    for dim in varying:
        row = roots.movedim(dim, 0).flatten(1)[:, 0] if roots.dim() > 1 else roots
        if bool((row != FIXED).any()):
            found[dim] = tuple(max(x, FIXED) for x in row.tolist())
    return tuple(found)


def _tuple(labels: TensorLabels, row: Tensor) -> tuple[int, ...]:
    return tuple(max(x, FIXED) for x in labels.classes.roots(row).tolist())


def _rows(labels: TensorLabels, rows: Sequence[Tensor | None]) -> tuple[tuple[int, ...] | None, ...]:
    """The classes of each row; None for a row that keeps its number."""
    found = [None if row is None else _tuple(labels, row) for row in rows]
    return tuple(None if row is None or set(row) == {FIXED} else row for row in found)
