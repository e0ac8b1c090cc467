"""What computing takes: floating-point operations and memory of tensors, counted while torch computes.

A multiplication and an addition are two operations, as in `torch.utils.flop_counter`, whose formulas these are: matrix
products, convolutions and attention count, everything else counts nothing.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from potluck.core.ground.inputs import InputShape
from potluck.core.nets.entrance import blank_inputs
from potluck.core.nets.modes import mode

_aten = torch.ops.aten
# Attention on a CPU is another operation than on a GPU, which torch's formulas leave out.
_ON_CPU = {
    "_scaled_dot_product_flash_attention_for_cpu": _aten._scaled_dot_product_flash_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _aten._scaled_dot_product_flash_attention_backward,
}
_FORMULAS = flop_registry | {
    getattr(_aten, name): flop_registry[as_on_gpu] for name, as_on_gpu in _ON_CPU.items() if hasattr(_aten, name)
}


@dataclass(frozen=True)
class Cost:
    """What some work takes.

    Attributes:
        flops: floating-point operations.
        memory: the most bytes of tensors that were there at once.
    """

    flops: int = 0
    memory: int = 0

    def __add__(self, then: "Cost") -> "Cost":
        """Of both, one after the other."""
        return Cost(self.flops + then.flops, max(self.memory, then.memory))

    def times(self, count: int) -> "Cost":
        """Of so many repetitions."""
        return Cost(self.flops * count, self.memory if count else 0)


class CostMeter(TorchDispatchMode):
    """Counts what torch computes inside the block, which stays as it is.

    Args:
        held: tensors that are there before, which count as memory, each storage once.
    """

    def __init__(self, held: Any = ()) -> None:
        super().__init__()
        self._flops = self._most = self._now = 0
        self._known: dict[int, weakref.finalize[..., Any]] = {}
        self._hold(held)

    @property
    def cost(self) -> Cost:
        """Until now."""
        return Cost(self._flops, self._most)

    def __exit__(self, *raised: Any) -> None:
        """End counting; tensors that outlive the block are none of its business."""
        super().__exit__(*raised)
        while self._known:  # garbage that is collected meanwhile leaves it, too
            self._known.popitem()[1].detach()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry out one operation, and count it."""
        named = kwargs or {}
        found = func(*args, **named)
        if (formula := _FORMULAS.get(func._overloadpacket)) is not None:
            self._flops += int(formula(*args, **named, out_val=found))
        self._hold(found)
        return found

    def _hold(self, tree: Any) -> None:
        for tensor in tree_leaves(tree):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                self._watch(tensor.untyped_storage())

    def _watch(self, storage: torch.UntypedStorage) -> None:
        name, size = storage._cdata, storage.nbytes()
        if name in self._known:
            return
        self._known[name] = weakref.finalize(storage, self._free, name, size)
        self._now += size
        self._most = max(self._most, self._now)

    def _free(self, name: int, size: int) -> None:
        self._known.pop(name, None)
        self._now -= size


def forward_flops(net: nn.Module, input_shape: InputShape) -> int:
    """Floating-point operations of a forward pass of one example; at least 1.

    For a net that does not run on zeros of this shape, the number of its parameters.
    """
    counting = CostMeter()
    try:
        with mode(net, training=False), torch.no_grad(), counting:
            net(blank_inputs(net, input_shape, 1))
    except Exception:
        return sum(parameter.numel() for parameter in net.parameters()) + 1
    return counting.cost.flops + 1
