from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.message import Message
from potluck.core.method import Need
from potluck.core.nets.weights import parameters_of
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedavg import FedAvg
from potluck.methods.felo import Felo
from potluck.models.contract import StagedNet
from potluck.models.split import split
from potluck.parts.features import ONE_ROW
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
STILL = LocalTraining("sgd", lr=0.0)
FULL = LocalTraining("sgd", lr=0.1, epochs=3, batch_size=64)  # three full steps
CLASSES = 3


def observed(net, examples):
    """Features and logits (n, ...) of all examples, detached."""
    h = split(net).intermediate(split(net).extractor(examples.inputs)).detach()
    return h, net.head(h).detach()


def by_hand(values, labels):
    """The mean of each class that is present, class by class."""
    return torch.stack([values[labels == label].mean(0) for label in range(CLASSES) if (labels == label).any()])


def sent(run, exchange=-1):
    return run.wire.sent["local_update"][exchange]


def replied(run, exchange=-1):
    return run.wire.replied["local_update"][exchange]


def uniform(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


# What clients send


def test_clients_send_the_means_of_their_classes(play, clouds):
    federation = clouds("mlp2", "mlp3", "wide2")
    run = play(Felo(STILL), federation)
    for id, site in federation.sites.items():
        h, z = observed(run.model(id), site.train)
        reply = replied(run)[id]
        assert_close(reply["features"], by_hand(h, site.train.labels))
        assert_close(reply["logits"], by_hand(z, site.train.labels))
        assert reply["counts"].tolist() == [(site.train.labels == c).sum() for c in range(CLASSES)]


def test_a_class_that_a_client_lacks_has_no_row(play, clouds):
    federation = clouds("mlp2", labels=((0, 2),))
    reply = replied(play(Felo(STILL), federation))[0]
    assert reply["counts"].tolist() == [6, 0, 6]
    assert reply["features"].shape == (2, 8)
    assert reply["logits"].shape == (2, CLASSES)
    h, _ = observed(play(Felo(), federation, rounds=0).model(0), federation.sites[0].train)
    assert_close(reply["features"], by_hand(h, federation.sites[0].train.labels))


def test_observations_are_those_of_the_last_epoch_as_they_were_in_training(play, clouds):
    federation = clouds("norm2")
    train = federation.sites[0].train
    run = play(Felo(replace(FULL, epochs=2)), federation, rounds=0)
    net = run.model(0).train()
    run.round()
    full_step(net, F.cross_entropy(net(train.inputs), train.labels))
    h, z = observed(net, train)  # before the second step, normalised by the batch
    assert_close(replied(run)[0]["features"], by_hand(h, train.labels))
    assert_close(replied(run)[0]["logits"], by_hand(z, train.labels))


def test_messages_weigh_what_the_wire_section_says(play, clouds):
    federation = clouds("mlp2", "wide2", labels=((0, 1), (0, 1, 2)))
    traffic = play(Felo(), federation, rounds=2).reports[1].traffic
    width, wide, floats, integers, flags = 8, 16, 4, 8, 1
    assert traffic.up == {
        "counts": 2 * CLASSES * integers,
        "features": (2 * width + 3 * wide) * floats,
        "logits": (2 + 3) * CLASSES * floats,
    }
    assert traffic.down == {
        "features": CLASSES * (width + wide) * floats + 2 * CLASSES * flags,
        "logits": 2 * (CLASSES * CLASSES * floats + CLASSES * flags),
    }


# What the server makes of it


def test_features_are_averaged_over_examples_and_logits_over_clients(play, clouds):
    federation = clouds("mlp2", "mlp3", "mlp2", sizes=(4, 20, 12), labels=((0, 1), (1, 0, 2), (2, 2, 0)))
    run = play(Felo(STILL), federation, rounds=2)
    every = [(*observed(run.model(id), site.train), site.train.labels) for id, site in federation.sites.items()]
    h, labels = torch.cat([h for h, _, _ in every]), torch.cat([labels for _, _, labels in every])
    for message in sent(run).values():
        assert_close(message["features"]["means"], by_hand(h, labels))
        for label in range(CLASSES):
            holders = [z[mine == label].mean(0) for _, z, mine in every if (mine == label).any()]
            assert_close(message["logits"]["means"][label], torch.stack(holders).mean(0))
            examples = torch.cat([z for _, z, _ in every])[labels == label]
            assert not torch.allclose(message["logits"]["means"][label], examples.mean(0), atol=1e-4)


def test_averages_cover_earlier_rounds_too(play, clouds):
    run = play(Felo(FULL), clouds("mlp2", "mlp2"), rounds=0)
    for ids in ((0,), (1,), (0, 1)):
        run.round(*ids)
    first, second = replied(run, 0)[0], replied(run, 1)[1]
    counts = torch.stack([first["counts"], second["counts"]])[:, :, None]
    means = torch.stack([first["features"], second["features"]])
    assert_close(sent(run)[0]["features"]["means"], (means * counts).sum(0) / counts.sum(0))
    assert_close(sent(run)[0]["logits"]["means"], (first["logits"] + second["logits"]) / 2)


def test_all_clients_of_a_round_receive_the_same_averages(play, clouds):
    run = play(Felo(), clouds("mlp2", "mlp3", "norm2"), rounds=2)
    for message in sent(run).values():
        assert_close(message["features"], sent(run)[0]["features"], **EXACTLY)
        assert_close(message["logits"], sent(run)[0]["logits"], **EXACTLY)


def test_clients_receive_features_of_their_own_width_and_logits_of_everybody(play, clouds):
    federation = clouds("mlp2", "wide2", "mlp3")
    run = play(Felo(STILL), federation, rounds=2)
    narrow, wide, deep = (sent(run)[id] for id in range(3))
    assert_close(narrow["features"], deep["features"], **EXACTLY)
    h, _ = observed(run.model(1), federation.sites[1].train)
    assert_close(wide["features"]["means"], by_hand(h, federation.sites[1].train.labels))
    for message in (narrow, wide, deep):
        assert_close(message["logits"], narrow["logits"], **EXACTLY)
    assert_close(narrow["logits"]["means"], torch.stack([replied(run, 0)[id]["logits"] for id in range(3)]).mean(0))


def tapered(width):
    """A net whose features have this width behind a stem that is the same for all."""
    stages = {"stem": nn.Linear(6, 8), "deep": nn.Sequential(nn.ReLU(), nn.Linear(8, width))}
    return StagedNet(stages, nn.Linear(width, CLASSES))


def test_the_width_is_that_of_what_the_last_layer_reads(play, clouds):
    federation = clouds("mlp2", "mlp3")
    architectures = {"mlp2": partial(tapered, 4), "mlp3": partial(tapered, 5)}
    run = play(Felo(), replace(federation, architectures=architectures), rounds=2)
    assert [sent(run)[id]["features"]["means"].shape for id in (0, 1)] == [(CLASSES, 4), (CLASSES, 5)]
    assert_close(sent(run)[1]["features"]["means"], replied(run, 0)[1]["features"])


def test_a_client_whose_width_nobody_has_reported_receives_logits_alone(play, clouds):
    run = play(Felo(), clouds("mlp2", "wide2"), rounds=0)
    run.round(0)
    run.round(0, 1)
    assert set(sent(run)[0]) == {"features", "logits"}
    assert set(sent(run)[1]) == {"logits"}


def test_a_class_that_nobody_has_reported_is_marked_as_unknown(play, clouds):
    run = play(Felo(), clouds("mlp2", "mlp2", labels=((0, 2), (0, 1, 2))), rounds=0)
    run.round(0)
    run.round(1)
    for name, width in (("features", 8), ("logits", CLASSES)):
        table = sent(run)[1][name]
        assert table["known"].tolist() == [True, False, True]
        assert table["means"].shape == (CLASSES, width)
        assert not table["means"][1].any()
    run.round(1)
    assert sent(run)[1]["features"]["known"].all()


@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_averages_are_sent_when_the_warm_up_is_over(play, clouds, warmup):
    run = play(Felo(warmup_rounds=warmup), clouds("mlp2", "mlp3"), rounds=5)
    silent = max(warmup, 1)  # nothing is known in the first round
    entries = [set(messages[0]) for messages in run.wire.sent["local_update"]]
    assert entries == [set()] * silent + [{"features", "logits"}] * (5 - silent)


def test_what_was_reported_in_warm_up_is_used_after_it(play, clouds):
    run = play(Felo(STILL, warmup_rounds=2), clouds("mlp2", "mlp2"), rounds=0)
    for ids in ((0,), (1,), (0, 1)):
        run.round(*ids)
    expected = (replied(run, 0)[0]["logits"] + replied(run, 1)[1]["logits"]) / 2
    assert_close(sent(run)[0]["logits"]["means"], expected)


# Stores


def test_features_are_forgotten_by_examples_and_logits_by_reports(play, clouds):
    # A report of one client with 4 examples a class, three times: 6 examples are one and a half reports.
    run = play(Felo(FULL, feature_capacity=6, logit_capacity=2), clouds("mlp2"), rounds=4)
    one, two, three = (replied(run, exchange)[0] for exchange in range(3))
    assert_close(sent(run)[0]["features"]["means"], (2 * two["features"] + 4 * three["features"]) / 6)
    assert_close(sent(run)[0]["logits"]["means"], (two["logits"] + three["logits"]) / 2)
    assert not torch.allclose(one["logits"], two["logits"], atol=1e-3)


# Local training


def full_step(net, loss):
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter -= 0.1 * gradient


@pytest.mark.parametrize("alpha", [0.0, 0.5, 3.0])
def test_local_training_descends_the_tasks_loss_and_both_distances(play, clouds, alpha):
    federation = clouds("mlp2", "mlp3")
    run = play(Felo(FULL, alpha=alpha), federation)
    nets = [run.model(id) for id in (0, 1)]
    run.round()
    for id, net in enumerate(nets):
        inputs, labels = federation.sites[id].train.inputs, federation.sites[id].train.labels
        tables = [sent(run)[id][name]["means"][labels] for name in ("features", "logits")]
        for _ in range(3):
            h = split(net).intermediate(split(net).extractor(inputs))
            gaps = (h - tables[0]).square().mean() + (net.head(h) - tables[1]).square().mean()
            full_step(net, F.cross_entropy(net.head(h), labels) + alpha * gaps)
        assert_close(parameters_of(run.model(id)), parameters_of(net))


def test_training_draws_features_and_logits_towards_the_averages(play, clouds):
    federation = clouds("mlp2", "mlp3")
    gaps = {}
    for alpha in (0.0, 2.0):
        run = play(Felo(FULL, alpha=alpha), federation)
        run.round()
        gaps[alpha] = []
        for id, site in federation.sites.items():
            values = observed(run.model(id), site.train)
            tables = [sent(run)[id][name]["means"][site.train.labels] for name in ("features", "logits")]
            gaps[alpha] += [(v - table).square().mean().item() for v, table in zip(values, tables, strict=True)]
    assert all(near < far for near, far in zip(gaps[2.0], gaps[0.0], strict=True))


# Who takes part, and sharing


def test_clients_keep_their_own_models_whoever_is_drawn(play, clouds):
    run = play(Felo(), clouds("norm2", "norm2", "mlp3"))
    before = [run.model(id).state_dict() for id in range(3)]
    run.round(0, 2)
    after = [run.model(id).state_dict() for id in range(3)]
    assert_close(after[1], before[1], **EXACTLY)
    assert not torch.equal(after[0]["head.weight"], before[0]["head.weight"])
    assert_close(dict(after[0]), run.kept(0)["model"], **EXACTLY)
    assert run.engine.global_model(run.state) is None


def test_a_client_drawn_late_receives_averages_like_everybody(play, clouds):
    run = play(Felo(), clouds("mlp2", "mlp3"), rounds=0)
    run.round(0)
    run.round(1)
    assert_close(sent(run)[1]["features"]["means"], replied(run, 0)[0]["features"])


def test_no_weights_and_no_labels_of_single_examples_cross_the_wire(play, clouds):
    run = play(Felo(), clouds("norm2", "norm3"), rounds=2)
    assert set(run.reports[1].traffic.up) == {"counts", "features", "logits"}
    assert all(len(reply["features"]) == len(reply["logits"]) == CLASSES for reply in replied(run).values())
    assert run.state.weights == {}


@pytest.mark.parametrize("scope", ["layer", "architecture"])
@pytest.mark.parametrize("buffers", ["average", "local", "drop"])
def test_with_sharing_and_without_distances_it_is_fedavg_bit_for_bit(play, clouds, scope, buffers):
    federation = clouds("norm2", "norm3", "norm2")
    sharing = Sharing(scope, buffers=buffers)
    ours, theirs = (
        play(cls, federation, rounds=0) for cls in (Felo(alpha=0.0, sharing=sharing), FedAvg(sharing=sharing))
    )
    for ids in ((0, 1), (1, 2), (0, 1, 2)):
        ours.round(*ids)
        theirs.round(*ids)
    assert_close([s.weights for s in ours.states], [s.weights for s in theirs.states], **EXACTLY)
    for id in range(3):
        assert_close(dict(ours.model(id).state_dict()), dict(theirs.model(id).state_dict()), **EXACTLY)


def test_with_sharing_the_averages_travel_beside_the_weights(play, clouds):
    run = play(Felo(sharing=Sharing("architecture")), clouds("norm2", "norm3"), rounds=2)
    assert set(run.reports[1].traffic.down) == {"features", "logits", "weights", "buffers"}
    assert set(run.reports[1].traffic.up) == {"counts", "features", "logits", "weights", "buffers", "examples"}
    without = play(Felo(alpha=0.0, sharing=Sharing("architecture")), clouds("norm2", "norm3"), rounds=2)
    one, other = (found.state.weights["norm2"]["head.weight"] for found in (run, without))
    assert not torch.allclose(one, other, atol=1e-4)


def test_with_sharing_one_architecture_has_a_global_model(play, clouds):
    run = play(Felo(sharing=Sharing()), clouds("mlp2", "mlp2"))
    assert_close(dict(run.engine.global_model(run.state).state_dict()), run.state.weights["all"], **EXACTLY)
    assert_close(dict(run.model(0).state_dict()), dict(run.model(1).state_dict()), **EXACTLY)


def test_models_must_split_and_sharing_adds_its_own_needs():
    own = {Need.SPLIT_MODEL, Need.CLASSES, ONE_ROW}
    assert Felo().needs() == own
    assert Felo(sharing=Sharing("layer")).needs() == own | {Need.NESTED_LAYERS}
    assert Felo(sharing=Sharing("architecture")).needs() == own


def test_evaluation_needs_nothing_from_the_server(play, clouds):
    run = play(Felo(), clouds("mlp2"), rounds=2)
    assert len(run.engine.method.inference_message(run.state, 0, run.engine.server(2))) == len(Message()) == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"alpha": -0.1}, "alpha: expected at least 0, found -0.1"),
        ({"alpha": float("nan")}, "alpha: expected a finite number, found nan"),
        ({"warmup_rounds": -1}, "warmup_rounds: expected at least 0, found -1"),
        ({"feature_capacity": 0}, "feature_capacity: expected at least 1, found 0"),
        ({"logit_capacity": 0}, "logit_capacity: expected at least 1, found 0"),
    ],
)
def test_hyper_parameters_out_of_range_are_refused(options, expected):
    with pytest.raises(ValueError, match=expected):
        Felo(**options)
