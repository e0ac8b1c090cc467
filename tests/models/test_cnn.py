import itertools

import pytest
import torch

from potluck.core.ground.errors import ConfigError
from potluck.core.nets.scale import Scale
from potluck.models.cnn import VARIANTS, heterofl_cnn
from potluck.models.contract import features

NESTED = {name: variant for name, variant in VARIANTS.items() if name != "heterofl_cnn"}


def outline(name, shape, **options):
    with torch.device("meta"):
        return VARIANTS[name](10, shape, **options)


def stage_shapes(net, shape):
    # Uninitialised storage is enough for shapes, and a forward on the meta device is slow the first time.
    x, net = torch.zeros(1, *shape), net.to_empty(device="cpu").eval()
    return [tuple(features(net, x, upto).shape[1:]) for upto in range(1, len(net.stages) + 1)]


# HeteroFL's five levels for MNIST, computed from its released model.
@pytest.mark.parametrize(
    ("rate", "count"),
    [(1.0, 1_556_874), (1 / 2, 391_370), (1 / 4, 98_922), (1 / 8, 25_274), (1 / 16, 6_594)],
)
def test_heterofl_counts(rate, count):
    net = outline("heterofl_cnn", (1, 28, 28), scale=Scale(rate))
    assert sum(parameter.numel() for parameter in net.parameters()) == count


def test_heterofl_shapes():
    shape = (1, 28, 28)
    expected = [(64, 14, 14), (128, 7, 7), (256, 3, 3), (512, 3, 3)]
    assert stage_shapes(outline("heterofl_cnn", shape), shape) == expected


def test_heterofl_needs_room_for_three_pools():
    heterofl_cnn(10, (1, 8, 8), width=1)(torch.zeros(2, 1, 8, 8))
    with pytest.raises(ConfigError, match="image of 8 x 7; expected at least 8 x 8"):
        heterofl_cnn(10, (1, 8, 7), width=1)


# By hand, for one input channel: stem 9 * 16 + 32, each further layer 9 * 16 * 16 + 32, head 16 * 10 + 10.
@pytest.mark.parametrize(("depth", "count"), [(2, 2_682), (3, 5_018), (4, 7_354), (5, 9_690), (6, 12_026)])
def test_nested_counts(depth, count):
    net = outline(f"cnn{depth}", (1, 8, 8))
    assert sum(parameter.numel() for parameter in net.parameters()) == count
    assert sum(isinstance(module, torch.nn.Conv2d) for module in net.modules()) == depth


@pytest.mark.parametrize(("side", "stem", "after"), [(8, 8, 4), (16, 16, 8), (17, 8, 4), (28, 14, 7)])
@pytest.mark.parametrize("name", NESTED)
def test_stem_and_last_stage_have_the_same_shapes_for_all_depths(name, side, stem, after):
    shape = (1, side, side)
    first, *further = stage_shapes(outline(name, shape), shape)
    assert first == (16, stem, stem)
    assert further == [(16, after, after)] * (int(name[-1]) - 1)


@pytest.mark.parametrize(("shallow", "deep"), [*itertools.pairwise(NESTED)])
def test_a_deeper_net_has_every_parameter_of_a_shallower_one(shallow, deep):
    small, large = outline(shallow, (1, 8, 8)).state_dict(), outline(deep, (1, 8, 8)).state_dict()
    assert small.keys() < large.keys()
    assert all(large[key].shape == tensor.shape for key, tensor in small.items())


@pytest.mark.parametrize("name", NESTED)
def test_nested_nets_need_room_for_one_pool(name):
    NESTED[name](10, (1, 2, 2), width=1).eval()(torch.zeros(2, 1, 2, 2))
    with pytest.raises(ConfigError, match="image of 1 x 2; expected at least 2 x 2"):
        NESTED[name](10, (1, 1, 2), width=1)
