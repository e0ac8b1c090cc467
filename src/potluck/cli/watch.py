"""`potluck watch`: follows runs that other processes execute, by the files in their folders."""

import json
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from potluck.cli.terminal import console_on, line_of, megabytes
from potluck.core.ground.errors import CheckpointError
from potluck.locks import is_locked
from potluck.records import (
    ACCURACY,
    CONFIG,
    LOCK,
    MAIN_MEASURES,
    MANIFEST,
    ROUNDS,
    TIMINGS,
    TITLES,
    Measure,
    Metric,
    Progress,
    RoundRecord,
    check_is_run,
    duration,
)
from potluck.seals import read_sealed

_EVERY = 1.0  # seconds between two looks
_SHOWN = 12  # rounds of a single run that are listed
_FRAME = 6  # lines of a terminal beside those of the runs
State = Literal["running", "finished", "interrupted", "failed", "killed", "waiting", "damaged"]


@dataclass(frozen=True)
class Seen:
    """A run at one look.

    Attributes:
        name: its folder's.
        state: "killed" if it says that it goes on and no process holds its lock; "waiting" if it never began; "damaged"
            if it has ended, and its configuration or records are no longer what it wrote.
        progress: how it stands.
        reason: why it failed, or what is damaged; None otherwise.
        metric: the primary metric.
        records: the finished rounds.
        seconds: by round, how long it took.
    """

    name: str
    state: State
    progress: Progress
    reason: str | None
    metric: Metric
    records: tuple[RoundRecord, ...]
    seconds: dict[int, float]

    @property
    def over(self) -> bool:
        """Whether nothing will change unless someone resumes the run."""
        return self.state != "running"

    @property
    def line(self) -> str:
        """The run on one line, without its name."""
        if self.state == "running":
            return line_of(self.progress)
        words = [self.state, line_of(self.progress, ended=True)]
        return "  ".join([*words, *filter(None, [self.reason])])


def watch_to_the_end(
    paths: Sequence[Path], *, every: float = _EVERY, sleep: Callable[[float], None] = time.sleep, once: bool = False
) -> bool:
    """Show runs until all of them have ended.

    Args:
        paths: runs, or folders of runs.
        every: seconds between two looks.
        sleep: waits.
        once: look once.

    Returns:
        Whether all of them finished. Of a folder of runs those count that went on while it was watched: one that failed
        last week says nothing of today's.

    Raises:
        CheckpointError: a folder is neither a run nor holds one.
    """
    watched = _Watched(paths)
    console = console_on(sys.stdout)
    if console.is_terminal and not once:
        _live(watched, console, every, sleep)
    else:
        _lines(watched, console, every, sleep, once=once)
    return watched.finished


class _Watched:
    """Looks at runs again and again; those that have ended are read once, and new ones in a folder are found.

    Raises:
        CheckpointError: a path is neither a run nor holds one.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._ended: dict[Path, tuple[int, Seen]] = {}
        self._counting = {folder for folder in self._found() if folder in paths}

    def look(self) -> list[Seen]:
        """All runs as they stand now."""
        seen: list[Seen] = []
        for folder in self._found():
            changed = (folder / MANIFEST).stat().st_mtime_ns
            if folder not in self._ended or self._ended[folder][0] != changed:
                run = look(folder)
                seen.append(run)
                self._ended.pop(folder, None)
                if run.over:
                    self._ended[folder] = changed, run
                else:
                    self._counting.add(folder)
            else:
                seen.append(self._ended[folder][1])
        return seen

    @property
    def finished(self) -> bool:
        """Whether none of the runs that count has ended otherwise, at the last look."""
        return all(run.state == "finished" for folder, (_, run) in self._ended.items() if folder in self._counting)

    def _found(self) -> list[Path]:
        return [folder for path in self._paths for folder in runs_at(path)]


def runs_at(path: Path) -> list[Path]:
    """The run at a path, or those inside it.

    Raises:
        CheckpointError: there is none.
    """
    inside = sorted(path.iterdir()) if path.is_dir() else []
    if any(child.name in (CONFIG, MANIFEST) for child in inside):
        check_is_run(path)
        return [path]
    found = [child for child in inside if all((child / name).is_file() for name in (CONFIG, MANIFEST))]
    if not found:
        raise CheckpointError(f"{path}: expected a folder that `potluck run` made, or a folder of such; found no run")
    return found


def look(folder: Path) -> Seen:
    """The run as its files say.

    Raises:
        CheckpointError: its configuration or manifest is damaged.
    """
    try:
        config = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
        manifest = json.loads((folder / MANIFEST).read_bytes())
        rounds, method = int(config["run"]["rounds"]), str(config["method"]["name"])
        metrics = [Metric.of(facts) for facts in manifest.get("task", {}).get("metrics", [])] or [ACCURACY]
        records = tuple(RoundRecord(**line) for line in _lines_of(folder / ROUNDS))
        seconds = {line["round"]: line["seconds_total"] for line in _lines_of(folder / TIMINGS)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}; expected a folder that `potluck run` made") from error
    told = Progress.read(folder)  # first, since it is removed before the lock is let go
    alive = is_held(folder)
    state = _state(manifest.get("status"), alive)
    damage = None if state == "running" else _damage(folder)
    known = told if told and alive else None
    return Seen(
        name=folder.resolve().name,
        state="damaged" if damage else state,
        progress=known or _of_records(method, rounds, records, metrics[0]),
        reason=damage or (manifest.get("reason") if state == "failed" else None),
        metric=metrics[0],
        records=records,
        seconds=seconds,
    )


def _damage(folder: Path) -> str | None:
    """What is no longer as the run wrote it; None if nothing is."""
    try:
        read_sealed(folder)
    except CheckpointError as error:
        return str(error)
    return None


def is_held(folder: Path) -> bool:
    """Whether a process runs in this folder. For the look the lock is taken for an instant."""
    held = is_locked(folder / LOCK)
    return Progress.read(folder) is not None if held is None else held


def _state(status: object, alive: bool) -> State:
    if alive:
        return "running"
    if status in ("finished", "interrupted", "failed"):
        return status
    return "killed" if status == "running" else "waiting"


def _of_records(method: str, rounds: int, records: Sequence[RoundRecord], metric: Metric) -> Progress:
    """How a run stands by its records alone."""
    scores = [value for record in records if (value := record.value("personal", metric.name)) is not None]
    return Progress(
        method=method,
        round=len(records),
        rounds=rounds,
        share=float(len(records)),
        loss=records[-1].loss_local if records else None,
        score=f"{metric.label} {metric.text(scores[-1])}" if scores else None,
        bytes=sum(record.bytes_down + record.bytes_up for record in records),
    )


def _lines_of(path: Path) -> list[Any]:
    """The whole lines of a file; the last one may still be being written."""
    try:
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    except (OSError, ValueError):
        return []


def _live(watched: _Watched, console: Console, every: float, sleep: Callable[[float], None]) -> None:
    with Live(console=console, auto_refresh=False) as live:
        while True:
            seen = watched.look()
            live.update(screen(seen, console.height), refresh=True)
            if all(run.over for run in seen):
                return
            sleep(every)


def _lines(watched: _Watched, console: Console, every: float, sleep: Callable[[float], None], *, once: bool) -> None:
    """One line for each run whenever a round or the run has ended."""
    before: dict[str, tuple[State, int]] = {}
    while True:
        seen = watched.look()
        for run in seen:
            now = run.state, len(run.records)
            if before.get(run.name) != now:
                before[run.name] = now
                name = f"{run.name}:  " if len(seen) > 1 else ""
                console.print(f"{name}{run.line}", highlight=False, markup=False, soft_wrap=True)
        if once or all(run.over for run in seen):
            return
        sleep(every)


def screen(seen: Sequence[Seen], height: int = 25) -> Group:
    """What a terminal shows: of one run its last rounds; of several a line each, as many as it has room for."""
    if len(seen) == 1:
        (run,) = seen
        return Group(Text(run.name, style="bold"), *([_rounds(run)] if run.records else []), Text(run.line))
    newest = [*(run for run in seen if not run.over), *(run for run in reversed(seen) if run.over)]
    room = max(1, height - _FRAME)
    more = [Text(f"and {len(newest) - room} more that have ended")] if len(newest) > room else []
    return Group(_overview(newest[:room]), *more)


def _overview(seen: Sequence[Seen]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("run", "state", "round", "loss", "score", "sent", "left"):
        table.add_column(column, justify="left" if column in ("run", "state") else "right", overflow="fold")
    for run in seen:
        now = run.progress
        table.add_row(
            run.name,
            now.words if run.state == "running" else run.state,
            f"{now.round}/{now.rounds}",
            "-" if now.loss is None else f"{now.loss:.4g}",
            now.score or "-",
            megabytes(now.bytes),
            duration(now.seconds_left) if run.state == "running" and now.seconds_left else "-",
        )
    return table


def _rounds(run: Seen) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    used: list[Measure] = [
        m for m in MAIN_MEASURES if any(record.value(m, run.metric.name) is not None for record in run.records)
    ]
    for column in ("round", "loss", *(f"{run.metric.label}, {TITLES[measure]}" for measure in used), "sent", "took"):
        table.add_column(column, justify="right")
    for record in run.records[-_SHOWN:]:
        took = run.seconds.get(record.round)
        table.add_row(
            str(record.round),
            "-" if record.loss_local is None else f"{record.loss_local:.4g}",
            *(run.metric.text(record.value(measure, run.metric.name)) for measure in used),
            megabytes(record.bytes_down + record.bytes_up),
            "-" if took is None else duration(took),
        )
    return table
