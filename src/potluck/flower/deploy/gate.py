"""The gate to a SuperLink: from outside, only what nodes of Potluck's ask for passes.

Flower serves nodes, users who start runs and its own processes at one port, and authenticates only the nodes. Anyone
who reached that port could have any code run; and a node could have its words written to logs, fill the memory, and
speak for others. So the SuperLink listens on this machine alone, and this gate, which nodes reach, lets pass what a
node needs, word for word, at a bounded pace, and nothing else.
"""

import asyncio
import json
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from potluck.core.ground.text import one_line
from potluck.flower import LARGEST_REPLY
from potluck.flower.deploy.keys import CA, SERVER, SERVER_KEY
from potluck.flower.deploy.limits import Pace, Reports, Say
from potluck.flower.deploy.members import KEY_HEADER, Caller, Members
from potluck.flower.deploy.requests import Conversation, Inadmissible, NodeRequest, requests_of_nodes
from potluck.flower.deploy.serving import Head, HttpAnswer, Serving, Visit, refusing_answer
from potluck.flower.deploy.sightings import Sighting, Sightings
from potluck.flower.deploy.superlink import FlowerError

__all__ = ["HEALTH", "KEY_HEADER", "Gate", "reason_in"]

HEALTH = "/health"
"""The path at which a node may check whether it is registered."""

RATE, BURST = 32.0, 128.0
"""Requests of one node: per second, and at once. A node that waits for work asks every few seconds, and one that sends
a reply makes a request for each part of 5 MiB."""

AT_ONCE = 4
"""The most requests of one node that the SuperLink works on at a time; a node makes up to four."""

_REMEMBERED = 1024  # nodes, if anybody may be one

_TURN = 60.0  # seconds until the same refusal is reported again
_INSIDE_WITHIN = httpx.Timeout(60.0)


class Gate:
    """Serves a public address in its own thread.

    Args:
        address: the `host:port` to listen at.
        inside: the SuperLink's address.
        keys: folder of `potluck keys`; None for no encryption.
        say: called with refusals and their reasons, a bounded number of times a minute.
        largest: the most bytes of one reply of a node.

    Attributes:
        sightings: of the nodes that spoke.
    """

    def __init__(
        self, address: tuple[str, int], inside: str, keys: Path | None, say: Say, largest: int = LARGEST_REPLY
    ) -> None:
        self._address = address
        self.sightings = Sightings()
        desk = _Desk(inside, keys, say, largest, self.sightings)
        self._serving = Serving(address, desk, None if keys is None else _security(keys))

    def __enter__(self) -> Self:
        host, port = self._address
        try:
            self._serving.start()
        except OSError as error:
            raise FlowerError(f"cannot listen at {host}:{port}; is the port taken? ({error.strerror})") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._serving.stop()


class _Desk:
    """Decides which requests pass, and passes them on."""

    def __init__(self, inside: str, keys: Path | None, say: Say, largest: int, sightings: Sightings) -> None:
        trust = ssl.create_default_context(cafile=str(keys / CA)) if keys is not None else False
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=64)  # each node's share is bounded
        self.inside = httpx.AsyncClient(
            base_url=f"{'http' if keys is None else 'https'}://{inside}", verify=trust, timeout=_INSIDE_WITHIN,
            limits=unlimited, trust_env=False,
        )  # fmt: skip
        self.of_nodes, self._of_strangers = Reports(say, "nodes"), Reports(say, "strangers")
        self.sightings = sightings
        self._members = Members(keys)
        self._requests = requests_of_nodes(registered=keys is not None)
        self._largest = largest
        self._known: dict[bytes, _Node] = {}

    def admit(self, head: Head) -> Visit | HttpAnswer:
        """Decide on a request by its header; whoever has not signed it is refused."""
        request = self._requests.get(head.path) if head.method == "POST" else None
        try:
            if head.method == "GET" and head.path == HEALTH:
                self._members.shown(head.headers)
                return HttpAnswer(200, b'{"status": "ok"}')
            if request is None:
                raise Inadmissible(404, "only requests of nodes pass here")
            caller = self._members.prove(head.headers, head.host)
        except Inadmissible as error:
            what = f"{head.method} {one_line(head.path, 80)} is not for nodes" if error.status == 404 else error.why
            self._of_strangers(f"refused {head.host}: {what}")
            return refusing_answer(error.status, error.why)
        return _Visit(self, self._node(caller), caller, head.path, request)

    def hung_up(self, error: ssl.SSLError) -> None:
        """Report a caller that does not speak TLS as we do."""
        self._of_strangers(f"refused a caller: {_fault(error)}")

    async def watch(self) -> None:
        """Begin a new minute of reports now and then; at the end, close the connections to the SuperLink."""
        async with self.inside:
            while True:
                await asyncio.sleep(_TURN)
                self.of_nodes.turn()
                self._of_strangers.turn()

    def _node(self, caller: Caller) -> "_Node":
        node = self._known.pop(caller.key, None) or _Node(caller.key, self._largest)
        self._known[caller.key] = node
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]
        return node


class _Node:
    """What the gate remembers of a node."""

    def __init__(self, key: bytes, largest: int) -> None:
        self.conversation = Conversation(key, largest)
        self.pace = Pace(RATE, BURST)
        self.turn = asyncio.Semaphore(AT_ONCE)


@dataclass(frozen=True)
class _Visit:
    """A node's request, before and after its body has come."""

    desk: _Desk
    node: _Node
    caller: Caller
    path: str
    request: NodeRequest

    @property
    def key(self) -> bytes:
        """The node's key."""
        return self.caller.key

    @property
    def longest(self) -> int:
        """The most bytes of the body."""
        return self.request.longest

    def too_long(self) -> HttpAnswer:
        """Refuse a longer one."""
        return self._refuse(Inadmissible(413, f"it is longer than {self.longest} bytes"))

    async def answer(self, body: bytes) -> HttpAnswer:
        """Pass the request on, if it follows from what the SuperLink has told this node; refuse it otherwise."""
        await self.node.pace.wait()
        async with self.node.turn:
            try:
                asked = self.request.read(body)
                self.request.check(self.node.conversation, asked)
            except Inadmissible as error:
                return self._refuse(error)
            return await self._pass_on(asked)

    async def _pass_on(self, asked: Any) -> HttpAnswer:
        headers = {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE, **self.caller.proof}
        content = asked.SerializeToString()
        try:
            reply = await self.desk.inside.post(self.path, content=content, headers=headers)
        except httpx.TransportError:
            return refusing_answer(503, "the SuperLink is not there")
        if reply.status_code == 200:
            self.request.hear(self.node.conversation, asked, reply.content)
            self._note(down=len(reply.content), up=len(content))
        elif reply.status_code in (401, 403):
            self.desk.of_nodes(f"refused {self.caller}: {reason_in(reply.content)}")
        elif reply.status_code == 412:
            self.desk.of_nodes(f"{self.caller} has to wait until its previous connection counts as gone")
        return HttpAnswer(reply.status_code, reply.content, reply.headers.get("content-type", PROTOBUF_MEDIA_TYPE))

    def _refuse(self, error: Inadmissible) -> HttpAnswer:
        self.desk.of_nodes(f"refused a request of {self.caller}: {error.why}")
        self._note(why=error.why)
        return refusing_answer(error.status, error.why)

    def _note(self, *, down: int = 0, up: int = 0, why: str | None = None) -> None:
        """Note that the node has spoken; one without a registered name goes by its number, as in the run."""
        conversation = self.node.conversation
        if name := self.caller.registered or str(conversation.number or ""):
            work, since = conversation.at_work or (None, None)
            found = Sighting(
                self.caller.host, time.time(), conversation.left, work, since, conversation.answered
            )  # what adds up is added there
            self.desk.sightings.note(name, found, down=down, up=up, why=why)


def _security(keys: Path) -> ssl.SSLContext:
    """The server's side of TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(keys / SERVER, keys / SERVER_KEY)
    return context


def _fault(error: ssl.SSLError) -> str:
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if reason in ("http request", "wrong version number"):
        return "it does not encrypt (no TLS)"
    if "certificate expired" in reason:
        return "our certificate has expired; make a new one, and start the server anew"
    if "unknown ca" in reason or "certificate unknown" in reason:
        return "it does not trust our certificate; has it the ca.crt of these keys?"
    return f"TLS failed ({reason})"


def reason_in(body: bytes) -> str:
    """The reason for a refusal, from the body of the answer, sanitised to one line."""
    try:
        return one_line(str(json.loads(body)["detail"]))
    except (ValueError, LookupError, TypeError, RecursionError):
        return "no reason given"
