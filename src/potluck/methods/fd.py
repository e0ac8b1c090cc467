"""FD: federated distillation.

Jeong, Oh, Kim, Park, Bennis, Kim. 2018. https://arxiv.org/abs/1811.11479. Algorithm 1.

Clients of any architecture report, for each class that they hold, the mean of their predictions; the server sends every
client the mean of what all others reported, and a client learns the labels and, for each of its examples, what the
others predict on average for that class. Neither weights nor public data are needed.

A class with one example has that example's prediction for a mean, and the server sees it.

Symbols
    F         the net's outputs after the softmax
    F_l^i     reply["means"], the mean of F over client i's examples of class l
    G_l^i     message["averages"], the mean of the F_l^j of the other clients that hold class l
    phi       the cross-entropy
    gamma     gamma

Wire
    down      averages classes * (|z| + flag)
    up        means present * |z|, labels present * integer

Limits
    gamma=0.0 equals local
    equals local on rounds=1
    equals local on clients=1
    training.lr=0.0 stays at rest

Departures from the paper
    1. The paper assumes that every device has every class, which its augmentation provides. That is left out here: the
       mean is over the others that hold the class, and an example whose class nobody else has reported has no such
       term; the loss remains the mean over the whole batch.
    2. Averages are those of the last round, from whoever took part in it; the paper has all devices in every round. A
       client that did not take part is sent the mean of all reports. In the first round nothing is sent.
    3. A report is the mean over the last local epoch, in the forward passes of training; the paper's is that of all
       steps of the round. With one epoch both are the same.
    4. `exchanged="logits"` reports and averages logits, and learns the softmax of the average, as several later papers
       describe the method. `averaged="all"` counts a client's own report among the others'. HtFLlib's FD does both, and
       takes averages of logits for probabilities without a softmax, which is not offered here.
    5. gamma is 1, as in HtFLlib; the paper does not state it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from potluck import fl

Exchanged = Literal["probabilities", "logits"]


@dataclass(frozen=True)
class State:
    """By client, the rows that it reported in the last round: a mean for each class that it holds."""

    reports: dict[str, fl.prototypes.Rows]


@dataclass(frozen=True)
class FD(fl.Method[State]):
    """Hyper-parameters of FD.

    Attributes:
        training: a client's local training.
        gamma: weight of the cross-entropy to the others' predictions.
        exchanged: what is averaged, by class, at clients and on the server.
        averaged: whose reports a client is sent the mean of.
        combine: how the reports on a class become one.
    """

    family = "classes"
    aligns_classes = True
    revises = ()

    variants = {
        "logits": {"exchanged": "logits"},
        "with one's own": {"averaged": "all"},
        "lasting optimisers": {"training.persist": True},
    }

    builds_clients_models = False
    needs_networks = False
    training: fl.LocalTraining = fl.LocalTraining()
    gamma: Annotated[float, fl.at_least(0)] = 1.0
    exchanged: Exchanged = "probabilities"
    averaged: Literal["others", "all"] = "others"
    combine: fl.Aggregate = fl.Aggregate()

    def needs(self) -> frozenset[fl.Need]:
        return frozenset({fl.Need.CLASSES})

    def init(self, server: fl.Server) -> State:
        return State({})

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        sent = {id: fl.Message(averages=self._averages(state, id, server.num_classes)) for id in cohort.ids}
        replies = cohort.ask(self.local_update, sent)
        known = {id: fl.classes.only_own(reply["means"], server.roster[id]) for id, reply in replies.items()}
        return State({str(id): fl.prototypes.one_each(known[id], reply["labels"]) for id, reply in replies.items()})

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        present, classes = fl.schema.UpTo(server.num_classes), server.num_classes
        of_probabilities = self.exchanged == "probabilities"
        means = (fl.schema.Probabilities if of_probabilities else partial(fl.schema.logits, member=member))(
            present, classes
        )
        return fl.Schema(means=means, labels=fl.schema.Labels(present, classes, present))

    @property
    def needs_single_replies(self) -> str:
        others = "a client is sent the mean of the others' reports; averaged = 'all' sends that of all"
        return others if self.averaged == "others" else ""

    def summed(
        self, handler: str, member: fl.Member, message: fl.Message, reply: fl.Message, server: fl.Server
    ) -> fl.ToSum:
        labels, own = reply["labels"], None if member.head is None else torch.tensor(member.head.classes.numbers)

        def left(means: Tensor, rows: Tensor) -> fl.Observed:
            return {"means": means[rows], "labels": labels[rows]}

        rows = fl.summing.summed_rows("means", reply["means"], labels, server.num_classes, left, columns=own)
        return fl.ToSum(rows)

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        table = message.get("averages") if self.gamma else None
        loss = DistillationByClass(client.criterion, self.gamma, self.exchanged)
        extras = {"averages": table}
        report = yield fl.Fit(client.model, loss, client.train, self.training, extras, keep=len(client.train))
        labels = report.kept["labels"]
        return fl.Message(means=fl.prototypes.means_by_class(report.kept["predicted"], labels), labels=labels.unique())

    def _averages(self, state: State, id: fl.ClientId, classes: int) -> fl.prototypes.Table | None:
        """G^i, known for the classes that somebody (else) reported; None if nobody did."""
        left_out = str(id) if self.averaged == "others" else None
        heard = [rows for reporter, rows in state.reports.items() if reporter != left_out]
        if not heard:
            return None
        rows = {name: torch.cat([rows[name] for rows in heard]) for name in heard[0]}
        table = fl.prototypes.averages(rows, classes, self.combine)
        if self.exchanged == "probabilities" and bool((table["means"] == -torch.inf).any()):
            table["means"] = fl.public.as_distributions(table["means"])
        return table


@dataclass(frozen=True)
class DistillationByClass:
    """phi(F, y) + gamma phi(F, G_y); what is exchanged, and y, are observed as predicted and labels.

    The extras' table "averages" has G; without one there is no second term.
    """

    criterion: fl.Criterion
    gamma: float
    exchanged: Exchanged

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> tuple[Tensor, fl.Observed]:
        """Of one batch of examples with classes."""
        z, labels, table = net(batch.inputs), batch.targets, extras["averages"]
        loss = self.criterion(z, labels)
        if table is not None:
            means = table["means"][labels]
            taught = means.softmax(1) if self.exchanged == "logits" else means
            loss = loss + self.gamma * fl.losses.soft_cross_entropy(z, taught * table["known"][labels][:, None])
        return loss, {"predicted": z if self.exchanged == "logits" else z.softmax(1), "labels": labels}
