"""A node's part in secure sums: it keeps back of its replies what is summed, and adds it, masked, step by step."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck.core.federation import ClientId
from potluck.core.ground.digest import digest
from potluck.core.ground.errors import WireError
from potluck.core.message import Message
from potluck.core.summed import kept_back
from potluck.engine.client.runtime import ClientRuntime
from potluck.engine.client.session import Answer, Call
from potluck.experiment.running.secure_sums import SumNoise, addition_of, farthest
from potluck.flower.node.store import NodeStore
from potluck.flower.wire.schemas import MOST_EXCHANGES, SumsStep, sums_number
from potluck.secure.agreement import Agreement, SecureRefusal
from potluck.secure.client import SecureClient
from potluck.secure.coverage import Coverage
from potluck.secure.together import Addend, answered

_MOST_KEPT = 16  # exchanges of a round; methods have up to three


@dataclass(frozen=True)
class Trust:
    """With whom a node sums.

    Attributes:
        identity: the key with which it signs.
        peers: the keys of those whom its owner trusts; None to believe the server's.
        least: the least number of clients whose numbers are summed.
    """

    identity: Ed25519PrivateKey
    peers: Collection[bytes] | None
    least: int


@dataclass
class _Kept:
    """What a node has kept back of a reply.

    Attributes:
        asked: what tells the call from all others.
        answer: what the server got.
        coverage: what the node covers, by its own account.
        addend: what it adds.
        sent: the largest number, in size, that it was sent.
        half: its half of the sums, once they have begun.
        agreed: the bytes by which they did.
    """

    asked: tuple[Any, ...]
    answer: Answer
    coverage: Coverage
    addend: Addend
    sent: float
    half: SecureClient | None = None
    agreed: bytes = b""


class NodeSums:
    """What a node does of a run's secure sums. What it keeps back is in memory alone, and of one round.

    Args:
        client: which it is.
        run: the run's name.
        host: the runtime of the run's method.
        store: remembers the last sums that it took part in, so that none are repeated.
        trust: with whom it sums.
        noise: what clients make sums private by; None if they do not.
    """

    def __init__(
        self,
        client: ClientId,
        run: str,
        host: ClientRuntime,
        store: NodeStore,
        trust: Trust,
        noise: SumNoise | None = None,
    ) -> None:
        self._client, self._run, self._host, self._store, self._trust = client, run, host, store, trust
        self._noise = noise
        self._kept: dict[tuple[int, int], _Kept] = {}

    def again(self, call: Call) -> Answer | None:
        """The answer to the same call before; None if it is a new one. So a server that was restarted goes on."""
        kept = self._kept.get(_place_of(call))
        return kept.answer if kept is not None and kept.asked == _asked(call) else None

    def keep_back(self, call: Call, answer: Answer) -> Answer:
        """The answer without the numbers that are summed, which stay here."""
        reply = Message.decode(answer.payload)
        of = self._host.summed(call, reply)
        told, withheld = kept_back(reply, of)
        answer = replace(answer, payload=told.encode(), withheld=withheld)
        place = _place_of(call)
        same = [one for one in self._kept if one[0] == call.round and one != place][-_MOST_KEPT + 1 :]
        self._kept = {one: self._kept[one] for one in same}
        self._kept[place] = _Kept(_asked(call), answer, *addition_of(self._client, reply, of), farthest([of]))
        return answer

    def answer(self, step: SumsStep) -> Answer:
        """The answer to what the server asks at a step.

        Raises:
            SecureRefusal: this node does not go on with these sums.
            ValueError: its numbers are not those of the agreement, or not finite.
        """
        kept = self._kept.get((step.round, step.exchange))
        if kept is None:
            raise SecureRefusal(
                f"this node has nothing to add in exchange {step.exchange} of round {step.round}: it has not replied in"
                " it, or was restarted since"
            )
        if step.step == 0 and kept.half is None:
            kept.half, kept.agreed = self._joined(step, kept), step.payload
        if kept.half is None or (step.step == 0 and step.payload != kept.agreed):
            raise SecureRefusal("found a step of other sums than those that this node takes part in")
        return Answer(self._client, answered(kept.half, step.step, step.payload, kept.addend), None, ())

    def _joined(self, step: SumsStep, kept: _Kept) -> SecureClient:
        """This node's half of the sums that the server proposes; from now on it takes part in no earlier ones.

        Where sums are private, what it adds has noise from now on: once, so that the same is said again.
        """
        trust, agreement = self._trust, Agreement.decode(step.payload)
        peers = agreement.keys.values() if trust.peers is None else trust.peers
        after, number = self._store.last_sums(), sums_number(step.round, step.exchange)
        half = SecureClient(step.payload, self._client, trust.identity, peers, after=after, least=trust.least)
        if (agreement.run, agreement.round) != (self._run, number):
            raise SecureRefusal("the agreement is of another run, or of another round")
        _check_own(agreement.coverage, kept.coverage, self._client)
        addend = kept.addend
        if self._noise is not None:
            addend = self._noise.on(addend, agreement, self._client, kept.sent)
        self._store.note_sums(number)
        kept.addend = addend
        return half


def _check_own(said: Coverage, own: Coverage, client: ClientId) -> None:
    """Check that the server has understood what a client covers, and what it counts.

    Raises:
        SecureRefusal: it has not.
    """
    pieces, ours = said.pieces[said.kinds[client]], own.pieces[own.kinds[client]]
    if dict(pieces) != dict(ours) or any(said.summands[name] != own.summands[name] for name in ours):
        raise SecureRefusal("the agreement has other numbers of this client than it has kept back")


def _place_of(call: Call) -> tuple[int, int]:
    """The round and the exchange of a call, whose draws are those of no other: no round is summed twice.

    Raises:
        WireError: it does not say, or its draws are another's.
    """
    _, *named, exchange, client = call.key.path
    if named != ["client", call.round] or client != call.client or not isinstance(exchange, int):
        raise WireError(f"not a job of Potluck's: key: expected one of round {call.round} and of client {call.client}")
    if not 0 <= exchange < MOST_EXCHANGES:
        raise WireError(f"not a job of Potluck's: key: found exchange {exchange}; expected less than {MOST_EXCHANGES}")
    return call.round, exchange


def _asked(call: Call) -> tuple[Any, ...]:
    return call.handler, call.record, call.round, call.key.path, digest(call.payload)
