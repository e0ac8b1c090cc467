"""FedProx: the term by itself, and what it does to clients that drift."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.nets.weights import minus, parameters_of
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedavg import FedAvg
from potluck.methods.fedprox import FedProx
from potluck.parts.losses import ProximalLoss
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
SGD = LocalTraining("sgd", lr=0.1, batch_size=64, epochs=5)  # five full steps
BOTH = ["norm2", "norm3"]


def way(run, client):
    """What a client changed in the last round, by layer."""
    sent, reply = (said["local_update"][-1][client]["weights"] for said in (run.wire.sent, run.wire.replied))
    return minus(reply, sent)


def length(changes):
    return torch.stack([tensor.norm() for tensor in changes.values()]).norm().item()


# The loss (eq. 2)


def test_proximal_loss__adds_half_mu_times_the_squared_distance_and_its_gradient_mu_times_the_way(play, clouds):
    federation = clouds("norm2")
    net, batch = play(FedProx(), federation, rounds=0).model(0), federation.sites[0].train.batch(torch.arange(12))
    sent = {name: torch.full_like(weight, 0.3) for name, weight in net.named_parameters()}
    loss = ProximalLoss(F.cross_entropy, 0.4)(net, batch, {"sent": sent})
    task = F.cross_entropy(net(batch.inputs), batch.targets)
    gaps = [(weight - 0.3).square().sum() for weight in net.parameters()]
    assert_close(loss, task + 0.2 * sum(gaps))
    weights = list(net.parameters())
    plain = torch.autograd.grad(task, weights)
    expected = tuple(gradient + 0.4 * (weight - 0.3) for gradient, weight in zip(plain, weights, strict=True))
    assert_close(torch.autograd.grad(loss, weights), expected)


def test_proximal_loss__leaves_out_what_was_not_sent(play, clouds):
    federation = clouds("mlp2")
    net, batch = play(FedProx(), federation, rounds=0).model(0), federation.sites[0].train.batch(torch.arange(12))
    sent = {name: weight.detach() + 1 for name, weight in net.named_parameters() if name == "head.bias"}
    loss = ProximalLoss(F.cross_entropy, 2.0)(net, batch, {"sent": sent})
    assert_close(loss, F.cross_entropy(net(batch.inputs), batch.targets) + len(net.head.bias))


# A round


def test_a_client_solves_its_pulled_problem_from_the_weights_that_it_was_sent(play, lines):
    """The minimum of (x w - y)^2 / 2 + (mu / 2) (w - w^t)^2 is (x y + mu w^t) / (x^2 + mu)."""
    run = play(FedProx(LocalTraining("sgd", lr=0.2, steps=20), mu=2.0), lines((1, 3, 1), (1.5, -1, 1)), rounds=3)
    sent = run.wire.sent["local_update"][-1][0]["weights"]["weight"].item()
    assert sent != 0.0
    for id, (x, y) in enumerate([(1, 3), (1.5, -1)]):
        found = run.wire.replied["local_update"][-1][id]["weights"]["weight"].item()
        assert found == pytest.approx((x * y + 2 * sent) / (x * x + 2), abs=1e-4)


def test_the_stronger_the_pull_the_shorter_the_way(play, clouds):
    ways = [length(way(play(FedProx(SGD, mu=mu), clouds(*BOTH)), 0)) for mu in (0.0, 1.0, 5.0)]
    assert ways[0] > 1.1 * ways[1] > 1.1 * ways[2] > 0


def test_the_first_step_of_a_round_feels_no_pull(play, clouds):
    one_step = LocalTraining("sgd", lr=0.1, steps=1)
    near, far = (play(FedProx(one_step, mu=mu), clouds(*BOTH), rounds=2) for mu in (0.0, 50.0))
    assert_close(far.state.weights, near.state.weights, **EXACTLY)


def test_without_mu_it_is_fedavg_bit_for_bit(play, clouds):
    prox, avg = (play(method, clouds(*BOTH), rounds=3) for method in (FedProx(SGD, mu=0.0), FedAvg(SGD)))
    assert_close(prox.state.weights, avg.state.weights, **EXACTLY)
    assert [report.traffic for report in prox.reports] == [report.traffic for report in avg.reports]


def test_the_pull_covers_parameters_and_no_statistics(play, clouds):
    """Statistics follow the data, however strong the pull."""
    run = play(FedProx(LocalTraining("sgd", lr=1e-4, epochs=5), mu=100.0), clouds(*BOTH))
    before, after = (state.weights["all"]["stages.stage0.1.running_mean"] for state in run.states)
    assert (after - before).abs().max() > 0.01


def test_clients_that_average_with_nobody_are_pulled_towards_where_they_stood(play, clouds):
    run = play(FedProx(SGD, mu=5.0, sharing=Sharing("none")), clouds("mlp2"), rounds=2)
    free = play(FedProx(SGD, mu=0.0, sharing=Sharing("none")), clouds("mlp2"), rounds=2)
    start = play(FedProx(SGD, sharing=Sharing("none")), clouds("mlp2"), rounds=0).model(0)
    pulled, far = (length(minus(parameters_of(one.model(0)), parameters_of(start))) for one in (run, free))
    assert 0 < pulled < far
    assert run.reports[0].traffic.bytes_up == run.reports[0].traffic.bytes_down == 0


# Decoupled: the pull is a step of its own


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_decoupled_a_step_is_the_optimisers_and_then_the_proximal_step(play, clouds, optimizer):
    """What is left of the way after each step is 1 / (1 + eta mu) of it."""
    one_step, eta, mu = LocalTraining(optimizer, lr=0.1, steps=1), 0.1, 5.0
    free, pulled = (play(FedProx(one_step, mu=m, coupled=False), clouds(*BOTH)) for m in (0.0, mu))
    for id in range(2):
        short = {name: gap / (1 + eta * mu) for name, gap in way(free, id).items()}
        assert_close(way(pulled, id), short, rtol=1e-4, atol=1e-6)


def test_decoupled_adam_does_not_hide_how_strong_the_pull_is(play, clouds):
    """Coupled, Adam steps by its rate however large the gradient is, and swings around the weights that were sent."""
    adam = LocalTraining("adam", lr=0.01, batch_size=64, epochs=20)
    coupled, decoupled = (length(way(play(FedProx(adam, mu=1e4, coupled=c), clouds(*BOTH)), 0)) for c in (True, False))
    assert decoupled < 0.05 * coupled


def test_decoupled_without_mu_it_is_fedavg_bit_for_bit(play, clouds):
    prox, avg = (play(m, clouds(*BOTH), rounds=2) for m in (FedProx(SGD, mu=0.0, coupled=False), FedAvg(SGD)))
    assert_close(prox.state.weights, avg.state.weights, **EXACTLY)


def test_a_negative_mu_is_refused():
    with pytest.raises(ValueError, match=r"^mu: expected at least 0, found -0\.1$"):
        FedProx(mu=-0.1)
