from collections import OrderedDict
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.method import Need
from potluck.core.nets.weights import load, parameters_of
from potluck.core.requests.fit import LocalTraining
from potluck.core.requests.inference import predict
from potluck.methods.fedfomo import FedFomo, added

EXACTLY = {"rtol": 0, "atol": 0}
QUICK = LocalTraining("sgd", lr=0.1, batch_size=64, epochs=3)
STILL = LocalTraining("sgd", lr=0.0)
THREE = ["mlp2", "mlp2", "mlp2"]


def candidates_of(run, client, exchange=-1):
    return run.wire.sent["local_update"][exchange][client].get("candidates") or {}


def gains_of(run, client, exchange=-1):
    return run.wire.replied["local_update"][exchange][client]["gains"]


def risk(net, examples):
    return F.cross_entropy(predict(net, examples), examples.labels)


# What a client does with candidates (eq. 3, 4)


def test_a_gain_is_the_fall_of_the_validation_loss_over_the_distance(play, clouds):
    run = play(FedFomo(QUICK), clouds(*THREE), rounds=1)
    before = {id: parameters_of(run.model(id)) for id in (0, 1, 2)}
    run.round()
    for id in (0, 1, 2):
        validation, net = run.engine.federation.sites[id].validation, run.engine.server(1).build("mlp2")
        base = risk(load(net, before[id]), validation)
        assert candidates_of(run, id).keys() == {"0", "1", "2"} - {str(id)}
        for other, theirs in candidates_of(run, id).items():
            distance = sum((theirs[n] - before[id][n]).square().sum() for n in theirs).sqrt()
            expected = float((base - risk(load(net, theirs), validation)) / distance)
            assert gains_of(run, id)[other] == pytest.approx(max(0.0, expected), rel=1e-3, abs=1e-6)


def test_a_client_moves_to_the_mean_of_the_models_that_help_weighted_by_gain(play, clouds):
    run = play(FedFomo(STILL), clouds("mlp2", "mlp2", "mlp2", "mlp2"), rounds=1)
    net, validation = run.model(0), run.engine.federation.sites[0].validation
    own, loss = parameters_of(net), F.cross_entropy(net(validation.inputs), validation.labels)
    down = dict(zip(own, torch.autograd.grad(loss, list(net.parameters())), strict=True))
    sent = {
        str(n): {name: w - rate * down[name] for name, w in own.items()} for n, rate in ((1, 0.05), (2, 2.0), (3, -1.0))
    }
    run.states[-1] = type(run.state)({**run.state.models, **sent}, {})
    run.round(0)
    gains = gains_of(run, 0)
    helpful = {name: gain for name, gain in gains.items() if gain > 0}
    whole = sum(helpful.values())
    assert helpful.keys() == {"1", "2"}
    assert gains["1"] > 1.05 * gains["2"]  # steeper at first
    mine = parameters_of(run.model(0))
    for name, tensor in mine.items():
        expected = sum(gain / whole * sent[other][name] for other, gain in helpful.items())
        assert_close(tensor, expected, rtol=1e-4, atol=1e-6)


def test_candidates_that_are_worse_or_equal_weigh_nothing_and_the_client_keeps_its_own(play, clouds):
    run = play(FedFomo(STILL), clouds("mlp2", "mlp2"), rounds=1)
    own = parameters_of(run.model(0))
    for theirs in (own, {n: w * (30 if "head" in n else -1) + 5 for n, w in own.items()}):
        run.states[-1] = type(run.state)({**run.state.models, "1": theirs}, {})
        run.round(0)
        assert gains_of(run, 0) == {"1": 0.0}
        assert_close(parameters_of(run.model(0)), own, **EXACTLY)


def test_grafted_candidates_change_the_layers_that_both_have_and_no_others(play, clouds):
    run = play(FedFomo(QUICK, epsilon=0.0), clouds("mlp3", "mlp2"), rounds=1)
    shared = set(parameters_of(run.model(0))) & set(parameters_of(run.model(1)))
    run.round()
    assert candidates_of(run, 0)["1"].keys() == shared < set(parameters_of(run.model(0)))
    assert candidates_of(run, 1)["0"].keys() == shared


def test_a_bias_alone_is_not_mixed(play, clouds):
    """Heads of one bias and unlike weights: what is in common is the stem."""
    nets = {"narrow": partial(stem_and_head, 4, 3), "wide": partial(stem_and_head, 4, 5)}
    federation = clouds("mlp2", "mlp2")
    sites = {id: replace(federation.sites[id], architecture=name) for id, name in enumerate(nets)}
    federation = replace(federation, sites=sites, architectures=nets, server_architecture="wide")
    run = play(FedFomo(QUICK), federation, rounds=2)
    assert candidates_of(run, 0)["1"].keys() == candidates_of(run, 1)["0"].keys() == {"stem.weight", "stem.bias"}


def stem_and_head(stem, body):
    layers = {"stem": nn.Linear(6, stem), f"body{body}": nn.Linear(stem, body), "head": nn.Linear(body, 3)}
    return nn.Sequential(OrderedDict(layers))


def test_only_whole_models_of_the_same_architecture_if_it_says_so(play, clouds):
    run = play(FedFomo(QUICK, candidates="same"), clouds("mlp3", "mlp2", "mlp3"), rounds=2)
    assert [sorted(candidates_of(run, id)) for id in (0, 1, 2)] == [["2"], [], ["0"]]


# Who is sent what


def test_the_first_round_has_no_candidates(play, clouds):
    run = play(FedFomo(QUICK), clouds(*THREE))
    assert all(not candidates_of(run, id) and gains_of(run, id) == {} for id in (0, 1, 2))


def test_a_client_is_sent_at_most_so_many_models_and_never_its_own(play, clouds):
    run = play(FedFomo(QUICK, peers=1), clouds(*THREE), rounds=3)
    for id in (0, 1, 2):
        assert len(candidates_of(run, id)) == 1
        assert str(id) not in candidates_of(run, id)


def test_without_epsilon_the_models_that_helped_most_are_sent(play, clouds):
    run = play(FedFomo(QUICK, peers=2, epsilon=0.0), clouds("mlp2", "mlp2", "mlp2", "mlp2"), rounds=1)
    affinity = {"0": {"1": 0.1, "2": 3.0, "3": 2.0}}
    for _ in range(4):
        run.states[-1] = type(run.state)(run.state.models, affinity)
        run.round()
        assert sorted(candidates_of(run, 0)) == ["2", "3"]


def test_with_epsilon_1_all_are_drawn_alike(play, clouds):
    run = play(FedFomo(STILL, peers=1, epsilon=1.0), clouds("mlp2", "mlp2", "mlp2", "mlp2"), rounds=1)
    seen = set()
    for _ in range(20):
        run.states[-1] = type(run.state)(run.state.models, {"0": {"2": 9.0}})
        run.round(0)
        seen |= set(candidates_of(run, 0))
    assert seen == {"1", "2", "3"}


def test_clients_that_are_not_drawn_are_still_candidates(play, clouds):
    run = play(FedFomo(QUICK), clouds(*THREE), rounds=1)
    first = run.state.models["2"]
    run.round(0)
    assert_close(candidates_of(run, 0)["2"], first, **EXACTLY)


def test_affinity_adds_the_gains_of_those_who_answered():
    before = {"0": {"1": 1.0}, "3": {"0": 2.0}}
    after = added(before, {"0": {"1": 0.5, "2": 0.25}, "1": {}})
    assert after == {"0": {"1": 1.5, "2": 0.25}, "3": {"0": 2.0}, "1": {}}
    assert before == {"0": {"1": 1.0}, "3": {"0": 2.0}}


def test_it_needs_validation_data_and_refuses_what_is_out_of_range():
    assert FedFomo().needs() == {Need.VALIDATION, Need.SHARED_LAYERS}
    with pytest.raises(ValueError, match=r"^epsilon: expected at least 0 and at most 1, found 1.5$"):
        FedFomo(epsilon=1.5)
    with pytest.raises(ValueError, match=r"^peers: expected at least 1, found 0$"):
        FedFomo(peers=0)
