"""Metrics: name, direction, and the format of values."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

Values = dict[str, float | None]
"""Every metric by name; None where it is not defined."""

Measured = TypeVar("Measured", bound=Callable[..., Any])


@dataclass(frozen=True)
class Metric:
    """A number that measures how good predictions are.

    Attributes:
        name: in records.
        label: the name shown to users.
        higher_is_better: the direction.
        percent: whether values are shares, written as percentages.
    """

    name: str
    label: str
    higher_is_better: bool = True
    percent: bool = False

    @property
    def direction(self) -> str:
        """The direction, in words."""
        return f"{'higher' if self.higher_is_better else 'lower'} is better"

    def text(self, value: float | None) -> str:
        """A value formatted for display; "-" for None."""
        if value is None:
            return "-"
        return f"{100 * value:.1f} %" if self.percent else f"{value:.4g}"

    def better(self, value: float, other: float | None) -> bool:
        """Whether a value is better than another; any value is better than None."""
        return other is None or (value > other if self.higher_is_better else value < other)

    def worst(self, values: Iterable[float]) -> float | None:
        """The worst value; None if there are no values."""
        return (min if self.higher_is_better else max)(values, default=None)

    def facts(self) -> dict[str, Any]:
        """For a manifest."""
        return asdict(self)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Metric":
        """The metric that `facts` described.

        Raises:
            KeyError, TypeError: the table was not written by `facts`.
        """
        return cls(str(facts["name"]), str(facts["label"]), bool(facts["higher_is_better"]), bool(facts["percent"]))


ACCURACY = Metric("accuracy", "accuracy", percent=True)
MACRO_F1 = Metric("macro_f1", "macro F1", percent=True)
BALANCED = Metric("balanced_accuracy", "balanced accuracy", percent=True)
AUROC = Metric("auroc", "AUROC")
CALIBRATION_ERROR = Metric("ece", "calibration error", higher_is_better=False, percent=True)
CLASS_METRICS = (ACCURACY, MACRO_F1, BALANCED)


def metric(label: str, *, higher_is_better: bool = True, percent: bool = False) -> Callable[[Measured], Measured]:
    """State how a metric of your own is shown; its name is that of the function or class.

    Args:
        label: the name shown to users.
        higher_is_better: the direction.
        percent: whether values are shares, written as percentages.
    """

    def state(measured: Measured) -> Measured:
        measured.metric = Metric(measured.__name__, label, higher_is_better, percent)  # type: ignore[attr-defined]
        return measured

    return state
