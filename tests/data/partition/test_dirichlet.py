import numpy as np
import pytest
import torch

from potluck.core.ground.errors import DataError
from potluck.core.ground.rng import fold_in
from potluck.data.federate import fingerprint, label_counts
from potluck.data.partition.dirichlet import TRIES, Dirichlet, _complete

TARGETS = torch.arange(10).repeat(1000)


def shares(alpha: float, clients: int, seeds: int) -> torch.Tensor:
    """Each client's share of each class over many draws without the cap, (seeds * classes, clients)."""
    scheme = Dirichlet(alpha=alpha, min_examples=1, capped=False)
    counts = [label_counts(TARGETS, scheme(TARGETS, clients, fold_in(seed)), 10) for seed in range(seeds)]
    return torch.cat([count.T for count in counts]) / 1000


@pytest.mark.parametrize("alpha", [0.5, 5.0])
def test_uncapped_shares_have_the_moments_of_a_dirichlet(alpha: float) -> None:
    drawn = shares(alpha, clients=4, seeds=100)
    variance = 0.25 * 0.75 / (4 * alpha + 1)
    # Of 1,000 draws; five standard errors of the mean, and a fifth of the variance.
    torch.testing.assert_close(drawn.mean(0), torch.full((4,), 0.25), atol=5 * (variance / 1000) ** 0.5, rtol=0)
    torch.testing.assert_close(drawn.var(0), torch.full((4,), variance), atol=0, rtol=0.2)


def test_a_large_alpha_is_nearly_even() -> None:
    for part in Dirichlet(alpha=1e6)(TARGETS, 5, fold_in(0)):
        assert (TARGETS[part].bincount(minlength=10) - 200).abs().max() <= 3


def test_a_full_client_receives_no_further_class() -> None:
    clients, reached = 20, 0
    for seed in range(10):
        counts = label_counts(TARGETS, Dirichlet(alpha=0.3)(TARGETS, clients, fold_in(seed)), 10)
        held_before = counts.cumsum(1) - counts
        full = held_before * clients >= len(TARGETS)
        reached += int(full.sum())
        # The last client takes what rounding leaves of a class, one example at most, even when it is full.
        assert (counts[:-1][full[:-1]] == 0).all()
        assert (counts[-1][full[-1]] <= 1).all()
    assert reached > 100


def test_the_cap_evens_sizes_out() -> None:
    def largest(capped: bool) -> float:
        scheme = Dirichlet(alpha=0.3, capped=capped)
        return np.mean([max(map(len, scheme(TARGETS, 20, fold_in(seed)))) for seed in range(10)]).item()

    assert largest(capped=True) < largest(capped=False)


class FixedShares:
    """Stands in for numpy's generator where only `dirichlet` is drawn."""

    def __init__(self, *rows: list[float]) -> None:
        self.rows = np.array(rows)

    def dirichlet(self, alpha: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        assert (1, *self.rows.shape) == (*size, len(alpha))
        return self.rows[None]


def draw_sizes(class_sizes: list[int], *rows: list[float]) -> list[list[int]]:
    drawn = Dirichlet()._draw_sizes(np.array(class_sizes), len(rows[0]), FixedShares(*rows), 1)  # type: ignore[arg-type]
    return drawn[0].tolist()


def test_capped_sizes_by_hand() -> None:
    # 12 examples, 3 clients, so 4 fill one. Class 0: 6 * (2/3, 1/6, 1/6). Client 0 is full; the others share
    # class 1 in the proportion 1 : 3 that remains of (0.6, 0.1, 0.3): 1.5 is rounded down to 1.
    assert draw_sizes([6, 6], [4 / 6, 1 / 6, 1 / 6], [0.6, 0.1, 0.3]) == [[4, 1, 1], [0, 1, 5]]


def test_if_all_clients_with_a_share_are_full_the_smallest_take_the_class() -> None:
    assert draw_sizes([4, 4], [1.0, 0.0], [1.0, 0.0]) == [[4, 0], [0, 4]]
    assert draw_sizes([6, 6], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]) == [[6, 0, 0], [0, 3, 3]]


@pytest.mark.parametrize("capped", [True, False])
def test_minimum_size(capped: bool) -> None:
    scheme = Dirichlet(alpha=0.2, min_examples=60, capped=capped)
    for seed in range(5):
        assert min(map(len, scheme(TARGETS, 20, fold_in(seed)))) >= 60


def test_impossible_minimum_is_refused_at_once() -> None:
    with pytest.raises(DataError, match="20 clients with at least 600 examples each need 12000, found 10000"):
        Dirichlet(min_examples=600)(TARGETS, 20, fold_in(0))


@pytest.mark.parametrize("capped", [True, False])
def test_a_minimum_that_no_draw_gives_is_reached_by_completing_the_nearest(
    capped: bool, caplog: pytest.LogCaptureFixture
) -> None:
    scheme, clients = Dirichlet(alpha=0.01, min_examples=2, capped=capped), 30
    parts = scheme(TARGETS, clients, fold_in(0))
    assert len(torch.cat(parts).unique()) == len(TARGETS)
    assert min(map(len, parts)) == 2
    assert f"none of {TRIES} Dirichlet draws with alpha 0.01 gave each of 30 clients 2 examples" in caplog.text
    again = scheme(TARGETS, clients, fold_in(0))
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))


def test_completing_by_hand() -> None:
    # Client 2 lacks 3 and takes them from client 0, who holds 9, of class 1, its largest. Client 3 lacks 2: clients
    # 0 and 1 now hold 6 each, and the first of them gives, of class 0, which is now its largest.
    sizes = np.array([[4, 2, 0, 0], [5, 4, 0, 1]])
    _complete(sizes, 3)
    assert sizes.tolist() == [[2, 2, 0, 2], [2, 4, 3, 1]]


def test_completing_takes_no_more_than_a_client_can_spare() -> None:
    sizes = np.array([[3, 1, 0, 0], [0, 2, 1, 1]])
    _complete(sizes, 2)
    assert sizes.sum(axis=0).tolist() == [2, 2, 2, 2]
    assert sizes.sum(axis=1).tolist() == [4, 4]


def test_a_partition_that_is_drawn_at_last_is_not_completed(caplog: pytest.LogCaptureFixture) -> None:
    """The 254th draw is the first to do; its fingerprint is that of drawing one by one without an end."""
    parts = Dirichlet(alpha=0.1)(TARGETS, 100, fold_in(3))
    assert fingerprint(parts) == "d288d12786bab6a49266ff9153fb3c77"
    assert caplog.text == ""


@pytest.mark.parametrize("capped", [True, False])
def test_draws_at_once_are_those_one_by_one(capped: bool) -> None:
    scheme, class_sizes = Dirichlet(alpha=0.2, capped=capped), np.array([700, 31, 500])
    at_once = scheme._draw_sizes(class_sizes, 40, np.random.default_rng(0), 50)
    rng = np.random.default_rng(0)
    one_by_one = [scheme._draw_sizes(class_sizes, 40, rng, 1)[0] for _ in range(50)]
    assert np.array_equal(at_once, one_by_one)


def test_tiny_alpha_gives_whole_classes() -> None:
    parts = Dirichlet(alpha=1e-4, min_examples=1, capped=False)(TARGETS, 2, fold_in(0))
    counts = label_counts(TARGETS, parts, 10)
    assert set(counts.flatten().tolist()) <= {0, 1, 999, 1000}


def test_labels_need_not_start_at_zero_or_be_gapless() -> None:
    parts = Dirichlet()(TARGETS * 3 + 5, 10, fold_in(0))
    assert len(torch.cat(parts).unique()) == len(TARGETS)
