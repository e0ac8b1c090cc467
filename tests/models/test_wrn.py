import math

import pytest
import torch

from potluck.core.ground.rng import fold_in, isolated
from potluck.core.nets.scale import Scale
from potluck.models.contract import features
from potluck.models.wrn import VARIANTS


def outline(name, classes=10, **options):
    with torch.device("meta"):
        return VARIANTS[name](classes, (3, 32, 32), **options)


# Zagoruyko and Komodakis print 0.6 M, 2.2 M and 8.9 M for WRN-40-1, -2 and -4. A further class has 64k + 1 parameters.
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("wrn16_1", (175_066, 180_916, 187_416)),
        ("wrn16_2", (691_674, 703_284, 716_184)),
        ("wrn40_1", (563_930, 569_780, 576_280)),
        ("wrn40_2", (2_243_546, 2_255_156, 2_268_056)),
        ("wrn40_4", (8_949_210, 8_949_210 + 90 * 257, 8_949_210 + 190 * 257)),
    ],
)
def test_counts(name, counts):
    nets = [outline(name, classes) for classes in (10, 100, 200)]
    assert tuple(sum(parameter.numel() for parameter in net.parameters()) for net in nets) == counts


@pytest.mark.parametrize(("name", "widening"), [("wrn16_1", 1), ("wrn16_2", 2), ("wrn40_2", 2)])
def test_shapes(name, widening):
    net = outline(name).to_empty(device="cpu").eval()
    x = torch.zeros(1, 3, 32, 32)
    names = list(dict(net.stages.named_children()))
    shapes = {name: tuple(features(net, x, upto).shape[1:]) for upto, name in enumerate(names, start=1)}
    assert shapes == {
        "stem": (16, 32, 32),
        "layer1": (16 * widening, 32, 32),
        "layer2": (32 * widening, 16, 16),
        "layer3": (64 * widening, 8, 8),
        "norm": (64 * widening, 8, 8),
    }


@pytest.mark.parametrize(("name", "projections"), [("wrn16_1", [False, True, True]), ("wrn16_2", [True, True, True])])
def test_a_shortcut_has_a_convolution_where_the_channels_change(name, projections):
    layers = outline(name).stages[1:4]
    assert [layer[0].shortcut is not None for layer in layers] == projections
    assert all(layer[1].shortcut is None for layer in layers)


def test_the_first_block_adds_the_raw_input_only_where_the_channels_stay():
    x = -torch.rand(2, 2, 8, 8)
    carried = {}
    for name in ("wrn16_1", "wrn16_2"):
        block = VARIANTS[name](10, (3, 8, 8), width=2).eval().stages.layer1[0]
        torch.nn.init.zeros_(block.conv2.weight)
        carried[name] = block(x)
    assert torch.equal(carried["wrn16_1"], x)
    assert not carried["wrn16_2"].any()


@pytest.mark.parametrize("widening", [1, 2])
def test_a_deeper_net_has_every_parameter_of_a_shallower_one(widening):
    small, large = (outline(f"wrn{depth}_{widening}").state_dict() for depth in (16, 40))
    assert small.keys() < large.keys()
    assert all(large[key].shape == tensor.shape for key, tensor in small.items())


def test_names_do_not_depend_on_a_rate_that_rounds_widths_together():
    full, lowest = outline("wrn16_2", width=1), outline("wrn16_2", width=1, scale=Scale(0.01))
    assert {parameter.shape[0] for parameter in lowest.parameters()} == {1, 10}
    assert full.state_dict().keys() == lowest.state_dict().keys()


def test_convolutions_start_with_fan_out_variance():
    with isolated(fold_in(0, "model")):
        net = VARIANTS["wrn16_1"](10, (3, 32, 32))
    spread = net.stages.layer3[0].conv1.weight.std().item()
    assert spread == pytest.approx(math.sqrt(2 / (64 * 3 * 3)), rel=0.03)  # 32 inputs, 64 outputs
