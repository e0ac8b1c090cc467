"""FedProto: federated prototype learning.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang. AAAI 2022. https://arxiv.org/abs/2105.00243. Algorithm 1.

Clients of any architecture report, for each class they hold, the mean of the features that their heads read, which is
the class's prototype. The server averages the prototypes of a class, and every client draws the features of its own
examples towards the average of their class. A client predicts the class whose average is nearest (eq. 4).

A class with one example has that example's features for a prototype, and the server sees them.

Symbols
    f_i       a client's layers before its head, kept by the client like the head itself
    C_i^(j)   reply["prototypes"], the mean of f_i over client i's examples of class j (eq. 3)
    C^(j)     state.prototypes, the average of C_i^(j) over clients
    |D_i,j|   reply["counts"], client i's examples of class j
    lambda    strength

Wire
    down      prototypes classes * (|h| + flag)
    up        counts classes * integer, prototypes present * |h|

Limits
    strength=0.0 prediction="head" equals local
    prediction="head" equals local on rounds=1
    training.lr=0.0 prediction="head" stays at rest

Departures from the paper
    1. Eq. 6 weighs prototypes by |D_i,j| / N_j and divides by the number of clients as well, which would shrink them.
       The authors' code takes the plain mean over clients, as the default here; `weighting="samples"` is eq. 6 without
       the division.
    2. The distance of eq. 8 is between prototypes, the L2 norm summed over classes: `distance="means"`, with the
       prototypes of the batch. The code's, and the default here, is the mean squared difference of each example's
       features to its class's average. They need very different values of lambda.
    3. What is reported is the mean over the last local epoch, in the forward passes of training, as in the authors'
       code; `report="after"` measures it with the trained model. HtFLlib's covers all local epochs.
    4. A class that nobody has reported in a round keeps its last average; in the authors' code all clients take part,
       in HtFLlib's it is forgotten. An example whose class has no average has no such term, and a class without one is
       never predicted. Before the first averages, a client predicts with its head.
    5. All classes of the federation can be predicted. The authors' code leaves out those that the client lacks, and its
       printed accuracies add up over clients and over both ways to predict; `prediction="head"` is the other one.
    6. Features must have one width at all clients. HtFLlib pools them to one width, which repeats values where there
       are too few.
    7. Local training defaults to Adam, like all methods here; the authors' code has SGD with 0.01, momentum 0.5 and
       batches of 4. lambda is 1, as there; HtFLlib's script has 10.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck import fl


@dataclass(frozen=True)
class State:
    """C^(j), the average prototype of each class."""

    prototypes: fl.prototypes.Table


@dataclass(frozen=True)
class FedProto(fl.prototypes.PredictsByPrototypes[State]):
    """Hyper-parameters of FedProto.

    Attributes:
        training: a client's local training.
        strength: lambda, weight of the distance to the averages.
        weighting: what a client's prototype weighs in the average: as much as any other, or its examples of the class.
        distance: of each example's features to its class's average, or of the batch's means, see departure 2.
        report: whether features are those in training, or measured after it.
        prediction: by the nearest average, or by the client's own head.
        combine: how the prototypes of a class become one.
    """

    aligns_classes = True
    sums_suffice = True

    variants = {
        "the paper's distance": {"distance": "means"},
        "by samples": {"weighting": "samples"},
        "after training": {"report": "after"},
        "head": {"prediction": "head"},
    }

    training: fl.LocalTraining = fl.LocalTraining()
    strength: Annotated[float, fl.at_least(0)] = 1.0
    weighting: Literal["uniform", "samples"] = "uniform"
    distance: Literal["examples", "means"] = "examples"
    report: Literal["during", "after"] = "during"
    prediction: Literal["nearest", "head"] = "nearest"
    combine: fl.Aggregate = fl.Aggregate()

    def init(self, server: fl.Server) -> State:
        classes = server.num_classes
        means = torch.zeros(classes, fl.features.common_width(server))
        return State({"means": means, "known": torch.zeros(classes, dtype=torch.bool)})

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        replies = cohort.ask(self.local_update, self.known(state))
        rows, old = fl.prototypes.reported(replies), state.prototypes
        if self.weighting == "uniform":
            rows["counts"] = torch.ones_like(rows["counts"])
        new = fl.prototypes.averages(rows, server.num_classes, self.combine)  # eq. 6
        means = torch.where(new["known"][:, None], new["means"], old["means"])
        return State({"means": means, "known": new["known"] | old["known"]})

    def summed(
        self, handler: str, member: fl.Member, message: fl.Message, reply: fl.Message, server: fl.Server
    ) -> fl.ToSum:
        return fl.prototypes.summed_prototypes(reply, server, self.weighting == "samples")

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        kind = fl.prototypes.PrototypeLoss if self.distance == "examples" else MeansLoss
        tables = {"features": message.get("prototypes") if self.strength else None, "logits": None}
        keep = len(client.train) if self.report == "during" else 0
        loss = kind(client.criterion, self.strength)
        fitted = yield fl.Fit(client.model, loss, client.train, self.training, tables, keep=keep)
        if self.report == "after":
            return fl.Message(**(yield from fl.prototypes.measured(client)))
        features, labels = fitted.kept["features"], fitted.kept["labels"]
        counts = labels.bincount(minlength=client.num_classes)
        return fl.Message(counts=counts, prototypes=fl.prototypes.means_by_class(features, labels))


@dataclass(frozen=True)
class MeansLoss:
    """Eq. 7, 8: the task's loss + strength times the sum over the batch's classes of |C_i^(j) - C^(j)|.

    C_i^(j) is the mean of the batch's features of class j, C^(j) the row of the extras' table "features"; features and
    labels are observed.
    """

    criterion: fl.Criterion
    strength: float

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> tuple[Tensor, fl.Observed]:
        """Of one batch of examples with classes."""
        labels, table, (_, h, outputs) = batch.targets, extras["features"], fl.split(net).passed(batch.inputs)
        loss, observed = self.criterion(outputs, labels), {"features": h, "labels": labels}
        if table is None:
            return loss, observed
        of_class = F.one_hot(labels, len(table["known"])).to(h)
        counts = of_class.sum(0)
        means = of_class.T @ h / counts.clamp(min=1)[:, None]
        gaps = torch.linalg.vector_norm(means - table["means"], dim=1)
        return loss + self.strength * (gaps * (table["known"] & (counts > 0))).sum(), observed
