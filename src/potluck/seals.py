"""A run's seal: what its last checkpoint says of its configuration and records, and whether they still are that.

Whoever reads a run, to resume it or to show its numbers, reads it through here.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.core.ground.digest import digest
from potluck.core.ground.errors import CheckpointError
from potluck.records import CHECKPOINT, CLIENTS, CONFIG, LAST, ROUNDS, Checkpoint, Extent

SettingsTree = dict[str, Any]
FREE = ("rounds", "workers", "memory_gib", "track", "rounds_close", "budgets", "keep_every")
"""Keys of the table `run` that may change when a run is resumed, since they change no bit of finished rounds."""

_NEEDED = {"method": ("name",), "federation": ("dataset", "clients"), "run": ("seed", "rounds")}
_MARK = 4  # hex digits for each round, to find the damaged one in a file known to be damaged
NO_LINE = Extent(0, digest(b""), "")
UNKNOWN = "it cannot be checked whether records and configuration have changed"


@dataclass(frozen=True)
class Sealed:
    """A run's configuration and records, as the run wrote them.

    Attributes:
        config: the tables of `config.toml`; without keys that the checkpoint does not know, which had no part in it.
        checkpoint: the last one; None if there is none.
        records: the content of each file of records up to the checkpoint; of one that says no extent, all of it.
        unchecked: why it cannot be told whether all this is unchanged; None if it is.
    """

    config: SettingsTree
    checkpoint: Checkpoint | None
    records: Mapping[str, bytes]
    unchecked: str | None


def read_sealed(folder: Path) -> Sealed:
    """The run in a folder, up to its last checkpoint, checked against it.

    Raises:
        CheckpointError: configuration, records or checkpoint are damaged or changed; says what and where.
    """
    checkpoint = Checkpoint.read(folder / CHECKPOINT / LAST)  # first: a run that goes on adds to what this one says
    config = _read_config(folder / CONFIG)
    if checkpoint is None or checkpoint.records is None or checkpoint.config is None:
        reason = "there is no checkpoint" if checkpoint is None else "an earlier version wrote the checkpoint"
        records = {name: content_of(folder / name) for name in (ROUNDS, CLIENTS)}
        return Sealed(config, checkpoint, records, f"{reason}; {UNKNOWN}")
    check_continues(folder, checkpoint, what_matters(config), config["run"]["rounds"])
    records = {name: content_within(folder / name, extent_of(checkpoint, name)) for name in (ROUNDS, CLIENTS)}
    free = {key: value for key, value in config["run"].items() if key in FREE}
    known = _known_to(checkpoint.config, config)
    preset = {"preset": config["preset"]} if "preset" in config else {}
    return Sealed({**preset, **known, "run": {**known["run"], **free}}, checkpoint, records, None)


def _read_config(path: Path) -> SettingsTree:
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; restore it, or run again") from error
    tables = {name: table if isinstance(table := config.get(name), dict) else {} for name in _NEEDED}
    missing = [f"{name}.{key}" for name, keys in _NEEDED.items() for key in keys if key not in tables[name]]
    if missing:
        raise CheckpointError(
            f"{path} has no {', '.join(missing)}; expected the resolved configuration that `potluck run` writes"
        )
    return config


def _known_to(sealed: SettingsTree, config: SettingsTree) -> SettingsTree:
    """The tables without the keys that these sealed ones lack, at any depth."""
    return {
        key: _known_to(sealed[key], value) if isinstance(sealed[key], dict) and isinstance(value, dict) else value
        for key, value in config.items()
        if key in sealed
    }


def what_matters(settings: SettingsTree) -> SettingsTree:
    """The tables in JSON's types, without the keys that change no bit of a run."""
    tables = in_json(settings)
    tables.pop("preset", None)
    run = tables["run"]
    tables["run"] = {key: value for key, value in run.items() if key not in FREE}
    if rule := (run.get("rounds_close") or {}).get("asynchronous"):  # by it clients are under way between two rounds
        tables["run"]["asynchronous"] = rule
    return tables


def in_json(settings: SettingsTree) -> SettingsTree:
    """A copy of the tables in JSON's types; tables in lists are without what is not set, as in a configuration."""
    return _without_none_in_lists(json.loads(json.dumps(settings, default=lambda value: type(value).__name__)))


def _without_none_in_lists(node: Any, in_list: bool = False) -> Any:
    if isinstance(node, dict):
        named = {key: _without_none_in_lists(value, in_list) for key, value in node.items()}
        return {key: value for key, value in named.items() if not (in_list and value is None)}
    return [_without_none_in_lists(value, True) for value in node] if isinstance(node, list) else node


def differences(before: SettingsTree, now: SettingsTree, where: str = "") -> dict[str, tuple[Any, Any]]:
    """The differing values of two tables of tables, by dotted key; None for a missing value.

    Keys that `before` lacks count as equal, since the version that wrote it did not have them.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for key, old in before.items():
        new, dotted = now.get(key), f"{where}{key}"
        if isinstance(old, dict) and isinstance(new, dict):
            found |= differences(old, new, f"{dotted}.")
        elif _text(old) != _text(new):  # NaN equals NaN
            found[dotted] = old, new
    return found


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def check_continues(folder: Path, last: Checkpoint, settings: SettingsTree, rounds: int) -> None:
    """Check that a run still has its configuration, and at least as many rounds as are finished.

    Args:
        folder: the run's folder.
        last: its checkpoint.
        settings: the settings now, as `what_matters` gives them.
        rounds: the total number of rounds.

    Raises:
        CheckpointError: something has changed; lists the dotted keys.
    """
    if rounds < last.round:
        raise CheckpointError(
            f"{folder} has {last.round} finished rounds; run.rounds: found {rounds}, expected at least {last.round}"
        )
    if last.config is None:
        return
    changed = differences(last.config, settings)
    if changed:
        lines = [f"{key} was {_shown(before)} and is {_shown(now)}" for key, (before, now) in changed.items()]
        raise CheckpointError(
            f"{folder}: the configuration has changed since the last checkpoint: {'; '.join(lines)}. Put it back, or"
            f" make the change in a branch of the run: potluck run --resume {folder} --branch"
        )


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)


def extent_of(checkpoint: Checkpoint, name: str) -> Extent:
    """How far a file of records reaches, as a checkpoint says."""
    return (checkpoint.records or {}).get(name, NO_LINE)


def content_within(path: Path, extent: Extent) -> bytes:
    """The content of a file of records within the extent in a checkpoint.

    Raises:
        CheckpointError: it has been damaged; says where.
    """
    content = content_of(path)
    kept = content[: extent.bytes]
    if digest(kept) != extent.digest:
        raise _damaged(path, _place_of_damage(content, extent.marks))
    return kept


def extent_up_to(path: Path, last: int) -> Extent:
    """The extent of the rounds up to `last`, whose lines must be in order, where a checkpoint states none.

    Raises:
        CheckpointError: they are not in order, or end before `last`; says where.
    """
    content = content_of(path)
    end, marks, before = 0, "", 0
    for first, final, number, lines in _rounds(content):
        if (number is None and before == last) or (number or 0) > last:
            break
        if number is None:
            raise _damaged(path, f"line {final}")
        if number <= before or (path.name == ROUNDS and (number > before + 1 or final > first)):
            raise _damaged(path, _lines(first, final, number))
        end, marks, before = end + len(lines), marks + mark(lines), number
    if path.name == ROUNDS and before < last:
        raise _damaged(path, f"which ends with round {before} of {last}")
    return Extent(end, digest(content[:end]), marks)


def _place_of_damage(content: bytes, marks: str) -> str:
    """Where a changed file first differs from what was written."""
    known, groups, end = marks_in(marks), list(_rounds(content)), 0
    for place, (written, (first, final, number, lines)) in enumerate(zip(known, groups, strict=False)):
        if number is None or mark(lines) != written:
            after = groups[place + 1 : place + 2]  # a line that is not a record cuts a round's lines short
            return next((_lines(*line[:3]) for line in after if line[2] is None), _lines(first, final, number))
        end = final
    if not content:
        return "which is missing or empty"
    return f"which ends with line {end}" if len(groups) < len(known) else "somewhere"


def _damaged(path: Path, place: str) -> CheckpointError:
    return CheckpointError(f"{path}, {place}, is damaged: it is not what the run wrote; restore it, or run again")


def content_of(path: Path) -> bytes:
    """The content of a file; nothing if it is not there."""
    return path.read_bytes() if path.is_file() else b""


def split_lines(content: bytes) -> list[bytes]:
    """Lines with their ends, split at newlines alone: a damaged file may hold other line separators."""
    return re.findall(rb"[^\n]*\n|[^\n]+", content)


def mark(lines: bytes) -> str:
    """The mark of one round's lines, by which a damaged round is found."""
    return digest(lines)[:_MARK]


def marks_in(marks: str) -> list[str]:
    """The mark of each round."""
    return re.findall("." * _MARK, marks)


def _lines(first: int, final: int, number: int | None) -> str:
    """A description of lines; with the round if they belong to one."""
    return f"line {final}" if first == final else f"lines {first} to {final} (round {number})"


def _rounds(content: bytes) -> Iterator[tuple[int, int, int | None, bytes]]:
    """First and last line, round and text of each round's lines; the round is None for a line that is no record."""
    group: list[bytes] = []
    number: int | None = None
    for place, line in enumerate(split_lines(content), start=1):
        found = round_of(line)
        if group and (found is None or found != number):
            yield place - len(group), place - 1, number, b"".join(group)
            group = []
        group.append(line)
        number = found
        if found is None:
            yield place, place, None, line
            group = []
    if group:
        end = content.count(b"\n")
        yield end - len(group) + 1, end, number, b"".join(group)


def round_of(line: bytes) -> int | None:
    """The round of a record; None if the line is not a complete record."""
    try:
        number = json.loads(line.decode())["round"]
    except (ValueError, KeyError, TypeError):
        return None
    return number if isinstance(number, int) and line.endswith(b"\n") else None
