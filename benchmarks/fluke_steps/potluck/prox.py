"""Prox: federated averaging whose clients are pulled towards the weights that were sent.

Li et al. Federated Optimization in Heterogeneous Networks. MLSys 2020. https://arxiv.org/abs/1812.06127. Algorithm 2.

Symbols
    w         state.weights
    n_k       len(client.train)
    E, B, eta training.epochs, training.batch_size, training.lr

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    mu=0.0 equals fedavg
    equals fedprox mu=0.3
    mu=0.0 sharing.scope="none" equals local

Departures from the paper
    1. Clients train whole epochs.
"""

from dataclasses import dataclass

from potluck import fl


@dataclass(frozen=True)
class State:
    """What the server keeps from round to round: tensors, numbers, text, and dicts and lists of them."""

    weights: fl.GroupWeights


@dataclass(frozen=True)
class Prox(fl.SharesWeights[State]):
    """Hyper-parameters of Prox.

    Attributes:
        training: a client's local training.
        sharing: who averages with whom, with which weights.
        mu: strength of the pull.
    """

    # Add hyper-parameters here: `mu: Annotated[float, at_least(0)] = 0.1` becomes the key `method.mu`.
    training: fl.LocalTraining = fl.LocalTraining()
    sharing: fl.Sharing = fl.Sharing()
    mu: float = 0.3

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

        # What a client trains on: in place of `client.objective` a function of (net, batch, extras) to a loss.
        def pulled(net, batch, extras):
            loss = client.criterion(net(batch.inputs), batch.targets)
            return loss + self.mu / 2 * fl.losses.squared_distance(net, extras["sent"])

        yield fl.Fit(client.model, pulled, client.train, self.training, extras={"sent": fl.parameters_of(client.model)})
        # What it answers: further entries are arguments by name; declare them in `replies`.
        return self.sharing.reply(client)
