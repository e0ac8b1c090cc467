"""An executor whose clients are Flower's nodes: a message each, then patience until all answered, fail or are late."""

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
from potluck.flower import EVALUATION, JOB
from potluck.flower.server.nodes import Nodes
from potluck.flower.server.pulling import LONGEST_REPLY, Pulling
from potluck.flower.wire.envelope import packed, unwrap, wrap
from potluck.flower.wire.schemas import from_job, to_outcome

_WATCH_EVERY = 5.0  # seconds between looks at who has been started anew
_REASONS = {
    1: "its app could not be loaded",
    2: "its app raised",
    3: "its reply is lost or came too late",
    4: "its reply came too late",
    5: "its node is gone",
    8: "its process died",
}

_MIXED_UP = {
    True: "its node evaluates its model where it was called",
    False: "its node answers a call that nobody made",
}


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

    trusted = False

    def __init__(self, nodes: Nodes, words: Mapping[str, Any], timeout: float, poll: float = 0.25) -> None:
        self._nodes = nodes
        self._words = words
        self._timeout = timeout
        self._poll = poll

    def run(self, host: ClientRuntime, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """One outcome a task, in the order of the tasks; whatever a node sends or does not send is its own failure."""
        self._nodes.refresh()
        exchange = _Exchange(self._nodes, host, self._timeout)
        exchange.send(tasks, self._words)
        exchange.wait(self._poll)
        return (exchange.outcomes.pop(place) for place in range(len(tasks)))


@dataclass
class _Sent:
    """A job on its way."""

    place: int
    job: Job
    started: float | None
    most_bytes: int


class _Exchange:
    """Jobs that are out together."""

    def __init__(self, nodes: Nodes, host: ClientRuntime, timeout: float) -> None:
        self.outcomes = Held()
        self._nodes = nodes
        self._host = host
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._out: dict[str, _Sent] = {}

    def send(self, tasks: Sequence[Task], words: Mapping[str, Any]) -> None:
        """Push the jobs, those in a row with the same payload together; no more than two payloads are in memory."""
        jobs = enumerate(task.make() for task in tasks)
        for _, alike in groupby(jobs, key=lambda placed: id(placed[1].payload)):
            self._push(dict(alike), words, {place: task.most_bytes for place, task in enumerate(tasks)})

    def _push(self, jobs: Mapping[int, Job], words: Mapping[str, Any], most_bytes: Mapping[int, int | None]) -> None:
        """Push jobs with the same payload."""
        payload = packed(next(iter(jobs.values())).payload)
        going: list[tuple[int, Job]] = []
        messages: list[Message] = []
        for place, job in jobs.items():
            node = self._nodes.find(job.client)
            if node is None:
                self.outcomes[place] = self._failure(job, f"its node {self._nodes.names[job.client]} is not online")
                continue
            content = wrap(from_job(job, words)[0], payload)
            messages.append(Message(content, node, JOB, ttl=self._timeout, group_id=_group(job)))
            going.append((place, job))
        numbers = list(self._nodes.grid.push_messages(messages)) or [""] * len(messages)  # none, if one is too large
        for (place, job), number in zip(going, numbers, strict=True):
            if number:
                longest = most_bytes[place] or LONGEST_REPLY
                self._out[number] = _Sent(place, _without_payload(job), self._nodes.started(job.client), longest)
            else:
                self.outcomes[place] = self._failure(job, "the SuperLink did not take the message")

    def wait(self, poll: float) -> None:
        """Until every job has an outcome."""
        with Pulling(
            self._nodes.grid, {number: sent.most_bytes for number, sent in self._out.items()}, poll
        ) as pulling:
            while self._out:
                for number, reply in pulling.until(min(self._deadline, time.monotonic() + _WATCH_EVERY)):
                    sent = self._out.pop(number)
                    self.outcomes[sent.place] = self._outcome(sent.job, reply)
                if time.monotonic() >= self._deadline:
                    self._give_up(lambda sent: f"no answer within {self._timeout:.0f} s", pulling)
                elif self._out:
                    self._nodes.refresh()
                    self._give_up(self._started_anew, pulling)

    def _started_anew(self, sent: _Sent) -> str | None:
        """A node that was started anew has forgotten its job, and Flower does not bring it again."""
        started = self._nodes.started(sent.job.client)
        if started is None or sent.started is None or started <= sent.started:
            return None
        return "its node was started anew in the middle of the job"

    def _give_up(self, why: Callable[[_Sent], str | None], pulling: Pulling) -> None:
        for number, sent in list(self._out.items()):
            if (reason := why(sent)) is not None:
                pulling.forget(number)
                del self._out[number]
                self.outcomes[sent.place] = self._failure(sent.job, reason, unheard=True)

    def _outcome(self, job: Job, reply: Message | WireError) -> Outcome:
        """What a reply says, if it is one to this job."""
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
        return outcome

    def _failure(self, job: Job, reason: str, *, unheard: bool = False) -> Failure:
        return Failure(job.client, self._name(job), reason, unheard=unheard)

    def _name(self, job: Job) -> str:
        """What was asked of the client; never what its node says."""
        return self._host.full_name(job.handler) if isinstance(job, Call) else "evaluation"


def _group(job: Job) -> str:
    """What Flower's logs are to call a job's round."""
    return str(job.round) if isinstance(job, Call) else EVALUATION


def _without_payload(job: Job) -> Job:
    return replace(job, payload=b"")
