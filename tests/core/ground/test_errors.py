"""Whose file a line of a traceback is in."""

import pytest
import torch

import potluck.engine.client.training
import potluck.methods.fedavg
from potluck.core.ground.errors import is_users


@pytest.mark.parametrize("module", [potluck.engine.client.training, potluck.methods.fedavg, torch, pytest])
def test_potlucks_own_files_and_installed_ones_are_nobodys(module):
    assert not is_users(module.__file__)


def test_any_other_file_is_the_users(tmp_path):
    assert is_users(str(tmp_path / "net.py"))
    assert not is_users("<string>")
