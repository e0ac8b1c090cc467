"""A round of secure sums among clients in one process: some leave, and its server may be stopped at any moment."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from potluck.core.federation import ClientId
from potluck.secure.agreement import Agreement
from potluck.secure.client import SecureClient
from potluck.secure.server import SecureServer, SecureSums
from potluck.secure.steps import ANSWERS

Identities = Mapping[ClientId, Ed25519PrivateKey]


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


def new_identities(clients: Iterable[ClientId]) -> dict[ClientId, Ed25519PrivateKey]:
    """A new key for each client, with which it signs."""
    return {client: Ed25519PrivateKey.generate() for client in sorted(clients)}


def public_keys(identities: Identities) -> dict[ClientId, bytes]:
    """Their public halves, as an agreement has them."""
    return {client: key.public_key().public_bytes_raw() for client, key in identities.items()}


def half_of(agreement: bytes, client: ClientId, identities: Identities) -> SecureClient:
    """A client's half, whose owner has the others on the list of peers."""
    return SecureClient(agreement, client, identities[client], frozenset(public_keys(identities).values()))


def answered(half: SecureClient, step: int, request: bytes, addend: Addend) -> bytes:
    """A client's answer to the request of a step."""
    if step == 0:
        return half.keys()
    if step == 1:
        return half.boxes(request)
    if step == 2:
        return half.words(request, addend.values, addend.weight, addend.row_weights)
    return half.signature(request) if step == 3 else half.shares(request)


def secure_round(
    agreement: Agreement,
    identities: Identities,
    addends: Mapping[ClientId, Addend],
    leaving: Mapping[ClientId, int] | None = None,
    *,
    stops: bool = False,
) -> SecureSums:
    """What the server learns of a round.

    Args:
        agreement: what it is about.
        identities: of its clients.
        addends: what each of them adds.
        leaving: by client, the first step, from 0, that it does not answer any more.
        stops: whether the server is stopped after each answer, and another one goes on from what it has saved.

    Raises:
        SecureRefusal: too few clients stay.
    """
    server, halves = SecureServer(agreement), dict[ClientId, SecureClient]()
    while not server.done:
        step = server.step
        for client in server.asked:
            if (leaving or {}).get(client, len(ANSWERS)) <= step:
                continue
            request = server.request(client)
            if step == 0:
                halves[client] = half_of(request, client, identities)
            server.take(client, answered(halves[client], step, request, addends[client]))
            server = SecureServer.restored(server.save()) if stops else server
        server.close()
    return server.sums()
