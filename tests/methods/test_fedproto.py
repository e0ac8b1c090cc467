"""FedProto: what clients report, what the server makes of it, how they learn from it and predict by it."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.needs import Need, Offer
from potluck.core.nets.weights import parameters_of
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import LocalTraining
from potluck.experiment.federation.needs import check_needs
from potluck.methods.fedproto import FedProto, MeansLoss
from potluck.models.contract import StagedNet
from potluck.parts.features import ONE_ROW
from potluck.parts.heads import COMMON_WIDTH
from potluck.parts.means import Aggregate
from potluck.parts.prototypes import NearestPrototype

EXACTLY = {"rtol": 0, "atol": 0}
STILL = LocalTraining("sgd", lr=0.0)
FULL = LocalTraining("sgd", lr=0.1, epochs=3, batch_size=64)  # three full steps
CLASSES = 3


def features(net, inputs):
    """What the head reads."""
    return net.pool(net.stages(inputs))


def own_means(net, examples):
    """The mean of each class that is present, class by class."""
    h, labels = features(net, examples.inputs).detach(), examples.labels
    return {int(label): h[labels == label].mean(0) for label in labels.unique()}


def client_net(run, id):
    """The client's own network, without what the server adds."""
    found = run.model(id)
    return found.net if isinstance(found, NearestPrototype) else found


def sent(run, exchange=-1):
    return run.wire.sent["local_update"][exchange]


def replied(run, exchange=-1):
    return run.wire.replied["local_update"][exchange]


# What is reported, and averaged


@pytest.mark.parametrize("report", ["during", "after"])
def test_clients_report_the_mean_features_of_the_classes_that_they_have(play, clouds, report):
    federation = clouds("mlp2", "mlp3", labels=((0, 2), (0, 1, 2)))
    run = play(FedProto(STILL, report=report), federation)
    for id, site in federation.sites.items():
        expected = own_means(client_net(run, id), site.train)
        assert_close(replied(run)[id]["prototypes"], torch.stack([expected[label] for label in sorted(expected)]))
    assert replied(run)[0]["counts"].tolist() == [6, 0, 6]


def test_report__during_training_is_before_the_last_step_and_after_it_of_the_trained_model(play, clouds):
    federation = clouds("norm2")
    run = play(FedProto(FULL, report="after"), federation)
    trained = own_means(client_net(run, 0).eval(), federation.sites[0].train)
    assert_close(replied(run)[0]["prototypes"], torch.stack([*trained.values()]))
    during = play(FedProto(replace(FULL, epochs=1)), federation, rounds=0)
    net = client_net(during, 0).train()
    during.round()
    assert_close(replied(during)[0]["prototypes"], torch.stack([*own_means(net, federation.sites[0].train).values()]))


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_the_server_averages_the_prototypes_of_a_class_over_those_who_have_it(play, clouds, weighting):
    federation = clouds("mlp2", "mlp3", "mlp2", labels=((0, 1), (1, 1, 0), (0,)))
    run = play(FedProto(STILL, weighting=weighting), federation)
    own = {id: own_means(client_net(run, id), site.train) for id, site in federation.sites.items()}
    for label in (0, 1):
        who = [id for id in own if label in own[id]]
        counts = [int((federation.sites[id].train.labels == label).sum()) for id in who]
        shares = counts if weighting == "samples" else [1] * len(who)
        expected = sum(share * own[id][label] for id, share in zip(who, shares, strict=True)) / sum(shares)
        assert_close(run.state.prototypes["means"][label], expected)
    assert run.state.prototypes["known"].tolist() == [True, True, False]
    assert not run.state.prototypes["means"][2].any()


def test_a_rule_of_means_applies_by_class(play, clouds):
    run = play(FedProto(STILL, combine=Aggregate("median")), clouds("mlp2", "mlp3", "mlp2", labels=((0, 1, 2),) * 3))
    sent = torch.stack([replied(run)[id]["prototypes"] for id in range(3)])
    assert_close(run.state.prototypes["means"], sent.median(0).values)


def test_a_class_that_nobody_reports_in_a_round_keeps_its_average(play, clouds):
    run = play(FedProto(FULL), clouds("mlp2", "mlp2", labels=((0, 1), (1, 2))), rounds=0)
    run.round(0)
    run.round(1)
    first, second = (state.prototypes for state in run.states[1:])
    assert first["known"].tolist() == [True, True, False]
    assert second["known"].tolist() == [True, True, True]
    assert_close(second["means"][0], first["means"][0], **EXACTLY)
    assert_close(second["means"][1:], replied(run)[1]["prototypes"])


def test_messages_hold_prototypes_and_counts_alone(play, clouds):
    run = play(FedProto(FULL), clouds("mlp2", "mlp3", labels=((0, 1), (0, 1, 2))), rounds=2)
    width, floats, integers, flags = 8, 4, 8, 1
    assert run.reports[0].traffic.down == {}
    assert run.reports[1].traffic.down == {"prototypes": 2 * CLASSES * (width * floats + flags)}
    assert run.reports[1].traffic.up == {"counts": 2 * CLASSES * integers, "prototypes": (2 + 3) * width * floats}


# Local training


def stepped(net, loss):
    gradients = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
    with torch.no_grad():
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter -= 0.1 * gradient


@pytest.mark.parametrize("distance", ["examples", "means"])
def test_local_training_descends_the_tasks_loss_and_the_distance(play, clouds, distance):
    federation = clouds("mlp2", "mlp3", labels=((0, 1), (0, 2)))
    run = play(FedProto(FULL, strength=2.0, distance=distance), federation)
    nets = [client_net(run, id) for id in (0, 1)]
    run.round()
    for id, net in enumerate(nets):
        table, examples = sent(run)[id]["prototypes"]["means"], federation.sites[id].train
        for _ in range(3):
            h, y = features(net, examples.inputs), examples.labels
            if distance == "examples":
                gap = ((h - table[y]) ** 2).sum() / h.numel()
            else:
                gap = sum(((h[y == j].mean(0) - table[j]) ** 2).sum().sqrt() for j in y.unique())
            stepped(net, F.cross_entropy(net.head(h), y) + 2.0 * gap)
        assert_close(parameters_of(client_net(run, id)), parameters_of(net))


@pytest.mark.parametrize("distance", ["examples", "means"])
def test_training_draws_features_towards_the_averages(play, clouds, distance):
    federation = clouds("mlp2", "mlp3")
    far = {}
    for strength in (0.0, 0.3):
        run = play(FedProto(FULL, strength=strength, distance=distance), federation, rounds=2)
        table = sent(run)[0]["prototypes"]["means"]
        own = own_means(client_net(run, 0), federation.sites[0].train)
        far[strength] = sum((own[label] - table[label]).norm().item() for label in own)
    assert far[0.3] < far[0.0]


def test_means_loss__has_the_gradient_of_its_value_and_none_from_classes_without_an_average():
    torch.manual_seed(0)
    net = StagedNet({"stem": nn.Linear(2, 3), "deep": nn.Tanh()}, nn.Linear(3, CLASSES)).double()
    batch = Batch(torch.randn(7, 2).double(), torch.tensor([0, 0, 1, 1, 1, 2, 2]), {})
    table = {"means": torch.randn(CLASSES, 3).double(), "known": torch.tensor([True, True, False])}
    loss, weight = MeansLoss(F.cross_entropy, 1.5), net.stages.stem.weight
    value, seen = loss(net, batch, {"features": table})
    (gradient,) = torch.autograd.grad(value, weight)
    step = 1e-6
    for place in ((0, 0), (2, 1)):
        ends = []
        for sign in (1, -1):
            with torch.no_grad():
                weight[place] += sign * step
                ends.append(loss(net, batch, {"features": table})[0])
                weight[place] -= sign * step
        assert_close(gradient[place], (ends[0] - ends[1]) / (2 * step), rtol=1e-5, atol=1e-8)
    h = seen["features"]
    gaps = [(h[batch.targets == j].mean(0) - table["means"][j]).norm() for j in (0, 1)]
    assert_close(value, F.cross_entropy(net(batch.inputs), batch.targets) + 1.5 * sum(gaps))


def test_means_loss__at_the_averages_the_gradient_is_the_tasks():
    net = StagedNet({"stem": nn.Linear(2, 3), "deep": nn.Tanh()}, nn.Linear(3, CLASSES))
    batch = Batch(torch.ones(2, 2), torch.tensor([0, 0]), {})
    table = {"means": features(net, batch.inputs).detach()[:1].repeat(CLASSES, 1), "known": torch.ones(CLASSES).bool()}
    value, _ = MeansLoss(F.cross_entropy, 5.0)(net, batch, {"features": table})
    found, task = (
        torch.autograd.grad(loss, list(net.parameters()))
        for loss in (value, F.cross_entropy(net(batch.inputs), batch.targets))
    )
    assert_close(found, task)
    assert_close(value, F.cross_entropy(net(batch.inputs), batch.targets))  # nor do classes that the batch lacks count


# Who takes part, and how it predicts


def test_a_client_predicts_the_class_of_the_nearest_average_and_at_first_with_its_head(play, clouds):
    federation = clouds("mlp2", "mlp3", labels=((0, 1), (0, 1)))
    run = play(FedProto(FULL), federation, rounds=0)
    assert not isinstance(run.model(0), NearestPrototype)
    run.round()
    inputs = federation.sites[0].train.inputs
    h = features(client_net(run, 0), inputs).detach()
    table = run.state.prototypes["means"]
    nearest = torch.stack([(h - table[label]).square().sum(1) for label in (0, 1)], 1).argmin(1)
    assert run.model(0)(inputs).argmax(1).tolist() == nearest.tolist()
    assert not (run.model(0)(inputs).argmax(1) == 2).any()  # nobody has class 2
    assert isinstance(play(FedProto(FULL, prediction="head"), federation).model(0), StagedNet)


def test_an_example_whose_class_has_no_average_is_learnt_by_the_tasks_loss_alone(play, clouds):
    federation = clouds("mlp2", "mlp2", labels=((0,), (2,)))
    runs = [play(FedProto(FULL, strength=strength), federation, rounds=0) for strength in (4.0, 0.0)]
    for run in runs:
        run.round(0)
        run.round(1)
    assert sent(runs[0])[1]["prototypes"]["known"].tolist() == [True, False, False]
    assert_close(*(parameters_of(client_net(run, 1)) for run in runs))


def test_a_newcomer_with_an_architecture_nobody_had_learns_from_the_averages_at_once(play, clouds):
    run = play(FedProto(FULL), clouds("mlp2", "mlp2", "norm3"), rounds=0)
    run.round(0, 1)
    table = run.state.prototypes
    assert isinstance(run.model(2), NearestPrototype)  # though it has never taken part
    run.round(2)
    assert_close(sent(run)[2]["prototypes"], table, **EXACTLY)


def test_a_client_that_was_not_drawn_keeps_its_network(play, clouds):
    run = play(FedProto(FULL), clouds("norm2", "mlp3"))
    before = client_net(run, 1).state_dict()
    run.round(0)
    assert_close(dict(client_net(run, 1).state_dict()), dict(before), **EXACTLY)


def tapered(width):
    return StagedNet({"stem": nn.Linear(6, 8), "deep": nn.Linear(8, width)}, nn.Linear(width, CLASSES))


def test_needs_features_of_one_width_behind_any_layers(clouds):
    assert FedProto().needs() == {Need.SPLIT_MODEL, Need.CLASSES, ONE_ROW, COMMON_WIDTH}
    federation = clouds("mlp2", "norm3")
    check_needs(FedProto().needs(), "fedproto", Offer.of(federation))
    unlike = replace(federation, architectures={"mlp2": partial(tapered, 4), "norm3": partial(tapered, 5)})
    with pytest.raises(ConfigError, match="widths differ: mlp2 4, norm3 5"):
        check_needs(FedProto().needs(), "fedproto", Offer.of(unlike))


def test_a_negative_strength_is_refused():
    with pytest.raises(ValueError, match="strength: expected at least 0, found -1"):
        FedProto(strength=-1.0)
