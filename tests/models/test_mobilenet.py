import pytest
import torch

from potluck.core.nets.scale import Scale
from potluck.models.contract import features
from potluck.models.mobilenet import Bottleneck, mobilenetv2


def outline(classes=10, shape=(3, 32, 32), **options):
    with torch.device("meta"):
        return mobilenetv2(classes, shape, **options)


# Stem 864 + 64; a bottleneck that widens i channels to e and narrows them to o has e * (i + 13 + o) + 2 o, its shortcut
# i * o + 2 o where i and o differ and there is no stride; last 409,600 + 2,560; 1,281 a class.
@pytest.mark.parametrize(("classes", "count"), [(10, 2_296_922), (100, 2_412_212), (200, 2_540_312)])
def test_counts(classes, count):
    assert sum(parameter.numel() for parameter in outline(classes).parameters()) == count


@pytest.mark.parametrize(("size", "sides"), [(32, (16, 8, 4)), (28, (14, 7, 4)), (64, (32, 16, 8)), (8, (4, 2, 1))])
def test_shapes(size, sides):
    net = outline(shape=(1, size, size)).to_empty(device="cpu").eval()
    x = torch.zeros(1, 1, size, size)
    names = list(dict(net.stages.named_children()))
    shapes = {name: tuple(features(net, x, upto).shape[1:]) for upto, name in enumerate(names, start=1)}
    half, quarter, eighth = sides
    assert shapes == {
        "stem": (32, size, size),
        "layer1": (16, size, size),
        "layer2": (24, size, size),
        "layer3": (32, half, half),
        "layer4": (64, quarter, quarter),
        "layer5": (96, quarter, quarter),
        "layer6": (160, eighth, eighth),
        "layer7": (320, eighth, eighth),
        "last": (1280, eighth, eighth),
    }
    assert net(x).shape == (1, 10)


@pytest.mark.parametrize(("outputs", "stride", "carries"), [(4, 1, True), (6, 1, True), (4, 2, False), (6, 2, False)])
def test_a_bottleneck_without_stride_carries_its_input(outputs, stride, carries):
    block = Bottleneck(4, outputs, 6, stride, Scale(1.0)).eval()
    torch.nn.init.zeros_(block.project.norm.weight)
    x = torch.randn(2, 4, 6, 6)
    expected = block.shortcut(x) if carries else torch.zeros(2, outputs, 3, 3)
    assert torch.equal(block(x), expected)
    assert torch.equal(block.shortcut(x), x) == (outputs == 4 or not carries)


def test_a_bottleneck_filters_each_channel_by_itself_and_does_not_rectify_its_output():
    block = Bottleneck(4, 4, 6, 2, Scale(1.0))
    assert block.filter.conv.weight.shape == (24, 1, 3, 3)
    assert block(torch.randn(8, 4, 6, 6)).min() < 0


def test_names_do_not_depend_on_a_rate_that_rounds_widths_together():
    assert outline().state_dict().keys() == outline(scale=Scale(0.001)).state_dict().keys()


def test_widths_are_rounded_from_the_full_net_s():
    block = Bottleneck(16, 24, 6, 1, Scale(0.3))
    assert block.expand.conv.weight.shape[:2] == (29, 5)  # ceil(0.3 * 96) and ceil(0.3 * 16), not 6 * 5
    assert block.project.conv.weight.shape[:2] == (8, 29)
