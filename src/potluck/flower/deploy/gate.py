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

from potluck.core.ground.errors import PotluckError
from potluck.core.ground.text import one_line
from potluck.flower import LARGEST_REPLY
from potluck.flower.deploy.certificates import fingerprint_of
from potluck.flower.deploy.checks import Daily, expiring, expiring_at_server, uncertified
from potluck.flower.deploy.keys import CA, bridges_in
from potluck.flower.deploy.limits import Pace, Reports, Say
from potluck.flower.deploy.members import KEY_HEADER, Caller, Members
from potluck.flower.deploy.requests import Conversation, Inadmissible, NodeRequest, requests_of_nodes
from potluck.flower.deploy.serving import Head, HttpAnswer, Serving, Visit, refusing_answer
from potluck.flower.deploy.sightings import Sighting, Sightings
from potluck.flower.deploy.superlink import FlowerError
from potluck.flower.deploy.tls import Security

__all__ = ["HEALTH", "KEY_HEADER", "TRUST_HEADER", "Gate", "reason_in"]

HEALTH = "/health"
"""The path at which a node may check whether it is registered, and hears what its owner should know."""

TRUST_HEADER = "potluck-trust"
"""The header by which a node says there which authority it knows: the fingerprint of its `ca.crt`."""

RATE, BURST = 32.0, 128.0
"""Requests of one node: per second, and at once. A node that waits for work asks every few seconds, and one that sends
a reply makes a request for each part of 5 MiB."""

AT_ONCE = 4
"""The most requests of one node that the SuperLink works on at a time; a node makes up to four."""

_REMEMBERED = 1024  # nodes, if anybody may be one

_TURN = 60.0  # seconds until the same refusal is reported again
_LOOK_EVERY = 2.0  # seconds until it is looked whether there is another certificate
_WARN_EVERY = 3600.0  # seconds until it is looked what ends soon
_INSIDE_WITHIN = httpx.Timeout(60.0)


class Gate:
    """Serves a public address in its own thread.

    Args:
        address: the `host:port` to listen at.
        inside: the SuperLink's address.
        keys: folder of `potluck keys`; None for no encryption.
        say: called with refusals and their reasons, a bounded number of times a minute, and daily with what ends
            soon.
        trust: the certificate by which the SuperLink is known; None if it does not encrypt.
        largest: the most bytes of one reply of a node.
        mutual: whether callers have to show a certificate of `keys` before anything of theirs is read.

    Attributes:
        sightings: of the nodes that spoke.
    """

    def __init__(
        self,
        address: tuple[str, int],
        inside: str,
        keys: Path | None,
        say: Say,
        trust: Path | None = None,
        largest: int = LARGEST_REPLY,
        *,
        mutual: bool = False,
    ) -> None:
        self._address = address
        self.sightings = Sightings()
        security = None if keys is None else Security(keys, mutual=mutual)
        desk = _Desk(_connections(inside, trust), keys, security, say, largest, self.sightings, mutual=mutual)
        self._serving = Serving(address, desk, security)

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

    def __init__(
        self,
        inside: httpx.AsyncClient,
        keys: Path | None,
        security: Security | None,
        say: Say,
        largest: int,
        sightings: Sightings,
        *,
        mutual: bool,
    ) -> None:
        self.inside, self.sightings = inside, sightings
        self.of_nodes, self._of_strangers = Reports(say, "nodes"), Reports(say, "strangers")
        self._say, self._daily = say, Daily(lambda line: say(f"warning: {line}"))
        self._keys, self._security = keys, security
        self._members, self._mutual = Members(keys), mutual
        self._requests = requests_of_nodes(registered=keys is not None)
        self._largest = largest
        self._known: dict[bytes, _Node] = {}

    def greet(self, certificate: bytes | None, host: str) -> HttpAnswer | None:
        """Send away who has shown a certificate of a key that counts no more; who has shown none is not here."""
        if not self._mutual:
            return None
        try:
            self._members.meet(certificate)
        except Inadmissible as error:
            self._of_strangers(f"refused {host}: {error.why}")
            return refusing_answer(error.status, error.why)
        return None

    def admit(self, head: Head) -> Visit | HttpAnswer:
        """Decide on a request by its header; whoever has not signed it is refused."""
        request = self._requests.get(head.path) if head.method == "POST" else None
        try:
            if head.method == "GET" and head.path == HEALTH:
                _, name = self._members.shown(head.headers)
                return HttpAnswer(200, json.dumps({"status": "ok", "notices": self._notices(name, head)}).encode())
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
        if self._security is not None:
            self._of_strangers(f"refused a caller: {self._security.fault(error)}")

    async def watch(self) -> None:
        """Look after the certificate and the reports; at the end, close the connections to the SuperLink."""
        looks = 0
        async with self.inside:
            while True:
                self._look(warn=looks * _LOOK_EVERY % _WARN_EVERY == 0)
                await asyncio.sleep(_LOOK_EVERY)
                looks += 1
                if looks * _LOOK_EVERY % _TURN == 0:
                    self.of_nodes.turn()
                    self._of_strangers.turn()

    def _look(self, *, warn: bool) -> None:
        """Take up a new certificate, and warn of what ends soon."""
        if self._keys is None or self._security is None:
            return
        try:
            if (news := self._security.look()) is not None:
                self._say(news)
            if warn:
                self._daily([*expiring(self._keys), *(uncertified(self._keys) if self._mutual else [])])
        except (PotluckError, OSError) as error:  # a file is damaged, or is just being exchanged
            self._daily([str(error)])

    def _notices(self, name: str, head: Head) -> list[str]:
        """What the owner of a node should know of its keys and the server's; tells the operator who lags behind."""
        if self._keys is None:
            return []
        found = self._members.notices(head.headers)
        try:
            known, bridges = head.headers.get(TRUST_HEADER), bridges_in(self._keys)
            if known is not None and known != fingerprint_of(self._keys / CA):
                until = (
                    f"; a former authority counts until {bridges[0].not_valid_after_utc:%Y-%m-%d}" if bridges else ""
                )
                found.append(f"the server has another ca.crt than this node: copy the server's over it{until}")
                self.of_nodes(f"{name} has another ca.crt than the server{until}")
            elif known is not None and bridges:
                self.of_nodes(f"{name} says that it has the new ca.crt")
            return [*found, *expiring_at_server(self._keys)]
        except (PotluckError, OSError):  # `watch` says so
            return found

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
            if (said := self.request.again(self.node.conversation, asked)) is not None:
                self._note(down=len(said), up=len(body))
                return HttpAnswer(200, said, PROTOBUF_MEDIA_TYPE)
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


def _connections(inside: str, trust: Path | None) -> httpx.AsyncClient:
    """Connections to the SuperLink."""
    known = False if trust is None else ssl.create_default_context(cafile=str(trust))
    unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=64)  # each node's share is bounded
    return httpx.AsyncClient(
        base_url=f"{'http' if trust is None else 'https'}://{inside}", verify=known, timeout=_INSIDE_WITHIN,
        limits=unlimited, trust_env=False,
    )  # fmt: skip


def reason_in(body: bytes) -> str:
    """The reason for a refusal, from the body of the answer, sanitised to one line."""
    try:
        return one_line(str(json.loads(body)["detail"]))
    except (ValueError, LookupError, TypeError, RecursionError):
        return "no reason given"
