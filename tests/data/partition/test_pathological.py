import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.ground.errors import DataError
from potluck.core.ground.rng import fold_in
from potluck.data.federate import label_counts
from potluck.data.partition.pathological import Pathological

TARGETS = torch.arange(10).repeat(300)


@settings(max_examples=40)
@given(classes=st.integers(1, 10), clients=st.integers(1, 40), seed=st.integers(0, 99))
def test_classes_are_dealt_evenly(classes: int, clients: int, seed: int) -> None:
    counts = label_counts(TARGETS, Pathological(classes)(TARGETS, clients, fold_in(seed)), 10)
    held = counts > 0
    assert (held.sum(1) == classes).all(), "also where the number of classes is no multiple"
    holders = held.sum(0)
    assert holders.max() - holders.min() <= 1
    for label in range(10):
        shares = counts[held[:, label], label]
        assert len(shares) == 0 or shares.max() - shares.min() <= 1
        assert shares.sum() == (300 if len(shares) else 0), "only a class that nobody holds is left out"


def test_hands_differ() -> None:
    parts = Pathological(2)(TARGETS, 20, fold_in(0))
    assert len({tuple(TARGETS[part].unique().tolist()) for part in parts}) > 5


def test_more_classes_than_there_are() -> None:
    with pytest.raises(DataError, match="classes: 11 a client, but the data have 10"):
        Pathological(11)(TARGETS, 3, fold_in(0))


def test_a_client_without_examples() -> None:
    rare = torch.tensor([0] * 50 + [1])
    with pytest.raises(DataError, match=r"client \d would get no example"):
        Pathological(1)(rare, 6, fold_in(0))
