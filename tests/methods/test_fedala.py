"""FedALA: what of the global model a client takes."""

import pytest
import torch
from torch.testing import assert_close

from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedala import FedALA, towards
from potluck.methods.fedavg import FedAvg

FULL = LocalTraining("sgd", lr=0.3, batch_size=64)
EXACTLY = {"rtol": 0, "atol": 0}
APART = {"labels": ((0, 1), (1, 2))}


def test_shares_of_1_take_all_and_of_0_nothing():
    own, theirs = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([5.0, 5.0])}
    assert towards(own, theirs, {"w": torch.tensor([1.0, 0.0])})["w"].tolist() == [5.0, 2.0]


def test_a_share_falls_where_the_global_weight_does_harm_and_stays_within_0_and_1(play, clouds):
    run = play(FedALA(FULL, share_lr=50.0), clouds("mlp2", "mlp2", **APART), rounds=3)
    shares = torch.cat([share.flatten() for share in run.kept(0)["state"]["shares"].values()])
    assert 0 <= shares.min() < 0.2
    assert shares.max() == 1


def test_the_first_time_a_client_takes_the_global_model(play, clouds):
    world = clouds("mlp2", "mlp2", **APART)
    ours, theirs = (play(method, world) for method in (FedALA(FULL), FedAvg(FULL)))
    assert_close(ours.state.weights, theirs.state.weights, **EXACTLY)
    assert "shares" not in ours.kept(0)["state"]


def test_only_the_last_layers_adapt_and_the_others_are_the_global_ones(play, clouds):
    run = play(FedALA(FULL, share_lr=50.0), clouds("mlp2", "mlp2", **APART), rounds=3)
    assert set(run.kept(0)["state"]["shares"]) == {"head.weight", "head.bias"}
    model, sent = run.model(0).state_dict(), run.state.weights["all"]
    assert {name for name in sent if not torch.equal(model[name], sent[name])} == {"head.weight", "head.bias"}


@pytest.mark.parametrize(("settled", "passes"), [(1e9, 10), (0.0, 17)])
def test_the_first_time_it_learns_until_its_losses_settle(play, clouds, monkeypatch, settled, passes):
    run = play(FedALA(FULL, settled=settled, most=17), clouds("mlp2"))
    asked = []
    plain = type(run.engine._host).carry_out
    monkeypatch.setattr(
        type(run.engine._host),
        "carry_out",
        lambda self, request, key: asked.append(request.kind) or plain(self, request, key),
    )
    run.round()
    assert asked.count("gradient") == passes
    asked.clear()
    run.round()
    assert asked.count("gradient") == 1, "later for one pass"


def test_a_last_batch_of_one_example_joins_the_one_before(play, clouds):
    run = play(FedALA(LocalTraining("sgd", lr=0.1, batch_size=4), sampled=1.0), clouds("norm2", sizes=(9,)), rounds=2)
    assert run.model(0).get_buffer("stages.stage0.1.running_mean").abs().sum() > 0
