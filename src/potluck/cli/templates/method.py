"""TemplateName: one line that says what the method does.

Authors, title, venue, address. Which algorithm of the paper this is.

Symbols
    w         state.weights
    n_k       len(client.train)
    E, B, eta training.epochs, training.batch_size, training.lr

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    equals fedavg
    sharing.scope="none" equals local

Departures from the paper
    1. As it is written by `potluck new`, this is FedAvg: change what is marked below, then the sections above.
"""

from dataclasses import dataclass

from potluck import fl


@dataclass(frozen=True)
class State:
    """What the server keeps from round to round: tensors, numbers, text, and dicts and lists of them."""

    weights: fl.GroupWeights


@dataclass(frozen=True)
class TemplateName(fl.SharesWeights[State]):
    """Hyper-parameters of TemplateName.

    Attributes:
        training: a client's local training.
        sharing: who averages with whom, with which weights.
    """

    # Add hyper-parameters here: `mu: Annotated[float, fl.at_least(0)] = 0.1` becomes the key `method.mu`; import
    # `Annotated` from `typing`, and explain `mu` above.
    training: fl.LocalTraining = fl.LocalTraining()
    sharing: fl.Sharing = fl.Sharing()

    def init(self, server: fl.Server) -> State:
        return State(self.sharing.initial(server))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        # What every client receives: further entries are arguments by name, `self.sharing.send(..., mu=0.1)`.
        messages = self.sharing.send(state.weights, cohort, server)
        replies = cohort.stream(self.local_update, messages)
        # How replies become the next state: here the mean of each layer over the clients that own it.
        return State(self.sharing.merge(state.weights, replies, server.roster))

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        # What a client trains on: in place of `client.objective` a function of (net, batch, extras) to a loss, such as
        # `client.criterion(net(batch.inputs), batch.targets) + ...`.
        yield fl.Fit(client.model, client.objective, client.train, self.training)
        # What it answers: further entries are arguments by name, which a method `replies` declares as
        # `fl.Schema(**self.sharing.expected(member, message), mine=fl.schema.number())`.
        return self.sharing.reply(client)
