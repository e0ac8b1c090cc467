"""APFL: the mixture, and how much of it is the client's own."""

import pytest
import torch
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.requests.fit import LocalTraining
from potluck.methods.apfl import APFL
from potluck.parts.sharing import Sharing

STEP = LocalTraining("sgd", lr=0.1, batch_size=64)


def test_alpha_follows_the_slope_of_the_mixtures_loss(play, lines):
    run = play(APFL(STEP, alpha=0.5), lines((1, 2, 1)))
    w, v = 0.2, 0.1  # from 0: w by the whole gradient, v by alpha times the same
    assert float(run.state.weights["all"]["weight"]) == pytest.approx(w)
    bar = 0.5 * v + 0.5 * w
    assert float(run.model(0).weight.detach()) == pytest.approx(bar)
    run.round()
    alpha = 0.5 - 0.1 * (v - w) * (bar - 2)
    assert run.kept(0)["state"]["alpha"] == pytest.approx(alpha)


@pytest.mark.parametrize("start", [0.02, 0.98])
def test_alpha_stays_between_0_and_1(play, lines, start):
    run = play(APFL(STEP, alpha=start), lines((1, 20, 1), (1, -20, 1)), rounds=6)
    found = [run.kept(id)["state"]["alpha"] for id in (0, 1)]
    assert all(0 <= alpha <= 1 for alpha in found)
    assert {0.0, 1.0} & set(found), "it would have gone beyond"


def test_a_fixed_alpha_stays(play, clouds):
    run = play(APFL(STEP, alpha=0.3, adaptive=False), clouds("mlp2", "mlp3"), rounds=2)
    assert "alpha" not in run.kept(0)["state"]


def test_the_own_model_is_never_sent_and_begins_as_the_one_that_was(play, clouds):
    run = play(APFL(STEP), clouds("norm2", "norm3"), rounds=0)
    run.round(0)
    theirs = run.model(1).state_dict()
    assert_close(theirs["head.weight"], run.state.weights["all"]["head.weight"], rtol=0, atol=0)
    assert set(run.wire.replied["local_update"][0][0]) == {"weights", "buffers", "examples"}


def test_the_mixtures_gradient_does_not_reach_the_global_model(play, lines):
    """Were it not detached, w would move by more than its own gradient."""
    run = play(APFL(STEP, alpha=0.25, adaptive=False), lines((1, 2, 1)))
    assert float(run.state.weights["all"]["weight"]) == pytest.approx(0.2)


def test_the_records_tell_the_mean_alpha(play, lines):
    run = play(APFL(STEP), lines((1, 2, 1), (1, -1, 1)), rounds=2)
    shares = [run.kept(id)["state"]["alpha"] for id in (0, 1)]
    assert torch.tensor(shares).mean() == pytest.approx(run.reports[-1].notes["clients/alpha"])


def test_refuses_to_average_nothing():
    with pytest.raises(ConfigError, match=r"sharing\.scope: expected one that averages"):
        APFL(sharing=Sharing("none"))
