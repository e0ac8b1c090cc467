"""One class of several for each position of an example."""

from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.core.tasks.counting import by_class_fault, by_class_values, counted_by_class, zero_counts
from potluck.core.tasks.metric import CLASS_METRICS, Values
from potluck.core.tasks.targets import IGNORED, range_fault, that_count, token_cross_entropy
from potluck.core.tasks.task import Criterion, Sums, Task


@dataclass(frozen=True)
class TokenClassification(Task):
    """One of `width` classes for each position; logits (n, t, width), targets int64 (n, t), `IGNORED` for none.

    Accuracy, macro F1 and balanced accuracy over the positions that count.
    """

    name = "token_classification"
    metrics = CLASS_METRICS
    by_position = True
    targets = f"a class from 0 to {{0}}, or {IGNORED} for none, for each position of an example (int64), (n, t)"
    axes = (2,)

    @property
    def criterion(self) -> Criterion:
        """Cross-entropy over the positions that count; 0 if none does."""
        return token_cross_entropy

    def fault(self, targets: Tensor, width: int) -> str | None:
        """Anything but classes."""
        return self.form_fault(targets) or range_fault(torch.where(targets == IGNORED, 0, targets), 0, width - 1)

    def width_for(self, targets: Tensor) -> int:
        """One more than the largest class."""
        return max(int(targets.max()), 0) + 1

    def zeros(self, width: int) -> dict[str, Tensor]:
        """See `sums`."""
        return zero_counts({"by_class": (3, width)})

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """For each class the numbers of correct predictions, of predictions and of occurrences."""
        outputs, targets = that_count(outputs, targets)
        return {"by_class": counted_by_class(outputs.argmax(1), targets, outputs.shape[1])}

    def impossible(self, sums: Sums, examples: int, positions: int) -> str | None:
        """More than there are positions, or counts that contradict one another."""
        counted = int(sums["by_class"][2].sum())
        if counted > examples * positions:
            return f"by_class counts {counted} positions, of {examples} examples with {positions}"
        return by_class_fault(sums["by_class"], counted)

    def values(self, sums: Sums) -> Values:
        """All None if there are no positions."""
        return by_class_values(sums["by_class"])
