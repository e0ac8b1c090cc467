"""FD: what clients report, whose mean each of them is sent, and how it learns from it."""

from dataclasses import dataclass, replace
from functools import partial
from math import log

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.message import Message
from potluck.core.method import on_client
from potluck.core.needs import Need
from potluck.core.nets.weights import parameters_of
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fd import FD, DistillationByClass
from potluck.methods.local import Local
from potluck.parts.means import Aggregate

EXACTLY = {"rtol": 0, "atol": 0}
STILL = LocalTraining("sgd", lr=0.0)
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
CLASSES = 3
SOME = ((0, 1), (1, 2), (0,), (0, 1, 2))


def sent(run, id=0):
    return run.wire.sent["local_update"][-1][id]


def reported(run, id, exchange=-1):
    """A client's means, by class."""
    reply = run.wire.replied["local_update"][exchange][id]
    return dict(zip(reply["labels"].tolist(), reply["means"], strict=True))


def weights(run, id):
    return parameters_of(run.model(id))


# What clients report


@pytest.mark.parametrize("exchanged", ["probabilities", "logits"])
def test_clients_report_the_mean_prediction_on_their_classes(play, clouds, exchanged):
    federation = clouds("mlp2", "mlp3", "wide2", "mlp2", labels=SOME)
    run = play(FD(STILL, exchanged=exchanged), federation)
    for id, held in enumerate(SOME):
        data = federation.sites[id].train
        outputs = run.model(id)(data.inputs).detach()
        predicted = outputs.softmax(1) if exchanged == "probabilities" else outputs
        assert list(reported(run, id)) == list(held)
        for label, mean in reported(run, id).items():
            assert_close(mean, predicted[data.labels == label].mean(0))
        assert set(run.wire.replied["local_update"][0][id]) == {"means", "labels"}  # neither weights nor examples


def test_predictions_are_those_before_each_step(play, clouds):
    federation = clouds("mlp2")
    run = play(FD(FULL), federation, rounds=0)
    before, data = run.model(0), federation.sites[0].train
    run.round()
    for label, mean in reported(run, 0).items():
        assert_close(mean, before(data.inputs).softmax(1)[data.labels == label].mean(0).detach())


# What they are sent


@pytest.mark.parametrize("averaged", ["others", "all"])
def test_a_client_is_sent_the_mean_of_the_reports_of_others(play, clouds, averaged):
    run = play(FD(FULL, averaged=averaged), clouds(*["mlp2"] * 4, labels=SOME), rounds=2)
    for id in range(4):
        table = sent(run, id)["averages"]
        for label in range(CLASSES):
            known = [j for j in range(4) if label in SOME[j] and (j != id or averaged == "all")]
            assert bool(table["known"][label]) == bool(known)
            rows = [reported(run, j, exchange=0)[label] for j in known]
            assert_close(table["means"][label], torch.stack(rows).mean(0) if rows else torch.zeros(CLASSES))


def test_a_class_that_one_client_alone_holds_is_unknown_to_it_and_known_to_others(play, clouds):
    run = play(FD(FULL), clouds("mlp2", "mlp2", labels=((0, 1), (1, 2))), rounds=2)
    assert sent(run, 0)["averages"]["known"].tolist() == [False, True, True]
    assert sent(run, 1)["averages"]["known"].tolist() == [True, True, False]


def test_averages_are_those_of_the_last_round_whoever_took_part_in_it(play, clouds):
    run = play(FD(FULL), clouds(*["mlp2"] * 4, labels=SOME), rounds=0)
    run.round(0, 1)
    assert "averages" not in sent(run, 0)
    run.round(2, 3)  # who join late are sent what both reported
    one = torch.stack([reported(run, id, exchange=0)[1] for id in (0, 1)]).mean(0)
    assert_close(sent(run, 2)["averages"]["means"][1], one)
    assert sorted(run.state.reports) == ["2", "3"]
    run.round(2)
    assert_close(sent(run, 2)["averages"]["means"][0], reported(run, 3, exchange=1)[0], **EXACTLY)
    run.round(2)  # nobody else took part in the round before
    assert "averages" not in sent(run, 2)


def test_a_rule_that_drops_wild_reports_applies_by_class(play, clouds):
    run = play(FD(FULL, averaged="all", combine=Aggregate("median")), clouds(*["mlp2"] * 3), rounds=2)
    zero = torch.stack([reported(run, id, exchange=0)[0] for id in range(3)])
    assert_close(sent(run)["averages"]["means"][0], zero.median(0).values)


def lying(what):
    """FD, one of whose clients reports twice what it predicts, or every class as its first."""

    @dataclass(frozen=True)
    class Liar(FD):
        @on_client
        def local_update(self, client, message):
            reply = yield from FD.local_update(self, client, message)
            if client.id != 1:
                return reply
            labels = reply["labels"][:1].expand(len(reply["labels"]))
            return Message(**(dict(reply) | ({"means": 2 * reply["means"]} if what == "means" else {"labels": labels})))

    return Liar(FULL)


@pytest.mark.parametrize(("what", "why"), [("means", "a row whose sum is 2"), ("labels", "found")])
def test_a_report_that_is_no_distribution_or_names_a_class_twice_is_refused(play, clouds, what, why):
    run = play(lying(what), clouds("mlp2", "mlp2", "mlp2"), tolerate_failures=True)
    assert why in run.reports[0].failures[1].reason
    assert sorted(run.state.reports) == ["0", "2"]


# How they learn


def of(rows, labels, table, gamma=0.5, exchanged="probabilities"):
    batch = Batch(rows, torch.tensor(labels), {})
    return DistillationByClass(F.cross_entropy, gamma, exchanged)(nn.Identity(), batch, {"averages": table})


def test_the_loss_of_a_case_done_by_hand():
    rows = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]], dtype=torch.float64).log()
    means = torch.tensor([[0.6, 0.3, 0.1], [9.0, 9.0, 9.0], [0.2, 0.2, 0.6]], dtype=torch.float64)
    table = {"means": means, "known": torch.tensor([True, False, True])}
    own = -(log(0.5) + log(0.2)) / 2
    taught = -(0.6 * log(0.5) + 0.4 * log(0.25)) / 2  # class 1 is unknown, and the mean is that of the whole batch
    loss, observed = of(rows, [0, 1], table)
    assert_close(loss.item(), own + 0.5 * taught, rtol=1e-12, atol=0)
    assert_close(observed["predicted"], rows.exp())
    assert_close(of(rows, [0, 1], None)[0].item(), own, rtol=1e-12, atol=0)


def test_logits_are_averaged_before_the_softmax():
    rows = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    means = torch.tensor([[log(2.0), 0.0, 0.0], [0, 0, 0], [0, 0, 0]], dtype=torch.float64)
    table = {"means": means, "known": torch.tensor([True, False, False])}
    loss, observed = of(rows, [0], table, gamma=1.0, exchanged="logits")
    assert_close(loss.item(), -log(0.5) - (0.5 * log(0.5) + 0.5 * log(0.25)), rtol=1e-12, atol=0)
    assert observed["predicted"] is rows


def test_logits_of_an_unknown_class_teach_nothing_though_their_softmax_is_no_zero():
    rows = torch.zeros(1, 3, dtype=torch.float64)
    table = {"means": torch.zeros(3, 3, dtype=torch.float64), "known": torch.tensor([False, True, True])}
    assert_close(of(rows, [0], table, exchanged="logits")[0], of(rows, [0], None)[0])


def test_the_gradient_is_the_slope_and_draws_towards_the_averages():
    rows = torch.tensor([[0.3, -1.0, 0.5], [2.0, 0.1, -0.4]], dtype=torch.float64, requires_grad=True)
    means = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]], dtype=torch.float64)
    table = {"means": means, "known": torch.ones(3, dtype=torch.bool)}
    (gradient,) = torch.autograd.grad(of(rows, [2, 1], table, gamma=2.0)[0], rows)
    step = 1e-6
    for place in range(6):
        nudge = torch.zeros(6, dtype=torch.float64).index_fill(0, torch.tensor(place), step).view(2, 3)
        ahead, behind = (of(rows.detach() + sign * nudge, [2, 1], table, gamma=2.0)[0] for sign in (1, -1))
        assert_close(gradient.view(-1)[place], (ahead - behind) / (2 * step), rtol=1e-7, atol=1e-9)
    (alone,) = torch.autograd.grad(of(rows, [2, 1], None)[0], rows)
    towards = rows.detach().softmax(1) - means[[2, 1]]
    assert_close(gradient - alone, 2.0 * towards / 2, rtol=1e-9, atol=1e-12)


def test_a_clients_step_is_the_papers(play, clouds):
    federation = clouds("mlp2", "wide2", labels=((0, 1), (1, 2)))
    run = play(FD(FULL, gamma=2.0), federation)
    nets = [run.model(id) for id in range(2)]
    reports = [reported(run, id) for id in range(2)]
    run.round()
    for id, net in enumerate(nets):
        data = federation.sites[id].train
        log_F = net(data.inputs).log_softmax(1)
        loss = -log_F[torch.arange(len(data)), data.labels].mean()
        for row, label in zip(log_F, data.labels.tolist(), strict=True):
            if label in reports[1 - id]:
                loss = loss - 2.0 * (reports[1 - id][label] * row).sum() / len(data)
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        for (name, parameter), gradient in zip(net.named_parameters(), gradients, strict=True):
            expected = (parameter - 0.1 * gradient).detach()
            assert_close(weights(run, id)[name], expected, rtol=1e-4, atol=1e-6)


def test_predictions_of_clients_that_exchange_come_closer_than_those_of_clients_that_do_not(play, clouds):
    federation = clouds("mlp2", "wide2", sizes=(30, 30))
    training = LocalTraining("sgd", lr=0.1, epochs=2)

    def gap(gamma):
        run = play(FD(training, gamma), federation, rounds=8)
        return max(float((reported(run, 0)[label] - reported(run, 1)[label]).abs().max()) for label in range(CLASSES))

    assert gap(5.0) < 0.5 * gap(0.0)


def test_clients_keep_their_own_weights(play, clouds):
    run = play(FD(FULL), clouds("mlp2", "mlp2", "mlp2"), rounds=2)
    before = [weights(run, id) for id in range(3)]
    assert not torch.equal(before[0]["head.weight"], before[1]["head.weight"])
    run.round(0)
    assert_close(weights(run, 1), before[1], **EXACTLY)
    assert not torch.equal(weights(run, 0)["head.weight"], before[0]["head.weight"])


def test_any_module_with_as_many_outputs_will_do(play, clouds):
    federation = clouds("mlp2", "mlp3")
    nets = {"mlp2": partial(nn.Linear, 6, 3), "mlp3": lambda: nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))}
    run = play(FD(FULL), replace(federation, architectures=nets), rounds=2)
    assert sorted(run.state.reports) == ["0", "1"]


# Limits, wire, refusals


def test_without_gamma_it_is_local_training_and_with_it_is_not(play, clouds):
    federation = clouds("norm2", "wide2")
    local = play(Local(FULL), federation, rounds=3)
    without, with_it = (play(FD(FULL, gamma), federation, rounds=3) for gamma in (0.0, 1.0))
    for id in range(2):
        assert_close(weights(without, id), weights(local, id), **EXACTLY)
        assert not torch.equal(weights(with_it, id)["head.weight"], weights(local, id)["head.weight"])


def test_it_needs_classes_and_nothing_else():
    assert FD().needs() == {Need.CLASSES}


@pytest.mark.parametrize("changes", [{"gamma": -1.0}, {"exchanged": "features"}, {"averaged": "none"}])
def test_what_is_out_of_range_is_refused_by_name(changes):
    with pytest.raises(ValueError, match=rf"^{next(iter(changes))}: expected"):
        replace(FD(), **changes)
