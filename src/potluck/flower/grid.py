"""An executor whose clients are Flower's nodes: a message each, then patience until all answered, fail or are late."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from potluck.core.errors import PotluckError, WireError
from potluck.core.federation import ClientId
from potluck.core.roles import Failure
from potluck.engines.executors import Executor, Task
from potluck.engines.host import ClientHost, Job, Outcome
from potluck.engines.session import Call, ContractError
from potluck.flower import GREETING, HELLO, JOB, JUDGING
from potluck.flower.parcel import unwrap, wrap
from potluck.flower.wire import from_job, round_of, to_outcome

_WATCH_EVERY = 5.0  # seconds between looks at who has been started anew
_REASONS = {
    1: "its app could not be loaded",
    2: "its app raised",
    3: "its reply is lost or came too late",
    4: "its reply came too late",
    5: "its node is gone",
    8: "its process died",
}


class NodesMissing(PotluckError):
    """Fewer nodes than clients have come."""


@dataclass
class Nodes:
    """Which node is which client, by the names that nodes are registered with.

    Attributes:
        names: of the clients' nodes, by client; never changes during a run.
    """

    grid: Grid
    names: Mapping[ClientId, str]
    _online: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])

    def refresh(self) -> None:
        """Look who is there."""
        self._online = {name_of(node): (node.node_id, _started(node)) for node in self.grid.get_nodes()}

    def find(self, client: ClientId) -> int | None:
        """The number that Flower calls the client's node by now; None while it is away."""
        found = self._online.get(self.names[client])
        return found[0] if found else None

    def started(self, client: ClientId) -> float | None:
        """When it came, on its server's clock."""
        found = self._online.get(self.names[client])
        return found[1] if found else None


def name_of(node: Any) -> str:
    """The name that a node was registered with; without keys, its number."""
    return getattr(node, "name", "") or str(node.node_id)


def wait_for_nodes(grid: Grid, wanted: int | Collection[str], patience: float, say: Callable[[str], None]) -> list[str]:
    """Names of nodes that are there, in order.

    Args:
        grid: Flower's.
        wanted: how many, whoever they are, or their names.
        patience: seconds.
        say: told of the waiting.

    Raises:
        NodesMissing: patience ends before they have come.
    """
    count = wanted if isinstance(wanted, int) else len(wanted)
    deadline, told = time.monotonic() + patience, -1
    while True:
        names = sorted(name_of(node) for node in grid.get_nodes())
        names = names if isinstance(wanted, int) else [name for name in names if name in wanted]
        if len(names) >= count:
            return names[:count]
        if time.monotonic() > deadline:
            raise NodesMissing(
                f"{len(names)} of {count} nodes came within {patience:.0f} s: {', '.join(names) or 'none'}"
            )
        if len(names) != told:
            away = "" if isinstance(wanted, int) else f"; missing: {', '.join(sorted(set(wanted) - set(names)))}"
            say(f"{len(names)} of {count} nodes are here{away}")
            told = len(names)
        time.sleep(1.0)


class GridExecutor(Executor):
    """Sends each job to its client's node.

    What a client keeps stays with its node. The server knows it by a name, which the next job brings, so that a node
    goes on from what the server has accepted, also when the server was set back to an earlier round.

    Args:
        nodes: who is who.
        words: what every node has to know to carry out jobs.
        timeout: seconds until a job that is not answered counts as failed.
        poll: seconds between looks.
    """

    def __init__(self, nodes: Nodes, words: Mapping[str, Any], timeout: float, poll: float = 0.25) -> None:
        self._nodes = nodes
        self._words = words
        self._timeout = timeout
        self._poll = poll

    def run(self, host: ClientHost, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """One outcome a task, in the order of the tasks.

        Raises:
            ContractError: a node says that the method broke its contract.
        """
        self._nodes.refresh()
        exchange = _Exchange(self._nodes, host, self._timeout)
        for place, task in enumerate(tasks):
            exchange.send(place, task.make(), self._words)
        exchange.wait(self._poll)
        return iter([exchange.outcomes[place] for place in range(len(tasks))])


@dataclass
class _Sent:
    """A job on its way."""

    place: int
    job: Job
    started: float | None


class _Exchange:
    """Jobs that are out together."""

    def __init__(self, nodes: Nodes, host: ClientHost, timeout: float) -> None:
        self.outcomes: dict[int, Outcome] = {}
        self._nodes = nodes
        self._host = host
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._out: dict[str, _Sent] = {}

    def send(self, place: int, job: Job, words: Mapping[str, Any]) -> None:
        """Push one job; one at a time, so that not all messages are in memory at once."""
        node = self._nodes.find(job.client)
        if node is None:
            self.outcomes[place] = self._failure(job, f"its node {self._nodes.names[job.client]} is not online")
            return
        message = Message(wrap(*from_job(job, words)), node, JOB, ttl=self._timeout, group_id=_group(job))
        (number,) = self._nodes.grid.push_messages([message])
        if not number:
            self.outcomes[place] = self._failure(job, "the SuperLink did not take the message")
            return
        self._out[number] = _Sent(place, _without_payload(job), self._nodes.started(job.client))

    def wait(self, poll: float) -> None:
        """Until every job has an outcome."""
        watched = time.monotonic()
        while self._out:
            for reply in self._nodes.grid.pull_messages(list(self._out)):
                sent = self._out.pop(reply.metadata.reply_to_message_id, None)
                if sent is not None:
                    self.outcomes[sent.place] = self._outcome(sent.job, reply)
            now = time.monotonic()
            if now > self._deadline:
                self._give_up(lambda sent: f"no answer within {self._timeout:.0f} s")
            elif now - watched > _WATCH_EVERY:
                watched = now
                self._nodes.refresh()
                self._give_up(self._started_anew)
            if self._out:
                time.sleep(poll)

    def _started_anew(self, sent: _Sent) -> str | None:
        """A node that was started anew has forgotten its job, and Flower does not bring it again."""
        started = self._nodes.started(sent.job.client)
        if started is None or sent.started is None or started <= sent.started:
            return None
        return "its node was started anew in the middle of the job"

    def _give_up(self, why: Callable[[_Sent], str | None]) -> None:
        for number, sent in list(self._out.items()):
            if (reason := why(sent)) is not None:
                del self._out[number]
                self.outcomes[sent.place] = self._failure(sent.job, reason)

    def _outcome(self, job: Job, reply: Message) -> Outcome:
        if reply.has_error():
            reason = _REASONS.get(reply.error.code, f"error {reply.error.code}")
            return self._failure(job, f"{reason}: {reply.error.reason}")
        try:
            outcome = to_outcome(unwrap(reply.content))
        except WireError as error:
            return self._failure(job, str(error))
        if outcome.client != job.client:
            return self._failure(job, f"its node answers for client {outcome.client}")
        if isinstance(outcome, Failure) and outcome.reason.startswith(ContractError.__name__):
            raise ContractError(outcome.reason.partition(": ")[2])
        return outcome

    def _failure(self, job: Job, reason: str) -> Failure:
        handler = self._host.full_name(job.handler) if isinstance(job, Call) else "evaluation"
        return Failure(job.client, handler, reason)


def greet(nodes: Nodes, words: Mapping[str, Any], timeout: float) -> dict[ClientId, dict[str, Any]]:
    """Tell every node which client it is, and hear what it is made of.

    Raises:
        NodesMissing: one does not answer, or cannot take part.
    """
    nodes.refresh()
    asked: dict[str, ClientId] = {}
    for client in nodes.names:
        node = nodes.find(client)
        if node is not None:
            greeting = wrap({**words, "client": client})
            (number,) = nodes.grid.push_messages([Message(greeting, node, HELLO, ttl=timeout, group_id=GREETING)])
            asked[number] = client
    found: dict[ClientId, dict[str, Any]] = {}
    deadline = time.monotonic() + timeout
    while len(found) < len(nodes.names) and time.monotonic() < deadline:
        for reply in nodes.grid.pull_messages([number for number, client in asked.items() if client not in found]):
            client = asked[reply.metadata.reply_to_message_id]
            if reply.has_error():
                raise NodesMissing(f"node {nodes.names[client]}: {reply.error.reason}")
            found[client], _ = unwrap(reply.content)
            if "refusal" in found[client]:
                raise NodesMissing(f"node {nodes.names[client]}: {found[client]['refusal']}")
        time.sleep(0.1)
    if silent := [name for client, name in nodes.names.items() if client not in found]:
        raise NodesMissing(f"no answer from {', '.join(silent)} within {timeout:.0f} s")
    return found


def _group(job: Job) -> str:
    """What Flower's logs are to call a job's round."""
    return str(round_of(job)) if isinstance(job, Call) else JUDGING


def _started(node: Any) -> float:
    """When a node came, as a number that grows."""
    at = getattr(node, "last_activated_at", "")
    return float(at) if isinstance(at, (int, float)) else _seconds(str(at))


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp() if stamp else 0.0


def _without_payload(job: Job) -> Job:
    return replace(job, payload=b"")
