"""On a CUDA device: the same bits each time, and single precision where a run says so.

By default some kernels add in the order in which threads arrive, and convolutions in single precision round their
factors to the 10 bits of TF32.
"""

import os
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.backends import cuda, cudnn

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_MEMORY: Any = torch.utils.deterministic


@dataclass(frozen=True)
class _Switches:
    """Torch's switches, which count for the whole process."""

    algorithms: bool
    warns: bool
    convolutions: bool
    tries: bool
    tf32_convolutions: bool
    tf32_products: bool
    fills: bool

    @classmethod
    def found(cls) -> Self:
        """As they are now."""
        return cls(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            cudnn.deterministic,
            cudnn.benchmark,
            cudnn.allow_tf32,
            bool(cuda.matmul.allow_tf32),
            _MEMORY.fill_uninitialized_memory,
        )

    def put(self) -> None:
        """Set them."""
        torch.use_deterministic_algorithms(self.algorithms, warn_only=self.warns)
        cudnn.deterministic, cudnn.benchmark = self.convolutions, self.tries
        cudnn.allow_tf32, cuda.matmul.allow_tf32 = self.tf32_convolutions, self.tf32_products
        _MEMORY.fill_uninitialized_memory = self.fills


_REPEATS = _Switches(True, True, True, False, False, False, False)
_before: list[_Switches] = []


def make_repeatable(device: torch.device) -> None:
    """Have this process compute so on a CUDA device; on any other as it did before.

    Torch warns of an operation that has no kernel whose answers repeat.
    """
    if device.type == "cuda":
        os.environ.setdefault(_WORKSPACE, ":4096:8")  # of cuBLAS, which reads it when it is first used
        if not _before:
            _before.append(_Switches.found())
        _REPEATS.put()
    elif _before:
        _before.pop().put()
