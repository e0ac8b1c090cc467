"""One of two classes for each example, by one output."""

from dataclasses import dataclass

from torch import Tensor

from potluck.core.tasks.counting import bincount, by_class_of, by_class_values, zero_counts
from potluck.core.tasks.metric import ACCURACY, AUROC, BALANCED, CALIBRATION_ERROR, MACRO_F1, Metric, Values
from potluck.core.tasks.scoring import (
    CALIBRATION_BINS,
    SCORE_BINS,
    calibration_counts,
    calibration_error,
    calibration_fault,
    mean_auroc,
    score_histograms,
)
from potluck.core.tasks.targets import binary_cross_entropy, range_fault, width_fault
from potluck.core.tasks.task import Criterion, Sums, Task


@dataclass(frozen=True)
class Binary(Task):
    """Two classes; the network returns one logit (n, 1), targets are 0 or 1, int64 (n,).

    Accuracy at a probability of one half, F1 of the positive class (0 where there is none and none is predicted),
    balanced accuracy, AUROC and the expected calibration error.
    """

    name = "binary"
    metrics = (ACCURACY, Metric("f1", "F1", percent=True), BALANCED, AUROC, CALIBRATION_ERROR)
    has_labels = True
    targets = "0 or 1 for each example (int64), and networks with one output"

    @property
    def criterion(self) -> Criterion:
        """Binary cross-entropy with logits."""
        return binary_cross_entropy

    def fault(self, targets: Tensor, width: int) -> str | None:
        """Anything but 0 and 1."""
        return self.form_fault(targets) or range_fault(targets, 0, 1) or width_fault(width, 1)

    def width_for(self, targets: Tensor) -> int:
        """One."""
        return 1

    def zeros(self, width: int) -> dict[str, Tensor]:
        """See `sums`."""
        return zero_counts({"confusion": (2, 2), "calibration": (3, CALIBRATION_BINS), "scores": (1, 2, SCORE_BINS)})

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The confusion matrix (actual, predicted), and histograms as in `Classification`."""
        predicted = (outputs[:, 0] > 0).long()
        return {
            "confusion": bincount(2 * targets + predicted, 4).view(2, 2),
            "calibration": calibration_counts(outputs[:, 0].float().abs().sigmoid(), predicted == targets),
            "scores": score_histograms(outputs.float(), targets.nonzero()[:, 0]),
        }

    def impossible(self, sums: Sums, examples: int, positions: int) -> str | None:
        """Counts that do not add up to `examples`, or contradict one another."""
        table = sums["confusion"]
        if int(table.sum()) != examples:
            return f"confusion counts {int(table.sum())} examples of {examples}"
        if not sums["scores"].sum(2)[0].equal(table.sum(1)):
            return "scores contradict confusion"
        return calibration_fault(sums["calibration"], examples, int(table.trace()))

    def values(self, sums: Sums) -> Values:
        """All None if there are no examples."""
        by_class = by_class_of(sums)
        found = by_class_values(by_class)
        del found[MACRO_F1.name]
        hits, predicted, actual = by_class[:, 1].tolist()
        f1 = 2 * hits / (predicted + actual) if predicted + actual else 0.0
        found["f1"] = f1 if int(sums["confusion"].sum()) else None
        error = calibration_error(sums["calibration"])
        return {**found, AUROC.name: mean_auroc(sums["scores"]), CALIBRATION_ERROR.name: error}
