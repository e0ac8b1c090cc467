"""How alike two images are: MSE, PSNR, SSIM and LPIPS. Images are (n, channels, height, width), in [0, 1]."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck.core.ground.errors import ConfigError
from potluck.core.nets.modes import mode
from potluck.core.nets.weights import load
from potluck.models.initial import tensors_in

WINDOW, SPREAD = 11, 1.5
"""Of SSIM: the window's width, and its Gaussian's deviation (Wang, Bovik, Sheikh, Simoncelli. IEEE TIP 2004)."""

_C1, _C2 = 0.01**2, 0.03**2
_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
_TINY = 1e-10
_SMALLEST = 64  # pixels a side, below which AlexNet's last maps would be too small
_CONVOLUTIONS = ((3, 64, 11, 4, 2), (64, 192, 5, 1, 2), (192, 384, 3, 1, 1), (384, 256, 3, 1, 1), (256, 256, 3, 1, 1))
_POOLED = (1, 2)  # convolutions in front of which the maps are halved


def mse(one: Tensor, other: Tensor) -> Tensor:
    """Mean squared error of each pair (n,)."""
    return (one - other).square().flatten(1).mean(1)


def psnr(one: Tensor, other: Tensor) -> Tensor:
    """Peak signal to noise in decibels (n,); infinite for equal images."""
    return -10 * mse(one, other).log10()


def ssim(one: Tensor, other: Tensor) -> Tensor:
    """Structural similarity (n,), mean over positions and channels; 1 for equal images.

    The window is a Gaussian of deviation 1.5, eleven pixels wide; only positions at which it lies within the image
    count, as in the authors' code. In a smaller image it is as wide as an odd number of pixels can be.
    """
    side = min(WINDOW, *one.shape[2:])
    side -= 1 - side % 2
    line = torch.exp(-((torch.arange(side) - side // 2).double() ** 2) / (2 * SPREAD**2))
    window = torch.outer(line, line) / line.sum() ** 2
    channels = one.shape[1]
    kernel = window.expand(channels, 1, side, side)

    def blurred(x: Tensor) -> Tensor:
        return F.conv2d(x, kernel, groups=channels)

    a, b = one.double(), other.double()
    mean_a, mean_b = blurred(a), blurred(b)
    var_a, var_b = blurred(a * a) - mean_a**2, blurred(b * b) - mean_b**2
    both = blurred(a * b) - mean_a * mean_b
    found = (2 * mean_a * mean_b + _C1) * (2 * both + _C2)
    return (found / ((mean_a**2 + mean_b**2 + _C1) * (var_a + var_b + _C2))).mean((1, 2, 3)).to(one.dtype)


class Lpips(nn.Module):
    """LPIPS 0.1 on AlexNet (Zhang, Isola, Efros, Shechtman, Wang. CVPR 2018): smaller is more alike.

    Channels of five maps are brought to length one; squared differences, weighed by channel, are averaged over
    positions and summed. Grey images count as three equal channels; images below 64 pixels are enlarged.

    Attributes:
        name: what to call the number, which with random weights is another one than what is published.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name = "LPIPS-rand"
        drawn = torch.Generator().manual_seed(0)
        layers: list[nn.Conv2d] = []
        self.weights = nn.ParameterList()
        for inputs, outputs, size, stride, padding in _CONVOLUTIONS:
            layer = nn.Conv2d(inputs, outputs, size, stride, padding, device="meta").to_empty(device="cpu")
            scale = (2 / (inputs * size**2)) ** 0.5
            layer.weight.data = torch.randn(outputs, inputs, size, size, generator=drawn) * scale
            nn.init.zeros_(layer.get_parameter("bias"))
            layers.append(layer)
            self.weights.append(torch.ones(outputs))
        self.convolutions = nn.ModuleList(layers)
        self.requires_grad_(False)

    @classmethod
    def of_file(cls, path: Path) -> "Lpips":
        """With the weights of a file: what `torch.save(lpips.LPIPS(net="alex").state_dict(), path)` writes.

        Raises:
            ConfigError: it cannot be read, or lacks a tensor or has one of another shape.
        """
        found, made = tensors_in(str(path)), cls()
        layers = (0, 3, 6, 8, 10)  # among AlexNet's
        wanted = {
            f"convolutions.{place}.{kind}": f"net.slice{place + 1}.{layer}.{kind}"
            for place, layer in enumerate(layers)
            for kind in ("weight", "bias")
        } | {f"weights.{place}": f"lin{place}.model.1.weight" for place in range(len(layers))}
        load(made, {own: _tensor(found, name, made.get_parameter(own), path) for own, name in wanted.items()})
        made.name = "LPIPS"
        return made

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        """The distance of each pair (n,)."""
        with mode(self, training=False), torch.no_grad():
            pairs = zip(self._maps(one), self._maps(other), self.weights, strict=True)
            steps = [((a - b).square() * weight[:, None, None]).sum(1).mean((1, 2)) for a, b, weight in pairs]
            return torch.stack(steps).sum(0)

    def _maps(self, images: Tensor) -> list[Tensor]:
        x = images.float().expand(-1, 3, -1, -1) if images.shape[1] == 1 else images.float()
        if (least := min(x.shape[2:])) < _SMALLEST:
            size = [round(side * _SMALLEST / least) for side in x.shape[2:]]
            x = F.interpolate(x, size, mode="bilinear", align_corners=False)
        shift, scale = (torch.tensor(values)[:, None, None] for values in (_SHIFT, _SCALE))
        x, found = (2 * x - 1 - shift) / scale, list[Tensor]()
        for place, layer in enumerate(self.convolutions):
            x = layer(F.max_pool2d(x, 3, 2) if place in _POOLED else x).relu()
            found.append(x / (x.square().sum(1, keepdim=True).sqrt() + _TINY))
        return found


def _tensor(found: Mapping[str, Tensor], name: str, like: Tensor, path: Path) -> Tensor:
    """One tensor of the file, in the shape that it has here."""
    if name not in found or found[name].numel() != like.numel():
        has = f"the shape {tuple(found[name].shape)}" if name in found else "nothing"
        raise ConfigError(
            f"{path}: {name}: found {has}; expected {like.numel()} numbers: the state dict of lpips.LPIPS(net='alex')"
        )
    return found[name].view(like.shape)
