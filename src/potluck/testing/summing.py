"""A round of secure sums among clients of which some leave, and whose server may be stopped at any moment."""

from collections.abc import Mapping

from potluck.core.federation import ClientId
from potluck.secure import ANSWERS
from potluck.secure.agreement import Agreement
from potluck.secure.client import SecureClient
from potluck.secure.server import SecureServer, SecureSums
from potluck.secure.together import Addend, Identities, answered, public_keys


def half_of(agreement: bytes, client: ClientId, identities: Identities) -> SecureClient:
    """A client's half, whose owner has the others on the list of peers."""
    return SecureClient(agreement, client, identities[client], frozenset(public_keys(identities).values()))


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
