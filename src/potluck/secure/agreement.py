"""What a server and its clients agree on before secure sums of a round: who takes part, what is summed, and how.

The server makes it, every client gets the same bytes, and whatever a client signs or derives afterwards depends on
their hash: clients that were told different things refuse each other's keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from potluck.core.federation import ClientId
from potluck.core.ground.errors import ConfigError, WireError
from potluck.core.ground.text import one_line
from potluck.core.ground.tree import pack, unpack
from potluck.secure.coverage import Coverage, Spans, Summand, TensorPiece
from potluck.secure.fixed import FixedPoint
from potluck.secure.masks import KEY_BYTES, hashed

LEAST = 3
"""The least number of clients whose numbers are summed. What fewer cover stays with them."""

LARGEST_COHORT = 10_000
_LONGEST = 200  # characters of a run's name
_MOST_ROUNDS = 2**40


class SecureRefusal(WireError):
    """A half of secure sums goes no further; the message says on one line why."""


@dataclass(frozen=True, eq=False)
class Agreement:
    """Who sums what in a round.

    Attributes:
        run: a name of the run.
        round: its number in the run, from 1.
        keys: by client, ascending, the public half of the key with which it signs, Ed25519, 32 bytes.
        coverage: the tensors that are summed, and who covers which coordinates.
        numbers: how numbers become whole ones.
        least: the least number of clients whose numbers are summed; of a block that fewer cover, nothing is sent.

    Raises:
        ConfigError: fewer than `least` clients, clients without pieces, or sums that do not fit in 64 bits.
    """

    run: str
    round: int
    keys: Mapping[ClientId, bytes]
    coverage: Coverage
    numbers: FixedPoint = FixedPoint()
    least: int = LEAST

    def __post_init__(self) -> None:
        if self.least < LEAST:
            raise ConfigError(f"secure sums: found sums over {self.least} clients; expected at least {LEAST}")
        if not self.least <= len(self.keys) <= LARGEST_COHORT:
            expected = f"at least {self.least} and at most {LARGEST_COHORT:,}"
            raise ConfigError(f"secure sums: found {len(self.keys)} clients; expected {expected}")
        if list(self.keys) != sorted(self.coverage.kinds):
            raise ConfigError(
                "secure sums: expected pieces for each client of the round, and clients in ascending order"
            )
        if len(set(self.keys.values())) < len(self.keys):
            raise ConfigError("secure sums: found two clients with one key; expected a key of its own for each")
        self.numbers.word(len(self.keys))

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """Those of the round, ascending."""
        return tuple(self.keys)

    @property
    def needed(self) -> int:
        """How many must be there at each step: more than two thirds, so that no two lists of survivors have as many.

        That holds as long as fewer than a third of the clients help the server to lie.
        """
        return 2 * len(self.keys) // 3 + 1

    @property
    def word(self) -> int:
        """Bits of a word, 32 or 64."""
        return self.numbers.word(len(self.keys))

    def holder(self, client: ClientId) -> int:
        """A client's number as a holder of shares, from 1."""
        return self._holders[client]

    def summed(self, among: frozenset[ClientId]) -> tuple[int, ...]:
        """The blocks that enough of these clients cover, by number, ascending."""
        if among not in self._summed:
            blocks = enumerate(self.coverage.blocks)
            found = tuple(number for number, block in blocks if len(block.members & among) >= self.least)
            self._summed[among] = found
        return self._summed[among]

    def summed_of(self, client: ClientId, among: frozenset[ClientId]) -> tuple[int, ...]:
        """Those of them that a client covers."""
        return tuple(number for number in self.summed(among) if client in self.coverage.blocks[number].members)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that identify all this."""
        return hashed(self.encode())

    def encode(self) -> bytes:
        """The bytes that every client gets."""
        coverage = self.coverage
        return pack(
            {
                "run": self.run,
                "round": self.round,
                "clients": torch.tensor(self.clients, dtype=torch.int64),
                "keys": torch.tensor([list(key) for key in self.keys.values()], dtype=torch.uint8),
                "kinds": torch.tensor([coverage.kinds[client] for client in self.clients], dtype=torch.int64),
                "pieces": [
                    {name: [_written(spans) for spans in piece] for name, piece in sorted(pieces.items())}
                    for pieces in coverage.pieces
                ],
                "summands": {
                    name: {"shape": torch.tensor(summand.shape, dtype=torch.int64), "weighing": summand.weighing}
                    for name, summand in sorted(coverage.summands.items())
                },
                "largest": float(self.numbers.largest),
                "bits": self.numbers.bits,
                "weight": self.numbers.weight,
                "least": self.least,
            }
        )

    @staticmethod
    @lru_cache(maxsize=2)  # a process with many clients of a round reads it once
    def decode(data: bytes) -> "Agreement":
        """The agreement in these bytes, which may come from anybody.

        Raises:
            SecureRefusal: they hold none; says what is wrong.
        """
        try:
            agreement = _agreement_in(unpack(data))
            if agreement.encode() != data:
                raise WireError("it is not written as Potluck writes it")
        except (ConfigError, WireError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise SecureRefusal(f"the agreement cannot be read: {one_line(str(error), 200)}") from error
        return agreement

    @cached_property
    def _summed(self) -> dict[frozenset[ClientId], tuple[int, ...]]:
        """What `summed` has found; a round asks for few sets of clients, and very often."""
        return {}

    @cached_property
    def _holders(self) -> Mapping[ClientId, int]:
        return {client: number for number, client in enumerate(self.keys, 1)}


def _agreement_in(tree: Any) -> Agreement:
    """The agreement that a tree describes; whatever does not fit raises one of many errors."""
    clients, kinds = (_whole_numbers(tree[name], 1) for name in ("clients", "kinds"))
    keys: Tensor = tree["keys"]
    if keys.dtype != torch.uint8 or keys.shape != (len(clients), KEY_BYTES) or len(kinds) != len(clients):
        raise WireError("clients, kinds and keys are not of one number")
    if clients != sorted(set(clients)) or min(clients, default=0) < 0:
        raise WireError("clients are not in ascending order, each once")
    run, number = tree["run"], tree["round"]
    if not isinstance(run, str) or len(run) > _LONGEST or type(number) is not int or not 1 <= number < _MOST_ROUNDS:
        raise WireError("the run's name or the round's number is none")
    summands = {
        str(name): Summand(tuple(_whole_numbers(one["shape"], 1)), one["weighing"])
        for name, one in tree["summands"].items()
    }
    pieces = [{str(name): _read_piece(piece) for name, piece in one.items()} for one in tree["pieces"]]
    if len(pieces) > len(clients):
        raise WireError("there are more kinds of clients than clients")
    coverage = Coverage(summands, pieces, dict(zip(clients, kinds, strict=True)))
    least = tree["least"]
    if type(least) is not int:
        raise WireError("the least number of clients is none")
    numbers = FixedPoint(tree["largest"], tree["bits"], tree["weight"])
    return Agreement(run, number, dict(zip(clients, map(bytes, keys.tolist()), strict=True)), coverage, numbers, least)


def _whole_numbers(value: Tensor, dimensions: int) -> list[Any]:
    if value.dtype != torch.int64 or value.dim() != dimensions:
        raise WireError("found other numbers where whole ones belong")
    return value.tolist()


def _written(spans: Spans) -> Tensor:
    return torch.tensor(spans, dtype=torch.int64).view(-1, 2)


def _read_piece(piece: Any) -> TensorPiece:
    return tuple(tuple((start, stop) for start, stop in _whole_numbers(spans, 2)) for spans in piece)
