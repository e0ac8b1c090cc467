"""Kernels that do not depend on what an x86 processor can do, by which torch otherwise chooses them.

Torch and MKL read environment variables when they first compute, so a program must be started with these.
"""

import os
import platform
from functools import cache

import torch
from torch import Tensor, nn
from torch.backends import cpu, mkldnn, nnpack
from torch.nn import functional as F

from potluck.core.ground.digest import digest
from potluck.core.ground.errors import ConfigError, StartAnew
from potluck.core.ground.rng import Key, isolated
from potluck.core.nets.modes import threads

ENVIRONMENT = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
KNOWN = {"2.13": "f5b5c6bccabe9c4d"}
"""By version of torch, what `sample_answer` was on the processors that were tried."""


class _Libraries:
    """Libraries that choose kernels by the processor, whatever the environment says."""

    def __init__(self) -> None:
        self._were: tuple[bool, bool] | None = None

    def leave_out(self) -> None:
        """Use none of them."""
        if self._were is None:
            self._were = mkldnn.set_flags(False)[0], nnpack.set_flags(False)[0]

    def take_back(self) -> None:
        """Use them as before."""
        if self._were is not None:
            mkldnn.set_flags(self._were[0])
            nnpack.set_flags(self._were[1])
            self._were = None


_LIBRARIES = _Libraries()


def make_native() -> None:
    """Compute by the kernels that torch and its libraries choose, as they did before portable ones were wanted."""
    _LIBRARIES.take_back()


def make_portable() -> None:
    """Compute by portable kernels from now on, in this process.

    Raises:
        StartAnew: the program was started for faster ones.
        ConfigError: this processor computes otherwise than those that were tried, or is no x86.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        raise ConfigError(f"run.computing.kernels is 'portable': expected an x86 processor, found {platform.machine()}")
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        shown = " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
        raise StartAnew(
            f"run.computing.kernels is 'portable': start Python, or `potluck join`, by: {shown} ...", ENVIRONMENT
        )
    if cpu.get_cpu_capability() != "DEFAULT":  # set by the program itself, which was too late
        raise ConfigError(f"run.computing.kernels is 'portable': set {', '.join(ENVIRONMENT)} before Python starts")
    _LIBRARIES.leave_out()
    if is_known() and (found := sample_answer()) != (known := KNOWN[_version()]):
        raise ConfigError(
            f"run.computing.kernels is 'portable', and this processor computes otherwise than those that were tried:"
            f" found {found}, expected {known}; please report it with your processor's name, and leave the setting out"
        )


def is_known() -> bool:
    """Whether portable kernels of this torch were tried."""
    return _version() in KNOWN


@cache
def sample_answer() -> str:
    """A digest of what this process computes: two steps of a small network with all usual kinds of layers."""
    with isolated(Key(("kernels",))), threads(1):
        net = _Sample()
        optimizer = torch.optim.Adam(net.parameters(), fused=True)
        images, classes = torch.randn(20, 3, 13, 13), torch.arange(20) % 10
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(net(images), classes).backward()
            optimizer.step()
    return digest(b"".join(weight.detach().numpy().tobytes() for weight in net.state_dict().values()))[:16]


class _Sample(nn.Module):
    """Convolutions, whole and by channel, norms, attention, and functions that processors have instructions for."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Sequential(
            nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
            nn.Conv2d(24, 24, 3, groups=24, stride=2), nn.GroupNorm(4, 24), nn.SiLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.attention = nn.MultiheadAttention(24, 3, batch_first=True)
        self.head = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 50), nn.GELU(), nn.Linear(50, 50), nn.Tanh())
        self.last = nn.Linear(50, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (batch, 10)."""
        tokens = self.maps(images).flatten(2).transpose(1, 2)
        seen, _ = self.attention(tokens, tokens, tokens)
        return self.last(self.head(seen.mean(1)).sigmoid() * 3)


def _version() -> str:
    return ".".join(torch.__version__.split(".")[:2])
