"""Ditto: a model of one's own beside the global one."""

import pytest
import torch
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.requests.fit import LocalTraining
from potluck.methods.ditto import Ditto
from potluck.methods.fedavg import FedAvg
from potluck.parts.sharing import Sharing

STEP = LocalTraining("sgd", lr=0.1, batch_size=64)
LONG = LocalTraining("sgd", lr=0.1, steps=200, batch_size=64)


def test_v_settles_between_the_clients_optimum_and_the_global_model(play, lines):
    still = LocalTraining("sgd", lr=0.0)
    run = play(Ditto(still, personal=LONG, lam=3.0), lines((1, 2, 4), (1, -6, 4)))  # w stays at 0
    assert [float(run.model(id).weight.detach()) for id in (0, 1)] == pytest.approx([2 / 4, -6 / 4], abs=1e-4)


def test_the_global_model_is_that_of_fedavg_whatever_becomes_of_v(play, lines):
    world = lines((1, 2, 4), (2, -6, 1))
    ditto = play(Ditto(STEP, personal=LONG, lam=0.5), world, rounds=3)
    fedavg = play(FedAvg(STEP, sharing=Sharing(weighting="uniform")), world, rounds=3)
    assert_close(ditto.state.weights, fedavg.state.weights, rtol=0, atol=0)


def test_nothing_of_v_is_sent_and_it_stays_while_a_client_is_not_drawn(play, clouds):
    run = play(Ditto(STEP, personal=STEP), clouds("norm2", "norm3"))
    assert set(run.wire.replied["local_update"][0][1]) == {"weights", "buffers", "examples"}
    before = dict(run.model(1).state_dict())
    run.round(0)
    assert_close(dict(run.model(1).state_dict()), before, rtol=0, atol=0)
    sent = run.wire.replied["local_update"][0][1]["weights"]
    assert not torch.equal(sent["head.weight"], before["head.weight"])


def test_a_client_that_never_trained_is_evaluated_with_statistics_of_its_data(play, clouds):
    run = play(Ditto(STEP, personal=STEP), clouds("norm2", "norm2"), rounds=0)
    run.round(0)
    mean = run.model(1).get_buffer("stages.stage0.1.running_mean")
    assert mean.abs().sum() > 0


def test_refuses_to_average_nothing():
    with pytest.raises(ConfigError, match=r"sharing\.scope: expected one that averages"):
        Ditto(sharing=Sharing("none"))
