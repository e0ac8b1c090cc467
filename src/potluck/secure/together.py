"""A round of secure sums whose clients are all in one process: the same bytes as between machines, counted."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from potluck.core.federation import ClientId
from potluck.core.roles import Failure
from potluck.secure.agreement import Agreement, SecureRefusal
from potluck.secure.client import SecureClient
from potluck.secure.server import SecureServer, SecureSums

Identities = Mapping[ClientId, Ed25519PrivateKey]
_WORDS = 2  # the step, from 0, at which clients send their numbers


@dataclass(frozen=True)
class Addend:
    """What a client adds to the sums; see `potluck.secure.client.SecureClient.words`.

    Attributes:
        values: by name, its pieces of the tensors that are summed.
        weight: how often those count that are weighed by client.
        row_weights: by name, how often each row counts of those that are weighed by row.
    """

    values: Mapping[str, Tensor]
    weight: int = 1
    row_weights: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


_NOTHING = Addend({})


@dataclass
class SecureCourse:
    """How a round went.

    Attributes:
        sums: what the server has learnt; None if nothing was summed.
        refusal: why not; empty if something was.
        clipped: by client, how many of its numbers were larger than the largest allowed; empty where they do not say.
        failures: of clients on other machines that did not answer, or not as they should.
        bytes_down: by client, what it was sent, all steps together.
        bytes_up: what it answered.
    """

    sums: SecureSums | None = None
    refusal: str = ""
    clipped: dict[ClientId, int] = field(default_factory=dict[ClientId, int])
    bytes_down: Counter[ClientId] = field(default_factory=Counter[ClientId])
    bytes_up: Counter[ClientId] = field(default_factory=Counter[ClientId])
    failures: dict[ClientId, Failure] = field(default_factory=dict[ClientId, Failure])


def new_identities(clients: Iterable[ClientId]) -> dict[ClientId, Ed25519PrivateKey]:
    """A new key for each client, with which it signs."""
    return {client: Ed25519PrivateKey.generate() for client in sorted(clients)}


def public_keys(identities: Identities) -> dict[ClientId, bytes]:
    """Their public halves, as an agreement has them."""
    return {client: key.public_key().public_bytes_raw() for client, key in identities.items()}


def answered(half: SecureClient, step: int, request: bytes, addend: Addend) -> bytes:
    """A client's answer to the request of a step."""
    if step == 0:
        return half.keys()
    if step == 1:
        return half.boxes(request)
    if step == _WORDS:
        return half.words(request, addend.values, addend.weight, addend.row_weights)
    return half.signature(request) if step == 3 else half.shares(request)


def summed_together(
    agreement: Agreement, identities: Identities, addends: Mapping[ClientId, Addend], left: Collection[ClientId] = ()
) -> SecureCourse:
    """Carry out a round.

    Args:
        agreement: what it is about.
        identities: of its clients, and of others perhaps.
        addends: what each adds that has not left.
        left: clients that have left before they could send numbers; the others take their masks off the sums.
    """
    course, server, halves = SecureCourse(), SecureServer(agreement), dict[ClientId, SecureClient]()
    peers = frozenset(agreement.keys.values())
    try:
        while not server.done:
            step = server.step
            for client in server.asked:
                if step >= _WORDS and client in left:
                    continue
                request = server.request(client)
                if step == 0:
                    halves[client] = SecureClient(request, client, identities[client], peers, after=agreement.round - 1)
                answer = answered(halves[client], step, request, addends.get(client, _NOTHING))
                course.bytes_down[client] += len(request)
                course.bytes_up[client] += len(answer)
                server.take(client, answer)
            server.close()
        course.sums = server.sums()
    except SecureRefusal as refusal:
        course.refusal = str(refusal)
    course.clipped = {client: half.clipped for client, half in halves.items() if half.clipped}
    return course
