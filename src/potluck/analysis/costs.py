"""What a metric costs: curves over what was spent until each round, in every currency that records have.

And what a round of each architecture's clients takes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from potluck.analysis.courses import course_of
from potluck.analysis.groups import Group
from potluck.analysis.read import StoredRun, costs, joules, seconds
from potluck.analysis.tables import BYTES_PER_MEGABYTE
from potluck.records import CostRecord, Measure

SERVER = "server"
"""Whose row is beside those of architectures."""


@dataclass(frozen=True)
class WorkRow:
    """What a round of one client takes, mean over an architecture's clients and the rounds in which they were asked.

    Attributes:
        architecture: its name, or `SERVER`.
        clients: how many of them were asked; None of the server.
        gigaflops: thousand million floating-point operations; None if a machine does not say.
        most_gigaflops: of the client and round with most.
        memory: megabytes of tensors that were there at once, of the client and round with most; None likewise.
        megabytes_down: received; `megabytes_up` sent.
    """

    architecture: str
    clients: int | None
    gigaflops: float | None
    most_gigaflops: float | None
    memory: float | None
    megabytes_down: float
    megabytes_up: float


def work_table(runs: Sequence[StoredRun]) -> list[WorkRow]:
    """The architectures of one experiment in order of appearance, then the server, over all its seeds."""
    found: dict[str, list[list[CostRecord]]] = {}
    clients: dict[str, set[int]] = {}
    for run in runs:
        names = {line.client: line.architecture for line in run.clients}
        parts: dict[tuple[int | None, int], list[CostRecord]] = {}
        for record in costs(run):
            parts.setdefault((record.client, record.round), []).append(record)
        for (client, _), own in parts.items():
            if client is None and not own[0].flops:
                continue
            name = SERVER if client is None else names.get(client, "all")
            found.setdefault(name, []).append(own)
            clients.setdefault(name, set()).update(() if client is None else (client,))
    order = [name for name in dict.fromkeys(line.architecture for run in runs for line in run.clients) if name in found]
    return [_work(name, len(clients[name]) or None, found[name]) for name in dict.fromkeys([*order, *found])]


def _work(name: str, clients: int | None, parts: Sequence[Sequence[CostRecord]]) -> WorkRow:
    """Of parts in rounds, each the records of one client in one round."""
    heard = [own for own in parts if any(record.bytes_up or record.flops is not None for record in own)]
    told = heard and all(record.flops is not None for own in heard for record in own if record.bytes_up)
    flops = [sum(record.flops or 0 for record in own) / 1e9 for own in heard] if told else []
    memory = [record.memory for own in heard for record in own if record.memory is not None]
    return WorkRow(
        architecture=name,
        clients=clients,
        gigaflops=fmean(flops) if flops else None,
        most_gigaflops=max(flops, default=None),
        memory=max(memory) / BYTES_PER_MEGABYTE if memory else None,
        megabytes_down=fmean(sum(record.bytes_down for record in own) for own in parts) / BYTES_PER_MEGABYTE,
        megabytes_up=fmean(sum(record.bytes_up for record in own) for own in parts) / BYTES_PER_MEGABYTE,
    )


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
    Currency("joules", "joules of the machine's processors in training", joules),
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
