"""Which tensors of a forward pass are computed from which, found by watching every operation.

Every version of a tensor that depends on the inputs is a node; an operation in place makes a new version. Nodes are
numbered in the order in which they are made, so that each is computed from nodes of smaller numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from potluck.core.ground.inputs import Inputs, by_name


class _Address(NamedTuple):
    """Where a tensor lies in memory: equal for two tensors that are the same numbers in the same form."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Flow(TorchDispatchMode):
    """The dataflow of what is computed inside the block from the inputs.

    Attributes:
        sources: of each node, those that it was computed from.
        weighted: of each node, whether weights had a part in it.
        uses: each time that a weight was read beside a node: how many nodes there were, and the weight's name.

    Args:
        net: whose weights are known by name.
        inputs: the first nodes, one for each tensor.
    """

    def __init__(self, net: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.sources: list[set[int]] = []
        self.weighted: list[bool] = []
        self.uses: list[tuple[int, str]] = []
        self._node_at: dict[_Address, int] = {}
        self._views: dict[int, set[_Address]] = {}
        self._weights: dict[_Address, set[str]] = {}  # what was computed from weights alone, and from which
        self._changes: dict[int, int] = {}  # by storage the number of the last version that was made in place
        self._held: list[Tensor] = []  # so that no memory is used twice
        for name, tensor in (*net.named_parameters(remove_duplicate=False), *net.named_buffers()):
            self._weights.setdefault(_address(tensor), set()).add(name)
        for tensor in by_name(inputs).values():
            self._add(tensor, set(), weighted=False)

    def __len__(self) -> int:
        return len(self.sources)

    def node(self, tensor: Tensor) -> int | None:
        """The number of a tensor as it is now; None if it does not depend on the inputs."""
        address = _address(tensor)
        if address not in self._node_at and address.storage in self._views:  # a view of it that no operation made
            self._add(tensor, {self._node_at[other] for other in self._views[address.storage]}, weighted=False)
        return self._node_at.get(address)

    def changes_after(self, tensor: Tensor, count: int) -> bool:
        """Whether a tensor's memory is changed in place after there were this many nodes."""
        return self._changes.get(_address(tensor).storage, -1) >= count

    def live(self, end: int) -> list[bool]:
        """Of each node, whether `end` depends on it, or it is `end`."""
        alive = [False] * len(self)
        alive[end] = True
        for node in range(end, -1, -1):
            if alive[node]:
                for source in self.sources[node]:
                    alive[source] = True
        return alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(_tensors((args, kwargs)))
        sources = {node for tensor in tensors if (node := self.node(tensor)) is not None}
        weights = set[str]().union(*(self._weights.get(_address(tensor), ()) for tensor in tensors))
        results = func(*args, **kwargs)
        made, changed = list(_tensors(results)), list(_changed(func, args, kwargs))
        if not sources:
            for tensor in (*made, *changed):
                self._weights.setdefault(_address(tensor), set()).update(weights)
                self._held.append(tensor)
            return results
        self.uses += [(len(self), name) for name in sorted(weights)]
        rewritten = set[int]()
        for tensor in changed:
            if (storage := _address(tensor).storage) not in rewritten:
                rewritten.add(storage)
                self._change(tensor, sources, weighted=bool(weights))
        for tensor in made:
            address = _address(tensor)
            itself = self._node_at.get(address) in sources  # handed through
            if address.storage not in rewritten and not itself:
                self._add(tensor, sources, weighted=bool(weights))
        return results

    def _add(self, tensor: Tensor, sources: set[int], *, weighted: bool) -> int:
        address = _address(tensor)
        self._held.append(tensor)
        self._views.setdefault(address.storage, set()).add(address)
        self._node_at[address] = len(self)
        self.sources.append(set(sources))
        self.weighted.append(weighted or any(self.weighted[source] for source in sources))
        return self._node_at[address]

    def _change(self, tensor: Tensor, sources: set[int], *, weighted: bool) -> None:
        """A new version of a tensor, and so of whatever else lies in its memory."""
        address = _address(tensor)
        others = self._views.get(address.storage, set()) - {address}
        new = self._add(tensor, sources, weighted=weighted)
        for other in others:
            before = self._node_at[other]
            self._node_at[other] = len(self)
            self.sources.append({before, new})
            self.weighted.append(self.weighted[before] or self.weighted[new])
        self._changes[address.storage] = new


def _address(tensor: Tensor) -> _Address:
    storage = tensor.untyped_storage()
    return _Address(storage._cdata, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))


def _changed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The arguments that an operation writes to, by its schema."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[position] if position < len(args) else kwargs.get(argument.name))
