"""FedPer: which layers stay, and what clients must have in common."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.needs import Need, Offer
from potluck.core.requests.fit import LocalTraining
from potluck.experiment.federation.needs import check_needs
from potluck.methods.fedper import FedPer
from potluck.models.contract import StagedNet
from potluck.parts.sharing import Sharing

FULL = LocalTraining("sgd", lr=0.1, batch_size=64)
EXACTLY = {"rtol": 0, "atol": 0}


def net(hidden):
    """Nets with one body, and heads of different shapes."""
    stages = {"stem": nn.Linear(6, 8), "deep": nn.Sequential(nn.ReLU(), nn.Linear(8, 8))}
    return StagedNet(stages, nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 3)), num_features=8)


def test_bases_are_averaged_and_heads_stay(play, clouds):
    run = play(FedPer(FULL), clouds("mlp2", "mlp2", sizes=(12, 20)), rounds=2)
    one, two = (run.model(id).state_dict() for id in (0, 1))
    assert {name for name in one if not torch.equal(one[name], two[name])} == {"head.weight", "head.bias"}
    name = next(iter(run.state.weights["all"]))
    sent = [run.wire.replied["local_update"][1][id]["weights"][name] for id in (0, 1)]
    assert_close(run.state.weights["all"][name], (12 * sent[0] + 20 * sent[1]) / 32)


def test_heads_may_have_any_shape(play, clouds):
    world = clouds("mlp2", "mlp3")
    world = replace(world, architectures={"mlp2": partial(net, 4), "mlp3": partial(net, 5)})
    method = FedPer(FULL)
    check_needs(method.needs(), "fedper", Offer.of(world))
    run = play(method, world)
    assert run.model(0).head[0].weight.shape == (4, 8)
    assert_close(run.model(0).stages.stem.weight, run.model(1).stages.stem.weight, **EXACTLY)


def test_with_two_personal_layers_the_last_stage_stays_too_and_of_any_depth(play, clouds):
    run = play(FedPer(FULL, personal_layers=2), clouds("norm2", "norm3"))
    assert {name.split(".")[1] for name in run.state.weights["all"]} == {"stage0"}
    message = run.wire.replied["local_update"][0][1]
    assert message["weights"].keys() | message["buffers"].keys() == run.state.weights["all"].keys()


def test_by_architecture_each_net_keeps_its_own_last_layers(play, clouds):
    run = play(FedPer(FULL, personal_layers=2, sharing=Sharing("architecture")), clouds("norm2", "norm3"))
    stages = {group: {name.split(".")[1] for name in weights} for group, weights in run.state.weights.items()}
    assert stages == {"norm2": {"stage0"}, "norm3": {"stage0", "stage1"}}


@pytest.mark.parametrize(
    ("architectures", "personal_layers", "scope", "complaint"),
    [
        (("mlp2", "wide2"), 1, "layer", "has shape"),
        (("mlp2", "mlp3"), 1, "architecture", "no client has a layer in common"),
        (("mlp2", "mlp2"), 9, "layer", "no client has a layer in common"),
        (("mlp2", "mlp3"), 1, "model", "needs one architecture"),
    ],
)
def test_refuses_where_nothing_can_be_averaged(clouds, architectures, personal_layers, scope, complaint):
    method = FedPer(FULL, Sharing(scope), personal_layers)
    with pytest.raises(ConfigError, match=complaint):
        check_needs(method.needs(), "fedper", Offer.of(clouds(*architectures)))


def test_refuses_nets_without_a_head_and_sharing_nothing(lines):
    assert Need.SPLIT_MODEL in FedPer().needs()
    with pytest.raises(ConfigError, match="cannot be split"):
        check_needs(FedPer().needs(), "fedper", Offer.of(lines((1, 1, 1), (1, 1, 1))))
    with pytest.raises(ConfigError, match=r"sharing\.scope: expected one that averages"):
        FedPer(sharing=Sharing("none"))
