"""What the trained models of a run show of themselves, as rows of tables: similarity, drift and calibration."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from potluck.analysis.numbers.calibration import Reliability
from potluck.analysis.numbers.drift import Drift, drift
from potluck.analysis.numbers.projection import neighbours, principal, silhouette
from potluck.analysis.numbers.similarity import Directions, canonical, cka, directions, unbiased_cka

SVCCA_KEPT = 0.99
EVERYBODY = "all"
MemberKind = Literal["all", "architecture", "group", "client"]
ClassLabels = Sequence[int] | None
"""Classes of examples; None of tasks without."""
_POINTS = 500  # of a picture, which more would fill


@dataclass(frozen=True)
class StageOf:
    """What one client's network has behind one of its stages, for examples that all see.

    Attributes:
        client: its number.
        stage: counted from 0; `place` is the stage's name in the network, empty if it has none.
        gram: inner products of all activations, see `potluck.analysis.numbers.similarity.gram`.
        means: (n, channels), the mean over positions.
    """

    client: int
    stage: int
    place: str
    gram: NDArray[np.float64]
    means: NDArray[Any]

    @cached_property
    def whole(self) -> Directions:
        """The directions of the means."""
        return directions(self.means)

    @cached_property
    def main(self) -> Directions:
        """Those with 99 % of the variance."""
        return directions(self.means, SVCCA_KEPT)


@dataclass(frozen=True)
class Similarity:
    """How alike two clients see the examples, or one client at two stages.

    Attributes:
        client: a client, with the number and the name of one of its stages; `other_` the other's.
        cka: linear CKA, exact over the examples; `unbiased_cka` the unbiased estimate.
        cca: mean canonical correlation of channels, means over positions; None where these are too many for the
            examples. `cca_squared` of the squares, `pwcca` weighted by projections.
        svcca: the same of the directions with 99 % of the variance.
    """

    client: int
    stage: int
    place: str
    other_client: int
    other_stage: int
    other_place: str
    cka: float
    unbiased_cka: float
    cca: float | None
    cca_squared: float | None
    pwcca: float | None
    svcca: float | None


@dataclass(frozen=True)
class Calibrated:
    """The calibration of one client's predictions, or of several clients' together.

    Attributes:
        kind: of what they are the predictions.
        whose: the client's name, an architecture's, a group as "sex = f", or "all".
        clients: how many there are.
        values: the numbers.
    """

    kind: MemberKind
    whose: str
    clients: int
    values: Reliability


@dataclass(frozen=True)
class ClassTally:
    """How many of a client's examples of one class its model classifies right.

    Attributes:
        client: its number.
        label: the class.
        examples: how many there are, of which `right` are.
    """

    client: int
    label: int
    examples: int
    right: int


@dataclass(frozen=True)
class Dot:
    """The features of one example at one client, in two dimensions.

    Attributes:
        client: whose network has put them out.
        label: the example's class; None of tasks without.
        pca_x: along the direction in which the features vary most, `pca_y` along the next.
        tsne_x: by t-SNE, with `tsne_y`.
    """

    client: int
    label: int | None
    pca_x: float
    pca_y: float
    tsne_x: float
    tsne_y: float


@dataclass(frozen=True)
class Map:
    """The features of several clients in one picture, before the head, as means over positions.

    Attributes:
        clients: those whose features have one width.
        width: that width.
        features: how many there are, one for each client and example.
        points: where they lie; none of a run whose map is not drawn, since another of its experiment is.
        by_client: mean silhouette of the clients' features, before they are projected: about 0 where all see alike.
        by_class: of the classes'; None without.
    """

    clients: tuple[int, ...]
    width: int
    features: int
    points: tuple[Dot, ...]
    by_client: float | None
    by_class: float | None


@dataclass(frozen=True)
class Moment:
    """What curves over rounds show, after one round.

    Attributes:
        round: its number.
        similarity: by stage, CKA and unbiased CKA of that stage of two clients, mean over the pairs of clients.
        drift: layer by layer.
        by_client: mean silhouette of the clients' features, as of a `Map`; `by_class` of the classes'.
    """

    round: int
    similarity: Mapping[int, tuple[float, float]]
    drift: tuple[Drift, ...]
    by_client: float | None = None
    by_class: float | None = None

    @property
    def mean_drift(self) -> float | None:
        """Mean over layers; None if no two networks have one in common."""
        return float(np.mean([row.mean for row in self.drift])) if self.drift else None


@dataclass(frozen=True)
class Inside:
    """What was computed of the models of one run.

    Attributes:
        name: the run's.
        experiment: its label.
        round: after which the models are.
        client_names: what clients are called, in the order of their numbers; none if they have only these.
        examples: that all clients' networks were shown for the similarity.
        similarity: of every pair of stages, each once.
        drift: layer by layer.
        map: of features; None where no two clients' have one width.
        calibration: of all clients together, of each architecture's, of each group, then of each client's.
        counted: by client and class, what is classified right.
        remarks: what could not be computed, and why.
        moments: what the models of rounds show that the run has kept, of this round among them, in order.
    """

    name: str
    experiment: str
    round: int
    client_names: tuple[str, ...] = ()
    examples: int = 0
    similarity: tuple[Similarity, ...] = ()
    drift: tuple[Drift, ...] = ()
    calibration: tuple[Calibrated, ...] = ()
    map: Map | None = None
    counted: tuple[ClassTally, ...] = ()
    remarks: tuple[str, ...] = ()
    moments: tuple[Moment, ...] = ()

    def client_name(self, client: int) -> str:
        """What a client is called."""
        return self.client_names[client] if self.client_names else f"client {client}"

    def between_clients(self) -> dict[int, tuple[float, float]]:
        """By stage, CKA and unbiased CKA of that stage of two clients, mean over the pairs of clients."""
        found: dict[int, list[tuple[float, float]]] = {}
        for row in self.similarity:
            if row.stage == row.other_stage and row.client != row.other_client:
                found.setdefault(row.stage, []).append((row.cka, row.unbiased_cka))
        means = {stage: np.asarray(values).mean(0) for stage, values in sorted(found.items())}
        return {stage: (float(exact), float(unbiased)) for stage, (exact, unbiased) in means.items()}

    @property
    def moment(self) -> Moment:
        """What of this round a curve shows."""
        separation = (self.map.by_client, self.map.by_class) if self.map else (None, None)
        return Moment(self.round, self.between_clients(), self.drift, *separation)


def moment_of(
    number: int,
    stages: Sequence[StageOf],
    networks: Mapping[int, Mapping[str, NDArray[Any]]],
    labels: ClassLabels,
    only: int | None = None,
) -> Moment:
    """What curves show after a round, without what only the last one is asked for.

    Args:
        number: of the round.
        stages: of each client, on the same examples.
        networks: by client the trained tensors by name.
        labels: the examples' classes.
        only: as of `feature_map`.
    """
    by_stage: dict[int, list[StageOf]] = {}
    for stage in stages:
        by_stage.setdefault(stage.stage, []).append(stage)
    similar = {
        number: _mean_of_pairs([stage.gram for stage in alike])
        for number, alike in sorted(by_stage.items())
        if len(alike) > 1
    }
    mapped = _mapped(last_stages(stages), labels, only)
    separation = mapped.separation if mapped else (None, None)
    return Moment(number, similar, tuple(drift(networks)), *separation)


def last_stages(stages: Sequence[StageOf]) -> list[StageOf]:
    """The last stage of each client, before its head."""
    return list({stage.client: stage for stage in stages}.values())


def _mean_of_pairs(grams: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    pairs = np.triu_indices(len(grams), 1)
    return float(cka(grams)[pairs].mean()), float(unbiased_cka(grams)[pairs].mean())


def by_experiment(inside: Sequence[Inside]) -> list[tuple[str, list[Inside]]]:
    """The runs of each experiment, in order of appearance."""
    found: dict[str, list[Inside]] = {}
    for one in inside:
        found.setdefault(one.experiment, []).append(one)
    return list(found.items())


def similarities(stages: Sequence[StageOf]) -> list[Similarity]:
    """Every stage with every other one, each pair once, and with none itself."""
    grams = [stage.gram for stage in stages]
    exact, unbiased = cka(grams), unbiased_cka(grams)
    return [
        _similarity(one, other, float(exact[i, j]), float(unbiased[i, j]))
        for i, one in enumerate(stages)
        for j, other in enumerate(stages[i + 1 :], i + 1)
    ]


def feature_map(
    last: Sequence[StageOf], labels: ClassLabels, *, drawn: bool = True, only: int | None = None
) -> Map | None:
    """The features behind these last stages, of the clients that have the width of most; None for fewer than two.

    Args:
        last: of each client, on the same examples.
        labels: the examples' classes.
        drawn: whether they are placed in two dimensions, which takes seconds.
        only: the class whose examples alone are shown, of tasks with classes; None for all.
    """
    found = _mapped(last, labels, only)
    if found is None:
        return None
    points = tuple(_dots(found)) if drawn else ()
    return Map(found.clients, found.features.shape[1], len(found.features), points, *found.separation)


def _dots(found: "_Mapped") -> Iterator[Dot]:
    places = np.hstack([principal(found.features), neighbours(found.features)]).tolist()
    classes = found.classes or [None] * len(places)
    for owner, label, at in zip(found.owners, classes, places, strict=True):
        yield Dot(owner, label, *at)


@dataclass(frozen=True)
class _Mapped:
    """Features (n, width) of several clients on the same examples, one client's behind another's."""

    clients: tuple[int, ...]
    features: NDArray[Any]
    owners: list[int]
    classes: list[int] | None

    @property
    def separation(self) -> tuple[float | None, float | None]:
        """Mean silhouettes of the clients' features and of the classes'."""
        by_class = None if self.classes is None else silhouette(self.features, self.classes)
        return silhouette(self.features, self.owners), by_class


def _mapped(last: Sequence[StageOf], labels: ClassLabels, only: int | None) -> _Mapped | None:
    """The features that a map shows; None of fewer clients than two with one width."""
    width = Counter(stage.means.shape[1] for stage in last).most_common(1)[0][0] if last else 0
    shown = [stage for stage in last if stage.means.shape[1] == width]
    if len(shown) < 2:
        return None
    wanted = np.arange(len(shown[0].means))
    if labels is not None and only is not None:
        wanted = np.flatnonzero(np.asarray(labels) == only)
    count = min(len(wanted), max(2, _POINTS // len(shown)))
    rows = wanted[np.linspace(0, len(wanted) - 1, count).round().astype(int)]
    return _Mapped(
        clients=tuple(stage.client for stage in shown),
        features=np.concatenate([stage.means[rows] for stage in shown]),
        owners=[stage.client for stage in shown for _ in rows],
        classes=None if labels is None else [labels[row] for row in rows] * len(shown),
    )


def _similarity(one: StageOf, other: StageOf, exact: float, unbiased: float) -> Similarity:
    whole, main = canonical(one.whole, other.whole), canonical(one.main, other.main)
    return Similarity(
        client=one.client,
        stage=one.stage,
        place=one.place,
        other_client=other.client,
        other_stage=other.stage,
        other_place=other.place,
        cka=exact,
        unbiased_cka=unbiased,
        cca=whole and whole.mean,
        cca_squared=whole and whole.squared,
        pwcca=whole and whole.weighted,
        svcca=main and main.mean,
    )
