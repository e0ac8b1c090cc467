"""FCCL: correlations of logits on public data, and the two models that keep a client from forgetting."""

from dataclasses import replace
from math import log

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.federation import empty_like
from potluck.core.ground.errors import ConfigError
from potluck.core.needs import Need, Offer
from potluck.core.nets.weights import load
from potluck.core.requests.examples import Batch, Examples
from potluck.core.requests.fit import LocalTraining
from potluck.experiment.federation.needs import check_needs
from potluck.methods.fccl import FCCL, CorrelationLoss, DualDomainLoss, standardised
from potluck.parts.means import Aggregate

EXACTLY = {"rtol": 0, "atol": 0}
STILL = LocalTraining("sgd", lr=0.0)
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
GENTLE = LocalTraining("sgd", lr=0.01, batch_size=64)
BOTH_DEVIATIONS = pytest.mark.parametrize("deviation", ["population", "sample"])


def numbers(rows, classes, seed=0):
    return torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def correlation_loss(logits, consensus, off_diagonal=0.0051, deviation="population"):
    batch = Batch(logits, torch.zeros(len(logits)), {"consensus": consensus})
    return CorrelationLoss(off_diagonal, deviation)(nn.Identity(), batch, {})


def full_step(net, loss, lr=0.1):
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter -= lr * gradient


def check_slope(loss, logits):
    """The gradient of a loss at these logits is that of finite differences."""
    logits = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(logits), logits)
    for place in range(logits.numel()):
        nudge = torch.zeros(logits.numel(), dtype=torch.float64).index_fill(0, torch.tensor(place), 1e-6)
        ahead, behind = (loss(logits.detach() + sign * nudge.view_as(logits)) for sign in (1, -1))
        assert_close(gradient.view(-1)[place], (ahead - behind) / 2e-6, rtol=1e-5, atol=1e-8)


# Correlations


def test_the_correlation_loss_of_a_case_done_by_hand():
    """Two classes over four examples; deviations are 1 but for the second of the client's, whose is 2."""
    logits = torch.tensor([[1.0, 5.0], [1.0, 1.0], [-1.0, 5.0], [-1.0, 1.0]], dtype=torch.float64)
    consensus = torch.tensor([[1.0, 2.0], [1.0, 0.0], [-1.0, 0.0], [1.0 - 2, 2.0]], dtype=torch.float64)
    same, other = (1.0, 0.0), (0.0, 0.0)  # M_00 and M_11; M_01 and M_10
    diagonal = sum((1 - m) ** 2 for m in same)
    assert_close(correlation_loss(logits, consensus, 0.0).item(), diagonal)
    assert_close(correlation_loss(logits, consensus, 0.5).item(), diagonal + 0.5 * sum((1 + m) ** 2 for m in other))
    swapped = consensus.flip(1)
    assert_close(correlation_loss(logits, swapped, 0.5).item(), 1 + 1 + 0.5 * ((1 + 1) ** 2 + 1))
    assert_close(correlation_loss(logits, -swapped, 0.5).item(), 1 + 1 + 0.5 * (0 + 1))  # -1 is what it aims at


def test_standardised_logits_correlate_with_themselves_by_one():
    z = standardised(5 + 3 * numbers(40, 6), "population")
    assert_close((z.T @ z / 40).diagonal(), torch.ones(6, dtype=torch.float64))
    z = standardised(5 + 3 * numbers(40, 6), "sample")
    assert_close((z.T @ z / 40).diagonal(), torch.full((6,), 39 / 40, dtype=torch.float64))


def test_correlations_are_those_of_statistics():
    one, two = numbers(30, 4), numbers(30, 4, seed=1)
    expected = torch.corrcoef(torch.cat([one, two], 1).T)[:4, 4:]
    assert_close(standardised(one, "population").T @ standardised(two, "population") / 30, expected)


@BOTH_DEVIATIONS
def test_the_correlation_loss_does_not_depend_on_scale_and_shift(deviation):
    logits, consensus = numbers(20, 5), numbers(20, 5, seed=1)
    expected = correlation_loss(logits, consensus, deviation=deviation)
    moved = correlation_loss(7 * logits - 3, 0.2 * consensus + 11, deviation=deviation)
    assert_close(moved, expected)
    assert not torch.allclose(correlation_loss(-logits, consensus, deviation=deviation), expected)


def test_the_correlations_are_computed_in_float32_in_a_run_in_bf16():
    logits, consensus = numbers(20, 5).float(), numbers(20, 5, seed=1).float()
    expected = correlation_loss(logits, consensus)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_close(correlation_loss(logits, consensus), expected, **EXACTLY)


@BOTH_DEVIATIONS
def test_the_correlation_loss_has_the_slope_of_finite_differences(deviation):
    consensus = numbers(7, 3, seed=1)
    check_slope(lambda logits: correlation_loss(logits, consensus, 0.3, deviation), numbers(7, 3))


@BOTH_DEVIATIONS
def test_what_is_constant_over_a_batch_correlates_with_nothing_and_is_finite(deviation):
    logits, consensus = numbers(8, 3), numbers(8, 3, seed=1)
    logits[:, 1] = 0.1
    loss = correlation_loss(logits, consensus, 0.0, deviation)
    others = [0, 2]
    expected = 1 + correlation_loss(logits[:, others], consensus[:, others], 0.0, deviation)
    assert_close(loss, expected)
    for rows in (numbers(1, 3), torch.full((8, 3), 1e3, dtype=torch.float64), torch.zeros(8, 3, dtype=torch.float64)):
        rows = rows.float().requires_grad_()
        loss = correlation_loss(rows, numbers(len(rows), 3, seed=1).float(), 0.5, deviation)
        (gradient,) = torch.autograd.grad(loss, rows)
        assert_close(loss.detach(), torch.tensor(3 + 0.5 * 6))
        assert gradient.isfinite().all()
    (gradient,) = torch.autograd.grad(
        correlation_loss(one := numbers(1, 3).requires_grad_(), numbers(1, 3), deviation=deviation), one
    )
    assert not gradient.any()  # one example says nothing of correlation


# Not forgetting


def dual_loss(logits, labels, intra, inter, weights=(1.0, 1.0)):
    extras = {"intra": lambda inputs: intra, "inter": lambda inputs: inter}
    loss = DualDomainLoss(F.cross_entropy, *weights)
    return loss(nn.Identity(), Batch(logits, torch.tensor(labels), {}), extras)


def test_the_dual_domain_loss_of_a_case_done_by_hand():
    """KL(teacher || net), a mean over the batch and a sum over classes, at a temperature of 1."""
    rows = torch.tensor([[0.75, 0.25], [0.75, 0.25]], dtype=torch.float64).log()
    intra = torch.tensor([[0.5, 0.5], [0.75, 0.25]], dtype=torch.float64).log()
    inter = torch.tensor([[0.75, 0.25], [0.2, 0.8]], dtype=torch.float64).log()
    from_intra = 0.5 * log(0.5 / 0.75) + 0.5 * log(0.5 / 0.25)
    from_inter = 0.2 * log(0.2 / 0.75) + 0.8 * log(0.8 / 0.25)
    own = (-log(0.75) - log(0.25)) / 2
    assert_close(dual_loss(rows, [0, 1], intra, inter).item(), own + from_intra / 2 + from_inter / 2)
    weighed = dual_loss(rows, [0, 1], intra, inter, (2.0, 0.3))
    assert_close(weighed.item(), own + 2.0 * from_intra / 2 + 0.3 * from_inter / 2)
    assert_close(dual_loss(rows, [0, 1], None, None, (0.0, 0.0)).item(), own)


def test_the_dual_domain_loss_has_the_slope_of_finite_differences_and_its_teachers_none():
    intra, inter = numbers(5, 4, seed=1).requires_grad_(), numbers(5, 4, seed=2).requires_grad_()
    check_slope(lambda logits: dual_loss(logits, [0, 1, 2, 3, 0], intra, inter, (0.7, 1.0)), numbers(5, 4))
    dual_loss(numbers(5, 4).requires_grad_(), [0] * 5, intra * 1, inter * 1).backward()
    assert intra.grad is None
    assert inter.grad is None


def test_a_model_that_has_not_moved_feels_neither_teacher():
    logits = numbers(6, 3).requires_grad_()
    held = logits.detach().clone()
    labels = [0, 1, 2, 0, 1, 2]
    (with_teachers,) = torch.autograd.grad(dual_loss(logits, labels, held, held), logits)
    (alone,) = torch.autograd.grad(F.cross_entropy(logits, torch.tensor(labels)), logits)
    assert_close(with_teachers, alone)


# A round


def stepwise(net, federation, run, exchange, id, method, lr=0.01):
    """One collaborative step by hand, on the rows and with the consensus that were sent."""
    rows = run.wire.sent["score_public"][exchange][id]["rows"]
    consensus = run.wire.sent["learn_from_others"][exchange][id]["consensus"]
    logits = net(federation.public.inputs[rows])
    gaps, others = logits - logits.mean(0), consensus - consensus.mean(0)
    unbiased = method.deviation == "sample"
    z, bar = gaps / logits.std(0, unbiased=unbiased), others / consensus.std(0, unbiased=unbiased)
    m = torch.stack([torch.stack([(z[:, u] * bar[:, v]).mean() for v in range(3)]) for u in range(3)])
    pairs = [(u, v) for u in range(3) for v in range(3) if u != v]
    loss = sum((1 - m[u, u]) ** 2 for u in range(3)) + 0.2 * sum((1 + m[u, v]) ** 2 for u, v in pairs)
    full_step(net, loss, lr)


@pytest.mark.parametrize(("deviation", "exchanges"), [("population", 1), ("sample", 1), ("sample", 3)])
def test_a_round_is_correlation_on_public_data_and_then_dual_distillation_on_its_own(
    play, clouds, deviation, exchanges
):
    federation = clouds("mlp2", "mlp3", "wide2", public=31)
    method = FCCL(FULL, GENTLE, exchanges=exchanges, off_diagonal=0.2, deviation=deviation, intra=0.4, inter=2.0)
    run = play(method, federation, rounds=0)
    nets, firsts = [run.model(id) for id in range(3)], []
    for id, net in enumerate(nets):  # pre-training
        data = federation.sites[id].train
        full_step(net, F.cross_entropy(net(data.inputs), data.targets))
        firsts.append(load(run.model(id), net.state_dict()))
    for number in range(2):
        run.round()
        befores = [load(run.model(id), net.state_dict()) for id, net in enumerate(nets)]
        for exchange in range(number * exchanges, (number + 1) * exchanges):
            rows = run.wire.sent["score_public"][exchange][0]["rows"]
            logits = [net(federation.public.inputs[rows]).detach() for net in nets]
            consensus = run.wire.sent["learn_from_others"][exchange][0]["consensus"]
            assert_close(consensus, (logits[0] + logits[1] + logits[2]) / 3, rtol=1e-4, atol=1e-5)
            for id, net in enumerate(nets):
                stepwise(net, federation, run, exchange, id, method)
        for id, net in enumerate(nets):
            data = federation.sites[id].train
            logits = net(data.inputs)
            loss = F.cross_entropy(logits, data.targets)
            for weight, teacher in ((0.4, firsts[id]), (2.0, befores[id])):
                q = teacher(data.inputs).detach().softmax(1)
                loss = loss + weight * (q * (q.log() - logits.log_softmax(1))).sum(1).mean()
            full_step(net, loss)
            assert_close(dict(run.model(id).state_dict()), dict(net.state_dict()), rtol=1e-3, atol=1e-5)


def test_every_public_row_of_a_round_is_in_one_exchange(play, clouds):
    run = play(FCCL(public_examples=20, exchanges=3), clouds("mlp2", "mlp3", public=30))
    parts = [sent[0]["rows"].tolist() for sent in run.wire.sent["score_public"]]
    assert [len(part) for part in parts] == [7, 7, 6]
    assert len({row for part in parts for row in part}) == 20
    assert len(run.wire.sent["local_update"]) == 1


def test_no_more_exchanges_than_rows_are_made(play, clouds):
    run = play(FCCL(exchanges=9), clouds("mlp2", "mlp3", public=4))
    assert len(run.wire.sent["score_public"]) == 4


def test_later_exchanges_see_what_earlier_ones_taught(play, clouds):
    federation = clouds("mlp2", "mlp3", public=30)
    run = play(FCCL(STILL, GENTLE, exchanges=2, pretrain=0), federation, rounds=0)
    initial = run.model(0)
    run.round()
    for exchange, changed in enumerate([False, True]):
        inputs = federation.public.inputs[run.wire.sent["score_public"][exchange][0]["rows"]]
        found = run.wire.replied["score_public"][exchange][0]["logits"]
        assert torch.allclose(found, initial(inputs), atol=1e-5) != changed


def test_learning_from_others_raises_the_correlation_with_them(play, clouds):
    federation = clouds("mlp2", "mlp3", "wide2", public=30)
    run = play(FCCL(STILL, LocalTraining(lr=0.01, epochs=20, batch_size=64), pretrain=0), federation)
    inputs = federation.public.inputs[run.wire.sent["score_public"][0][0]["rows"]]
    consensus = run.wire.sent["learn_from_others"][0][0]["consensus"]
    for id in range(3):
        before, after = run.wire.replied["score_public"][0][id]["logits"], run.model(id)(inputs).detach()
        assert correlation_loss(after, consensus) < 0.5 * correlation_loss(before, consensus)


def test_logits_are_made_in_evaluation_mode(play, clouds):
    federation = clouds("norm2", "norm3", public=30)
    run = play(FCCL(pretrain=0), federation, rounds=0)
    initial = run.new_model(1)
    run.round()
    inputs = federation.public.inputs[run.wire.sent["score_public"][0][1]["rows"]]
    assert_close(run.wire.replied["score_public"][0][1]["logits"], initial.eval()(inputs).detach())


def test_teachers_stay_as_they_are(play, clouds):
    federation = clouds("norm2", "norm3", public=30)
    run = play(FCCL(), federation)
    intra = run.kept(0)["state"]["intra"]
    assert run.kept(0)["state"].keys() == {"intra"}
    run.round()
    assert_close(run.kept(0)["state"]["intra"], intra, **EXACTLY)
    assert not torch.equal(run.kept(0)["model"]["head.weight"], intra["head.weight"])


@pytest.mark.parametrize("teacher", ["intra", "inter"])
def test_the_more_a_teacher_weighs_the_nearer_the_client_stays_to_it(play, clouds, teacher):
    """In a first round, without pre-training, either is the client's first model."""
    federation = clouds("mlp2", "mlp2", public=30, labels=((0,), (1,)))
    training = LocalTraining("sgd", lr=0.1, epochs=3, batch_size=4)

    def gap(weight):
        run = play(FCCL(training, STILL, pretrain=0, **{"intra": 0.0, "inter": 0.0, teacher: weight}), federation, 0)
        first, inputs = run.model(0), federation.sites[0].train.inputs
        run.round()
        return float((run.model(0)(inputs).softmax(1) - first(inputs).softmax(1)).abs().mean().detach())

    assert gap(5.0) < 0.7 * gap(0.0)


def test_one_full_step_of_a_client_that_learnt_nothing_from_others_is_that_of_its_own_data(play, clouds):
    federation = clouds("mlp2", "mlp3", public=30)
    taught, untaught = (
        play(FCCL(FULL, STILL, intra=weight, inter=weight, pretrain=0), federation) for weight in (1.0, 0.0)
    )
    for id in (0, 1):
        assert_close(dict(taught.model(id).state_dict()), dict(untaught.model(id).state_dict()), rtol=0, atol=1e-7)


def test_clients_train_on_their_own_data_before_they_first_score(play, clouds):
    federation = clouds("mlp2", "mlp3", public=30)
    run = play(FCCL(FULL, STILL, pretrain=3), federation, rounds=0)
    net, data = run.model(0), federation.sites[0].train
    for _ in range(3):
        full_step(net, F.cross_entropy(net(data.inputs), data.targets))
    run.round(0)
    run.round(0, 1)
    assert_close(dict(net.state_dict()), run.kept(0)["state"]["intra"])
    fits = [{id: len(losses) for id, losses in report.losses.items()} for report in run.reports]
    assert fits == [{0: 3 + 1}, {0: 1, 1: 3 + 1}]  # on its own data: beforehand, and in every round


def test_public_targets_are_never_read(play, clouds):
    federation = clouds("mlp2", "norm3", public=30)
    foreign = replace(federation, public=Examples(federation.public.inputs, torch.full((30,), torch.nan)))
    own, other = play(FCCL(), federation, rounds=2), play(FCCL(), foreign, rounds=2)
    for id in (0, 1):
        assert_close(dict(own.model(id).state_dict()), dict(other.model(id).state_dict()), **EXACTLY)


def test_public_inputs_are_never_augmented(play, clouds):
    drawn = []

    def note(inputs, rng):
        drawn.append(rng)
        return inputs

    federation = clouds("mlp2", "mlp3", public=30)
    play(FCCL(), replace(federation, public=replace(federation.public, preprocess=note)))
    assert drawn
    assert drawn == [None] * len(drawn)


# Who takes part


def test_a_client_that_was_not_drawn_stays_as_it_is_and_who_never_was_has_its_first_model(play, clouds):
    run = play(FCCL(), clouds("norm2", "norm2", "mlp3", public=30), rounds=0)
    initial = run.model(2).state_dict()
    run.round(0, 1)
    before = run.kept(1)
    run.round(0)
    assert_close(run.kept(1)["model"], before["model"], **EXACTLY)
    assert_close(dict(run.model(2).state_dict()), dict(initial), **EXACTLY)
    assert run.engine.global_model(run.state) is None


def test_who_returns_has_the_model_with_which_it_begins_for_a_teacher(play, clouds):
    """Not the one with which it began the last round that it took part in."""
    federation = clouds("mlp2", "mlp3", public=30)
    run = play(FCCL(FULL, STILL, intra=0.0, inter=3.0), federation)
    run.round(1)
    net, data = run.model(0), federation.sites[0].train
    run.round(0, 1)
    full_step(net, F.cross_entropy(net(data.inputs), data.targets))  # the divergence from itself has no slope
    assert_close(dict(run.model(0).state_dict()), dict(net.state_dict()))


class Forgetful(nn.Linear):
    """Fails when it is asked to learn from others for the second time in its life."""

    times = 0

    def forward(self, x):
        if self.training and len(x) != 12 and torch.is_grad_enabled():
            type(self).times += 1
            if type(self).times == 2:
                raise RuntimeError("out of order")
        return super().forward(x)


@pytest.mark.usefixtures("uncounted")
def test_a_client_that_fails_between_exchanges_is_left_out_of_the_rest_and_begins_anew(play, clouds):
    federation = clouds("mlp2", "mlp3", "wide2", public=30)
    architectures = {**federation.architectures, "mlp2": lambda: Forgetful(6, 3)}
    Forgetful.times = 0
    method = FCCL(FULL, FULL, exchanges=3, off_diagonal=0.2, pretrain=0, intra=0.0, inter=5.0)
    run = play(method, replace(federation, architectures=architectures), tolerate_failures=True)
    asked = [set(sent) for sent in run.wire.sent["score_public"]]
    assert asked == [{0, 1, 2}, {0, 1, 2}, {1, 2}]
    assert set(run.wire.sent["local_update"][0]) == {1, 2}
    first, net = load(Forgetful(6, 3), run.kept(0)["model"]), load(Forgetful(6, 3), run.kept(0)["model"])
    run.round()
    for exchange in (3, 4, 5):
        stepwise(net, federation, run, exchange, 0, method, 0.1)
    data = federation.sites[0].train
    logits, q = net(data.inputs), first(data.inputs).detach().softmax(1)  # the teacher is this round's first model
    full_step(net, F.cross_entropy(logits, data.targets) + 5 * (q * (q.log() - logits.log_softmax(1))).sum(1).mean())
    assert_close(dict(run.model(0).state_dict()), dict(net.state_dict()), rtol=1e-4, atol=1e-5)
    assert run.kept(0)["state"].keys() == {"intra"}


def test_a_client_alone_only_separates_its_own_classes(play, clouds):
    run = play(FCCL(STILL, GENTLE, off_diagonal=0.0, pretrain=0), clouds("mlp2", public=30))
    sent, replied = run.wire.sent["learn_from_others"][0][0], run.wire.replied["score_public"][0][0]
    assert_close(sent["consensus"], replied["logits"], **EXACTLY)
    assert correlation_loss(replied["logits"], sent["consensus"], 0.0) < 1e-9


def test_clients_that_lack_classes_still_have_logits_of_all(play, clouds):
    run = play(FCCL(), clouds("mlp2", "mlp3", public=30, labels=((0,), (1, 2))), rounds=2)
    assert run.wire.sent["learn_from_others"][-1][0]["consensus"].isfinite().all()
    assert all(tensor.isfinite().all() for id in (0, 1) for tensor in run.model(id).state_dict().values())


def test_a_rule_of_means_bounds_what_one_client_can_do(play, clouds):
    run = play(FCCL(combine=Aggregate("median")), clouds("mlp2", "mlp3", "wide2", public=30))
    logits = torch.stack([reply["logits"] for reply in run.wire.replied["score_public"][0].values()])
    assert_close(run.wire.sent["learn_from_others"][0][0]["consensus"], logits.median(0).values)


# Wire and hyper-parameters


@pytest.mark.parametrize("exchanges", [1, 4])
def test_messages_carry_logits_and_the_rows_once(play, clouds, exchanges):
    run = play(FCCL(public_examples=10, exchanges=exchanges), clouds("norm2", "mlp3", public=30))
    logits = 2 * 10 * 3 * 4
    assert run.reports[0].traffic.up == {"logits": logits}
    assert run.reports[0].traffic.down == {"consensus": logits, "rows": 2 * 10 * 8}


@pytest.mark.parametrize("public", [0, 4])
def test_public_data_are_needed_and_empty_ones_are_none(clouds, public):
    assert FCCL().needs() == {Need.PUBLIC_DATA, Need.CLASSES}
    federation = clouds("mlp2", public=public)
    if public:
        federation = replace(federation, public=empty_like(federation.public))
    with pytest.raises(ConfigError, match="it needs public data, and the federation has none"):
        check_needs(FCCL().needs(), "fccl", Offer.of(federation))


def test_the_defaults_are_the_papers():
    method = FCCL()
    assert (method.off_diagonal, method.intra, method.inter, method.public_examples) == (0.0051, 1.0, 1.0, 5000)
    assert (method.training.lr, method.correlation.lr, method.training.optimizer) == (0.001, 0.001, "adam")


@pytest.mark.parametrize(
    "changes",
    [
        {"off_diagonal": -0.1},
        {"intra": -1.0},
        {"inter": -1.0},
        {"pretrain": -1},
        {"exchanges": 0},
        {"public_examples": 0},
        {"deviation": "both"},
    ],
)
def test_what_is_out_of_range_is_refused_by_name(changes):
    with pytest.raises(ValueError, match=rf"^{next(iter(changes))}: expected"):
        replace(FCCL(), **changes)
