from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from potluck.core.nets.batchnorm import batch_norms
from potluck.core.nets.weights import weights_of
from potluck.engine.rounds.engine import Engine
from potluck.methods.fedavg import FedAvg
from potluck.models import get_model
from potluck.models.contract import Exit, StagedNet, blocks, linear_exit, place_names, place_shapes
from potluck.models.mlp import mlp3, mlp5
from potluck.models.vit import vit
from potluck.parts.exits import (
    blocks_within,
    bottleneck_exit,
    convolutional_exit,
    leading_names,
    leading_share,
    new_exits,
)
from potluck.testing.worlds import World, toy_federation

EXACTLY = {"rtol": 0, "atol": 0}
SHALLOW, DEEP = mlp3(4, (10,), width=6), mlp5(4, (10,), width=6)


def made(net, *places, seed=0, **options):
    server = Engine(FedAvg(), toy_federation(World()), seed=seed).server(1)
    shapes = place_shapes(net, (10,))
    return new_exits(server, net, {place: shapes[place] for place in places}, **options)


def test_new_exits__are_the_same_in_nets_of_other_depth_and_beside_others():
    one, other = made(SHALLOW, "hidden1"), made(DEEP, "stem", "hidden3", "hidden1")
    assert list(other) == ["stem", "hidden3", "hidden1"]
    assert_close(weights_of(one["hidden1"]), weights_of(other["hidden1"]), **EXACTLY)
    assert not torch.equal(other["stem"].head.weight, other["hidden3"].head.weight)


def test_new_exits__are_drawn_from_the_runs_seed_and_from_nothing_else(global_generator_unchanged):
    first, again, other = (weights_of(made(DEEP, "stem", seed=seed)) for seed in (0, 0, 1))
    assert_close(first, again, **EXACTLY)
    assert not torch.equal(first["stem.head.weight"], other["stem.head.weight"])


def test_new_exits__are_of_the_form_that_is_asked_for():
    def bottleneck(net, features, outputs):
        assert isinstance(net, StagedNet)
        return Exit(nn.Sequential(nn.Linear(features.numel(), 2), nn.ReLU()), nn.Linear(2, outputs))

    exits = made(DEEP, "hidden2", build=bottleneck)
    assert exits["hidden2"].head.weight.shape == (4, 2)
    assert exits["hidden2"](torch.randn(3, 6)).shape == (3, 4)
    assert isinstance(made(DEEP, "hidden2", build=partial(linear_exit, track=False))["hidden2"], Exit)


def test_new_exits__are_those_of_the_server_at_every_client():
    engine = Engine(FedAvg(), toy_federation(World()))
    client = engine._host._open(0, None, engine.server(1)._key, 1)
    shapes = place_shapes(DEEP, (10,))
    ours, theirs = (new_exits(party, DEEP, shapes) for party in (engine.server(1), client))
    assert_close(weights_of(ours), weights_of(theirs), **EXACTLY)
    assert client.kept_modules == {}


# The leading share of a net


@pytest.mark.parametrize(
    "net",
    [
        DEEP,
        get_model("resnet14")(3, (3, 8, 8), width=2, stem="cifar"),
        vit(3, (3, 8, 8), patch=4, width=8, heads=2, depth=4),
    ],
    ids=["stages", "blocks", "last norm"],
)
@pytest.mark.parametrize("share", [0.2, 0.5, 0.75, 1.0])
def test_leading_names__are_of_the_tensors_that_a_leading_share_has(net, share):
    server, shape = Engine(FedAvg(), toy_federation(World())).server(1), (10,) if net is DEEP else (3, 8, 8)
    shares = (0.2, 0.5, 0.75, 1.0)
    whole = leading_share(server, net, shape, 1.0, shares).state_dict()
    part = leading_share(server, net, shape, share, shares).state_dict()
    held = leading_names(net, share)
    assert [name for name in whole if name in held] == list(part)
    assert (len(part) < len(whole)) == (share < 1)


def test_blocks_within__rounds_down_to_at_least_one():
    net = vit(3, (3, 8, 8), patch=4, width=8, heads=2, depth=100)
    assert [blocks_within(net, share) for share in (0.001, 0.29, 0.999, 1.0)] == [1, 29, 99, 100]


def test_place_names__begin_the_names_of_a_places_own_tensors():
    net = get_model("resnet14")(3, (3, 8, 8), width=2, stem="cifar")
    names = place_names(net)
    assert names["stem"] == "stages.stem."
    assert names["layer3-1"] == "stages.layer3.0."
    assert names["layer3"] == "stages.layer3.1."
    assert all(any(name.startswith(names[place]) for name in net.state_dict()) for place in blocks(net))


# The authors' exits

MAP = (3, 8, 8)
SMALL = get_model("resnet10")(3, MAP, width=2, stem="cifar")


def test_bottleneck_exit__has_a_gate_and_follows_the_map_down_to_the_last():
    found = bottleneck_exit(list(place_shapes(SMALL, MAP).values()), SMALL, torch.Size((2, 8, 8)), 3)
    gate, *rows, _ = found.body
    assert [row[-3].out_channels for row in rows] == [4, 8, 16]
    x = torch.rand(4, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    share = gate.eval()(x) / x
    assert share.min() > 0
    assert share.max() < 1
    assert found.eval()(x).shape == (4, 3)
    assert gate(torch.rand(2, 2, 7, 5)).shape == (2, 2, 7, 5)  # the authors' needs even sides


def test_convolutional_exit__keeps_the_width_and_the_size_of_the_map():
    found = convolutional_exit(SMALL, torch.Size((4, 6, 5)), 3)
    assert [type(layer).__name__ for layer in found.body] == ["Conv2d", "BatchNorm2d", "ReLU"] * 3 + ["GlobalPool"]
    x = torch.rand(2, 4, 6, 5, generator=torch.Generator().manual_seed(0))
    assert found.body[:-1](x).shape == x.shape
    assert found(x).shape == (2, 3)


@pytest.mark.parametrize(
    ("build", "norms"), [(partial(bottleneck_exit, [torch.Size((8, 3, 3))]), 5), (convolutional_exit, 3)]
)
def test_exits_have_norms_if_the_net_has_any(build, norms):
    for normed in (True, False):
        stem = nn.Sequential(nn.Conv2d(3, 4, 3), *([nn.BatchNorm2d(4)] if normed else []))
        net = StagedNet({"stem": stem}, nn.Linear(4, 3))
        assert len(batch_norms(build(net, torch.Size((4, 6, 6)), 3))) == (norms if normed else 0)


@pytest.mark.parametrize("build", [partial(bottleneck_exit, []), convolutional_exit])
def test_exits_behind_other_features_than_maps_are_linear(build):
    assert repr(build(DEEP, torch.Size((6,)), 4)) == repr(linear_exit(DEEP, torch.Size((6,)), 4))
