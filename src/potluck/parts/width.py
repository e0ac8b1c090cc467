"""What methods share whose clients train narrow nets of the server's one: levels, slices, scaler, static BatchNorm.

Diao, Ding, Tarokh. ICLR 2021. https://arxiv.org/abs/2010.01264.
"""

import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from potluck.core.federation import ClientId, Member
from potluck.core.ground.errors import PotluckWarning
from potluck.core.ground.fields import above, at_most, require
from potluck.core.ground.inputs import InputShape
from potluck.core.message import Message
from potluck.core.method import Method, Need, on_client
from potluck.core.nets.batchnorm import norms_of
from potluck.core.nets.slicing import lies_in
from potluck.core.nets.weights import Weights, load, mean, outline
from potluck.core.requests.beside_training import NormStatistics
from potluck.core.requests.fit import LocalTraining
from potluck.core.roles import Client, Replies, Server
from potluck.core.schema import Path
from potluck.core.summed import Summed, ToSum, Weighing
from potluck.models.contract import StagedNet, classifier_of
from potluck.models.stages import CutNet, heads_of
from potluck.parts.classes import own_rows
from potluck.parts.submodels import RowMasks, SubModel, select
from potluck.parts.summing import summed_slices

HIDDEN = (nn.Linear, nn.Conv2d)


class HasFullNet(Protocol):
    """A method's state that holds the weights of the one full net."""

    @property
    def weights(self) -> Weights:
        """Of the full net, those that are trained."""
        ...


W = TypeVar("W", bound=HasFullNet)


@dataclass(frozen=True)
class WidthSlices(Method[W]):
    """A method whose clients train narrow nets cut out of one global net. Deriving from it fills the inference half.

    Attributes:
        training: a client's local training.
        levels: the rates, shares of the channels, that clients may have.
        assignment: "capacity" gives a client the largest level that its capacity allows; "dynamic" draws a level for
            each client of the cohort, all equally likely.
    """

    family = "parts"

    training: LocalTraining = LocalTraining(clip_norm=1.0)
    levels: tuple[Annotated[float, above(0), at_most(1)], ...] = (1.0, 0.5, 0.25, 0.125, 0.0625)
    assignment: Literal["capacity", "dynamic"] = "capacity"

    default_capacities = (1.0, 0.5, 0.25, 0.125, 0.0625)

    def __post_init__(self) -> None:
        require(len(self.levels) > 0, "levels", "at least one rate", self.levels)

    @property
    def keeps_model(self) -> bool:
        """Every round starts from the slice that is sent."""
        return False

    def needs(self) -> frozenset[Need]:
        """One net for all, of which slices are nets."""
        return frozenset({Need.ONE_ARCHITECTURE, Need.WIDTH_SLICES})

    def warn_of_weak_clients(self, server: Server) -> None:
        """Warn of clients whose capacity lies below the smallest level, which they train all the same."""
        if self.assignment == "capacity":
            warn_below(min(self.levels), server, self, "the smallest level", "give method.levels a smaller one")

    def rate(self, member: Member, server: Server) -> float:
        """The rate that a client trains in this round."""
        if self.assignment == "dynamic":
            return self.levels[int(torch.randint(len(self.levels), (), generator=server.rng))]
        return level_within(self.levels, member.capacity)

    def submodel(self, server: Server, rate: float) -> SubModel:
        """Where the narrow net of this rate lies in this round: in the leading channels of every layer."""
        net = server.build(width=rate)
        places = lies_in(net)
        return {name: places[name] for name, _ in net.named_parameters()}

    def member(self, server: Server, id: ClientId) -> Member:
        """A client, of which it is known where all that it is sent has its own classes."""
        return server.roster[id]

    def slices(self, rates: Mapping[ClientId, float], server: Server) -> dict[ClientId, SubModel]:
        """Where the net of each client lies in this round; clients of one rate and the same classes have one."""
        by_rate = {rate: self.submodel(server, rate) for rate in set(rates.values())}
        found = dict[tuple[float, str], SubModel]()
        for id, rate in rates.items():
            member = self.member(server, id)
            if (kind := (rate, member.architecture)) not in found:
                found[kind] = own_rows(by_rate[rate], member)
        return {id: found[rate, server.roster[id].architecture] for id, rate in rates.items()}

    def summed_weights(
        self,
        member: Member,
        message: Message,
        reply: Message,
        server: Server,
        weighing: Weighing = "one",
        rows: RowMasks | None = None,
    ) -> dict[Path, Summed]:
        """A client's narrow weights in the full net's, for `summed`; of tensors that `rows` names, these rows alone."""
        places = own_rows(self.submodel(server, message["rate"]), self.member(server, member.id))
        shapes = {name: tensor.shape for name, tensor in server.about(None, outline).items()}
        return summed_slices(reply, "weights", places, shapes, message["weights"], weighing, rows=rows)

    def narrow_net(self, client: Client, message: Message) -> nn.Module:
        """On the client, the net of the rate and the weights that it was sent."""
        return load(client.twin(width=message["rate"]), message["weights"], partial=True)

    def inference_message(self, state: W, client_id: ClientId, server: Server) -> Message:
        """The slice of the largest level that the client's capacity allows."""
        rate = level_within(self.levels, server.roster[client_id].capacity)
        own = self.slices({client_id: rate}, server)[client_id]
        return Message(weights=select(state.weights, own), rate=rate)

    @on_client
    def inference_model(
        self, client: Client, message: Message
    ) -> nn.Module | Generator[NormStatistics, Any, nn.Module]:
        """The narrow net, with BatchNorm's statistics measured on the client's own training data."""
        net = self.narrow_net(client, message)
        yield NormStatistics(net, client.train, self.training.batch_size)
        return net


def net_of(party: Server | Client, width: float = 1.0) -> nn.Module:
    """A net of the federation's one architecture: on the server with all outputs, on a client with its own ones."""
    return party.build(width=width) if isinstance(party, Server) else party.twin(width=width)


def warn_below(least: float, server: Server, method: Method[Any], what: str, advice: str) -> None:
    """Warn of clients whose capacity lies below the least that a method trains, which they train all the same.

    Args:
        least: the capacity that it takes.
        server: knows the clients.
        method: named in the warning.
        what: it is that has this size.
        advice: what the user can do.
    """
    weak = [member for member in server.roster.values() if member.capacity < least]
    if weak:
        others = f" and {len(weak) - 1} more" if len(weak) > 1 else ""
        warnings.warn(
            f"{type(method).__name__.lower()}: client {weak[0].id}{others}: capacity {weak[0].capacity:g} lies below"
            f" {what}, {least:g}, which is trained all the same; {advice}",
            PotluckWarning,
            stacklevel=3,
        )


def level_within(levels: Sequence[float], capacity: float) -> float:
    """The largest level that a capacity allows; the smallest of all if none does."""
    return max((level for level in levels if level <= capacity), default=min(levels))


def with_scaler(net: nn.Module, rate: float, input_shape: InputShape = (), *, always: bool = False) -> nn.Module:
    """The net, which from now on divides by the rate, in training, what enters each norm (HeteroFL, section 4.1).

    Of a net without norms what leaves each hidden layer is divided, those of its exits included.

    Args:
        net: is changed.
        rate: the divisor.
        input_shape: of one example, from which the classifier of a net is found that is neither in stages nor cut.
        always: whether it also divides in evaluation.
    """

    def before(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0] / rate, *inputs[1:]) if always or layer.training else inputs

    def after(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output / rate if always or layer.training else output

    norms = norms_of(net)
    for norm in norms:
        norm.register_forward_pre_hook(before)
    if not norms:
        last = _last_layers(net, input_shape)
        for layer in net.modules():
            if isinstance(layer, HIDDEN) and layer not in last:
                layer.register_forward_hook(after)
    return net


def _last_layers(net: nn.Module, input_shape: InputShape) -> list[nn.Module]:
    """The layers that put out what the net or one of its exits does."""
    if not isinstance(net, (StagedNet, CutNet)):
        return [net.get_submodule(name.rpartition(".")[0]) for name in classifier_of(net, input_shape)]
    layers = [[layer for layer in head.modules() if isinstance(layer, HIDDEN)] for head in heads_of(net)]
    return [layer for found in layers for layer in found[-1:]]


def mean_statistics(measured: Replies, keep: Weights) -> Weights:
    """The "statistics" of these replies weighted by their "batches", as if one machine had measured all in a row.

    With no batch at all it is `keep`.
    """
    counted = [reply for reply in measured.values() if reply["batches"] and reply.get("statistics")]
    if not counted:
        return keep
    shares = [float(reply["batches"]) for reply in counted]
    return {name: mean([reply["statistics"][name] for reply in counted], shares) for name in keep}


def summed_statistics(reply: Message) -> ToSum:
    """What of a reply's "statistics" is summed, by batches; where it is not, the client counts as one without any."""
    measured = reply["batches"] > 0

    def left(means: Tensor, summed: Tensor) -> dict[str, int]:
        return {} if bool(summed.all()) else {"batches": 0}

    found: dict[Path, Summed] = {}
    for name, tensor in reply.get("statistics", {}).items():
        if tensor.is_floating_point():
            place = tuple(slice(0, size) for size in tensor.shape) if measured else None
            found["statistics", name] = Summed(f"statistics/{name}", tuple(tensor.shape), place, left, "client")
    return ToSum(found, max(1, reply["batches"]))
