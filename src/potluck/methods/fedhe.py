"""FedHe: heterogeneous models and communication-efficient federated learning.

Chan, Ngai. MSN 2021. https://arxiv.org/abs/2110.09910.

Clients of any architecture report the mean logits of each class that they hold; the server averages all reports of a
class, and every client draws the logits of its own examples towards the average of their class. Neither weights nor
public data are needed, and a client sends no more than a vector a class.

A class with one example has that example's logits for a mean, and the server sees them.

Symbols
    f_k       client.model, kept by the client
    z         logits of one example
    q_k^c     reply["logits"], the mean of z over client k's examples of class c
    Q_c, m_c  state.means and state.counts: the mean of the reports on class c, and how many it is the mean of
    K         len(server.roster)
    alpha     alpha

Wire
    down      logits classes * (|z| + flag)
    up        counts classes * integer, logits present * |z|

Limits
    alpha=0.0 equals local
    warmup=2 equals local
    equals local on rounds=1
    training.lr=0.0 stays at rest

Departures from the paper
    1. The server here waits for its cohort and then adds all reports; the paper's is asynchronous: every report counts
       at once, and the next client to begin sees it. With a cohort of one client the two are the same. No client here
       trains by averages that were sent to it long before.
    2. Of the paper only the abstract was at hand; loss, averages and constants are those of the authors' code.
    3. A report is the mean over the last local epoch, in the forward passes of training; the code's is that of all
       batches since the client was drawn, which are 3 batches of 50, called epochs there. With one epoch both are the
       same.
    4. An example whose class nobody has reported has no such term, where the code fails; the loss remains the mean over
       the whole batch.
    5. Every report on a class counts once by default, as in the code. `weighting="samples"` counts it as often as it
       has examples. For this a client states numbers of examples, where the code's send which classes they have.
    6. Every round's optimiser is new by default, as for all methods here; the code keeps each client's Adam alive for
       the whole run (`training.persist`).
    7. alpha is 1, as in the scripts that run the code; the code's own default is 0.5.
    8. Clients are evaluated in evaluation mode; the code evaluates them in training mode.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from potluck import fl


@dataclass(frozen=True)
class State:
    """The averages of what clients reported.

    Attributes:
        means: Q, (classes, classes), a row for each class; zero for one that nobody has reported.
        counts: m, int64 (classes,); where clients lack classes, of each column of a row (classes, classes).
        reports: how many clients have reported so far, each as often as it did.
    """

    means: Tensor
    counts: Tensor
    reports: int


@dataclass(frozen=True)
class FedHe(fl.Method[State]):
    """Hyper-parameters of FedHe.

    Attributes:
        training: a client's local training.
        alpha: weight of the distance to the averages.
        warmup: how often clients have reported, on average, before averages are first sent.
        memory: how often clients report, on average, before all averages so far are counted as a single report (or
            example), so that later reports soon outweigh them.
        weighting: as what a report on a class counts: "uniform" as one, "samples" as the number of its examples.
        combine: how the reports of one round on a class become one.
    """

    family = "classes"
    aligns_classes = True
    revises = ()

    variants = {
        "by samples": {"weighting": "samples"},
        "short memory": {"memory": 1},
        "lasting optimisers": {"training.persist": True},
    }

    builds_clients_models = False
    training: fl.LocalTraining = fl.LocalTraining()
    alpha: Annotated[float, fl.at_least(0)] = 1.0
    warmup: Annotated[int, fl.at_least(0)] = 1
    memory: Annotated[int, fl.at_least(1)] = 10
    weighting: Literal["uniform", "samples"] = "uniform"
    combine: fl.Aggregate = fl.Aggregate()

    def needs(self) -> frozenset[fl.Need]:
        return frozenset({fl.Need.CLASSES})

    def init(self, server: fl.Server) -> State:
        means = torch.zeros(server.num_classes, server.num_classes)
        unlike = not fl.classes.held([*server.roster.values()], server.num_classes).all()
        return State(means, torch.zeros(means.shape if unlike else means.shape[:1], dtype=torch.int64), 0)

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        ready = state.reports >= self.warmup * len(server.roster)
        replies = cohort.ask(self.local_update, fl.Message(logits=table_of(state) if ready else None))
        means, counts = self._with_reports(state, replies, server)
        reports, span = state.reports + len(replies), self.memory * len(server.roster)
        if reports // span > state.reports // span:
            counts = counts.clamp(max=1)  # Q_c <- Q_c / m_c, m_c <- 1
        return State(means, counts, reports)

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        present = fl.schema.UpTo(server.num_classes)
        counts = fl.schema.ClassCounts(server.num_classes, member.examples, present)
        return fl.Schema(counts=counts, logits=fl.schema.logits(present, server.num_classes, member))

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        table = message.get("logits") if self.alpha else None
        loss = LogitLoss(client.criterion, self.alpha)
        report = yield fl.Fit(
            client.model, loss, client.train, self.training, extras={"logits": table}, keep=len(client.train)
        )
        logits, labels = report.kept["logits"], report.kept["labels"]
        counts = labels.bincount(minlength=client.num_classes)
        return fl.Message(counts=counts, logits=fl.prototypes.means_by_class(logits, labels))

    def _with_reports(self, state: State, replies: fl.Replies, server: fl.Server) -> tuple[Tensor, Tensor]:
        """Q and m after a round's reports."""
        counts = torch.stack(replies.entries("counts"))  # (clients, classes)
        if self.weighting == "uniform":
            counts = (counts > 0).long()
        rows = counts.nonzero()  # of each client in turn, its classes in ascending order, as in its logits
        reported = {
            "values": torch.cat(replies.entries("logits")),
            "labels": rows[:, 1],
            "counts": counts[rows[:, 0], rows[:, 1]],
        }
        new, added = fl.prototypes.averages(reported, len(state.counts), self.combine)["means"], counts.sum(0)
        if state.counts.dim() == 2:
            added = counts.T @ fl.classes.held(server.members(replies), len(added)).long()
        total = state.counts + added
        share = (added / total.clamp(min=1)).to(new.dtype).view(len(added), -1)
        return state.means.lerp(new.masked_fill(new == -torch.inf, 0.0), share), total


def table_of(state: State) -> fl.prototypes.Table:
    """Q; its columns that nobody reported of a class are minus infinity."""
    if state.counts.dim() == 1:
        return {"means": state.means, "known": state.counts > 0}
    return {"means": state.means.masked_fill(state.counts == 0, -torch.inf), "known": (state.counts > 0).any(1)}


@dataclass(frozen=True)
class LogitLoss:
    """The task's loss + alpha MSE(z, Q_y); z and y are observed as logits and labels.

    The extras' table "logits" has Q; without one there is no second term.
    """

    criterion: fl.Criterion
    alpha: float

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> tuple[Tensor, fl.Observed]:
        """Of one batch of examples with classes."""
        z, labels, table = net(batch.inputs), batch.targets, extras["logits"]
        loss = self.criterion(z, labels)
        if table is not None:
            loss = loss + self.alpha * fl.prototypes.logit_distance(z, labels, table)
        return loss, {"logits": z, "labels": labels}
