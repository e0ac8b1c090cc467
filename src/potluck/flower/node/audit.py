"""A node's audit log: a line for each request, with what it asked for and what left; lines are only ever added.

Each line is a JSON object that holds the digest of the line before it, so that no line can be changed, removed or put
in between without all that follow. Whoever notes the last digest, which `potluck join` prints, can prove the whole.
"""

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from potluck.core.ground.digest import digest
from potluck.core.ground.errors import CheckpointError
from potluck.core.ground.text import one_line

START = "0" * 32
"""What the first line holds in place of a digest."""

_PREVIOUS = "previous"


class Audit:
    """An audit log that is open for new lines.

    Args:
        path: its file, which is made if there is none.

    Raises:
        CheckpointError: a line does not follow from the one before it.
    """

    def __init__(self, path: Path) -> None:
        self._last = last_digest(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, facts: Mapping[str, Any]) -> None:
        """Add a line; it is on the disk when this returns."""
        entry = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **facts, _PREVIOUS: self._last}
        line = json.dumps(entry).encode()
        os.write(self._file, line + b"\n")
        os.fsync(self._file)
        self._last = digest(line)


def last_digest(path: Path) -> str:
    """The digest of the last line of an audit log, each line of which is checked against the one before.

    Raises:
        CheckpointError: a line does not follow from the one before it.
    """
    last = START
    if not path.is_file():
        return last
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if _previous_in(line) != last:
                raise CheckpointError(
                    f"{path}, line {number}: it does not follow from the line before, so the log was changed or torn;"
                    " keep the file, and begin another: potluck join --audit FILE"
                )
            last = digest(line.rstrip(b"\n"))
    return last


def _previous_in(line: bytes) -> Any:
    try:
        return json.loads(line)[_PREVIOUS] if line.endswith(b"\n") else None
    except (ValueError, LookupError, TypeError):
        return None


def in_words(line: str) -> str | None:
    """A line of the log for the owner's terminal: what a server asks the node to compute, and what was refused."""
    entry: dict[str, Any] = json.loads(line)
    if refused := entry["refused"]:
        return f"refused to a server ({entry['asked']}): {one_line(str(refused))}"
    if told := entry.get("told"):
        return f"takes no part, says the server: {one_line(str(told))}"
    if "settings" not in entry:
        return None
    tables = entry["settings"]
    federation, method = tables["federation"], dict(tables["method"])
    where = f"{federation['dataset']} with {', '.join(map(str, federation['models']))}"
    return one_line(f"asked to compute {method.pop('name')} on {where}, in {entry['run']}: {json.dumps(method)}", 500)
