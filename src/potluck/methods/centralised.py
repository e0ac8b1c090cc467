"""Centralised: one training on everybody's data, the upper bound of all comparisons.

What a federation is meant to avoid: clients hand their data to the server, which trains as if there had never been
clients. How far a method is below it is the price of federation; how far above Local, its gain.

Symbols
    w         state.weights, of each architecture of clients
    D         state.inputs, state.targets: what the server has been sent so far
    E, B, eta training.epochs, training.batch_size, training.lr

Wire
    down      nothing
    up        inputs at most examples * |x|, targets at most examples * integer

Limits
    training.lr=0.0 stays at rest
    descends the gradient
    counts a twin as twice the data on rounds=1

Departures from the paper
    There is no paper. A client is asked for its data once, the first time that it is drawn; a round is `training` on
    all that has come, for each architecture that a client has. Inputs are sent as they are prepared, so they are not
    augmented. The data are part of the run's checkpoints: what clients hold must be nobody's secret.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from potluck import fl


@dataclass(frozen=True)
class State:
    """The weights of each architecture, and the data, (n, ...), with the clients that have sent some."""

    weights: fl.GroupWeights
    inputs: Tensor
    targets: Tensor
    heard: list[fl.ClientId]


@dataclass(frozen=True)
class Centralised(fl.Method[State]):
    """Hyper-parameters of centralised training.

    Attributes:
        training: the server's.
    """

    family = "alone"
    unguarded = "the server learns from every client's examples"

    training: fl.ServerTraining = fl.LocalTraining()

    @property
    def keeps_model(self) -> bool:
        return False

    def needs(self) -> frozenset[fl.Need]:
        return frozenset({fl.Need.CLASSES, fl.Need.REAL_INPUTS})

    def init(self, server: fl.Server) -> State:
        architectures = sorted({member.architecture for member in server.roster.values()})
        weights = {name: fl.learnt_of(server.build(name)) for name in architectures}
        return State(weights, torch.empty(0), torch.empty(0), [])

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        new = {id: fl.Message() for id in cohort.ids if id not in state.heard}
        replies = cohort.ask(self.all_data, new)
        inputs, targets = (
            torch.cat([*([held] if state.heard else []), *replies.entries(name)]) if replies else held
            for name, held in (("inputs", state.inputs), ("targets", state.targets))
        )
        weights: fl.GroupWeights = {}
        for name, before in state.weights.items():
            net = fl.load(server.build(name), before)
            server.fit(fl.Fit(net, server.objective, fl.Examples(inputs, targets), self.training))
            weights[name] = fl.learnt_of(net)
        return State(weights, inputs, targets, [*state.heard, *replies])

    @fl.on_client
    def all_data(self, client: fl.Client, message: fl.Message) -> fl.Message:
        inputs, targets, _ = client.train.batch(torch.arange(len(client.train)))
        return fl.Message(inputs=inputs, targets=targets)

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        targets = fl.schema.integers(member.examples, least=0, most=server.num_classes - 1)
        return fl.Schema(inputs=fl.schema.floats(member.examples, *fl.one_shape(server.input_shape)), targets=targets)

    def inference_message(self, state: State, client_id: fl.ClientId, server: fl.Server) -> fl.Message:
        return fl.Message(weights=state.weights[server.roster[client_id].architecture])

    @fl.on_client
    def inference_model(self, client: fl.Client, message: fl.Message) -> nn.Module:
        return fl.load(client.model, message["weights"])
