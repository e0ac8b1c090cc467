"""What a server and its clients say to one another at each step of secure sums: bytes of bounded size and known shape.

The server asks, and clients answer, in this order:

1. the `Agreement`; a client's public keys, signed;
2. all clients' keys; for each other client a sealed box with its shares of this client's secrets;
3. the boxes of all others for this client; what it adds to the sums, masked;
4. who did so, the survivors; a signature of their list;
5. the signatures; the shares of what is to be taken off the sums.
"""

from collections.abc import Collection

import torch
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from torch import Tensor

from potluck.core.federation import ClientId
from potluck.core.ground.errors import WireError
from potluck.core.ground.text import one_line
from potluck.core.message import Message
from potluck.core.schema import Dimension, Kind, Misfit, Schema, Tensors, UpTo, integers
from potluck.secure.agreement import Agreement, SecureRefusal
from potluck.secure.masks import KEY_BYTES, SIGNATURE_BYTES, TAG_BYTES, hashed
from potluck.secure.shamir import SHARE_BYTES

FRAMING = 2**16  # bytes of a message beside its tensors: a few names and shapes
_MOST_IDS = 10**9

ClientSet = frozenset[ClientId]


def keys_form() -> Schema:
    """A client's public keys for masks and for boxes, and its signature of them."""
    return Schema(mask=_bytes(KEY_BYTES), box=_bytes(KEY_BYTES), signature=_bytes(SIGNATURE_BYTES))


def key_list_form(agreement: Agreement) -> Schema:
    """Those of all clients that are there."""
    there = _there(agreement)
    keys, signatures = _bytes(there, KEY_BYTES), _bytes(there, SIGNATURE_BYTES)
    return Schema(clients=_ids(there), masks=keys, boxes=keys, signatures=signatures)


def boxes_form(agreement: Agreement, client: ClientId, keyed: ClientSet) -> Schema:
    """A client's boxes for each other of those with keys, ascending, and what it has bound its masks' seeds to."""
    seeds = len(agreement.summed_of(client, keyed))
    return Schema(
        hashes=_bytes(seeds, KEY_BYTES),
        boxes=_bytes(len(keyed) - 1, box_bytes(agreement, client, keyed)),
    )


def box_list_form(agreement: Agreement, client: ClientId, keyed: ClientSet) -> Schema:
    """Which clients have sent boxes, and those for this client, of the others in ascending order, in a row."""
    most = sum(box_bytes(agreement, one, keyed) for one in keyed if one != client)
    return Schema(clients=_ids(_there(agreement)), boxes=_bytes(UpTo(most, 0)))


def words_form(agreement: Agreement, client: ClientId, boxed: ClientSet) -> Schema:
    """The words of a client's blocks in ascending order, masked."""
    blocks = agreement.coverage.blocks
    count = sum(blocks[number].words for number in agreement.summed_of(client, boxed))
    return Schema(words=_bytes(count * agreement.word // 8))


def survivors_form(agreement: Agreement) -> Schema:
    """Whose words have come."""
    return Schema(clients=_ids(_there(agreement)))


def signature_form() -> Schema:
    """A client's signature of the list of survivors."""
    return Schema(signature=_bytes(SIGNATURE_BYTES))


def signatures_form(agreement: Agreement) -> Schema:
    """Those of all that have signed."""
    there = _there(agreement)
    return Schema(clients=_ids(there), signatures=_bytes(there, SIGNATURE_BYTES))


def shares_form(agreement: Agreement, boxed: ClientSet, survivors: ClientSet) -> Schema:
    """Of which clients this one has shares, and these: see `rows_of_shares`."""
    most = sum(rows_of_shares(agreement, one, survivors) for one in boxed)
    whose = UpTo(len(boxed))
    return Schema(of=_ids(whose), shares=_bytes(UpTo(most, 0), SHARE_BYTES))


def rows_of_shares(agreement: Agreement, client: ClientId, survivors: ClientSet) -> int:
    """How many shares of a client's secrets are told.

    Of a survivor one for each of its blocks that are summed, of the seed of its own mask. Of one that has left one, of
    the secret that its masks with others come from. Never both.
    """
    return len(agreement.summed_of(client, survivors)) if client in survivors else 1


def box_bytes(agreement: Agreement, client: ClientId, keyed: ClientSet) -> int:
    """The size of a client's boxes: a share of its secret and of each seed."""
    return SHARE_BYTES * (1 + len(agreement.summed_of(client, keyed))) + TAG_BYTES


def message_in(data: bytes, form: Schema, what: str) -> Message:
    """The message of this form in bytes from anybody.

    Raises:
        SecureRefusal: they hold none; says what is wrong.
    """
    if len(data) > form.nbytes + FRAMING:
        raise SecureRefusal(f"{what}: found {len(data)} bytes; expected at most {form.nbytes + FRAMING}")
    try:
        message = Message.decode(data)
        form.check(message)
    except (WireError, Misfit) as error:
        raise SecureRefusal(f"{what}: {one_line(str(error), 200)}") from error
    return message


def clients_in(message: Message, among: Collection[ClientId], least: int, what: str) -> ClientSet:
    """The clients that a message lists.

    Raises:
        SecureRefusal: they are not in ascending order, not all among these, or too few.
    """
    listed: list[int] = message["clients"].tolist()
    found = frozenset(listed)
    if listed != sorted(found) or not found <= frozenset(among):
        raise SecureRefusal(f"{what}: expected some of the clients of the step before, ascending, each once")
    if len(found) < least:
        raise SecureRefusal(f"{what}: found {len(found)} clients; expected at least {least}")
    return found


def as_tensor(data: bytes, *shape: int) -> Tensor:
    """Bytes as a tensor of this shape, by default (bytes,)."""
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(shape) if shape else flat


def as_bytes(tensor: Tensor) -> bytes:
    """The bytes of such a tensor."""
    return tensor.numpy().tobytes()


def ids(clients: Collection[ClientId]) -> Tensor:
    """Clients in ascending order, int64 (n,)."""
    return torch.tensor(sorted(clients), dtype=torch.int64)


def session_of(agreement: Agreement, key_list: bytes) -> bytes:
    """32 bytes that depend on all that clients must have been told alike before they make masks."""
    return hashed(b"potluck secure sums, session", agreement.digest, key_list)


def keys_signed(agreement: Agreement, client: ClientId, mask: bytes, box: bytes) -> bytes:
    """What a client signs of its keys."""
    return hashed(b"potluck secure sums, keys", agreement.digest, str(client).encode(), mask, box)


def survivors_signed(session: bytes, boxed: ClientSet, survivors: ClientSet) -> bytes:
    """What a client signs of the list of survivors."""
    return hashed(b"potluck secure sums, survivors", session, as_bytes(ids(boxed)), as_bytes(ids(survivors)))


def seed_hash(session: bytes, client: ClientId, block: int, seed: bytes) -> bytes:
    """What binds a client to the seed of its own mask of a block, and tells nothing of it."""
    return hashed(b"potluck secure sums, seed", session, str(client).encode(), str(block).encode(), seed)


def check_signature(agreement: Agreement, client: ClientId, signature: bytes, signed: bytes, what: str) -> None:
    """Check that a client of the agreement has signed this.

    Raises:
        SecureRefusal: it has not.
    """
    try:
        Ed25519PublicKey.from_public_bytes(agreement.keys[client]).verify(signature, signed)
    except (InvalidSignature, ValueError) as error:
        raise SecureRefusal(f"{what}: client {client}'s signature is not its own, or of something else") from error


def _there(agreement: Agreement) -> UpTo:
    return UpTo(len(agreement.keys), agreement.needed)


def _ids(count: Dimension) -> Kind:
    return integers(count, least=0, most=_MOST_IDS)


def _bytes(*shape: Dimension) -> Kind:
    return Tensors(torch.uint8, shape)
