"""What the trained models of a run show of themselves, as rows of tables: similarity, drift and calibration."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.analysis.numbers.calibration import Reliability
from potluck.analysis.numbers.drift import Drift
from potluck.analysis.numbers.projection import neighbours, principal, silhouette
from potluck.analysis.numbers.similarity import Directions, canonical, cka, directions, gram, unbiased_cka

SVCCA_KEPT = 0.99
EVERYBODY = "all"
_POINTS = 500  # of a picture, which more would fill


@dataclass(frozen=True)
class StageOf:
    """What one client's network has behind one of its stages, for examples that all see.

    Attributes:
        client: its number.
        stage: counted from 0; `place` is the stage's name in the network, empty if it has none.
        gram: inner products of all activations, see `potluck.analysis.numbers.similarity.gram`.
        means: (n, channels), the mean over positions.
        whole: the directions of these; `main` those with 99 % of the variance.
    """

    client: int
    stage: int
    place: str
    gram: NDArray[np.float64]
    means: NDArray[Any]
    whole: Directions
    main: Directions

    @classmethod
    def of(cls, client: int, stage: int, place: str, activations: NDArray[Any], means: NDArray[Any]) -> "StageOf":
        """A stage with these activations (n, ...)."""
        both = directions(means), directions(means, SVCCA_KEPT)
        return cls(client, stage, place, gram(activations), means, *both)


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
        whose: "client 3", an architecture's name, or "all".
        clients: how many there are.
        values: the numbers.
    """

    whose: str
    clients: int
    values: Reliability


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
        points: one for each client and example.
        by_client: mean silhouette of the clients' features, before they are projected: about 0 where all see alike.
        by_class: of the classes'; None without.
    """

    clients: tuple[int, ...]
    width: int
    points: tuple[Dot, ...]
    by_client: float | None
    by_class: float | None


@dataclass(frozen=True)
class Inside:
    """What was computed of the models of one run.

    Attributes:
        name: the run's.
        experiment: its label.
        round: after which the models are.
        examples: that all clients' networks were shown for the similarity.
        similarity: of every pair of stages, each once.
        drift: layer by layer.
        map: of features; None where no two clients' have one width.
        calibration: of all clients together, of each architecture's, then of each client's.
        remarks: what could not be computed, and why.
    """

    name: str
    experiment: str
    round: int
    examples: int = 0
    similarity: tuple[Similarity, ...] = ()
    drift: tuple[Drift, ...] = ()
    calibration: tuple[Calibrated, ...] = ()
    map: Map | None = None
    remarks: tuple[str, ...] = ()

    def between_clients(self) -> dict[int, tuple[float, float]]:
        """By stage, CKA and unbiased CKA of that stage of two clients, mean over the pairs of clients."""
        found: dict[int, list[tuple[float, float]]] = {}
        for row in self.similarity:
            if row.stage == row.other_stage and row.client != row.other_client:
                found.setdefault(row.stage, []).append((row.cka, row.unbiased_cka))
        means = {stage: np.asarray(values).mean(0) for stage, values in sorted(found.items())}
        return {stage: (float(exact), float(unbiased)) for stage, (exact, unbiased) in means.items()}


def similarities(stages: Sequence[StageOf]) -> list[Similarity]:
    """Every stage with every other one, each pair once, and with none itself."""
    grams = [stage.gram for stage in stages]
    exact, unbiased = cka(grams), unbiased_cka(grams)
    return [
        _similarity(one, other, float(exact[i, j]), float(unbiased[i, j]))
        for i, one in enumerate(stages)
        for j, other in enumerate(stages[i + 1 :], i + 1)
    ]


def feature_map(last: Sequence[StageOf], labels: Sequence[int] | None) -> Map | None:
    """The features behind these last stages, of the clients that have the width of most; None for fewer than two.

    Args:
        last: of each client, on the same examples.
        labels: the examples' classes.
    """
    if not last:
        return None
    width = Counter(stage.means.shape[1] for stage in last).most_common(1)[0][0]
    shown = [stage for stage in last if stage.means.shape[1] == width]
    if len(shown) < 2:
        return None
    count = min(len(shown[0].means), max(2, _POINTS // len(shown)))
    rows = np.linspace(0, len(shown[0].means) - 1, count).round().astype(int)
    features = np.concatenate([stage.means[rows] for stage in shown])
    owners = [stage.client for stage in shown for _ in rows]
    classes = None if labels is None else [labels[row] for row in rows] * len(shown)
    places = np.hstack([principal(features), neighbours(features)]).tolist()
    return Map(
        clients=tuple(stage.client for stage in shown),
        width=width,
        points=tuple(Dot(*point) for point in _named(owners, classes, places)),
        by_client=silhouette(features, owners),
        by_class=None if classes is None else silhouette(features, classes),
    )


def _named(
    owners: Sequence[int], classes: Sequence[int] | None, places: Sequence[Sequence[float]]
) -> list[tuple[Any, ...]]:
    labels = classes or [None] * len(owners)
    return [(owner, label, *place) for owner, label, place in zip(owners, labels, places, strict=True)]


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
