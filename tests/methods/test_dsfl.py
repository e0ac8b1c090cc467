from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.message import Message
from potluck.core.method import on_client
from potluck.core.needs import Need
from potluck.core.nets.weights import learnt_of
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import LocalTraining
from potluck.core.roles import Replies
from potluck.methods.dsfl import DSFL
from potluck.parts.means import Aggregate

EXACTLY = {"rtol": 0, "atol": 0}
STILL = LocalTraining("sgd", lr=0.0)
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
ONE_STEP = DSFL(FULL, FULL, FULL)


def labels_of(method, *predictions):
    """What the server makes of these clients' predictions."""
    return method._labels(Replies({id: Message(predictions=p) for id, p in enumerate(predictions)}, {}))


def entropy(labels):
    return -(labels * labels.log()).sum(1)


def full_step(net, loss):
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter -= 0.1 * gradient


def learn(net, inputs, labels):
    """A full step towards soft labels: cross-entropy, summed over classes, mean over examples."""
    full_step(net, -(labels * F.log_softmax(net(inputs), 1)).sum() / len(inputs))


# Aggregation


ONE = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]])
TWO = torch.tensor([[0.3, 0.4, 0.3], [0.5, 0.3, 0.2]])


def test_labels_are_the_sharpened_mean_of_probabilities():
    mean = torch.tensor([[0.5, 0.3, 0.2], [0.3, 0.2, 0.5]])
    assert_close(labels_of(DSFL(aggregation="sa"), ONE, TWO), mean)
    sharp = (10 * mean).exp()
    assert_close(labels_of(DSFL(), ONE, TWO), sharp / sharp.sum(1, keepdim=True))


def test_labels_of_one_client_under_simple_aggregation_are_its_own():
    assert_close(labels_of(DSFL(aggregation="sa"), ONE), ONE, **EXACTLY)


def test_labels_from_logits_are_those_of_the_mean_logit():
    one, two = torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([[0.0, 4.0, -1.0]])
    method = DSFL(average="logits", aggregation="sa")
    expected = torch.tensor([[1.0, 2.0, -1.0]]).softmax(1)
    assert_close(labels_of(method, one, two), expected)
    assert_close(labels_of(replace(method, aggregation="era"), one, two), (expected / 0.1).softmax(1))


def test_labels_keep_the_likeliest_class_and_are_uniform_at_a_high_temperature():
    predictions = [torch.randn(50, 7, generator=torch.Generator().manual_seed(i)).softmax(1) for i in range(3)]
    mean = torch.stack(predictions).mean(0)
    found = labels_of(DSFL(), *predictions)
    assert torch.equal(found.argmax(1), mean.argmax(1))
    assert_close(found.sum(1), torch.ones(50))
    assert_close(labels_of(DSFL(temperature=1e6), *predictions), torch.full((50, 7), 1 / 7), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("classes", "top", "before", "after"), [(10, 0.9, 0.54, 0.01), (10, 0.3, 2.15, 1.78), (100, 0.3, 3.83, 4.30)]
)
def test_labels_are_sharper_with_few_classes_and_flatter_with_many(classes, top, before, after):
    predicted = torch.full((1, classes), (1 - top) / (classes - 1))
    predicted[0, 0] = top
    found = [float(entropy(labels_of(DSFL(aggregation=rule), predicted))) for rule in ("sa", "era")]
    assert found == pytest.approx([before, after], abs=0.01)


def test_labels_under_the_median_do_not_follow_one_client_of_five():
    honest = [torch.tensor([[0.9, 0.05, 0.05]])] * 4
    liar = torch.tensor([[0.0, 0.0, 1.0]])
    median = labels_of(DSFL(aggregation="sa", combine=Aggregate("median")), *honest, liar)
    assert_close(median, honest[0])
    assert (labels_of(DSFL(aggregation="sa"), *honest, liar) - honest[0]).abs().max() > 0.15


def test_labels_cover_all_classes_where_clients_lack_some(play, clouds):
    run = play(DSFL(), clouds("mlp2", "mlp3", public=30, labels=((0, 1), (0, 1))), rounds=2)
    assert run.state.lesson["labels"].shape == (30, 3)
    assert_close(run.state.lesson["labels"].sum(1), torch.ones(30))


# A round


def test_a_round_is_the_papers(play, clouds):
    """Two rounds by hand: learn the last labels, then one's own data, predict; the server learns the new labels."""
    federation = clouds("mlp2", "mlp3", public=30)
    run = play(ONE_STEP, federation, rounds=0)
    nets, common = [run.model(id) for id in (0, 1)], run.engine.global_model(run.state)
    lesson = None
    for _ in range(2):
        run.round()
        rows = run.wire.sent["local_update"][-1][0]["rows"]
        predicted = []
        for id, net in enumerate(nets):
            if lesson is not None:
                learn(net, *lesson)
            train = federation.sites[id].train
            full_step(net, federation.criterion(net(train.inputs), train.targets))
            assert_close(run.model(id).state_dict(), net.state_dict())
            predicted.append(net(federation.public.inputs[rows]).detach().softmax(1))
        labels = ((predicted[0] + predicted[1]) / 2 / 0.1).softmax(1)
        assert_close(run.state.lesson["labels"], labels, rtol=1e-4, atol=1e-6)
        lesson = federation.public.inputs[rows], labels
        learn(common, *lesson)
        assert_close(run.state.common, learnt_of(common), rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("in_double_precision")
@pytest.mark.parametrize("lasting", [("train",), ("distil",), ("train", "distil")], ids="+".join)
def test_each_of_the_two_trainings_has_an_optimiser_of_its_own_that_lasts_where_it_persists(play, clouds, lasting):
    """Four rounds by hand, with Adam: both clients learn alone at first, and one of them misses a round."""
    long = LocalTraining(lr=0.02, batch_size=64, epochs=2)
    method = DSFL(replace(long, persist="train" in lasting), replace(long, persist="distil" in lasting), long)
    federation = clouds("mlp2", "mlp3", public=30)
    run = play(method, federation, rounds=0)
    nets = [run.model(id) for id in (0, 1)]
    optimizers = {}

    def train(id, name, loss):
        if name not in lasting or (id, name) not in optimizers:
            optimizers[id, name] = torch.optim.Adam(nets[id].parameters(), lr=0.02)
        for _ in range(2):
            optimizers[id, name].zero_grad()
            loss(nets[id]).backward()
            optimizers[id, name].step()

    def taught(net):
        labels = lesson["labels"]
        return -(labels * F.log_softmax(net(federation.public.inputs[lesson["rows"]]), 1)).sum() / len(labels)

    for ids in ((0, 1), (0, 1), (1,), (0, 1)):
        lesson = run.state.lesson
        run.round(*ids)
        for id in ids:
            own = federation.sites[id].train
            if lesson:
                train(id, "distil", taught)
            train(id, "train", lambda net, own=own: F.cross_entropy(net(own.inputs), own.targets))
        for id, net in enumerate(nets):
            assert_close(run.model(id).state_dict(), net.state_dict(), rtol=0, atol=1e-9)


def test_predictions_are_made_in_evaluation_mode(play, clouds):
    run = play(replace(ONE_STEP, training=STILL), clouds("mlp2", "mlp3", public=30))
    public = run.engine.federation.public.inputs[run.wire.sent["local_update"][0][0]["rows"]]
    for id, reply in run.wire.replied["local_update"][0].items():
        assert_close(reply["predictions"], run.model(id).eval()(public).detach().softmax(1))


def test_the_global_model_learns_and_rests_without_a_rate(play, clouds):
    federation = clouds("norm2", "mlp3", public=30)
    still = play(DSFL(server_training=STILL), federation)
    parameters = {name for name, _ in still.engine.global_model(still.state).named_parameters()}
    for name in parameters:
        assert_close(still.state.common[name], still.states[0].common[name], **EXACTLY)
    moved = play(DSFL(), federation)
    assert any(not torch.equal(moved.state.common[name], moved.states[0].common[name]) for name in parameters)
    assert_close(dict(moved.engine.global_model(moved.state).state_dict()), moved.state.common, **EXACTLY)


def test_the_global_model_comes_nearer_to_the_labels(play, clouds):
    def noted(lr):
        return play(DSFL(server_training=LocalTraining("sgd", lr=lr, epochs=20)), clouds("mlp2", "mlp3", public=30))

    still, moving = (noted(lr).reports[0].notes["distillation_loss"] for lr in (0.0, 0.1))
    assert moving < still


# Who takes part


def test_a_client_that_missed_rounds_gets_the_latest_labels(play, clouds):
    run = play(DSFL(public_examples=10), clouds("mlp2", "mlp3", "wide2", public=30), rounds=0)
    for ids in ((0, 1), (0,), (1, 2)):
        run.round(*ids)
    for id in (1, 2):  # 2 is a newcomer
        assert_close(run.wire.sent["local_update"][2][id]["lesson"], run.states[2].lesson, **EXACTLY)
    assert "lesson" not in run.wire.sent["local_update"][0][0]
    assert not torch.equal(run.states[1].lesson["rows"], run.states[2].lesson["rows"])


def test_a_client_that_was_not_drawn_stays_as_it_is(play, clouds):
    run = play(DSFL(), clouds("norm2", "norm2", "mlp3", public=30))
    before = run.kept(1)["model"]
    run.round(0, 2)
    assert_close(run.kept(1)["model"], before, **EXACTLY)


def test_a_reply_that_is_no_distribution_is_refused_and_not_averaged(play, clouds):
    class Liar(DSFL):
        @on_client
        def local_update(self, client, message):
            reply = yield from super().local_update(client, message)
            return Message(predictions=reply["predictions"] * 2) if client.id == 1 else reply

    federation = clouds("mlp2", "mlp3", "wide2", public=30)
    run = play(Liar(aggregation="sa"), federation, tolerate_failures=True)
    replied = run.wire.replied["local_update"][0]
    assert "a row whose sum is 2" in run.reports[0].failures[1].reason
    assert_close(run.state.lesson["labels"], (replied[0]["predictions"] + replied[2]["predictions"]) / 2)


# Public data


def test_public_targets_are_never_read(play, clouds):
    federation = clouds("mlp2", "norm3", public=30)
    foreign = replace(federation, public=Examples(federation.public.inputs, torch.full((30,), torch.nan)))
    own, other = play(DSFL(), federation, rounds=2), play(DSFL(), foreign, rounds=2)
    assert_close(own.state.common, other.state.common, **EXACTLY)
    for id in (0, 1):
        assert_close(dict(own.model(id).state_dict()), dict(other.model(id).state_dict()), **EXACTLY)


def test_public_inputs_are_never_augmented(play, clouds):
    drawn = []

    def note(inputs, rng):
        drawn.append(rng)
        return inputs

    federation = clouds("mlp2", "mlp3", public=30)
    play(DSFL(), replace(federation, public=replace(federation.public, preprocess=note)), rounds=2)
    assert drawn
    assert drawn == [None] * len(drawn)


# Wire and hyper-parameters


def test_messages_carry_predictions_down_again_as_labels(play, clouds):
    run = play(DSFL(public_examples=10), clouds("norm2", "mlp3", public=30), rounds=2)
    rows, labels = 2 * 10 * 8, 2 * 10 * 3 * 4
    assert [report.traffic.up for report in run.reports] == [{"predictions": labels}] * 2
    assert [report.traffic.down for report in run.reports] == [{"rows": rows}, {"rows": rows, "lesson": rows + labels}]


def test_the_defaults_are_those_of_the_paper():
    method = DSFL()
    assert (method.aggregation, method.temperature, method.average) == ("era", 0.1, "probabilities")
    assert method.needs() == {Need.PUBLIC_DATA, Need.CLASSES}


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("public_examples", 0, "public_examples: expected at least 1, found 0"),
        ("temperature", 0.0, "temperature: expected above 0, found 0.0"),
    ],
)
def test_hyper_parameters_out_of_range_are_refused(field, value, found):
    with pytest.raises(ValueError, match=found):
        DSFL(**{field: value})
