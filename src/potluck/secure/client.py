"""A client's half of secure sums: what it answers at each step, and what it refuses."""

import math
import secrets
from collections.abc import Callable, Collection, Mapping

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from potluck.core.federation import ClientId
from potluck.core.message import Message
from potluck.secure import ANSWERS, steps
from potluck.secure.agreement import LEAST, Agreement, SecureRefusal
from potluck.secure.coverage import piece_shape
from potluck.secure.fixed import Units, Words, to_words
from potluck.secure.masks import KEY_BYTES, both_know, key_for, opened_box, public_half, sealed_box, stream
from potluck.secure.shamir import SHARE_BYTES, secret_shares
from potluck.secure.steps import ClientSet, as_bytes, as_tensor, ids, message_in

HeldShares = dict[ClientId, list[bytes]]
"""By client, the shares of its secret and of its seeds that this one holds."""


class SecureClient:
    """What a client does in one round of secure sums; it lives as long as the round, in memory alone.

    Each step is answered once. The same request, again, gets the same answer, so that a server may ask once more after
    a restart; another one in its place is refused, and after a refusal nothing is answered any more. A client that was
    restarted itself has lost its secrets and stays out of the round: give the last round as `after`.

    Args:
        agreement: the server's bytes.
        client: its own number.
        identity: the key with which it signs.
        peers: the public halves of the others' such keys, from a list of its owner's.
        after: the last round of this run in which it took part; 0 if in none.
        least: the least number of clients whose numbers its owner allows to be summed.

    Attributes:
        agreement: what it has agreed to.
        clipped: how many of its numbers were larger than `FixedPoint.largest` and were clipped.

    Raises:
        SecureRefusal: it does not agree: a key that is not its owner's peers', a round that has been, too few clients.
    """

    def __init__(
        self,
        agreement: bytes,
        client: ClientId,
        identity: Ed25519PrivateKey,
        peers: Collection[bytes],
        *,
        after: int = 0,
        least: int = LEAST,
    ) -> None:
        self.agreement = Agreement.decode(agreement)
        self.clipped = 0
        self._client, self._identity = client, identity
        self._check(frozenset(peers), after, least)
        self._mask, self._box = secrets.token_bytes(KEY_BYTES), secrets.token_bytes(KEY_BYTES)
        self._given: list[tuple[bytes, bytes]] = []
        self._ended = ""
        self._session = b""
        self._keyed = self._boxed = self._survivors = frozenset[ClientId]()
        self._masks: dict[ClientId, bytes] = {}  # the others' public keys
        self._boxes: dict[ClientId, bytes] = {}
        self._seeds: dict[int, bytes] = {}
        self._shares: HeldShares = {}

    def keys(self) -> bytes:
        """Step 1: its public keys, signed."""
        return self._once(0, b"", self._make_keys)

    def boxes(self, key_list: bytes) -> bytes:
        """Step 2: for each other client its shares of this one's secrets.

        Args:
            key_list: all clients' keys.

        Raises:
            SecureRefusal: a key is not signed by its client, or for another agreement, or too few clients are there.
        """
        return self._once(1, key_list, lambda: self._make_boxes(key_list))

    def words(
        self,
        box_list: bytes,
        values: Mapping[str, Tensor],
        weight: int = 1,
        row_weights: Mapping[str, Tensor] | None = None,
    ) -> bytes:
        """Step 3: what it adds to the sums, masked.

        Args:
            box_list: the others' boxes for this client.
            values: by name, its pieces of the tensors that are summed.
            weight: how often those count that are weighed by client.
            row_weights: by name, how often each row counts of those that are weighed by row, int64 (rows,).

        Raises:
            SecureRefusal: too few boxes open, as if the others had been told other keys.
            ValueError: values or weights are not those of the agreement.
        """
        return self._once(2, box_list, lambda: self._make_words(box_list, values, weight, row_weights or {}))

    def signature(self, survivors: bytes) -> bytes:
        """Step 4: its signature of the list of survivors.

        Args:
            survivors: the list.

        Raises:
            SecureRefusal: it lacks this client, or has too few.
        """
        return self._once(3, survivors, lambda: self._make_signature(survivors))

    def shares(self, signatures: bytes) -> bytes:
        """Step 5: the shares of what is to be taken off the sums.

        Args:
            signatures: of the list of survivors.

        Raises:
            SecureRefusal: too few clients have signed the list that this one was shown.
        """
        return self._once(4, signatures, lambda: self._make_shares(signatures))

    def _check(self, peers: frozenset[bytes], after: int, least: int) -> None:
        """Check what the server proposes."""
        agreement, own = self.agreement, self._identity.public_key().public_bytes_raw()
        if agreement.keys.get(self._client) != own:
            raise SecureRefusal(f"the agreement has another key for client {self._client} than its own")
        strangers = [one for one, key in agreement.keys.items() if key != own and key not in peers]
        if strangers:
            named = ", ".join(map(str, strangers[:5]))
            raise SecureRefusal(f"clients whose keys are not among the peers of this client's owner: {named}")
        if agreement.round <= after:
            raise SecureRefusal(
                f"found round {agreement.round}; expected one after {after}, since no round is repeated"
            )
        if agreement.least < least:
            found = f"sums over {agreement.least} clients"
            raise SecureRefusal(f"found {found}; expected at least {least}, as its owner says")

    def _once(self, step: int, request: bytes, answer: Callable[[], bytes]) -> bytes:
        """The answer to a request, the same as ever if it is the same as ever."""
        if self._ended:
            raise SecureRefusal(f"this client has ended the round: {self._ended}")
        try:
            if step < len(self._given):
                asked, given = self._given[step]
                if asked != request:
                    raise SecureRefusal(f"it was asked for its {ANSWERS[step]} again, and for others than before")
                return given
            if step > len(self._given):
                raise SecureRefusal(f"it was asked for its {ANSWERS[step]} before the step that comes first")
            given = answer()
        except Exception as error:
            self._ended = str(error) or type(error).__name__
            raise
        self._given.append((request, given))
        return given

    def _make_keys(self) -> bytes:
        mask, box = public_half(self._mask), public_half(self._box)
        signature = self._identity.sign(steps.keys_signed(self.agreement, self._client, mask, box))
        return Message(mask=as_tensor(mask), box=as_tensor(box), signature=as_tensor(signature)).encode()

    def _make_boxes(self, key_list: bytes) -> bytes:
        agreement = self.agreement
        self._keyed = self._read_keys(key_list)
        self._session = steps.session_of(agreement, key_list)
        self._seeds = {
            number: secrets.token_bytes(KEY_BYTES) for number in agreement.summed_of(self._client, self._keyed)
        }
        listed = sorted(self._keyed)
        holders = [agreement.holder(one) for one in listed]
        parts = [secret_shares(one, holders, agreement.needed) for one in (self._mask, *self._seeds.values())]
        of_holder = dict(zip(listed, zip(*parts, strict=True), strict=True))
        self._shares = {self._client: list(of_holder.pop(self._client))}
        boxes = [sealed_box(self._box_key(self._client, one), b"".join(of_holder[one])) for one in of_holder]
        hashes = [steps.seed_hash(self._session, self._client, number, seed) for number, seed in self._seeds.items()]
        return Message(
            hashes=as_tensor(b"".join(hashes), len(hashes), KEY_BYTES),
            boxes=as_tensor(b"".join(boxes), len(boxes), len(boxes[0])),
        ).encode()

    def _read_keys(self, key_list: bytes) -> ClientSet:
        """Whose keys are there; each must be signed by its client, for this agreement."""
        agreement, what = self.agreement, "the list of keys"
        message = message_in(key_list, steps.key_list_form(agreement), what)
        keyed = steps.clients_in(message, agreement.keys, agreement.needed, what)
        columns = (message[name] for name in ("masks", "boxes", "signatures"))
        for client, *row in zip(sorted(keyed), *columns, strict=True):
            mask, box, signature = map(as_bytes, row)
            steps.check_signature(agreement, client, signature, steps.keys_signed(agreement, client, mask, box), what)
            self._masks[client], self._boxes[client] = mask, box
        own = public_half(self._mask), public_half(self._box)
        if (self._masks.get(self._client), self._boxes.get(self._client)) != own:
            raise SecureRefusal(f"{what} lacks this client's own keys")
        return keyed

    def _box_key(self, sender: ClientId, receiver: ClientId) -> bytes:
        """The key of the box of one client, which is this one, for another, or the other way round."""
        other = receiver if sender == self._client else sender
        return key_for(self._known(self._box, self._boxes[other], other), self._session, "box", sender, receiver)

    def _known(self, secret: bytes, public: bytes, client: ClientId) -> bytes:
        try:
            return both_know(secret, public)
        except ValueError as error:
            raise SecureRefusal(f"client {client}'s public key is one that hides nothing") from error

    def _make_words(
        self, box_list: bytes, values: Mapping[str, Tensor], weight: int, row_weights: Mapping[str, Tensor]
    ) -> bytes:
        agreement, client = self.agreement, self._client
        self._boxed = self._open(box_list)
        own, places = self._units(values, weight, row_weights), agreement.coverage.places(client)
        parts: dict[int, Words] = {}
        for number in agreement.summed_of(client, self._boxed):
            first = np.array([weight] if agreement.coverage.blocks[number].weighed else [], np.int64)
            parts[number] = to_words(np.concatenate([first, own[places[number]]]), agreement.word)
            key = key_for(self._seeds[number], self._session, "own mask")
            parts[number] += stream(key, len(parts[number]), agreement.word)
        for other in sorted(self._boxed - {client}):
            self._mask_with(other, parts)
        return Message(words=as_tensor(b"".join(part.tobytes() for part in parts.values()))).encode()

    def _mask_with(self, other: ClientId, parts: Mapping[int, Words]) -> None:
        """Add the masks that this client and another have in common, which the other's words have subtracted."""
        blocks = [number for number in parts if other in self.agreement.coverage.blocks[number].members]
        if not blocks:
            return
        known = self._known(self._mask, self._masks[other], other)
        for number in blocks:
            mask = stream(key_for(known, self._session, "mask", number), len(parts[number]), self.agreement.word)
            if self._client < other:
                np.add(parts[number], mask, out=parts[number])
            else:
                np.subtract(parts[number], mask, out=parts[number])

    def _open(self, box_list: bytes) -> ClientSet:
        """Whose boxes are there. Those that do not open are their senders' shares lost, which few may be."""
        agreement, what = self.agreement, "the list of boxes"
        message = message_in(box_list, steps.box_list_form(agreement, self._client, self._keyed), what)
        boxed = steps.clients_in(message, self._keyed, agreement.needed, what)
        others = sorted(boxed - {self._client})
        sizes = [steps.box_bytes(agreement, one, self._keyed) for one in others]
        if self._client not in boxed or len(message["boxes"]) != sum(sizes):
            raise SecureRefusal(f"{what}: expected this client, and a box of each other one")
        for sender, box in zip(others, message["boxes"].split(sizes), strict=True):
            try:
                content = opened_box(self._box_key(sender, self._client), as_bytes(box))
            except InvalidTag:
                continue
            self._shares[sender] = [content[at : at + SHARE_BYTES] for at in range(0, len(content), SHARE_BYTES)]
        if len(self._shares) < agreement.needed:
            opened = f"{len(self._shares) - 1} of {len(others)} boxes open"
            raise SecureRefusal(f"{what}: {opened}; the others may have been told something else than this client")
        return boxed

    def _units(self, values: Mapping[str, Tensor], weight: int, row_weights: Mapping[str, Tensor]) -> Units:
        """What this client adds to the sums, coordinate by coordinate, in its own order."""
        agreement = self.agreement
        coverage, numbers = agreement.coverage, agreement.numbers
        pieces = coverage.pieces[coverage.kinds[self._client]]
        by_row = {name for name in pieces if coverage.summands[name].weighing == "row"}
        if values.keys() != pieces.keys() or set(row_weights) != by_row:
            raise ValueError(
                "secure sums: expected the tensors of the agreement, and weights of rows where it has such"
            )
        _check_weights(np.array([weight]), 1, numbers.weight)
        parts, self.clipped = [np.empty(0, np.int64)], 0
        for name, piece in sorted(pieces.items()):
            shape = piece_shape(piece)
            if values[name].shape != shape:
                raise ValueError(f"secure sums: {name} has shape {tuple(values[name].shape)}; expected {shape}")
            units, clipped = numbers.units(values[name])
            self.clipped += clipped
            if name not in by_row:
                parts.append(units * (weight if coverage.summands[name].weighing == "client" else 1))
                continue
            rows = row_weights[name].numpy().astype(np.int64).reshape(-1)
            if len(rows) != shape[0]:
                raise ValueError(
                    f"secure sums: {name} has {shape[0]} rows; expected a weight of each, found {len(rows)}"
                )
            _check_weights(rows, 0, numbers.weight)
            parts += [(units.reshape(shape[0], math.prod(shape[1:])) * rows[:, None]).reshape(-1), rows]
        return np.concatenate(parts)

    def _make_signature(self, survivors: bytes) -> bytes:
        what = "the list of survivors"
        message = message_in(survivors, steps.survivors_form(self.agreement), what)
        listed = steps.clients_in(message, self._boxed, self.agreement.needed, what)
        if self._client not in listed:
            raise SecureRefusal(f"{what} lacks this client, whose words were sent")
        self._survivors = listed
        signature = self._identity.sign(steps.survivors_signed(self._session, self._boxed, listed))
        return Message(signature=as_tensor(signature)).encode()

    def _make_shares(self, signatures: bytes) -> bytes:
        agreement, what = self.agreement, "the list of signatures"
        message = message_in(signatures, steps.signatures_form(agreement), what)
        signers = steps.clients_in(message, self._survivors, agreement.needed, what)
        signed = steps.survivors_signed(self._session, self._boxed, self._survivors)
        for client, signature in zip(sorted(signers), message["signatures"], strict=True):
            steps.check_signature(agreement, client, as_bytes(signature), signed, what)
        told = [share for one in sorted(self._shares) for share in self._told_of(one)]
        return Message(of=ids(self._shares), shares=as_tensor(b"".join(told), len(told), SHARE_BYTES)).encode()

    def _told_of(self, client: ClientId) -> list[bytes]:
        """The shares of a survivor's seeds of the blocks that are summed, or of the secret of one that has left."""
        agreement = self.agreement
        secret, *seeds = self._shares[client]
        if client not in self._survivors:
            return [secret]
        of_block = dict(zip(agreement.summed_of(client, self._keyed), seeds, strict=True))
        return [of_block[number] for number in agreement.summed_of(client, self._survivors)]


def _check_weights(weights: Units, least: int, most: int) -> None:
    wrong = weights[(weights < least) | (weights > most)]
    if len(wrong):
        raise ValueError(f"secure sums: found a weight of {wrong[0]}; expected {least} to {most:,}")
