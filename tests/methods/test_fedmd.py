from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from potluck.core.method import Need
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import LocalTraining
from potluck.core.requests.inference import predict
from potluck.methods.fedmd import FedMD

EXACTLY = {"rtol": 0, "atol": 0}
STILL = LocalTraining("sgd", lr=0.0)
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
BOTH_LOSSES = pytest.mark.parametrize("digest_loss", ["l1", "mse"])


def consensus_of(run, exchange=-1):
    return run.wire.sent["digest_and_revisit"][exchange][0]["consensus"]


def drawn_inputs(run, exchange=-1):
    rows = run.wire.sent["score_public"][exchange][0]["rows"]
    return run.engine.federation.public.inputs[rows]


# The consensus


def test_the_consensus_is_the_plain_mean_of_the_logits_of_those_drawn(play, clouds):
    run = play(FedMD(), clouds("mlp2", "norm3", "wide2", "mlp3", public=30), rounds=0)
    run.round(0, 1, 3)
    logits = [reply["logits"] for reply in run.wire.replied["score_public"][0].values()]
    assert len(logits) == 3
    assert_close(consensus_of(run), (logits[0] + logits[1] + logits[2]) / 3)


def test_all_clients_are_given_one_consensus(play, clouds):
    run = play(FedMD(), clouds("mlp2", "norm3", public=30))
    one, two = run.wire.sent["digest_and_revisit"][0].values()
    assert_close(one["consensus"], two["consensus"], **EXACTLY)


def test_logits_are_raw_and_made_in_evaluation_mode(play, clouds):
    run = play(FedMD(pretrain=False), clouds("norm2", "norm3", public=30))
    initial = play(FedMD(), clouds("norm2", "norm3", public=30), rounds=0)
    for id in (0, 1):
        logits = run.wire.replied["score_public"][0][id]["logits"]
        expected = initial.new_model(id).eval()(drawn_inputs(run)).detach()
        assert_close(logits, expected)
        assert not torch.allclose(logits, initial.model(id).train()(drawn_inputs(run)), atol=1e-3)


def test_predicting_changes_neither_buffers_nor_mode(clouds):
    public = clouds("mlp2", public=30).public
    for training in (True, False):
        net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout()).train(training)
        before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        assert_close(predict(net, public), predict(net, public, batch_size=7))
        assert_close(dict(net.state_dict()), before, **EXACTLY)
        assert net.training == training


# The public rows


def test_a_round_uses_the_same_public_rows_for_all_clients(play, clouds):
    run = play(FedMD(public_examples=10), clouds("mlp2", "mlp3", "norm2", public=30))
    messages = list(run.wire.sent["score_public"][0].values())
    assert len(messages) == 3
    for message in messages:
        assert_close(message["rows"], messages[0]["rows"], **EXACTLY)
    assert len(set(messages[0]["rows"].tolist())) == 10
    assert len(consensus_of(run)) == 10


def test_every_round_draws_other_public_rows(play, clouds):
    run = play(FedMD(public_examples=10), clouds("mlp2", public=30), rounds=2)
    first, second = (sent[0]["rows"].tolist() for sent in run.wire.sent["score_public"])
    assert sorted(first) != sorted(second)


def test_all_public_rows_are_used_if_there_are_fewer_than_asked_for(play, clouds):
    run = play(FedMD(public_examples=100), clouds("mlp2", public=30))
    assert sorted(run.wire.sent["score_public"][0][0]["rows"].tolist()) == list(range(30))


def test_public_targets_are_never_read(play, clouds):
    federation = clouds("mlp2", "norm3", public=30)
    foreign = replace(federation, public=Examples(federation.public.inputs, torch.full((30,), torch.nan)))
    own, other = play(FedMD(), federation, rounds=2), play(FedMD(), foreign, rounds=2)
    for id in (0, 1):
        assert_close(dict(own.model(id).state_dict()), dict(other.model(id).state_dict()), **EXACTLY)


def test_public_inputs_are_never_augmented(play, clouds):
    drawn = []

    def note(inputs, rng):
        drawn.append(rng)
        return inputs

    federation = clouds("mlp2", "mlp3", public=30)
    play(FedMD(), replace(federation, public=replace(federation.public, preprocess=note)))
    assert drawn
    assert drawn == [None] * len(drawn)


def test_public_data_are_needed():
    assert FedMD().needs() == {Need.PUBLIC_DATA, Need.ONE_OUTPUT}


# Digest and revisit


def test_a_client_alone_has_nothing_to_digest(play, clouds):
    # Plain SGD on squares: the absolute value and Adam turn a rounding error into a whole step.
    digested = play(FedMD(digestion=FULL, digest_loss="mse"), clouds("mlp3", public=30), rounds=2)
    undigested = play(FedMD(digestion=STILL), clouds("mlp3", public=30), rounds=2)
    assert_close(digested.model(0).state_dict(), undigested.model(0).state_dict(), rtol=0, atol=1e-5)


@BOTH_LOSSES
def test_a_round_is_one_digest_and_then_one_revisit(play, clouds, digest_loss):
    federation = clouds("mlp2", "mlp3", public=30)
    run = play(FedMD(FULL, FULL, digest_loss=digest_loss, pretrain=False), federation, rounds=0)
    nets = [run.model(id) for id in (0, 1)]
    run.round()
    for id, net in enumerate(nets):
        gap = net(drawn_inputs(run)) - consensus_of(run)
        full_step(net, gap.abs().mean() if digest_loss == "l1" else gap.square().mean())
        train = federation.sites[id].train
        full_step(net, federation.criterion(net(train.inputs), train.targets))
        assert_close(run.model(id).state_dict(), net.state_dict())


def full_step(net, loss):
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter -= 0.1 * gradient


@BOTH_LOSSES
def test_digesting_brings_every_client_nearer_to_the_consensus(play, clouds, digest_loss):
    digestion = LocalTraining(lr=0.01, epochs=5)
    method = FedMD(STILL, digestion, digest_loss=digest_loss, pretrain=False)
    run = play(method, clouds("mlp2", "mlp3", "wide2", public=30))
    for id in range(3):
        before = run.wire.replied["score_public"][0][id]["logits"]
        after = run.model(id)(drawn_inputs(run)).detach()
        assert (after - consensus_of(run)).abs().mean() < 0.7 * (before - consensus_of(run)).abs().mean()


def test_equal_clients_stay_equal_through_the_digest(play, clouds):
    def fixed():
        net = nn.Linear(6, 3)
        nn.init.constant_(net.bias, 1.0)
        net.weight.data = torch.linspace(-1, 1, 18).view(3, 6)
        return net

    federation = clouds("mlp2", "mlp2", "mlp3", public=30)
    federation = replace(federation, architectures={**federation.architectures, "mlp2": fixed})
    run = play(FedMD(STILL, replace(FULL, epochs=3), pretrain=False), federation)
    one, two = (run.model(id).state_dict() for id in (0, 1))
    assert_close(one, two)
    assert not torch.allclose(one["weight"], torch.linspace(-1, 1, 18).view(3, 6))


def test_clients_train_on_their_own_data_once_before_they_first_score(play, clouds):
    federation = clouds("mlp2", "mlp3", public=30)
    run = play(FedMD(FULL), federation, rounds=0)
    net = run.model(0)
    train = federation.sites[0].train
    full_step(net, federation.criterion(net(train.inputs), train.targets))
    run.round(0)
    run.round(0, 1)
    assert_close(run.wire.replied["score_public"][0][0]["logits"], net(drawn_inputs(run, exchange=0)).detach())
    fits = [{id: len(losses) for id, losses in report.losses.items()} for report in run.reports]
    assert fits == [{0: 2}, {0: 1, 1: 2}]  # on its own data: beforehand, and the revisit of every round


def test_training_beforehand_can_be_left_out(play, clouds):
    run = play(FedMD(pretrain=False), clouds("mlp2", public=30))
    assert len(run.reports[0].losses[0]) == 1  # the revisit


def test_public_labels_are_learnt_once_before_a_clients_own(play, clouds):
    federation = clouds("mlp2", "mlp3", public=30)
    public = Examples(federation.public.inputs, torch.arange(30) % 3)
    run = play(FedMD(FULL, public_labels=True, public_training=FULL), replace(federation, public=public), rounds=0)
    net = run.model(0)
    for examples in (public, federation.sites[0].train):
        full_step(net, federation.criterion(net(examples.inputs), examples.targets))
    run.round(0)
    run.round(0, 1)
    assert_close(run.wire.replied["score_public"][0][0]["logits"], net(drawn_inputs(run, exchange=0)).detach())
    assert FedMD(public_labels=True).needs() == {Need.PUBLIC_DATA, Need.PUBLIC_LABELS, Need.ONE_OUTPUT}


# Who takes part


def test_clients_keep_their_own_models_whoever_is_drawn(play, clouds):
    run = play(FedMD(), clouds("norm2", "norm2", "mlp3", public=30))
    before = [run.model(id).state_dict() for id in range(3)]
    run.round(0, 2)
    after = [run.model(id).state_dict() for id in range(3)]
    assert_close(after[1], before[1], **EXACTLY)
    assert not torch.equal(after[0]["head.weight"], before[0]["head.weight"])
    assert not torch.equal(after[0]["head.weight"], after[1]["head.weight"])


def test_every_client_is_judged_with_its_own_model_and_there_is_no_global_one(play, clouds):
    run = play(FedMD(), clouds("norm2", "mlp3", public=30))
    for id in (0, 1):
        assert_close(dict(run.model(id).state_dict()), run.kept(id)["model"], **EXACTLY)
    assert run.engine.global_model(run.state) is None
    assert run.engine.evaluation_traffic.bytes_down == 0


def test_a_client_that_did_not_score_is_left_out_of_the_consensus_and_the_digest(play, clouds):
    class Faulty(nn.Linear):
        def forward(self, x):
            raise RuntimeError("out of order")

    federation = clouds("mlp2", "mlp3", "wide2", public=30)
    federation = replace(federation, architectures={**federation.architectures, "mlp3": lambda: Faulty(6, 3)})
    run = play(FedMD(), federation, tolerate_failures=True)
    assert set(run.wire.sent["digest_and_revisit"][0]) == {0, 2}
    logits = [reply["logits"] for reply in run.wire.replied["score_public"][0].values()]
    assert_close(consensus_of(run), (logits[0] + logits[1]) / 2)


# Wire and hyper-parameters


def test_messages_carry_logits_and_the_rows_once(play, clouds):
    run = play(FedMD(public_examples=10), clouds("norm2", "mlp3", public=30))
    logits = 2 * 10 * 3 * 4
    assert run.reports[0].traffic.up == {"logits": logits}
    assert run.reports[0].traffic.down == {"consensus": logits, "rows": 2 * 10 * 8}


def test_the_defaults_are_the_papers():
    assert (FedMD().public_examples, FedMD().digest_loss, FedMD().training.lr) == (5000, "l1", 0.001)


def test_no_public_examples_are_refused():
    with pytest.raises(ValueError, match="public_examples: expected at least 1, found 0"):
        FedMD(public_examples=0)
