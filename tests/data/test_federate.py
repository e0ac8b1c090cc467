import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.ground.errors import DataError
from potluck.core.ground.rng import fold_in
from potluck.data.federate import fingerprint, label_counts, matching_test_parts, split_validation, with_validation
from potluck.data.partition import get_partition

KEY = fold_in(0, "test")
labels = st.lists(st.integers(0, 4), min_size=1, max_size=60).map(torch.tensor)


@settings(max_examples=60)
@given(targets=labels, fraction=st.floats(0, 0.99), seed=st.integers(0, 9))
def test_validation_is_stratified(targets: torch.Tensor, fraction: float, seed: int) -> None:
    indices = torch.arange(len(targets)).flip(0)
    train, validation = split_validation(indices, targets, fraction, fold_in(seed))
    assert torch.equal(torch.cat([train, validation]).sort().values, torch.arange(len(targets)))
    assert len(train) >= 1
    assert len(validation) == min(round(fraction * len(targets)), len(targets) - 1)
    assert torch.equal(train, train.sort(descending=True).values), "the order of the indices is kept"
    for label in range(5):
        expected = fraction * int((targets == label).sum())
        assert abs(int((targets[validation] == label).sum()) - expected) < 1.0001


def test_validation_is_seeded() -> None:
    targets = torch.zeros(50, dtype=torch.int64)
    first, same = (split_validation(torch.arange(50), targets, 0.2, KEY)[1] for _ in range(2))
    assert torch.equal(first, same)
    assert not torch.equal(first, split_validation(torch.arange(50), targets, 0.2, KEY.fold(1))[1])


def test_single_examples_do_not_favour_low_classes() -> None:
    targets = torch.arange(5)
    chosen = [int(split_validation(torch.arange(5), targets, 0.2, fold_in(seed))[1]) for seed in range(40)]
    assert set(chosen) == {0, 1, 2, 3, 4}


def test_validation_of_few_and_none() -> None:
    targets = torch.tensor([0, 1, 0])
    for indices in ([], [1], [0, 2]):
        train, validation = split_validation(torch.tensor(indices, dtype=torch.int64), targets, 0.2, KEY)
        assert (train.tolist(), validation.tolist()) == (indices, [])


@settings(max_examples=60)
@given(seed=st.integers(0, 99), clients=st.integers(1, 4), fraction=st.floats(0, 0.9))
def test_no_group_is_for_training_and_for_validation(seed: int, clients: int, fraction: float) -> None:
    rng = fold_in(seed).generator()
    targets, groups = torch.randint(3, (90,), generator=rng), torch.randint(30, (90,), generator=rng)
    parts, settled = torch.arange(90).chunk(clients), dict[int, bool]()
    found = [
        with_validation(part, targets, fraction, fold_in(seed, n), groups, settled) for n, part in enumerate(parts)
    ]
    for part, (train, validation) in zip(parts, found, strict=True):
        assert torch.equal(torch.cat([train, validation]).sort().values, part)
        assert len(train) >= 1
    train, validation = (set(groups[torch.cat(rows)].tolist()) for rows in zip(*found, strict=True))
    assert not train & validation
    if clients == 1:
        count = len(train | validation)
        assert len(validation) == min(round(fraction * count), count - 1)


def test_without_groups_rows_are_drawn_as_they_were() -> None:
    targets, rows = torch.arange(50) % 3, torch.arange(50)
    before, now = split_validation(rows, targets, 0.2, KEY), with_validation(rows, targets, 0.2, KEY, None, {})
    assert all(map(torch.equal, before, now))


def test_a_client_that_others_leave_nothing_is_told() -> None:
    targets, groups = torch.zeros(4, dtype=torch.int64), torch.tensor([0, 0, 1, 1])
    with pytest.raises(DataError, match="all 1 groups of a client have examples at others, where they are"):
        with_validation(torch.tensor([0, 1]), targets, 0.5, KEY, groups, {0: True})


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_fraction_out_of_range(fraction: float) -> None:
    with pytest.raises(ValueError, match="fraction: expected at least 0 and below 1, found"):
        split_validation(torch.arange(3), torch.zeros(3, dtype=torch.int64), fraction, KEY)


def test_test_parts_match_by_hand() -> None:
    train_targets = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    parts = [torch.tensor([0]), torch.tensor([1, 2, 3, 4]), torch.tensor([5])]
    test_targets = torch.tensor([0] * 8 + [1] * 4 + [2] * 3)
    counts = label_counts(test_targets, matching_test_parts(train_targets, parts, test_targets, KEY), 3)
    # Class 0 is held 1 : 3, class 1 is held 1 : 1, and class 2 by nobody.
    assert counts.tolist() == [[2, 0, 0], [6, 2, 0], [0, 2, 0]]


@settings(max_examples=30)
@given(seed=st.integers(0, 99), clients=st.integers(1, 12))
def test_test_parts_are_in_proportion(seed: int, clients: int) -> None:
    rng = fold_in(seed).generator()
    train_targets = torch.randint(5, (300,), generator=rng)
    test_targets = torch.randint(6, (90,), generator=rng)
    train_parts = get_partition("dirichlet")(alpha=0.3, min_examples=1)(train_targets, clients, fold_in(seed))
    test_parts = matching_test_parts(train_targets, train_parts, test_targets, KEY)
    everything = torch.cat(test_parts).sort().values
    assert torch.equal(everything, (test_targets < 5).nonzero().flatten()), "class 5 is held by nobody"
    held = label_counts(train_targets, train_parts, 6).double()
    share = held / held.sum(0).clamp(min=1)
    counts = label_counts(test_targets, test_parts, 6)
    assert (counts - share * test_targets.bincount(minlength=6)).abs().max() < 1
    again = matching_test_parts(train_targets, train_parts, test_targets, KEY)
    assert fingerprint(test_parts) == fingerprint(again)


def test_label_counts() -> None:
    counts = label_counts(torch.tensor([2, 0, 2, 1]), [torch.tensor([0, 2]), torch.tensor([3])], 4)
    assert counts.tolist() == [[0, 0, 2, 0], [0, 1, 0, 0]]


def test_fingerprint_tells_who_holds_what() -> None:
    a, b, none = torch.tensor([0, 1]), torch.tensor([2]), torch.empty(0, dtype=torch.int64)
    prints = [
        fingerprint([a, b]),
        fingerprint([b, a]),
        fingerprint([torch.tensor([0]), torch.tensor([1, 2])]),
    ]
    prints += [fingerprint([a, b, none])]
    assert len(set(prints)) == 4
    assert fingerprint([a.clone(), b.clone()]) == prints[0]
