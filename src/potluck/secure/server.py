"""The server's half of secure sums: it passes on what clients say, and takes off the sums what hides them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from potluck.core.federation import ClientId
from potluck.core.ground.errors import WireError
from potluck.core.ground.tree import pack, unpack
from potluck.core.message import Message
from potluck.core.nets.weights import Weights
from potluck.core.schema import Schema
from potluck.secure import ANSWERS, steps
from potluck.secure.agreement import Agreement, SecureRefusal
from potluck.secure.coverage import weights_that_follow
from potluck.secure.fixed import Units, Words, to_units
from potluck.secure.masks import both_know, key_for, public_half, stream
from potluck.secure.shamir import secret_from
from potluck.secure.steps import ClientSet, as_bytes, as_tensor, ids, message_in


@dataclass(frozen=True)
class SecureSums:
    """What the server learns of a round.

    Attributes:
        sums: by name, the sum of the survivors' tensors, each times its weight, in units of 2^-bits, int64; 0 where
            nothing was summed.
        weights: by name, the sum of the weights of those summed, for each coordinate, int64; 0 where nothing was.
        bits: bits behind the point.
        survivors: the clients whose numbers were summed.
        local: how many coordinates stayed with their clients, since fewer than the agreement's least cover them.
        lost: how many were not summed since too few of those who cover them have survived.
        told: the clients whose weight follows from the sums of weights.
    """

    sums: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    bits: int
    survivors: tuple[ClientId, ...]
    local: int
    lost: int
    told: frozenset[ClientId]

    def means(self, keep: Mapping[str, Tensor]) -> Weights:
        """The weighted means over `keep`, the values of coordinates that were not summed, in its types."""
        found: Weights = {}
        for name, old in keep.items():
            if name not in self.sums:
                found[name] = old
                continue
            weights = self.weights[name]
            mean = self.sums[name].double() * 2.0**-self.bits / weights.clamp(min=1)
            found[name] = torch.where(weights > 0, mean.to(old.dtype), old)
        return found

    def __str__(self) -> str:
        parts = [f"summed over {len(self.survivors)} clients"]
        if self.local:
            parts.append(f"{self.local:,} numbers stayed with their clients, since too few have them")
        if self.lost:
            parts.append(f"{self.lost:,} were not summed, since too few of their clients are left")
        if self.told:
            parts.append(f"the weights of {len(self.told)} clients follow from the sums of weights")
        return "; ".join(parts)


class SecureServer:
    """What a server does in one round of secure sums.

    At each step it sends each client that is still there its request, takes the answers that come, and closes the step.
    It keeps no secret: all that it holds is what clients have sent, which `save` writes and `restored` reads, so that
    it may be stopped within a round.

    Args:
        agreement: what the round is about.

    Attributes:
        step: the number of the step, from 0; 5 when all are closed.
    """

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self.step = 0
        self._answers: list[dict[ClientId, bytes]] = [{}]
        self._read: dict[ClientId, Message] = {}  # the answers of the step before, as far as they were read
        self._for_all = self._key_list = self._session = b""
        self._masks: dict[ClientId, bytes] = {}  # public keys

    @property
    def done(self) -> bool:
        """Whether all steps are closed."""
        return self.step == len(ANSWERS)

    @property
    def asked(self) -> tuple[ClientId, ...]:
        """Who is asked at this step, ascending: all clients, and then those who answered at the step before."""
        if self.done:
            return ()
        return self.agreement.clients if self.step == 0 else tuple(sorted(self._there(self.step - 1)))

    @property
    def answered(self) -> ClientSet:
        """Who has answered at this step."""
        return self._there(self.step)

    def request(self, client: ClientId) -> bytes:
        """What a client is to be sent at this step."""
        if self.step == 2:
            return self._box_list(client)
        self._for_all = self._for_all or self._request_for_all()
        return self._for_all

    def most_bytes(self, client: ClientId) -> int:
        """The most bytes of what a client may answer at this step."""
        return self._form(client).nbytes + steps.FRAMING

    def take(self, client: ClientId, answer: bytes) -> None:
        """Take a client's answer to this step's request.

        Raises:
            SecureRefusal: it is not what this client may answer now, which is the client's failure.
        """
        if client not in self.asked:
            raise SecureRefusal(f"found an answer of client {client}, which is not asked at this step")
        if self._answers[self.step].get(client, answer) != answer:
            raise SecureRefusal(f"client {client} has answered otherwise before")
        what = f"{ANSWERS[self.step]} of client {client}"
        self._check(client, message_in(answer, self._form(client), what), what)
        self._answers[self.step][client] = answer

    def close(self) -> None:
        """Go on to the next step with those who have answered.

        Raises:
            SecureRefusal: they are too few; nothing is summed in this round.
        """
        if self.done:
            raise SecureRefusal("secure sums: all steps are closed")
        there, needed = len(self.answered), self.agreement.needed
        if there < needed:
            found = f"{there} of {len(self.agreement.keys)} clients sent {ANSWERS[self.step]}"
            raise SecureRefusal(f"secure sums: {found}, and {needed} must; nothing is summed in this round")
        self._read, self._for_all = {}, b""
        self.step += 1
        self._answers.append({})
        if self.step == 1:
            self._key_list = self._make_key_list()
            self._masks = {client: as_bytes(self._before(client)["mask"]) for client in sorted(self._there(0))}
            self._session = steps.session_of(self.agreement, self._key_list)

    def save(self) -> bytes:
        """All of this round so far."""
        answers = [{client: as_tensor(answer) for client, answer in sorted(one.items())} for one in self._answers]
        return pack({"agreement": as_tensor(self.agreement.encode()), "answers": answers})

    @classmethod
    def restored(cls, data: bytes) -> "SecureServer":
        """The server that was saved.

        Raises:
            WireError: the bytes are not what `save` wrote.
        """
        try:
            tree = unpack(data)
            server = cls(Agreement.decode(as_bytes(tree["agreement"])))
            for number, answers in enumerate(tree["answers"]):
                if number:
                    server.close()
                for client, answer in answers.items():
                    server.take(client, as_bytes(answer))
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise WireError("these are no secure sums that were saved") from error
        return server

    def sums(self) -> SecureSums:
        """The sums, once all steps are closed.

        Raises:
            SecureRefusal: shares do not fit what they are shares of; nothing is summed in this round.
        """
        if not self.done:
            raise SecureRefusal(f"secure sums: the {ANSWERS[self.step]} have not all come; close this step first")
        agreement, survivors = self.agreement, self._there(2)
        totals = {
            number: np.zeros(agreement.coverage.blocks[number].words, f"<u{agreement.word // 8}")
            for number in agreement.summed(survivors)
        }
        secrets = _Joined(self)
        for client in sorted(survivors):
            self._add(client, secrets, totals)
        for client in sorted(self._there(1) - survivors):
            self._take_off(client, secrets, totals)
        return self._found({number: to_units(words) for number, words in totals.items()})

    def _there(self, step: int) -> ClientSet:
        return frozenset(self._answers[step])

    def _request_for_all(self) -> bytes:
        """What all are sent at this step."""
        if self.step == 0:
            return self.agreement.encode()
        if self.step == 1:
            return self._key_list
        if self.step == 3:
            return Message(clients=ids(self._there(2))).encode()
        signers = self._there(3)
        signatures = [self._before(one)["signature"] for one in sorted(signers)]
        return Message(clients=ids(signers), signatures=torch.stack(signatures)).encode()

    def _form(self, client: ClientId) -> Schema:
        """What a client may answer at this step."""
        if self.step == 0:
            return steps.keys_form()
        if self.step == 1:
            return steps.boxes_form(self.agreement, client, self._there(0))
        if self.step == 2:
            return steps.words_form(self.agreement, client, self._there(1))
        if self.step == 3:
            return steps.signature_form()
        return steps.shares_form(self.agreement, self._there(1), self._there(2))

    def _check(self, client: ClientId, message: Message, what: str) -> None:
        """Check what its form does not say, so that nobody else refuses the round on its account."""
        agreement = self.agreement
        if self.step == 0:
            mask, box = as_bytes(message["mask"]), as_bytes(message["box"])
            signed = steps.keys_signed(agreement, client, mask, box)
            steps.check_signature(agreement, client, as_bytes(message["signature"]), signed, what)
            for key in (mask, box):
                _check_key(key, what)
        elif self.step == 3:
            signed = steps.survivors_signed(self._session, self._there(1), self._there(2))
            steps.check_signature(agreement, client, as_bytes(message["signature"]), signed, what)
        elif self.step == 4:
            self._check_shares(message, what)

    def _check_shares(self, message: Message, what: str) -> None:
        survivors, listed = self._there(2), message["of"].tolist()
        if listed != sorted(set(listed)) or not set(listed) <= self._there(1):
            raise SecureRefusal(f"{what} are of clients that have no boxes, or not in ascending order")
        rows = sum(steps.rows_of_shares(self.agreement, one, survivors) for one in listed)
        if len(message["shares"]) != rows:
            raise SecureRefusal(f"{what}: found {len(message['shares'])}; expected {rows}")

    def _before(self, client: ClientId) -> Message:
        """A client's answer at the step before."""
        return self._answer(self.step - 1, client)

    def _answer(self, step: int, client: ClientId) -> Message:
        if step != self.step - 1:
            return Message.decode(self._answers[step][client])
        if client not in self._read:
            self._read[client] = Message.decode(self._answers[step][client])
        return self._read[client]

    def _make_key_list(self) -> bytes:
        clients = sorted(self._there(0))
        columns = {
            name: torch.stack([self._before(client)[entry] for client in clients])
            for name, entry in (("masks", "mask"), ("boxes", "box"), ("signatures", "signature"))
        }
        return Message(clients=ids(clients), **columns).encode()

    def _box_list(self, client: ClientId) -> bytes:
        """Of those who have sent boxes, the one for this client of each other."""
        keyed, boxed = sorted(self._there(0)), sorted(self._there(1))
        row = keyed.index(client)
        boxes = [
            self._before(sender)["boxes"][row - (sender < client)]  # senders have none for themselves
            for sender in boxed
            if sender != client
        ]
        return Message(clients=ids(boxed), boxes=torch.cat(boxes)).encode()

    def _add(self, client: ClientId, secrets: "_Joined", totals: Mapping[int, Words]) -> None:
        """Add a survivor's words, without its own masks."""
        words, at = self._words_of(client), 0
        seeds = secrets.seeds(client)
        for number in self.agreement.summed_of(client, self._there(1)):
            count = self.agreement.coverage.blocks[number].words
            if number in totals:
                mask = stream(key_for(seeds[number], self._session, "own mask"), count, self.agreement.word)
                totals[number][:] += words[at : at + count] - mask
            at += count

    def _words_of(self, client: ClientId) -> Words:
        return self._answer(2, client)["words"].numpy().view(f"<u{self.agreement.word // 8}")

    def _take_off(self, left: ClientId, secrets: "_Joined", totals: Mapping[int, Words]) -> None:
        """Take off the masks that survivors have in common with a client that has left."""
        blocks = [number for number in totals if left in self.agreement.coverage.blocks[number].members]
        secret, survivors = secrets.secret(left) if blocks else b"", self._there(2)
        for client in sorted(frozenset[ClientId]().union(*(self._with(number, survivors) for number in blocks))):
            known = both_know(secret, self._masks[client])
            for number in blocks:
                if client in self.agreement.coverage.blocks[number].members:
                    total = totals[number]
                    mask = stream(key_for(known, self._session, "mask", number), len(total), self.agreement.word)
                    total[:] = total - mask if client < left else total + mask

    def _with(self, number: int, clients: ClientSet) -> frozenset[ClientId]:
        return self.agreement.coverage.blocks[number].members & clients

    def _found(self, units: Mapping[int, Units]) -> SecureSums:
        """The sums by block, put into their tensors."""
        coverage, survivors = self.agreement.coverage, self._there(2)
        sums, weights = (np.zeros(coverage.size, np.int64) for _ in range(2))
        for number, found in units.items():
            block = coverage.blocks[number]
            sums[block.positions] = found[int(block.weighed) :]
            weights[block.positions] = len(block.members & survivors)
            if block.weighed:
                at = block.positions[coverage.by_client[block.positions]]
                weights[at] = found[0]
        apart = [block for number, block in enumerate(coverage.blocks) if number not in units]
        few = sum(len(block.positions) for block in apart if len(block.clients) < self.agreement.least)
        weighed = {self._with(number, survivors) for number in units if coverage.blocks[number].weighed}
        return SecureSums(
            sums={name: coverage.tensor_of(name, sums) for name in coverage.starts},
            weights={name: self._weights_of(name, sums, weights) for name in coverage.starts},
            bits=self.agreement.numbers.bits,
            survivors=tuple(sorted(survivors)),
            local=few,
            lost=sum(len(block.positions) for block in apart) - few,
            told=weights_that_follow(weighed),
        )

    def _weights_of(self, name: str, sums: Units, weights: Units) -> Tensor:
        """The sum of weights for each coordinate of a tensor."""
        coverage = self.agreement.coverage
        found = coverage.tensor_of(name, weights)
        return found if coverage.summands[name].weighing != "row" else (found > 0) * coverage.rows_of(name, sums)


class _Joined:
    """Secrets, put together from the shares that were told."""

    def __init__(self, server: SecureServer) -> None:
        self._agreement, self._session = server.agreement, server._session
        self._keyed, self._boxed, self._survivors = (server._there(step) for step in range(3))
        self._server = server
        self._tellers = {client: server._answer(4, client) for client in sorted(server._there(4))}
        self._of = {client: message["of"].numpy() for client, message in self._tellers.items()}
        self._ends = {client: self._rows(of) for client, of in self._of.items()}

    def secret(self, client: ClientId) -> bytes:
        """The secret of a client that has left, which its public key shows to be the right one."""
        (secret,) = self._joined(client, 1)
        if public_half(secret) != self._server._masks[client]:
            raise self._wrong(client)
        return secret

    def seeds(self, client: ClientId) -> dict[int, bytes]:
        """By block that is summed, the seed of a survivor's own mask, which its hash shows to be the right one."""
        if not (told := self._agreement.summed_of(client, self._survivors)):
            return {}
        hashes = self._server._answer(1, client)["hashes"]
        bound = dict(zip(self._agreement.summed_of(client, self._keyed), hashes, strict=True))
        seeds = dict(zip(told, self._joined(client, len(told)), strict=True))
        for number, seed in seeds.items():
            if steps.seed_hash(self._session, client, number, seed) != as_bytes(bound[number]):
                raise self._wrong(client)
        return seeds

    def _joined(self, client: ClientId, count: int) -> Iterator[bytes]:
        """So many secrets of a client, in order."""
        rows: dict[ClientId, int] = {}
        for teller, of in self._of.items():
            at = int(np.searchsorted(of, client))
            if at < len(of) and of[at] == client:
                rows[teller] = int(self._ends[teller][at]) - count
            if len(rows) == self._agreement.needed:
                break
        else:
            found = f"{len(rows)} clients have shares of client {client}'s secrets"
            raise SecureRefusal(f"secure sums: {found}, and {self._agreement.needed} must; nothing is summed")
        for number in range(count):
            shares = {
                self._agreement.holder(teller): as_bytes(self._tellers[teller]["shares"][row + number])
                for teller, row in rows.items()
            }
            try:
                yield secret_from(shares)
            except ValueError as error:
                raise self._wrong(client) from error

    def _rows(self, of: Units) -> Units:
        """Behind which row the shares of each client end."""
        counts = [steps.rows_of_shares(self._agreement, client, self._survivors) for client in of.tolist()]
        return np.cumsum(np.array(counts, np.int64))

    def _wrong(self, client: ClientId) -> SecureRefusal:
        return SecureRefusal(
            f"secure sums: the shares of client {client}'s secrets give none of them, so that it, or one who told them,"
            " lies; nothing is summed in this round"
        )


def _check_key(key: bytes, what: str) -> None:
    """Check that a public key hides what it is used for."""
    try:
        both_know(X25519PrivateKey.generate().private_bytes_raw(), key)
    except ValueError as error:
        raise SecureRefusal(f"{what}: a public key is one that hides nothing") from error
