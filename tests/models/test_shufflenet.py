import pytest
import torch

from potluck.core.ground.errors import ConfigError
from potluck.models.contract import features
from potluck.models.shufflenet import Unit, shuffled, shufflenetv2


def outline(classes=10, shape=(3, 32, 32), **options):
    with torch.device("meta"):
        return shufflenetv2(classes, shape, **options)


# Stem 648 + 48; with half the channels h, a unit has 2 h^2 + 15 h and a halving one of i inputs 11 i + 2 i h + h^2
# + 17 h; of n channels the last convolution has 2 h n + 2 n, a class n + 1.
@pytest.mark.parametrize(
    ("size", "counts"),
    [
        (0.5, (352_042, 444_292, 546_792)),
        (1.0, (1_263_854, 1_356_104, 1_458_604)),
        (1.5, (2_488_874, 2_488_874 + 90 * 1025, 2_488_874 + 190 * 1025)),
        (2.0, (5_365_486, 5_365_486 + 90 * 2049, 5_365_486 + 190 * 2049)),
    ],
)
def test_counts(size, counts):
    nets = [outline(classes, size=size) for classes in (10, 100, 200)]
    assert tuple(sum(parameter.numel() for parameter in net.parameters()) for net in nets) == counts


# What torchvision publishes of its ShuffleNetV2s for ImageNet. Keeping the image's size changes strides only, so with
# a thousand classes the numbers are the same.
@pytest.mark.parametrize(
    ("size", "published"), [(0.5, 1_366_792), (1.0, 2_278_604), (1.5, 3_503_624), (2.0, 7_393_996)]
)
def test_counts_are_the_published_ones_for_a_thousand_classes(size, published):
    assert sum(parameter.numel() for parameter in outline(1000, size=size).parameters()) == published


def test_the_size_is_one_unless_said_and_may_be_an_integer():
    assert [outline(**options).num_features for options in ({}, {"size": 1}, {"size": 2})] == [1024, 1024, 2048]
    assert outline().stages.layer1[0].branch[0].conv.out_channels == 58


@pytest.mark.parametrize(("size", "sides"), [(32, (16, 8, 4)), (28, (14, 7, 4)), (64, (32, 16, 8))])
def test_shapes(size, sides):
    net = outline(shape=(1, size, size)).to_empty(device="cpu").eval()
    x = torch.zeros(1, 1, size, size)
    names = list(dict(net.stages.named_children()))
    shapes = {name: tuple(features(net, x, upto).shape[1:]) for upto, name in enumerate(names, start=1)}
    half, quarter, eighth = sides
    assert shapes == {
        "stem": (24, size, size),
        "layer1": (116, half, half),
        "layer2": (232, quarter, quarter),
        "layer3": (464, eighth, eighth),
        "last": (1024, eighth, eighth),
    }


def test_shuffling_takes_the_channels_of_both_maps_in_turn():
    first, second = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    mixed = shuffled(first, second)
    assert torch.equal(mixed[:, 0::2], first)
    assert torch.equal(mixed[:, 1::2], second)


def test_a_unit_keeps_the_first_half_and_transforms_the_second():
    unit, x = Unit(6).eval(), torch.randn(2, 6, 4, 4)
    h = unit(x)
    assert torch.equal(h[:, 0::2], x[:, :3])
    assert torch.equal(h[:, 1::2], unit.branch(x[:, 3:]))


@pytest.mark.parametrize("size", [0, 0.75, 3])
def test_a_size_without_widths_is_refused(size):
    with pytest.raises(ConfigError, match=rf"^size {size}; expected one of 0\.5, 1\.0, 1\.5, 2\.0$"):
        outline(size=size)
