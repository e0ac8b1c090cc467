"""Nodes that take no part are told so, and why, for their owners' terminals."""

import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import ClassVar

from flwr.app import Message
from flwr.serverapp import Grid

from potluck.core.federation import ClientId
from potluck.engine.answers.events import ClientEnd
from potluck.experiment.watching.observers import Observer, RoundStart, RunEnd, RunStart
from potluck.flower import FAREWELL, REFUSAL
from potluck.flower.server.nodes import registered_name
from potluck.flower.server.pulling import Pulling
from potluck.flower.wire.envelope import wrap
from potluck.records import RoundRecord

_FAREWELL_WITHIN = 10.0  # seconds; nodes look for messages every three at the least
_HEARD_WITHIN = 3600.0  # seconds; a node that is late hears of it when it has finished
_NOT_DRAWN, _ASIDE, _TOO_LATE = "not drawn", "set aside", "came too late"


class Telling(Observer):
    """Tells each node once why nothing is asked of it, until something is; and all of them when the run has ended.

    Args:
        grid: Flower's.
        names: by client, the name of its node.
        run: the run's name at the nodes.
        slow: what is said of a client that is set aside.
        refused: the names of nodes that have been told already why they take no part in the run.
    """

    may_fail: ClassVar[bool] = True

    def __init__(
        self, grid: Grid, names: Mapping[ClientId, str], run: str, slow: str, refused: Iterable[str] = ()
    ) -> None:
        self._grid, self._names, self._run, self._slow = grid, names, run, slow
        self._told = dict.fromkeys(refused, _TOO_LATE)  # by node, what it was told last
        self._aside: dict[ClientId, int] = {}
        self._answering: set[ClientId] = set()
        self._replies = ExitStack()

    def on_run_start(self, event: RunStart) -> None:
        """Know who was set aside before."""
        for record in event.earlier():
            self._set_aside(record)

    def on_round_start(self, event: RoundStart) -> None:
        """Tell those who are not drawn, and those who came when the run had begun."""
        why: dict[str, tuple[str, str]] = {}
        for client, name in self._names.items():
            if client in event.cohort or not event.cohort:
                self._told.pop(name, None)
            elif (until := self._aside.get(client, 0)) >= event.round:
                why[name] = _ASIDE, f"set aside up to round {until}, since {self._slow}"
            else:
                why[name] = _NOT_DRAWN, f"not drawn for round {event.round}, but perhaps for a later one"
        known = set(self._names.values())
        for name in {registered_name(node) for node in self._grid.get_nodes()} - known:
            why[name] = _TOO_LATE, "the run began without it; it may take part in the next one"
        news = {name: words for name, (what, words) in why.items() if self._told.get(name) != what}
        self._told |= {name: what for name, (what, _) in why.items()}
        if news:
            self._tell(news)

    def on_client_end(self, event: ClientEnd) -> None:
        """Remember who answers."""
        if event.failure is None:
            self._answering.add(event.client)
        else:
            self._answering.discard(event.client)

    def on_round_end(self, event: RoundRecord) -> None:
        """Remember who is set aside."""
        self._set_aside(event)

    def on_run_end(self, event: RunEnd) -> None:
        """Tell everybody that it is over, and wait a moment for those to hear it who have answered lately."""
        if event.error is not None and not isinstance(event.error, Exception):
            return  # whoever interrupts it does not wait, may go on with it, and has ended the SuperLink before
        how = "the run has ended" if event.status == "finished" else "the run has ended early; it may go on later"
        awaited = {self._names[client] for client in self._answering if client in self._names}
        others = set(self._names.values()) - awaited
        self._tell(dict.fromkeys(others, how))
        for _ in self._tell(dict.fromkeys(awaited, how)).until(time.monotonic() + _FAREWELL_WITHIN):
            pass
        self._replies.close()

    def _set_aside(self, record: RoundRecord) -> None:
        self._aside |= {int(client): until for client, until in (record.set_aside or {}).items()}

    def _tell(self, why: Mapping[str, str]) -> Pulling:
        """Tell nodes; their empty replies are awaited by what is returned, until it is told something else."""
        numbers = tell_nodes(self._grid, why, self._run)
        self._replies.close()
        return self._replies.enter_context(Pulling(self._grid, dict.fromkeys(numbers, 0), poll=1.0))


def tell_nodes(grid: Grid, why: Mapping[str, str], run: str) -> list[str]:
    """Tell nodes, by name, that they take no part in a run, and why; return the numbers of the messages."""
    messages = [
        Message(wrap({"run": run, "why": why[name]}), node.node_id, REFUSAL, ttl=_HEARD_WITHIN, group_id=FAREWELL)
        for node in grid.get_nodes()
        if (name := registered_name(node)) in why
    ]
    return list(filter(None, grid.push_messages(messages))) if messages else []
