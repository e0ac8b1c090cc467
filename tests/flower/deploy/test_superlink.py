"""What becomes of Flower's commands."""

import pytest

from potluck.flower.deploy import superlink
from potluck.flower.deploy.superlink import CONNECTION, FlowerError, SuperLink


def test_a_command_that_takes_too_long_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(superlink, "_ANSWERS_WITHIN", 0.05)
    link = SuperLink(tmp_path, None, "127.0.0.1:1")
    with pytest.raises(FlowerError, match=r"\Aflwr ls potluck: no answer within 0\.05 s; .*keeps it busy\Z"):
        link.ask("ls", CONNECTION)
