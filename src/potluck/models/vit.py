"""Vision transformers: `vit_s8` to `vit_s12` of FedIN, `vit_ti` of FeDepth, and `vit` of any small size.

Dosovitskiy et al. ICLR 2021. https://arxiv.org/abs/2010.11929; the small widths of Touvron et al. ICML 2021.
https://arxiv.org/abs/2012.12877. A stem of patches, class token and positions, then block1 to the last, each a stage;
then a norm, whose class token the linear head reads. A deeper net appends blocks before the norm, so `vit_s12` has all
the parameters of `vit_s8`. The extractor is the stem and the first block, as FedIN cuts them.

Pre-trained weights come from the safetensors file at `pretrained_path`, under the names of these nets or of timm's
(`blocks.0.attn.qkv.weight` ...). All blocks and the last norm are loaded, and blocks beyond the net's depth are left
out. For images of another size the positions of a square grid are interpolated (bicubic, smoothed where the grid
shrinks), all but the class token's. For patches of another size their kernels are resampled, so that a patch and its
enlargement make the same token (as Beyer et al. CVPR 2023. https://arxiv.org/abs/2212.08013, for larger patches). What
still has another shape starts at random: the head of another task, patches of other channels, positions of a grid that
is not square.

A `scale` cannot make them narrower: a norm takes its mean over all channels and heads divide them, so a leading slice
of a transformer is not a narrower one. Give `width` instead.

Options:
    width: channels of every block.
    patch: side of a patch in pixels.
    depth: the number of blocks.
    heads: the number of attention heads in a block.
    pretrained_path: a safetensors file of weights to start from.
"""

import logging
import math
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Size, Tensor, nn
from torch.nn import functional as F

from potluck.core.ground.access import entered
from potluck.core.ground.errors import ConfigError
from potluck.core.nets.scale import FULL, Scale
from potluck.core.nets.weights import load, pick
from potluck.models import image_size
from potluck.models.contract import StagedNet, of_depth

log = logging.getLogger(__name__)

NORM_EPSILON = 1e-6  # of the norms, as in the papers' code; torch's own default is ten times that
SPREAD = 0.02  # standard deviation of the initial weights
TIMM = {
    "cls_token": "stages.stem.class_token",
    "pos_embed": "stages.stem.positions",
    "patch_embed.proj": "stages.stem.patches",
    "norm": "stages.norm",
    "head": "head",
}
POSITIONS, PATCHES = TIMM["pos_embed"], "stages.stem.patches.weight"
TIMM_BLOCK = {"attn.qkv": "attention.qkv", "attn.proj": "attention.out", "mlp.fc1": "mlp.wide", "mlp.fc2": "mlp.narrow"}


def _small(depth: int) -> Callable[..., StagedNet]:
    """The function that builds the ViT-S of this depth."""

    def build(
        num_classes: int,
        input_shape: tuple[int, ...],
        *,
        scale: Scale = FULL,
        width: int = 384,
        patch: int = 16,
        pretrained_path: str | None = None,
    ) -> StagedNet:
        return _vit(depth, 6, num_classes, input_shape, scale, width, patch, pretrained_path)

    build.__name__ = build.__qualname__ = f"vit_s{depth}"
    build.__doc__ = (
        f"ViT-S of {depth} blocks: six heads over `width` channels; meant for 224 x 224, `patch` 4 suits 32 x 32."
    )
    return build


def vit_ti(
    num_classes: int,
    input_shape: tuple[int, ...],
    *,
    scale: Scale = FULL,
    width: int = 192,
    patch: int = 16,
    pretrained_path: str | None = None,
) -> StagedNet:
    """ViT-Ti: 12 blocks of three heads over `width` channels; options as in `vit_s8`."""
    return _vit(12, 3, num_classes, input_shape, scale, width, patch, pretrained_path)


def vit(
    num_classes: int,
    input_shape: tuple[int, ...],
    *,
    scale: Scale = FULL,
    width: int = 64,
    patch: int = 4,
    depth: int = 6,
    heads: int = 4,
    pretrained_path: str | None = None,
) -> StagedNet:
    """A ViT for images of 28 x 28 or 32 x 32: `depth` blocks of `heads` heads over `width` channels."""
    return _vit(depth, heads, num_classes, input_shape, scale, width, patch, pretrained_path)


VARIANTS: dict[str, Callable[..., StagedNet]] = {
    **{f"vit_s{depth}": _small(depth) for depth in range(8, 13)},
    "vit_ti": vit_ti,
    "vit": vit,
}


class Stem(nn.Module):
    """Patches as tokens, behind a class token, each with its position.

    Maps (batch, channels, height, width) to (batch, 1 + patches, embedding).
    """

    def __init__(self, channels: int, width: int, patch: int, count: int) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 1 + count, width))
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens, the class token first and patches row by row."""
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        first = self.class_token.expand(tokens.shape[0], -1, -1)
        return torch.cat([first, tokens], dim=1) + self.positions


class Attention(nn.Module):
    """Every token reads from all tokens, several heads over parts of the channels; shapes stay."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (batch, tokens, width) to the same shape."""
        # (batch, tokens, 3, heads, width / heads) to three of (batch, heads, tokens, width / heads)
        query, key, value = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # Written out, since torch's fused attention cannot be stacked over networks by vmap.
        attention = (query @ key.transpose(2, 3) / query.shape[-1] ** 0.5).softmax(-1)
        return self.out((attention @ value).transpose(1, 2).flatten(2))


class AttentionBlock(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and beside a shortcut; shapes stay."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPSILON)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPSILON)
        wide, narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(OrderedDict(wide=wide, gelu=nn.GELU(), narrow=narrow))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (batch, tokens, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ClassToken(nn.Module):
    """The first token: (batch, tokens, width) to (batch, width)."""

    def forward(self, x: Tensor) -> Tensor:
        """What the head reads."""
        return x[:, 0]


def _vit(
    depth: int,
    heads: int,
    num_classes: int,
    input_shape: tuple[int, ...],
    scale: Scale,
    width: int,
    patch: int,
    pretrained_path: str | None,
) -> StagedNet:
    if scale.width != 1:
        raise ConfigError(
            f"width {scale.width:g}; expected 1: a slice of a transformer is no transformer; choose a `width`"
        )
    if depth < 1 or heads < 1:
        raise ConfigError(f"depth {depth}, heads {heads}; expected at least 1 of each")
    if FULL.of(width) % heads:
        raise ConfigError(f"width {width}; expected a multiple of the {heads} heads")
    channels, _ = image_size(input_shape)
    stages: dict[str, nn.Module] = {"stem": Stem(channels, width, patch, _patches(input_shape, patch))}
    stages |= {f"block{number}": AttentionBlock(width, heads) for number in range(1, depth + 1)}
    stages["norm"] = nn.LayerNorm(width, eps=NORM_EPSILON)
    net = StagedNet(stages, nn.Linear(width, num_classes), pool=ClassToken(), extractor_stages=2)
    _start(net)
    if pretrained_path is not None:
        _, *image = input_shape
        _pretrained(net, Path(pretrained_path), (image[0] // patch, image[1] // patch))
    return of_depth(net, scale.depth, num_classes, input_shape)


def _patches(input_shape: tuple[int, ...], patch: int) -> int:
    _, height, width = input_shape
    if patch < 1 or height % patch or width % patch:
        raise ConfigError(f"patch {patch}; expected a divisor of both sides of the image, {height} x {width}")
    return (height // patch) * (width // patch)


def _start(net: StagedNet) -> None:
    """Weights drawn from a narrow normal, biases at zero; the convolution of the patches starts as torch has it."""
    for name, parameter in net.named_parameters():
        if name.endswith(("class_token", "positions")):
            nn.init.trunc_normal_(parameter, std=SPREAD)
    for module in net.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=SPREAD)
            nn.init.zeros_(module.bias)


def _pretrained(net: StagedNet, path: Path, grid: tuple[int, int]) -> StagedNet:
    """The net with the tensors of a file: all blocks and the last norm, stem and head where their shapes can be met.

    Args:
        net: filled in place.
        path: of the file.
        grid: rows and columns of the net's patches.

    Raises:
        ConfigError: the file cannot be read, or lacks a tensor of a block or of the last norm.
    """
    try:
        found = load_file(entered(path))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"pretrained_path: {path}: {error}; expected a safetensors file") from error
    shapes = {name: tensor.shape for name, tensor in net.state_dict().items()}
    named = {_own_name(name): tensor for name, tensor in found.items()}
    if POSITIONS in named:
        named[POSITIONS] = _interpolated(named[POSITIONS], grid)
    if PATCHES in named:
        named[PATCHES] = _resampled(named[PATCHES], shapes[PATCHES])
    fitting = pick(named, shapes)
    afresh = [name for name in shapes if name not in fitting]
    lacking = [name for name in afresh if not name.startswith(("stages.stem.", "head."))]
    if lacking:
        raise ConfigError(
            f"pretrained_path: {path}: {len(lacking)} of the {len(shapes)} tensors of this net are missing or of"
            f" another shape, such as {lacking[0]}; expected all blocks and the last norm, named as here or by timm"
        )
    log.info("%s: loaded %d of %d tensors; afresh: %s", path, len(fitting), len(shapes), ", ".join(afresh) or "none")
    load(net, fitting, partial=True)
    return net


def _interpolated(positions: Tensor, grid: tuple[int, int]) -> Tensor:
    """Positions (1, 1 + patches, width) for another grid; as they are if they fit, or are not those of a square."""
    if positions.dim() != 3 or positions.shape[1] in (0, 1, 1 + math.prod(grid)):
        return positions
    first, patches = positions[:, :1], positions[:, 1:]
    side = math.isqrt(patches.shape[1])
    if side**2 != patches.shape[1]:
        return positions
    image = patches.float().unflatten(1, (side, side)).permute(0, 3, 1, 2)  # (1, width, rows, columns)
    image = F.interpolate(image, grid, mode="bicubic", antialias=True)
    return torch.cat([first, image.flatten(2).transpose(1, 2).to(first.dtype)], dim=1)


def _resampled(kernels: Tensor, shape: Size) -> Tensor:
    """The patches' kernels (width, channels, side, side) for another side: a patch and its enlargement make one token.

    With B, which enlarges a flattened patch, smaller kernels are B^T w, and larger ones the v of least norm with
    B^T v = w.
    """
    side, wanted = kernels.shape[2:], shape[2:]
    if kernels.dim() != 4 or side == wanted:
        return kernels
    small, large = sorted([side, wanted])
    pixels = torch.eye(small.numel(), dtype=torch.float64, device=kernels.device).view(
        -1, 1, *small
    )  # each as an image of its own
    enlarging = F.interpolate(pixels, large, mode="bicubic", antialias=True).flatten(1)  # B^T, (small, large)
    onto = torch.linalg.pinv(enlarging) if wanted == large else enlarging
    return (kernels.double().flatten(2) @ onto.T).unflatten(2, wanted).to(kernels.dtype)


def _own_name(name: str) -> str:
    """The name that a tensor of timm's has in these nets; any other name as it is."""
    if block := re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name):
        number, part, kind = block.groups()
        return f"stages.block{int(number) + 1}.{TIMM_BLOCK.get(part, part)}.{kind}"
    layer, _, kind = name.rpartition(".")
    return f"{TIMM[layer]}.{kind}" if layer in TIMM else TIMM.get(name, name)
