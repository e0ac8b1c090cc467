from functools import partial

import torch
from torch import nn
from torch.testing import assert_close

from potluck.core.weights import weights_of
from potluck.engine.engine import Engine
from potluck.methods.fedavg import FedAvg
from potluck.models.contract import Exit, StagedNet, linear_exit, place_shapes
from potluck.models.mlp import mlp3, mlp5
from potluck.parts.exits import new_exits
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
