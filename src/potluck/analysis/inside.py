"""What the trained models of a run show of themselves, as rows of tables: similarity, drift and calibration."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from potluck.analysis.numbers.calibration import Reliability
from potluck.analysis.numbers.drift import Drift
from potluck.analysis.numbers.similarity import canonical, cka, gram, unbiased_cka

SVCCA_KEPT = 0.99
EVERYBODY = "all"


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

    @classmethod
    def of(cls, client: int, stage: int, place: str, activations: NDArray[Any], means: NDArray[Any]) -> "StageOf":
        """A stage with these activations (n, ...)."""
        return cls(client, stage, place, gram(activations), means)


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
class Inside:
    """What was computed of the models of one run.

    Attributes:
        name: the run's.
        experiment: its label.
        round: after which the models are.
        examples: that all clients' networks were shown for the similarity.
        similarity: of every pair of stages, each once.
        drift: layer by layer.
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


def _similarity(one: StageOf, other: StageOf, exact: float, unbiased: float) -> Similarity:
    whole = canonical(one.means, other.means)
    main = canonical(one.means, other.means, SVCCA_KEPT)
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
