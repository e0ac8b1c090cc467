"""InCo over FedAvg, FedProx, SCAFFOLD, MOON and FedNova: the mixing of what their rounds did, and nothing else."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.nets.weights import mean
from potluck.core.requests.fit import LocalTraining
from potluck.engine.rounds.engine import Engine
from potluck.methods import get_method
from potluck.parts.crosslayer import CrossLayer
from potluck.parts.sharing import Sharing

OVER = {
    "incoavg": "fedavg",
    "incoprox": "fedprox",
    "incoscaffold": "scaffold",
    "incomoon": "moon",
    "inconova": "fednova",
}
DEEP, SHALLOW = "stages.stage2.0.weight", "stages.stage1.0.weight"
TRAINING = LocalTraining("sgd", lr=0.1, epochs=2)
UNIFORM = Sharing(weighting="uniform")


def method(name, **options):
    return get_method(name)(**{"training": TRAINING, "sharing": UNIFORM, **options})


@pytest.mark.parametrize("name", OVER)
def test_a_round_is_that_of_the_method_with_its_deep_layers_mixed(name, play, clouds):
    """From one state on, the methods differ in the deep layer, and there by the equation."""
    federation = clouds("norm3", "norm2", "norm3", "norm2")
    base, mixing = play(method(OVER[name]), federation), play(method(name), federation)
    before, after = base.states[0].weights["all"], base.state.weights["all"]
    found = mixing.state.weights["all"]
    assert found.keys() == after.keys()
    for layer in found.keys() - {DEEP}:
        assert torch.equal(found[layer], after[layer]), layer
    g_0, g_k = (after[layer] - before[layer] for layer in (SHALLOW, DEEP))
    theta = ((g_0 * g_k).sum().abs() / ((g_0 * g_0).sum() + 1e-7)).clamp(max=5)
    unit = g_k / (g_k.norm() + 1e-7) + theta * g_0 / (g_0.norm() + 1e-7)
    assert_close(found[DEEP], before[DEEP] + (unit * (g_k.norm() + g_0.norm()) / 2).clamp(-0.1, 0.1))
    assert (found[DEEP] - after[DEEP]).abs().max() > 1e-3


@pytest.mark.parametrize("name", OVER)
def test_what_crosses_the_wire_is_that_of_the_method(name, play, clouds):
    federation = clouds("norm3", "norm2")
    base, mixing = play(method(OVER[name]), federation), play(method(name), federation)
    for way in ("sent", "replied"):
        one, other = (getattr(run.wire, way)["local_update"][0] for run in (base, mixing))
        assert {id: message.encode() for id, message in one.items()} == {id: m.encode() for id, m in other.items()}


def test_incoavg_mixes_the_plain_means_of_all_owners_updates(play, clouds):
    run = play(method("incoavg"), clouds("norm3", "norm2", "norm3", "norm2"))
    before, replies = run.states[0].weights["all"], run.wire.replied["local_update"][0]
    owners = {SHALLOW: [0, 1, 2, 3], DEEP: [0, 2]}
    g_0, g_k = (
        mean([replies[id]["weights"][layer] for id in ids], [1.0] * len(ids)) - before[layer]
        for layer, ids in owners.items()
    )
    assert_close(run.state.weights["all"][DEEP], before[DEEP] + CrossLayer().mixed(g_k, g_0))


def test_deep_layers_follow_clients_that_lack_them(play, clouds):
    """The point of it: data of a shallow client reach a layer that it does not have."""
    federation = clouds("norm3", "norm2")
    other = clouds("norm3", "norm2", seed=1)
    changed = replace(federation, sites={0: federation.sites[0], 1: other.sites[1]})
    for name, reached in (("fedavg", False), ("incoavg", True)):
        pools = [play(method(name), world).state.weights["all"] for world in (federation, changed)]
        assert torch.equal(pools[0][DEEP], pools[1][DEEP]) is not reached


def test_a_deep_layer_of_which_no_owner_is_drawn_keeps_its_bits(play, clouds):
    run = play(method("incoavg"), clouds("norm3", "norm2"), rounds=0)
    run.round(1)
    before, after = (state.weights["all"] for state in run.states)
    assert torch.equal(after[DEEP], before[DEEP])
    assert not torch.equal(after[SHALLOW], before[SHALLOW])


def test_within_architectures_each_mixes_its_own_layers(play, clouds):
    federation = clouds("norm3", "norm2", "norm3")
    sharing = Sharing("architecture", "uniform")
    base, mixing = (play(method(name, sharing=sharing), federation) for name in ("fedavg", "incoavg"))
    before, after, found = base.states[0].weights, base.state.weights, mixing.state.weights
    assert all(torch.equal(found["norm2"][name], after["norm2"][name]) for name in after["norm2"])
    g_0, g_k = (after["norm3"][layer] - before["norm3"][layer] for layer in (SHALLOW, DEEP))
    assert_close(found["norm3"][DEEP], before["norm3"][DEEP] + CrossLayer().mixed(g_k, g_0))


def test_control_variates_of_scaffold_are_not_mixed(play, clouds):
    federation = clouds("norm3", "norm2")
    base, mixing = play(method("scaffold"), federation), play(method("incoscaffold"), federation)
    assert_close(base.state.control, mixing.state.control, rtol=0, atol=0)


@pytest.mark.parametrize("name", OVER)
def test_a_sharing_that_averages_nothing_is_refused(name):
    with pytest.raises(ConfigError, match=r"sharing\.scope: expected one that averages, found 'none'"):
        method(name, sharing=Sharing("none"))


@pytest.mark.parametrize("name", OVER)
def test_clients_weigh_alike_by_default(name):
    assert get_method(name)().sharing == UNIFORM


def test_a_round_does_not_change_the_state_it_is_given(clouds):
    engine = Engine(method("incoavg"), clouds("norm3", "norm2"))
    before = engine.start()
    kept = {name: tensor.clone() for name, tensor in before.weights["all"].items()}
    engine.round(1, before, [0, 1])
    assert_close(before.weights["all"], kept, rtol=0, atol=0)
