"""One round by a virtual clock, or several asynchronous ones, as bars: who computed, carried, waited, or in vain."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from potluck.analysis.courses import median_round, virtual
from potluck.twin.simulate import Timed
from potluck.twin.timeline import UNAWAITED, Fate, Turn

BarKind = Literal["computing", "carrying", "waiting", "vain", "absent"]
KINDS: Mapping[BarKind, str] = {
    "computing": "computing",
    "carrying": "carrying: receiving and sending, drawn together",
    "waiting": "waiting for others",
    "vain": "at work on what does not count",
    "absent": "absent: not there, or still at work on what came too late",
}
"""What a bar can be, and how it is called."""
MOST_ROWS = 40
"""Clients that have a row each; of more, it is counted how many do what."""
_SLICES = 60
_TURNS = 120  # of asynchronous rounds, as many as are drawn
_BEYOND = 0.2  # of a round's length, as much as is drawn of what goes on after it
_TICKS = 4
_GOES_ON = "›"
_FATES: tuple[Fate, ...] = ("counted", "late", "left", "failed", "absent")
_Span = tuple[BarKind, float, float]


@dataclass(frozen=True)
class Bar:
    """A part of a row, in percent of its width."""

    kind: BarKind
    left: float
    width: float
    words: str = ""


@dataclass(frozen=True)
class GanttRow:
    """One client's round: its name, its bars, and what became of its part."""

    name: str
    bars: tuple[Bar, ...]
    words: str


@dataclass(frozen=True)
class Slice:
    """A part of the time of many clients: how many did what, in percent of all, by kind, one upon another."""

    left: float
    stacked: tuple[tuple[BarKind, float, float], ...]


@dataclass(frozen=True)
class Gantt:
    """The picture of one round, or of several asynchronous ones.

    Attributes:
        title: which it is.
        clients: how many there were to be asked.
        words: what came of them.
        rows: of each client; empty of more than `MOST_ROWS`, of which there are `slices`.
        slices: of the time.
        width: of a slice, in percent.
        closes: where exchanges closed, in percent.
        ticks: virtual durations since the round began, by place in percent.
    """

    title: str
    clients: int
    words: str
    rows: tuple[GanttRow, ...]
    slices: tuple[Slice, ...]
    width: float
    closes: tuple[float, ...]
    ticks: tuple[tuple[float, str], ...]

    @property
    def goes_on(self) -> bool:
        """Whether somebody is at work beyond the round."""
        return any(row.words.endswith(_GOES_ON) for row in self.rows)

    @property
    def kinds(self) -> dict[BarKind, str]:
        """The kinds of bars in it, and how they are called."""
        shown = {bar.kind for row in self.rows for bar in row.bars}
        shown |= {kind for one in self.slices for kind, _, _ in one.stacked}
        return {kind: words for kind, words in KINDS.items() if kind in shown}


def gantt(rounds: Sequence[Timed], name: Callable[[int], str]) -> Gantt | None:
    """The picture of a run's round of median length, or of its first ones where they are asynchronous.

    Args:
        rounds: all of the run.
        name: of a client.

    Returns:
        None if no time passed.
    """
    if any(exchange == UNAWAITED for timed in rounds for exchange, _ in timed.turns):
        first = list(_of_so_many_turns(rounds))
        turns = tuple(turn for timed in first for turn in timed.turns)
        whole = Timed(first[0].number, first[0].start, first[-1].end, turns)
        title = f"rounds {first[0].number} to {first[-1].number}"
        return _gantt(whole, title, [timed.end for timed in first], name)
    timed = median_round(rounds)
    return _gantt(timed, f"round {timed.number}, the median one", list(_closes(timed).values()), name)


def _of_so_many_turns(rounds: Sequence[Timed]) -> Iterator[Timed]:
    """The first rounds, until as many turns have ended as a picture can show."""
    ended = 0
    for timed in rounds:
        ended += len(timed.turns)
        yield timed
        if ended >= _TURNS:
            return


def _gantt(timed: Timed, title: str, ends_of_exchanges: Sequence[float], name: Callable[[int], str]) -> Gantt | None:
    ends = [turn.finish for _, turn in timed.turns]
    length = timed.end - timed.start
    shown = min(max([timed.end, *ends]) - timed.start, length * (1 + _BEYOND))
    if length <= 0:
        return None

    def place(moment: float) -> float:
        return round(100 * min(max(moment - timed.start, 0.0) / shown, 1.0), 2)

    closes = _closes(timed)
    turns: dict[int, list[tuple[int, Turn]]] = {}
    for exchange, turn in timed.turns:
        turns.setdefault(turn.client, []).append((exchange, turn))
    spans = {
        client: [span for e, turn in own for span in _spans(turn, turn.finish if e == UNAWAITED else closes[e])]
        for client, own in turns.items()
    }
    few = len(turns) <= MOST_ROWS
    rows = [
        GanttRow(name(client), tuple(_bars(spans[client], place)), _became([turn for _, turn in own], timed))
        for client, own in sorted(turns.items())
        if few
    ]
    slices = () if few else _sliced(list(spans.values()), timed.start, shown)
    ticks = tuple((100 * at / _TICKS, virtual(shown * at / _TICKS)) for at in range(_TICKS + 1))
    return Gantt(
        title=title,
        clients=len(turns),
        words=_fates(timed),
        rows=tuple(rows),
        slices=tuple(slices),
        width=100 / _SLICES,
        closes=tuple(dict.fromkeys(map(place, ends_of_exchanges))),
        ticks=ticks,
    )


def _closes(timed: Timed) -> dict[int, float]:
    """By exchange when the last reply that counts was there; the end of its last turn, if none does."""
    found: dict[int, float] = {}
    for exchange in dict.fromkeys(exchange for exchange, _ in timed.turns):
        turns = [turn for place, turn in timed.turns if place == exchange]
        counted = [turn.finish for turn in turns if turn.fate == "counted"]
        found[exchange] = max(counted or [turn.finish for turn in turns])
    return found


def _spans(turn: Turn, close: float) -> Iterator[_Span]:
    """What a client did in an exchange, from when to when, in seconds."""
    if turn.fate == "absent":
        yield "absent", turn.start, close
        return
    between = turn.start + turn.computing
    if turn.fate == "counted":
        yield "computing", turn.start, between
        yield "carrying", between, turn.finish
    else:
        yield "vain", turn.start, turn.finish
    if turn.fate in ("counted", "failed") and close > turn.finish:
        yield "waiting", turn.finish, close


def _bars(spans: Sequence[_Span], place: Callable[[float], float]) -> Iterator[Bar]:
    for kind, start, end in spans:
        left, right = place(start), place(end)
        if right > left:
            yield Bar(kind, left, round(right - left, 2), f"{KINDS[kind]}, {virtual(end - start)}")


def _became(turns: Sequence[Turn], timed: Timed) -> str:
    """What became of a client's parts, in a few words."""
    if len(turns) > 1 and timed.turns[0][0] == UNAWAITED:
        return f"{sum(turn.fate == 'counted' for turn in turns)} of {len(turns)} counted"
    bad = next((turn for turn in turns if turn.fate != "counted"), None)
    if bad is None:
        spent = virtual(sum(turn.finish - turn.start for turn in turns))
        return f"{spent} in {len(turns)} exchanges" if len(turns) > 1 else f"counted, {spent}"
    after = f", {virtual(bad.finish - bad.start)}" if bad.fate != "absent" else ""
    where = f" in exchange {len(turns)}" if len(turns) > 1 else ""
    return f"{bad.fate}{where}{after}{f' {_GOES_ON}' if bad.finish > timed.end else ''}"


def _fates(timed: Timed) -> str:
    """How many parts of clients came to what."""
    counts = Counter(turn.fate for _, turn in timed.turns)
    exchanges = len({exchange for exchange, _ in timed.turns})
    before = f"{exchanges} exchanges: " if exchanges > 1 else ""
    words = [f"{counts[fate]} {fate}" for fate in _FATES if counts[fate]]
    return before + ", ".join(words)


def _sliced(spans: Sequence[Sequence[_Span]], start: float, shown: float) -> Iterator[Slice]:
    """By slice of the time how many clients did what, as means over the slice."""
    step = shown / _SLICES
    for number in range(_SLICES):
        begins = start + step * number
        spent = dict.fromkeys(KINDS, 0.0)
        for kind, since, until in (span for own in spans for span in own):
            spent[kind] += max(0.0, min(until, begins + step) - max(since, begins))
        upon, stacked = 0.0, list[tuple[BarKind, float, float]]()
        for kind, seconds in spent.items():
            height = 100 * seconds / step / len(spans)
            if height > 0:
                stacked.append((kind, round(upon, 2), round(height, 2)))
            upon += height
        yield Slice(round(100 * number / _SLICES, 2), tuple(stacked))
