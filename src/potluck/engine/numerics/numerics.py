"""How networks are computed: precision, memory layout, kernels. Every choice changes last bits, so a run records it."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck.core.fields import Checked
from potluck.core.modes import threads
from potluck.core.tree import Tree
from potluck.engine.numerics.folding import folded


@dataclass(frozen=True)
class Numerics(Checked):
    """A run's choices, the same on every machine; the defaults are the plain ones.

    Attributes:
        precision: "fp32", or "bf16": convolutions and matrix products in bfloat16, everything else, with the weights
            and what crosses the wire, in float32.
        layout: of images and convolutions' weights in memory, "contiguous" or "channels_last".
        convolutions: torch's own ("library"), or one matrix product where many channels meet small maps ("by_shape").
        evaluation: of models as they are ("plain"), or with BatchNorm folded into the convolutions ("folded").
        states: what clients keep between rounds, as it is ("fp32"), or its float32 tensors in half the bytes ("bf16").
    """

    precision: Literal["fp32", "bf16"] = "fp32"
    layout: Literal["contiguous", "channels_last"] = "contiguous"
    convolutions: Literal["library", "by_shape"] = "library"
    evaluation: Literal["plain", "folded"] = "plain"
    states: Literal["fp32", "bf16"] = "fp32"

    @property
    def trains_plainly(self) -> bool:
        """Whether the choices that training depends on are the plain ones."""
        return (self.precision, self.layout, self.convolutions) == ("fp32", "contiguous", "library")

    def facts(self) -> dict[str, float]:
        """What was measured of the choices on this machine, for the manifest."""
        return {"bf16_time_over_fp32": round(bf16_time_over_fp32(), 2)} if self.precision == "bf16" else {}

    def notes(self) -> list[str]:
        """What to know of the choices on this machine before they are paid for, a line each."""
        times = self.facts().get("bf16_time_over_fp32", 0.0)
        if times < _WORTH_SAYING:
            return []
        return [
            f"run.computing.precision is bf16, and on this processor a training step in bf16 takes {times:.1f} times as"
            " long as in fp32: it pays only where there are instructions for it (AVX-512 BF16, AMX, Arm BF16)"
        ]

    @contextmanager
    def arranged(self, net: nn.Module) -> Generator[None]:
        """Inside, the net's weights lie and its convolutions run as chosen; afterwards as before."""
        swapped = _plain_convolutions(net) if self.convolutions == "by_shape" else []
        try:
            for convolution in swapped:
                convolution.forward = _ByShape(convolution)
            if self.layout == "channels_last":
                net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
            yield
        finally:
            for convolution in swapped:
                del convolution.forward  # the class's own is found again
            if self.layout == "channels_last":
                net.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]

    def cast(self) -> torch.autocast:
        """Around forward passes."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16")

    def laid_out(self, inputs: Tensor) -> Tensor:
        """Inputs (batch, ...), images in the chosen layout."""
        if self.layout == "channels_last" and inputs.dim() == 4:
            return inputs.contiguous(memory_format=torch.channels_last)
        return inputs

    def evaluated(self, net: nn.Module, examples: int) -> nn.Module:
        """The net that says what `net` says of so many examples; itself, if preparing another is not worth it."""
        return folded(net) if self.evaluation == "folded" and examples >= _WORTH_FOLDING else net

    def kept(self, record: Tree) -> Tree:
        """What a client keeps, as it is stored."""
        return _converted(record, torch.float32, torch.bfloat16) if self.states == "bf16" else record

    def taken_up(self, record: Tree) -> Tree:
        """What a client kept, from what was stored."""
        return _converted(record, torch.bfloat16, torch.float32) if self.states == "bf16" else record


@cache
def bf16_time_over_fp32() -> float:
    """How many times as long a training step takes on one core of this machine in bfloat16 as in float32.

    Torch computes in bfloat16 on every processor, some of which have no instructions for it. Flags for those differ
    from system to system, so a convolution and a matrix product are timed, forwards and backwards.
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
            tries.append((seconds("bf16"), seconds("fp32")))  # by turns: others use the machine, too
    bf16, fp32 = (min(times) for times in zip(*tries, strict=True))
    return bf16 / fp32


PLAIN = Numerics()
_PROBE_SECONDS = 0.2
_WORTH_SAYING = 1.25  # times fp32's; below lies what a busy machine makes of equal times
_WORTH_FOLDING = 500  # examples; looking through a net takes some ten milliseconds


def _converted(tree: Tree, of: torch.dtype, to: torch.dtype) -> Tree:
    """The tree with its tensors of one type in another."""
    if isinstance(tree, Tensor):
        return tree.to(to) if tree.dtype == of else tree
    if isinstance(tree, dict):
        return {key: _converted(child, of, to) for key, child in tree.items()}
    return type(tree)(_converted(child, of, to) for child in tree) if isinstance(tree, (list, tuple)) else tree


class _ByShape:
    """A convolution's forward pass that takes one of two ways by a fixed rule."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        self._convolution = convolution

    def __call__(self, input: Tensor) -> Tensor:
        """Images (batch, channels, height, width) to what the convolution makes of them."""
        conv = self._convolution
        way = as_product if is_small(input.shape[1], input.shape[2], conv.stride[0]) else F.conv2d
        return way(input, conv.weight, conv.bias, conv.stride, conv.padding)


def is_small(channels: int, side: int, stride: int) -> bool:
    """Whether a product is taken: many channels on maps of few pixels, where weights are most of the traffic."""
    return channels >= 128 and (side <= 4 or (stride == 2 and side <= 8))


def as_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, ...], padding: str | tuple[int, ...]
) -> Tensor:
    """A convolution of images (batch, channels, height, width) as one matrix product.

    Every position's patch is a row, its channels innermost; so they lie in the result's memory too, and so the
    weights are best laid out, which are copied otherwise.
    """
    assert not isinstance(padding, str)
    outputs, _, *kernel = weight.shape
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    rows = _Patches.apply(padded.permute(0, 2, 3, 1), tuple(kernel), stride)
    out = F.linear(rows.flatten(3), weight.permute(0, 2, 3, 1).reshape(outputs, -1), bias)
    return out.permute(0, 3, 1, 2)


class _Patches(torch.autograd.Function):
    """The patches that a convolution reads; autograd's own way back through `unfold` takes several times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: tuple[int, int], stride: tuple[int, int]) -> Tensor:
        """Padded images (batch, height, width, channels) to (batch, rows, columns, *kernel, channels)."""
        ctx.shape, ctx.kernel, ctx.stride = x.shape, kernel, stride
        patches = x.unfold(1, kernel[0], stride[0]).unfold(2, kernel[1], stride[1])
        return patches.permute(0, 1, 2, 4, 5, 3).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Every pixel's gradients from all patches that it is in, summed."""
        found = gradients[0].new_zeros(ctx.shape)
        (down, right), (_, rows, columns) = ctx.stride, gradients[0].shape[:3]
        for i in range(ctx.kernel[0]):
            for j in range(ctx.kernel[1]):
                found[:, i : i + down * rows : down, j : j + right * columns : right] += gradients[0][:, :, :, i, j]
        return found, None, None


def _plain_convolutions(net: nn.Module) -> list[nn.Conv2d]:
    """The convolutions of images that a product can stand for."""
    return [
        module
        for module in net.modules()
        if type(module) is nn.Conv2d
        and module.groups == 1
        and module.dilation == (1, 1)
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    ]
