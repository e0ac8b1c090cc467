"""Folded networks say what they said, with fewer layers; what cannot be folded stays."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from potluck.core.batchnorm import batch_norms
from potluck.engine.numerics.folding import folded
from potluck.models import get_model

IMAGES = (3, 32, 32)


class TwoReaders(nn.Module):
    """The convolution's output is read by a norm and by the sum."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x):
        h = self.conv(x)
        return h + self.norm(h)


class Twice(TwoReaders):
    """The same two layers in turn, twice."""

    def forward(self, x):
        return self.norm(self.conv(self.norm(self.conv(x))))


class Untraceable(TwoReaders):
    def forward(self, x):
        return self.norm(self.conv(x)) if x.sum() > 0 else x


def lived_in(net):
    """Statistics and affine parameters that are not the identity, in double precision."""
    draws = torch.Generator().manual_seed(0)
    net.double()
    for layer in batch_norms(net).values():
        for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
            if tensor is not None:
                tensor.data = torch.rand(tensor.shape, generator=draws, dtype=torch.float64) + 0.5
    return net


def outputs(net):
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        return net.eval()(torch.randn(4, *IMAGES, generator=draws, dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "left"),
    [("resnet14", 0), ("resnet20", 0), ("mobilenetv2", 0), ("cnn4", 0), ("preresnet20", 10), ("vit_s8", 0)],
)
def test_a_folded_network_says_the_same(name, left):
    net = lived_in(get_model(name)(10, IMAGES))
    before = outputs(net)
    net.train()
    found = folded(net)
    assert all(module.training for module in net.modules())
    assert len(batch_norms(found)) == left
    assert_close(outputs(found), before, rtol=1e-10, atol=1e-10)
    assert_close(outputs(net), before, rtol=0, atol=0)


@pytest.mark.parametrize("build", [TwoReaders, Twice, Untraceable])
def test_what_cannot_be_folded_comes_back_itself(build):
    net = lived_in(build())
    assert folded(net) is net


def test_norms_without_running_statistics_stay():
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False))
    assert folded(net) is net
