"""FedDyn: its invariants and its fixed point, which most re-implementations miss."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from potluck.core.federation import Federation, Site
from potluck.core.ground.errors import ConfigError
from potluck.core.nets.weights import minus, parameters_of, plus
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import LocalTraining
from potluck.core.requests.schedule import Schedule
from potluck.methods.fedavg import FedAvg
from potluck.methods.feddyn import FedDyn
from potluck.methods.fedprox import FedProx
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
CLOSELY = {"rtol": 1e-4, "atol": 1e-6}
SGD = LocalTraining("sgd", lr=0.1, batch_size=8)
SOLVED = LocalTraining("sgd", lr=0.25, steps=8)  # the losses of LINES, pulled, to 0.4 % of the way
LINES = [(1, 1, 1), (2, -2, 1), (1, 4, 1), (1.5, 0, 1)]  # optima 1, -1, 4, 0 of curvatures 1, 4, 1, 2.25
OPTIMUM = (1 - 4 + 4 + 0) / (1 + 4 + 1 + 2.25)
HALVES = [(0, 1), (2, 3), (0, 2), (1, 3), (1, 2), (0, 3)]
FOUR = ["norm2", "norm3", "norm3", "norm2"]


def dual(run, client):
    """g_k as the client keeps it; zero for one that was never drawn."""
    return run.kept(client)["state"].get("g")


def answers(run):
    return run.wire.replied["local_update"][-1]


def mean_of_duals(run, weight):
    """By layer, the mean of g_k over all clients that own it, drawn or not."""
    total, whole = {}, {}
    for id, member in run.engine.federation.roster.items():
        g = dual(run, id) or {}
        for name in member.parameters:
            whole[name] = whole.get(name, 0) + weight(member)
            total[name] = total.get(name, 0) + weight(member) * g.get(name, torch.zeros(member.shapes[name]))
    return {name: total[name] / whole[name] for name in total}


# Clients


def test_the_first_round_trains_as_fedprox_does(play, clouds):
    federation = clouds(*FOUR)
    feddyn, fedprox = (play(method, federation) for method in (FedDyn(SGD, 0.5), FedProx(SGD, mu=0.5)))
    for id in range(4):
        assert_close(answers(feddyn)[id]["weights"], answers(fedprox)[id]["weights"])
    assert answers(feddyn)[0].keys() == answers(fedprox)[0].keys()


def test_g_changes_by_alpha_times_the_way_gone_and_only_at_clients_that_were_drawn(play, clouds):
    run = play(FedDyn(SGD, 0.5), clouds(*FOUR), rounds=2)
    before = {id: dual(run, id) for id in range(4)}
    run.round(0, 1)
    for id in (0, 1):
        way = minus(answers(run)[id]["weights"], run.wire.sent["local_update"][-1][id]["weights"])
        assert_close(plus(dual(run, id), way, 0.5), before[id])
        assert max(float(tensor.abs().max()) for tensor in way.values()) > 1e-3
    for id in (2, 3):
        assert_close(dual(run, id), before[id], **EXACTLY)


# The server


@pytest.mark.parametrize(
    ("weighting", "weight"), [("uniform", lambda member: 1), ("samples", lambda member: member.examples)]
)
def test_h_is_the_mean_of_all_owners_g_after_every_round_whoever_was_drawn(play, clouds, weighting, weight):
    run = play(FedDyn(SGD, 0.3, Sharing(weighting=weighting)), clouds(*FOUR), rounds=0)
    for cohort in [(0, 1), (2,), (0, 1, 2, 3), (3,), (1, 3)]:
        run.round(*cohort)
        assert_close(run.state.h["all"], mean_of_duals(run, weight), **CLOSELY)
    assert run.state.h["all"]["stages.stage2.0.weight"].any()


def test_each_architecture_has_an_h_of_its_own_where_they_average_apart(play, clouds):
    run = play(FedDyn(SGD, 0.3, Sharing("architecture", "uniform")), clouds("mlp2", "mlp3", "mlp2"), rounds=1)
    run.round(0, 1)
    assert_close(run.state.h["mlp3"], dual(run, 1), **CLOSELY)
    both = zip(dual(run, 0).items(), dual(run, 2).values(), strict=True)
    assert_close(run.state.h["mlp2"], {name: (one + other) / 2 for (name, one), other in both}, **CLOSELY)


def test_the_server_goes_beyond_the_mean_by_the_share_of_a_layers_owners_that_answered(play, clouds):
    """In the first round theta = m + p (m - theta^0), p the share of all owners of the layer that are in P_t."""
    run = play(FedDyn(SGD, 0.01), clouds("mlp2", "mlp3", "mlp3", "mlp2"), rounds=0)
    start = run.state.weights["all"]
    run.round(0, 1, 3)
    sent = [answer["weights"] for answer in answers(run).values()]
    for name, theta in run.state.weights["all"].items():
        owned = [weights[name] for weights in sent if name in weights]
        share, mean = (1 / 2 if "hidden2" in name else 3 / 4), sum(owned) / len(owned)
        assert len(owned) == (1 if "hidden2" in name else 3)
        assert_close(theta, mean + share * (mean - start[name]), **CLOSELY)


def test_half_of_six_clients_from_zero_end_at_one_and_a_half_times_their_mean(play, lines):
    run = play(FedDyn(SGD, 0.1), lines(*LINES, (1, 2, 1), (1, 3, 1)), rounds=0)
    run.round(0, 2, 5)
    mean = sum(answer["weights"]["weight"] for answer in answers(run).values()) / 3
    assert_close(run.state.weights["all"]["weight"], 1.5 * mean)


def test_the_server_goes_on_by_h_over_alpha_where_a_rate_that_falls_has_brought_clients_to_a_stop(play, clouds):
    falling = replace(SGD, schedule=Schedule("steps", factor=1e-9, milestones=(2,)))
    run = play(FedDyn(falling, 0.3), clouds("mlp2", "mlp2"), rounds=2)
    before = run.state
    run.round()
    assert_close(run.state.h["all"], before.h["all"])
    expected = plus(before.weights["all"], before.h["all"], -1 / 0.3)
    assert_close(run.state.weights["all"], expected, **CLOSELY)
    assert max(float(tensor.abs().max()) for tensor in before.h["all"].values()) > 1e-3


def test_a_layer_of_which_no_owner_answered_keeps_theta_and_h(play, clouds):
    run = play(FedDyn(SGD, 0.3), clouds("norm2", "norm3"), rounds=2)
    before = run.state
    run.round(0)
    for name in [name for name in run.state.h["all"] if "stage2" in name]:
        assert torch.equal(run.state.weights["all"][name], before.weights["all"][name])
        assert torch.equal(run.state.h["all"][name], before.h["all"][name])


def test_running_statistics_are_plain_means_and_have_no_h(play, clouds):
    run = play(FedDyn(SGD, 0.3), clouds("norm2", "norm2"), rounds=3)
    one, two = (answers(run)[id]["buffers"] for id in (0, 1))
    for name, buffer in one.items():
        expected = (buffer + two[name]) / 2 if buffer.is_floating_point() else max(buffer, two[name])
        assert_close(run.state.weights["all"][name], expected)
    assert run.state.h["all"].keys() == set(parameters_of(run.model(0)))


# Where it comes to rest


def at_rest(play, federation, method, rounds=30):
    """After many rounds with half of the clients each."""
    run = play(method, federation, rounds=0)
    for number in range(rounds):
        run.round(*HALVES[number % len(HALVES)])
    return run


def test_with_half_of_the_clients_a_round_it_finds_the_optimum_of_all_and_fedavg_does_not(play, lines):
    run = at_rest(play, lines(*LINES), FedDyn(SOLVED, 2.0))
    weight = run.state.weights["all"]["weight"].item()
    assert weight == pytest.approx(OPTIMUM, abs=1e-4)
    for id, (x, y, _) in enumerate(LINES):
        assert dual(run, id)["weight"].item() == pytest.approx(x * (x * weight - y), abs=1e-3)  # the gradient of L_k
    fedavg = at_rest(play, lines(*LINES), FedAvg(SOLVED, Sharing(weighting="uniform")), rounds=12)
    assert abs(fedavg.state.weights["all"]["weight"].item() - OPTIMUM) > 0.1


@pytest.mark.slow
def test_in_several_dimensions_it_finds_the_optimum_too_and_fedavg_does_not(play):
    """Least squares of four clients whose curvatures have other axes, with half of the clients a round."""
    draws = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 3, generator=draws), 2 * torch.randn(8, 1, generator=draws)) for _ in range(4)]
    parts = [Examples(x, y) for x, y in data]
    sites = {id: Site(id, "plane", part, part, part) for id, part in enumerate(parts)}
    build = partial(nn.Linear, 3, 1, bias=False)
    federation = Federation(sites, {"plane": build}, "plane", num_classes=1, criterion=half_squared_error)
    optimum = torch.linalg.solve(sum(x.T @ x for x, _ in data), sum(x.T @ y for x, y in data)).T
    training = LocalTraining("sgd", lr=0.2, steps=12, batch_size=8)
    found = at_rest(play, federation, FedDyn(training, 1.0), rounds=60).state.weights["all"]["weight"]
    assert_close(found, optimum, rtol=0, atol=1e-3)
    fedavg = at_rest(play, federation, FedAvg(training, Sharing(weighting="uniform")), rounds=12)
    assert (fedavg.state.weights["all"]["weight"] - optimum).abs().max() > 0.1


def half_squared_error(outputs, targets):
    return (outputs - targets).square().mean() / 2


def test_few_local_steps_lead_to_the_same_optimum(play, lines):
    run = at_rest(play, lines(*LINES), FedDyn(LocalTraining("sgd", lr=0.1, steps=2), 3.0))
    assert run.state.weights["all"]["weight"].item() == pytest.approx(OPTIMUM, abs=1e-3)


def test_by_samples_it_finds_the_optimum_of_the_pooled_data(play, lines):
    clients = [(x, y, n) for (x, y, _), n in zip(LINES, (1, 2, 3, 4), strict=True)]
    run = at_rest(play, lines(*clients), FedDyn(SOLVED, 2.0, Sharing(weighting="samples")))
    pooled = sum(n * x * y for x, y, n in clients) / sum(n * x * x for x, y, n in clients)
    assert run.state.weights["all"]["weight"].item() == pytest.approx(pooled, abs=1e-3)
    assert abs(pooled - OPTIMUM) > 0.05


# Limits and refusals


def test_without_alpha_it_is_fedavg_bit_for_bit_and_clients_keep_nothing(play, clouds):
    federation = clouds("norm2", "norm3", "mlp2", sizes=(12, 20, 9))
    sharing = Sharing("architecture", "uniform")
    feddyn, fedavg = (play(m, federation, rounds=3) for m in (FedDyn(SGD, 0.0, sharing), FedAvg(SGD, sharing)))
    assert_close(feddyn.state.weights, fedavg.state.weights, **EXACTLY)
    assert all(run.kept(0) == {"state": {}} for run in (feddyn, fedavg))


def test_a_sharing_that_averages_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"sharing\.scope: expected one that averages, found 'none'"):
        FedDyn(sharing=Sharing("none"))


def test_notes__tell_the_norm_of_h(play, lines):
    run = play(FedDyn(SGD, 0.5), lines(*LINES), rounds=2)
    for state, report in zip(run.states[1:], run.reports, strict=True):
        assert report.notes == {"h_norm": pytest.approx(abs(state.h["all"]["weight"].item()))}
