import itertools

import pytest
import torch
from torch import nn

from potluck.core.nets.scale import Scale
from potluck.models.contract import features
from potluck.models.mlp import VARIANTS


def build(depth, shape=(10,), **options):
    return VARIANTS[f"mlp{depth}"](3, shape, **options)


# By hand, for ten inputs and three classes: stem 10 * 64 + 64, further layers 64 * 64 + 64, head 64 * 3 + 3.
@pytest.mark.parametrize(("depth", "count"), [(2, 5_059), (3, 9_219), (4, 13_379), (5, 17_539), (6, 21_699)])
def test_counts(depth, count):
    net = build(depth)
    assert sum(parameter.numel() for parameter in net.parameters()) == count
    assert list(dict(net.stages.named_children())) == [
        "stem",
        *(f"hidden{number}" for number in range(1, depth)),
    ]


@pytest.mark.parametrize("shape", [(10,), (1, 8, 8), (2, 3, 4, 5)])
@pytest.mark.parametrize("depth", range(2, 7))
def test_any_input_shape_gives_the_same_features(depth, shape):
    net = build(depth, shape, scale=Scale(0.5))
    x = torch.randn(4, *shape)
    assert {tuple(features(net, x, upto).shape) for upto in range(1, depth + 1)} == {(4, 32)}
    assert features(net, x, 1).min() == 0
    assert net(x).shape == (4, 3)


@pytest.mark.parametrize("depth", range(2, 7))
def test_there_is_nothing_but_weights_and_biases(depth):
    net = build(depth)
    assert not list(net.buffers())
    assert {key.rpartition(".")[2] for key in net.state_dict()} == {"weight", "bias"}


@pytest.mark.parametrize(("shallow", "deep"), [*itertools.pairwise(range(2, 7))])
def test_a_deeper_net_has_every_parameter_of_a_shallower_one(shallow, deep):
    small, large = build(shallow).state_dict(), build(deep).state_dict()
    assert small.keys() < large.keys()
    assert all(large[key].shape == tensor.shape for key, tensor in small.items())


# By hand, for two features and three classes; a norm has two parameters a unit. 2-16-16-3: 48 + 32 + 272 + 32 + 51.
@pytest.mark.parametrize(("depth", "width", "count"), [(2, 16, 435), (1, 32, 259), (3, 8, 243), (1, 16, 131)])
def test_counts_with_norms(depth, width, count):
    net = VARIANTS[f"mlp{depth}_norm"](3, (2,), width=width)
    assert sum(parameter.numel() for parameter in net.parameters()) == count
    assert sum(isinstance(module, nn.BatchNorm1d) for module in net.modules()) == depth


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_each_norm_reads_what_the_relu_left_and_the_next_layer_reads_the_norm(depth):
    net = VARIANTS[f"mlp{depth}_norm"](3, (2,))
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    h = x
    for stage in net.stages:
        h = (h @ stage.linear.weight.T + stage.linear.bias).clamp(min=0)
        h = (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(net(x), h @ net.head.weight.T + net.head.bias)
