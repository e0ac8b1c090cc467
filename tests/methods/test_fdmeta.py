from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.needs import Need
from potluck.core.nets.weights import learnt_of
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import LocalTraining
from potluck.core.requests.inference import predict
from potluck.methods.fdmeta import UNCERTAINTY, FDMeta
from potluck.parts.means import Aggregate

EXACTLY = {"rtol": 0, "atol": 0}
STILL = LocalTraining("sgd", lr=0.0)
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
ONE_STEP = FDMeta(FULL, FULL, FULL)


def rows_of(run, exchange=-1):
    return run.wire.sent["local_update"][exchange][0]["rows"]


def full_step(net, loss):
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter -= 0.1 * gradient


def learn(net, inputs, labels):
    """A full step towards soft labels: cross-entropy, summed over classes, mean over examples."""
    full_step(net, -(labels * F.log_softmax(net(inputs), 1)).sum() / len(inputs))


# Sampling


def test_uncertainty_is_largest_where_classes_are_equally_likely():
    sure, split, even = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [1 / 3] * 3]).split(1)
    measured = {name: [float(measure(p)) for p in (sure, split, even)] for name, measure in UNCERTAINTY.items()}
    log = torch.tensor([2.0, 3.0]).log().tolist()
    assert measured["entropy"] == pytest.approx([0, *log])
    assert measured["confidence"] == pytest.approx([0, 0.5, 2 / 3])
    assert measured["margin"] == pytest.approx([0, 1, 1])


@pytest.mark.parametrize("sampling", ["entropy", "confidence", "margin"])
def test_chosen_examples_are_no_less_uncertain_than_the_others(play, clouds, sampling):
    method = FDMeta(sampling=sampling, public_examples=12, exploration=0.0)
    run = play(method, clouds("mlp2", "mlp3", public=40), rounds=2)
    model = run.engine.global_model(run.states[1])  # before the second round
    doubts = UNCERTAINTY[sampling](predict(model, run.engine.federation.public).softmax(1))
    chosen = torch.zeros(40, dtype=torch.bool)
    chosen[rows_of(run)] = True
    assert chosen.sum() == 12
    assert doubts[chosen].min() >= doubts[~chosen].max()


def test_a_share_of_the_examples_is_drawn_at_random(play, clouds):
    method = FDMeta(public_examples=10, exploration=0.3)
    run = play(method, clouds("mlp2", "mlp3", public=40), rounds=2)
    model = run.engine.global_model(run.states[1])
    doubts = UNCERTAINTY["entropy"](predict(model, run.engine.federation.public).softmax(1))
    most = doubts.argsort(descending=True)
    found = rows_of(run)
    assert len(set(found.tolist())) == 10
    assert set(found[:7].tolist()) == set(most[:7].tolist())
    assert set(found[7:].tolist()) != set(most[7:10].tolist())


def test_the_first_round_and_a_full_exploration_choose_as_random_sampling_does(play, clouds):
    federation = clouds("mlp2", "mlp3", public=40)
    random = play(FDMeta(public_examples=10, sampling="random"), federation, rounds=2)
    active = play(FDMeta(public_examples=10), federation, rounds=2)
    exploring = play(FDMeta(public_examples=10, exploration=1.0), federation, rounds=2)
    assert torch.equal(rows_of(random, 0), rows_of(active, 0))
    assert not torch.equal(rows_of(random, 1), rows_of(active, 1))
    assert torch.equal(rows_of(random, 1), rows_of(exploring, 1))


def test_all_examples_are_chosen_if_there_are_no_more(play, clouds):
    for sampling in ("entropy", "random"):
        run = play(FDMeta(public_examples=100, sampling=sampling), clouds("mlp2", "mlp3", public=30), rounds=2)
        assert sorted(rows_of(run).tolist()) == list(range(30))


def test_ties_are_broken_at_random(play, clouds):
    """A model that predicts the same everywhere is equally uncertain of everything."""
    federation = clouds("mlp2", "mlp3", public=40)
    flat = replace(federation, public=Examples(torch.zeros(40, 6), torch.zeros(40, dtype=torch.int64)))
    run = play(FDMeta(public_examples=10, exploration=0.0), flat, rounds=3)
    assert sorted(rows_of(run, 1).tolist()) != list(range(10))
    assert sorted(rows_of(run, 1).tolist()) != sorted(rows_of(run, 2).tolist())


# A round


def test_a_round_is_as_described(play, clouds):
    federation = clouds("mlp2", "mlp3", public=30)
    run = play(ONE_STEP, federation, rounds=0)
    nets, common = [run.model(id) for id in (0, 1)], run.engine.global_model(run.state)
    for _ in range(2):
        run.round()
        inputs = federation.public.inputs[rows_of(run)]
        predicted = []
        for id, net in enumerate(nets):
            train = federation.sites[id].train
            full_step(net, federation.criterion(net(train.inputs), train.targets))
            predicted.append(net(inputs).detach().softmax(1))
        labels = (predicted[0] + predicted[1]) / 2
        for net in (common, *nets):
            learn(net, inputs, labels)
        assert_close(run.wire.sent["distil"][-1][0]["labels"], labels, rtol=1e-4, atol=1e-6)
        assert_close(run.state.common, learnt_of(common), rtol=1e-4, atol=1e-6)
        for id, net in enumerate(nets):
            assert_close(dict(run.model(id).state_dict()), dict(net.state_dict()), rtol=1e-4, atol=1e-6)


def test_labels_are_distributions_under_every_rule(play, clouds):
    for rule in ("mean", "median", "trimmed", "clipped"):
        run = play(FDMeta(combine=Aggregate(rule)), clouds("mlp2", "norm3", "wide2", public=30, labels=((0, 1),) * 3))
        labels = run.wire.sent["distil"][0][0]["labels"]
        assert labels.min() >= 0
        assert_close(labels.sum(1), torch.ones(30))


def test_clients_may_be_left_to_their_own_data(play, clouds):
    federation = clouds("mlp2", "mlp3", public=30)
    run = play(FDMeta(distil_clients=False), federation, rounds=2)
    assert "distil" not in run.wire.sent
    taught = play(FDMeta(), federation)
    assert_close(run.states[1].common, taught.state.common, **EXACTLY)  # the server learns the same


def test_the_global_model_rests_without_a_rate(play, clouds):
    run = play(FDMeta(server_training=STILL), clouds("mlp2", "norm3", public=30), rounds=2)
    assert_close(run.state.common, run.states[0].common, **EXACTLY)
    moved = play(FDMeta(), clouds("mlp2", "norm3", public=30))
    assert not torch.equal(moved.state.common["head.weight"], moved.states[0].common["head.weight"])
    assert_close(dict(moved.engine.global_model(moved.state).state_dict()), moved.state.common, **EXACTLY)


def test_only_those_drawn_label_and_learn(play, clouds):
    run = play(FDMeta(), clouds("norm2", "norm2", "mlp3", public=30), rounds=0)
    run.round(0, 1)
    before = run.kept(1)["model"]
    run.round(0, 2)  # 2 is a newcomer
    assert_close(run.kept(1)["model"], before, **EXACTLY)
    assert set(run.wire.sent["distil"][1]) == {0, 2}
    predictions = [reply["predictions"] for reply in run.wire.replied["local_update"][1].values()]
    assert_close(run.wire.sent["distil"][1][2]["labels"], (predictions[0] + predictions[1]) / 2)


def test_public_targets_are_never_read(play, clouds):
    federation = clouds("mlp2", "norm3", public=30)
    foreign = replace(federation, public=Examples(federation.public.inputs, torch.full((30,), torch.nan)))
    own, other = play(FDMeta(), federation, rounds=2), play(FDMeta(), foreign, rounds=2)
    assert_close(own.state.common, other.state.common, **EXACTLY)
    for id in (0, 1):
        assert_close(dict(own.model(id).state_dict()), dict(other.model(id).state_dict()), **EXACTLY)


def test_messages_carry_predictions_and_the_rows_once(play, clouds):
    run = play(FDMeta(public_examples=10), clouds("norm2", "mlp3", public=30))
    predictions = 2 * 10 * 3 * 4
    assert run.reports[0].traffic.up == {"predictions": predictions}
    assert run.reports[0].traffic.down == {"labels": predictions, "rows": 2 * 10 * 8}


def test_public_data_are_needed():
    assert FDMeta().needs() == {Need.PUBLIC_DATA, Need.CLASSES}


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("exploration", 1.5, "exploration: expected at least 0 and at most 1, found 1.5"),
        ("public_examples", 0, "public_examples: expected at least 1, found 0"),
    ],
)
def test_hyper_parameters_out_of_range_are_refused(field, value, found):
    with pytest.raises(ValueError, match=found):
        FDMeta(**{field: value})
