"""Whose model is evaluated, and on what: every client's own, on its own test part and on the common test set."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from statistics import fmean, pstdev
from typing import Any

from potluck.core.metric import ACCURACY, Metric
from potluck.core.task import CLASSIFICATION, Sums, Task, added
from potluck.engine.client.runtime import EvalResult, Part, name_of
from potluck.engine.engine import Engine
from potluck.records import ClientRecord, Measure, Values

_MEASURES: Mapping[Part, Measure] = {"own": "personal", "common": "common", "validation": "validation"}


@dataclass(frozen=True)
class Evaluation:
    """All clients' scores after a round, and the global model's on the common test set if there is one.

    Attributes:
        scores: of those that could be evaluated.
        of_global: by name, the metrics of the global model; None if there is none.
        missing: how many clients could not be evaluated.
        task: whose metrics they are.
        pooled: by name, the metrics over all clients' own test parts as if they were one.
        sums: those that `pooled` follows from, such as a confusion matrix; empty where they are not at hand.
    """

    scores: list[ClientRecord]
    of_global: Values | None = None
    missing: int = 0
    task: Task = CLASSIFICATION
    pooled: Values | None = None
    sums: Sums = field(default_factory=dict[str, Any], compare=False)

    @property
    def primary(self) -> Metric:
        """The metric that headlines give."""
        return self.task.primary

    @property
    def accuracy_global(self) -> float | None:
        """The global model's accuracy; None without a global model, and in a task without accuracy."""
        return self.of_global.get(ACCURACY.name) if self.of_global else None

    def value(self, measure: Measure, metric: str | None = None) -> float | None:
        """A metric of one measure, the primary one by default: the mean over clients, unweighted, where it is theirs.

        None where it was not measured.
        """
        name = metric or self.primary.name
        whole = {"global": self.of_global, "pooled": self.pooled}
        if measure in whole:
            return (whole[measure] or {}).get(name)
        values = self._values(measure, name)
        return fmean(values) if values else None

    def mean(self, name: str) -> float | None:
        """Mean over clients of one accuracy, such as "accuracy_common", unweighted; None if no client has it."""
        values = self._values(name.removeprefix("accuracy_"), ACCURACY.name)
        return fmean(values) if values else None

    @property
    def personal_std(self) -> float | None:
        """Standard deviation over clients of the primary metric on their own test parts."""
        return self.spread(self.primary)[0]

    @property
    def personal_worst(self) -> float | None:
        """The primary metric of the client that does worst on its own test part."""
        return self.spread(self.primary)[1]

    def spread(self, metric: Metric) -> tuple[float | None, float | None]:
        """Of a metric on own test parts, the standard deviation over clients, and the worst client's."""
        values = self._values("personal", metric.name)
        return (pstdev(values) if values else None), metric.worst(values)

    def by_architecture(self, measure: str, metric: str | None = None) -> dict[str, float]:
        """Mean over the clients of each architecture.

        Args:
            measure: "personal" or "common"; "accuracy_personal" and "accuracy_common" stand for the accuracy.
            metric: its name; the primary one by default.
        """
        if measure.startswith("accuracy_"):
            measure, metric = measure.removeprefix("accuracy_"), ACCURACY.name
        groups: dict[str, list[float]] = {}
        for score in self.scores:
            if (value := score.value(measure, metric or self.primary.name)) is not None:
                groups.setdefault(score.architecture, []).append(value)
        return {architecture: fmean(values) for architecture, values in groups.items()}

    def _values(self, measure: str, metric: str) -> list[float]:
        return [value for score in self.scores if (value := score.value(measure, metric)) is not None]


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
    task = federation.task
    common = federation.test if common_test and federation.test is not None and len(federation.test) else None
    trusted = engine.executor.trusted
    parts: tuple[Part, ...] = ("own", "validation") if trusted or not common else ("own", "validation", "common")
    first = engine.evaluate(state, dict.fromkeys(federation.sites, parts))
    by_model = _common_sums(engine, state, first) if common and trusted else {}
    common_values = {model: task.values(sums) for model, sums in by_model.items()}
    scores: list[ClientRecord] = []
    for result in first:
        site = federation.sites[result.client]
        found = {_MEASURES[part]: task.values(sums) for part, sums in result.sums.items()}
        if result.model in common_values:
            found["common"] = common_values[result.model]
        accuracies = found if task.has_classes else {}
        scores.append(
            ClientRecord(
                round=round_number,
                client=site.id,
                architecture=site.architecture,
                examples_train=len(site.train),
                examples_test=len(site.test),
                accuracy_personal=accuracies.get("personal", {}).get(ACCURACY.name),
                accuracy_common=accuracies.get("common", {}).get(ACCURACY.name),
                accuracy_validation=accuracies.get("validation", {}).get(ACCURACY.name),
                metrics={measure: found[measure] for measure in _MEASURES.values() if measure in found},
            )
        )
    own = [result.sums["own"] for result in first if "own" in result.sums]
    pooled = reduce(added, own) if own else {}
    return Evaluation(
        scores=scores,
        of_global=_of_global(engine, state, by_model),
        missing=len(federation.sites) - len(first),
        task=task,
        pooled=task.values(pooled) if pooled else None,
        sums=pooled,
    )


def _common_sums(engine: Engine, state: Any, results: list[EvalResult]) -> dict[str, Sums]:
    """By name of a model, its sums over the common test set; one client speaks for all who have it.

    If it cannot, the next one does.
    """
    found: dict[str, Sums] = {}
    while results:
        speakers = {result.model: result.client for result in reversed(results)}
        said = engine.evaluate(state, dict.fromkeys(speakers.values(), ("common",)), book=False)
        found |= {result.model: result.sums["common"] for result in said if "common" in result.sums}
        asked = set(speakers.values())
        results = [result for result in results if result.model not in found and result.client not in asked]
    return found


def _of_global(engine: Engine, state: Any, by_model: Mapping[str, Sums]) -> Values | None:
    """Of the server's model on the common test set, which some client's equal model may have met already."""
    model, test = engine.global_model(state), engine.federation.test
    if model is None or test is None or len(test) == 0:
        return None
    name = name_of(model)
    return engine.federation.task.values(by_model[name] if name in by_model else engine.sums(model, test))
