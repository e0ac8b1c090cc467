"""What of Flower's API between its programs is replaced by ours."""

from types import ModuleType

import pytest

from potluck.flower.deploy.private import replace


def theirs():
    module = ModuleType("flwr.api")
    module.serve = print
    return module


def test_a_modules_function_is_replaced():
    module = theirs()
    replace(module, "serve", len)
    assert module.serve is len


def test_a_flower_without_the_function_is_refused_before_anything_runs():
    module = theirs()
    with pytest.raises(SystemExit, match=r"this version of Flower has no listen in flwr\.api; install the one"):
        replace(module, "listen", len)
    assert not hasattr(module, "listen")
