"""An executor some of whose clients lie."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from potluck.attackers.replies import Change, alie, alie_z, changed, free_rider, layout_of, noise, scaled, sign_flip
from potluck.attackers.settings import Attackers
from potluck.core.federation import ClientId
from potluck.core.message import Message
from potluck.engine.client.runtime import ClientRuntime, Job, Outcome
from potluck.engine.client.session import Answer, Call
from potluck.engine.executors import Executor, Pending


class Misled(Executor):
    """Has clients answer as another executor does, and liars something else.

    Liars work as honest clients do, so what they keep is what an honest client keeps.

    Args:
        inner: carries out the work.
        attackers: how they lie.
        liars: who they are.
    """

    def __init__(self, inner: Executor, attackers: Attackers, liars: Collection[ClientId]) -> None:
        self._inner, self._attackers, self._liars = inner, attackers, frozenset(liars)
        self.trusted = inner.trusted

    def start(self, host: ClientRuntime) -> None:
        """Prepare the inner executor."""
        self._inner.start(host)

    def run(self, host: ClientRuntime, tasks: Sequence[Pending]) -> Iterator[Outcome]:
        """One outcome a task, in the order of the tasks; those of a group of liars are made up together."""
        calls: dict[ClientId, Call] = {}
        noted = [replace(task, make=partial(self._noted, task, calls)) for task in tasks]
        outcomes = self._inner.run(host, noted)
        if self._attackers.kind == "alie":
            yield from self._together(list(outcomes), calls)
            return
        for outcome in outcomes:
            call = calls.pop(outcome.client, None)
            yield self._alone(outcome, call) if isinstance(outcome, Answer) and call is not None else outcome
            del outcome

    def absent(self, clients: Iterable[ClientId]) -> Mapping[ClientId, str]:
        """Those that the inner executor cannot reach."""
        return self._inner.absent(clients)

    def close(self) -> None:
        """Close the inner executor."""
        self._inner.close()

    def _noted(self, task: Pending, calls: dict[ClientId, Call]) -> Job:
        """The job, noted if a liar is called."""
        job = task.make()
        if isinstance(job, Call) and job.client in self._liars:
            calls[job.client] = job
        return job

    def _alone(self, answer: Answer, call: Call) -> Answer:
        change = self._change(call)
        if change is None:
            return answer
        reply, sent = Message.decode(answer.payload), Message.decode(call.payload)
        return replace(answer, payload=changed(reply, sent, change).encode())

    def _change(self, call: Call) -> Change | None:
        kind, strength = self._attackers.kind, self._attackers.strength or 1.0
        if kind == "sign_flip":
            return sign_flip(strength)
        if kind == "scaled" or (kind == "backdoor" and strength != 1.0):
            return scaled(strength)
        if kind == "noise":
            return noise(strength, call.key.fold("lie").generator())
        return free_rider if kind == "free_rider" else None

    def _together(self, outcomes: Sequence[Outcome], calls: Mapping[ClientId, Call]) -> Iterator[Outcome]:
        """Liars whose replies have one shape all send what is made of these."""
        answers = [one for one in outcomes if isinstance(one, Answer) and one.client in calls]
        replies = {one.client: Message.decode(one.payload) for one in answers}
        z = self._attackers.strength or alie_z(len(outcomes), len(replies))
        groups: dict[object, list[Message]] = {}
        for reply in replies.values():
            groups.setdefault(layout_of(reply), []).append(reply)
        for outcome in outcomes:
            if isinstance(outcome, Answer) and (reply := replies.get(outcome.client)) is not None:
                lie = alie(groups[layout_of(reply)], z)
                own = {name: value for name, value in reply.items() if layout_of(value) is None}
                yield replace(outcome, payload=Message(**{**lie, **own}).encode())
            else:
                yield outcome
