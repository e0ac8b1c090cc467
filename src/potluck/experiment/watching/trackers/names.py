"""The names of the trackers, and whether each is installed."""

import importlib.util
from collections.abc import Sequence
from typing import Literal

from potluck.core.ground.errors import ConfigError

TrackerName = Literal["tensorboard", "mlflow", "wandb", "trackio"]


def names_of(track: TrackerName | Sequence[TrackerName]) -> tuple[TrackerName, ...]:
    """The names in the setting `run.track`, each once."""
    return (track,) if isinstance(track, str) else tuple(dict.fromkeys(track))


def check_installed(track: TrackerName | Sequence[TrackerName]) -> None:
    """Check that these trackers are installed; nothing is imported.

    Raises:
        ConfigError: one is not.
    """
    for name in names_of(track):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"run.track: found {name!r}, but {name} is not installed: pip install 'potluck[{name}]'")
