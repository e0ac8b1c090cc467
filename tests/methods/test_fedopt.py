"""FedOpt: the server's steps by hand, and layers that nobody of the round owns."""

import math

import pytest
import torch
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedopt import FedOpt
from potluck.parts.sharing import Sharing

STEP = LocalTraining("sgd", lr=0.5, batch_size=64)  # of (w - 2)^2 / 2: half the way to 2


def weight(run):
    return float(run.state.weights["all"]["weight"])


def test_momentum_goes_on_where_updates_have_ceased(play, lines):
    run = play(FedOpt(STEP, "momentum", server_lr=1.0, beta1=0.5), lines((1, 2, 1)))
    assert weight(run) == pytest.approx(1.0)
    run.round()  # m = 0.5 + 0.5
    assert weight(run) == pytest.approx(2.0)
    run.round()  # the client is at its optimum, and m = 0.5
    assert weight(run) == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("rule", "v"),
    [("adam", 0.9 * 0.25 + 0.1), ("yogi", 0.25 + 0.1), ("adagrad", 0.25 + 1.0)],
)
def test_the_first_step_of_each_rule(play, lines, rule, v):
    run = play(FedOpt(STEP, rule, server_lr=0.1, beta1=0.0, beta2=0.9, tau=0.5), lines((1, 2, 1)))
    assert float(run.state.v["all"]["weight"]) == pytest.approx(v)
    assert weight(run) == pytest.approx(0.1 * 1.0 / (math.sqrt(v) + 0.5))


def test_yogis_v_falls_slower_than_adams(play, lines):
    found = {rule: play(FedOpt(STEP, rule, tau=1.5), lines((1, 2, 1))).state.v["all"] for rule in ("adam", "yogi")}
    assert float(found["adam"]["weight"]) == pytest.approx(0.99 * 2.25 + 0.01)
    assert float(found["yogi"]["weight"]) == pytest.approx(2.25 - 0.01)


def test_a_layer_of_which_no_owner_was_drawn_rests_and_so_does_its_memory(play, clouds):
    run = play(FedOpt(STEP), clouds("mlp2", "mlp3"))
    before = run.state
    run.round(0)
    theirs = [name for name in before.m["all"] if name.startswith("stages.hidden2")] or sorted(
        before.m["all"].keys() - {n for n, _ in run.model(0).named_parameters()}
    )
    assert theirs
    for part in ("weights", "m", "v"):
        now, then = getattr(run.state, part)["all"], getattr(before, part)["all"]
        assert_close({n: now[n] for n in theirs}, {n: then[n] for n in theirs}, rtol=0, atol=0)
        assert not torch.equal(now["head.weight"], then["head.weight"])


def test_statistics_are_averaged_and_no_optimisers_business(play, clouds):
    run = play(FedOpt(STEP), clouds("norm2", "norm2", sizes=(12, 20)))
    name = "stages.stage0.1.running_mean"
    sent = [run.wire.replied["local_update"][0][id]["buffers"][name] for id in (0, 1)]
    assert_close(run.state.weights["all"][name], (12 * sent[0] + 20 * sent[1]) / 32)
    assert name not in run.state.m["all"]


def test_refuses_to_optimise_what_is_not_averaged():
    with pytest.raises(ConfigError, match=r"sharing\.scope: expected one that averages"):
        FedOpt(sharing=Sharing("none"))
