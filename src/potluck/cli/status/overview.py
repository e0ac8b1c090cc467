"""How a served run and each of its nodes stand at a moment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Literal

from potluck.flower import EVALUATION, GREETING
from potluck.flower.deploy.sightings import Sighting
from potluck.records import ACCURACY, Metric, Progress, RoundRecord

NodeState = Literal["at work", "idle", "away", "never seen", "set aside", "takes no part", "not known"]
NODE_STATES: tuple[NodeState, ...] = (
    *("at work", "idle", "away", "never seen"),
    *("set aside", "takes no part", "not known"),
)
"""What a node may be doing. What is not known is whether it is there, where no gate of ours is."""

AWAY_AFTER = 60.0
"""Seconds without a word after which a node counts as away; one that is there says something every 23 at least."""

_NAMED = 3  # nodes that another one waits for
_DOING = {GREETING: "introduces itself", EVALUATION: "evaluates its model"}


@dataclass(frozen=True)
class NodeStanding:
    """A node at a moment; times are in seconds since 1970.

    Attributes:
        name: under which it is registered; its number, if keys are not used.
        client: which one of the run it is; None if it is none.
        state: what it is.
        doing: the same in words, with what it does or waits for.
        since: since when; None if that is not known.
        sighting: what the gate saw of it last; None if it saw nothing, or there is none.
        failed: how many of its replies did not count, `late` ones included.
        why: why the last one of these did not; None if all counted.
    """

    name: str
    client: int | None
    state: NodeState
    doing: str
    since: float | None = None
    sighting: Sighting | None = None
    failed: int = 0
    late: int = 0
    why: str | None = None


@dataclass(frozen=True)
class FailedReply:
    """A reply that did not count: of which round and which node, why, and whether it was late."""

    round: int
    name: str
    why: str
    late: bool


@dataclass(frozen=True)
class Overview:
    """A served run at a moment; times are in seconds since 1970, sizes in bytes.

    Attributes:
        at: the moment.
        name: of the run's folder.
        progress: how the run stands, by its own account.
        done: how many rounds are finished; `lost` of them changed nothing.
        began: when this server began.
        round_since: when the current round began, or this server if that was later.
        last_end: when a round ended last; None if none has since this server began.
        bytes_down: payload sent to nodes for training, `bytes_evaluation` for evaluations; `bytes_up` the other way.
        nodes: all that are registered, or were seen, by name.
        failures: the last replies that did not count, newest first.
        finished: the last finished rounds, newest first.
        metric: the task's primary one.
        said: what was said on the terminal last, and when, newest first.
        ends: when certificates expire, by the name of their file.
        disk: what the run's folder takes; `free` is what is left on its disk. None if it cannot be told.
        is_whole: whether it has all that an operator sees; what an observer does not see is empty otherwise.
    """

    at: float
    name: str
    progress: Progress
    began: float
    round_since: float
    done: int = 0
    lost: int = 0
    last_end: float | None = None
    bytes_down: int = 0
    bytes_up: int = 0
    bytes_evaluation: int = 0
    nodes: tuple[NodeStanding, ...] = ()
    failures: tuple[FailedReply, ...] = ()
    finished: tuple[RoundRecord, ...] = ()
    metric: Metric = ACCURACY
    said: tuple[tuple[float, str], ...] = ()
    ends: Mapping[str, datetime] = field(default_factory=dict[str, datetime])
    disk: int | None = None
    free: int | None = None
    is_whole: bool = True


@dataclass(frozen=True)
class Company:
    """All nodes of a server, as far as it decides what each one is.

    Attributes:
        at: the moment.
        round: the number of the current round.
        clients: by the name of a node, which client of the run it is; empty before the nodes have met.
        refused: by the name of a node, why it takes no part.
        until: by client, the last round of its rest, of those that are set aside.
        registered: the names of the keys that may take part; None without keys.
        sightings: what the gate saw of each; None where there is none.
    """

    at: float
    round: int
    clients: Mapping[str, int]
    refused: Mapping[str, str]
    until: Mapping[int, int]
    registered: frozenset[str] | None
    sightings: Mapping[str, Sighting] | None

    def names(self) -> list[str]:
        """All names, in order."""
        return sorted({*self.clients, *self.refused, *(self.registered or ()), *(self.sightings or ())})

    def standing(self, name: str) -> NodeStanding:
        """What a node is, without its replies."""
        client, sighting = self.clients.get(name), (self.sightings or {}).get(name)
        state, doing, since = self._doing(name, client, sighting)
        return NodeStanding(name, client, state, doing, since, sighting)

    def _doing(self, name: str, client: int | None, sighting: Sighting | None) -> tuple[NodeState, str, float | None]:
        """A node's state, that in words, and since when it has it."""
        if self.registered is not None and name not in self.registered:
            return "takes no part", "its key is revoked, or was never registered", None
        if client is None and name in self.refused:
            return "takes no part", self.refused[name], None
        if client is not None and (until := self.until.get(client, 0)) >= max(1, self.round):
            work = f"; {self._work(sighting.work)}" if sighting and sighting.work else ""
            return "set aside", f"is not drawn up to round {until}, since it was late too often{work}", None
        if self.sightings is None:
            return "not known", "a SuperLink that is not ours serves it", None
        if sighting is None:
            return "never seen", "has not come since this server began", None
        if sighting.left or self.at - sighting.last > AWAY_AFTER:
            return "away", "has left" if sighting.left else "says nothing any more", sighting.last
        if sighting.work is not None:
            return "at work", self._work(sighting.work), sighting.since
        if client is None and self.clients:
            return "takes no part", "came when the run had begun; may take part in the next one", None
        return "idle", self._waiting(sighting), None

    def _work(self, group: str) -> str:
        past = group.isdecimal() and int(group) < self.round
        return _DOING.get(group, f"works on round {group}{', which went on without it' if past else ''}")

    def _waiting(self, sighting: Sighting) -> str:
        """What an idle node waits for."""
        if not self.clients:
            return "waits for the run to begin"
        others = self._at_work.get(sighting.answered or "", [])
        if sighting.answered == str(self.round):
            done = f"has answered in round {self.round}"
        elif others:
            done = "has evaluated its model"
        else:
            return "waits to be asked"
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        return f"{done}; waits for {', '.join(others[:_NAMED])}{more}" if others else done

    @cached_property
    def _at_work(self) -> Mapping[str, list[str]]:
        """By the group of a message, the names of those that are at work on it, in order."""
        found: dict[str, list[str]] = {}
        for name, sighting in sorted((self.sightings or {}).items()):
            if sighting.work is not None:
                found.setdefault(sighting.work, []).append(name)
        return found
