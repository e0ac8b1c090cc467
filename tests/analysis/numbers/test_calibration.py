import numpy as np
import pytest
import torch

from potluck.analysis.numbers.calibration import BINS, calibration
from potluck.core.tasks.classification import Classification
from potluck.core.tasks.scoring import CALIBRATION_BINS


def test_calibration__error_is_that_of_the_task_s_metric_on_the_same_outputs():
    draws = torch.Generator().manual_seed(1)
    logits, labels = 3 * torch.randn(300, 5, generator=draws), torch.randint(5, (300,), generator=draws)
    task = Classification(scores=True)
    values = task.values(task.sums(logits, labels))
    found = calibration(logits.softmax(1).numpy(), labels.numpy())
    assert BINS == CALIBRATION_BINS
    assert found.ece == pytest.approx(values["ece"], abs=1e-6)
    assert found.accuracy == pytest.approx(values["accuracy"])


def test_calibration__by_hand_of_four_predictions():
    shares = np.array([[0.9, 0.1], [0.95, 0.05], [0.4, 0.6], [0.0, 1.0]])
    found = calibration(shares, np.array([0, 1, 1, 1]), bins=10)
    assert found.counts == (0, 0, 0, 0, 0, 0, 1, 0, 0, 3)
    assert found.hits == (0, 0, 0, 0, 0, 0, 1, 0, 0, 2)
    # the bin of 0.6: |1 - 0.6| by 1; the last: |2 - 2.85|
    assert found.ece == pytest.approx((0.4 + 0.85) / 4)
    assert found.brier == pytest.approx((2 * 0.01 + 2 * 0.9025 + 2 * 0.16 + 0) / 4)
    assert (found.accuracy, found.confidence) == (0.75, pytest.approx(3.45 / 4))
