import math

import numpy as np
import pytest

from potluck.analysis.numbers.drift import drift


def test_drift__is_the_distance_to_the_mean_over_its_length():
    networks = {
        0: {"a.weight": np.array([[3.0, 0.0]]), "a.bias": np.array([0.0])},
        1: {"a.weight": np.array([[3.0, 8.0]]), "a.bias": np.array([0.0])},
        2: {"a.weight": np.array([[3.0, 4.0]]), "a.bias": np.array([0.0])},
    }
    (found,) = drift(networks)
    assert (found.layer, found.networks, found.parameters) == ("a", 3, 3)
    assert (found.mean, found.largest) == (pytest.approx((4 + 4 + 0) / 3 / 5), pytest.approx(4 / 5))


def test_drift__compares_only_layers_of_the_same_shape():
    small, large = np.ones((2, 2)), np.ones((3, 2))
    networks = {
        0: {"in.weight": small, "out.weight": small},
        1: {"in.weight": large, "out.weight": small},
        2: {"in.weight": large, "out.weight": 2 * small},
        3: {"other.weight": small},
    }
    assert [(one.layer, one.networks) for one in drift(networks)] == [("out", 3), ("in", 2)]


def test_drift__of_equal_networks_is_0_and_around_a_mean_of_0_without_bound():
    assert [one.mean for one in drift({0: {"w": np.ones(2)}, 1: {"w": np.ones(2)}})] == [0]
    assert [one.mean for one in drift({0: {"w": np.zeros(2)}, 1: {"w": np.zeros(2)}})] == [0]
    assert [one.mean for one in drift({0: {"w": np.ones(2)}, 1: {"w": -np.ones(2)}})] == [math.inf]
