"""Public data: the rows of a round, what clients predict for them, and lessons of soft labels."""

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from potluck.core.federation import Member
from potluck.core.requests.beside_training import Predict
from potluck.core.requests.examples import Batch, Examples
from potluck.core.requests.fit import Extras, Fit, LocalTraining, Request
from potluck.core.roles import Client, Server
from potluck.parts.classes import averaged, only_own
from potluck.parts.losses import soft_cross_entropy
from potluck.parts.means import Aggregate


def public_of(party: Server | Client) -> Examples:
    """The public examples, which `Need.PUBLIC_DATA` has made sure of."""
    assert party.public is not None
    return party.public


def of_own_classes(client: Client, labelled: Examples) -> Examples:
    """Those of labelled public examples whose class the client's network has an output for."""
    if client.classes is None:
        return labelled
    own = torch.isin(labelled.labels, torch.tensor(client.classes.numbers))
    return labelled.take(own.nonzero().flatten())


def drawn_rows(server: Server, most: int) -> Tensor:
    """Positions of at most `most` public examples, drawn uniformly without replacement; int64, in random order."""
    return torch.randperm(len(public_of(server)), generator=server.rng)[:most]


def predict_rows(
    client: Client, rows: Tensor, pretraining: LocalTraining | None = None
) -> Generator[Request, Any, Tensor]:
    """Logits (rows, classes) of the client's model for public rows, which it remembers for `lesson_of_rows`.

    For `logits = yield from predict_rows(...)` in a handler.

    Args:
        client: predicts.
        rows: positions of the examples.
        pretraining: of a client on its own data, before it predicts for the first time; None for none.
    """
    if pretraining is not None and not client.state.get("pretrained"):
        yield Fit(client.model, client.objective, client.train, pretraining, name="train")
        client.state["pretrained"] = True
    client.state["rows"] = rows
    return (yield Predict(client.model, public_of(client).take(rows)))


def lesson_of_rows(client: Client, labels: Tensor) -> Examples:
    """A `soft_lesson` of the rows that the client predicted for last, and then forgets."""
    return soft_lesson(client, {"rows": client.state.pop("rows"), "labels": labels})


def soft_lesson(party: Server | Client, lesson: Mapping[str, Tensor]) -> Examples:
    """Public examples to learn from by `soft_labels_loss`.

    Args:
        party: has the public data.
        lesson: "rows", positions of the examples, and "labels", a distribution over classes for each.
    """
    return public_of(party).take(lesson["rows"]).unaugmented().with_columns(soft_labels=lesson["labels"])


def soft_labels_loss(net: nn.Module, batch: Batch, extras: Extras) -> Tensor:
    """Cross-entropy to the soft labels of a `soft_lesson`; its gradient is that of KL(labels || net)."""
    return soft_cross_entropy(net(batch.inputs), batch.columns["soft_labels"])


def consensus(
    predictions: Sequence[Tensor],
    combine: Aggregate,
    shares: Sequence[float] | None = None,
    members: Sequence[Member] = (),
) -> Tensor:
    """The combination of the clients' distributions, by their shares or equally: distributions, (rows, classes).

    Args:
        predictions: of each client.
        combine: how they become one; class by class over the clients that have the class.
        shares: their weights.
        members: the clients, if some of them may have outputs for classes of their own alone.
    """
    unlike = any(member.head for member in members)
    known = [only_own(one, member) for one, member in zip(predictions, members, strict=True)] if unlike else predictions
    combined = averaged(combine, known, [1.0] * len(predictions) if shares is None else shares)
    return combined if combine.rule == "mean" and not unlike else as_distributions(combined)


def as_distributions(combined: Tensor) -> Tensor:
    """Rows divided by their sums (rows, classes), since rules other than the mean work number by number.

    A row of zeros, such as the median of three clients who are each certain of another class, becomes uniform.
    """
    positive = combined.clamp(min=0)
    sums = positive.sum(1, keepdim=True)
    return torch.where(sums > 0, positive / sums, 1 / positive.shape[1])
