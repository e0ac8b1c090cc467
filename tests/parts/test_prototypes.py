import pytest
import torch
from torch import nn
from torch.testing import assert_close

from potluck.core.tasks.classification import Classification
from potluck.models.contract import StagedNet
from potluck.parts.means import Aggregate
from potluck.parts.prototypes import NearestPrototype, averages, distance, means_by_class, one_each, stored

EXACTLY = {"rtol": 0, "atol": 0}
CLASSES = 3


def uniform(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_class_of_one_example_is_sent_as_that_example_bit_for_bit():
    values, labels = uniform(5, 4), torch.tensor([0, 2, 0, 0, 4])
    means = means_by_class(values, labels)
    assert_close(means[1:], values[[1, 4]], **EXACTLY)
    assert_close(means[0], values[[0, 2, 3]].mean(0))


def test_averages__a_robust_rule_takes_the_rows_of_a_class_and_their_counts():
    rows = {"values": uniform(7, 4), "labels": torch.tensor([0, 2, 0, 0, 2, 0, 0]), "counts": torch.arange(1, 8)}
    rule = Aggregate("clipped")
    table = averages(rows, CLASSES, rule)
    for label in (0, 2):
        mine = rows["labels"] == label
        assert_close(table["means"][label], rule([*rows["values"][mine]], rows["counts"][mine].tolist()))
    assert table["known"].tolist() == [True, False, True]
    assert not torch.allclose(table["means"][0], averages(rows, CLASSES, Aggregate("median"))["means"][0])


@pytest.mark.parametrize("seed", range(6))
def test_the_store_weighs_as_the_newest_examples_of_each_class_would(seed):
    draws = torch.Generator().manual_seed(seed)
    rows, single, capacity = None, {label: [] for label in range(CLASSES)}, 7
    for _ in range(9):
        labels = torch.randperm(CLASSES, generator=draws)[:2]
        counts = torch.randint(1, 6, (2,), generator=draws)
        values = torch.randn(2, 4, generator=draws)
        rows = stored(rows, {"values": values, "labels": labels, "counts": counts}, capacity)
        for value, label, count in zip(values, labels.tolist(), counts.tolist(), strict=True):
            single[label] = [*single[label], *[value] * count][-capacity:]
        table = averages(rows, CLASSES)
        assert table["known"].tolist() == [bool(found) for found in single.values()]
        for label, found in single.items():
            if found:
                assert_close(table["means"][label], torch.stack(found).mean(0))
    assert rows["counts"].min() > 0
    assert [rows["counts"][rows["labels"] == label].sum() for label in range(CLASSES)] == [capacity] * CLASSES


@pytest.mark.parametrize("old_first", [True, False])
def test_storing_does_not_change_what_it_is_given(old_first):
    rows = {"values": uniform(2, 4), "labels": torch.tensor([0, 1]), "counts": torch.tensor([3, 3])}
    before = {name: tensor.clone() for name, tensor in rows.items()}
    found = stored(rows, one_each(uniform(1, 4), torch.tensor([0])), 2) if old_first else stored(None, rows, 2)
    assert found["counts"].max() == 2
    assert_close(rows, before, **EXACTLY)


def test_examples_of_an_unknown_class_have_no_distance():
    values, labels = uniform(4, 5).requires_grad_(), torch.tensor([0, 1, 2, 1])
    table = {"means": uniform(CLASSES, 5, seed=1), "known": torch.tensor([True, False, True])}
    found = distance(values, labels, table)
    known = [0, 2]
    assert_close(found, (values - table["means"][labels])[known].square().sum() / (4 * 5))
    (gradient,) = torch.autograd.grad(found, values)
    assert not gradient[[1, 3]].any()
    assert gradient[known].all()


def test_what_stands_in_the_place_of_an_unknown_class_does_not_matter():
    values, labels = uniform(4, 5), torch.tensor([0, 1, 2, 1])
    known = torch.tensor([True, False, True])
    one = uniform(CLASSES, 5, seed=1)
    other = one.index_fill(0, torch.tensor([1]), 1e6)
    assert distance(values, labels, {"means": one, "known": known}) == distance(
        values, labels, {"means": other, "known": known}
    )


def test_without_averages_there_is_no_distance():
    assert distance(uniform(4, 5), torch.tensor([0, 1, 2, 1]), None) == 0


# Classification by the nearest


def two_stages(width=4):
    return StagedNet({"stem": nn.Linear(3, 5), "deep": nn.Linear(5, width)}, nn.Linear(width, CLASSES))


def test_nearest_prototype__the_nearest_row_has_the_largest_output():
    net, x = two_stages(), uniform(20, 3)
    h = net.stages(x).detach()
    table = {"means": h[[2, 7, 11]].clone(), "known": torch.ones(CLASSES, dtype=torch.bool)}
    outputs = NearestPrototype(net, table)(x)
    for row in range(20):
        gaps = [(h[row] - table["means"][label]).square().mean() for label in range(CLASSES)]
        assert_close(outputs[row], -torch.stack(gaps))
    assert outputs[[2, 7, 11]].argmax(1).tolist() == [0, 1, 2]


def test_nearest_prototype__a_class_without_a_row_is_never_predicted_nor_breaks_the_metrics():
    net, x = two_stages(), uniform(20, 3)
    near = net.stages(x).detach().mean(0)
    table = {"means": torch.stack([near + 9, near, near - 9]), "known": torch.tensor([True, False, True])}
    outputs = NearestPrototype(net, table)(x)
    assert not (outputs.argmax(1) == 1).any()
    task = Classification(scores=True)
    values = task.values(task.sums(outputs, torch.arange(20) % CLASSES))
    assert all(value is None or 0 <= value <= 1 for value in values.values())


@pytest.mark.parametrize("training", [True, False])
def test_nearest_prototype__is_in_the_mode_of_its_net(training):
    table = {"means": torch.zeros(CLASSES, 4), "known": torch.ones(CLASSES, dtype=torch.bool)}
    assert NearestPrototype(two_stages().train(training), table).training == training
