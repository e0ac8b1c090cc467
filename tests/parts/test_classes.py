"""What clients say of classes that not all of them have, combined class by class."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.federation import Member
from potluck.core.nets.classes import OwnClasses, OwnHead
from potluck.parts.classes import MeanByClass, OwnClassesOnly, averaged, of_all_classes, own_rows
from potluck.parts.losses import difference, distillation, soft_cross_entropy
from potluck.parts.means import Aggregate
from potluck.parts.prototypes import averages, logit_distance
from potluck.parts.submodels import put, select
from potluck.parts.teaching import ensemble

NO = -math.inf
MEAN = Aggregate()
WEIGHTS = {"deep": torch.arange(6.0).view(3, 2), "head": torch.arange(8.0).view(4, 2)}
OWN = OwnHead(torch.nn.Identity, "net", OwnClasses((3, 0), 4), {"head": 0})
MEMBER = Member(0, "net[0,3]", 1.0, {}, frozenset(), 1, head=OWN)


def test_rows_are_the_mean_over_those_who_have_the_class():
    mean = MeanByClass(MEAN, 0, 4)
    mean.add(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 1.0, OwnClasses((2, 0), 4))
    mean.add(torch.tensor([[5.0, 6.0], [7.0, 8.0]]), 3.0, OwnClasses((0, 1), 4))
    keep = torch.full((4, 2), 9.0)
    expected = torch.tensor([[(3 + 15) / 4, (4 + 18) / 4], [7, 8], [1, 2], [9, 9]])
    assert_close(mean.value(keep), expected)
    assert mean.weight == 4.0


@pytest.mark.parametrize("rule", ["median", "trimmed"])
def test_robust_rules_count_only_those_who_have_the_class(rule):
    mean, rest = MeanByClass(Aggregate(rule), 0, 2), Aggregate(rule)
    values = [torch.tensor([v]) for v in (1.0, 2.0, 90.0)]
    for value in values:
        mean.add(torch.stack([value, value]), 1.0, None)
    mean.add(torch.tensor([[4.0]]), 1.0, OwnClasses((1,), 2))
    found = mean.value(torch.zeros(2, 1))
    assert_close(found[0], rest(values, [1.0] * 3))
    assert_close(found[1], rest([*values, torch.tensor([4.0])], [1.0] * 4))


def test_counters_of_classes_give_their_maximum():
    mean = MeanByClass(MEAN, 0, 3)
    mean.add(torch.tensor([4, 1]), 1.0, OwnClasses((0, 2), 3))
    mean.add(torch.tensor([2, 3]), 1.0, OwnClasses((0, 1), 3))
    assert mean.value(torch.tensor([0, 0, 0])).tolist() == [4, 3, 1]


def test_tensors_of_unlike_heads_are_refused():
    mean = MeanByClass(MEAN, 0, 3)
    mean.add(torch.zeros(2, 4), 1.0, OwnClasses((0, 1), 3))
    with pytest.raises(ValueError, match="with rows of classes"):
        mean.add(torch.zeros(2, 5), 1.0, OwnClasses((0, 1), 3))


def test_logits_are_averaged_over_those_who_have_the_class():
    first, second = torch.tensor([[1.0, NO, 3.0, NO]]), torch.tensor([[5.0, 6.0, NO, NO]])
    assert averaged(MEAN, [first, second], [1.0, 3.0]).tolist() == [[4.0, 6.0, 3.0, NO]]
    assert averaged(Aggregate("median"), [first, second], [1.0, 1.0]).tolist() == [[3.0, 6.0, 3.0, NO]]
    both = torch.tensor([[1.0, 2.0]])
    assert torch.equal(averaged(MEAN, [both, 3 * both], [1.0, 1.0]), MEAN([both, 3 * both], [1.0, 1.0]))


def test_a_students_lesson_is_what_is_said_of_its_own_classes():
    z, said = torch.tensor([[1.0, NO, 2.0]], requires_grad=True), torch.tensor([[0.5, 0.4, 0.1]])
    own = z.detach()[:, [0, 2]]
    expected = -(said[:, [0, 2]] * own.log_softmax(1)).sum()
    found = soft_cross_entropy(z, said)
    assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found, z)
    assert_close(gradient[:, [0, 2]], 0.6 * own.softmax(1) - said[:, [0, 2]]), "as much as it is taken for one of them"


def test_distillation_is_over_the_classes_in_common():
    student = torch.tensor([[1.0, NO, 2.0, 0.5]], requires_grad=True)
    teacher = torch.tensor([[0.3, 1.0, -1.0, NO]])
    at = [0, 2]
    expected = F.kl_div(student.detach()[:, at].log_softmax(1), teacher[:, at].softmax(1), reduction="batchmean")
    found = distillation(student, teacher)
    assert_close(found, expected)
    assert torch.autograd.grad(found, student)[0][0, [1, 3]].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss])
def test_differences_are_means_over_the_classes_in_common(loss):
    z, target = torch.tensor([[1.0, NO, 2.0], [0.0, NO, 3.0]]), torch.tensor([[0.0, 5.0, NO], [4.0, 5.0, NO]])
    assert_close(difference(z, target, loss), loss(z[:, :1], target[:, :1]))
    whole = torch.randn(4, 3)
    assert torch.equal(difference(whole, torch.zeros(4, 3), loss), loss(whole, torch.zeros(4, 3)))


def test_tables_of_logits_average_what_is_known_and_say_what_is_not():
    rows = {
        "values": torch.tensor([[1.0, NO, 3.0], [5.0, 6.0, NO], [7.0, NO, NO]]),
        "labels": torch.tensor([0, 0, 2]),
        "counts": torch.tensor([1, 3, 2]),
    }
    table = averages(rows, 3)
    assert table["means"].tolist() == [[4.0, 6.0, 3.0], [0.0, 0.0, 0.0], [7.0, NO, NO]]
    assert table["known"].tolist() == [True, False, True]
    robust = averages(rows, 3, Aggregate("median"))
    assert robust["means"][[0, 2]].tolist() == [[3.0, 6.0, 3.0], [7.0, NO, NO]]
    z = torch.tensor([[2.0, NO, 3.0], [NO, 1.0, 5.0]])
    assert_close(logit_distance(z, torch.tensor([0, 1]), table), torch.tensor(((4 - 2) ** 2 + 0) / 2 / 2))


def test_a_sub_model_has_the_rows_of_its_own_classes_in_their_order():
    places = own_rows({"deep": (slice(0, 2), slice(0, 1)), "head": (slice(0, 4), slice(0, 1))}, MEMBER)
    found = select(WEIGHTS, places)
    assert found["deep"].tolist() == [[0.0], [2.0]]
    assert found["head"].tolist() == [[6.0], [0.0]]
    assert own_rows(places, replace(MEMBER, head=None)) is places
    named = own_rows({"0.head": (slice(0, 4), slice(0, 2))}, MEMBER, lambda name: name.partition(".")[2])
    assert named["0.head"][0].tolist() == [3, 0]


def test_masks_of_own_rows_lie_among_all_classes_by_the_number_of_the_class():
    masks = {"deep": WEIGHTS["deep"] > 2, "head": torch.tensor([[True, True], [False, True]])}
    own = OWN.part_of(WEIGHTS)
    values, places = of_all_classes({name: own[name][mask] * 10 for name, mask in masks.items()}, masks, MEMBER)
    found = put(values, places, WEIGHTS)
    assert found["head"].tolist() == [[0.0, 10.0], [2.0, 3.0], [4.0, 5.0], [60.0, 70.0]]
    assert found["deep"].tolist() == [[0.0, 1.0], [2.0, 30.0], [40.0, 50.0]]


def test_many_teach_of_a_class_what_those_say_who_have_it():
    first, second = torch.tensor([[0.0, 0.0, NO]]), torch.tensor([[0.0, NO, 0.0]])
    assert_close(ensemble([first, second], [1.0, 3.0]), torch.full((1, 3), 1 / 3))
    both = torch.tensor([[2.0, 1.0, 0.0]])
    assert_close(ensemble([both, both], [1.0, 3.0]), both.softmax(1))


def test_a_network_with_all_classes_says_nothing_of_those_that_a_client_lacks():
    net = OwnClassesOnly(torch.nn.Identity(), OWN.classes.lacking)
    assert net(torch.tensor([[1.0, 2.0, 3.0, 4.0]])).tolist() == [[1.0, NO, NO, 4.0]]
