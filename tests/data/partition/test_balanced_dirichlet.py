import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.ground.rng import fold_in
from potluck.data.federate import label_counts
from potluck.data.partition.balanced_dirichlet import BalancedDirichlet

TARGETS = torch.arange(10).repeat(300)


@settings(max_examples=30)
@given(alpha=st.floats(1e-4, 100), clients=st.integers(1, 200), seed=st.integers(0, 99))
def test_sizes_are_exactly_equal(alpha: float, clients: int, seed: int) -> None:
    parts = BalancedDirichlet(alpha)(TARGETS, clients, fold_in(seed))
    assert {len(part) for part in parts} == {3000 // clients}


def test_a_small_alpha_concentrates_the_first_clients() -> None:
    counts = label_counts(TARGETS, BalancedDirichlet(0.01)(TARGETS, 30, fold_in(0)), 10)[:10]
    assert (counts.max(1).values / 100).mean() > 0.9


def test_a_large_alpha_is_nearly_even() -> None:
    counts = label_counts(TARGETS, BalancedDirichlet(1e6)(TARGETS, 6, fold_in(0)), 10)
    # 500 draws of ten classes: the standard deviation of a count is below 7.
    assert (counts - 50).abs().max() < 30


def test_examples_not_classes_are_weighed() -> None:
    """With an even mixture the one example of class 0 among ten is drawn first in a tenth."""
    targets = torch.tensor([0] + [1] * 9)
    first = [BalancedDirichlet(1e6)(targets, 10, fold_in(seed))[0] for seed in range(1000)]
    drawn = sum(int(targets[part] == 0) for part in first)
    assert abs(drawn - 100) < 48, "five standard deviations"
