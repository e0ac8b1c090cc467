import itertools
import math

import pytest
import torch

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import fold_in, isolated
from potluck.models.cifar_resnet import VARIANTS, SubsampleAndPad
from potluck.models.contract import features


def outline(name, classes=10, channels=3, **options):
    with torch.device("meta"):
        return VARIANTS[name](classes, (channels, 32, 32), **options)


def parameter_count(net):
    return sum(parameter.numel() for parameter in net.parameters())


# He et al. print 0.27, 0.46, 0.85 and 1.7 M. A class more has 65 parameters; "B" adds 16 * 32 + 64 and 32 * 64 + 128.
@pytest.mark.parametrize(
    ("name", "shortcut", "counts"),
    [
        ("resnet20", "A", (269_722, 275_572, 282_072)),
        ("resnet20", "B", (272_474, 278_324, 284_824)),
        ("resnet32", "A", (464_154, 470_004, 476_504)),
        ("resnet32", "B", (466_906, 472_756, 479_256)),
        ("resnet56", "A", (853_018, 858_868, 865_368)),
        ("resnet110", "A", (1_727_962, 1_733_812, 1_740_312)),
    ],
)
def test_counts(name, shortcut, counts):
    nets = [outline(name, classes, shortcut=shortcut) for classes in (10, 100, 200)]
    assert tuple(map(parameter_count, nets)) == counts


# By hand: stem 144 + 32; 4 * 2,304 + 4 * 32; 4,608 + 3 * 9,216 + 4 * 64; 18,432 + 3 * 36,864 + 4 * 128; head 650.
def test_count_of_fourteen_layers_on_grey_images():
    net = outline("resnet14_cifar", channels=1)
    assert parameter_count(net) == 172_218
    assert sum(isinstance(module, torch.nn.Conv2d | torch.nn.Linear) for module in net.modules()) == 14


def test_the_paper_s_shortcut_is_the_default():
    assert parameter_count(outline("resnet20")) == parameter_count(outline("resnet20", shortcut="A"))


@pytest.mark.parametrize("shortcut", ["A", "B"])
@pytest.mark.parametrize("name", VARIANTS)
def test_shapes(name, shortcut):
    net = outline(name, shortcut=shortcut).to_empty(device="cpu").eval()
    shapes = [tuple(features(net, torch.zeros(1, 3, 32, 32), upto).shape[1:]) for upto in range(1, 5)]
    assert list(dict(net.stages.named_children())) == ["stem", "layer1", "layer2", "layer3"]
    assert shapes == [(16, 32, 32), (16, 32, 32), (32, 16, 16), (64, 8, 8)]
    assert net.num_features == 64


@pytest.mark.parametrize(("shallow", "deep"), [*itertools.pairwise(VARIANTS)])
@pytest.mark.parametrize("shortcut", ["A", "B"])
def test_a_deeper_net_has_every_parameter_of_a_shallower_one(shallow, deep, shortcut):
    small, large = (outline(name, shortcut=shortcut).state_dict() for name in (shallow, deep))
    assert small.keys() < large.keys()
    assert all(large[key].shape == tensor.shape for key, tensor in small.items())


def test_subsampling_keeps_every_second_position_and_adds_zeros_behind():
    x = torch.arange(1.0, 51.0).view(1, 2, 5, 5)
    carried = SubsampleAndPad(3)(x)
    assert carried.shape == (1, 5, 3, 3)
    assert carried[0, 0].tolist() == [[1, 3, 5], [11, 13, 15], [21, 23, 25]]
    assert carried[0, 1].tolist() == [[26, 28, 30], [36, 38, 40], [46, 48, 50]]
    assert not carried[0, 2:].any()
    assert torch.equal(SubsampleAndPad(0)(x[..., :4, :4]), x[..., :4:2, :4:2])


def test_convolutions_start_with_fan_out_variance():
    with isolated(fold_in(0, "model")):
        net = VARIANTS["resnet20"](10, (3, 32, 32))
    spread = net.stages.layer3[0].conv1.weight.std().item()
    assert spread == pytest.approx(math.sqrt(2 / (64 * 3 * 3)), rel=0.03)  # 32 inputs, 64 outputs


@pytest.mark.parametrize("side", [7, 8, 28])
def test_a_block_without_its_branch_leaves_the_shortcut(side):
    net = VARIANTS["resnet20"](10, (1, side, side), width=2).eval()
    block = net.stages.layer2[0]
    torch.nn.init.zeros_(block.norm2.weight)
    x = torch.rand(2, 2, side, side)
    assert torch.equal(block(x), SubsampleAndPad(2)(x))


def test_only_two_shortcuts_are_known():
    with pytest.raises(ConfigError, match=r"^shortcut 'C'; expected 'A' \(subsample and pad\) or 'B' "):
        outline("resnet20", shortcut="C")
