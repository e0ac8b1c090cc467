"""Values that clients report by class, and their averages: tables with one row for each class.

Methods that exchange features, prototypes or logits by class share these, so that classes nobody has are masked in
one way, and the losses that draw a client's examples to what is known of their class.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from potluck.core.federation import ClientId, Criterion, Member
from potluck.core.message import Message
from potluck.core.method import Method, on_client
from potluck.core.needs import Need
from potluck.core.nets.batchnorm import keep_statistics
from potluck.core.requests.beside_training import Predict
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import Extras, Observed, Request
from potluck.core.roles import Client, Replies, Server
from potluck.core.schema import ClassCounts, Schema, UpTo, floats
from potluck.core.summed import ToSum
from potluck.models.split import split
from potluck.parts.classes import MeanOfPredictions
from potluck.parts.features import ONE_ROW, feature_shape
from potluck.parts.heads import COMMON_WIDTH
from potluck.parts.means import Aggregate
from potluck.parts.summing import summed_rows

Table = dict[str, Tensor]
""""means" by class (classes, width), zero for classes that are not "known" (bool, classes)."""

Rows = dict[str, Tensor]
"""Reported values, oldest first: "values" (n, ...), their "labels" (n,) and the number of examples behind each,
"counts"."""


def distance(values: Tensor, labels: Tensor, table: Table | None) -> Tensor:
    """Mean over batch and width of the squared difference to the class's row; 0 for classes without one."""
    if table is None:
        return values.new_zeros(())
    gaps = (values - table["means"][labels]).square().mean(1)
    return (gaps * table["known"][labels]).mean()


def logit_distance(logits: Tensor, labels: Tensor, table: Table | None) -> Tensor:
    """`distance` of logits, over the classes that both they and the row of the table know."""
    if table is None:
        return logits.new_zeros(())
    means = table["means"][labels]
    lacking = (logits == -torch.inf) | (means == -torch.inf)
    gaps = (logits.masked_fill(lacking, 0.0) - means.masked_fill(lacking, 0.0)).square().mean(1)
    share = (~lacking).to(gaps).mean(1)  # exactly 1 where all have all classes
    return (gaps / share * table["known"][labels]).mean()


def averages(rows: Rows, classes: int, combine: Aggregate | None = None) -> Table:
    """By class, the mean of the values (n, width) weighted by their counts, or their combination by a robust rule.

    Logits that are minus infinity, for classes that a client has no output for, do not count; means of nothing else are
    minus infinity too.
    """
    if rows["values"].dim() == 2 and bool((rows["values"] == -torch.inf).any()):
        return _averages_of_known(rows, classes, combine or Aggregate())
    if combine is not None and combine.rule != "mean":
        return _combined(rows, classes, combine)
    labels, counts = rows["labels"], rows["counts"]
    whole = torch.zeros(classes, dtype=counts.dtype).index_add_(0, labels, counts)
    shares = (counts / whole[labels]).to(rows["values"].dtype)  # before the sum, so that one value comes back exactly
    means = rows["values"].new_zeros(classes, rows["values"].shape[1])
    return {"means": means.index_add_(0, labels, rows["values"] * shares[:, None]), "known": whole > 0}


def _averages_of_known(rows: Rows, classes: int, combine: Aggregate) -> Table:
    """`averages`, column by column of those values that are not minus infinity."""
    values, labels = rows["values"], rows["labels"]
    known, means = labels.bincount(minlength=classes) > 0, values.new_zeros(classes, values.shape[1])
    if combine.rule == "mean":
        has = values != -torch.inf
        counts = rows["counts"][:, None] * has
        whole = torch.zeros(means.shape, dtype=counts.dtype).index_add_(0, labels, counts)
        shares = (counts / whole[labels].clamp(min=1)).to(values.dtype)
        means.index_add_(0, labels, values.masked_fill(~has, 0.0) * shares)
        return {"means": means.masked_fill((whole == 0) & known[:, None], -torch.inf), "known": known}
    for label in labels.unique().tolist():
        mine, mean = labels == label, MeanOfPredictions(combine)
        for value, count in zip(values[mine], rows["counts"][mine].tolist(), strict=True):
            mean.add(value[None], float(count))
        means[label] = mean.value()[0]
    return {"means": means, "known": known}


def _combined(rows: Rows, classes: int, combine: Aggregate) -> Table:
    """By class, the rows' values combined by a rule."""
    means = rows["values"].new_zeros(classes, rows["values"].shape[1])
    for label in rows["labels"].unique().tolist():
        mine = rows["labels"] == label
        means[label] = combine([*rows["values"][mine]], rows["counts"][mine].tolist())
    return {"means": means, "known": rows["labels"].bincount(minlength=classes) > 0}


def means_by_class(values: Tensor, labels: Tensor) -> Tensor:
    """The mean of each class that is present, (present, width), in ascending order of class."""
    table = averages(one_each(values, labels), int(labels.max()) + 1)
    return table["means"][table["known"]]


def one_each(values: Tensor, labels: Tensor) -> Rows:
    """Rows that count for one."""
    return {"values": values, "labels": labels, "counts": torch.ones_like(labels)}


def measured(client: Client) -> Generator[Request, Any, Observed]:
    """A client's prototypes as its model makes them now, the entries of a reply that `expected_prototypes` declares.

    Returns:
        "counts", how many examples it has of each class, int64 (classes,); "prototypes", by class that it has the mean
        of what the head reads, in evaluation mode, (present, width).
    """
    features = yield Predict(client.model, client.train, parts="features")
    labels = client.train.labels
    return {
        "counts": labels.bincount(minlength=client.num_classes),
        "prototypes": means_by_class(features, labels),
    }


def expected_prototypes(server: Server, member: Member) -> Schema:
    """What `measured` gives, for a client with this architecture and number of examples."""
    present, shape = UpTo(server.num_classes), feature_shape(server, member.architecture, "s_out")
    counts = ClassCounts(server.num_classes, member.examples, present)
    return Schema(counts=counts, prototypes=floats(present, *shape))


def summed_prototypes(reply: Message, server: Server, by_counts: bool) -> ToSum:
    """What is summed of the entries of `measured`; classes that are in no sum count no examples.

    Args:
        reply: of a client.
        server: knows the classes.
        by_counts: whether prototypes count as often as their class has examples, or once.
    """
    counts: Tensor = reply["counts"]
    labels = counts.nonzero()[:, 0]

    def left(means: Tensor, rows: Tensor) -> Observed:
        kept = labels[rows]
        return {"prototypes": means[rows], "counts": torch.zeros_like(counts).index_copy(0, kept, counts[kept])}

    each = counts[labels] if by_counts else None
    return ToSum(summed_rows("prototypes", reply["prototypes"], labels, server.num_classes, left, counts=each))


def reported(replies: Replies) -> Rows:
    """All prototypes of an exchange, of each client in turn by ascending class, with their numbers of examples."""
    counts = torch.stack(replies.entries("counts"))
    rows = counts.nonzero()
    values = torch.cat(replies.entries("prototypes"))
    return {"values": values, "labels": rows[:, 1], "counts": counts[rows[:, 0], rows[:, 1]]}


def stored(old: Rows | None, new: Rows, capacity: int) -> Rows:
    """The rows of both, of each class the newest that count for `capacity` together."""
    rows = {name: torch.cat([old[name], new[name]]) for name in new} if old else new
    labels, counts, kept = rows["labels"], rows["counts"], rows["counts"].clone()
    for label in labels.unique():
        mine = labels == label
        newer = counts[mine].flip(0).cumsum(0).flip(0) - counts[mine]
        kept[mine] = (capacity - newer).clamp(min=0).minimum(counts[mine])
    return {name: tensor[kept > 0] for name, tensor in {**rows, "counts": kept}.items()}


@dataclass(frozen=True)
class PrototypeLoss:
    """The task's loss + alpha (MSE(h, H_y) + MSE(z, Z_y)); h, z and y are observed as features, logits and labels.

    h is what the last layer reads, z the logits, and H and Z the extras' tables "features" and "logits", each of which
    may be None.
    """

    criterion: Criterion
    alpha: float

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> tuple[Tensor, Observed]:
        """Of one batch of examples with classes."""
        labels, (_, h, z) = batch.targets, split(net).passed(batch.inputs)
        gaps = distance(h, labels, extras["features"]) + logit_distance(z, labels, extras["logits"])
        return self.criterion(z, labels) + self.alpha * gaps, {"features": h, "logits": z, "labels": labels}


@dataclass(frozen=True)
class ReplayLoss:
    """(1 - alpha) task's loss + alpha (task's loss of g(H_y) + MSE(g(H_y), Z_y) + MSE(z, Z_y)).

    g are the layers behind the extractor, up to the logits. Where a share of the batch has an H_y, the task's loss
    weighs 1 - alpha share, the two terms of g alpha share. The extractor's output, z and y are observed as features,
    logits and labels.
    """

    criterion: Criterion
    alpha: float

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> tuple[Tensor, Observed]:
        """Of one batch of examples with classes; the pass of H_y leaves running statistics alone."""
        labels, parts = batch.targets, split(net)
        h, _, z = parts.passed(batch.inputs)
        task, gap = self.criterion(z, labels), logit_distance(z, labels, extras["logits"])
        observed = {"features": h, "logits": z, "labels": labels}
        synthetic = extras["features"]
        if synthetic is None or (known := synthetic["known"][labels]).sum() < 2:  # one has no batch statistics
            return task + self.alpha * gap, observed
        replayed, share = labels[known], known.float().mean()
        with keep_statistics(net):
            again = parts.classifier(parts.intermediate(synthetic["means"][replayed]))
        taught = self.criterion(again, replayed) + logit_distance(again, replayed, extras["logits"])
        return (1 - self.alpha * share) * task + self.alpha * (share * taught + gap), observed


class NearestPrototype(nn.Module):
    """Classifies by the nearest prototype: the output for a class is minus the mean squared difference to its row.

    It is minus infinity for a class that is not known, which is therefore never predicted.

    Args:
        net: whose features, that its head reads, are compared.
        table: the prototypes (classes, width).
    """

    means: Tensor
    known: Tensor

    def __init__(self, net: nn.Module, table: Table) -> None:
        super().__init__()
        self.net = net
        self.training = net.training  # else layers of a net in evaluation mode would seem to be held in it
        self.register_buffer("means", table["means"])
        self.register_buffer("known", table["known"])

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (batch, ...) to outputs (batch, classes)."""
        h = split(self.net).features(x)
        gaps = (h[:, None] - self.means).square().mean(2)
        return (-gaps).masked_fill(~self.known, -torch.inf)


class HasPrototypes(Protocol):
    """A method's state that holds a prototype of each class."""

    @property
    def prototypes(self) -> Table:
        """What clients are sent as soon as a class is known."""
        ...


P = TypeVar("P", bound=HasPrototypes)


class PredictsByPrototypes(Method[P]):
    """A method whose clients report their prototypes, and predict by the nearest of those that the server sends.

    It implements the inference half of the contract; the method declares the field `prediction`.
    """

    family = "classes"
    revises = ()

    prediction: Literal["nearest", "head"]

    def needs(self) -> frozenset[Need]:
        """Features of one width, of examples with classes."""
        return frozenset({Need.SPLIT_MODEL, Need.CLASSES, ONE_ROW, COMMON_WIDTH})

    def replies(self, handler: str, member: Member, message: Message, server: Server) -> Schema | None:
        """The prototypes of the classes that the client has, and its numbers of examples."""
        return expected_prototypes(server, member)

    def known(self, state: P) -> Message:
        """The prototypes, if there are any."""
        return Message(prototypes=state.prototypes if state.prototypes["known"].any() else None)

    def inference_message(self, state: P, client_id: ClientId, server: Server) -> Message:
        """The same, or nothing if clients predict with their heads."""
        return self.known(state) if self.prediction == "nearest" else Message()

    @on_client
    def inference_model(self, client: Client, message: Message) -> nn.Module:
        """The client's network, which predicts with its own head if it was sent no prototypes of its classes."""
        table = message.get("prototypes")
        if table is not None and client.classes is not None:
            table = {**table, "known": table["known"] & ~client.classes.lacking}
        return client.model if table is None or not table["known"].any() else NearestPrototype(client.model, table)
