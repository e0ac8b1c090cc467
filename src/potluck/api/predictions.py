"""What clients' models predict for test examples, counted by class, and how sure they are."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.analysis.inside import EVERYBODY, Calibrated, ClassTally, Inside, MemberKind
from potluck.analysis.numbers.calibration import calibration
from potluck.analysis.numbers.similarity import Matrix
from potluck.core.federation import ClientId, Federation
from potluck.core.requests.inference import predict
from potluck.experiment.federation.groups import Groups
from potluck.experiment.folder.trained import Trained


@dataclass(frozen=True)
class Predicted:
    """A client's predictions: probabilities (n, classes), the actual classes, and the examples' groups by name."""

    shares: Matrix
    labels: NDArray[Any]
    groups: NDArray[Any] | None

    def counted(self, client: ClientId) -> Iterator[ClassTally]:
        """By class."""
        right = self.shares.argmax(1) == self.labels
        for label in np.unique(self.labels).tolist():
            mine = self.labels == label
            yield ClassTally(client, label, int(mine.sum()), int(right[mine].sum()))

    def of_group(self, name: str) -> "Predicted | None":
        """Those of a group's examples; None if there are none."""
        mine = np.zeros(len(self.labels), bool) if self.groups is None else self.groups == name
        return Predicted(self.shares[mine], self.labels[mine], None) if mine.any() else None


def predicted_by(
    trained: Trained, groups: Groups | None, remarks: list[str], *, common: bool
) -> dict[ClientId, Predicted]:
    """By client its predictions for its own test part, or for the common test set; none without classes."""
    federation, found = trained.federation, dict[ClientId, Predicted]()
    if not federation.task.has_classes:
        remarks.append(f"no calibration: the task {federation.task.name} has no probabilities of classes")
        return found
    for client, site in sorted(federation.sites.items()):
        examples = federation.common_test(client) if common else site.test
        if examples is not None and len(examples):
            shares = predict(trained.model(client), examples).double().softmax(1).nan_to_num(0.0).numpy()
            of = None if groups is None else groups.of(client, examples, common=common)
            named = None if groups is None or of is None else np.char.add(f"{groups.column} = ", of)
            found[client] = Predicted(shares, examples.labels.numpy(), named)
    if not found:
        remarks.append("no calibration: no client has test examples")
    return found


def calibrated(
    found: Mapping[ClientId, Predicted], federation: Federation, named: Inside, bins: int
) -> Iterator[Calibrated]:
    """Of all clients together, of those of each architecture, of each group, and of each client."""
    if not found:
        return
    yield _pooled("all", EVERYBODY, list(found.values()), bins)
    kinds = {client: federation.base_of(federation.sites[client].architecture) for client in found}
    for kind in dict.fromkeys(kinds.values()):
        yield _pooled("architecture", kind, [of for client, of in found.items() if kinds[client] == kind], bins)
    for name in sorted({name for of in found.values() if of.groups is not None for name in of.groups.tolist()}):
        yield _pooled("group", name, [part for of in found.values() if (part := of.of_group(name))], bins)
    for client, of in found.items():
        yield _pooled("client", named.client_name(client), [of], bins)


def _pooled(kind: MemberKind, whose: str, members: Sequence[Predicted], bins: int) -> Calibrated:
    shares, labels = (np.concatenate(parts) for parts in zip(*((of.shares, of.labels) for of in members), strict=True))
    return Calibrated(kind, whose, len(members), calibration(shares, labels, bins))
