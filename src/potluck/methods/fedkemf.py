"""FedKEMF: knowledge extraction and multi-model fusion, by a small network that travels.

Yu, Qian, Jannesari. 2022. https://arxiv.org/abs/2208.07978.

Beside its own model each client trains a copy of one small network, the knowledge network, and the two teach each other
(deep mutual learning). Only the copies are uploaded. The server does not average them: as an ensemble they teach the
knowledge network on public data, whose labels it does not read.

Symbols
    theta_g   state.common
    theta_i   own, client.model, kept by the client
    theta_gi  common, the client's copy of theta_g
    P_t       the rows of the public data that are drawn in round t
    E, B, eta training.epochs, training.batch_size, training.lr

Wire
    down      common |theta_g|
    up        common |theta_g|

Limits
    mutual=false equals local
    training.lr=0.0 stays at rest

Departures from the paper
    1. The server learns by the cross-entropy to the ensemble's probabilities, whose gradient is that of the paper's KL.
       The authors' code halves it between the mean squared difference of probabilities, the student's at a temperature
       of 20 and the ensemble's at 1, times 400, and cross-entropy to true labels, on 5000 of the examples that clients
       train on. Here public data have no labels.
    2. At clients the peer's probabilities are the first argument of KL, and are not differentiated. The code has the
       mean squared difference of logits, whose gradient in the peer adds to what the peer learns next.
    3. `ensemble` offers the paper's three: the mean of probabilities, which is the default and that of the code; the
       class-wise maximum of logits; and the share of votes.
    4. A client's own model is updated first, and asked again before the copy is, as in the code and in deep mutual
       learning; `order="simultaneous"` updates both by what they predicted before.
    5. theta_g goes on from where it was, and starts from weights drawn apart from the clients', all of which start
       alike, or a client's two networks would be copies. The ensemble predicts with the running statistics of its
       clients; those of theta_g are of public data.
    6. Clients learn mutually also where their own model has the architecture of theta_g. It is the smallest of the
       federation's, unless `federation.server_model` names another.
    7. A client is evaluated with its own model, and the server with theta_g, which is what the paper reports.
    8. Local training defaults to Adam, like all methods here, and the server's to that of FedORION's paper, which
       compares with this method, https://openreview.net/forum?id=ZzeXjCQ5CK. That has SGD with 0.01, momentum 0.9,
       batches of 32 and 10 epochs at clients; the code has plain SGD with 0.01 on both sides, which falls along
       a cosine within a round.
    9. `mutual=false`, by which the two networks at a client learn from labels alone, is not in the paper.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck import fl

Ensemble = Literal["mean", "max", "vote"]


@dataclass(frozen=True)
class FedKEMF(fl.CommonModel):
    """Hyper-parameters of FedKEMF, beside those of `CommonModel`.

    Attributes:
        server_training: the distillation.
        public_examples: rows of the public data drawn each round; all of them if there are fewer.
        ensemble: how the copies' predictions become one.
        mutual: whether the two networks at a client teach each other.
        order: whether they are updated one after the other or at once, see departure 4.
        combine: how the "mean" ensemble's probabilities become one; another rule's are divided by their sum.
    """

    unguarded = "what copies predict are distributions, of which one client of five moves a mean by a fifth"
    aligns_classes = True

    variants = {
        "max": {"ensemble": "max"},
        "vote": {"ensemble": "vote"},
        "median": {"combine.rule": "median"},
        "simultaneous": {"order": "simultaneous"},
        "without mutual learning": {"mutual": False},
    }

    builds_clients_models = False
    server_training: fl.ServerTraining = fl.LocalTraining("sgd", lr=0.001, epochs=5, batch_size=128, momentum=0.9)
    public_examples: Annotated[int, fl.at_least(1)] = 5000
    ensemble: Ensemble = "mean"
    mutual: bool = True
    order: Literal["sequential", "simultaneous"] = "sequential"
    combine: fl.Aggregate = fl.Aggregate()

    def __post_init__(self) -> None:
        meet = self.mutual or self.order == "sequential"
        fl.require(meet, "order", "'sequential' without mutual learning, where neither waits for the other", self.order)
        plain = self.ensemble == "mean" or self.combine == fl.Aggregate()
        fl.require(plain, "combine", f"the default, since the ensemble {self.ensemble!r} takes no mean", self.combine)

    def needs(self) -> frozenset[fl.Need]:
        return frozenset({fl.Need.PUBLIC_DATA, fl.Need.CLASSES})

    def merged(self, common: fl.Weights, replies: fl.Replies, server: fl.Server) -> fl.Weights:
        rows = fl.public.drawn_rows(server, self.public_examples)
        teachers = (fl.load(server.build(), copy) for copy in replies.entries("common"))
        logits = [server.predict(fl.Predict(teacher, fl.public.public_of(server).take(rows))) for teacher in teachers]
        taught = fused(torch.stack(logits), self.ensemble, self.combine)
        lesson = fl.public.soft_lesson(server, {"rows": rows, "labels": taught})
        student = fl.load(server.build(), common)
        report = server.fit(fl.Fit(student, fl.public.soft_labels_loss, lesson, self.server_training))
        server.note(distillation_loss=report.loss)
        return fl.learnt_of(student)

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        return fl.Schema(common=fl.schema.like(message["common"]))

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        common = fl.load(client.build(), message["common"])
        if not self.mutual:
            for name, net in (("own", client.model), ("common", common)):
                yield fl.Fit(net, client.objective, client.train, self.training, name=name)
            return fl.Message(common=fl.learnt_of(common))
        pair = nn.ModuleDict({"own": client.model, "common": common})
        losses = [
            fl.teaching.MutualLoss("own", "common", client.criterion),
            fl.teaching.MutualLoss("common", "own", client.criterion),
        ]
        turns = [("own.",), ("common.",)] if self.order == "sequential" else None
        yield fl.Fit(pair, losses, client.train, self.training, turns=turns)
        return fl.Message(common=fl.learnt_of(common))


def fused(logits: Tensor, ensemble: Ensemble, combine: fl.Aggregate) -> Tensor:
    """The teacher's probabilities (examples, classes) from its nets' logits (nets, examples, classes)."""
    if ensemble == "mean" and combine.rule == "mean":
        return logits.softmax(2).mean(0)
    if ensemble == "mean":
        return fl.public.consensus(list(logits.softmax(2)), combine)
    if ensemble == "max":
        return logits.amax(0).softmax(1)
    return F.one_hot(logits.argmax(2), logits.shape[2]).to(logits).mean(0)
