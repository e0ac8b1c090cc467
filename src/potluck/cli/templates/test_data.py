"""Tests of template_name: that the data can be loaded, and are what they should be."""

from pathlib import Path

from potluck.data.datasets import load

REFERENCE = f"{Path(__file__).with_name('template_name.py')}:template_name"


def test_template_name__has_examples_of_every_class_in_both_parts() -> None:
    """Loading checks shapes, types and finite numbers."""
    found = load(REFERENCE)
    assert set(found.train_targets.tolist()) == set(range(found.num_classes))
    assert set(found.test_targets.tolist()) == set(range(found.num_classes))


def test_template_name__is_the_same_each_time() -> None:
    """A resumed run needs the same data."""
    assert load(REFERENCE).checksum == load(REFERENCE).checksum
