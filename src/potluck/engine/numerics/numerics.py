"""How networks are computed: device, precision, memory layout and kernels. Each changes last bits and is recorded."""

import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck.core.ground.fields import Checked, require
from potluck.core.ground.inputs import Inputs, each
from potluck.core.nets.modes import threads
from potluck.engine.numerics.device import CPU, description, device_named, moved, placed
from potluck.engine.numerics.kernels import is_known, make_native, make_portable, sample_answer
from potluck.engine.numerics.repeatable import make_repeatable


@dataclass(frozen=True)
class Numerics(Checked):
    """A run's choices, the same on every machine; the defaults are the plain ones.

    Attributes:
        precision: "fp32", or "bf16": convolutions and matrix products in bfloat16, everything else, with the weights
            and what crosses the wire, in float32.
        layout: of images and convolutions' weights in memory, "contiguous" or "channels_last".
        device: "cpu"; an accelerator by torch's name, such as "cuda", "cuda:1", "mps" or "xpu"; or "auto" for the
            machine's accelerator, if any. Draws always come from CPU generators, except those inside a network, such as
            Dropout's.
        kernels: "portable" for those that do not depend on what an x86 processor can do, and take two to five times as
            long; the command line starts itself anew for them. Default: what torch and its libraries choose
            for each processor.
    """

    precision: Literal["fp32", "bf16"] = "fp32"
    layout: Literal["contiguous", "channels_last"] = "contiguous"
    device: str = "cpu"
    kernels: Literal["portable"] | None = None

    def __post_init__(self) -> None:
        plain = (self.precision, self.layout, self.device) == ("fp32", "contiguous", "cpu")
        require(plain or not self.kernels, "kernels", "none with another precision, layout or device", self.kernels)
        require(_is_device(self.device), "device", "'cpu', 'auto', 'cuda', 'cuda:1', 'mps' or 'xpu'", self.device)

    @property
    def place(self) -> torch.device:
        """The torch device.

        Raises:
            ConfigError: this machine does not have it.
        """
        return CPU if self.device == "cpu" else device_named(self.device)

    @property
    def stacks(self) -> bool:
        """Whether clients may be stacked: only with the default precision, layout and kernels."""
        return (self.precision, self.layout, self.kernels) == ("fp32", "contiguous", None)

    def make_ready(self) -> None:
        """Have this process compute by the chosen kernels.

        Raises:
            ConfigError: they are portable, and it cannot; or it does not have the device.
        """
        if self.kernels:
            make_portable()
        else:
            make_native()
        make_repeatable(self.place)

    def facts(self) -> dict[str, float | str]:
        """Facts about these choices on this machine, for the manifest."""
        found: dict[str, float | str] = {}
        if self.place != CPU:
            found["device"] = description(self.place)
        elif self.precision == "bf16":
            found["bf16_time_over_fp32"] = round(bf16_time_over_fp32(), 2)
        if self.kernels:
            found["kernels_answer"] = sample_answer()
        return found

    def notes(self) -> list[str]:
        """Warnings about these choices on this machine, a line each, before the first round."""
        if self.kernels and not is_known():
            return [f"run.computing.kernels is portable, which was not tried with torch {torch.__version__}"]
        times = self.facts().get("bf16_time_over_fp32")
        if not isinstance(times, float) or times < _WORTH_SAYING:
            return []
        return [
            f"run.computing.precision is bf16, and on this processor a training step in bf16 takes {times:.1f} times as"
            " long as in fp32: it pays only where there are instructions for it (AVX-512 BF16, AMX, Arm BF16)"
        ]

    @contextmanager
    def applied(self, *nets: nn.Module) -> Generator[None]:
        """Move the nets to the device and their weights to the chosen layout inside the block."""
        with placed(self.place, *nets):
            if self.layout == "contiguous":
                yield
                return
            try:
                for net in nets:
                    net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
                yield
            finally:
                for net in nets:
                    net.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]

    def cast(self) -> AbstractContextManager[Any]:
        """Around forward passes."""
        return torch.autocast(self.place.type, torch.bfloat16) if self.precision == "bf16" else nullcontext()

    def to_layout(self, inputs: Inputs) -> Inputs:
        """Inputs (batch, ...) on the device, images in the chosen layout."""
        return each(inputs, self._to_layout)

    def _to_layout(self, tensor: Tensor) -> Tensor:
        if self.layout == "channels_last" and tensor.dim() == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return moved(tensor, self.place)


@cache
def bf16_time_over_fp32() -> float:
    """The duration of a training step in bfloat16 relative to float32, on one core of this machine.

    Torch computes in bfloat16 on every processor, but some have no instructions for it. How to detect these differs
    between systems, so a convolution and a matrix product are timed, forwards and backwards.
    """
    images, kernels = torch.ones(8, 64, 16, 16), torch.ones(64, 64, 3, 3, requires_grad=True)
    weights = torch.ones(64, 64, requires_grad=True)

    def seconds(precision: Literal["fp32", "bf16"]) -> float:
        started = time.perf_counter()
        with Numerics(precision).cast():
            features = F.conv2d(images, kernels, padding=1)
            outputs = F.linear(features.permute(0, 2, 3, 1).reshape(-1, 64), weights)
        torch.autograd.grad(outputs.float().sum(), (kernels, weights))
        return time.perf_counter() - started

    tries: list[tuple[float, float]] = []
    with threads(1):
        while len(tries) < 2 or (len(tries) < 10 and sum(map(sum, tries)) < _PROBE_SECONDS):
            tries.append((seconds("bf16"), seconds("fp32")))  # alternating, since other processes use the machine too
    bf16, fp32 = (min(times) for times in zip(*tries, strict=True))
    return bf16 / fp32


def _is_device(name: str) -> bool:
    """Whether torch could have a device of this name, here or elsewhere."""
    if name == "auto":
        return True
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


PLAIN = Numerics()
_PROBE_SECONDS = 0.2
_WORTH_SAYING = 1.25  # times fp32's; a busy machine can make equal times differ by less
