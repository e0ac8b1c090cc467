"""FedAvg: federated averaging.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas. AISTATS 2017. https://arxiv.org/abs/1602.05629. Algorithm 1.

Clients train the weights they are sent on their own data; the server averages what comes back. With clients of
several architectures each layer is averaged over the clients that own it, which is the baseline called FedAvg
(or HeteroAvg) in the papers on heterogeneous models.

Symbols
    w         state.weights
    n_k       len(client.train)
    E, B, eta training.epochs, training.batch_size, training.lr

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    descends the gradient
    counts a twin as twice the data
    misses the optimum
    averages each layer over its owners on batchnorm=true
    sharing.weighting="uniform" averages each layer over its owners
    sharing.scope="layer" equals fedavg sharing.scope="model" on architectures=1
    sharing.scope="layer" equals fedavg sharing.scope="architecture" on architectures=1
    sharing.scope="none" equals local

Departures from the paper
    1. Layers owned by some clients only are averaged over those (FedIN's revision, eq. 19), or within one
       architecture (eq. 20, 21): see `sharing`. With one architecture both are the paper's mean.
    2. Local training defaults to Adam, as the papers that use this baseline have it; the paper has plain SGD.
    3. Clients weigh by their examples, as in the paper, also where layers are averaged across architectures; eq. 19
       has equal weights, `sharing.weighting="uniform"`, which other methods with that equation have by default.
    4. BatchNorm's running statistics, which the paper does not mention, are averaged like weights.
"""

from dataclasses import dataclass

from potluck import fl


@dataclass(frozen=True)
class State:
    """The server's weights, by group of clients."""

    weights: fl.GroupWeights


@dataclass(frozen=True)
class FedAvg(fl.SharesWeights[State]):
    """Hyper-parameters of FedAvg.

    Attributes:
        training: a client's local training.
        sharing: who averages with whom, with which weights.
    """

    aligns_classes = True
    summed_entries = ("weights", "buffers")

    variants = {
        "uniform": {"sharing.weighting": "uniform"},
        "by architecture": {"sharing.scope": "architecture"},
        "local statistics": {"sharing.buffers": "local"},
        "measured statistics": {"sharing.buffers": "drop"},
        "median": {"sharing.combine.rule": "median"},
        "lasting optimisers": {
            "training.persist": True,
            "training.schedule.rule": "cosine",
            "training.schedule.rounds": 3,
        },
    }

    training: fl.LocalTraining = fl.LocalTraining()
    sharing: fl.Sharing = fl.Sharing()

    def init(self, server: fl.Server) -> State:
        return State(self.sharing.initial(server))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        replies = cohort.stream(self.local_update, self.sharing.send(state.weights, cohort, server))
        return State(self.sharing.merge(state.weights, replies, server.roster))

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        yield fl.Fit(client.model, client.objective, client.train, self.training)
        return self.sharing.reply(client)
