"""Layers that stay at their clients, while all others are averaged.

A layer that stays may have another shape at every client: it never meets another's. Among clients that average with one
another, a layer that is one client's own is nobody's to average.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Size, nn

from potluck.core.ground.fields import require
from potluck.core.meeting import meetings
from potluck.core.message import Message
from potluck.core.method import Need
from potluck.core.needs import Offer
from potluck.core.nets.splitting import split_problem
from potluck.core.nets.weights import learnt_of
from potluck.core.roles import Client, Server
from potluck.parts.sharing import Averaged, Averages, NamesOf


@dataclass(frozen=True)
class KeepsLayers(Averages):
    """A method whose clients keep some of their layers to themselves, and average the others.

    It writes `own` and `local_update`. Clients' models are kept between rounds, for the layers that stay.
    """

    def __post_init__(self) -> None:
        require(self.sharing.averages, "sharing.scope", "one that averages", self.sharing.scope)

    @property
    def keeps_model(self) -> bool:
        """Always, for the layers that stay."""
        return True

    def own(self, net: nn.Module) -> frozenset[str]:
        """The names of a network's parameters and buffers that stay at a client."""
        raise NotImplementedError

    def needs(self) -> frozenset[Need]:
        """Layers that can be averaged and meet another client's, beside those that stay."""
        one = {Need.ONE_ARCHITECTURE} if self.sharing.scope == "model" else set[Need]()
        text, advice = "layers in common beside those that stay at clients", "use one nested family of models"
        return frozenset({*one, Need(text, self._why_nothing_meets, advice)})

    def init(self, server: Server) -> Averaged:
        """The run's initial weights of the layers that are averaged."""
        nets = {member.architecture: server.build(member.architecture) for member in server.roster.values()}
        return Averaged(self.sharing.initial(server, self._staying(nets)))

    def reply(self, client: Client, message: Message) -> Message:
        """The answer with the layers that were sent, trained."""
        trained = learnt_of(client.model)
        weights = {name: trained[name] for name in message["weights"]}
        buffers = {name: trained[name] for name in message.get("buffers", {})}
        return self.sharing.reply(client, weights=weights, buffers=buffers or None)

    def global_model(self, state: Averaged, server: Server) -> None:
        """None: a client's own layers belong to it."""

    def _staying(self, nets: Mapping[str, nn.Module]) -> NamesOf:
        """The names of a network's tensors that are its own, or those of another that its clients average with."""
        if self.sharing.scope == "architecture":
            return self.own
        anyones = frozenset(name for net in nets.values() for name in self.own(net))
        return lambda net: anyones

    def _why_nothing_meets(self, offer: Offer) -> str | None:
        """Why the layers that do not stay cannot be averaged by name; None if they can."""
        if Need.SPLIT_MODEL in self.needs() and any(split_problem(net) for net in offer.nets.values()):
            return None  # that need names it
        staying, seen = self._staying(offer.nets), dict[tuple[str, str], tuple[str, Size]]()
        within = self.sharing.scope == "architecture"
        for architecture, net in offer.nets.items():
            averaged = {name: tensor.shape for name, tensor in learnt_of(net).items() if name not in staying(net)}
            for name, shape in averaged.items():
                other, known = seen.setdefault((architecture if within else "all", name), (architecture, shape))
                if shape != known:
                    found = f"{tuple(known)} in {other} and {tuple(shape)} in {architecture}"
                    return f"it averages layers by name, but {name} has shape {found}"
        met = meetings(offer.nets, offer.assigned.values(), across=not within, staying=staying)
        if len(offer.assigned) < 2 or any(one.weights_met for one in met):
            return None
        return "no client has a layer in common with another beside those that stay, so each would train alone"
