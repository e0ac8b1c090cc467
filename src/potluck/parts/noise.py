"""Noise instead of data: batches of inputs for a server that has none.

Baradad Jurjo, Wulff, Wang, Isola, Torralba. NeurIPS 2021. https://arxiv.org/abs/2106.05963, for the image-like kinds.

Nothing is stored: each batch is drawn on demand, so an epoch of any length takes the memory of one batch and no noise
is used twice. The image-like kinds lie in [0, 1] when drawn and are then standardised per channel over the batch, in
place of the task's mean and deviation, which a server without data does not know.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from potluck.core.ground.errors import ConfigError
from potluck.core.requests.examples import Examples

Noise = Literal["gaussian", "dead_leaves", "stylegan"]
Shape = tuple[int, ...]

RADII = torch.linspace(0.03, 1.0, 200)  # of leaves, as shares of the image's size
LEAVES_AT_ONCE = 16
STYLE, CHANNELS = 64, 32  # of the generator: width of a style, and of its hidden layers


def noise_examples(kind: Noise, count: int, shape: Shape) -> Examples:
    """`count` inputs of noise of this `shape` to train on; their targets are empty.

    Args:
        kind: "gaussian" is N(0, 1) in every entry of an input of any shape. "dead_leaves" covers an image with
            random shapes of random colours. "stylegan" is what a small untrained generator in the manner of StyleGAN
            makes; it is not the network of that name.
        count: inputs an epoch.
        shape: of one input; (channels, height, width) for the image-like kinds.

    Raises:
        ConfigError: the kind makes images and `shape` is not an image's.
    """
    if kind != "gaussian" and len(shape) != 3:
        raise ConfigError(f"noise {kind!r} makes images; expected inputs (channels, height, width), found {shape}")
    nothing = torch.empty(count, 0)
    return Examples(nothing, nothing, _Drawn(kind, shape))


@dataclass(frozen=True)
class _Drawn:
    """A preprocessing that replaces a batch by noise of its size, drawn from the training step's generator."""

    kind: Noise
    shape: Shape

    def __call__(self, inputs: Tensor, rng: torch.Generator | None) -> Tensor:
        return _KINDS[self.kind](len(inputs), self.shape, rng)


def gaussian(count: int, shape: Shape, rng: torch.Generator | None) -> Tensor:
    """Independent N(0, 1), like standardised inputs."""
    return torch.randn(count, *shape, generator=rng)


def dead_leaves(count: int, shape: Shape, rng: torch.Generator | None) -> Tensor:
    """Images (count, channels, height, width) fully covered by leaves, standardised."""
    channels, height, width = shape
    images = torch.full((count, channels, height, width), torch.nan)
    image, y, x = torch.ones(count, height, width).nonzero().unbind(1)  # of the pixels that are still open
    # From the front to the back: a pixel belongs to the first leaf that covers it; only open pixels are asked about.
    # This is the dead leaves model, leaves falling forever (Kendall and Thoennes 1999). The published code paints leaf
    # over leaf and stops when nothing shows through, a moment that depends on the picture and follows large leaves: the
    # largest leaf then has 24 % of an image of 32 x 32, here 15 % (means of 400 images, standard errors 1.1 and 0.5).
    while len(image):
        leaves = draw_leaves(count, height, width, rng)
        colours = torch.rand(count, LEAVES_AT_ONCE, channels, generator=rng)
        covered = leaves.cover(image, y, x)
        hit, first = covered.any(1), covered.int().argmax(1)
        images[image[hit], :, y[hit], x[hit]] = colours[image[hit], first[hit]]
        image, y, x = image[~hit], y[~hit], x[~hit]
    return standardised(images)


@dataclass(frozen=True)
class Leaves:
    """Some leaves for each image: discs, cut by four half-planes.

    Attributes:
        centre: row and column, (images, leaves, 2).
        radius: of the circle around the leaf, (images, leaves).
        corners: ascending angles of the four corners on that circle, (images, leaves, 4); two may coincide.
        round: whether the leaf is the whole disc, (images, leaves).
    """

    centre: Tensor
    radius: Tensor
    corners: Tensor
    round: Tensor

    def cover(self, image: Tensor, y: Tensor, x: Tensor) -> Tensor:
        """Which leaves of its own image cover each pixel: bool (pixels, leaves)."""
        down = y[:, None] - self.centre[image, :, 0]
        right = x[:, None] - self.centre[image, :, 1]
        inside = down.square() + right.square() <= self.radius[image].square()
        following = torch.cat([self.corners[..., 1:], self.corners[..., :1] + 2 * math.pi], -1)
        middle, half = (self.corners + following) / 2, (following - self.corners) / 2
        # A side lies at the cosine of half the angle it spans; at the whole radius it cuts nothing off.
        reach = self.radius[..., None] * torch.where(self.round[..., None], 1.0, half.cos())
        for side in range(4):
            along = right * middle.cos()[image, :, side] + down * middle.sin()[image, :, side]
            inside &= along <= reach[image, :, side] + 1e-4  # corners that fall on a pixel are in
        return inside


def draw_leaves(count: int, height: int, width: int, rng: torch.Generator | None) -> Leaves:
    """Leaves of six kinds, as many of each; the density of their radii falls as 1 / r^3 - 1."""
    number = count * LEAVES_AT_ONCE
    uniform = partial(torch.rand, generator=rng)
    drawn = torch.multinomial(RADII**-3 - 1, number, replacement=True, generator=rng)
    centres = [torch.randint(side, (number,), generator=rng) for side in (height, width)]
    turns = torch.arange(4) * math.pi / 2
    corner = uniform(number, 1) * math.pi / 2  # of a rectangle, as seen from its centre
    three = (uniform(number, 3) * 2 * math.pi).sort().values
    corners = torch.stack(
        [
            (turns + math.pi / 4).expand(number, 4),  # the disc, whose corners cut nothing off
            (turns + math.pi / 4).expand(number, 4),  # an upright square
            uniform(number, 1) * math.pi / 2 + turns,  # a turned square
            torch.cat([corner, math.pi - corner, math.pi + corner, 2 * math.pi - corner], 1),
            torch.cat([three, three[:, -1:]], 1),  # a triangle
            (uniform(number, 4) * 2 * math.pi).sort().values,
        ]
    )
    kind = torch.randint(len(corners), (number,), generator=rng)
    each = (count, LEAVES_AT_ONCE)
    return Leaves(
        centre=torch.stack(centres, 1).float().view(*each, 2),
        radius=(RADII[drawn] * max(height, width)).clamp(min=1).view(each),
        corners=corners[kind, torch.arange(number)].view(*each, 4),
        round=(kind == 0).view(each),
    )


def stylegan_like(count: int, shape: Shape, rng: torch.Generator | None) -> Tensor:
    """Images (count, channels, height, width) of an untrained generator, standardised.

    A constant of four by four pixels is doubled in size and convolved until it is large enough; every image has its
    own styles, which scale the channels that a convolution reads. The weights are drawn anew for every batch.
    """
    channels, height, width = shape
    doublings = max(0, math.ceil(math.log2(max(height, width) / 4)))
    h = torch.randn(1, CHANNELS, 4, 4, generator=rng).expand(count, -1, -1, -1)
    for _ in range(doublings):
        h = F.interpolate(h, scale_factor=2, mode="bilinear", align_corners=False)
        h = _styled(h, CHANNELS, rng)
        h = h + 0.1 * torch.randn(count, 1, *h.shape[2:], generator=rng)
        h = F.leaky_relu(h, 0.2)
    return standardised(_coloured(_styled(h, channels, rng)[..., :height, :width], rng))


def _styled(h: Tensor, outputs: int, rng: torch.Generator | None) -> Tensor:
    """A random convolution to `outputs` channels whose inputs each image weighs by a style of its own."""
    inputs = h.shape[1]
    latent = F.leaky_relu(torch.randn(len(h), STYLE, generator=rng), 0.2)
    style = 1 + latent @ torch.randn(STYLE, inputs, generator=rng) / math.sqrt(STYLE)
    kernel = torch.randn(outputs, inputs, 3, 3, generator=rng)
    # StyleGAN2's demodulation: whatever the style, outputs keep their scale.
    scale = (style.square() @ kernel.square().sum((2, 3)).T).rsqrt()
    return F.conv2d(h * style[..., None, None], kernel, padding=1) * scale[..., None, None]


def _coloured(images: Tensor, rng: torch.Generator | None) -> Tensor:
    """Each channel of each image with a mean and a deviation as photographs have them, within [0, 1]."""
    count, channels = images.shape[:2]
    mean = 0.45 + 0.15 * torch.randn(count, channels, 1, 1, generator=rng)
    deviation = 0.215 + 0.065 * torch.randn(count, channels, 1, 1, generator=rng)
    plain = (images - images.mean((2, 3), keepdim=True)) / (images.std((2, 3), keepdim=True) + 1e-6)
    return (plain * deviation + mean).clamp(0, 1)


def standardised(images: Tensor) -> Tensor:
    """Mean 0 and deviation 1 for each channel over the batch."""
    axes = (0, 2, 3)
    return (images - images.mean(axes, keepdim=True)) / (images.std(axes, keepdim=True) + 1e-6)


_KINDS: dict[Noise, Callable[[int, Shape, torch.Generator | None], Tensor]] = {
    "gaussian": gaussian,
    "dead_leaves": dead_leaves,
    "stylegan": stylegan_like,
}
