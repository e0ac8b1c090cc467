"""LG-FedAvg: local representations, a global head.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency. 2020. https://arxiv.org/abs/2001.01523. Algorithm 1.

Every client keeps the layers before its head to itself; heads are averaged. So clients' networks may differ in anything
before the head, and messages are small.

Symbols
    theta_g   state.shared, the layers that are averaged
    theta_l   the other layers of client.model, kept by the client
    n_k       len(client.train)
    E, B, eta training.epochs, training.batch_size, training.lr

Wire
    down      shared |shared|
    up        shared |shared|, examples 1

Limits
    training.lr=0.0 stays at rest
    averaged="all" equals fedavg on architectures=1

Departures from the paper
    1. The head is all that is global; the authors' experiments share the last two or three layers.
       `averaged="all"` averages every layer, which is FedAvg.
    2. Clients start from their initial weights and the server's head, which begins as that of the first client's
       architecture. The authors' code starts all of them from a model that FedAvg has trained.
    3. Clients weigh by their examples; the authors' code weighs them equally, `weighting="uniform"`.
    4. A head's BatchNorm statistics are averaged like its weights; HtFLlib leaves them where they are.
    5. Losses that are not the task's, such as an adversary for fairness, are left out. So is the ensemble of all
       clients' models for data of an unknown device; a new client predicts with its own layers and the head.
    6. Evaluated is each client's model under the newest head. The authors' code keeps the best model of every client by
       its accuracy on test data.
    7. Local training defaults to Adam, like all methods here; the authors' commands have SGD with 0.05 or 0.1,
       and their code momentum of 0.5.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import nn

from potluck import fl


@dataclass(frozen=True)
class State:
    """The averaged layers."""

    shared: fl.Weights


@dataclass(frozen=True)
class LGFedAvg(fl.Method[State]):
    """Hyper-parameters of LG-FedAvg.

    Attributes:
        training: a client's local training.
        averaged: the layers that are averaged.
        weighting: what a client weighs in the mean: its examples, or as much as any other.
        combine: how clients' layers become one.
    """

    family = "weights"
    aligns_classes = True
    sums_suffice = True
    revises = ("shared",)

    variants = {"all": {"averaged": "all"}, "uniform": {"weighting": "uniform"}, "median": {"combine.rule": "median"}}

    training: fl.LocalTraining = fl.LocalTraining()
    averaged: Literal["head", "all"] = "head"
    weighting: Literal["samples", "uniform"] = "samples"
    combine: fl.Aggregate = fl.Aggregate()

    def needs(self) -> frozenset[fl.Need]:
        return frozenset(
            {fl.Need.SPLIT_MODEL, fl.heads.WHOLE_HEAD, fl.heads.COMMON_HEAD}
            if self.averaged == "head"
            else {fl.Need.ONE_ARCHITECTURE}
        )

    def init(self, server: fl.Server) -> State:
        return State(fl.learnt_of(self._global_layers(fl.heads.client_net(server))))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        replies = cohort.ask(self.local_update, {id: self.inference_message(state, id, server) for id in cohort.ids})
        shares = replies.entries("examples") if self.weighting == "samples" else [1.0] * len(replies)
        prefix = partial(self._prefix, server)
        return State(
            fl.classes.mean_of_rows(replies, "shared", server.roster, shares, self.combine, state.shared, prefix)
        )

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        return fl.Schema(shared=fl.schema.like(message["shared"]), examples=fl.schema.count(member.examples))

    def summed(
        self, handler: str, member: fl.Member, message: fl.Message, reply: fl.Message, server: fl.Server
    ) -> fl.ToSum:
        weighing = "client" if self.weighting == "samples" else "one"
        prefix, sent = self._prefix(server, member), message["shared"]
        layers = fl.summing.summed_layers(reply, "shared", member, sent, weighing, prefix=prefix)
        return fl.ToSum(layers, reply["examples"])

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        layers = fl.load(self._global_layers(client.model), message["shared"])
        yield fl.Fit(client.model, client.objective, client.train, self.training)
        return fl.Message(shared=fl.learnt_of(layers), examples=len(client.train))

    def inference_message(self, state: State, client_id: fl.ClientId, server: fl.Server) -> fl.Message:
        member = server.roster[client_id]
        return fl.Message(shared=fl.classes.rows_for(state.shared, member, self._prefix(server, member)))

    @fl.on_client
    def inference_model(self, client: fl.Client, message: fl.Message) -> nn.Module:
        fl.load(self._global_layers(client.model), message["shared"])
        return client.model

    def _prefix(self, server: fl.Server, member: fl.Member) -> str:
        """What the names of the global layers begin with in a client's network."""
        return server.about(member.base, fl.heads.head_prefix) if self.averaged == "head" else ""

    def _global_layers(self, net: nn.Module) -> nn.Module:
        return fl.split(net).head if self.averaged == "head" else net
