from itertools import product

import numpy as np
import pytest

from potluck.analysis.numbers.fairness import fairness


def test_fairness__is_what_the_definitions_say():
    values = [0.1 * number for number in range(1, 22)]
    found = fairness(values)
    assert found.mean == pytest.approx(np.mean(values))
    assert found.spread == pytest.approx(np.std(values))
    assert found.worst == values[0]
    assert found.worst_tenth == pytest.approx(np.mean(values[:3]))  # of 21 clients
    gaps = [abs(a - b) for a, b in product(values, values)]
    assert found.gini == pytest.approx(np.mean(gaps) / (2 * np.mean(values)))


def test_fairness__of_errors_the_largest_is_worst():
    found = fairness([3.0, 1.0, 2.0], higher_is_better=False)
    assert (found.worst, found.worst_tenth) == (3.0, 3.0)


def test_fairness__gini_is_0_of_equals_and_undefined_of_negative_values():
    assert fairness([0.5, 0.5, 0.5]).gini == pytest.approx(0)
    assert fairness([0.0, 0.0, 0.0, 1.0]).gini == pytest.approx(0.75)
    assert fairness([-0.1, 0.4]).gini is None
    assert fairness([0.0, 0.0]).gini is None
