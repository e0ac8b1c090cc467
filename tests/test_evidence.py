"""The second computations agree with the methods, and would notice if a method's training were another one."""

from dataclasses import replace
from importlib import import_module

import pytest
from evidence import observed, subjects

from potluck.core.requests.fit import LocalTraining


@pytest.mark.parametrize("name", subjects())
def test_a_method_is_what_its_second_computation_comes_to(name):
    found = observed(import_module(f"evidence.{name}"))
    assert found
    assert len({what for what, _ in found}) == len(found)
    assert all(difference <= 1e-9 for _, difference in found), found


@pytest.mark.rotates
@pytest.mark.parametrize("name", subjects())
def test_the_second_computation_notices_another_training(name, monkeypatch):
    """The engine's learning rate is a thousandth too large; the reference has its own."""
    plain = LocalTraining.at
    monkeypatch.setattr(LocalTraining, "at", lambda self, number: replace(plain(self, number), lr=self.lr * 1.001))
    assert all(difference > 1e-7 for _, difference in observed(import_module(f"evidence.{name}")))
