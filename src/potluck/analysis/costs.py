"""What a metric costs: curves over what was spent until each round, in every currency that records have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from potluck.analysis.courses import course_of
from potluck.analysis.groups import Group
from potluck.analysis.read import StoredRun, costs, seconds
from potluck.analysis.tables import BYTES_PER_MEGABYTE
from potluck.records import Measure


@dataclass(frozen=True)
class Currency:
    """One currency.

    Attributes:
        name: in a word.
        label: of its axis.
        spent: by round of a run, what the round cost; rounds may be missing.
    """

    name: str
    label: str
    spent: Callable[[StoredRun], Mapping[int, float]]


def _rounds(run: StoredRun) -> dict[int, float]:
    return {record.round: 1.0 for record in run.rounds}


def _teraflops(run: StoredRun) -> dict[int, float]:
    """What clients have computed; no round of a run in which some do not say."""
    found: dict[int, float] = {}
    for record in costs(run):
        if record.client is None:
            continue
        if record.flops is None and record.bytes_up:
            return {}
        found[record.round] = found.get(record.round, 0.0) + (record.flops or 0) / 1e12
    return found


def _megabytes(run: StoredRun) -> dict[int, float]:
    return {record.round: (record.bytes_down + record.bytes_up) / BYTES_PER_MEGABYTE for record in run.rounds}


def _virtual(run: StoredRun) -> dict[int, float]:
    """From the end of the round before to the end of the round, so that what was waited for counts."""
    found, before = dict[int, float](), 0.0
    for timed in course_of(run):
        found[timed.number], before = timed.end - before, timed.end
    return found


COSTS = (
    Currency("rounds", "rounds", _rounds),
    Currency("megabytes", "megabytes sent, all clients", _megabytes),
    Currency("teraflops", "floating-point operations of all clients in training, in millions of millions", _teraflops),
    Currency("seconds", "seconds of training", seconds),
    Currency("virtual", "seconds on the clients' devices, by the virtual clock", _virtual),
)
"""A further currency of the records is one more line here."""


def over_cost(members: Group, cost: Currency, measure: Measure) -> list[tuple[float, float]]:
    """What was spent until each round and the primary metric after it, means over the seeds, which all have the round.

    Empty if the cost of some round is not known.
    """
    found: dict[int, list[tuple[float, float]]] = {}
    for run in members.runs:
        spent = cost.spent(run)
        if any(record.round not in spent for record in run.rounds):
            return []
        until = accumulate(spent[record.round] for record in run.rounds)
        for record, total in zip(run.rounds, until, strict=True):
            if (value := record.value(measure, run.metric.name)) is not None:
                found.setdefault(record.round, []).append((total, value))
    return [
        (fmean(total for total, _ in points), fmean(value for _, value in points))
        for _, points in sorted(found.items())
        if len(points) == len(members.runs)
    ]
