"""FedHe: what clients report, what the server makes of it, and how they learn from it."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.needs import Need
from potluck.core.nets.weights import parameters_of
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedhe import FedHe, LogitLoss
from potluck.methods.local import Local
from potluck.parts.means import Aggregate

EXACTLY = {"rtol": 0, "atol": 0}
STILL = LocalTraining("sgd", lr=0.0)
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
CLASSES = 3
SIZES = (12, 20, 9, 16)
SOME = ((0, 1), (1, 2), (0,), (0, 1, 2))


def sent(run, id=0, exchange=-1):
    return run.wire.sent["local_update"][exchange][id]


def replied(run, id=0, exchange=-1):
    return run.wire.replied["local_update"][exchange][id]


def reported(run, id, exchange=-1):
    """A client's mean logits, by class."""
    reply = replied(run, id, exchange)
    return dict(zip(reply["counts"].nonzero().flatten().tolist(), reply["logits"], strict=True))


def weights(run, id):
    return parameters_of(run.model(id))


# What clients report


def test_clients_report_the_mean_logits_of_their_classes(play, clouds):
    federation = clouds("mlp2", "mlp3", "wide2", "norm2", labels=SOME)
    run = play(FedHe(STILL), federation)
    for id, architecture in enumerate(("mlp2", "mlp3", "wide2")):
        data, reply = federation.sites[id].train, replied(run, id)
        assert run.engine.federation.sites[id].architecture == architecture
        z = run.model(id)(data.inputs).detach()
        assert sorted(reported(run, id)) == list(SOME[id])
        for label, mean in reported(run, id).items():
            assert_close(mean, z[data.labels == label].mean(0))
        assert reply["counts"].tolist() == [(data.labels == c).sum() for c in range(CLASSES)]
        assert set(reply) == {"counts", "logits"}  # neither weights nor single examples


def test_a_class_of_one_example_is_reported_as_its_logits(play, clouds):
    federation = clouds("mlp2", sizes=(3,))
    run = play(FedHe(STILL), federation)
    data = federation.sites[0].train
    z = run.model(0)(data.inputs).detach()
    for label, mean in reported(run, 0).items():
        assert_close(mean, z[data.labels == label][0])


def test_logits_are_those_before_each_step(play, clouds):
    federation = clouds("mlp2")
    run = play(FedHe(FULL), federation, rounds=0)
    before = run.model(0)
    run.round()
    data = federation.sites[0].train
    z = before(data.inputs).detach()
    for label, mean in reported(run, 0).items():
        assert_close(mean, z[data.labels == label].mean(0))


# What the server makes of it


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_an_average_is_that_of_all_reports_on_its_class(play, clouds, weighting):
    run = play(FedHe(FULL, weighting=weighting), clouds(*["mlp2"] * 4, labels=SOME), rounds=0)
    reports = {label: [] for label in range(CLASSES)}
    for cohort in [(0, 1), (2,), (1, 3), (0, 1, 2, 3), (0,)]:
        run.round(*cohort)
        for id in cohort:
            for label, mean in reported(run, id).items():
                share = 1 if weighting == "uniform" else int(replied(run, id)["counts"][label])
                reports[label] += [mean] * share
        for label, found in reports.items():
            assert run.state.counts[label] == len(found)
            expected = torch.stack(found).mean(0) if found else torch.zeros(CLASSES)
            assert_close(run.state.means[label], expected, rtol=1e-5, atol=1e-6)
    assert run.state.reports == 10


def test_after_so_many_reports_the_averages_count_as_one(play, clouds):
    run = play(FedHe(FULL, memory=2), clouds("mlp2", "mlp2", labels=((0, 1), (1, 2))), rounds=0)
    for _ in range(2):  # four reports of two clients
        run.round()
    assert run.state.counts.tolist() == [1, 1, 1]
    held = run.state.means
    plain = play(FedHe(FULL), clouds("mlp2", "mlp2", labels=((0, 1), (1, 2))), rounds=2)
    assert plain.state.counts.tolist() == [2, 4, 2]
    assert_close(held, plain.state.means, **EXACTLY)
    run.round(0)
    assert run.state.counts.tolist() == [2, 2, 1]
    for label, mean in reported(run, 0).items():
        assert_close(run.state.means[label], (held[label] + mean) / 2)
    run.round(1)
    run.round(1)
    run.round(1)  # the eighth report
    assert run.state.counts.tolist() == [1, 1, 1]


def test_forgetting_does_not_make_an_unknown_class_known(play, clouds):
    run = play(FedHe(FULL, memory=1), clouds("mlp2", "mlp2", labels=((0, 1), (1,))), rounds=2)
    assert run.state.counts.tolist() == [1, 1, 0]
    run.round()
    assert sent(run)["logits"]["known"].tolist() == [True, True, False]


def test_averages_are_sent_once_clients_have_reported_often_enough(play, clouds):
    run = play(FedHe(FULL, warmup=2), clouds("mlp2", "mlp2"), rounds=0)
    for cohort, expected in [((0,), False), ((0,), False), ((0, 1), False), ((0,), True), ((1,), True)]:
        run.round(*cohort)
        assert ("logits" in sent(run, cohort[0])) == expected
    assert_close(sent(run, 1)["logits"]["means"], run.states[-2].means, **EXACTLY)
    soon = play(FedHe(FULL, warmup=0), clouds("mlp2", "mlp2"))
    assert not sent(soon)["logits"]["known"].any()


def test_a_rule_that_drops_wild_reports_applies_by_class(play, clouds):
    run = play(FedHe(FULL, combine=Aggregate("median")), clouds(*["mlp2"] * 3, labels=((0, 1), (0, 1), (0,))))
    zero = torch.stack([reported(run, id)[0] for id in range(3)])
    assert_close(run.state.means[0], zero.median(0).values)
    one = torch.stack([reported(run, id)[1] for id in range(2)])
    assert_close(run.state.means[1], one.mean(0))


# How clients learn


def test_logit_loss__is_the_tasks_and_the_distance_to_the_row_of_the_label():
    z = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0], [3.0, 0.0, 0.0]], requires_grad=True)
    labels = torch.tensor([2, 0, 1])
    table = {"means": torch.tensor([[1.0, 0, 0], [9, 9, 9], [0, 0, 5]]), "known": torch.tensor([True, False, True])}
    batch = type("Batch", (), {"inputs": z, "targets": labels})
    loss, observed = LogitLoss(F.cross_entropy, 0.5)(nn.Identity(), batch, {"logits": table})
    gaps = ((1 + 0 + 9) + (1 + 1 + 1) + 0) / 9  # over examples and logits; class 1 is unknown
    assert_close(loss, F.cross_entropy(z, labels) + 0.5 * gaps)
    assert observed["logits"] is z
    assert_close(LogitLoss(F.cross_entropy, 0.5)(nn.Identity(), batch, {"logits": None})[0], F.cross_entropy(z, labels))
    (gradient,) = torch.autograd.grad(loss - F.cross_entropy(z, labels), z)
    assert_close(gradient[2], torch.zeros(3), **EXACTLY)
    assert_close(gradient[0], 0.5 * 2 / 9 * torch.tensor([1.0, 0.0, -3.0]), rtol=1e-5, atol=1e-6)


def test_a_client_step_draws_logits_to_the_averages_of_others(play, clouds):
    federation = clouds("mlp2", "wide2", labels=((0, 1), (1, 2)))
    run = play(FedHe(FULL, alpha=2.0), federation)
    nets = [run.model(id) for id in range(2)]
    Q, known = run.state.means, run.state.counts > 0
    run.round()
    for id, net in enumerate(nets):
        data = federation.sites[id].train
        z = net(data.inputs)
        assert known[data.labels].all()
        loss = F.cross_entropy(z, data.labels) + 2 * (z - Q[data.labels]).square().mean()
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        for (name, parameter), gradient in zip(net.named_parameters(), gradients, strict=True):
            expected = (parameter - 0.1 * gradient).detach()
            assert_close(weights(run, id)[name], expected, rtol=1e-4, atol=1e-6)


def test_logits_of_clients_that_exchange_come_closer_than_those_of_clients_that_do_not(play, clouds):
    federation = clouds("mlp2", "wide2", sizes=(30, 30))
    training = LocalTraining("sgd", lr=0.05, epochs=2)

    def gap(alpha):
        run = play(FedHe(training, alpha), federation, rounds=6)
        return max(float((reported(run, 0)[label] - reported(run, 1)[label]).abs().max()) for label in range(CLASSES))

    assert gap(3.0) < 0.5 * gap(0.0)


def test_clients_keep_their_own_weights(play, clouds):
    federation = clouds("mlp2", "mlp2", "mlp2")
    run = play(FedHe(FULL), federation, rounds=2)
    before = [weights(run, id) for id in range(3)]
    assert not torch.equal(before[0]["head.weight"], before[1]["head.weight"])
    run.round(0)
    assert_close(weights(run, 1), before[1], **EXACTLY)
    assert not torch.equal(weights(run, 0)["head.weight"], before[0]["head.weight"])


def test_any_module_with_as_many_outputs_will_do(play, clouds):
    federation = clouds("mlp2", "mlp3")
    run = play(FedHe(FULL), replace(federation, architectures={"mlp2": plain, "mlp3": partial(nn.Linear, 6, 3)}), 2)
    assert (run.state.counts == 4).all()


def plain():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


# Limits and refusals


def test_without_alpha_it_is_local_training_also_when_averages_are_sent(play, clouds):
    federation = clouds("norm2", "wide2")
    fedhe, local = (play(m, federation, rounds=3) for m in (FedHe(FULL, alpha=0.0, warmup=0), Local(FULL)))
    for id in range(2):
        assert_close(weights(fedhe, id), weights(local, id), **EXACTLY)


def test_with_alpha_it_is_not(play, clouds):
    federation = clouds("norm2", "wide2")
    fedhe, local = (play(m, federation, rounds=2) for m in (FedHe(FULL), Local(FULL)))
    assert not torch.equal(weights(fedhe, 0)["head.weight"], weights(local, 0)["head.weight"])


def test_it_needs_classes_and_nothing_else():
    assert FedHe().needs() == {Need.CLASSES}


@pytest.mark.parametrize("changes", [{"alpha": -1.0}, {"warmup": -1}, {"memory": 0}, {"weighting": "examples"}])
def test_what_is_out_of_range_is_refused_by_name(changes):
    with pytest.raises(ValueError, match=rf"^{next(iter(changes))}: expected"):
        replace(FedHe(), **changes)
