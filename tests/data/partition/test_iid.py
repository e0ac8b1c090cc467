import torch

from potluck.core.ground.rng import fold_in
from potluck.data.partition.iid import IID


def test_sizes_differ_by_at_most_one() -> None:
    sizes = [len(part) for part in IID()(torch.zeros(103, dtype=torch.int64), 10, fold_in(0))]
    assert sorted(sizes) == [10] * 7 + [11] * 3


def test_order_of_the_data_does_not_matter() -> None:
    targets = torch.arange(10).repeat_interleave(1000)
    for part in IID()(targets, 5, fold_in(0)):
        # 2,000 draws of ten classes: the standard deviation of a count is 12.
        assert (targets[part].bincount(minlength=10) - 200).abs().max() < 60
