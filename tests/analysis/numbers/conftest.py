import numpy as np
import pytest


@pytest.fixture(scope="session", autouse=True)
def scikit_learn_is_warm():
    """What it loads when it first computes takes seconds; no test is charged for that."""
    from potluck.analysis.numbers.projection import silhouette

    assert silhouette(np.eye(4), [0, 0, 1, 1]) is not None
