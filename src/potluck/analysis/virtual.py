"""What a report shows of runs with a twin: their virtual time, and one round of each experiment as bars."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from potluck.analysis.courses import VirtualCourse, course_of, reached_at, virtual
from potluck.analysis.groups import Group
from potluck.analysis.plots.gantt import Gantt, gantt
from potluck.analysis.read import StoredRun
from potluck.records import Measure
from potluck.twin.simulate import Timed

_MOST_PICTURES = 8


@dataclass(frozen=True)
class VirtualRow:
    """A run by its virtual clock: what a table says, and the numbers by which it is sorted."""

    name: str
    cells: tuple[str, ...]
    numbers: tuple[float | None, ...]


@dataclass(frozen=True)
class Virtual:
    """The runs that have a twin, and pictures of rounds, each with the name of its run."""

    rows: tuple[VirtualRow, ...]
    pictures: tuple[tuple[str, Gantt], ...]


def virtual_of(
    groups: Sequence[Group],
    runs: Sequence[StoredRun],
    names: Mapping[Path, str],
    target: float | None,
    measure: Measure,
) -> Virtual | None:
    """What these runs show of virtual time; None if none has a twin.

    Args:
        groups: the experiments, of each of which the first run's median round is drawn.
        runs: the runs.
        names: of runs by their folders.
        target: a value of the primary metric, of which the rows say when it was reached.
        measure: whose predictions, and on what, reach it.
    """
    known = {run.folder: rounds for run in runs if (rounds := course_of(run))}
    if not known:
        return None
    rows = [_row(run, names[run.folder], known[run.folder], target, measure) for run in runs if run.folder in known]
    firsts = [members.runs[0] for members in groups if members.runs[0].folder in known]
    drawn = [(names[run.folder], _picture(run, known[run.folder])) for run in firsts[:_MOST_PICTURES]]
    return Virtual(tuple(rows), tuple((name, picture) for name, picture in drawn if picture))


def _row(run: StoredRun, name: str, rounds: Sequence[Timed], target: float | None, measure: Measure) -> VirtualRow:
    course = VirtualCourse.of(rounds)
    reached = [] if target is None else [reached_at(run, rounds, target, measure)]
    ends = [moment for moment in reached if math.isfinite(moment)] or [None] * len(reached)
    return VirtualRow(name, (*course.cells, *map(virtual, reached)), (*course.numbers, *ends))


def _picture(run: StoredRun, rounds: Sequence[Timed]) -> Gantt | None:
    return gantt(rounds, lambda client: run.client_name(client).removeprefix("client "))
