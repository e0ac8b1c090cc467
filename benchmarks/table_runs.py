"""The runs behind a table: each goes on where it was stopped, and is played once."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev
from typing import TypeVar

from potluck.analysis.read import read_run
from potluck.core.ground.digest import digest
from potluck.experiment.running.several import found, rounds_done, run_several
from potluck.experiment.settings.schema import Experiment
from potluck.records import ROUNDS, TIMINGS, RoundRecord


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of a table with one seed."""

    row: str
    seed: int
    experiment: Experiment


E = TypeVar("E", bound=Entry)


def finished(entries: Sequence[E], runs: Path) -> Iterator[tuple[E, Path]]:
    """The entries of which all rounds have been played, each with its run's folder."""
    for entry, folder in zip(entries, found(runs, [entry.experiment for entry in entries]), strict=True):
        if folder is not None and rounds_done(folder) >= entry.experiment.run.rounds:
            yield entry, folder


def play_all(wanted: Sequence[Entry], runs: Path, processes: int) -> None:
    """Play the unfinished runs, several at a time, and say of each when it is done or why it is not."""
    done = {id(entry) for entry, _ in finished(wanted, runs)}
    left = [entry for entry in wanted if id(entry) not in done]
    print(f"{len(done)} of {len(wanted)} runs are finished", flush=True)
    ends = (news for news in run_several([entry.experiment for entry in left], runs, processes) if news.ended)
    for number, news in enumerate(ends, start=1):
        entry, problem = left[news.index], news.ended.problem if news.ended else None
        print(f"{number} of {len(left)}: {entry.row}, seed {entry.seed}{f': {problem}' if problem else ''}", flush=True)


def rounds_of(entry: Entry, folder: Path) -> Sequence[RoundRecord]:
    """The rounds of a finished run; of one that was played further, its first ones, which are the same."""
    return read_run(folder).rounds[: entry.experiment.run.rounds]


def seconds_of(entry: Entry, folder: Path) -> float:
    """How long the rounds of a finished run took."""
    lines = first_lines(folder / TIMINGS, entry.experiment.run.rounds)
    return sum(json.loads(line)["seconds_total"] for line in lines)


def megabytes_of(rounds: Sequence[RoundRecord]) -> str:
    """Payload in both directions, as a column of a table."""
    return f"{sum(record.bytes_down + record.bytes_up for record in rounds) / 1e6:.1f}"


def records_of(entry: Entry, folder: Path) -> str:
    """A digest of the records of a finished run's rounds."""
    return digest(b"".join(first_lines(folder / ROUNDS, entry.experiment.run.rounds)))


def first_lines(path: Path, count: int) -> list[bytes]:
    """The first lines of a file, with their ends."""
    with path.open("rb") as file:
        return list(islice(file, count))


def share(value: float | None) -> str:
    """A share as a column of a table; empty if there is none."""
    return "" if value is None else f"{value:.4f}"


def spread(values: Sequence[str]) -> str:
    """Of shares as text, mean ± standard deviation in percent; a dash where there is nothing."""
    known = [100 * float(value) for value in values if value]
    if not known:
        return "–"
    return f"{fmean(known):.1f} ± {stdev(known):.1f}" if len(known) > 1 else f"{known[0]:.1f}"
