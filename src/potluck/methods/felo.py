"""Felo: features and logits exchanged by class.

Chan, Ngai. "Exploiting Features and Logits in Heterogeneous Federated Learning", Computer Networks 2025.
https://arxiv.org/abs/2210.15527.

Clients of any architecture report, for each class they hold, the mean of their mid-level features and of their
logits; the server averages both by class and sends the averages back, and every client draws the features and
logits of its own examples towards those of their class. Neither weights nor public data are needed.

A class with one example has that example's features and logits for means, and the server sees them.

Symbols
    f_k       client.model, kept by the client unless weights are shared
    h, z      mid-level features, which the last layer reads, and logits of one example
    H, Z      message["features"], message["logits"]: by class y the averages H_y over examples, and Z_y over
              clients' means, each of the same weight
    alpha     alpha

Wire
    down      features classes * (|h| + flag), logits classes * (|z| + flag)
    up        counts classes * integer, features present * |h|, logits present * |z|
    with      sharing.scope="layer" also: down weights |w|, buffers |b|; up weights |w|, buffers |b|, examples 1

Limits
    alpha=0.0 training.batch_size=1000 approaches fedmd digestion.lr=0.0 pretrain=false training.batch_size=1000
    alpha=0.0 sharing.scope="architecture" equals fedavg sharing.scope="architecture"
    warmup_rounds=2 equals felo alpha=0.0
    training.lr=0.0 stays at rest

Departures from the paper
    1. Only the paper's first pages were at hand, which have no equations: loss, stores and constants are those of the
       authors' published code.
    2. That code sends the features of every example; the paper speaks of features by class. Here their means and
       counts are sent, from which the server makes the same averages. An average covers the newest
       `feature_capacity` examples of a class; where the oldest mean fits in part, it counts for as many as fit.
    3. Observations are those of the last local epoch, in the forward passes of training; the code's are those of all
       batches of the round.
    4. Every round's optimiser is new and its learning rate constant by default, as for all methods here. The code keeps
       each client's Adam alive for the whole run (`training.persist`) and divides its rate by 10 at 40 % and 70 % of
       the rounds (`training.schedule` with rule "steps", factor 0.1 and these milestones).
    5. Warm-up is a number of rounds; the code's is 5 % of them (10 of 200), or 40 % for the sake of pre-training. A
       round is an epoch, the code's 10 batches of 50.
    6. An example whose class has no average yet has no such term, where the code fails; the loss remains the mean
       over the whole batch.
    7. Clients whose features differ in width have averages of their own; in the code all have 1024. Logits are
       averaged over everybody.
    8. "The server also aggregates", the paper's introduction begins before our copy ends, while the code averages no
       weights: `sharing`, off by default, averages them as fedavg does.
"""

from dataclasses import dataclass
from typing import Annotated

from potluck import fl


@dataclass(frozen=True)
class State:
    """What clients reported.

    Attributes:
        features: by width, mean features of one client's class, oldest first.
        logits: mean logits of one client's class, oldest first.
        widths: by architecture, the width of its features, as text.
        weights: the server's weights, if weights are shared.
    """

    features: dict[str, fl.prototypes.Rows]
    logits: fl.prototypes.Rows
    widths: dict[str, str]
    weights: fl.GroupWeights


@dataclass(frozen=True)
class Felo(fl.SharesWeights[State]):
    """Hyper-parameters of Felo.

    Attributes:
        training: a client's local training.
        alpha: weight of the distances to the averages.
        warmup_rounds: rounds before averages are first sent.
        feature_capacity: of each class, the newest examples that an average of features covers.
        logit_capacity: of each class, the newest clients' means that an average of logits covers.
        sharing: who averages weights with whom; nobody by default.
        combine: how what was reported of a class becomes one.
    """

    family = "classes"
    aligns_classes = True

    variants = {
        "shared weights": {"sharing.scope": "layer"},
        "as the code trains": {
            "training.persist": True,
            "training.schedule.rule": "steps",
            "training.schedule.factor": 0.1,
            "training.schedule.milestones": [1],
        },
    }

    training: fl.LocalTraining = fl.LocalTraining()
    alpha: Annotated[float, fl.at_least(0)] = 0.5
    warmup_rounds: Annotated[int, fl.at_least(0)] = 1
    feature_capacity: Annotated[int, fl.at_least(1)] = 5000
    logit_capacity: Annotated[int, fl.at_least(1)] = 50000
    sharing: fl.Sharing = fl.Sharing(scope="none")
    combine: fl.Aggregate = fl.Aggregate()

    @property
    def exchanges_more(self) -> bool:
        return True

    def needs(self) -> frozenset[fl.Need]:
        return super().needs() | {fl.Need.SPLIT_MODEL, fl.features.ONE_ROW, fl.Need.CLASSES}

    def init(self, server: fl.Server) -> State:
        return State({}, {}, fl.features.signatures(server, "s_out"), self.sharing.initial(server))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        classes, widths, ready = server.num_classes, state.widths, server.round > self.warmup_rounds
        features, logits = dict(state.features), state.logits
        H = {width: fl.prototypes.averages(rows, classes, self.combine) for width, rows in features.items() if ready}
        Z = fl.prototypes.averages(logits, classes, self.combine) if ready and logits else None
        sent = self.sharing.send(
            state.weights, cohort, server, features=lambda m: H.get(widths[m.architecture]), logits=Z
        )
        replies = cohort.ask(self.local_update, sent)
        for id, reply in replies.items():
            width, labels = widths[server.roster[id].architecture], reply["counts"].nonzero().flatten()
            new = {"values": reply["features"], "labels": labels, "counts": reply["counts"][labels]}
            features[width] = fl.prototypes.stored(features.get(width), new, self.feature_capacity)
            logits = fl.prototypes.stored(logits, fl.prototypes.one_each(reply["logits"], labels), self.logit_capacity)
        return State(features, logits, widths, self.sharing.merge(state.weights, replies, server.roster))

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        present, shape = (
            fl.schema.UpTo(server.num_classes),
            fl.features.feature_shape(server, member.architecture, "s_out"),
        )
        return fl.Schema(
            counts=fl.schema.ClassCounts(server.num_classes, member.examples, present),
            features=fl.schema.floats(present, *shape),
            logits=fl.schema.logits(present, server.num_classes, member),
            **self.sharing.expected(member, message),
        )

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        loss = fl.prototypes.PrototypeLoss(client.criterion, self.alpha)
        tables = {"features": message.get("features"), "logits": message.get("logits")}  # H and Z
        report = yield fl.Fit(client.model, loss, client.train, self.training, tables, keep=len(client.train))
        features, logits, labels = (report.kept[name] for name in ("features", "logits", "labels"))
        return self.sharing.reply(
            client,
            counts=labels.bincount(minlength=client.num_classes),
            features=fl.prototypes.means_by_class(features, labels),
            logits=fl.prototypes.means_by_class(logits, labels),
        )
