from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.message import Message
from potluck.core.method import on_client
from potluck.core.needs import Need
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import LocalTraining
from potluck.methods.cronus import Cronus, filtered_mean
from potluck.parts.means import Aggregate

EXACTLY = {"rtol": 0, "atol": 0}
STILL = LocalTraining("sgd", lr=0.0)
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step


def points(clients, rows=4, classes=5, spread=0.3, seed=0):
    """Clients' predictions that agree up to a small spread, (clients, rows, classes)."""
    generator = torch.Generator().manual_seed(seed)
    middle = 2 * torch.randn(1, rows, classes, generator=generator, dtype=torch.float64)
    return (middle + spread * torch.randn(clients, rows, classes, generator=generator, dtype=torch.float64)).softmax(2)


def certain_of(label, rows=4, classes=5):
    return torch.eye(classes, dtype=torch.float64)[label].expand(rows, classes)


def full_step(net, loss):
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter -= 0.1 * gradient


# The filter


def filtered_by_hand(vectors, outliers, variance):
    """One row: the sample covariance, its top eigenvector, and the projections on it."""
    left = list(range(len(vectors)))
    for _ in range(int(outliers * len(vectors))):
        gaps = vectors[left] - vectors[left].mean(0)
        values, directions = torch.linalg.eigh(gaps.T @ gaps / len(left))
        if values[-1] <= variance:
            break
        left.pop(int((gaps @ directions[:, -1]).abs().argmax()))
    return vectors[left].mean(0), left


@pytest.mark.parametrize("variance", [0.001, 0.02, 0.1])
def test_filtered_mean_drops_what_the_sample_covariance_says(variance):
    found = points(9, rows=30, spread=1.0)
    found[3, ::2], found[7, ::3] = certain_of(0, 15), certain_of(4, 10)
    means, kept = filtered_mean(found, 0.35, variance)
    dropped = set()
    for row in range(30):
        mean, left = filtered_by_hand(found[:, row], 0.35, variance)
        assert kept[row].nonzero().flatten().tolist() == left
        assert_close(means[row], mean, rtol=0, atol=1e-12)
        dropped.add(9 - len(left))
    assert len(dropped) > 1  # rows differ in how many are dropped


def test_filtered_mean_without_outliers_is_the_mean():
    found = points(6)
    means, kept = filtered_mean(found, 0.4, 0.1)
    assert_close(means, found.mean(0))
    assert kept.all()


@pytest.mark.parametrize("liar", range(5))
def test_filtered_mean_drops_one_of_five_who_is_certain_of_something_else(liar):
    found = points(5, rows=1)
    label = int(found.mean(0).argmin())
    found[liar] = certain_of(label, 1)
    honest = [i for i in range(5) if i != liar]
    means, kept = filtered_mean(found, 0.2, 0.05)
    assert_close(means, found[honest].mean(0))
    assert kept[0].nonzero().flatten().tolist() == honest


@pytest.mark.parametrize("size", [10.0, 1e6])
def test_filtered_mean_is_not_moved_far_however_far_off_one_of_five_is(size):
    """Vectors that are no distributions, which the schema would refuse."""
    found = points(5)
    found[2] *= -size
    means, _ = filtered_mean(found, 0.2, 0.1)
    assert_close(means, found[[0, 1, 3, 4]].mean(0))


def test_filtered_mean_drops_no_more_than_its_share():
    found = torch.stack([certain_of(i % 5, 3) for i in range(8)])
    _, kept = filtered_mean(found, 0.3, 1e-6)
    assert (kept.sum(1) == 6).all()
    assert filtered_mean(found, 0.1, 1e-6)[1].all()
    hundred = points(100, rows=1)
    assert filtered_mean(hundred, 0.29, 1e-9)[1].sum() == 71


def test_filtered_mean_of_equal_points_is_that_point():
    found = certain_of(1)[None].repeat(5, 1, 1)
    assert_close(filtered_mean(found, 0.4, 1e-9)[0], certain_of(1))


def test_filtered_mean_does_not_depend_on_the_order_of_clients():
    found = points(7, rows=20, spread=1.0)
    found[1] = certain_of(0, 20)
    order = torch.tensor([4, 1, 6, 0, 2, 5, 3])
    assert_close(filtered_mean(found, 0.3, 0.02)[0], filtered_mean(found[order], 0.3, 0.02)[0])


# A round


def test_labels_are_the_mean_where_nobody_is_far_out(play, clouds):
    run = play(Cronus(variance=1.0), clouds("mlp2", "norm3", "wide2", "mlp3", public=30))
    predictions = torch.stack([r["predictions"] for r in run.wire.replied["predict_public"][0].values()])
    for message in run.wire.sent["local_update"][0].values():
        assert_close(message["labels"], predictions.mean(0))
    assert run.reports[0].notes == {"dropped": 0.0}


def test_a_poisoner_among_five_is_dropped_where_the_others_agree(play, clouds):
    """It labels everything as class 2, of which nobody has examples. Where the others are split it may stay."""

    class Poisoned(Cronus):
        @on_client
        def predict_public(self, client, message):
            reply = yield from super().predict_public(client, message)
            bad = torch.tensor([0.0, 0.0, 1.0]).expand(len(message["rows"]), 3)
            return Message(predictions=bad) if client.id == 4 else reply

    options = {"labels": ((0, 1),) * 5, "sizes": (12, 20, 9, 16, 12), "capacities": (1.0,) * 5}
    federation = clouds(*["mlp2"] * 5, public=30, **options)
    poisoned = {}
    for name, variance in (("filter", 0.02), ("mean", 1.0)):
        run = play(Poisoned(LocalTraining("adam", lr=0.05, epochs=10), STILL, variance=variance), federation)
        poisoned[name] = run.wire.sent["local_update"][0][0]["labels"][:, 2]
    assert poisoned["mean"].min() > 0.19
    assert poisoned["filter"].median() < 0.01
    assert (poisoned["filter"] > 0.19).float().mean() < 0.3


def test_the_trimmed_mean_is_a_choice(play, clouds):
    method = Cronus(aggregation="rule", combine=Aggregate("median"))
    run = play(method, clouds("mlp2", "norm3", "wide2", public=30))
    middle = torch.stack([r["predictions"] for r in run.wire.replied["predict_public"][0].values()]).median(0).values
    assert_close(run.wire.sent["local_update"][0][0]["labels"], middle / middle.sum(1, keepdim=True))


def test_a_round_is_one_step_on_the_labels_and_one_on_private_data(play, clouds):
    federation = clouds("mlp2", "mlp3", public=30)
    run = play(Cronus(FULL, FULL, pretrain=False), federation, rounds=0)
    nets = [run.model(id) for id in (0, 1)]
    run.round()
    rows = run.wire.sent["predict_public"][0][0]["rows"]
    labels = run.wire.sent["local_update"][0][0]["labels"]
    inputs = federation.public.inputs[rows]
    assert_close(labels, sum(net(inputs).softmax(1) for net in nets).detach() / 2)
    for id, net in enumerate(nets):
        full_step(net, -(labels * F.log_softmax(net(inputs), 1)).sum() / 30)
        train = federation.sites[id].train
        full_step(net, federation.criterion(net(train.inputs), train.targets))
        assert_close(run.model(id).state_dict(), net.state_dict())


def test_clients_train_alone_before_they_first_predict(play, clouds):
    run = play(Cronus(), clouds("mlp2", "mlp3", "wide2", public=30), rounds=0)
    run.round(0, 2)
    run.round(0, 1)  # 1 is a newcomer
    fits = [{id: len(losses) for id, losses in report.losses.items()} for report in run.reports]
    assert fits == [{0: 2, 2: 2}, {0: 1, 1: 2}]  # on its own data


def test_a_client_that_was_not_drawn_stays_as_it_is(play, clouds):
    run = play(Cronus(), clouds("norm2", "norm2", "mlp3", public=30))
    before = run.kept(1)["model"]
    run.round(0, 2)
    assert_close(run.kept(1)["model"], before, **EXACTLY)


def test_public_targets_are_never_read(play, clouds):
    federation = clouds("mlp2", "norm3", public=30)
    foreign = replace(federation, public=Examples(federation.public.inputs, torch.full((30,), torch.nan)))
    own, other = play(Cronus(), federation, rounds=2), play(Cronus(), foreign, rounds=2)
    for id in (0, 1):
        assert_close(dict(own.model(id).state_dict()), dict(other.model(id).state_dict()), **EXACTLY)


def test_messages_carry_predictions_and_the_rows_once(play, clouds):
    run = play(Cronus(public_examples=10), clouds("norm2", "mlp3", public=30))
    predictions = 2 * 10 * 3 * 4
    assert run.reports[0].traffic.up == {"predictions": predictions}
    assert run.reports[0].traffic.down == {"labels": predictions, "rows": 2 * 10 * 8}


def test_public_data_are_needed():
    assert Cronus().needs() == {Need.PUBLIC_DATA, Need.CLASSES}


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("outliers", 0.5, "outliers: expected at least 0 and below 0.5, found 0.5"),
        ("variance", 0.0, "variance: expected above 0, found 0.0"),
        ("public_examples", 0, "public_examples: expected at least 1, found 0"),
    ],
)
def test_hyper_parameters_out_of_range_are_refused(field, value, found):
    with pytest.raises(ValueError, match=found):
        Cronus(**{field: value})
