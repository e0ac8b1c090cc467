from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.needs import Need
from potluck.core.requests.examples import Batch, Examples
from potluck.core.requests.fit import LocalTraining
from potluck.methods.ktpfl import (
    KTpFL,
    TemperedLoss,
    divergence_gradients,
    on_simplex,
    squared_gradients,
    step_size,
)

EXACTLY = {"rtol": 0, "atol": 0}
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
ONE_STEP = KTpFL(FULL, FULL, pretrain=False)
BOTH_UPDATES = pytest.mark.parametrize("update", ["softmax", "projected"])


def predictions(clients, rows=6, classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(clients, rows, classes, generator=generator, dtype=torch.float64).softmax(2)


def rows_of_weights(clients, seed=1):
    return torch.rand(clients, clients, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(1)


def full_step(net, loss):
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter -= 0.1 * gradient


# Coefficients


def squared(c, s, rho):
    targets = torch.einsum("kl,lnz->knz", c, s)
    terms = [F.mse_loss(targets[k], s[k]) + rho * ((c[k] - 1 / len(c)) ** 2).mean() for k in range(len(c))]
    return sum(terms)  # each depends on its own row alone


def divergence(c, s, rho):
    targets = torch.einsum("kl,lnz->knz", c, s)
    terms = [F.kl_div(s[k].log(), targets[k], reduction="batchmean") for k in range(len(c))]
    return sum(terms) + rho * (c - 1 / len(c)).square().sum()


@pytest.mark.parametrize(("loss", "gradients"), [(squared, squared_gradients), (divergence, divergence_gradients)])
def test_gradients_are_those_of_the_losses(loss, gradients):
    s, c = predictions(3), rows_of_weights(3).requires_grad_()
    (expected,) = torch.autograd.grad(loss(c, s, 0.7), c)
    assert_close(gradients(c.detach(), s, 0.7), expected)


def test_step_size_is_the_authors():
    assert step_size(0.002) == pytest.approx(5)  # up to 0.01, which is neither
    assert step_size(0.06) == pytest.approx(0.2)  # down to 0.012, down and up again, four times
    assert step_size(100.0) == pytest.approx(5**-5)
    assert step_size(0.0) == pytest.approx(5**5)


def test_on_simplex_is_the_nearest_distribution():
    points = torch.tensor([[0.5, 0.3, 0.2], [2.0, 0.0, 0.0], [0.6, 0.6, -1.0], [0.4, 0.4, 0.4]], dtype=torch.float64)
    third = 1 / 3
    expected = [[0.5, 0.3, 0.2], [1, 0, 0], [0.5, 0.5, 0], [third] * 3]
    assert_close(on_simplex(points), torch.tensor(expected, dtype=torch.float64))


@BOTH_UPDATES
def test_coefficients_are_distributions_and_targets_of_equal_clients_are_what_they_predict(update):
    s = predictions(4)
    method = KTpFL(update=update)
    found = method._learnt(rows_of_weights(4), s)
    assert (found >= 0).all()
    assert_close(found.sum(1), torch.ones(4, dtype=torch.float64))
    equal = s[:1].expand(4, -1, -1)
    c = method._learnt(torch.full((4, 4), 0.25, dtype=torch.float64), equal)
    assert_close(c, torch.full((4, 4), 0.25, dtype=torch.float64))
    assert_close(torch.einsum("kl,lnz->knz", c, equal), equal)


@pytest.mark.parametrize("rho", [0.7, 20.0])
def test_learnt_coefficients_are_the_authors(rho):
    """Row by row: a step on the loss, of the size that its mean absolute gradient allows, and softmax(5 c)."""
    s, c = predictions(3), rows_of_weights(3).requires_grad_()
    (gradients,) = torch.autograd.grad(squared(c, s, rho), c)
    expected = []
    for row, gradient in zip(c.detach(), gradients, strict=True):
        powers = (5 * (row - step_size(float(gradient.abs().sum()) / 3) * gradient)).exp()
        expected.append(powers / powers.sum())
    assert_close(KTpFL(rho=rho)._learnt(c.detach(), s), torch.stack(expected), rtol=1e-5, atol=1e-7)


def test_learnt_coefficients_are_a_step_and_the_nearest_distribution():
    s, c = predictions(3), rows_of_weights(3).requires_grad_()
    (gradients,) = torch.autograd.grad(divergence(c, s, 0.1), c)
    method = KTpFL(update="projected", rho=0.1, coefficient_lr=0.3)
    assert_close(method._learnt(c.detach(), s), on_simplex(c.detach() - 0.3 * gradients))


@BOTH_UPDATES
def test_coefficients_follow_a_permutation_of_the_clients(update):
    s, c, order = predictions(4), rows_of_weights(4), torch.tensor([2, 0, 3, 1])
    method = KTpFL(update=update)
    assert_close(method._learnt(c[order][:, order], s[order]), method._learnt(c, s)[order][:, order])


def two_groups():
    """Two clients who say class 0, and two who say class 1."""
    one, other = torch.tensor([0.9, 0.1]), torch.tensor([0.1, 0.9])
    return torch.stack([one, one, other, other]).double()[:, None].expand(-1, 5, -1)


def test_projected_coefficients_prefer_those_who_predict_alike():
    method, c = KTpFL(update="projected", rho=0.05), torch.full((4, 4), 0.25, dtype=torch.float64)
    for _ in range(30):
        c = method._learnt(c, two_groups())
    assert c[0, :2].sum() > 0.9
    assert c[3, 2:].sum() > 0.9
    for _ in range(30):
        c = replace(method, rho=2.0)._learnt(c, two_groups())
    assert 0.55 < c[0, :2].sum() < 0.8  # drawn back to equal ones


def test_a_large_rho_makes_coefficients_equal():
    method = KTpFL(update="projected", rho=100.0, coefficient_lr=0.005)  # a whole step: 2 rho lr = 1
    found = method._learnt(rows_of_weights(4), two_groups())
    assert_close(found, torch.full((4, 4), 0.25, dtype=torch.float64), atol=0.02, rtol=0)


def test_the_authors_coefficients_stay_nearly_equal():
    """As departure 1 says: softmax(5 c) contracts every difference by 5/N."""
    method, c = KTpFL(), torch.full((10, 10), 0.1, dtype=torch.float64)
    s = two_groups()[[0] * 5 + [2] * 5]
    for _ in range(20):
        c = method._learnt(c, s)
    assert 0.08 < c.min() < c.max() < 0.12


# Distillation


def test_the_loss_s_gradient_is_that_of_the_divergence_at_the_temperature():
    """KL(labels || softmax(logits / T)), no square of T; "mean" divides by the number of classes too."""
    net, inputs = nn.Linear(3, 4).double(), torch.randn(5, 3, generator=torch.Generator().manual_seed(3)).double()
    with torch.no_grad():
        net.weight.copy_(torch.linspace(-1, 1, 12).view(4, 3))
    labels = predictions(1, rows=5)[0]
    batch = Batch(inputs, torch.zeros(5), {"soft_labels": labels})
    for by in (1, 4):
        expected = F.kl_div(F.log_softmax(net(inputs) / 10, 1), labels, reduction="sum") / 5 / by
        pair = [torch.autograd.grad(loss, net.weight)[0] for loss in (TemperedLoss(10.0, by)(net, batch, {}), expected)]
        assert_close(*pair)


@pytest.mark.parametrize(("update", "reduction", "by"), [("softmax", "batchmean", 1), ("projected", "mean", 3)])
def test_a_round_is_the_papers(play, clouds, update, reduction, by):
    federation = clouds("mlp2", "mlp3", "wide2", public=30)
    method = replace(ONE_STEP, update=update, temperature=2.0, reduction=reduction, coefficient_lr=5.0, rho=0.0)
    run = play(method, federation, rounds=0)
    nets, c = [run.model(id) for id in range(3)], torch.full((3, 3), 1 / 3)
    for _ in range(2):
        run.round()
        inputs = federation.public.inputs[run.wire.sent["predict_public"][-1][0]["rows"]]
        s = torch.stack([(net(inputs) / 2).softmax(1).detach() for net in nets])
        c = run.engine.method._learnt(c, s)
        assert_close(run.state.coefficients, c, rtol=1e-4, atol=1e-6)
        for id, net in enumerate(nets):
            target = c[id, 0] * s[0] + c[id, 1] * s[1] + c[id, 2] * s[2]
            assert_close(run.wire.sent["digest_and_revisit"][-1][id]["target"], target, rtol=1e-4, atol=1e-6)
            full_step(net, -(target * F.log_softmax(net(inputs) / 2, 1)).sum() / 30 / by)
            train = federation.sites[id].train
            full_step(net, federation.criterion(net(train.inputs), train.targets))
            assert_close(dict(run.model(id).state_dict()), dict(net.state_dict()), rtol=1e-4, atol=1e-6)


def test_a_client_alone_is_its_own_teacher(play, clouds):
    run = play(KTpFL(), clouds("mlp2", public=30), rounds=2)
    assert_close(run.state.coefficients, torch.ones(1, 1))
    for sent, replied in zip(run.wire.sent["digest_and_revisit"], run.wire.replied["predict_public"], strict=True):
        assert_close(sent[0]["target"], replied[0]["predictions"])


# Who takes part


@BOTH_UPDATES
def test_coefficients_change_among_those_drawn_and_rows_still_sum_to_one(play, clouds, update):
    method = KTpFL(update=update, coefficient_lr=1.0, temperature=1.0)
    run = play(method, clouds("mlp2", "mlp3", "wide2", "norm2", public=30), rounds=2)
    before = run.state.coefficients
    run.round(1, 3)  # and no others
    after = run.state.coefficients
    among = torch.zeros(4, 4, dtype=torch.bool)
    among[torch.tensor([[1], [3]]), torch.tensor([1, 3])] = True
    assert_close(after[~among], before[~among], **EXACTLY)
    assert not torch.equal(after[among], before[among])
    assert_close(after.sum(1), torch.ones(4))
    s = torch.stack([r["predictions"] for r in run.wire.replied["predict_public"][-1].values()])
    inner = before[among].view(2, 2)
    learnt = method._learnt(inner / inner.sum(1, keepdim=True), s)
    assert_close(after[among].view(2, 2), learnt * inner.sum(1, keepdim=True))
    assert_close(run.wire.sent["digest_and_revisit"][-1][1]["target"], learnt[0, 0] * s[0] + learnt[0, 1] * s[1])


def test_a_client_without_weight_on_anyone_drawn_learns_from_all_of_them_equally(play, clouds):
    run = play(KTpFL(), clouds("mlp2", "mlp3", "wide2", public=30))
    run.states[-1] = replace(run.state, coefficients=torch.tensor([[0.0, 0.0, 1.0], [0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]))
    run.round(0, 1)
    assert torch.equal(run.state.coefficients[0], torch.tensor([0.0, 0.0, 1.0]))
    target = run.wire.sent["digest_and_revisit"][-1][0]["target"]
    assert_close(target.sum(1), torch.ones(30))


def test_a_client_that_was_not_drawn_stays_as_it_is_and_a_newcomer_trains_first(play, clouds):
    run = play(KTpFL(), clouds("norm2", "norm2", "mlp3", public=30), rounds=0)
    run.round(0, 1)
    before = run.kept(1)["model"]
    run.round(0, 2)
    assert_close(run.kept(1)["model"], before, **EXACTLY)
    fits = [{id: len(losses) for id, losses in report.losses.items()} for report in run.reports]
    assert fits == [{0: 2, 1: 2}, {0: 1, 2: 2}]  # on its own data


def test_public_targets_are_never_read(play, clouds):
    federation = clouds("mlp2", "norm3", public=30)
    foreign = replace(federation, public=Examples(federation.public.inputs, torch.full((30,), torch.nan)))
    own, other = play(KTpFL(), federation, rounds=2), play(KTpFL(), foreign, rounds=2)
    for id in (0, 1):
        assert_close(dict(own.model(id).state_dict()), dict(other.model(id).state_dict()), **EXACTLY)


# Wire and hyper-parameters


def test_messages_carry_predictions_and_the_rows_once(play, clouds):
    run = play(KTpFL(public_examples=10), clouds("norm2", "mlp3", public=30))
    size = 2 * 10 * 3 * 4
    assert run.reports[0].traffic.up == {"predictions": size}
    assert run.reports[0].traffic.down == {"target": size, "rows": 2 * 10 * 8}


def test_the_defaults_are_the_authors():
    method = KTpFL()
    assert (method.temperature, method.rho, method.update, method.distillation.batch_size) == (10, 0.7, "softmax", 256)
    assert method.needs() == {Need.PUBLIC_DATA, Need.CLASSES}


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("temperature", 0.0, "temperature: expected above 0, found 0.0"),
        ("rho", -0.1, "rho: expected at least 0, found -0.1"),
        ("public_examples", 0, "public_examples: expected at least 1, found 0"),
    ],
)
def test_hyper_parameters_out_of_range_are_refused(field, value, found):
    with pytest.raises(ValueError, match=found):
        KTpFL(**{field: value})
