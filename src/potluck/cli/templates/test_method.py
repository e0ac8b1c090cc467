"""Tests of template_name: what every method must do, and the limits that its documentation states."""

from pathlib import Path

import pytest
from potluck.methods import get_method
from potluck.testing import Check, checks_of

CHECKS = checks_of(get_method(str(Path(__file__).with_name("template_name.py"))))


@pytest.mark.parametrize("check", CHECKS, ids=[check.name for check in CHECKS])
def test_template_name__does_what_a_method_must(check: Check) -> None:
    """The checks of `potluck check template_name.py`. Tests of its own equations belong below."""
    check.run()
