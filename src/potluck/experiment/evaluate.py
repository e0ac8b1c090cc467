"""Whose model is evaluated, and on what: every client's own, on its own test part and on the common test set."""

from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from torch import Tensor

from potluck.core.examples import Examples
from potluck.engine.client.runtime import EvalResult, Part, name_of, share_right
from potluck.engine.engine import Engine
from potluck.records import ClientRecord


@dataclass(frozen=True)
class Evaluation:
    """All clients' scores after a round, and the global model's on the common test set if there is one.

    Attributes:
        scores: of those that could be evaluated.
        missing: how many clients could not.
    """

    scores: list[ClientRecord]
    accuracy_global: float | None
    missing: int = 0

    def mean(self, name: str) -> float | None:
        """Mean over clients of one accuracy, unweighted; None if no client has it."""
        values = self._values(name)
        return fmean(values) if values else None

    @property
    def personal_std(self) -> float | None:
        """Standard deviation over clients of the personal accuracy."""
        values = self._values("accuracy_personal")
        return pstdev(values) if values else None

    @property
    def personal_worst(self) -> float | None:
        """The lowest personal accuracy."""
        return min(self._values("accuracy_personal"), default=None)

    def by_architecture(self, name: str) -> dict[str, float]:
        """Mean of one accuracy over the clients of each architecture."""
        groups: dict[str, list[float]] = {}
        for score in self.scores:
            if (value := getattr(score, name)) is not None:
                groups.setdefault(score.architecture, []).append(value)
        return {architecture: fmean(values) for architecture, values in groups.items()}

    def _values(self, name: str) -> list[float]:
        return [value for score in self.scores if (value := getattr(score, name)) is not None]


def evaluate(engine: Engine, state: Any, *, round_number: int = 0, common_test: bool = True) -> Evaluation:
    """Evaluate every client's inference model, and the global model. Equal models meet the common test set once.

    Clients on other machines may lie. They answer for nobody but themselves, and the global model is evaluated here.

    Args:
        engine: of the run; evaluation messages are booked apart from training's.
        state: the method's, after the round to evaluate.
        round_number: of the round, for the records.
        common_test: whether to evaluate each client's model on the whole test set too.
    """
    federation = engine.federation
    common = federation.test if common_test and federation.test is not None and len(federation.test) else None
    trusted = engine.executor.trusted
    parts: tuple[Part, ...] = ("own", "validation") if trusted or not common else ("own", "validation", "common")
    first = engine.evaluate(state, dict.fromkeys(federation.sites, parts))
    by_model = _common_classes(engine, state, first) if common and trusted else {}
    right = {model: share_right(classes, common) for model, classes in by_model.items() if common}
    scores: list[ClientRecord] = []
    for result in first:
        site = federation.sites[result.client]
        scores.append(
            ClientRecord(
                round=round_number,
                client=site.id,
                architecture=site.architecture,
                examples_train=len(site.train),
                examples_test=len(site.test),
                accuracy_personal=result.shares.get("own"),
                accuracy_common=right.get(result.model) if trusted else _own_share(result, common),
                accuracy_validation=result.shares.get("validation"),
            )
        )
    return Evaluation(scores, _accuracy_global(engine, state, by_model), len(federation.sites) - len(first))


def _own_share(result: EvalResult, common: Examples | None) -> float | None:
    """The share of the common test set for which a client's classes are right, if it gave them."""
    classes = result.common
    return None if common is None or classes is None else share_right(classes, common)


def _common_classes(engine: Engine, state: Any, results: list[EvalResult]) -> dict[str, Tensor]:
    """By name of a model, its classes for the common test set; one client speaks for all who have it.

    If it cannot, the next one does.
    """
    found: dict[str, Tensor] = {}
    while results:
        speakers = {result.model: result.client for result in reversed(results)}
        said = engine.evaluate(state, dict.fromkeys(speakers.values(), ("common",)), book=False)
        found |= {result.model: classes for result in said if (classes := result.common) is not None}
        asked = set(speakers.values())
        results = [result for result in results if result.model not in found and result.client not in asked]
    return found


def _accuracy_global(engine: Engine, state: Any, by_model: dict[str, Tensor]) -> float | None:
    """Of the server's model on the common test set, which some client's equal model may have met already."""
    model, test = engine.global_model(state), engine.federation.test
    if model is None or test is None or len(test) == 0:
        return None
    name = name_of(model)
    return share_right(by_model[name] if name in by_model else engine.classes(model, test), test)
