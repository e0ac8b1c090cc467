"""Every method that `potluck list` shows, Potluck's own and those of other packages, through its checks."""

import pytest

from potluck.methods import get_method, list_methods
from potluck.testing import Check, checks_of

CHECKS = [
    pytest.param(check, id=f"{name}: {check.name}") for name in list_methods() for check in checks_of(get_method(name))
]


@pytest.mark.parametrize("check", CHECKS)
def test_method_conforms(check: Check):
    check.run()
