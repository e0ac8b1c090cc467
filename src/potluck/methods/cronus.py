"""Cronus: robust and heterogeneous collaborative learning with black-box knowledge transfer.

Chang, Shejwalkar, Shokri, Houmansadr. 2019. https://arxiv.org/abs/1912.11279.

Clients of any architecture label public data by their probabilities. For every public example the server estimates the
mean of these vectors robustly, by the filter of Diakonikolas, Kamath, Kane, Li, Moitra, Stewart (ICML 2017,
https://arxiv.org/abs/1703.00893): while the vectors vary more along some direction than honest ones would, the one that
lies farthest out in that direction is dropped. So few poisoned clients cannot decide what all others learn.

Symbols
    theta_i   client.model, kept by the client
    X_p       the rows of the public data drawn this round
    Y_i       reply["predictions"], probabilities of client i on X_p
    Y         labels, their robust mean
    epsilon   outliers

Wire
    down      rows public * integer, labels public * |z|
    up        predictions public * |z|

Limits
    variance=1.0 approaches cronus aggregation="rule" combine.rule="mean" on optimizer="sgd"
    distillation.lr=0.0 pretrain=false training.batch_size=1000 approaches local training.batch_size=1000
    training.lr=0.0 distillation.lr=0.0 stays at rest

Departures from the paper
    1. Of the paper only the abstract and descriptions by others were at hand. The filter's constants are ours: the
       largest share of outliers, and the largest variance of honest predictions along a direction. (The variance of
       distributions along a direction is never above 1/2.)
    2. The filter drops one vector at a time, the one that is farthest out. The paper on filters drops all beyond a
       threshold that follows from the distribution of honest points.
    3. A client learns the public labels first and its own data then, in two passes, so that only its own data are
       augmented; the paper trains on both sets together.
    4. Before its first exchange a client trains once on its own data (`pretrain`), as long as in a round; the paper's
       first phase is longer.
    5. Only the clients that were drawn label and learn; in the paper all take part in every round.
    6. `aggregation="rule"` estimates the mean number by number instead, by `combine`, and divides by the sum.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from potluck import fl


@dataclass(frozen=True)
class Cronus(fl.Stateless):
    """Hyper-parameters of Cronus.

    Attributes:
        training: a client's training on its own data.
        distillation: its training on the robust labels.
        public_examples: rows of the public data drawn each round; all of them if there are fewer.
        pretrain: whether a client trains on its own data before it is first asked for predictions.
        aggregation: the robust mean: "filter" drops outlying vectors, "rule" combines number by number.
        outliers: epsilon, the largest share of the clients that "filter" drops, rounded down to whole clients.
        variance: the largest variance along any direction with which "filter" leaves predictions as they are.
        combine: of "rule".
    """

    family = "public"
    unguarded = "what clients send are distributions, of which one client of five moves a mean by a fifth"
    aligns_classes = True

    variants = {
        "trimmed mean": {"aggregation": "rule"},
        "without pre-training": {"pretrain": False},
        "lasting optimisers": {"training.persist": True, "distillation.persist": True},
    }

    builds_clients_models = False
    training: fl.LocalTraining = fl.LocalTraining()
    distillation: fl.LocalTraining = fl.LocalTraining(batch_size=128)
    public_examples: Annotated[int, fl.at_least(1)] = 5000
    pretrain: bool = True
    aggregation: Literal["filter", "rule"] = "filter"
    outliers: Annotated[float, fl.at_least(0), fl.below(0.5)] = 0.25
    variance: Annotated[float, fl.above(0)] = 0.1
    combine: fl.Aggregate = fl.Aggregate("trimmed")

    def needs(self) -> frozenset[fl.Need]:
        return frozenset({fl.Need.PUBLIC_DATA, fl.Need.CLASSES})

    def round(self, state: fl.Nothing, cohort: fl.Cohort, server: fl.Server) -> fl.Nothing:
        predicted = cohort.ask(self.predict_public, fl.Message(rows=fl.public.drawn_rows(server, self.public_examples)))
        labels = self._labels(predicted, server)
        cohort.ask(self.local_update, {i: fl.Message(labels=labels) for i in predicted})
        return state

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        if handler == "predict_public":
            return fl.Schema(predictions=fl.schema.Probabilities(len(message["rows"]), server.num_classes))
        return fl.Schema()

    @fl.on_client
    def predict_public(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        pretraining = self.training if self.pretrain else None
        logits = yield from fl.public.predict_rows(client, message["rows"], pretraining)
        return fl.Message(predictions=logits.softmax(1))

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        lesson = fl.public.lesson_of_rows(client, message["labels"])
        yield fl.Fit(client.model, fl.public.soft_labels_loss, lesson, self.distillation, name="digest")
        yield fl.Fit(client.model, client.objective, client.train, self.training, name="train")
        return fl.Message()

    def _labels(self, predicted: fl.Replies, server: fl.Server) -> Tensor:
        """Y, a distribution over classes for each row."""
        predictions = predicted.entries("predictions")
        if self.aggregation == "rule":
            return fl.public.consensus(predictions, self.combine, members=server.members(predicted))
        held = fl.classes.held(server.members(predicted), server.num_classes)
        labels, kept = filtered_mean(torch.stack(predictions), self.outliers, self.variance, held)
        server.note(dropped=1 - float(kept.mean()))
        return labels


def filtered_mean(
    points: Tensor, outliers: float, variance: float, held: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """For every row, the mean of the points that are left when the outlying ones have been dropped.

    While the covariance of a row's points has an eigenvalue above `variance`, the point with the largest projection on
    the top eigenvector is dropped, but at most a share `outliers` of them, rounded down. The projections are read from
    the points' inner products, whose top eigenvector they are, up to a factor.

    Args:
        points: one for each client and row, (clients, rows, classes).
        outliers: below 0.5.
        variance: largest eigenvalue at which nothing is dropped.
        held: which classes a client has, bool (clients, classes), in which alone it is compared and counts; all if
            None.

    Returns:
        The means (rows, classes), and which points were left, 1 or 0, (rows, clients).
    """
    points = points.transpose(0, 1)
    kept = torch.ones_like(points[:, :, 0])
    known = torch.ones_like(points[0]) if held is None else held.to(points)
    for _ in range(int(outliers * points.shape[1] + 1e-9)):  # 0.29 * 100 is a little below 29
        gaps = (points - _mean(points, kept, known)[:, None]) * kept[:, :, None] * known
        products = gaps @ gaps.mT / kept.sum(1)[:, None, None]
        values, vectors = torch.linalg.eigh(products)
        farthest = vectors[:, :, -1].abs().argmax(1)
        wide = (values[:, -1] > variance).nonzero().flatten()
        kept[wide, farthest[wide]] = 0
    mean = _mean(points, kept, known)
    return mean if bool(known.all()) else fl.public.as_distributions(mean), kept


def _mean(points: Tensor, kept: Tensor, known: Tensor) -> Tensor:
    counted = kept[:, :, None] * known
    return (points * counted).sum(1) / counted.sum(1).clamp(min=1)
