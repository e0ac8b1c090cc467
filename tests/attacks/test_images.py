"""Measures of images against slow loops that are written from the papers."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from potluck.attacks.images import Lpips, mse, psnr, ssim
from potluck.core.ground.errors import ConfigError


def images(seed, *shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def slow_ssim(a, b, width):
    """Wang et al. 2004, eq. 13 with the weighted statistics of eq. 14 to 16, window by window."""
    reach = width // 2
    g = np.array(
        [[math.exp(-(y * y + x * x) / 4.5) for x in range(-reach, reach + 1)] for y in range(-reach, reach + 1)]
    )
    g /= g.sum()
    values = []
    for c in range(a.shape[0]):
        for top in range(a.shape[1] - width + 1):
            for left in range(a.shape[2] - width + 1):
                x = a[c, top : top + width, left : left + width]
                y = b[c, top : top + width, left : left + width]
                mx, my = (g * x).sum(), (g * y).sum()
                sx, sy = (g * (x - mx) ** 2).sum(), (g * (y - my) ** 2).sum()
                sxy = (g * (x - mx) * (y - my)).sum()
                values.append((2 * mx * my + 1e-4) * (2 * sxy + 9e-4) / ((mx**2 + my**2 + 1e-4) * (sx + sy + 9e-4)))
    return float(np.mean(values))


@pytest.mark.parametrize(("shape", "width"), [((3, 1, 14, 12), 11), ((2, 3, 8, 8), 7), ((2, 1, 5, 20), 5)])
def test_ssim_is_that_of_the_paper_window_by_window(shape, width):
    a = images(0, *shape)
    b = (a + 0.2 * images(1, *shape)).clamp(0, 1)
    expected = [slow_ssim(x, y, width) for x, y in zip(a.double().numpy(), b.double().numpy(), strict=True)]
    assert ssim(a, b).tolist() == pytest.approx(expected, abs=1e-6)
    assert ssim(a, a).tolist() == pytest.approx([1.0] * shape[0])


def test_mse_and_psnr():
    a, b = torch.zeros(2, 1, 4, 4), torch.full((2, 1, 4, 4), 0.1)
    assert mse(a, b).tolist() == pytest.approx([0.01, 0.01])
    assert psnr(a, b).tolist() == pytest.approx([20.0, 20.0], rel=1e-5)
    assert psnr(a, a).tolist() == [math.inf] * 2


def written(trunk):
    """The state dict of the package lpips for these convolutions and weights of channels."""
    places = (("slice1", 0), ("slice2", 3), ("slice3", 6), ("slice4", 8), ("slice5", 10))
    found = {"scaling_layer.shift": torch.zeros(1, 3, 1, 1)}
    for at, (name, number) in enumerate(places):
        found[f"net.{name}.{number}.weight"] = trunk.convolutions[at].weight
        found[f"net.{name}.{number}.bias"] = trunk.convolutions[at].bias + 0.01
        found[f"lin{at}.model.1.weight"] = (trunk.weights[at] * (at + 1))[None, :, None, None]
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def slow_lpips(state, one, other):
    """Zhang et al. 2018, eq. 1, position by position, for one pair of colour images of 64 pixels."""
    shift, scale = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])

    def maps(image):
        x = ((2 * image - 1 - shift[:, None, None]) / scale[:, None, None])[None]
        taps = []
        for name, number, stride, padding, pooled in (
            ("slice1", 0, 4, 2, False),
            ("slice2", 3, 1, 2, True),
            ("slice3", 6, 1, 1, True),
            ("slice4", 8, 1, 1, False),
            ("slice5", 10, 1, 1, False),
        ):
            x = F.max_pool2d(x, kernel_size=3, stride=2) if pooled else x
            weight, bias = state[f"net.{name}.{number}.weight"], state[f"net.{name}.{number}.bias"]
            x = F.relu(F.conv2d(x, weight, bias, stride, padding))
            taps.append(x[0].double())
        return taps

    total = 0.0
    for at, (a, b) in enumerate(zip(maps(one), maps(other), strict=True)):
        weight = state[f"lin{at}.model.1.weight"].flatten().double()
        _, height, width = a.shape
        for y in range(height):
            for x in range(width):
                u, v = a[:, y, x], b[:, y, x]
                gap = u / (u.norm() + 1e-10) - v / (v.norm() + 1e-10)
                total += float((weight * gap**2).sum()) / (height * width)
    return total


def test_lpips_is_that_of_the_paper_with_the_packages_file(tmp_path):
    state = written(Lpips())
    torch.save(state, tmp_path / "lpips.pth")
    measure = Lpips.of_file(tmp_path / "lpips.pth")
    one, other = images(0, 1, 3, 64, 64), images(1, 1, 3, 64, 64)
    assert measure.name == "LPIPS"
    assert measure(one, other).tolist() == pytest.approx([slow_lpips(state, one[0], other[0])], rel=1e-4)


def test_lpips_without_a_file_has_another_name_is_the_same_each_time_and_takes_small_grey_images():
    one, other = images(0, 2, 1, 8, 8), images(1, 2, 1, 8, 8)
    assert Lpips().name == "LPIPS-rand"
    assert Lpips()(one, other).tolist() == Lpips()(one, other).tolist()
    assert Lpips()(one, one).tolist() == [0.0, 0.0]
    assert bool((Lpips()(one, other) > Lpips()(one, 0.9 * one + 0.1 * other)).all())


def test_a_file_that_lacks_a_tensor_of_lpips_is_refused(tmp_path):
    state = written(Lpips())
    del state["lin3.model.1.weight"]
    torch.save(state, tmp_path / "lpips.pth")
    with pytest.raises(ConfigError, match=r"lin3\.model\.1\.weight: found nothing; expected 256 numbers"):
        Lpips.of_file(tmp_path / "lpips.pth")
