"""A run's settings as text, by dotted key of its configuration, without those of the machine."""

from collections.abc import Sequence
from typing import Any, Protocol

# The seed identifies a run of the experiment; the others concern how a machine computes it.
_NOT_THE_SETTING = (
    "run.seed",
    "run.executor",
    "run.workers",
    "run.threads",
    "run.memory_gib",
    "run.tolerate_failures",
    "run.lost_rounds",
    "run.rounds_close.quorum",
    "run.rounds_close.deadline_s",
    "run.rounds_close.patience_s",
    "run.on_divergence",
    "run.largest_value",
    "run.outlier_factor",
    "run.track",
    "run.keep_every",
)


class Configured(Protocol):
    """A run with the tables of its configuration."""

    @property
    def config(self) -> dict[str, Any]:
        """The tables, as `config.toml` has them."""
        ...


def settings(run: Configured) -> dict[str, str]:
    """The settings that define the experiment, in the configuration's order, without the defaults of a preset."""
    return {key: value for key, value in every_setting(run).items() if key not in _NOT_THE_SETTING}


def every_setting(run: Configured) -> dict[str, str]:
    """All settings, also those of the machine, in the configuration's order, without the defaults of a preset."""
    return _flat({name: table for name, table in run.config.items() if name != "preset"}, "")


def differing(trees: Sequence[dict[str, str]]) -> list[str]:
    """The keys whose values differ between the trees, in order of appearance."""
    keys = dict.fromkeys(key for tree in trees for key in tree)
    return [key for key in keys if len({tree.get(key) for tree in trees}) > 1]


def _flat(table: dict[str, Any], above: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in table.items():
        found |= _flat(value, f"{above}{key}.") if isinstance(value, dict) else {f"{above}{key}": _text(value)}
    return found


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(_text(item) for item in value)
    if isinstance(value, dict):  # a model with its options, written as the records write it
        options = ", ".join(f"{key}={_text(item)}" for key, item in sorted(value.items()) if key != "name")
        return f"{value.get('name', '')}({options})" if options else str(value.get("name", ""))
    return str(value)
