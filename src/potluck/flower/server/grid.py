"""An executor whose clients are Flower's nodes: sends messages, and waits until each node answers or fails."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from flwr.app import Message

from potluck.core.errors import WireError
from potluck.core.roles import Failure
from potluck.engine.client.runtime import ClientRuntime, Job, Outcome
from potluck.engine.client.session import Answer, Call
from potluck.engine.executors import Executor, Task
from potluck.engine.executors.held import Held
from potluck.flower import EVALUATION, JOB, LARGEST_REPLY
from potluck.flower.server.nodes import Nodes
from potluck.flower.server.pulling import Pulling
from potluck.flower.wire.envelope import packed, unwrap, wrap
from potluck.flower.wire.schemas import from_job, to_outcome

_WATCH_EVERY = 5.0  # seconds between checks for restarted nodes
_REASONS = {
    1: "its app could not be loaded",
    2: "its app raised",
    3: "its reply is lost or came too late",
    4: "its reply came too late",
    5: "its node is gone",
    8: "its process died",
}

_MIXED_UP = {
    True: "its node sent an evaluation in answer to a call",
    False: "its node sent a reply in answer to an evaluation request",
}


class GridExecutor(Executor):
    """Sends each job to its client's node.

    A client's state stays at its node. The server knows its name and puts it into the next job, so that a node
    continues from the state that the server has accepted, even if the server was set back to an earlier round.

    Args:
        nodes: which node is which client.
        header: what every node needs to know to carry out jobs.
        timeout: seconds until a job that is not answered counts as failed.
        poll: seconds between polls.
        largest: the most bytes of a reply, where the method sets no limit.
    """

    trusted = False

    def __init__(
        self,
        nodes: Nodes,
        header: Mapping[str, Any],
        timeout: float,
        poll: float = 0.25,
        largest: int = LARGEST_REPLY,
    ) -> None:
        self._nodes = nodes
        self._header = header
        self._timeout = timeout
        self._poll = poll
        self._largest = largest

    def run(self, host: ClientRuntime, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """One outcome for each task, in the order of the tasks; anything wrong or missing is that node's failure."""
        self._nodes.refresh()
        exchange = _Exchange(self._nodes, host, self._timeout, tasks, self._largest)
        exchange.send(self._header)
        exchange.wait(self._poll)
        return (exchange.outcomes.pop(place) for place in range(len(tasks)))


@dataclass
class _Sent:
    """A job that is waiting for its outcome."""

    place: int
    job: Job
    started: float | None
    most_bytes: int


class _Exchange:
    """The jobs of one exchange."""

    def __init__(self, nodes: Nodes, host: ClientRuntime, timeout: float, tasks: Sequence[Task], largest: int) -> None:
        self.outcomes = Held(lambda place, outcome: tasks[place].arrived(outcome))
        self._tasks = tasks
        self._nodes = nodes
        self._host = host
        self._timeout = timeout
        self._largest = largest
        self._deadline = time.monotonic() + timeout
        self._out: dict[str, _Sent] = {}

    def send(self, header: Mapping[str, Any]) -> None:
        """Push the jobs, consecutive ones with the same payload together; at most two payloads are in memory."""
        jobs = enumerate(task.make() for task in self._tasks)
        for _, alike in groupby(jobs, key=lambda placed: id(placed[1].payload)):
            self._push(dict(alike), header, {place: task.most_bytes for place, task in enumerate(self._tasks)})

    def _push(self, jobs: Mapping[int, Job], header: Mapping[str, Any], most_bytes: Mapping[int, int | None]) -> None:
        """Push jobs with the same payload."""
        payload = packed(next(iter(jobs.values())).payload)
        going: list[tuple[int, Job]] = []
        messages: list[Message] = []
        for place, job in jobs.items():
            node = self._nodes.find(job.client)
            if node is None:
                self.outcomes[place] = self._failure(job, f"its node {self._nodes.names[job.client]} is not online")
                continue
            content = wrap(from_job(job, header)[0], payload)
            messages.append(Message(content, node, JOB, ttl=self._timeout, group_id=_group(job)))
            going.append((place, job))
        numbers = list(self._nodes.grid.push_messages(messages)) or [""] * len(messages)  # none, if one is too large
        for (place, job), number in zip(going, numbers, strict=True):
            if number:
                longest = most_bytes[place] or self._largest
                self._out[number] = _Sent(place, _without_payload(job), self._nodes.started(job.client), longest)
            else:
                self.outcomes[place] = self._failure(job, "the SuperLink did not take the message")

    def wait(self, poll: float) -> None:
        """Wait until every job has an outcome."""
        with Pulling(
            self._nodes.grid, {number: sent.most_bytes for number, sent in self._out.items()}, poll
        ) as pulling:
            while self._out:
                for number, reply in pulling.until(min(self._deadline, time.monotonic() + _WATCH_EVERY)):
                    sent = self._out.pop(number)
                    self.outcomes[sent.place] = self._outcome(sent.job, reply, sent.most_bytes)
                if time.monotonic() >= self._deadline:
                    self._give_up(lambda sent: f"no answer within {self._timeout:.0f} s", pulling)
                elif self._out:
                    self._nodes.refresh()
                    self._give_up(self._started_anew, pulling)

    def _started_anew(self, sent: _Sent) -> str | None:
        """Fail the jobs of restarted nodes, which have forgotten them; Flower does not deliver them again."""
        started = self._nodes.started(sent.job.client)
        if started is None or sent.started is None or started <= sent.started:
            return None
        return "its node was restarted in the middle of the job"

    def _give_up(self, why: Callable[[_Sent], str | None], pulling: Pulling) -> None:
        for number, sent in list(self._out.items()):
            if (reason := why(sent)) is not None:
                pulling.forget(number)
                del self._out[number]
                self.outcomes[sent.place] = self._failure(sent.job, reason, unheard=True)

    def _outcome(self, job: Job, reply: Message | WireError, most_bytes: int) -> Outcome:
        """The outcome in a reply, if it answers this job with no more bytes than its answer may have."""
        if isinstance(reply, WireError):
            return self._failure(job, str(reply))
        if reply.has_error():
            reason = _REASONS.get(reply.error.code, f"error {reply.error.code}")
            return self._failure(job, f"{reason}: {reply.error.reason}", unheard=True)
        try:
            outcome = to_outcome(unwrap(reply.content))
        except WireError as error:
            return self._failure(job, str(error), unheard=True)
        if outcome.client != job.client:
            return self._failure(job, f"its node answers for client {outcome.client}", unheard=True)
        if isinstance(outcome, Failure):
            return replace(outcome, handler=self._name(job))
        if isinstance(outcome, Answer) != isinstance(job, Call):
            return self._failure(job, _MIXED_UP[isinstance(job, Call)], unheard=True)
        if (length := len(outcome.payload)) > most_bytes:
            return self._failure(job, f"its answer has {length} bytes; expected at most {most_bytes}", unheard=True)
        return outcome

    def _failure(self, job: Job, reason: str, *, unheard: bool = False) -> Failure:
        return Failure(job.client, self._name(job), reason, unheard=unheard)

    def _name(self, job: Job) -> str:
        """The handler that was called, by the server's own account."""
        return self._host.full_name(job.handler) if isinstance(job, Call) else "evaluation"


def _group(job: Job) -> str:
    """The group of a job's message, which Flower's logs call the round."""
    return str(job.round) if isinstance(job, Call) else EVALUATION


def _without_payload(job: Job) -> Job:
    return replace(job, payload=b"")
