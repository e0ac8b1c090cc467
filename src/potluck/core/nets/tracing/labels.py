"""Labels: of each element that flows through a net, the channel that it is of."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from potluck.core.nets.tracing.found import FIXED, Unfollowed
from potluck.core.nets.weights import tensors_of

NONE = -1
"""The label of an element that is of no channel, such as a zero that fills up."""

NO_LABELS = torch.full((), float(NONE), dtype=torch.float64)
"""A label of one element of no channel, to expand."""


class LabelClasses:
    """Disjoint sets of labels. A class is loose until one of its labels is written or read by a layer."""

    def __init__(self) -> None:
        self._parent = [FIXED]
        self._loose = [False]

    def fresh(self, count: int, *, loose: bool = False) -> Tensor:
        """New labels, each a class of its own, (count,)."""
        start = len(self._parent)
        self._parent += range(start, start + count)
        self._loose += [loose] * count
        return torch.arange(start, start + count, dtype=torch.float64)

    def of(self, label: int) -> int:
        """The class of a label."""
        parent = self._parent
        while parent[label] != label:
            parent[label] = label = parent[parent[label]]
        return label

    def tie(self, first: Tensor, second: Tensor) -> None:
        """Say of labels of one shape that they are the same pairwise; those of no channel are passed over."""
        if first.data_ptr() == second.data_ptr() and first.shape == second.shape and first.stride() == second.stride():
            return
        pairs = torch.stack([first.reshape(-1), second.reshape(-1)])
        pairs = pairs[:, (pairs >= 0).all(0) & (pairs[0] != pairs[1])]
        for a, b in torch.unique(pairs, dim=1).T.long().tolist() if pairs.numel() else ():
            x, y = sorted((self.of(a), self.of(b)))
            self._parent[y] = x
            self._loose[x] = self._loose[x] and self._loose[y]

    def are_one(self, labels: Tensor) -> bool:
        """Whether all labels are of one class."""
        return len({self.of(int(x)) if x >= 0 else NONE for x in labels.unique().tolist()}) == 1

    def roots(self, labels: Tensor) -> Tensor:
        """The class of each label; -1 where there is no channel, or a loose one."""
        labels, places = torch.unique(labels, return_inverse=True)
        found = [self.of(int(x)) if x >= 0 else NONE for x in labels.tolist()]
        return torch.tensor([NONE if x >= 0 and self._loose[x] else x for x in found])[places]


class TensorLabels:
    """The labels of all tensors that a net computes with, and what is known of its weights' channels.

    Attributes:
        classes: labels that are one and the same channel.
        names: of the net's parameters and buffers, by identity.
        axes: by a weight's name and dimension, the channels that layers have read and written there.
        elements: labels of the weights with which the net computes element by element.
        written: what layers write, and what sums of products run over, by the layer's name.
        runs: see `Trace`; so too `multiples`, `together`, `heads`, `grouped` and `normed`.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self._path: list[str] = []
        self.classes = LabelClasses()
        self._labels: dict[int, tuple[Tensor, Tensor]] = {}
        self.names = {id(tensor): name for name, tensor in tensors_of(net).items()}
        self.axes: dict[str, dict[int, Tensor]] = {}
        self.elements: dict[str, Tensor] = {}
        self.written: list[tuple[str, Tensor]] = []
        self.runs: list[tuple[str, Tensor, int]] = []
        self.multiples: list[tuple[str, Tensor, int]] = []
        self.together: list[tuple[int, int]] = []
        self.heads: dict[str, int] = {}
        self.grouped: set[str] = set()
        self.normed: dict[str, list[Tensor]] = {}

    def put(self, tensor: Tensor, label: Tensor) -> None:
        """Label a tensor, element by element."""
        if label.shape != tensor.shape:
            raise self.unfollowed("gives an output of a shape that was not expected")
        self._labels[id(tensor)] = (tensor, label)

    def of(self, tensor: Tensor) -> Tensor:
        """The label of each element."""
        if id(tensor) in self._labels:
            return self._labels[id(tensor)][1]
        name = self.names.get(id(tensor))
        if name is None or not tensor.is_floating_point():
            return NO_LABELS.expand(tensor.shape)
        if name in self.axes:
            raise self.unfollowed(f"computes with {name}, which a layer has as its weight")
        if name not in self.elements:
            self.elements[name] = self.classes.fresh(tensor.numel(), loose=True).reshape(tensor.shape)
        return self.elements[name]

    def fix(self, label: Tensor) -> None:
        """Say that these channels keep their number."""
        flat = thin(label)
        self.classes.tie(flat, torch.zeros_like(flat))

    @property
    def layer(self) -> str:
        """Name of the layer that is running; empty outside of all."""
        return self._path[-1] if self._path else ""

    def unfollowed(self, what: str) -> Unfollowed:
        """The answer that names the layer which is running."""
        layer = self.layer
        kind = type(self.net.get_submodule(layer)).__name__
        return Unfollowed(f"layer {layer} ({kind}) {what}" if layer else f"{kind}.forward {what}")

    @contextmanager
    def naming(self) -> Generator[None]:
        """Inside the block it is known which layer is running."""
        handles: list[Any] = []
        for name, module in self.net.named_modules():
            handles.append(module.register_forward_pre_hook(partial(self._enter, name)))
            handles.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str, layer: nn.Module, inputs: Any) -> None:
        self._path.append(name)

    def _leave(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        self._path.pop()

    def is_labelled(self, tensor: Tensor) -> bool:
        """Whether something is known of a tensor's channels, or it is a parameter or buffer of floats."""
        return id(tensor) in self._labels or (id(tensor) in self.names and tensor.is_floating_point())

    def merged(self, out: Tensor, labels: Sequence[Tensor]) -> Tensor:
        """The label of what is computed from these element by element."""
        whole = [label for label in labels if label.shape == out.shape]
        merged = NO_LABELS
        for label in labels:
            # One value for several channels, such as a mask over positions, is none of them.
            if whole and label.shape != out.shape and self.classes.are_one(thin(label)):
                continue
            first, second = torch.broadcast_tensors(merged, thin(label))
            self.classes.tie(first, second)
            merged = torch.where(first >= 0, first, second)
        return merged.expand(out.shape)

    def row(self, label: Tensor, dim: int) -> Tensor:
        """The channels along a dimension, which are the same at all positions of the others."""
        size, rows = label.shape[dim], thin(label).movedim(dim, 0).flatten(1) if label.dim() > 1 else label[:, None]
        best = rows.amax(1, keepdim=True)
        self.classes.tie(best.expand_as(rows).contiguous(), rows)
        return best[:, 0].expand(size).contiguous()

    def read(self, tensor: Tensor, dim: int) -> Tensor:
        """The channels along a dimension, as a layer reads them; those of none keep their number."""
        row = self.row(self.of(tensor), dim)
        return torch.where(self.classes.roots(row) == NONE, torch.zeros_like(row), row)

    def weight_name(self, tensor: Tensor) -> str:
        """The name of a layer's weight, which no one else computes with."""
        name = self.names.get(id(tensor))
        if name is None:
            raise self.unfollowed("has a weight that is computed and not a parameter of its own")
        if name in self.elements:
            raise self.unfollowed(f"has the weight {name}, with which the net also computes")
        return name

    def ties(self, tensor: Tensor | None, dim: int, channels: Tensor) -> None:
        """Say which channels a dimension of a parameter or buffer has."""
        if tensor is not None:
            known = self.axes.setdefault(self.weight_name(tensor), {}).setdefault(dim, channels)
            if known.shape != channels.shape:
                raise self.unfollowed("reads another number of channels than before")
            self.classes.tie(known, channels)

    def writes(self, tensor: Tensor, dim: int) -> Tensor:
        """The channels that a layer writes by this dimension of its weight."""
        known = self.axes.setdefault(self.weight_name(tensor), {})
        if dim not in known:
            known[dim] = self.classes.fresh(tensor.shape[dim])
            self.written.append((self.weight_name(tensor).rpartition(".")[0], known[dim]))
        return known[dim]

    def along(self, out: Tensor, dim: int, channels: Tensor) -> None:
        """Label an output whose channels lie along a dimension."""
        shape = [1] * out.dim()
        shape[dim] = -1
        self.put(out, channels.reshape(shape).expand(out.shape))

    def varies(self, label: Tensor, dim: int) -> bool:
        """Whether positions along a dimension are of different channels."""
        flat = thin(label)
        if flat.shape[dim] == 1:
            return False
        roots = self.classes.roots(flat)
        return bool((roots.amax(dim) != roots.amin(dim)).any())

    def is_parameter(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of the net's parameters or buffers."""
        return id(tensor) in self.names


def thin(label: Tensor) -> Tensor:
    """A label without the repetitions that it has along expanded dimensions, which become of size 1."""
    for dim in range(label.dim()):
        if label.stride(dim) == 0 and label.shape[dim] > 1:
            label = label.narrow(dim, 0, 1)
    return label
