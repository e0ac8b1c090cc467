"""FedGKT: group knowledge transfer.

He, Annavaram, Avestimehr. NeurIPS 2020. https://arxiv.org/abs/2007.14513. Algorithm 1.

Weak clients train small networks and upload what their extractors make of their examples; the server trains a large
network on these features. Both sides teach each other by their logits. A prediction takes the client's extractor and
the server's network.

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
       batch is one client's. Its optimiser starts anew in each round.
    2. The server's logits are computed after its training, in evaluation mode; in the authors' code they are
       by-products of its last epoch, each batch's from before the step that was taken on it.
    3. Logits belong to examples as they are, so a client that has some to learn from does not augment; the code pairs
       them with inputs that are augmented in another way every time.
    4. Clients who are not drawn keep their logits, from the last round in which they were; the paper draws all of them.
    5. alpha weighs the teacher's term on both sides; the paper has no weights, and the code puts them on the teacher's
       term at clients and on the labels' term on the server.
    6. To be evaluated a client is sent the server's network, which is counted as evaluation's traffic. The paper says
       that the two halves are put together for a prediction, and not where.
    7. Labels, and features that inputs might be guessed from, leave the client, as in the paper.
    8. The server's loss by labels is cross-entropy, whatever the federation's criterion.
    9. Both trainings default to Adam, like all methods here; the temperature is ours, since the paper tunes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from potluck import (
    Batch,
    Client,
    ClientId,
    ClientWork,
    Cohort,
    ConfigError,
    Criterion,
    Examples,
    Extras,
    Fit,
    Labels,
    LocalTraining,
    Member,
    Message,
    Method,
    Need,
    Predict,
    Schema,
    Server,
    StagedNet,
    UpTo,
    Weights,
    above,
    at_least,
    distillation,
    feature_shapes,
    floats,
    learnt_of,
    load,
    on_client,
    staged,
)


@dataclass(frozen=True)
class State:
    """W_s, and by client the logits that it made of the client's examples."""

    net: Weights
    logits: dict[str, Tensor]


@dataclass(frozen=True)
class FedGKT(Method[State]):
    """Hyper-parameters of FedGKT.

    Attributes:
        training: of a client's network.
        server_training: of the server's.
        alpha: weight of the other side's logits beside the labels.
        temperature: T, of both.
    """

    training: LocalTraining = LocalTraining()
    server_training: LocalTraining = LocalTraining()
    alpha: Annotated[float, at_least(0)] = 1.0
    temperature: Annotated[float, above(0)] = 3.0

    def needs(self) -> frozenset[Need]:
        return frozenset({Need.SPLIT_MODEL})

    def init(self, server: Server) -> State:
        check_cuts(server)
        return State(learnt_of(tail(server.build())), {})

    def round(self, state: State, cohort: Cohort, server: Server) -> State:
        replies = cohort.ask(self.train_edge, {i: Message(logits=state.logits.get(str(i))) for i in cohort.ids})
        net = tail(server.build())
        load(net, state.net)
        data = {i: lesson(reply) for i, reply in replies.items()}
        objective = TransferLoss(nn.functional.cross_entropy, self.alpha, self.temperature)  # eq. 6
        server.fit(Fit(net, objective, together([*data.values()]), self.server_training))
        logits = {str(i): server.predict(Predict(net, examples)) for i, examples in data.items()}
        return State(learnt_of(net), state.logits | logits)

    def replies(self, handler: str, member: Member, message: Message, server: Server) -> Schema:
        n, (s_in, _) = UpTo(member.examples, member.examples), server.about(member.architecture, feature_shapes)
        return Schema(
            features=floats(n, *s_in), logits=floats(n, server.num_classes), labels=Labels(n, server.num_classes)
        )

    @on_client
    def train_edge(self, client: Client, message: Message) -> ClientWork:
        taught, data, objective = message.get("logits"), client.train, client.objective
        if taught is not None:
            data = client.train.unaugmented().with_columns(teacher=taught)
            objective = TransferLoss(client.criterion, self.alpha, self.temperature)  # eq. 7
        yield Fit(client.model, objective, data, self.training)
        features, logits = yield Predict(client.model, client.train, parts=("extracted", "outputs"))
        return Message(features=features, logits=logits, labels=client.train.labels)

    def inference_message(self, state: State, client_id: ClientId, server: Server) -> Message:
        return Message(net=state.net)

    @on_client
    def inference_model(self, client: Client, message: Message) -> nn.Module:
        net, extractor = tail(client.build()), list(staged(client.model).stages.named_children())
        load(net, message["net"])
        cut = staged(client.model).extractor_stages
        return net.with_stages({**dict(extractor[:cut]), **dict(net.stages.named_children())}, cut)


@dataclass(frozen=True)
class TransferLoss:
    """Eq. 6, 7: the loss by labels + alpha T^2 KL(teacher || net), softened by T."""

    criterion: Criterion
    alpha: float
    temperature: float

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> Tensor:
        logits = net(batch.inputs)
        gap = distillation(logits, batch.columns["teacher"], self.temperature)
        return self.criterion(logits, batch.targets) + self.alpha * gap


def lesson(reply: Mapping[str, Tensor]) -> Examples:
    """What the server learns from a client: features, labels, and the client's logits."""
    return Examples(reply["features"], reply["labels"]).with_columns(teacher=reply["logits"])


def together(lessons: list[Examples]) -> Examples:
    """All clients' examples as one."""
    inputs, labels = (torch.cat([getattr(one, name) for one in lessons]) for name in ("inputs", "targets"))
    return Examples(inputs, labels).with_columns(teacher=torch.cat([one.columns["teacher"] for one in lessons]))


def tail(net: nn.Module) -> StagedNet:
    """The layers behind a net's extractor, under the names that they have in it."""
    whole = staged(net)
    behind = list(whole.stages.named_children())[whole.extractor_stages :]
    return whole.with_stages(dict(behind), extractor_stages=0)


def check_cuts(server: Server) -> None:
    """Refuse clients whose extractors' outputs the server's network cannot read.

    Raises:
        ConfigError: there are some.
    """
    expected, _ = feature_shapes(server.build(), server.input_shape)
    for member in server.roster.values():
        found, _ = server.about(member.architecture, feature_shapes)
        if found != expected:
            raise ConfigError(
                f"fedgkt: client {member.id}: the extractor of {member.architecture} gives features of shape"
                f" {tuple(found)}, the server's network reads {tuple(expected)}; use models with one stem"
            )
