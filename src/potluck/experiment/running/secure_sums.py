"""Secure sums in a run: what is summed of clients' replies, and what the server gets instead.

Where all clients are on this machine, their halves and the server's are carried out together: that does to the run what
sums between machines do, and costs what they cost. It protects nobody: the one process has all clients' replies in its
memory. Between machines (`potluck.flower.server.sums`) the server has of a reply what its client did not keep back.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from potluck.core.federation import ClientId, Federation
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.text import ON_SCREEN
from potluck.core.message import Message
from potluck.core.method import Method
from potluck.core.nets.slicing import Indices
from potluck.core.nets.weights import Weights
from potluck.core.roles import Failure, Server
from potluck.core.schema import Kind, Schema
from potluck.core.summed import ToSum, blank, put_at, tensor_at
from potluck.engine.rounds.asynchrony.asking import first_ask
from potluck.engine.rounds.engine import Engine
from potluck.engine.rounds.report import SumsReport
from potluck.engine.rounds.sums import SECURE_SUMS, Disclosed, Exchanged
from potluck.experiment.settings.schema import RunConfig
from potluck.experiment.settings.secure import SecureRule
from potluck.parts.means import Aggregate
from potluck.parts.privacy import FURTHEST, SumPrivacy
from potluck.secure.agreement import LARGEST_COHORT, Agreement
from potluck.secure.coverage import CoordinateBlock, Coverage, Summand, TensorPiece, piece_at
from potluck.secure.fixed import FixedPoint
from potluck.secure.together import Addend, SecureCourse, new_identities, public_keys, summed_together

log = logging.getLogger(__name__)
_AT = "run.secure_sums"
_ROUNDS = range(1, 9)  # in which it is tried whether clients have the same parts of networks in all rounds
_NAMED = 3  # tensors, or clients, in a line
_UNITS = 1000  # of rounding, which the deviation of a client's noise has at least


@dataclass(frozen=True)
class SumNoise:
    """By which clients make sums private, see `potluck.parts.privacy.SumPrivacy`.

    Attributes:
        privacy: the mechanism.
        clip: the longest update of a client.
    """

    privacy: SumPrivacy
    clip: float

    def on(self, addend: Addend, agreement: Agreement, client: ClientId, sent: float) -> Addend:
        """What a client adds, with its noise.

        Args:
            addend: what it would add without.
            agreement: says who else has which numbers.
            client: which it is.
            sent: the largest number, in size, that clients were sent.

        Raises:
            ConfigError: by the agreement's numbers noise might be cut off, or lost in rounding.
        """
        self.check(agreement.numbers, len(agreement.clients), sent)
        blocks, may_leave = agreement.coverage.blocks, len(agreement.clients) - agreement.needed
        own = [(places, len(blocks[number].clients)) for number, places in agreement.coverage.places(client).items()]
        return replace(addend, values=self.privacy.noisy(addend.values, self.clip, own, may_leave))

    def check(self, numbers: FixedPoint, clients: int, sent: float) -> None:
        """Check that noise is neither lost in rounding nor cut off, for so many clients and such numbers sent.

        Raises:
            ConfigError: it might be.
        """
        least, unit = self.privacy.deviation(self.clip, clients, 0), 2.0**-numbers.bits
        if least < _UNITS * unit:
            raise ConfigError(
                f"{_AT}.bits: found {numbers.bits}, units of {unit:.2g}, and private noise with a deviation of"
                f" {least:.2g}; expected {_UNITS:,} units or more: more bits, or a larger run.clip_update"
            )
        if (most := sent + self.clip + FURTHEST * self.privacy.deviation(self.clip, 1, 0)) > numbers.largest:
            raise ConfigError(
                f"{_AT}.largest: found {numbers.largest:g}; expected at least {most:.4g} with run.private_weights, so"
                f" that no noise is cut off: clients are sent numbers up to {sent:.4g}"
            )


@dataclass(frozen=True)
class Addition:
    """The sums of an exchange.

    Attributes:
        round: of the exchange.
        exchange: its number within the round.
        coverage: the tensors, and who covers what.
        numbers: how they are rounded.
        least: the least number of clients whose numbers are summed.
        addends: what each client adds; of clients on other machines only the form counts.
        left: clients that have failed, and add nothing.
        sent: the largest number, in size, that clients were sent.
    """

    round: int
    exchange: int
    coverage: Coverage
    numbers: FixedPoint
    least: int
    addends: Mapping[ClientId, Addend]
    left: Collection[ClientId]
    sent: float


class Adding(Protocol):
    """Carries out the sums of exchanges.

    Attributes:
        includes_failed: whether clients that have failed are asked for sums too, and leave.
        warning: what whoever runs this should know of it.
    """

    includes_failed: bool
    warning: str

    def __call__(self, addition: Addition) -> SecureCourse:
        """The sums, or why there are none."""
        ...


class AddingHere:
    """Carries out all halves in this process; see `Adding`. Whoever has failed leaves before it sends numbers.

    Args:
        noise: what clients make sums private by; None if they do not.
    """

    includes_failed = True
    warning = (
        f"{_AT}: all clients are on this machine, which sees their replies: it shows what sums do to the run and what"
        " they cost, and protects nobody"
    )

    def __init__(self, noise: SumNoise | None = None) -> None:
        self._noise = noise
        self._identities = new_identities(())
        self._exchanges = 0

    def __call__(self, addition: Addition) -> SecureCourse:
        """See `Adding`."""
        self._exchanges += 1
        clients = addition.coverage.kinds
        self._identities.update(new_identities(clients.keys() - self._identities.keys()))
        keys = public_keys({client: self._identities[client] for client in clients})
        try:
            agreement = Agreement("here", self._exchanges, keys, addition.coverage, addition.numbers, addition.least)
            addends = {
                one: self._with_noise(addend, agreement, one, addition.sent) for one, addend in addition.addends.items()
            }
        except ConfigError as error:
            return SecureCourse(refusal=str(error))
        return summed_together(agreement, self._identities, addends, addition.left)

    def _with_noise(self, addend: Addend, agreement: Agreement, client: ClientId, sent: float) -> Addend:
        return addend if self._noise is None else self._noise.on(addend, agreement, client, sent)


class ReplySums:
    """Makes of the replies of a run's exchanges what a server gets that is to learn sums alone.

    Args:
        method: says what of its replies is summed.
        federation: its clients.
        rule: by which numbers are summed.
        adding: carries out the sums.
        noise: what clients make them private by; None if they do not.

    Raises:
        ConfigError: the method needs single replies.
    """

    def __init__(
        self,
        method: Method[Any],
        federation: Federation,
        rule: SecureRule,
        adding: Adding,
        noise: SumNoise | None = None,
    ) -> None:
        self._method, self._roster, self._rule, self._adding = method, federation.roster, rule, adding
        self._noise = noise
        self._numbers = rule.numbers(max(1, *(federation.outline(client).train for client in federation.sites)))
        self._said = False
        check_sums_suffice(method)

    @property
    def warning(self) -> str:
        """What whoever runs this should know of it."""
        return self._adding.warning

    def check(self, engine: Engine, state: Any, config: RunConfig) -> None:
        """Check that sums can be had of all tensors of which the method needs them, before anything trains.

        Args:
            engine: of the run.
            state: the method's, before the first round.
            config: of the run.

        Raises:
            ConfigError: too few clients have some tensors or take part in a round, or sums do not fit into 64 bits.
        """
        cohort, least = config.cohort_size(len(self._roster)), self._rule.least
        if not least <= cohort <= LARGEST_COHORT:
            raise ConfigError(f"{_AT}: found cohorts of {cohort} clients; expected {least} to {LARGEST_COHORT:,}")
        self._numbers.word(cohort)
        alike: dict[tuple[str, float], list[ClientId]] = {}
        for client, member in self._roster.items():
            alike.setdefault((member.architecture, member.capacity), []).append(client)
        standing = [clients[0] for clients in alike.values()]
        found, *others = (self._asked_first(engine, state, number, standing) for number in _ROUNDS)
        if self._noise is not None:
            self._noise.check(self._numbers, cohort, farthest(found.values()))
        if any(pieces_of(one) != pieces_of(found) for one in others):
            return  # whoever has a part of a network in one round has another in the next
        kinds = {client: kind for kind, clients in enumerate(alike.values()) for client in clients}
        coverage = Coverage(_summands(found.values()), [*pieces_of(found).values()], dict(sorted(kinds.items())))
        of_classes = {name for client in standing for name in self._rows_of_classes(client, found[client])}
        for block in coverage.blocks:
            names = [name for name in _names_in(coverage, block) if name not in of_classes]
            if names and len(block.clients) < least:
                raise ConfigError(f"{_AT}: {_few(block.clients, len(self._roster), names, least)}")

    def _rows_of_classes(self, client: ClientId, of: ToSum) -> Iterator[str]:
        """The tensors of which a client has its own classes' rows, which may be few clients'."""
        for one in of.tensors.values() if self._roster[client].head is not None else ():
            if any(isinstance(index, Tensor) for index in one.place or ()):
                yield one.name

    def _asked_first(
        self, engine: Engine, state: Any, number: int, clients: Sequence[ClientId]
    ) -> dict[ClientId, ToSum]:
        """What is summed of these clients in the first exchange of a round, as far as it is known before."""
        server = engine.server(number)
        handler, messages = first_ask(self._method, state, clients, server)
        name, found = handler.__name__, dict[ClientId, ToSum]()
        for client in clients:
            kind = self._method.replies(name, self._roster[client], messages[client], server)
            found[client] = self._of_nothing(name, client, messages[client], kind, engine.server(number))
        return found

    def __call__(self, exchanged: Exchanged) -> Disclosed:
        """See `potluck.engine.rounds.sums.SumsReplies`."""
        handler, replies, messages, place = exchanged.handler, exchanged.replies, exchanged.messages, exchanged.place
        found = {one: self._of(handler, one, messages[one], reply, place.server) for one, reply in replies.items()}
        gone = {
            one: self._of_nothing(handler, one, messages[one], exchanged.expected[one], place.server)
            for one in (exchanged.failed if self._adding.includes_failed else ())
        }
        everybody = dict(sorted({**found, **gone}.items()))
        coverage = _coverage(everybody)
        unknown = {
            name: torch.full(one.shape, torch.nan, dtype=torch.float64) for name, one in coverage.summands.items()
        }
        if not coverage.size:  # what is of no use to the server is not told either
            without = {client: _with_means(replies[client], one, unknown) for client, one in found.items()}
            return Disclosed(without, bytes_up={one: _in_the_clear(replies[one], of) for one, of in found.items()})
        addends = {client: _addend(replies[client], one) for client, one in found.items()}
        where = place.round, place.exchange
        sent = farthest(found.values())
        course = self._adding(Addition(*where, coverage, self._numbers, self._rule.least, addends, gone, sent))
        if place.report.secure is not None:
            _count(course, place.report.secure)
        self._tell(course, place.round)
        clear = {} if course.refusal else {client: _in_the_clear(replies[client], one) for client, one in found.items()}
        told = {client: {**clear.get(client, {}), SECURE_SUMS: course.bytes_up[client]} for client in everybody}
        if course.sums is None:
            return Disclosed({}, {}, course.refusal, course.bytes_down, told)
        means = course.sums.means(unknown)
        summed = {client: one for client, one in found.items() if client in course.sums.survivors}
        with_means = {client: _with_means(replies[client], one, means) for client, one in summed.items()}
        left = {client: _why_left(client, course) for client in found.keys() - summed.keys()}
        return Disclosed(with_means, left, "", course.bytes_down, told)

    def _of(self, handler: str, client: ClientId, message: Message, reply: Message, server: Server) -> ToSum:
        """What is summed of a reply, by what the client knows."""
        member = self._roster[client]
        return self._method.summed(handler, member, message, reply, replace(server, roster={client: member}))

    def _of_nothing(
        self, handler: str, client: ClientId, message: Message, expected: Kind | None, server: Server
    ) -> ToSum:
        """What would be summed of a client without a reply, as far as that follows from what it was sent."""
        if not isinstance(expected, Schema):
            return ToSum()
        return self._of(handler, client, message, Message(**blank(expected)), server)

    def _tell(self, course: SecureCourse, number: int) -> None:
        """Log what was not summed as it is: on the screen the first time, and then in the log alone."""
        extra = None if self._said else ON_SCREEN
        if course.clipped:
            what = f"{sum(course.clipped.values()):,} numbers of {len(course.clipped)} clients were clipped"
            log.warning("round %d: %s to %s.largest = %g", number, what, _AT, self._rule.largest, extra=extra)
        if course.sums is not None and (course.sums.local or course.sums.lost):
            log.warning("round %d: secure sums: %s", number, course.sums, extra=extra)
        self._said = self._said or bool(course.clipped or (course.sums and (course.sums.local or course.sums.lost)))


def pieces_of(found: Mapping[ClientId, ToSum]) -> dict[ClientId, dict[str, TensorPiece]]:
    """By client, the piece that it has of each whole tensor."""
    return {
        client: {one.name: piece_at(one.place, one.shape) for one in of.tensors.values() if one.place is not None}
        for client, of in found.items()
    }


def check_sums_suffice(method: Method[Any]) -> None:
    """Check that a method needs nothing of single replies but what its clients tell anyway.

    Raises:
        ConfigError: it does.
    """
    if why := method.needs_single_replies or next(_why_rules_need_more(method), ""):
        name = type(method).__name__
        raise ConfigError(f"{_AT}: {name} needs single replies: {why}; expected none with it: leave it out")


def addition_of(client: ClientId, reply: Message, of: ToSum) -> tuple[Coverage, Addend]:
    """What one client covers and adds, by its own account."""
    return _coverage({client: of}), _addend(reply, of)


def sum_noise(config: RunConfig) -> SumNoise | None:
    """What the clients of a run make sums private by; None if they do not."""
    if config.private_weights is None or config.clip_update is None:
        return None
    return SumNoise(config.private_weights, config.clip_update)


def farthest(found: Collection[ToSum]) -> float:
    """The largest number, in size, among those that clients were sent."""
    sent = (one.keep for of in found for one in of.tensors.values())
    return max((float(kept.abs().max()) for kept in sent if isinstance(kept, Tensor) and kept.numel()), default=0.0)


def _why_rules_need_more(settings: Any) -> Iterator[str]:
    """Why the rules by which a method makes means need more than sums."""
    for spec in fields(settings):
        value = getattr(settings, spec.name)
        if isinstance(value, Aggregate):
            yield from filter(None, [value.needs_single_tensors])
        elif is_dataclass(value):
            yield from _why_rules_need_more(value)


def _summands(found: Collection[ToSum]) -> dict[str, Summand]:
    parts = (one for of in found for one in of.tensors.values() if one.place is not None)
    return {one.name: Summand(one.shape, one.weighing) for one in parts}


def _coverage(found: Mapping[ClientId, ToSum]) -> Coverage:
    """Who covers what; clients with the same pieces are of one kind."""
    kinds: dict[tuple[tuple[str, TensorPiece], ...], int] = {}
    of_client: dict[ClientId, int] = {}
    for client, pieces in pieces_of(found).items():
        of_client[client] = kinds.setdefault(tuple(sorted(pieces.items())), len(kinds))
    return Coverage(_summands(found.values()), [dict(pieces) for pieces in kinds], of_client)


def _addend(reply: Message, of: ToSum) -> Addend:
    """What a client adds to the sums."""
    values: Weights = {}
    rows: Weights = {}
    for path, one in of.tensors.items():
        if one.place is None:
            continue
        tensor = tensor_at(reply, path)
        values[one.name] = tensor if one.at is None else tensor[_product(one.at, tensor.shape)]
        if one.rows is not None:
            rows[one.name] = one.rows
    return Addend(values, of.weight, rows)


def _with_means(reply: Message, of: ToSum, means: Mapping[str, Tensor]) -> Message:
    """The reply with means in the place of its own numbers, NaN where there is none."""
    entries = {name: dict(value) if isinstance(value, Mapping) else value for name, value in reply.items()}
    left: dict[str, Any] = {}
    for path, one in of.tensors.items():
        own = tensor_at(reply, path)
        value = torch.full(own.shape, torch.nan, dtype=torch.float64)
        if one.place is not None:
            at = tuple(slice(0, size) for size in own.shape) if one.at is None else one.at
            value[_product(at, own.shape)] = means[one.name][_product(one.place, one.shape)]
        summed = ~value.isnan()
        if isinstance(one.keep, Tensor):
            value = torch.where(summed, value.to(own.dtype), one.keep)
        else:
            value = value.nan_to_num().to(own.dtype)
            left.update(one.keep(value, summed))
        put_at(entries, path, value)
    return Message(**{**entries, **left})


def _in_the_clear(reply: Message, of: ToSum) -> dict[str, int]:
    """Payload bytes of each entry without the tensors of which only sums are told."""
    sizes = reply.sizes()
    for path in of.tensors:
        tensor = tensor_at(reply, path)
        sizes[path[0]] -= tensor.numel() * tensor.element_size()
    return {name: size for name, size in sizes.items() if size}


def _product(place: Indices, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """What indexes a tensor of this shape at the product of these positions."""
    listed = [torch.arange(size)[index] for index, size in zip(place, shape, strict=True)]
    return tuple(index.view(-1, *[1] * (len(listed) - 1 - axis)) for axis, index in enumerate(listed))


def _why_left(client: ClientId, course: SecureCourse) -> Failure:
    """Why the numbers of a client that has replied are in no sum."""
    return course.failures.get(client) or Failure(client, SECURE_SUMS, "it was not there when this was summed")


def _count(course: SecureCourse, report: SumsReport) -> None:
    """Add to a round's report what an exchange's sums came to."""
    report.bytes_down += course.bytes_down.total()
    report.bytes_up += course.bytes_up.total()
    report.clipped += sum(course.clipped.values())
    report.clients += len(course.bytes_down)
    if course.sums is None:
        report.refused += 1
        return
    report.summed += sum(int((weights > 0).sum()) for weights in course.sums.weights.values())
    report.local += course.sums.local
    report.lost += course.sums.lost


def _names_in(coverage: Coverage, block: CoordinateBlock) -> list[str]:
    """The tensors that a block has numbers of."""
    first, names = np.array([*coverage.starts.values()]), list(coverage.starts)
    return [names[place] for place in np.unique(np.searchsorted(first, block.positions, side="right") - 1).tolist()]


def _few(who: Sequence[ClientId], clients: int, names: Sequence[str], least: int) -> str:
    """Why what too few clients have is refused."""
    tensors = _listed([name.removeprefix("all/") for name in names])
    whose = f"client{'s' if len(who) > 1 else ''} {_listed([*map(str, who)])} of {clients}"
    return (
        f"only {whose} can train {tensors} or a part of it, and numbers of fewer than {least} clients are in no sum:"
        f" choose federation.models or federation.capacities of which each part is {least} clients'"
    )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
