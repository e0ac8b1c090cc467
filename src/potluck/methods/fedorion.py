"""FedORION: aggregation-assisted proxyless distillation.

Anonymous authors. Submitted to ICLR 2024. https://openreview.net/forum?id=ZzeXjCQ5CK. Algorithm 1.

Beside its own model each client trains a copy of one small global model, and the two teach each other (deep mutual
learning). Since all copies have one architecture, the server can average them; it then distils the clients' own
models into the average on noise, for which it needs no data. With selective mutual learning, which is the default, weak
clients hold nothing but the global model (section 3.2.1); with `selective=false` every client learns mutually.

Symbols
    theta_g   state.common
    theta_i   own, client.model, kept by the client
    theta_gi  common, the client's copy of theta_g
    z         a batch of noise
    differs   1 for a client whose model has not the architecture of theta_g, else 0
    C, n_i    len(replies), examples
    T, eta_i  training.epochs, training.lr
    T_s       server_training.epochs, each of noise_batches steps
    eta_g     server_training.lr on the server; training.lr at a client

Wire
    down      common |theta_g|
    up        own differs * |theta_i|, common |theta_g|, examples 1
    with      selective=false also: up own |theta_i|
    with      aggregation=false also: up common at most |theta_g|

Limits
    distillation=false equals fedavg sharing.weighting="uniform" training.optimizer="sgd" training.momentum=0.9 training.batch_size=32 on architectures=1 batchnorm=true
    server_training.lr=0.0 equals fedorion distillation=false on batchnorm=true
    mutual_from=1.0 equals fedorion on architectures=1
    selective=false distillation=false order="simultaneous" approaches fml training.optimizer="sgd" training.momentum=0.9 training.batch_size=32 training.lr=0.02 on batchnorm=true
    training.lr=0.0 distillation=false stays at rest

Departures from the paper
    1. An epoch of the server has as many batches of noise as the federation's training examples would fill (391 for
       50 000), as in the work on noise that the paper builds on; Algorithm 1 has one (`noise_batches=1`), and five
       steps of eta_g = 0.001 change hardly anything.
    2. Teachers and student normalise noise by its batch's statistics, as the paper asks; the student keeps the
       running statistics of the average, which noise would spoil. Without aggregation it has no others than noise's.
       Models without BatchNorm are allowed, though the paper's argument for noise does not cover them. The teachers'
       Dropout is off on the server. At a client both nets are in training mode when they teach: batch statistics, and
       Dropout on.
    3. The average covers BatchNorm's running statistics; the paper speaks of parameters.
    4. A client's copy learns at the client's rate, though Algorithm 1 calls both that and the server's eta_g.
    5. In the KL terms of eqs. 1-3 the teacher is the first argument and is not differentiated, as Algorithm 1 implies.
    6. Algorithm 1 (`selective=false`) has every client learn mutually. By default clients may skip it, as the paper's
       main tables seem to: those whose own model has the global architecture, that is tensors of the same names and
       shapes, and those of less than `mutual_from` capacity, who get that architecture in place of their own. They
       start each round from theta_g and are evaluated with it; others with theta_i. The paper evaluates theta_g only.
    7. Clients omit what the server would not read: copies without `aggregation`, own models without `distillation` or
       where a client holds the global model only.
    8. Image-like noise is standardised over each batch; "stylegan" is a small untrained generator and not that net.
    9. The global model is the smallest of the federation's, as in the paper, unless `federation.server_model` names one.
    10. Momentum starts anew in every round, on both sides; the paper does not say.
    11. With `selective=false` theta_g starts from weights drawn apart from the clients', all of which start alike, or it
       would begin as a copy of own models of its architecture. The paper does not say.
    12. Without mutual learning (`mutual=false`) eq. 2 has no term of labels, as the ablation's text says, and eq. 1 is
       as it was. To expose theta_g to fewer labels, no client may train it on them: this asks for `selective=false`.
"""  # noqa: E501 - a limit is one line

from dataclasses import dataclass
from math import ceil
from typing import Annotated, Literal

from torch import nn

from potluck import fl


@dataclass(frozen=True)
class FedORION(fl.CommonModel):
    """Hyper-parameters of FedORION.

    Attributes:
        training: a client's local training, of its own model and of its copy of the global one.
        server_training: the distillation; batches of noise must be large, the paper has 128.
        selective: whether clients whose own model has the global architecture train that alone, on labels; False has
            every client learn mutually, as in Algorithm 1.
        mutual: False is the ablation "w/o DML": the copies learn from the clients' own models and none from labels, so
            `selective` must be False.
        aggregation: False is the ablation "w/o Agg": copies are discarded and theta_g is only distilled.
        distillation: False is the ablation "w/o Dist": theta_g is the average.
        mutual_from: capacity below which a client trains the global architecture alone instead of its own and a
            copy; 0 with `selective=false`.
        order: "sequential" updates a client's own model first and asks it again before the copy is updated;
            "simultaneous" updates both by what they predicted before.
        noise: what is distilled on: "gaussian", "dead_leaves" or "stylegan", see `potluck.parts.noise`. The last two
            need images, and dead leaves need time: about a second for 128 small ones.
        noise_batches: batches of noise in an epoch of the server; None for as many as the examples that all
            clients of the federation train on would fill.
        combine: how the clients' copies of the global model become one.
    """

    aligns_classes = True
    variants = {
        "simultaneous": {"order": "simultaneous"},
        "every client": {"selective": False},
        "without mutual learning": {"selective": False, "mutual": False},
        "without aggregation": {"aggregation": False},
        "without distillation": {"distillation": False},
        "weak clients": {"mutual_from": 0.75},
        "lasting optimisers": {"training.persist": True},
    }

    training: fl.LocalTraining = fl.LocalTraining("sgd", lr=0.01, epochs=10, batch_size=32, momentum=0.9)
    server_training: fl.ServerTraining = fl.LocalTraining("sgd", lr=0.001, epochs=5, batch_size=128, momentum=0.9)
    selective: bool = True
    mutual: bool = True
    aggregation: bool = True
    distillation: bool = True
    mutual_from: Annotated[float, fl.at_least(0), fl.at_most(1)] = 0.0
    order: Literal["sequential", "simultaneous"] = "sequential"
    noise: fl.noise.Noise = "gaussian"
    noise_batches: Annotated[int, fl.at_least(1)] | None = None
    combine: fl.Aggregate = fl.Aggregate()

    def __post_init__(self) -> None:
        size = self.server_training.batch_size
        fl.require(size >= 2, "server_training.batch_size", "at least 2, which have batch statistics", size)
        everyone = "0 with selective=false, by which every client learns mutually"
        fl.require(self.selective or self.mutual_from == 0, "mutual_from", everyone, self.mutual_from)
        unlabelled = "false with mutual=false, by which no client trains the global model on labels"
        fl.require(self.mutual or not self.selective, "selective", unlabelled, self.selective)
        if not (self.aggregation or self.distillation):
            raise fl.ConfigError(
                "aggregation, distillation: expected one of them, found neither; theta_g would not learn"
            )

    def needs(self) -> frozenset[fl.Need]:
        return frozenset({fl.Need.CLASSES, fl.Need.REAL_INPUTS})

    def init(self, server: fl.Server) -> fl.common.Common:
        if self.distillation:
            self._noise(server)  # refuses inputs that are no images before anybody trains
        return fl.common.Common(fl.learnt_of(server.build(draw="" if self.selective else "common")))

    def merged(self, common: fl.Weights, replies: fl.Replies, server: fl.Server) -> fl.Weights:
        if self.aggregation:  # Alg. 1, server, l. 1: the plain mean
            common = fl.means.mean_of(replies, "common", "uniform", self.combine)
        return self._distilled(common, replies, server) if self.distillation else common

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        common, examples = fl.schema.like(message["common"]), fl.schema.count(member.examples)
        if self.common_alone(member, server):
            return fl.Schema(common=common, examples=examples)
        own = fl.schema.like(server.about(member.architecture, fl.weights.outline)) if self.distillation else None
        return fl.Schema(own=own, common=common if self.aggregation else None, examples=examples)

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        own, common, examples = client.model, fl.load(client.build(), message["common"]), len(client.train)
        if self._skips(client.capacity, fl.weights.layout(own) == fl.weights.layout(common)):
            client.keeps_model = False  # it holds the global model only
            yield fl.Fit(common, client.objective, client.train, self.training)
            return fl.Message(common=fl.learnt_of(common), examples=examples)
        l_cm = fl.teaching.MutualLoss("own", "common", client.criterion)  # eq. 1
        l_gm = fl.teaching.MutualLoss("common", "own", client.criterion if self.mutual else None)  # eq. 2
        pair = nn.ModuleDict({"own": own, "common": common})
        turns = [("own.",), ("common.",)] if self.order == "sequential" else None
        yield fl.Fit(pair, [l_cm, l_gm], client.train, self.training, turns=turns)
        sent_own = fl.learnt_of(own) if self.distillation else None
        return fl.Message(own=sent_own, common=fl.learnt_of(common) if self.aggregation else None, examples=examples)

    def common_alone(self, member: fl.Member, server: fl.Server) -> bool:
        """Whether a client holds the global model only."""
        own, common = (server.about(name, fl.weights.layout) for name in (member.architecture, None))
        return self._skips(member.capacity, own == common)

    def _skips(self, capacity: float, same: bool) -> bool:
        """Whether a client skips mutual learning: it is weak, or its own model has the architecture of theta_g."""
        return capacity < self.mutual_from or (self.selective and same)

    def _distilled(self, common: fl.Weights, replies: fl.Replies, server: fl.Server) -> fl.Weights:
        """Alg. 1, server, l. 2-6."""
        student, loss = fl.load(server.build(), common), fl.teaching.EnsembleLoss(keep=self.aggregation)  # L_KD, eq. 3
        teachers = nn.ModuleList(teacher(server, id, reply) for id, reply in replies.items())
        shares, frozen = {"shares": replies.entries("examples")}, {"teachers": teachers}
        report = server.fit(fl.Fit(student, loss, self._noise(server), self.server_training, shares, frozen=frozen))
        server.note(distillation_loss=report.loss)
        return fl.learnt_of(student)

    def _noise(self, server: fl.Server) -> fl.Examples:
        """As many inputs of noise as an epoch of the server has."""
        size = self.server_training.batch_size
        examples = sum(member.examples for member in server.roster.values())
        batches = ceil(examples / size) if self.noise_batches is None else self.noise_batches
        return fl.noise.noise_examples(self.noise, batches * size, fl.one_shape(server.input_shape))

    def inference_message(self, state: fl.common.Common, client_id: fl.ClientId, server: fl.Server) -> fl.Message:
        return fl.Message(common=state.common if self.common_alone(server.roster[client_id], server) else None)

    @fl.on_client
    def inference_model(self, client: fl.Client, message: fl.Message) -> nn.Module:
        common = message.get("common")
        return client.model if common is None else fl.classes.own_classes_only(fl.load(client.build(), common), client)


def teacher(server: fl.Server, id: fl.ClientId, reply: fl.Message) -> nn.Module:
    """A client's model, or its copy of the global one where it holds no other, ready to predict on noise."""
    own = reply.get("own")
    architecture = None if own is None else server.roster[id].architecture
    return fl.teaching.by_batch_statistics(fl.load(server.build(architecture), reply["common"] if own is None else own))
