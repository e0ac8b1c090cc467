"""Metrics of the user's own, measured beside those of a task, from a function or a class of a Python file.

A function maps outputs (n, ..., width) and targets (n, ...) of a batch to values, a row for each example; the metric is
the mean of all values, without those that are NaN. A class measures what is no such mean: `sums(outputs, targets)`
returns tensors that add up over batches and clients, whose shapes do not depend on the batch, and `value(sums)` returns
the metric, or None if these sums do not define it. Both may state label and direction by
`potluck.core.tasks.metric.metric`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from potluck.core.ground.discovery import own_part
from potluck.core.ground.errors import ConfigError, PotluckError, explained
from potluck.core.tasks.metric import Metric, Values
from potluck.core.tasks.task import Sums, Task

_LARGEST = 1e18  # larger values count as this one, so that sums stay finite
_EXPECTED = "a function of outputs and targets, or a class with `sums` and `value`"


@dataclass(frozen=True)
class OwnMetric:
    """One metric of a file.

    Attributes:
        reference: the file and the name in it.
        metric: name, label and direction.
        add_up: maps outputs and targets to sums.
        finish: maps sums to the value.
    """

    reference: str
    metric: Metric
    add_up: Callable[[Tensor, Tensor], Mapping[str, Any]]
    finish: Callable[[Mapping[str, Tensor]], float | None]

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The metric's sums over a batch, finite, under names that no task has.

        Raises:
            ConfigError: the user's code fails, or returns no tensors.
        """
        found = self._ran(self.add_up, outputs, targets)
        if not isinstance(found, Mapping):
            raise ConfigError(f"{self._where}: sums: expected a dict of tensors, found {type(found).__name__}")
        return {f"{self._prefix}{name}": _summable(value) for name, value in found.items()}

    def value(self, sums: Sums) -> float | None:
        """The metric."""
        own = {name.removeprefix(self._prefix): sums[name] for name in sums if name.startswith(self._prefix)}
        found = self._ran(self.finish, own)
        return None if found is None else float(found)

    def _ran(self, code: Callable[..., Any], *given: Any) -> Any:
        try:
            return code(*given)
        except PotluckError:
            raise
        except Exception as error:  # the user's own code
            raise ConfigError(f"{self._where}: {explained(error)}") from error

    @property
    def _where(self) -> str:
        return f"federation.metrics: {self.reference}"

    @property
    def _prefix(self) -> str:
        return f"own_{self.metric.name}_"


def own_metric(reference: str) -> OwnMetric:
    """The metric that `FILE.py:FUNCTION` or `FILE.py:CLASS` names.

    Raises:
        ConfigError: there is none.
    """
    found = own_part(reference, _EXPECTED)
    stated = getattr(found, "metric", None)
    name = found.__name__
    shown = stated if isinstance(stated, Metric) else Metric(name, name.replace("_", " "))
    if not isinstance(found, type):
        return OwnMetric(reference, shown, _MeanOf(found, reference), _mean_value)
    missing = [method for method in ("sums", "value") if not callable(getattr(found, method, None))]
    if missing:
        raise ConfigError(f"federation.metrics: {reference}: no method {missing[0]!r}; expected {_EXPECTED}")
    made = found()
    return OwnMetric(reference, shown, made.sums, made.value)


@dataclass(frozen=True)
class _MeanOf:
    """The sums of a function's values."""

    function: Callable[[Tensor, Tensor], Any]
    reference: str

    def __call__(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        values = torch.as_tensor(self.function(outputs, targets))
        if values.dim() == 0 or len(values) != len(outputs):
            raise ConfigError(
                f"federation.metrics: {self.reference}: returned a tensor of shape {tuple(values.shape)} for"
                f" {len(outputs)} examples; expected a value for each, (n,), of which the mean is taken"
            )
        values = values.double()
        counted = ~values.isnan()
        kept = values[counted].clamp(-_LARGEST, _LARGEST)
        return {"total": kept.sum(), "count": counted.sum()}


def _mean_value(sums: Mapping[str, Tensor]) -> float | None:
    count = float(sums["count"])
    return float(sums["total"]) / count if count else None


def _summable(value: Any) -> Tensor:
    """Integers as int64, other numbers as finite float64."""
    tensor = torch.as_tensor(value).detach()
    if not tensor.is_floating_point():
        return tensor.to(torch.int64)
    return tensor.double().nan_to_num(0.0, _LARGEST, -_LARGEST).clamp(-_LARGEST, _LARGEST)


def with_metrics(task: Task, references: Sequence[str]) -> Task:
    """The task with metrics of the user's own after its own.

    Raises:
        ConfigError: a file has no such metric, or two metrics have one name.
    """
    added = tuple(map(own_metric, references))
    names = [one.name for one in (*task.metrics, *(own.metric for own in added))]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"federation.metrics: two metrics are called {twice!r}; rename yours")
    made = object.__new__(_class_of(type(task), added))
    for spec in fields(task):  # type: ignore[arg-type]  # a task is a dataclass
        object.__setattr__(made, spec.name, getattr(task, spec.name))
    return made


@cache
def _class_of(cls: type[Task], added: tuple[OwnMetric, ...]) -> type[Task]:
    return type(cls.__name__, (_WithMetrics, cls), {"added": added, "__module__": cls.__module__})


class _WithMetrics(Task):
    """What a task's class becomes with further metrics: whatever it measures, and theirs."""

    added: tuple[OwnMetric, ...]

    @property
    def metrics(self) -> tuple[Metric, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (*super().metrics, *(own.metric for own in self.added))

    def zeros(self, width: int) -> dict[str, Tensor]:
        found = super().zeros(width)  # type: ignore[safe-super]
        for own in self.added:
            found |= {name: torch.zeros_like(tensor) for name, tensor in own.sums(*self._example(width)).items()}
        return found

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        found = super().sums(outputs, targets)  # type: ignore[safe-super]
        for own in self.added:
            found |= own.sums(outputs, targets)
        return found

    def values(self, sums: Sums) -> Values:
        return {**super().values(sums), **{own.metric.name: own.value(sums) for own in self.added}}  # type: ignore[safe-super]

    def _example(self, width: int) -> tuple[Tensor, Tensor]:
        """Outputs and targets of one example."""
        outputs = torch.zeros(1, 1, width) if self.by_position else torch.zeros(1, width)
        shape = (1, 1) if self.by_position else (1, width)[: max(self.axes)]
        return outputs, torch.zeros(shape, dtype=self.dtypes[0])
