import pytest
import torch

from potluck.models.contract import features
from potluck.models.preresnet import PreActivationBlock, preresnet18


def outline(channels=3, **options):
    with torch.device("meta"):
        return preresnet18(10, (channels, 32, 32), **options)


# HeteroFL's five levels for CIFAR-10, computed from its released model.
@pytest.mark.parametrize(
    ("rate", "count"),
    [(1.0, 11_172_170), (1 / 2, 2_796_714), (1 / 4, 701_018), (1 / 8, 176_178), (1 / 16, 44_510)],
)
def test_counts(rate, count):
    assert sum(parameter.numel() for parameter in outline(rate=rate).parameters()) == count


def test_one_channel_saves_two_thirds_of_the_stem():
    assert sum(parameter.numel() for parameter in outline(channels=1).parameters()) == 11_172_170 - 2 * 64 * 3 * 3


def test_shapes():
    net = outline()
    # Uninitialised storage is enough for shapes, and a forward on the meta device is slow the first time.
    x, net = torch.zeros(1, 3, 32, 32), net.to_empty(device="cpu").eval()
    names = list(dict(net.stages.named_children()))
    shapes = {name: tuple(features(net, x, upto).shape[1:]) for upto, name in enumerate(names, start=1)}
    assert shapes == {
        "stem": (64, 32, 32),
        "layer1": (64, 32, 32),
        "layer2": (128, 16, 16),
        "layer3": (256, 8, 8),
        "layer4": (512, 4, 4),
        "norm": (512, 4, 4),
    }


def test_identity_carries_the_raw_input():
    block = PreActivationBlock(4, 4).eval()
    torch.nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 4, 6, 6)
    assert torch.equal(block(x), x)


def test_projection_reads_the_activated_input():
    block = PreActivationBlock(4, 8, stride=2).eval()
    torch.nn.init.zeros_(block.conv2.weight)
    assert not block(-torch.rand(2, 4, 6, 6)).any()
    assert block(torch.rand(2, 4, 6, 6)).any()


def test_only_norms_and_head_have_biases():
    biases = {key for key, _ in outline().named_parameters() if key.endswith("bias")}
    assert all("norm" in key or key == "head.bias" for key in biases)


def test_the_head_reads_a_rectified_norm():
    net = preresnet18(10, (1, 8, 8), width=2)
    h = features(net, torch.randn(8, 1, 8, 8), len(net.stages))
    assert h.min() == 0
    assert h.max() > 0
