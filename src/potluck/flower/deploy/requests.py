"""What a node may ask of the SuperLink, and with which words: its side of one conversation, followed step by step.

A node makes ten requests, always in the same order: it comes, says that it is still there, asks for work, fetches a
run, its app and the parts of a message, says that it has them, announces its reply, sends the reply's parts, and
leaves. Each names what the SuperLink has told this node before. So the gate listens to the SuperLink's answers, and
lets pass what follows from them: no text of a node's own choice, no other node's number, message or part, and no reply
that is larger than replies may be.

An answer may be lost on its way, or changed, and then the node makes its request once more. The SuperLink gives a
message once, and takes a reply and each of its parts once; here a node hears again what it was told.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    Metadata,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.run_pb2 import GetRunRequest
from google.protobuf.message import DecodeError, Message

from potluck.flower import FAREWELL
from potluck.flower.wire.envelope import MOST_BESIDE_PARTS, PART

LONGEST_PART = 2**23
"""The most bytes of a request that carries a part of a message."""

LONGEST_ANNOUNCEMENT = 2**18
"""The most bytes of a request that announces a reply: some 70 for each of its parts, and the reason if it failed."""

LONGEST_REQUEST = 2**12
"""The most bytes of any other request."""

_DEEPEST = 8
_JOBS = 16  # the messages of a node that are remembered: it has one at a time, and some are given up
_SHORTEST_BEAT, _LONGEST_BEAT = 10.0, 120.0  # seconds between signs of life; Flower's nodes say 30
_NAME = re.compile(r"[0-9a-f]{64}")


class Inadmissible(Exception):
    """A request that does not pass.

    Attributes:
        status: of HTTP. At 503 Flower's nodes try again, at 401 they end, at others they give up the message.
        why: one line.
    """

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.why = why


@dataclass
class _Job:
    """A message that the SuperLink gave to the node.

    Attributes:
        metadata: the message's.
        parts: names of its parts, which the node may fetch.
        announced: the names of the reply's parts, which do not change when a node announces its reply again.
        upload: the SuperLink's answer to that: the parts that it asked for, and the session in which to send them.
        awaited: the names of these parts.
        sent: by name, the bytes of those that came.
        stored: names of the parts that the SuperLink has taken.
        untaken: the SuperLink's answer with the message, until the node has shown that it has read it.
        given: when the node got it, in seconds since 1970.
        done: whether the node has answered it, or has come anew since, which forgets it.
    """

    metadata: Metadata
    parts: frozenset[str]
    announced: ObjectTree | None = None
    upload: PushMessagesResponse | None = None
    awaited: frozenset[str] = frozenset()
    sent: dict[str, int] = field(default_factory=dict[str, int])
    stored: set[str] = field(default_factory=set[str])
    untaken: PullMessagesResponse | None = None
    given: float = field(default_factory=time.time)
    done: bool = False


class Conversation:
    """One node's.

    Args:
        key: its public key, as PEM.
        largest: the most bytes of one reply.

    Attributes:
        left: whether it has left, and not come again.
        answered: the group of the message that it has answered last; None before.
    """

    def __init__(self, key: bytes, largest: int) -> None:
        self._key = key
        self._largest = largest
        self.left = False
        self.answered: str | None = None
        self._number: int | None = None
        self._jobs: dict[str, _Job] = {}

    @property
    def number(self) -> int | None:
        """The node's number at the SuperLink; None before it has one."""
        return self._number

    @property
    def at_work(self) -> tuple[str, float] | None:
        """The group of the message that the node has had for the longest and not answered, and since when; or None."""
        groups = ((job.metadata.group_id, job.given) for job in self._jobs.values() if not job.done)
        return next((found for found in groups if found[0] != FAREWELL), None)

    def check_itself(self, request: RegisterNodeFleetRequest | ActivateNodeRequest) -> None:
        """It names its own key."""
        _expect(request.public_key == self._key, "it names another's key", 401)
        if isinstance(request, ActivateNodeRequest):
            _check_beat(request.heartbeat_interval)

    def learn_number(self, request: ActivateNodeRequest, answer: ActivateNodeResponse) -> None:
        """The SuperLink says which number it has; it has forgotten what it was at work on."""
        self._number, self.left = answer.node_id, False
        for job in self._jobs.values():
            job.done, job.untaken = True, None

    def check_leaving(self, request: DeactivateNodeRequest | UnregisterNodeFleetRequest) -> None:
        """It leaves for itself."""
        self._check_number(request.node_id)
        self.left = True

    def check_alive(self, request: SendNodeHeartbeatRequest) -> None:
        """It speaks for itself."""
        self._check_number(request.node.node_id)
        _check_beat(request.heartbeat_interval)

    def check_asking(self, request: PullMessagesRequest) -> None:
        """It asks for its own messages."""
        self._check_number(request.node.node_id)
        _expect(not request.message_ids, "it asks for messages by name")

    def recall_jobs(self, request: PullMessagesRequest) -> PullMessagesResponse | None:
        """The messages that it was given, if it has done nothing with them: it does, before it asks for others."""
        return next((job.untaken for job in self._jobs.values() if job.untaken is not None), None)

    def learn_jobs(self, request: PullMessagesRequest, answer: PullMessagesResponse) -> None:
        """The SuperLink gives it messages."""
        for message, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
            parts = frozenset(_names_in(tree))
            self._jobs[message.metadata.message_id] = _Job(message.metadata, parts, untaken=answer)
        while len(self._jobs) > _JOBS:
            del self._jobs[next(iter(self._jobs))]

    def check_run(self, request: GetRunRequest | GetFabRequest) -> None:
        """It asks about a run of which it has a message; an app has the name of a digest."""
        self._check_number(request.node.node_id)
        of_run = list(self._of_run(request.run_id))
        _expect(bool(of_run), "it asks about a run of which it has no message")
        _take(of_run)
        if isinstance(request, GetFabRequest):
            _check_name(request.hash_str)

    def check_fetching(self, request: PullObjectRequest) -> None:
        """It fetches a part of a message of its own."""
        self._check_number(request.node.node_id)
        its_own = [job for job in self._of_run(request.run_id) if request.object_id in job.parts]
        _expect(bool(its_own), "it asks for a part of no message of its own")
        _take(its_own)

    def check_received(self, request: ConfirmMessageReceivedRequest) -> None:
        """It has received a message of its own."""
        self._check_number(request.node.node_id)
        _expect(request.message_object_id in self._jobs, "it confirms no message of its own")
        job = self._jobs[request.message_object_id]
        self._check_copied(request.run_id, job.metadata.run_id)
        _take([job])

    def check_reply(self, request: PushMessagesRequest) -> None:
        """It announces a reply of its own, to a message of its own, of a size that replies may have."""
        self._check_number(request.node.node_id)
        lists = (request.messages_list, request.message_object_trees, request.clientapp_runtime_list)
        _expect(all(len(of) == 1 for of in lists), "it announces other than one reply")
        (message,), (tree,), (seconds,) = lists
        said = message.metadata
        _expect(said.src_node_id == self._number, "it speaks for another node")
        _expect(said.reply_to_message_id in self._jobs, "its message answers none that it was given")
        job = self._jobs[said.reply_to_message_id]
        of = job.metadata
        self._check_copied(
            (said.run_id, said.dst_node_id, said.group_id, said.message_type, said.dst_task_id),
            (of.run_id, of.src_node_id, of.group_id, of.message_type, of.src_task_id),
        )
        _expect(not message.content.ByteSize(), "its message holds records outside its parts")
        _expect(all(map(math.isfinite, (said.created_at, said.ttl, seconds))), "a time that is no number")
        _expect(said.message_id == tree.object_id, "its message has another name than its parts")
        self._check_size(tree)
        _expect(job.announced in (None, tree), "it announced another reply to the same message before")
        job.announced = tree
        _take([job])

    def recall_upload(self, request: PushMessagesRequest) -> PushMessagesResponse | None:
        """What the SuperLink asked for when the node announced this reply, if it has."""
        return self._jobs[request.messages_list[0].metadata.reply_to_message_id].upload

    def learn_upload(self, request: PushMessagesRequest, answer: PushMessagesResponse) -> None:
        """The SuperLink asks for the reply's parts."""
        job = self._jobs.get(request.messages_list[0].metadata.reply_to_message_id)
        if job is not None:
            job.upload, job.awaited = answer, frozenset(answer.objects_to_push)
            self._look_whether_done(job)

    def check_sending(self, request: PushObjectRequest) -> None:
        """It sends a part that the SuperLink asked for; together they are no larger than a reply may be."""
        self._check_number(request.node.node_id)
        job = self._awaiting(request)
        if job is None:
            raise Inadmissible(400, "it sends a part that nobody asked for")
        sent = job.sent | {request.object_id: len(request.object_content)}
        if (total := sum(sent.values())) > self._largest + LONGEST_PART:
            raise Inadmissible(413, f"its reply has {total} bytes; {self._expected()}")
        job.sent = sent
        self._look_whether_done(job)

    def recall_stored(self, request: PushObjectRequest) -> PushObjectResponse | None:
        """That the SuperLink has taken this part, if it has."""
        job = self._awaiting(request)
        return PushObjectResponse(stored=True) if job and request.object_id in job.stored else None

    def learn_stored(self, request: PushObjectRequest, answer: PushObjectResponse) -> None:
        """The SuperLink says whether it has taken a part."""
        if answer.stored and (job := self._awaiting(request)):
            job.stored.add(request.object_id)

    def _awaiting(self, request: PushObjectRequest) -> _Job | None:
        """The message to whose reply a part belongs, if the SuperLink has asked for the part."""
        wanted = [job for job in self._of_run(request.run_id) if request.object_id in job.awaited]
        return next((job for job in wanted if job.upload and job.upload.session_id == request.session_id), None)

    def _look_whether_done(self, job: _Job) -> None:
        """Note that a message is answered when all parts of the reply have come."""
        if job.awaited <= job.sent.keys():
            job.done = True
            self.answered = self.answered if job.metadata.group_id == FAREWELL else job.metadata.group_id

    def _check_number(self, number: int) -> None:
        _expect(self._number is not None and number == self._number, "its number is not its key's", 401)

    def _of_run(self, run: int) -> Iterator[_Job]:
        return (job for job in self._jobs.values() if job.metadata.run_id == run)

    def _check_copied(self, found: object, expected: object) -> None:
        _expect(found == expected, "its message is not an answer to the one that it names")

    def _check_size(self, tree: ObjectTree) -> None:
        most, seen = self._largest // PART + MOST_BESIDE_PARTS, 0
        for name in _names_in(tree):
            _check_name(name)
            seen += 1
        if seen > most:
            raise Inadmissible(413, f"its reply has {seen} parts; {self._expected()}")

    def _expected(self) -> str:
        return f"expected at most {self._largest} bytes; see --largest-reply"


@dataclass(frozen=True)
class NodeRequest:
    """A kind of request.

    Attributes:
        form: Flower's class of it.
        check: whether a node may make it now; raises Inadmissible.
        longest: the most bytes.
        answer: Flower's class of the answer, if something is learned from it.
        learn: what.
        recall: the answer that the node was given before, if it makes a request once more; else None.
    """

    form: type[Any]
    check: Callable[[Conversation, Any], None]
    longest: int = LONGEST_REQUEST
    answer: type[Any] | None = None
    learn: Callable[[Conversation, Any, Any], None] | None = None
    recall: Callable[[Conversation, Any], Message | None] | None = None

    def read(self, body: bytes) -> Any:
        """Read a request; what Flower's class does not have is dropped.

        Raises:
            Inadmissible: it is not of this kind.
        """
        found = self.form()
        try:
            found.ParseFromString(body)
        except DecodeError as error:
            raise Inadmissible(400, "its request cannot be read") from error
        found.DiscardUnknownFields()
        return found

    def again(self, conversation: Conversation, request: Any) -> bytes | None:
        """The answer to a request that a node makes once more, since it may not have heard it; else None."""
        said = None if self.recall is None else self.recall(conversation, request)
        return None if said is None else said.SerializeToString()

    def hear(self, conversation: Conversation, request: Any, answer: bytes) -> None:
        """Learn from the SuperLink's answer."""
        if self.learn is not None and self.answer is not None:
            self.learn(conversation, request, self.answer.FromString(answer))


_OF_MEMBERS: Mapping[str, NodeRequest] = {
    "activate-node": NodeRequest(
        ActivateNodeRequest, Conversation.check_itself, answer=ActivateNodeResponse, learn=Conversation.learn_number
    ),
    "deactivate-node": NodeRequest(DeactivateNodeRequest, Conversation.check_leaving),
    "send-node-heartbeat": NodeRequest(SendNodeHeartbeatRequest, Conversation.check_alive),
    "pull-messages": NodeRequest(
        PullMessagesRequest, Conversation.check_asking, answer=PullMessagesResponse, learn=Conversation.learn_jobs,
        recall=Conversation.recall_jobs,
    ),
    "get-run": NodeRequest(GetRunRequest, Conversation.check_run),
    "get-fab": NodeRequest(GetFabRequest, Conversation.check_run),
    "pull-object": NodeRequest(PullObjectRequest, Conversation.check_fetching),
    "confirm-message-received": NodeRequest(ConfirmMessageReceivedRequest, Conversation.check_received),
    "push-messages": NodeRequest(
        PushMessagesRequest, Conversation.check_reply, LONGEST_ANNOUNCEMENT, PushMessagesResponse,
        Conversation.learn_upload, Conversation.recall_upload,
    ),
    "push-object": NodeRequest(
        PushObjectRequest, Conversation.check_sending, LONGEST_PART, PushObjectResponse, Conversation.learn_stored,
        Conversation.recall_stored,
    ),
}  # fmt: skip
_OF_ANYBODY: Mapping[str, NodeRequest] = {
    "register-node": NodeRequest(RegisterNodeFleetRequest, Conversation.check_itself),
    "unregister-node": NodeRequest(UnregisterNodeFleetRequest, Conversation.check_leaving),
}


def requests_of_nodes(*, registered: bool) -> Mapping[str, NodeRequest]:
    """By path, the requests that nodes make; where keys are not registered beforehand, they register themselves."""
    names = _OF_MEMBERS if registered else {**_OF_MEMBERS, **_OF_ANYBODY}
    return {f"/v1/fleet/{name}": request for name, request in names.items()}


def _take(jobs: Iterable[_Job]) -> None:
    """Note that the node has read these messages."""
    for job in jobs:
        job.untaken = None


def _names_in(tree: ObjectTree) -> Iterator[str]:
    """The names of a message and all its parts, as often as they are named.

    Raises:
        Inadmissible: there are parts of parts of parts without end.
    """
    level = [tree]
    for _ in range(_DEEPEST):
        yield from (part.object_id for part in level)
        level = [child for part in level for child in part.children]
        if not level:
            return
    raise Inadmissible(400, "its message has parts within parts without end")


def _check_name(name: str) -> None:
    _expect(_NAME.fullmatch(name) is not None, "a name that is no digest")


def _check_beat(seconds: float) -> None:
    _expect(_SHORTEST_BEAT <= seconds <= _LONGEST_BEAT, "a time between signs of life that is not Flower's")


def _expect(fulfilled: bool, why: str, status: int = 400) -> None:
    """Check a condition.

    Raises:
        Inadmissible: it is not fulfilled.
    """
    if not fulfilled:
        raise Inadmissible(status, why)
