"""The area under a curve and its interval, against scikit-learn's and DeLong's own sums."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from potluck.attacks.membership import area, mean_area


def drawn(seed, apart=0.4, ties=False):
    draws = np.random.default_rng(seed)
    members, others = draws.normal(apart, 1, 70), draws.normal(0, 1, 45)
    return (members.round(0), others.round(0)) if ties else (members, others)


@pytest.mark.parametrize("ties", [False, True])
def test_the_area_is_scikit_learns_and_its_error_is_by_delongs_sums(ties):
    members, others = drawn(0, ties=ties)
    found = area(members, others)
    labels = [1] * len(members) + [0] * len(others)
    assert found.value == pytest.approx(roc_auc_score(labels, np.concatenate([members, others])))
    wins = [[1.0 if x > y else 0.5 if x == y else 0.0 for y in others] for x in members]
    rows, columns = np.mean(wins, axis=1), np.mean(wins, axis=0)
    by_members = sum((v - found.value) ** 2 for v in rows) / (len(members) - 1)
    by_others = sum((v - found.value) ** 2 for v in columns) / (len(others) - 1)
    assert found.error == pytest.approx((by_members / len(members) + by_others / len(others)) ** 0.5)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    actual = 0.6113513  # Phi(0.4 / sqrt(2))
    found = [area(*drawn(seed)).interval for seed in range(300)]
    assert 0.91 <= np.mean([low <= actual <= high for low, high in found]) <= 0.98


def test_the_mean_over_clients_is_as_sure_as_their_number_allows():
    areas = [area(*drawn(seed)) for seed in range(4)]
    found = mean_area(areas)
    assert found.value == pytest.approx(np.mean([one.value for one in areas]))
    assert found.error == pytest.approx(np.mean([one.error for one in areas]) / 2, rel=0.05)
    assert (found.members, found.others) == (280, 180)


def test_too_few_are_refused():
    with pytest.raises(ValueError, match="expected at least two of each"):
        area([1.0, 2.0], [0.5])
