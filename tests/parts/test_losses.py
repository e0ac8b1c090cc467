import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from potluck.core.requests.examples import Batch
from potluck.core.roles import Supervised
from potluck.parts.losses import (
    DynamicLoss,
    distillation,
    masked_cross_entropy,
    soft_cross_entropy,
    squared_distance,
)

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(5, 4, generator=GENERATOR, dtype=torch.float64)
OTHERS = torch.randn(5, 4, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 3, 1])
PRESENT = torch.tensor([True, True, True, True])


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: masked_cross_entropy(x, LABELS, PRESENT),
        lambda x: soft_cross_entropy(x, OTHERS.softmax(1)),
        lambda x: distillation(x, OTHERS, temperature=3.0),
    ],
    ids=["masked", "soft", "distillation"],
)
def test_gradients_are_those_of_finite_differences(loss):
    assert torch.autograd.gradcheck(loss, LOGITS.clone().requires_grad_())


def test_squared_distance_and_its_gradient():
    net = nn.BatchNorm1d(3)
    anchor = {"weight": torch.tensor([1.0, 0.0, 3.0]), "bias": torch.zeros(3)}
    distance = squared_distance(net, anchor)
    distance.backward()
    assert distance.item() == 0 + 1 + 4
    assert net.weight.grad.tolist() == [0.0, 2.0, -4.0]  # 2 (w - w0)


def test_absent_classes_count_as_zero_logits_and_get_no_gradient():
    logits = torch.tensor([[2.0, 5.0, 1.0]], requires_grad=True)
    loss = masked_cross_entropy(logits, torch.tensor([0]), torch.tensor([True, False, True]))
    loss.backward()
    assert loss.item() == pytest.approx(-2 + math.log(math.exp(2) + 1 + math.exp(1)))
    assert logits.grad[0, 1] == 0


def test_soft_cross_entropy_of_certain_teachers_is_cross_entropy():
    certain = F.one_hot(LABELS, 4).double()
    assert soft_cross_entropy(LOGITS, certain).item() == pytest.approx(F.cross_entropy(LOGITS, LABELS).item())


def test_soft_cross_entropy_exceeds_the_divergence_by_the_teachers_entropy():
    teacher = OTHERS.softmax(1)
    entropy = -(teacher * teacher.log()).sum(1).mean()
    gap = soft_cross_entropy(LOGITS, teacher) - distillation(LOGITS, OTHERS)
    assert gap.item() == pytest.approx(entropy.item())


def test_distillation_by_hand():
    # One example, two classes: teacher (1/2, 1/2), student (1/4, 3/4).
    student = torch.tensor([[0.0, math.log(3)]])
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert distillation(student, torch.zeros(1, 2)).item() == pytest.approx(expected)


def test_distillation_of_equal_predictions_is_zero_and_a_batch_is_a_mean():
    assert distillation(LOGITS, LOGITS + 7, temperature=2.0).item() == pytest.approx(0, abs=1e-12)
    twice = distillation(LOGITS.repeat(2, 1), OTHERS.repeat(2, 1))
    assert twice.item() == pytest.approx(distillation(LOGITS, OTHERS).item())


def test_teachers_receive_no_gradient():
    teacher = OTHERS.clone().requires_grad_()
    student = LOGITS.clone().requires_grad_()
    (distillation(student, teacher) + soft_cross_entropy(student, teacher.softmax(1))).backward()
    assert teacher.grad is None
    assert student.grad.abs().sum() > 0


def test_dynamic_loss__has_the_gradient_of_the_task_less_g_and_the_pull():
    net, batch = nn.Linear(4, 4).double(), Batch(LOGITS, LABELS, {})
    weights = list(net.parameters())
    g, sent = ({n: torch.full_like(w, value) for n, w in net.named_parameters()} for value in (0.3, -0.2))
    task = torch.autograd.grad(F.cross_entropy(net(LOGITS), LABELS), weights)
    loss = DynamicLoss(Supervised(F.cross_entropy), 0.5)(net, batch, {"g": g, "sent": sent})
    found = torch.autograd.grad(loss, weights)
    torch.testing.assert_close(found, tuple(t - 0.3 + 0.5 * (w + 0.2) for t, w in zip(task, weights, strict=True)))


def test_dynamic_loss__without_alpha_is_the_tasks_bit_for_bit():
    net, task = nn.Linear(4, 4).double(), Supervised(F.cross_entropy)
    batch, extras = Batch(LOGITS, LABELS, {}), {"g": {}, "sent": {}}
    assert torch.equal(DynamicLoss(task, 0.0)(net, batch, extras), task(net, batch, extras))


@pytest.mark.parametrize("learns", [True, False])
def test_distillation_has_a_gradient_in_the_teacher_if_it_learns(learns):
    teacher = OTHERS.clone().requires_grad_()
    loss = distillation(LOGITS.clone().requires_grad_(), teacher, 3.0, teacher_learns=learns)
    (found,) = torch.autograd.grad(loss, [teacher], allow_unused=True)
    assert (found is not None) == learns
    if learns:
        p, q = (teacher / 3).softmax(1), (LOGITS / 3).softmax(1)
        by_hand = 9 * (p * (p.log() - q.log())).sum(1).mean()
        torch.testing.assert_close(found, torch.autograd.grad(by_hand, [teacher])[0])
