"""What a metric is called, which way it is better, and how its values are written."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    """One number that says how good predictions are.

    Attributes:
        name: in records.
        label: for people.
        higher_is_better: its direction.
        percent: whether values are shares, written as percentages.
    """

    name: str
    label: str
    higher_is_better: bool = True
    percent: bool = False

    @property
    def direction(self) -> str:
        """Which way it is better, in words."""
        return f"{'higher' if self.higher_is_better else 'lower'} is better"

    def text(self, value: float | None) -> str:
        """A value for people; "-" where there is none."""
        if value is None:
            return "-"
        return f"{100 * value:.1f} %" if self.percent else f"{value:.4g}"

    def better(self, value: float, other: float | None) -> bool:
        """Whether a value is better than another one, as every value is than none."""
        return other is None or (value > other if self.higher_is_better else value < other)

    def worst(self, values: Iterable[float]) -> float | None:
        """The worst of some values; None of none."""
        return (min if self.higher_is_better else max)(values, default=None)

    def facts(self) -> dict[str, Any]:
        """For a manifest."""
        return asdict(self)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Metric":
        """What `facts` wrote.

        Raises:
            KeyError, TypeError: something else wrote it.
        """
        return cls(str(facts["name"]), str(facts["label"]), bool(facts["higher_is_better"]), bool(facts["percent"]))


ACCURACY = Metric("accuracy", "accuracy", percent=True)
