"""LG-FedAvg: which layers are averaged, over whom, and which stay."""

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
from potluck.methods.lgfedavg import LGFedAvg
from potluck.models.contract import StagedNet
from potluck.parts.heads import COMMON_HEAD, WHOLE_HEAD
from potluck.parts.means import Aggregate

EXACTLY = {"rtol": 0, "atol": 0}
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
CLASSES = 3


def sent(run, exchange=-1):
    return run.wire.sent["local_update"][exchange]


def replied(run, exchange=-1):
    return run.wire.replied["local_update"][exchange]


def narrow_before(hidden):
    """A net with a hidden width of its own and features of the common width."""
    stages = {"stem": nn.Linear(6, hidden), "deep": nn.Sequential(nn.ReLU(), nn.Linear(hidden, 8))}
    return StagedNet(stages, nn.Linear(8, CLASSES))


@pytest.fixture
def unlike(clouds):
    """Three clients with networks that share nothing but the shape of the head."""
    architectures = {"mlp2": partial(narrow_before, 4), "mlp3": partial(narrow_before, 7), "norm3": None}
    federation = clouds("mlp2", "mlp3", "norm3")
    return replace(federation, architectures=federation.architectures | {k: v for k, v in architectures.items() if v})


@pytest.mark.parametrize(("weighting", "shares"), [("samples", (12, 20, 9)), ("uniform", (1, 1, 1))])
def test_the_new_head_is_the_mean_of_what_was_sent(play, unlike, weighting, shares):
    run = play(LGFedAvg(FULL, weighting=weighting), unlike)
    for name, found in run.state.shared.items():
        parts = [share * replied(run)[id]["shared"][name] for id, share in enumerate(shares)]
        assert_close(found, sum(parts) / sum(shares))
    assert not torch.allclose(replied(run)[0]["shared"]["weight"], replied(run)[1]["shared"]["weight"])


def test_a_rule_of_means_applies_to_heads(play, unlike):
    run = play(LGFedAvg(FULL, combine=Aggregate("median")), unlike)
    sent = torch.stack([replied(run)[id]["shared"]["weight"] for id in range(3)])
    assert_close(run.state.shared["weight"], sent.median(0).values)


def test_all_layers_are_averaged_if_so_chosen(play, clouds):
    run = play(LGFedAvg(FULL, averaged="all"), clouds("norm2", "norm2"))
    one, two = (run.model(id).state_dict() for id in (0, 1))
    assert_close(dict(one), dict(two), **EXACTLY)
    assert run.state.shared.keys() == one.keys()


def test_only_the_head_crosses_the_wire_and_all_get_the_same(play, unlike):
    run = play(LGFedAvg(FULL), unlike, rounds=2)
    head = 3 * (8 + 1) * 4
    assert run.reports[1].traffic.down == {"shared": 3 * head}
    assert run.reports[1].traffic.up == {"shared": 3 * head, "examples": 3 * 8}
    for message in sent(run).values():
        assert_close(message["shared"], run.states[1].shared, **EXACTLY)


def test_local_training_is_a_step_of_all_layers_from_the_own_ones_and_the_global_head(play, unlike):
    run = play(LGFedAvg(FULL), unlike)
    net, train = run.model(0), unlike.sites[0].train
    assert_close(dict(net.head.state_dict()), run.state.shared, **EXACTLY)
    loss = nn.functional.cross_entropy(net(train.inputs), train.labels)
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    stepped = [w.detach() - 0.1 * g for w, g in zip(net.parameters(), gradients, strict=True)]
    run.round()
    for (name, before), expected in zip(net.named_parameters(), stepped, strict=True):
        found = replied(run)[0]["shared"][name.removeprefix("head.")] if "head" in name else run.kept(0)["model"][name]
        assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")
        assert not torch.equal(found, before.detach())


def test_layers_before_the_head_stay_at_the_client(play, clouds):
    run = play(LGFedAvg(FULL), clouds("mlp2", "mlp2"))
    one, two = (run.model(id).state_dict() for id in (0, 1))
    assert all(torch.equal(one[name], two[name]) == name.startswith("head.") for name in one)


def test_a_client_that_was_not_drawn_keeps_its_layers_and_predicts_with_the_newest_head(play, unlike):
    run = play(LGFedAvg(FULL), unlike)
    before = dict(run.model(2).state_dict())
    run.round(0, 1)
    after = dict(run.model(2).state_dict())
    assert_close({n: t for n, t in after.items() if "head" not in n}, {n: before[n] for n in after if "head" not in n},
                 **EXACTLY)  # fmt: skip
    assert_close(after["head.weight"], run.state.shared["weight"], **EXACTLY)
    assert not torch.equal(after["head.weight"], before["head.weight"])


def test_a_newcomer_with_an_architecture_nobody_had_starts_from_the_newest_head(play, unlike):
    run = play(LGFedAvg(FULL), unlike, rounds=0)
    run.round(0, 1)
    head = run.state.shared
    run.round(2)
    assert_close(sent(run)[2]["shared"], head, **EXACTLY)
    assert_close(run.state.shared, replied(run)[2]["shared"])


def test_a_class_that_a_client_lacks_is_learnt_by_its_head_from_the_others(play, clouds):
    run = play(LGFedAvg(FULL), clouds("mlp2", "mlp2", labels=((0, 1), (2,))), rounds=5)
    alone = replied(run)[0]["shared"]["bias"]
    assert run.state.shared["bias"][2] > alone[2]


def normed_head(width):
    stages = {"stem": nn.Linear(6, width), "deep": nn.Sequential(nn.ReLU(), nn.Linear(width, 8))}
    return StagedNet(stages, nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, CLASSES)), num_features=8)


def test_a_heads_statistics_are_averaged_with_its_weights(play, clouds):
    nets = {"mlp2": partial(normed_head, 4), "mlp3": partial(normed_head, 5)}
    run = play(LGFedAvg(FULL), replace(clouds("mlp2", "mlp3", sizes=(12, 20)), architectures=nets))
    one, two = (replied(run)[id]["shared"]["0.running_mean"] for id in (0, 1))
    assert_close(run.state.shared["0.running_mean"], (12 * one + 20 * two) / 32)


def test_needs_a_common_head_and_nothing_in_common_before_it(unlike, clouds):
    assert LGFedAvg().needs() == {Need.SPLIT_MODEL, WHOLE_HEAD, COMMON_HEAD}
    assert LGFedAvg(averaged="all").needs() == {Need.ONE_ARCHITECTURE}
    check_needs(LGFedAvg().needs(), "lgfedavg", Offer.of(unlike))
    with pytest.raises(ConfigError, match="all clients get one head"):
        check_needs(LGFedAvg().needs(), "lgfedavg", Offer.of(clouds("mlp2", "wide2")))
