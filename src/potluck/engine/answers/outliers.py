"""Replies whose numbers stand far out from the others' of their exchange, and the round that such a reply has spoilt.

A reply may hold any numbers up to `run.largest_value`, and a mean that has taken in one of 9e8 makes everybody diverge.
So the replies of an exchange are compared, tensor by tensor: how far a client has moved a tensor from what it was sent,
or how large it is where none like it was sent, against the median of the clients that moved one of that name. Sizes are
root mean squares, so that slices of a tensor can be compared with the whole.

A client may exceed the median by a factor, and by as much more as it has more training examples than the median client,
up to a hundredfold, since who takes a hundred steps moves further than who takes one. Numbers that their declaration
bounds, such as probabilities, counts and masks, are not compared, nor are single numbers.

Among five or more the median is an honest client's even if two lie. What exceeds it by the run's factor is refused, if
its size can do harm: if it is above ten, and a tensor that was sent came back ten times as large or more. What exceeds
the median tenfold and is not refused is believed, and remembered for a round. If everybody else diverges on what has
become of it, that round is undone, and the client named; one that is named again is left out of the rest of the run.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from potluck.core.federation import ClientId
from potluck.core.message import Message
from potluck.core.roles import Failure
from potluck.core.schema import Kind, Misfit, Path
from potluck.engine.client.runtime import Outcome
from potluck.engine.client.session import Answer
from potluck.engine.executors.held import Held

LEAST_OWNERS = 5
"""The fewest clients by whose median a reply is refused."""

MOST_OFTEN = 2
"""How often a client is named until it is left out."""

_MOST_WORK = 100.0
_REMEMBERED = 10.0  # times the median; honest clients exceed it now and then, which costs nothing unless all diverge
_HARMLESS = 10.0
_GROWN = 10.0
_NOISE = 1e-3  # rounding moves a bias before BatchNorm, whose gradient is zero
_LEAST_DIVERGED = 2  # a single client's word that it diverged undoes nothing


@dataclass(frozen=True)
class Size:
    """The size of a tensor in a reply; all are root mean squares.

    Attributes:
        number: of its differences from what was sent; of its numbers, if none like it was.
        sent: of what was sent; None if none like it was.
        came: of its numbers.
    """

    number: float
    sent: float | None
    came: float

    @property
    def counts(self) -> bool:
        """Whether it may have spoilt a round: it is more than noise, and moved by more than its own size."""
        return self.number > max(_NOISE, self.sent or 0.0)

    @property
    def harms(self) -> bool:
        """Whether it is so large that a mean can be spoilt by it."""
        return self.number > _HARMLESS and (self.sent is None or self.came > _GROWN * self.sent)


@dataclass(frozen=True)
class Outlier:
    """The tensor of a client's reply that stands out most.

    Attributes:
        client: whose it is.
        name: the names that lead to it, joined by dots.
        moved: whether its size is how far it was moved, or how large it is.
        size: root mean square.
        most: the largest size expected.
        owners: the number of clients compared, with this one.
        refused: whether it costs its client the reply.
    """

    client: ClientId
    name: str
    moved: bool
    size: float
    most: float
    owners: int
    refused: bool

    @property
    def ratio(self) -> float:
        """How many times the largest size expected."""
        return self.size / self.most

    def __str__(self) -> str:
        did = "moved by" if self.moved else "is of the size"
        most = f"expected at most {self.most:.3g} by the median of {self.owners} clients"
        return f"its {self.name} {did} {self.size:.3g} (root mean square); {most}"


@dataclass(frozen=True)
class Before:
    """What a round that may be undone began with.

    Attributes:
        number: of the round.
        state: the method's state.
        mark: the mark of the clients' store.
        outlier: the reply that stood out in it.
    """

    number: int
    state: Any
    mark: Any
    outlier: Outlier


class Outliers:
    """Compares the replies of each exchange, and remembers for a round what stood out and was believed.

    Args:
        factor: how many times the median is refused.
        examples: by client, its number of training examples.

    Attributes:
        before: the start of the last round, if it may have to be undone; set it when resuming.
        named: how often each client was named; set it when resuming.
    """

    def __init__(self, factor: float, examples: Mapping[ClientId, int]) -> None:
        self.before: Before | None = None
        self.named: Counter[ClientId] = Counter()
        self._believed: Outlier | None = None  # of this round
        self._factor = factor
        self._examples = examples

    def forget(self) -> None:
        """Forget all rounds, as before the first."""
        self.before, self._believed = None, None
        self.named.clear()

    @property
    def left_out(self) -> set[ClientId]:
        """The clients that were named too often."""
        return {client for client, times in self.named.items() if times >= MOST_OFTEN}

    def begin(self, number: int) -> None:
        """Begin a round; only the one before it can still be undone."""
        self._believed = None
        if self.before is not None and self.before.number < number - 1:
            self.before = None

    def end(self, number: int, state: Any, mark: Any) -> None:
        """End a round that was not lost and began with this state and mark."""
        self.before = None if self._believed is None else Before(number, state, mark, self._believed)

    def sifted(
        self,
        admitted: Iterable[tuple[Outcome, Message | Failure]],
        messages: Mapping[ClientId, Message],
        expected: Mapping[ClientId, Kind],
        refused: Callable[[ClientId, Misfit], Failure],
    ) -> Iterator[tuple[Outcome, Message | Failure]]:
        """The outcomes of an exchange with their replies, once all are there, and failures for those that stand out.

        Replies wait as executors' outcomes do, in files if they are large; only their sizes are kept in memory.

        Args:
            admitted: outcomes, with the reply or the failure that the door makes of each.
            messages: what each client was sent.
            expected: the schema of each reply.
            refused: makes the failure of a client from a Misfit.
        """
        waiting, sizes = Held(), dict[ClientId, dict[Path, Size]]()
        for place, (outcome, reply) in enumerate(admitted):
            if isinstance(reply, Message):
                sizes[outcome.client] = sizes_of(reply, messages[outcome.client], expected[outcome.client])
            waiting[place] = reply if isinstance(reply, Failure) else outcome
            del outcome, reply
        found = {one.client: one for one in standing_out(sizes, self._examples, self._factor)}
        self._remember(one for one in found.values() if not one.refused)
        for place in range(len(waiting)):
            outcome = waiting.pop(place)
            one = found.get(outcome.client)
            if one is not None and one.refused:
                outcome = refused(one.client, Misfit(f"{one}, by run.outlier_factor {self._factor:g}"))
            if isinstance(outcome, Answer):
                yield outcome, Message.decode(outcome.payload, views=True)
            else:
                assert isinstance(outcome, Failure)
                yield outcome, outcome
            del outcome

    def blamed(self, answered: Collection[ClientId], diverged: Collection[ClientId]) -> Outlier | None:
        """The reply on which all clients of an exchange but its own have diverged; None if they have not."""
        one = self.suspect
        alone = one is not None and set(answered) <= {one.client}
        return one if alone and len(diverged) >= _LEAST_DIVERGED else None

    @property
    def suspect(self) -> Outlier | None:
        """Of the replies of this round and of the one before it that were believed, the one that stood out most."""
        found = [self._believed, self.before and self.before.outlier]
        return max(filter(None, found), key=lambda one: one.ratio, default=None)

    def undo(self) -> Before | None:
        """Name the suspect's client; return what to go back to, None if its reply is of this round."""
        one, before, self.before = self.suspect, self.before, None
        if one is not None:
            self.named[one.client] += 1
        return before if before is not None and before.outlier is one else None

    def _remember(self, found: Iterable[Outlier]) -> None:
        known = [self._believed] if self._believed else []
        self._believed = max([*known, *found], key=lambda one: one.ratio, default=None)


def sizes_of(reply: Message, sent: Message, kind: Kind) -> dict[Path, Size]:
    """The sizes of a reply's tensors, by the names that lead to them, but for those that the schema bounds.

    Args:
        reply: it fits the schema.
        sent: the message that it answers.
        kind: the schema.
    """
    return {path: _size(tensor, _at(sent, path)) for path, tensor in kind.unbounded(reply)}


def standing_out(
    sizes: Mapping[ClientId, Mapping[Path, Size]], examples: Mapping[ClientId, int], factor: float
) -> list[Outlier]:
    """Of each client whose reply stands out, the tensor that does so most; one that is refused comes before others.

    Args:
        sizes: of the replies of one exchange.
        examples: by client, its number of training examples.
        factor: how many times the median is refused.
    """
    owners: dict[tuple[Path, bool], dict[ClientId, Size]] = {}
    for client, of in sizes.items():
        for path, size in of.items():
            if size.number:  # who leaves a tensor as it is says nothing of how far one moves it
                owners.setdefault((path, size.sent is not None), {})[client] = size
    found: dict[ClientId, list[Outlier]] = {}
    for (path, moved), those in owners.items():
        middle = median_low(size.number for size in those.values())
        usual = max(1, median_low(examples[client] for client in those))
        for client, size in those.items():
            own = middle * min(max(1.0, examples[client] / usual), _MOST_WORK)
            refused = len(those) >= LEAST_OWNERS and size.harms and size.number > factor * own
            most = own * (factor if refused else min(factor, _REMEMBERED))
            if size.counts and size.number > most:
                one = Outlier(client, ".".join(path), moved, size.number, most, len(those), refused)
                found.setdefault(client, []).append(one)
    return [max(of, key=lambda one: (one.refused, one.ratio)) for of in found.values()]


def _size(tensor: Tensor, sent: Any) -> Size:
    came = _rms(tensor)
    if not (isinstance(sent, Tensor) and sent.shape == tensor.shape):
        return Size(came, None, came)
    sent = sent.to(tensor.device)
    return Size(_rms(tensor - sent), _rms(sent), came)


def _rms(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    numbers = tensor if tensor.is_floating_point() else tensor.double()
    return float(torch.linalg.vector_norm(numbers, dtype=torch.float64)) / math.sqrt(tensor.numel())


def _at(message: Message, path: Path) -> Any:
    """What a message holds at a place; None if nothing."""
    node: Any = message
    for name in path:
        node = node.get(name) if isinstance(node, Mapping) else None
    return node
