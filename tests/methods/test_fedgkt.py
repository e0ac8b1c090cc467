import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.needs import Offer
from potluck.core.nets.weights import learnt_of, load, weights_of
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import LocalTraining
from potluck.core.requests.inference import predict
from potluck.experiment.federation.needs import check_needs
from potluck.methods.fedgkt import FedGKT, TransferLoss, tail
from potluck.models.split import split
from potluck.parts.losses import distillation

EXACTLY = {"rtol": 0, "atol": 0}
STILL = LocalTraining("sgd", lr=0.0)
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
SHIFT = 50.0


def uploaded(run, client, exchange=-1):
    return run.wire.replied["train_edge"][exchange][client]


def shifted(inputs, rng):
    return inputs if rng is None else inputs + SHIFT


# The loss (eq. 6, 7)


def test_transfer_loss__is_the_labels_and_the_teachers_softened_predictions():
    net, inputs = nn.Identity(), torch.tensor([[2.0, -1.0], [0.0, 1.0]])
    taught, labels = torch.tensor([[1.0, 1.0], [3.0, 0.0]]), torch.tensor([0, 1])
    batch = Batch(inputs, labels, {"teacher": taught})
    p, q = (taught / 2).softmax(1), (inputs / 2).log_softmax(1)
    kl = 4 * (p * (p.log() - q)).sum(1).mean()
    found = TransferLoss(F.cross_entropy, 0.7, 2.0)(net, batch, {})
    assert_close(found, F.cross_entropy(inputs, labels) + 0.7 * kl)
    assert_close(distillation(inputs, taught, 2.0), kl)


# What clients send


def test_a_client_sends_what_its_trained_net_makes_of_each_example_in_stored_order(play, clouds):
    federation = clouds("norm2", "norm3")
    run = play(FedGKT(FULL, FULL), federation)
    for id, data in ((0, federation.sites[0].train), (1, federation.sites[1].train)):
        net, sent = load(run.engine.server(1).build(f"norm{2 + id}"), run.kept(id)["model"]).eval(), uploaded(run, id)
        assert_close(sent["features"], split(net).extractor(data.inputs).detach())
        assert_close(sent["logits"], net(data.inputs).detach())
        assert torch.equal(sent["labels"], data.labels)


def test_the_first_round_has_no_teacher_and_later_ones_have_the_servers_logits(play, clouds):
    run = play(FedGKT(FULL, FULL), clouds("norm2", "norm3"))
    assert all("logits" not in run.wire.sent["train_edge"][0][id] for id in (0, 1))
    logits = run.state.logits
    run.round()
    for id in (0, 1):
        assert_close(run.wire.sent["train_edge"][1][id]["logits"], logits[str(id)], **EXACTLY)


def test_a_client_step_is_the_papers(play, clouds):
    federation = clouds("mlp2", "mlp3")
    run = play(FedGKT(FULL, FULL, alpha=2.0), federation, rounds=1)
    before = {id: load(run.engine.server(1).build(f"mlp{2 + id}"), run.kept(id)["model"]) for id in (0, 1)}
    logits = run.state.logits
    run.round()
    for id, net in before.items():
        data = federation.sites[id].train
        batch = Batch(data.inputs, data.targets, {"teacher": logits[str(id)]})
        loss = TransferLoss(F.cross_entropy, 2.0, 3.0)(net.train(), batch, {})
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        for (name, parameter), gradient in zip(net.named_parameters(), gradients, strict=True):
            assert_close(run.kept(id)["model"][name], (parameter - 0.1 * gradient).detach(), rtol=1e-4, atol=1e-6)


def test_with_a_teacher_examples_are_not_augmented(play, clouds):
    from dataclasses import replace

    federation = clouds("mlp2")
    site = federation.sites[0]
    moved = replace(federation, sites={0: replace(site, train=replace(site.train, preprocess=shifted))})
    plain, augmented = (play(FedGKT(FULL, FULL), world, rounds=2) for world in (federation, moved))
    first = [uploaded(run, 0, 0)["logits"] for run in (plain, augmented)]
    assert not torch.allclose(*first)  # the first round has none to pair with, and augments
    assert augmented.reports[1].losses[0][0] < SHIFT < augmented.reports[0].losses[0][0] * SHIFT


# What the server does


def test_the_servers_net_learns_from_features_labels_and_the_clients_logits(play, clouds):
    run = play(FedGKT(FULL, FULL, alpha=0.5), clouds("norm2", "norm3"))
    net = tail(run.engine.server(1).build("norm2"))
    load(net, run.states[0].net)
    features, labels, taught = (
        torch.cat([uploaded(run, id)[name] for id in (0, 1)]) for name in ("features", "labels", "logits")
    )
    loss = TransferLoss(F.cross_entropy, 0.5, 3.0)(net.train(), Batch(features, labels, {"teacher": taught}), {})
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    for (name, parameter), gradient in zip(net.named_parameters(), gradients, strict=True):
        assert_close(run.state.net[name], (parameter - 0.1 * gradient).detach(), rtol=1e-4, atol=1e-6)


def test_the_servers_logits_are_those_of_its_trained_net_for_each_clients_examples(play, clouds):
    run = play(FedGKT(FULL, FULL), clouds("norm2", "norm3"), rounds=0)
    run.round(0, 1)
    kept = run.state.logits["1"]
    run.round(0)
    net = tail(run.engine.server(1).build("norm2"))
    load(net, run.state.net)
    assert_close(run.state.logits["0"], net.eval()(uploaded(run, 0)["features"]).detach())
    assert_close(run.state.logits["1"], kept, **EXACTLY)  # a client that was not drawn


def test_extractors_are_trained_by_their_clients_alone(play, clouds):
    run = play(FedGKT(STILL, FULL), clouds("mlp2", "mlp3"), rounds=0)
    run.round()
    first = {id: run.kept(id)["model"] for id in (0, 1)}
    run.round()
    for id in (0, 1):
        assert_close(run.kept(id)["model"], first[id], **EXACTLY)
    assert not torch.equal(run.states[1].net["head.weight"], run.state.net["head.weight"])


# What is evaluated


def test_a_prediction_takes_the_clients_extractor_and_the_servers_net(play, clouds):
    federation = clouds("norm3", "norm2")
    run = play(FedGKT(FULL, FULL), federation)
    data = federation.sites[1].test
    own = load(run.engine.server(1).build("norm2"), run.kept(1)["model"]).eval()
    net = tail(run.engine.server(1).build("norm3"))
    load(net, run.state.net)
    expected = net.eval()(split(own).extractor(data.inputs)).detach()
    assert_close(predict(run.model(1), data), expected)
    assert set(learnt_of(run.model(1))) == set(weights_of(run.engine.server(1).build("norm3")))


def test_extractors_of_other_shapes_are_refused_before_anybody_trains(clouds):
    expected = r"reads features of shape \(8,\), and wide2 has \(16,\); use models with one stem$"
    with pytest.raises(ConfigError, match=expected):
        check_needs(FedGKT().needs(), "FedGKT", Offer.of(clouds("mlp2", "wide2")))
