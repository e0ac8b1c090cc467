"""Keeps account of a served run and its nodes, from what reaches the server's process."""

import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from potluck.cli.status.overview import Company, FailedReply, NodeStanding, Overview
from potluck.core.ground.errors import PotluckError
from potluck.core.ground.machine import size_of
from potluck.core.ground.text import one_line
from potluck.experiment.watching.observers import RunStart
from potluck.flower.deploy.checks import ends_in
from potluck.flower.deploy.registry import registered
from potluck.flower.deploy.sightings import Sightings
from potluck.flower.server.hosting import NodeRefused
from potluck.flower.server.serve import names_in
from potluck.records import ACCURACY, Metric, Progress, RoundRecord

_FRESH = 1.0  # seconds for which an overview is shown again
_SIZE_FRESH = 15.0  # likewise the size of the folder, for which each of its files is looked up
_FAILURES, _ROUNDS, _LINES = 20, 12, 30


class Account:
    """What is known of a served run; one thread tells it, and any may look.

    Args:
        keys: folder of `potluck keys`; None without keys.
        clock: seconds since 1970.
    """

    def __init__(self, keys: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._keys, self._clock = keys, clock
        self._one_at_a_time = threading.Lock()
        self._run: Path | None = None
        self._sightings: Sightings | None = None
        self._metric: Metric = ACCURACY
        self._progress = Progress()
        self._began = self._round_since = clock()
        self._last_end: float | None = None
        self._done = self._lost = 0
        self._bytes: Counter[str] = Counter()
        self._failed: Counter[int] = Counter()
        self._late: Counter[int] = Counter()
        self._why: dict[int, str] = {}
        self._until: dict[int, int] = {}
        self._failures: deque[tuple[int, int, str, bool]] = deque(maxlen=_FAILURES)
        self._finished: deque[RoundRecord] = deque(maxlen=_ROUNDS)
        self._refused: dict[str, str] = {}
        self._said: deque[tuple[float, str]] = deque(maxlen=_LINES)
        self._names: Mapping[int, str] = {}
        self._shown: Overview | None = None
        self._size: tuple[float, int | None, int | None] | None = None

    def begin(self, start: RunStart, sightings: Sightings | None) -> None:
        """The run begins, or goes on; the gate, if there is one, sees nodes."""
        with self._one_at_a_time:
            self._run, self._metric, self._sightings = start.folder, start.metric, sightings
            self._progress = Progress(method=start.method, round=start.rounds_done, rounds=start.rounds)
            for record in start.earlier():
                self._count(record)

    def take(self, news: RoundRecord | Progress | NodeRefused) -> None:
        """News of the run."""
        with self._one_at_a_time:
            if isinstance(news, RoundRecord):
                self._count(news)
                self._last_end = self._clock()
            elif isinstance(news, NodeRefused):
                self._refused[news.name] = one_line(news.why)
            else:
                self._round_since = self._round_since if news.round == self._progress.round else self._clock()
                self._progress = news

    def hear(self, line: str) -> None:
        """What was said on the terminal."""
        with self._one_at_a_time:
            self._said.append((self._clock(), one_line(line)))

    def look(self) -> Overview:
        """How the run and its nodes stand now, or a second ago."""
        now, shown = self._clock(), self._shown
        if shown is None or abs(now - shown.at) >= _FRESH:  # also if the machine's clock was set back
            names, ends, space = self._known_names(), self._ends(), self._space(now)  # of files: nobody waits for these
            allowed = None if self._keys is None else frozenset(registered(self._keys))
            with self._one_at_a_time:
                shown = self._shown = self._overview(now, names, allowed, ends, space)
        return shown

    def _count(self, record: RoundRecord) -> None:
        self._done += 1
        self._lost += record.lost is not None
        self._bytes.update(down=record.bytes_down, up=record.bytes_up, evaluation=record.bytes_evaluation)
        late = set(record.late or ())
        for name, why in record.failed.items():
            client = int(name)
            self._failed[client] += 1
            self._late[client] += client in late
            self._why[client] = why
            self._failures.append((record.round, client, why, client in late))
        self._until |= {int(client): until for client, until in (record.set_aside or {}).items()}
        self._finished.append(record)

    def _overview(
        self,
        now: float,
        names: Mapping[int, str],
        allowed: frozenset[str] | None,
        ends: Mapping[str, datetime],
        space: tuple[int | None, int | None],
    ) -> Overview:
        return Overview(
            at=now,
            name=self._run.resolve().name if self._run else "",
            progress=self._progress,
            began=self._began,
            round_since=self._round_since,
            done=self._done,
            lost=self._lost,
            last_end=self._last_end,
            bytes_down=self._bytes["down"],
            bytes_up=self._bytes["up"],
            bytes_evaluation=self._bytes["evaluation"],
            nodes=self._nodes(now, names, allowed),
            failures=tuple(
                FailedReply(number, names.get(client, f"client {client}"), why, late)
                for number, client, why, late in reversed(self._failures)
            ),
            finished=tuple(reversed(self._finished)),
            metric=self._metric,
            said=tuple(reversed(self._said)),
            ends=ends,
            disk=space[0],
            free=space[1],
        )

    def _nodes(self, now: float, names: Mapping[int, str], allowed: frozenset[str] | None) -> tuple[NodeStanding, ...]:
        company = Company(
            at=now,
            round=self._progress.round,
            clients={name: client for client, name in names.items()},
            refused=self._refused,
            until=self._until,
            registered=allowed,
            sightings=None if self._sightings is None else self._sightings.look(),
        )
        return tuple(self._with_replies(company.standing(name)) for name in company.names())

    def _with_replies(self, node: NodeStanding) -> NodeStanding:
        if (client := node.client) is None:
            return node
        return replace(node, failed=self._failed[client], late=self._late[client], why=self._why.get(client))

    def _known_names(self) -> Mapping[int, str]:
        """By client, its node's name; they never change once they are there."""
        if not self._names and self._run is not None:
            with suppress(PotluckError, OSError):  # the run itself says what is wrong with the file
                self._names = names_in(self._run)
        return self._names

    def _ends(self) -> Mapping[str, datetime]:
        if self._keys is None:
            return {}
        try:
            return ends_in(self._keys)
        except (PotluckError, OSError):  # they are being made anew
            return {}

    def _space(self, now: float) -> tuple[int | None, int | None]:
        """What the run's folder takes, and what is left on its disk."""
        if self._run is None:
            return None, None
        if self._size is None or abs(now - self._size[0]) >= _SIZE_FRESH:
            self._size = now, size_of(self._run), _free_at(self._run)
        return self._size[1:]


def _free_at(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
