"""The server app says at its end why it ended, in the words that `potluck serve` shows."""

from types import SimpleNamespace

import pytest

from potluck.core.ground.errors import ConfigError
from potluck.flower.server import serverapp
from potluck.flower.server.hosting import EventLog


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConfigError("run.rounds: expected at least 1, found 0"), "run.rounds: expected at least 1, found 0"),
        (ValueError("no such thing"), "ValueError: no such thing"),
    ],
)
def test_what_a_user_can_mend_is_said_as_it_is_and_other_errors_with_their_kind(error, said, monkeypatch, tmp_path):
    def fails(*words, **options):
        raise error

    monkeypatch.setattr(serverapp, "serve", fails)
    for lasting in ("keep_freed_memory", "end_with_parent"):
        monkeypatch.setattr(serverapp, lasting, lambda: None)
    config = {"folder": str(tmp_path), "experiment": "{}", "largest-reply": 1}
    with pytest.raises(type(error)):
        serverapp._main(None, SimpleNamespace(run_config=config))
    events, _ = EventLog(tmp_path).after(0)
    assert events.failure == said
