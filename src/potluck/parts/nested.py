"""What methods share whose clients train networks of several widths, one inside the other.

The networks have the leading slices of one set of weights, and each width has BatchNorm statistics of its own: the
leading channels of a wide network have other means and variances than those of a narrow one (Yu, Yang, Xu, Yang, Huang.
ICLR 2019. https://arxiv.org/abs/1812.08928).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Protocol, TypeVar

from torch import Tensor, nn

from potluck.core.federation import ClientId
from potluck.core.message import Message
from potluck.core.method import on_client
from potluck.core.nets.calling import call_with
from potluck.core.nets.slicing import inside, lies_in, part
from potluck.core.nets.weights import Weights, buffers_of, load, parameters_of
from potluck.core.roles import Arriving, Client, Server
from potluck.core.schema import Kind, like
from potluck.parts.classes import own_rows
from potluck.parts.means import Aggregate
from potluck.parts.submodels import CoverageMean, leading, select, select_each
from potluck.parts.width import HasFullNet, WidthSlices


class Nested(nn.ModuleList):
    """Networks from the widest to the narrowest. The others lend their form and buffers, and have its weights."""

    def at(self, place: int, x: Tensor) -> Tensor:
        """The outputs of the network in this place, on inputs (batch, ...)."""
        if place == 0:
            return self[0](x)
        whole, narrow = dict(self[0].named_parameters()), self[place]
        wide, places = lies_in(self[0]), lies_in(narrow)
        names = [name for name, _ in narrow.named_parameters()]
        weights = {name: part(whole[name], inside(places[name], wide[name])) for name in names}
        return call_with(narrow, weights, x)


class HasStatistics(HasFullNet, Protocol):
    """A method's state that also holds BatchNorm statistics for each width."""

    @property
    def statistics(self) -> Weights:
        """Named "WIDTH/NAME"."""
        ...


N = TypeVar("N", bound=HasStatistics)


class NestedWidths(WidthSlices[N]):
    """A method whose clients train a `Nested`. Deriving from it gives messages, means and the inference half.

    The method declares the field `combine`, which says how the clients' values of a number become one.
    """

    revises = ("weights",)

    combine: Aggregate

    def within(self, rate: float) -> list[float]:
        """The widths that a client of this rate trains, the largest first."""
        return sorted({level for level in self.levels if level <= rate}, reverse=True)

    def initial(self, server: Server) -> tuple[Weights, Weights]:
        """The weights and statistics of the first state."""
        statistics = ((level, buffers_of(server.build(width=level))) for level in self.within(1.0))
        return parameters_of(server.build()), by_width(statistics)

    def send(self, state: N, rates: Mapping[ClientId, float], server: Server) -> dict[ClientId, Message]:
        """For each client the slice of its rate, and the statistics of all widths within it."""
        weights = select_each(state.weights, self.slices(rates, server))
        statistics = {rate: of_widths(state.statistics, self.within(rate)) or None for rate in set(rates.values())}
        return {id: Message(weights=weights[id], statistics=statistics[rate], rate=rate) for id, rate in rates.items()}

    def expected(self, message: Message) -> dict[str, Kind | None]:
        """The schema of the entries of `reply`."""
        tracked = like(message["statistics"]) if "statistics" in message else None
        return {"weights": like(message["weights"]), "tracked": tracked}

    def receive(self, client: Client, message: Message) -> Nested:
        """On the client, the networks of all widths that it trains."""
        widths = self.within(message["rate"])
        nets = Nested(client.twin(width=width) for width in widths)
        load(nets[0], message["weights"], partial=True)
        for width, net in zip(widths, nets, strict=True):
            load(net, of_width(message.get("statistics", {}), width), partial=True)
        return nets

    def reply(self, nets: Nested, message: Message, examples: int | None = None) -> Message:
        """The trained weights, what was tracked, and the number of examples if given."""
        tracked = by_width(zip(self.within(message["rate"]), map(buffers_of, nets), strict=True))
        return Message(weights=parameters_of(nets[0]), tracked=tracked or None, examples=examples)

    def merge(
        self,
        state: N,
        replies: Arriving,
        rates: Mapping[ClientId, float],
        server: Server,
        share: Callable[[Message], float] = lambda reply: 1.0,
        heard: Mapping[ClientId, Sequence[float]] | None = None,
    ) -> tuple[Weights, Weights]:
        """The weights and statistics after a round; what nobody covers keeps its value.

        Args:
            state: before the round.
            replies: read to their end; under the plain mean one is in memory at a time.
            rates: what each client was sent.
            server: for the networks' shapes.
            share: a client's weight in the mean.
            heard: the widths that count of each client's reply, the largest first: its weights within that one, and
                the statistics of all; with an empty list the reply does not count. All that it trained by default.
        """
        if heard is None:
            heard = {id: self.within(rate) for id, rate in rates.items()}
        widths = {*rates.values(), *chain(*heard.values())}
        slices = {width: lies_in(server.build(width=width)) for width in widths}
        weights, statistics = (CoverageMean(keep, self.combine) for keep in (state.weights, state.statistics))
        for id, reply in self.combine.arriving(replies):
            sent = own_rows(slices[rates[id]], server.roster[id])
            for place in [own_rows(slices[width], server.roster[id]) for width in heard[id][:1]]:
                found = {name: part(t, inside(place[name], sent[name])) for name, t in reply["weights"].items()}
                weights.add(found, place, share(reply))
            tracked = of_widths(reply.get("tracked", {}), heard[id])
            statistics.add(tracked, leading({name: t.shape for name, t in tracked.items()}), share(reply))
            del reply  # before the next comes
        return weights.weights(), statistics.weights()

    def inference_message(self, state: N, client_id: ClientId, server: Server) -> Message:
        """The slice of the largest level that the client's capacity allows, with that width's statistics."""
        message = super().inference_message(state, client_id, server)
        return Message(**message, statistics=of_widths(state.statistics, [message["rate"]]) or None)

    @on_client
    def inference_model(self, client: Client, message: Message) -> nn.Module:
        """The client's widest network, with that width's statistics."""
        statistics = of_width(message.get("statistics", {}), message["rate"])
        return load(self.narrow_net(client, message), statistics, partial=True)

    def global_model(self, state: N, server: Server) -> nn.Module | None:
        """The network of the largest level."""
        width = max(self.levels)
        weights = select(state.weights, self.submodel(server, width))
        return load(server.build(width=width), {**weights, **of_width(state.statistics, width)})


def by_width(found: Iterable[tuple[float, Weights]]) -> Weights:
    """The tensors of several widths, named "WIDTH/NAME"."""
    return {f"{width}/{name}": tensor for width, tensors in found for name, tensor in tensors.items()}


def of_width(tensors: Weights, width: float) -> Weights:
    """Those of one width, under their own names."""
    prefix = f"{width}/"
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def of_widths(tensors: Weights, widths: Iterable[float]) -> Weights:
    """Those of some widths, named "WIDTH/NAME"."""
    prefixes = tuple(f"{width}/" for width in widths)
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes)}
