"""Whose model is judged, and on what: every client's own, on its own test part and on the common test set."""

from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor, nn

from potluck.core.digest import digest
from potluck.core.examples import Examples
from potluck.core.inference import predict
from potluck.core.tree import pack
from potluck.core.weights import weights_of
from potluck.engines.inprocess import InProcessEngine
from potluck.records import ClientRecord


@dataclass(frozen=True)
class Evaluation:
    """All clients' scores after a round, and the global model's on the common test set if there is one."""

    scores: list[ClientRecord]
    accuracy_global: float | None

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


def evaluate(engine: InProcessEngine, state: Any, *, round_number: int = 0, common_test: bool = True) -> Evaluation:
    """Judge every client's inference model, and the global model. Equal models are run once.

    Args:
        engine: of the run; evaluation messages are booked apart from training's.
        state: the method's, after the round to judge.
        round_number: of the round, for the records.
        common_test: whether to judge each client's model on the whole test set too.
    """
    judge = _Judge(engine.federation.test)
    scores: list[ClientRecord] = []
    for id, site in sorted(engine.federation.sites.items()):
        model = engine.inference_model(state, id)
        name = f"{site.architecture} {digest(pack(weights_of(model)))}"
        scores.append(
            ClientRecord(
                round=round_number,
                client=id,
                architecture=site.architecture,
                examples_train=len(site.train),
                examples_test=len(site.test),
                accuracy_personal=judge.accuracy(name, model, site.test, whole=common_test),
                accuracy_common=judge.common_accuracy(name, model) if common_test else None,
                accuracy_validation=judge.accuracy(name, model, site.validation),
            )
        )
    whole = engine.global_model(state)
    return Evaluation(scores, None if whole is None else judge.common_accuracy("global", whole))


@dataclass
class _Judge:
    """Remembers each model's predictions on the common test set, of which clients' test parts are rows."""

    test: Examples | None
    predicted: dict[str, Tensor] = field(default_factory=dict)

    def common_accuracy(self, name: str, model: nn.Module) -> float | None:
        """Share of the common test set that the model gets right."""
        if self.test is None or len(self.test) == 0:
            return None
        return _share_right(self._predictions(name, model, self.test), self.test.labels)

    def accuracy(self, name: str, model: nn.Module, examples: Examples, whole: bool = False) -> float | None:
        """Share of `examples` that the model gets right; with `whole` from its run over the whole test set."""
        if len(examples) == 0:
            return None
        rows = examples.rows if self.test is not None and examples.inputs is self.test.inputs else None
        if whole and rows is not None and self.test is not None and self.test.rows is None:
            return _share_right(self._predictions(name, model, self.test)[rows], examples.labels)
        return _share_right(predict(model, examples).argmax(1), examples.labels)

    def _predictions(self, name: str, model: nn.Module, test: Examples) -> Tensor:
        if name not in self.predicted:
            self.predicted[name] = predict(model, test).argmax(1)
        return self.predicted[name]


def _share_right(predicted: Tensor, labels: Tensor) -> float:
    return float(torch.eq(predicted, labels).double().mean())
