"""Tests of template_name: that it can be built, run and trained."""

from pathlib import Path

import pytest
import torch
from potluck.models import get_model

BUILD = get_model(f"{Path(__file__).with_name('template_name.py')}:template_name")


@pytest.mark.parametrize("input_shape", [(1, 8, 8), (3, 32, 32)])
def test_template_name__returns_logits_and_trains_all_of_its_weights(input_shape: tuple[int, ...]) -> None:
    """One row of logits for each example, and a gradient for each weight."""
    net = BUILD(5, input_shape)
    logits = net(torch.randn(4, *input_shape))
    assert logits.shape == (4, 5)
    logits.square().sum().backward()
    assert [name for name, weight in net.named_parameters() if weight.grad is None] == []
