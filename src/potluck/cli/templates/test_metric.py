"""Tests of template_name: that it measures what it should."""

from pathlib import Path

import torch
from potluck.core.tasks.own_metrics import own_metric

METRIC = own_metric(f"{Path(__file__).with_name('template_name.py')}:template_name")


def test_template_name__of_three_predictions() -> None:
    """The class is first, second and third."""
    outputs = torch.tensor([[3.0, 2.0, 1.0], [2.0, 3.0, 1.0], [1.0, 2.0, 3.0]])
    value = METRIC.value(METRIC.sums(outputs, torch.tensor([0, 0, 0])))
    assert value is not None
    assert abs(value - 2 / 3) < 1e-9
