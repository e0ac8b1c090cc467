"""An executor whose clients are Flower's nodes: sends messages, and waits until each has answered or failed."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from flwr.app import Message

from potluck.core.federation import ClientId
from potluck.core.ground.errors import WireError
from potluck.core.ground.text import ON_SCREEN
from potluck.core.roles import Failure, FailureKind
from potluck.engine.client.runtime import ClientRuntime, EvalRequest, Outcome
from potluck.engine.client.session import Answer, Call
from potluck.engine.executors import OneByOne, Pending
from potluck.engine.executors.held import Held
from potluck.engine.rounds.sums import SECURE_SUMS
from potluck.experiment.settings.schema import RoundsClose
from potluck.flower import EVALUATION, JOB, LARGEST_REPLY
from potluck.flower.server.nodes import ABSENT, Nodes, longest
from potluck.flower.server.pulling import Pulling
from potluck.flower.wire.envelope import packed_payload, unwrap, wrap
from potluck.flower.wire.schemas import NodeJob, SumsStep, from_job, to_outcome
from potluck.twin.timeline import Closing

log = logging.getLogger(__name__)
_WATCH_EVERY = 5.0  # seconds between checks for nodes that were restarted or have left
_STALLED = 5.0  # seconds in which nothing more comes of a reply, after which it is over if its node has left
_REASONS = {
    1: "its app could not be loaded",
    2: "its app raised",
    3: "its reply is lost or came too late",
    4: "its reply came too late",
    5: "its node is gone",
    8: "its process died",
}

_RESTARTED = "its node was restarted in the middle of the job"
_BROKEN_OFF = "its node left before all of its reply had come"
_MIXED_UP = {
    True: "its node sent an evaluation in answer to a call",
    False: "its node sent a reply in answer to an evaluation request",
}


@dataclass(frozen=True)
class NodeTask:
    """A job for a node that is no part of an engine's exchange, such as a step of secure sums; see `Pending`."""

    job: NodeJob
    most_bytes: int

    def make(self) -> NodeJob:
        """The job."""
        return self.job

    def arrived(self, outcome: Outcome) -> None:
        """Nobody else waits for it."""


Tasks = Sequence[Pending] | Sequence[NodeTask]


class GridExecutor(OneByOne):
    """Sends each job to its client's node.

    A client's state stays at its node. The server knows its name and puts it into the next job, so that a node
    continues from the state that the server has accepted, even if the server was set back to an earlier round.

    Args:
        nodes: which node is which client.
        header: what every node needs to know to carry out jobs.
        close: when an exchange closes.
        poll: seconds between polls.
        largest: the most bytes of a reply, where the method sets no limit.
    """

    trusted = False

    def __init__(
        self,
        nodes: Nodes,
        header: Mapping[str, Any],
        close: RoundsClose,
        poll: float = 0.25,
        largest: int = LARGEST_REPLY,
    ) -> None:
        self._nodes = nodes
        self._header = header
        self._close = close
        self._poll = poll
        self._largest = largest
        self._late = _Late(nodes)
        self._alone = _Alone(nodes, poll)

    def absent(self, clients: Iterable[ClientId]) -> Mapping[ClientId, str]:
        """Those whose nodes are not online, or still at work on a job that was given up; with the nodes' names."""
        self._nodes.refresh()
        busy, names = self._late.clients(), self._nodes.names
        return {client: names[client] for client in clients if client in busy or self._nodes.find(client) is None}

    def run(self, host: ClientRuntime, tasks: Sequence[Pending]) -> Iterator[Outcome]:
        """One outcome for each task, in the order of the tasks; anything wrong or missing is that node's failure."""
        return self._outcomes(host.full_name, self._close, tasks)

    def steps(self, tasks: Sequence[NodeTask], needed: int) -> Iterator[Outcome]:
        """One outcome for each step of secure sums; closed early only if so many have answered as are needed."""
        return self._outcomes(str, replace(self._close, quorum=needed, over_select=0), tasks)

    def _outcomes(self, full_name: Callable[[str], str], close: RoundsClose, tasks: Tasks) -> Iterator[Outcome]:
        self._nodes.refresh()
        exchange = _Exchange(self._nodes, full_name, close, tasks, self._late, self._largest)
        exchange.send(self._header)
        exchange.wait(self._poll)
        return (exchange.outcomes.pop(place) for place in range(len(tasks)))

    def begin(self, host: ClientRuntime, task: Pending) -> None:
        """Send a job, whose outcome `ended` gives."""
        self._nodes.refresh()
        exchange = _Exchange(self._nodes, host.full_name, self._close, [task], self._late, self._largest)
        exchange.send(self._header)
        self._alone.add(exchange)

    def ended(self, within_s: float) -> Outcome | None:
        """The outcome of a job that was sent by `begin`; anything wrong or missing is that node's failure."""
        return self._alone.first(within_s)

    def close(self) -> None:
        """Listen to nobody any more."""
        self._late.close()
        self._alone.close()


@dataclass
class _Sent:
    """A job that is waiting for its outcome."""

    place: int
    job: NodeJob
    started: float | None
    most_bytes: int


class _Exchange:
    """The jobs of one exchange."""

    def __init__(
        self,
        nodes: Nodes,
        full_name: Callable[[str], str],
        close: RoundsClose,
        tasks: Tasks,
        late: "_Late",
        largest: int,
    ) -> None:
        self.outcomes = Held(lambda place, outcome: tasks[place].arrived(outcome))
        self._tasks = tasks
        self._nodes = nodes
        self._full_name = full_name
        self._largest = largest
        self._quorum = min(close.quorum, len(tasks))
        self._over_select = close.over_select
        self._enough = len(tasks)
        self._late = late
        self._answers = 0
        self._longest = longest(close)
        self._began = time.monotonic()
        self._deadline = self._began + close.deadline_s
        self._out: dict[str, _Sent] = {}

    def send(self, header: Mapping[str, Any]) -> None:
        """Push the jobs, consecutive ones with the same payload together; at most two payloads are in memory."""
        jobs = enumerate(task.make() for task in self._tasks)
        for _, alike in groupby(jobs, key=lambda placed: id(placed[1].payload)):
            self._push(dict(alike), header, {place: task.most_bytes for place, task in enumerate(self._tasks)})

    def _push(
        self, jobs: Mapping[int, NodeJob], header: Mapping[str, Any], most_bytes: Mapping[int, int | None]
    ) -> None:
        """Push jobs with the same payload."""
        first = next(iter(jobs.values()))
        if isinstance(first, Call):  # an evaluation is of all
            self._enough = Closing(over_select=self._over_select).enough(len(self._tasks))
        payload = packed_payload(first.payload)
        going: list[tuple[int, NodeJob]] = []
        busy = self._late.clients()
        messages: list[Message] = []
        for place, job in jobs.items():
            node, name = self._nodes.find(job.client), self._nodes.names[job.client]
            if node is None or job.client in busy:
                late = node is not None
                why = f"its node {name} {'is still at work on a job that was given up' if late else 'is not online'}"
                self.outcomes[place] = self._failure(job, why, kind="absence", late=late)
                continue
            content = wrap(from_job(job, header)[0], payload)
            messages.append(Message(content, node, JOB, ttl=self._longest, group_id=_group(job)))
            going.append((place, job))
        pushed = list(self._nodes.grid.push_messages(messages)) if messages else []
        numbers = pushed or [""] * len(messages)  # none, if one is too large
        for (place, job), number in zip(going, numbers, strict=True):
            if number:
                most = most_bytes[place] or self._largest
                self._out[number] = _Sent(place, _without_payload(job), self._nodes.started(job.client), most)
            else:
                self.outcomes[place] = self._failure(job, "the SuperLink did not take the message")

    @property
    def awaited(self) -> dict[str, int]:
        """By number of its message, the most bytes of each answer that has not come."""
        return {number: sent.most_bytes for number, sent in self._out.items()}

    def hear(self, number: str, reply: Message | WireError) -> Outcome:
        """The outcome in the reply to a message."""
        sent = self._out.pop(number)
        return self._outcome(sent.job, reply, sent.most_bytes)

    def give_up(self, number: str, pulling: Pulling) -> Outcome | None:
        """The failure of a job that nobody is at work on, or too long; None if it is neither."""
        sent, waited = self._out[number], time.monotonic() - self._began
        if why := _abandoned(self._nodes, pulling, number, sent):
            return self._failure(sent.job, why, unheard=True, kind="absence")
        if waited >= self._longest:
            return self._failure(sent.job, f"no answer within {waited:.0f} s", unheard=True)
        return None

    def wait(self, poll: float) -> None:
        """Wait until every job has an outcome, or the deadline has passed and a quorum has answered."""
        told = False
        with ExitStack() as stack:
            pulling = stack.enter_context(Pulling(self._nodes.grid, self.awaited, poll))
            while self._out:
                for number, reply in pulling.until(self._next_look()):
                    sent = self._out.pop(number)
                    outcome = self._outcome(sent.job, reply, sent.most_bytes)
                    self._answers += not isinstance(outcome, Failure)
                    self.outcomes[sent.place] = outcome
                    if self._may_close():
                        break
                if self._out and self._may_close():
                    self._late.add(stack.pop_all(), pulling, self._out)
                    for number in list(self._out):
                        self._fail(number, f"no answer within {time.monotonic() - self._began:.0f} s", late=True)
                elif self._out:
                    if not told and time.monotonic() >= self._deadline:
                        self._tell_who_is_late()
                        told = True
                    self._nodes.refresh()
                    self._fail_abandoned(pulling)

    def _next_look(self) -> float:
        """When to look at the nodes themselves."""
        now = time.monotonic()
        return min(now + _WATCH_EVERY, self._deadline if now < self._deadline else self._began + self._longest)

    def _may_close(self) -> bool:
        """Whether enough have answered; or the deadline has passed, and a quorum has, or cannot any more."""
        now = time.monotonic()
        if self._answers >= self._enough:
            return True
        decided = not 0 < self._quorum - self._answers <= len(self._out)
        return now >= self._began + self._longest or (now >= self._deadline and decided)

    def _tell_who_is_late(self) -> None:
        late = ", ".join(sorted(self._nodes.names[sent.job.client] for sent in self._out.values()))
        log.warning(
            "%d of %d nodes have answered within %.0f s, and %d are needed; waiting for %s",
            *(self._answers, len(self._tasks), self._deadline - self._began, self._quorum, late),
            extra=ON_SCREEN,
        )

    def _fail_abandoned(self, pulling: Pulling) -> None:
        """Fail the jobs of nodes that were restarted, or have left while they replied."""
        for number, sent in list(self._out.items()):
            if why := _abandoned(self._nodes, pulling, number, sent):
                pulling.forget(number)
                self._fail(number, why, kind="absence")

    def _fail(self, number: str, reason: str, *, kind: FailureKind = "error", late: bool = False) -> None:
        sent = self._out.pop(number)
        self.outcomes[sent.place] = self._failure(sent.job, reason, unheard=True, kind=kind, late=late)

    def _outcome(self, job: NodeJob, reply: Message | WireError, most_bytes: int) -> Outcome:
        """The outcome in a reply, if it answers this job with no more bytes than its answer may have."""
        if isinstance(reply, WireError):
            return self._failure(job, str(reply))
        if reply.has_error():
            reason = _REASONS.get(reply.error.code, f"error {reply.error.code}")
            kind: FailureKind = "absence" if reply.error.code in ABSENT else "error"
            return self._failure(job, f"{reason}: {reply.error.reason}", unheard=True, kind=kind)
        try:
            outcome = to_outcome(unwrap(reply.content))
        except WireError as error:
            return self._failure(job, str(error), unheard=True)
        if outcome.client != job.client:
            return self._failure(job, f"its node answers for client {outcome.client}", unheard=True)
        if isinstance(outcome, Failure):
            return replace(outcome, handler=self._name(job))
        if isinstance(outcome, Answer) == isinstance(job, EvalRequest):
            return self._failure(job, _MIXED_UP[not isinstance(job, EvalRequest)], unheard=True)
        if (length := len(outcome.payload)) > most_bytes:
            return self._failure(job, f"its answer has {length} bytes; expected at most {most_bytes}", unheard=True)
        return outcome

    def _failure(
        self, job: NodeJob, reason: str, *, unheard: bool = False, kind: FailureKind = "error", late: bool = False
    ) -> Failure:
        return Failure(job.client, self._name(job), reason, unheard=unheard, kind=kind, late=late)

    def _name(self, job: NodeJob) -> str:
        """The handler that was called, by the server's own account."""
        if isinstance(job, SumsStep):
            return SECURE_SUMS
        return self._full_name(job.handler) if isinstance(job, Call) else "evaluation"


class _Alone:
    """Jobs that were sent one by one, each of which ends when its reply has come.

    Args:
        nodes: which node is which client.
        poll: seconds between polls for one reply; longer if many are awaited.
    """

    def __init__(self, nodes: Nodes, poll: float) -> None:
        self._nodes, self._poll = nodes, poll
        self._listening = ExitStack()
        self._pulling: Pulling | None = None
        self._out: dict[str, _Exchange] = {}
        self._ended = deque[Outcome]()
        self._looks_at = 0.0

    def add(self, exchange: _Exchange) -> None:
        """Wait for the answer of an exchange with one job."""
        self._ended += exchange.outcomes.values()  # of a job that could not be sent
        if self._pulling is None:
            self._pulling = self._listening.enter_context(Pulling(self._nodes.grid, {}, self._poll))
        for number, most_bytes in exchange.awaited.items():
            self._out[number] = exchange
            self._pulling.add(number, most_bytes)

    def first(self, within_s: float) -> Outcome | None:
        """The outcome of the job that ends first, each once; None if none ends within so many seconds."""
        if self._pulling is None:
            return None
        self._give_up(self._pulling)
        if not self._ended:
            for number, reply in self._pulling.until(time.monotonic() + within_s):
                return self._out.pop(number).hear(number, reply)
        return self._ended.popleft() if self._ended else None

    def _give_up(self, pulling: Pulling) -> None:
        """Fail the jobs that nobody answers any more, now and then."""
        if (now := time.monotonic()) < self._looks_at:
            return
        self._looks_at = now + _WATCH_EVERY
        self._nodes.refresh()
        for number, exchange in list(self._out.items()):
            if (failure := exchange.give_up(number, pulling)) is not None:
                pulling.forget(number)
                del self._out[number]
                self._ended.append(failure)

    def close(self) -> None:
        """Wait for no reply any more."""
        self._listening.close()
        self._pulling = None
        self._out.clear()
        self._ended.clear()


class _Late:
    """Jobs that were given up while their nodes were at work on them, until the nodes are done.

    Flower cannot call a job back. A node that got the next one too would fall further behind with every exchange.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._out: list[tuple[ExitStack, Pulling, dict[str, _Sent]]] = []

    def add(self, stack: ExitStack, pulling: Pulling, late: Mapping[str, _Sent]) -> None:
        """Note jobs, whose replies `pulling` waits for until `stack` is closed."""
        self._out.append((stack, pulling, dict(late)))

    def clients(self) -> set[ClientId]:
        """Whose nodes are at work on such jobs, as they were when `nodes` was last refreshed."""
        for stack, pulling, late in self._out:
            done = [number for number, _ in pulling.until(time.monotonic())]
            done += [number for number, sent in late.items() if _abandoned(self._nodes, pulling, number, sent)]
            for number in done:
                pulling.forget(number)
                late.pop(number, None)
            if not late:
                stack.close()
        self._out = [waiting for waiting in self._out if waiting[2]]
        return {sent.job.client for _, _, late in self._out for sent in late.values()}

    def close(self) -> None:
        """Wait for no reply any more."""
        for stack, _, _ in self._out:
            stack.close()
        self._out.clear()


def _abandoned(nodes: Nodes, pulling: Pulling, number: str, sent: _Sent) -> str | None:
    """Why nobody is at work on a job any more; None if somebody is, or Flower says so itself.

    A restarted node has forgotten it, and Flower does not deliver it again. Of a reply that a node announces and then
    does not send Flower says nothing for three minutes.
    """
    client = sent.job.client
    if nodes.restarted(client, sent.started):
        return _RESTARTED
    has_left = nodes.find(client) is None
    return _BROKEN_OFF if has_left and pulling.stalled_s(number) > _STALLED else None


def _group(job: NodeJob) -> str:
    """The group of a job's message, which Flower's logs call the round."""
    return EVALUATION if isinstance(job, EvalRequest) else str(job.round)


def _without_payload(job: NodeJob) -> NodeJob:
    return replace(job, payload=b"")
