import itertools
from functools import partial

import pytest
import torch
from torch import nn

from potluck import Examples, fl
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import fold_in, isolated
from potluck.core.nets.weights import weights_of
from potluck.core.roles import Supervised
from potluck.engine.client.training import train
from potluck.engine.stacking.nets import train_stacked
from potluck.models.mnist1d import VARIANTS, BidirectionalGRU
from potluck.models.split import split

FAMILIES = [name.removeprefix("mnist1d_") for name in VARIANTS]
every_family = pytest.mark.parametrize("family", FAMILIES)


def build(family, seed=0, **options):
    with isolated(fold_in(seed, family)):
        return VARIANTS[f"mnist1d_{family}"](10, (40,), **options)


def sequences(count=7, seed=0):
    return torch.randn(count, 40, generator=fold_in(seed, "sequences").generator())


# As the authors' notebook counts them.
@pytest.mark.parametrize(
    ("family", "weights", "features"),
    [("logistic", 410, 40), ("mlp", 15_210, 100), ("gru", 5_134, 480), ("cnn", 5_210, 125)],
)
def test_counts(family, weights, features):
    net = build(family)
    assert sum(parameter.numel() for parameter in net.parameters()) == weights
    assert net.num_features == features


def test_mlp__is_the_papers_formula():
    net, x = build("mlp"), sequences()
    h = (x @ net.stages.stem.linear.weight.T + net.stages.stem.linear.bias).clamp(min=0)
    h = h + (h @ net.stages.hidden1.linear.weight.T + net.stages.hidden1.linear.bias).clamp(min=0)
    torch.testing.assert_close(net(x), h @ net.head.weight.T + net.head.bias)


def test_cnn__is_the_papers_formula():
    net, x = build("cnn"), sequences()
    h = x[:, None]
    for stage in net.stages:
        h = nn.functional.conv1d(h, stage.conv.weight, stage.conv.bias, stride=2, padding=1).clamp(min=0)
    assert h.shape == (7, 25, 5)
    torch.testing.assert_close(net(x), h.reshape(7, 125) @ net.head.weight.T + net.head.bias)


def test_logistic__is_linear_with_and_without_features():
    for options in ({}, {"features": 12}):
        net, x = build("logistic", **options), sequences()
        zero = net(torch.zeros(1, 40))
        torch.testing.assert_close(net(x[:3] + 2 * x[3:6]) - zero, net(x[:3]) + 2 * net(x[3:6]) - 3 * zero)


@pytest.mark.parametrize("width", [1, 6])
def test_gru__computes_and_learns_as_torch_does(width):
    with isolated(fold_in(0, "gru")):
        ours, theirs = BidirectionalGRU(width), nn.GRU(1, width, batch_first=True, bidirectional=True)
    with torch.no_grad():
        for name, place in itertools.product(("ih", "hh"), (0, 1)):
            suffix = "_reverse" * place
            getattr(theirs, f"weight_{name}_l0{suffix}").copy_(getattr(ours, f"weight_{name}")[place].T)
            getattr(theirs, f"bias_{name}_l0{suffix}").copy_(getattr(ours, f"bias_{name}")[place, 0])
    x, target = sequences().requires_grad_(), torch.randn(7, 40, 2 * width)
    expected = theirs(x[..., None])[0]
    found = ours(x).transpose(1, 2)
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad((found * target).sum(), x)
    torch.testing.assert_close(gradient, torch.autograd.grad((expected * target).sum(), x)[0])


def test_gru__begins_as_torch_does():
    with isolated(fold_in(0, "gru")):
        drawn = BidirectionalGRU(100)
    for parameter in drawn.parameters():
        assert parameter.abs().max() <= 0.1
        assert abs(parameter.std() - 0.1 / 3**0.5) < 0.005


@every_family
def test_stacked_training_is_that_of_one_after_the_other(family):
    keys, task = [fold_in(seed, "order") for seed in (1, 2)], Supervised(nn.functional.cross_entropy)
    fits = []
    for seed in (1, 2, 1, 2):
        data = Examples(sequences(20, seed), torch.arange(20) % 10)
        fits.append(
            fl.Fit(build(family, seed, features=12), task, data, fl.LocalTraining(epochs=2, batch_size=8, lr=0.01))
        )
    train_stacked(fits[:2], keys)
    for fit, key in zip(fits[2:], keys, strict=True):
        train(fit, key)
    for together, alone in zip(fits[:2], fits[2:], strict=True):
        torch.testing.assert_close(weights_of(together.net), weights_of(alone.net), rtol=1e-3, atol=1e-5)


@every_family
def test_features__all_have_as_many_and_can_be_split(family):
    net = build(family, features=32)
    parts = split(net)
    assert net.num_features == parts.num_features == parts.head.in_features == 32
    with pytest.raises(ConfigError, match=r"^features 0; expected at least 1$"):
        build(family, features=0)


def test_features__no_two_families_share_a_layer_but_the_head():
    names = [set(weights_of(build(family, features=32))) for family in FAMILIES]
    for one, other in itertools.combinations(names, 2):
        assert one & other == {"head.weight", "head.bias"}


def test_features__a_linear_layer_more_changes_nothing_of_what_can_be_represented():
    # The published head, as the product of a layer of as many features as classes and a new head.
    plain, wide = build("cnn"), build("cnn", features=10)
    weights = weights_of(wide) | {name: t for name, t in weights_of(plain).items() if name.startswith("stages.")}
    weights |= {"stages.cnn_features.weight": plain.head.weight, "stages.cnn_features.bias": plain.head.bias}
    wide.load_state_dict(weights | {"head.weight": torch.eye(10), "head.bias": torch.zeros(10)})
    torch.testing.assert_close(wide(sequences()), plain(sequences()))


@every_family
def test_an_input_of_any_shape_is_one_sequence(family):
    image = torch.randn(3, 2, 4, 5)
    net = VARIANTS[f"mnist1d_{family}"](10, (2, 4, 5))
    torch.testing.assert_close(net(image), net(image.flatten(1)))


def test_cnn__needs_three_numbers():
    partial(VARIANTS["mnist1d_cnn"], 2, (3,))()(torch.zeros(2, 3))
    with pytest.raises(ConfigError, match=r"^input of 2 numbers; expected at least 3 for this model$"):
        VARIANTS["mnist1d_cnn"](2, (2,))
