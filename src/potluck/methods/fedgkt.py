"""FedGKT: group knowledge transfer.

He, Annavaram, Avestimehr. NeurIPS 2020. https://arxiv.org/abs/2007.14513. Algorithm 1.

Weak clients train small networks and upload their extractors' features; the server trains a large network on these.
Both sides distil each other's logits. A prediction uses the client's extractor and the server's network.

Symbols
    W_e, W_c  client.model, kept by the client: its extractor, and the layers behind it
    W_s       state.net, the layers behind the extractor of the federation's server model
    H_k       features, the extractor's output for each example of client k
    z_c, z_s  logits of the client's and of the server's network
    T         temperature

Wire
    down      logits examples * |z|
    up        features examples * |s_in|, logits examples * |z|, labels examples * integer

Limits
    alpha=0.0 equals fedgkt alpha=0.0 temperature=7.0
    training.lr=0.0 server_training.lr=0.0 stays at rest

Departures from the paper
    1. The server trains on the features of all clients of the cohort, mixed in its batches; in the paper and its code a
       batch is one client's. Its optimiser starts anew in each round, and so do those of clients, which last for the
       whole run in the code (`training.persist`).
    2. The server's logits are computed after its training, in evaluation mode; in the authors' code they are
       by-products of its last epoch, each batch's from before the step that was taken on it.
    3. Logits belong to examples as they are, so a client that has some to learn from does not augment; the code pairs
       them with inputs that are augmented in another way every time.
    4. Clients who are not drawn keep their logits, from the last round in which they were; the paper draws all of them.
    5. alpha weighs the teacher's term on both sides; the paper has no weights, and the code puts them on the teacher's
       term at clients and on the labels' term on the server. It also adds 1e-7 to the teacher's probabilities.
    6. To be evaluated a client is sent the server's network, which is counted as evaluation's traffic. The paper says
       that the two halves are put together for a prediction, and not where.
    7. Labels, and features that inputs might be guessed from, leave the client, as in the paper.
    8. The server's loss by labels is cross-entropy, whatever the federation's criterion.
    9. Both trainings default to Adam, like all methods here; the temperature is ours, since the paper tunes it.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from potluck import fl


@dataclass(frozen=True)
class State:
    """W_s, and by client the logits that it made of the client's examples."""

    net: fl.Weights
    logits: dict[str, Tensor]


@dataclass(frozen=True)
class FedGKT(fl.Method[State]):
    """Hyper-parameters of FedGKT.

    Attributes:
        training: of a client's network.
        server_training: of the server's.
        alpha: weight of the other side's logits beside the labels.
        temperature: T, of both.
    """

    family = "classes"
    aligns_classes = True
    unguarded = "the server's network learns from every client's features"
    revises = ()

    training: fl.LocalTraining = fl.LocalTraining()
    server_training: fl.ServerTraining = fl.LocalTraining()
    alpha: Annotated[float, fl.at_least(0)] = 1.0
    temperature: Annotated[float, fl.above(0)] = 3.0

    def needs(self) -> frozenset[fl.Need]:
        return frozenset({fl.Need.SPLIT_MODEL, fl.features.MIDDLE, fl.features.ONE_STEM})

    def init(self, server: fl.Server) -> State:
        return State(fl.learnt_of(tail(server.build())), {})

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        replies = cohort.ask(self.train_edge, {i: fl.Message(logits=state.logits.get(str(i))) for i in cohort.ids})
        net = tail(server.build(), state.net)
        objective = TransferLoss(nn.functional.cross_entropy, self.alpha, self.temperature)  # eq. 6
        server.fit(fl.Fit(net, objective, lesson(*replies.values()), self.server_training))
        logits = {str(i): server.predict(fl.Predict(net, lesson(reply))) for i, reply in replies.items()}
        return State(fl.learnt_of(net), state.logits | logits)

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        n, classes = fl.schema.UpTo(member.examples, member.examples), server.num_classes
        features = fl.schema.floats(n, *fl.features.feature_shape(server, member.architecture, "s_in"))
        return fl.Schema(
            features=features, logits=fl.schema.logits(n, classes, member), labels=fl.schema.Labels(n, classes)
        )

    @fl.on_client
    def train_edge(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        taught, data, objective = message.get("logits"), client.train, client.objective
        if taught is not None:
            data = client.train.unaugmented().with_columns(teacher=taught)
            objective = TransferLoss(client.criterion, self.alpha, self.temperature)  # eq. 7
        yield fl.Fit(client.model, objective, data, self.training)
        features, logits = yield fl.Predict(client.model, client.train, parts=("extracted", "outputs"))
        return fl.Message(features=features, logits=logits, labels=client.train.labels)

    def inference_message(self, state: State, client_id: fl.ClientId, server: fl.Server) -> fl.Message:
        return fl.Message(net=state.net)

    @fl.on_client
    def inference_model(self, client: fl.Client, message: fl.Message) -> nn.Module:
        behind = tail(client.build(), message["net"])
        return fl.classes.own_classes_only(fl.stages.with_extractor_of(client.model, behind), client)


@dataclass(frozen=True)
class TransferLoss:
    """Eq. 6, 7: the loss by labels + alpha T^2 KL(teacher || net), softened by T."""

    criterion: fl.Criterion
    alpha: float
    temperature: float

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        logits = net(batch.inputs)
        gap = fl.losses.distillation(logits, batch.columns["teacher"], self.temperature)
        return self.criterion(logits, batch.targets) + self.alpha * gap


def lesson(*replies: fl.Message) -> fl.Examples:
    """What the server learns from clients: all their features, with the labels and the clients' logits."""
    names = ("features", "labels", "logits")
    features, labels, logits = (torch.cat([reply[name] for reply in replies]) for name in names)
    return fl.Examples(features, labels).with_columns(teacher=logits)


def tail(net: nn.Module, weights: fl.Weights | None = None) -> nn.Module:
    """The layers behind a net's extractor, under the names that they have in it; with these weights, if given."""
    found = fl.stages.behind_extractor(net)
    return found if weights is None else fl.load(found, weights)
