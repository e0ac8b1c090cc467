"""IFCA: iterative federated clustering.

Ghosh, Chung, Yin, Ramchandran. NeurIPS 2020. https://arxiv.org/abs/2006.04088. Algorithm 1, model averaging.

Clients are of a few kinds, and nobody knows which. The server keeps one model for each kind. A client is sent all of
them, takes the one that fits its data best, trains it, and says which it was; each model is averaged over those who
took it.

Symbols
    theta_j   state.weights[j]
    j_hat     cluster, the model with the least loss on client.train
    k         clusters
    tau       training.epochs, or training.steps

Wire
    down      weights clusters * |w|, buffers clusters * |b|
    up        weights |w|, buffers |b|, examples 1, cluster 1

Limits
    clusters=1 approaches fedavg sharing.weighting="uniform"
    clusters=1 training.lr=0.0 stays at rest

Departures from the paper
    1. The first model has the run's initial weights, and the others draws of their own. Before the first round all
       clients are evaluated with the first. The paper also proposes several restarts, and for images layers that all
       models share; neither is here.
    2. A client tries the models in evaluation mode, on all of its training data, as the authors' code does.
    3. Layers owned by some clients only are averaged over those that took the same model, see `sharing`; a layer, or
       a model, that nobody took keeps its values.
    4. Clients weigh alike, as in Algorithm 1.
    5. Local training defaults to Adam, like all methods here; the paper has SGD. Its variant that averages gradients is
       `training.steps=1` with SGD and whole batches.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated, Any

from torch import nn

from potluck import fl


@dataclass(frozen=True)
class State:
    """The models' weights, by cluster, and in each by group of clients."""

    weights: dict[str, fl.GroupWeights]


@dataclass(frozen=True)
class IFCA(fl.Method[State]):
    """Hyper-parameters of IFCA.

    Attributes:
        training: a client's local training.
        clusters: k, how many models the server keeps.
        sharing: who averages with whom, with which weights.
    """

    family = "weights"
    unguarded = "a rule acts among the clients of one cluster"
    aligns_classes = True
    variants = {"three": {"clusters": 3}, "local statistics": {"sharing.buffers": "local"}}

    training: fl.LocalTraining = fl.LocalTraining()
    clusters: Annotated[int, fl.at_least(1)] = 2
    sharing: fl.Averaging = fl.Sharing(weighting="uniform")

    @property
    def keeps_model(self) -> bool:
        return False

    def needs(self) -> frozenset[fl.Need]:
        return self.sharing.needs() | self.sharing.needs_company()

    def init(self, server: fl.Server) -> State:
        draws = {str(j): f"cluster {j}" if j else "" for j in range(self.clusters)}
        return State({j: self.sharing.initial(server, draw=draw) for j, draw in draws.items()})

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        sent = {id: self.inference_message(state, id, server) for id in cohort.ids}
        means = {j: self.sharing.no_means(server.roster, "weights", "buffers") for j in state.weights}
        for id, reply in self.sharing.combine.arriving(cohort.stream(self.local_update, sent)):
            means[str(reply["cluster"])].add(id, reply)
            del reply  # before the next comes
        return State({j: means[j].over(theta, "weights", "buffers") for j, theta in state.weights.items()})

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        cluster = fl.schema.count(self.clusters - 1, least=0)
        return fl.Schema(**self.sharing.expected(member, model_of(message, 0)), cluster=cluster)

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        cluster = yield from self._best(client, message)
        self.sharing.receive(client, model_of(message, cluster))
        yield fl.Fit(client.model, client.objective, client.train, self.training)
        return self.sharing.reply(client, cluster=cluster)

    def inference_message(self, state: State, client_id: fl.ClientId, server: fl.Server) -> fl.Message:
        models = {j: self.sharing.message(theta, server.roster[client_id]) for j, theta in state.weights.items()}
        entries = {name for model in models.values() for name in model}
        return fl.Message(**{name: {j: model[name] for j, model in models.items()} for name in sorted(entries)})

    @fl.on_client
    def inference_model(self, client: fl.Client, message: fl.Message) -> Generator[fl.Request, Any, nn.Module]:
        cluster = (yield from self._best(client, message)) if client.round else 0
        return self.sharing.deploy(client, model_of(message, cluster))

    def _best(self, client: fl.Client, message: fl.Message) -> Generator[fl.Request, Any, int]:
        """The model with the least loss on the client's training data; the first of equals."""
        losses: list[float] = []
        for j in range(self.clusters):
            self.sharing.receive(client, model_of(message, j))
            net = yield from self.sharing.ready(client, client.model)
            losses.append(float(client.criterion((yield fl.Predict(net, client.train)), client.train.labels)))
        return min(range(self.clusters), key=losses.__getitem__)


def model_of(message: fl.Message, cluster: int) -> fl.Message:
    """The entries of one of the models that were sent."""
    return fl.Message(**{name: models[str(cluster)] for name, models in message.items()})
