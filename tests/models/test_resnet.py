import itertools
import math

import pytest
import torch

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import fold_in, isolated
from potluck.core.nets.scale import Scale
from potluck.models.contract import features
from potluck.models.resnet import VARIANTS

# From the released code of the FedIN authors' later work and the mean that FedIN prints: three channels, one
# channel, and the running means and variances of the norms.
COUNTS = {
    "resnet10": (4_910_922, 4_904_650, 5_760),
    "resnet14": (10_812_234, 10_805_962, 8_832),
    "resnet18": (11_181_642, 11_175_370, 9_600),
    "resnet22": (17_082_954, 17_076_682, 12_672),
    "resnet26": (17_452_362, 17_446_090, 13_440),
    # The 21,797,672 of the ImageNet net, less its other 990 classes of 513 parameters.
    "resnet34": (21_289_802, 21_283_530, 17_024),
}
FEDIN = [name for name in COUNTS if name != "resnet34"]


def outline(name, channels=3, size=32, **options):
    """A net of ten classes without storage: shapes and counts only."""
    with torch.device("meta"):
        return VARIANTS[name](10, (channels, size, size), **options)


def parameter_count(net):
    return sum(parameter.numel() for parameter in net.parameters())


def stage_shapes(net, shape):
    # Uninitialised storage is enough for shapes, and a forward on the meta device is slow the first time.
    x, net = torch.zeros(1, *shape), net.to_empty(device="cpu").eval()
    return [tuple(features(net, x, upto).shape[1:]) for upto in range(1, len(net.stages) + 1)]


@pytest.mark.parametrize("name", VARIANTS)
def test_counts(name):
    net = outline(name)
    statistics = sum(buffer.numel() for buffer in net.buffers() if buffer.is_floating_point())
    assert (parameter_count(net), parameter_count(outline(name, channels=1)), statistics) == COUNTS[name]


def test_mean_count_is_what_fedin_prints():
    assert sum(parameter_count(outline(name)) for name in FEDIN) / len(FEDIN) == 12_288_022.8


# 10, 100 and 200 classes: each further class has 513 parameters in the head.
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("resnet18", (11_173_962, 11_220_132, 11_271_432)),
        ("resnet34", (21_282_122, 21_328_292, 21_379_592)),
    ],
)
def test_counts_with_the_stem_for_small_images(name, counts):
    with torch.device("meta"):
        nets = [VARIANTS[name](classes, (3, 32, 32), stem="cifar") for classes in (10, 100, 200)]
    assert tuple(map(parameter_count, nets)) == counts


@pytest.mark.parametrize(("size", "side"), [(32, 8), (28, 7)])
@pytest.mark.parametrize("name", VARIANTS)
def test_feature_shapes_are_the_same_for_all_depths(name, size, side):
    net = outline(name, size=size)
    shapes = stage_shapes(net, (3, size, size))
    assert list(dict(net.stages.named_children())) == ["stem", "layer1", "layer2", "layer3", "layer4"]
    assert shapes == [(64, side, side), (64, side, side), (128, 4, 4), (256, 2, 2), (512, 1, 1)]
    assert net.extractor_stages == 1
    assert net.num_features == 512


def test_narrow_cifar_net_on_digits():
    net = outline("resnet10", channels=1, size=8, width=8, stem="cifar")
    assert stage_shapes(net, (1, 8, 8)) == [(8, 8, 8), (8, 8, 8), (16, 4, 4), (32, 2, 2), (64, 1, 1)]


@pytest.mark.parametrize(("shallow", "deep"), [*itertools.pairwise(VARIANTS)])
def test_a_deeper_net_has_every_parameter_of_a_shallower_one(shallow, deep):
    small, large = outline(shallow).state_dict(), outline(deep).state_dict()
    assert small.keys() < large.keys()
    assert all(large[key].shape == tensor.shape for key, tensor in small.items())


def test_convolutions_start_with_fan_out_variance():
    with isolated(fold_in(0, "model")):
        net = VARIANTS["resnet10"](10, (3, 8, 8), width=8)
    spread = dict(net.named_parameters())["stages.layer4.0.conv1.weight"].std().item()
    assert spread == pytest.approx(math.sqrt(2 / (64 * 3 * 3)), rel=0.03)  # 32 inputs, 64 outputs


def test_a_block_adds_its_shortcut():
    net = VARIANTS["resnet14"](10, (3, 8, 8), width=2).eval()
    block = net.stages[3][1]
    torch.nn.init.zeros_(block.norm2.weight)
    x = torch.rand(2, 8, 2, 2)
    assert torch.equal(block(x), x)


def test_names_do_not_depend_on_a_scale_that_rounds_widths_together():
    full, lowest = outline("resnet10", width=1), outline("resnet10", width=1, scale=Scale(0.01))
    assert {parameter.shape[0] for parameter in lowest.parameters()} == {1, 10}
    assert full.state_dict().keys() == lowest.state_dict().keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stem": "vgg"}, "stem 'vgg'; expected 'imagenet' or 'cifar'"),
        ({"size": 0}, "image of 0 x 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigError, match=message):
        outline("resnet10", **options)
