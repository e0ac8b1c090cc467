"""A run's place among Flower's programs: what is submitted, and how it is followed."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from potluck.experiment.config import Experiment
from potluck.flower.deploy.processes import lines_after
from potluck.flower.deploy.superlink import FlowerError, SuperLink
from potluck.records import ROUNDS, RoundRecord

_LOOK_EVERY = 0.5
_ASK_EVERY = 15.0  # seconds; Flower's commands take a second of processor time each


def write_app(place: Path, experiment: Experiment, run: Path, timeout: float, patience: float) -> Path:
    """Write what is submitted: a Flower app that names Potluck's, and holds no code of its own.

    Args:
        place: folder to write.
        experiment: to play.
        run: folder of the run.
        timeout: seconds until a job that is not answered counts as failed.
        patience: seconds to wait for nodes to come.
    """
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    config = {
        "experiment": json.dumps(experiment.tree()),
        "folder": str(run.resolve()),
        "timeout": float(timeout),
        "patience": float(patience),
    }
    app = {
        "publisher": "potluck",
        "components": {
            "serverapp": "potluck.flower.serverapp:server_app",
            "clientapp": "potluck.flower.clientapp:client_app",
        },
        "config": config,
    }
    project = {
        "name": "potluck-run",
        "version": "0.1.0",
        "description": "A run of Potluck",
        "license": "Apache-2.0",
        "dependencies": ["flwr>=1.41,<2"],
    }
    (place / "pyproject.toml").write_text(tomli_w.dumps({"project": project, "tool": {"flwr": {"app": app}}}))
    return place


def play(link: SuperLink, app: Path, run: Path, say: Callable[[str], None]) -> Iterator[RoundRecord]:
    """Submit an app, and give the rounds as they end; a run that nobody follows any more is stopped.

    Args:
        link: to submit to.
        app: what `write_app` wrote.
        run: folder of the run.
        say: told of nodes that come in or are revoked, and of what the run waits for.

    Raises:
        FlowerError: it failed, and why.
    """
    shown, heard = len(_rounds(run)), Said(run).size
    number, over = link.submit(app), False
    asked = time.monotonic()
    try:
        while not over:
            words, heard = Said(run).after(heard)
            for record in _rounds(run)[shown:]:
                shown += 1
                yield record
            for line in (*words.lines, *link.register()):
                say(line)
            if words.failure:
                raise FlowerError(words.failure)
            over = words.over
            if time.monotonic() - asked > _ASK_EVERY:
                link.check()
                _check_alive(link, number)
                asked = time.monotonic()
            time.sleep(_LOOK_EVERY)
    finally:
        if not over:
            with suppress(FlowerError):
                link.stop_run(number)


@dataclass(frozen=True)
class Words:
    """What a server app has said: lines for people, whether it is over, and why if that was not meant to be."""

    lines: list[str]
    over: bool
    failure: str | None


class Said:
    """What the server app, in a process of Flower's, tells the one who follows: a file in the run's folder."""

    def __init__(self, run: Path) -> None:
        self._path = run / "flower.jsonl"

    @property
    def size(self) -> int:
        """Bytes of what has been said so far."""
        return self._path.stat().st_size if self._path.is_file() else 0

    def say(self, line: str) -> None:
        """Tell something."""
        self._append({"say": line})

    def end(self, failure: str | None = None) -> None:
        """Tell that it is over, and why if that was not meant to be."""
        self._append({"end": failure})

    def after(self, position: int) -> tuple[Words, int]:
        """What was said after a position, and the position after that."""
        lines, position = lines_after(self._path, position)
        said = [json.loads(line) for line in lines]
        ends = [words["end"] for words in said if "end" in words]
        return Words(
            [words["say"] for words in said if "say" in words], bool(ends), ends[-1] if ends else None
        ), position

    def _append(self, words: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(words) + "\n")


def _rounds(run: Path) -> list[RoundRecord]:
    return [RoundRecord(**json.loads(line)) for line in lines_after(run / ROUNDS, 0)[0]]


def _check_alive(link: SuperLink, number: str) -> None:
    """Whether Flower still carries the run, which may end without a word of its own.

    Raises:
        FlowerError: it does not.
    """
    status, why = link.status(number)
    if status.startswith("finished") and status != "finished:completed":
        raise FlowerError(f"Flower ended the run: {why or status}; see {link.log}")
