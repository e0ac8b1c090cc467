"""PFedMe: the solver, the local rounds and the server's step, by hand."""

import pytest

from potluck.core.ground.errors import ConfigError
from potluck.core.requests.fit import LocalTraining
from potluck.methods.pfedme import PFedMe

SOLVER = LocalTraining("sgd", lr=0.1, batch_size=64)


def weight(run):
    return float(run.state.weights["all"]["weight"])


def test_a_local_round_moves_w_towards_theta(play, lines):
    run = play(PFedMe(SOLVER, solver_steps=1, lam=4.0, outer_lr=0.1), lines((1, 2, 1)))
    theta = 0.1 * 2
    assert float(run.model(0).weight.detach()) == pytest.approx(theta)
    assert weight(run) == pytest.approx(0.1 * 4.0 * theta)


def test_theta_settles_at_the_proximal_point(play, lines):
    run = play(PFedMe(SOLVER, solver_steps=300, lam=3.0, outer_lr=0.0), lines((1, 2, 1)))  # w stays at 0
    assert float(run.model(0).weight.detach()) == pytest.approx(2 / (1 + 3.0), abs=1e-4)


def test_there_is_a_local_round_for_each_batch(play, lines):
    world = lines((1, 2, 6))
    for training, rounds in (
        (LocalTraining("sgd", lr=0.1, batch_size=2), 3),
        (LocalTraining("sgd", lr=0.1, batch_size=2, epochs=2), 6),
        (LocalTraining("sgd", lr=0.1, batch_size=2, steps=4), 4),
    ):
        run = play(PFedMe(training, solver_steps=1, lam=4.0, outer_lr=0.25), world)  # w goes all the way to theta
        assert weight(run) == pytest.approx(2 * (1 - 0.9**rounds)), training


def test_a_last_batch_of_one_example_joins_the_one_before(play, clouds):
    run = play(PFedMe(LocalTraining("sgd", lr=0.01, batch_size=4), solver_steps=2), clouds("norm2", sizes=(9,)))
    assert run.reports[0].failures == {}


def test_beta_is_how_far_the_server_goes(play, lines):
    found = {
        beta: weight(play(PFedMe(SOLVER, solver_steps=1, beta=beta), lines((1, 2, 1), (1, 4, 3))))
        for beta in (0.0, 0.5, 1.0, 2.0)
    }
    assert found[0.0] == 0
    assert [found[0.5] * 2, found[2.0] / 2] == pytest.approx([found[1.0]] * 2)
    assert found[1.0] == pytest.approx(0.05 * 15 * (0.2 + 0.4) / 2), "clients weigh alike"


def test_refuses_a_step_that_goes_beyond_theta():
    with pytest.raises(ConfigError, match="outer_lr: expected at most 1 / lam"):
        PFedMe(lam=15.0, outer_lr=0.1)
