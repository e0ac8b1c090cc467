"""Counts of predictions and occurrences by class, the metrics that follow, and counts that contradict themselves."""

from collections.abc import Mapping

import torch
from torch import Tensor

from potluck.core.tasks.metric import ACCURACY, BALANCED, CLASS_METRICS, MACRO_F1, Values
from potluck.core.tasks.task import Sums

CONFUSION_CLASSES = 100
ROUNDING = 1e-6  # relative tolerance for comparing sums of floats with bounds that other sums imply


def zero_counts(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Counts (int64) of these shapes over no examples."""
    return {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}


def bincount(indices: Tensor, length: int) -> Tensor:
    """How often each of `length` numbers occurs among the indices, of any shape."""
    return torch.bincount(indices.flatten(), minlength=length)


def counted_by_class(predicted: Tensor, targets: Tensor, width: int) -> Tensor:
    """Counts (3, width): correct predictions, predictions and occurrences of each class."""
    return torch.stack([bincount(of, width) for of in (targets[predicted == targets], predicted, targets)])


def classes_of(sums: Sums) -> Tensor | None:
    """Correct predictions, predictions and occurrences (3, width) of each class; None if the task counts no classes."""
    return by_class_of(sums) if sums.keys() & {"confusion", "by_class"} else None


def by_class_of(sums: Sums) -> Tensor:
    """The counts of `counted_by_class`, from a confusion matrix if there is one."""
    if "confusion" not in sums:
        return sums["by_class"]
    table = sums["confusion"]
    return torch.stack([table.diagonal(), table.sum(0), table.sum(1)])


def by_class_fault(by_class: Tensor, count: int) -> str | None:
    """What contradicts itself in counts (3, width) that are of so many examples; None if nothing does."""
    hits, predicted, actual = by_class
    if not int(predicted.sum()) == int(actual.sum()) == count:
        return f"the classes count {int(actual.sum())} true and {int(predicted.sum())} predicted of {count}"
    return "the classes contradict one another" if bool((hits > torch.minimum(predicted, actual)).any()) else None


def by_class_values(by_class: Tensor) -> Values:
    """In Python numbers, which for a few classes takes a tenth of the time."""
    hits, predicted, actual = by_class.tolist()
    if not (count := sum(actual)):
        return {metric.name: None for metric in CLASS_METRICS}
    scores = [2 * hit / (said + is_) for hit, said, is_ in zip(hits, predicted, actual, strict=True) if said + is_]
    recalls = [hit / is_ for hit, is_ in zip(hits, actual, strict=True) if is_]
    return {
        ACCURACY.name: sum(hits) / count,
        MACRO_F1.name: sum(scores) / len(scores),
        BALANCED.name: sum(recalls) / len(recalls),
    }
