"""The second computations agree with the methods, and would notice if a method's training were another one."""

from dataclasses import replace
from importlib import import_module

import pytest
from evidence import compared, subjects
from evidence.__main__ import PAGE, seen_of

from potluck.core.requests.fit import LocalTraining
from potluck.methods import list_methods


@pytest.mark.rotates
@pytest.mark.parametrize("name", subjects())
def test_a_method_is_what_its_second_computation_comes_to(name):
    found = compared(import_module(f"evidence.{name}"))
    assert found
    assert len({what for what, _ in found}) == len(found)
    assert all(difference <= 1e-9 for _, difference in found), found


@pytest.mark.slow
@pytest.mark.rotates
@pytest.mark.parametrize("name", subjects())
def test_the_second_computation_notices_another_training(name, monkeypatch):
    """The engine's learning rate is a thousandth too large; the reference has its own."""
    plain = LocalTraining.at
    monkeypatch.setattr(LocalTraining, "at", lambda self, number: replace(plain(self, number), lr=self.lr * 1.001))
    assert all(difference > 1e-7 for _, difference in compared(import_module(f"evidence.{name}")))


@pytest.mark.slow
@pytest.mark.rotates
@pytest.mark.parametrize("name", list_methods())
def test_the_page_says_what_clients_keep_and_whether_they_stack(name):
    assert seen_of(name) in PAGE.read_text().splitlines(), "make evidence"
