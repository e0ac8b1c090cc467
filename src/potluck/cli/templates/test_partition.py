"""Tests of template_name: that it gives every client examples of its own."""

from pathlib import Path

import torch
from potluck import fl
from potluck.data.partition import get_partition

PARTITION = get_partition(f"{Path(__file__).with_name('template_name.py')}:template_name")
TARGETS = torch.arange(10).repeat(20)


def test_template_name__gives_every_client_examples_and_none_twice() -> None:
    """Calling the partition checks that parts are disjoint and not empty."""
    parts = PARTITION()(TARGETS, 7, fl.Key((0,)))
    assert len(parts) == 7


def test_template_name__depends_on_the_key_alone() -> None:
    """The same seed gives the same parts."""
    first, again = (PARTITION()(TARGETS, 7, fl.Key((0,))) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
