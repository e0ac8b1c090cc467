"""One class of several for each example."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from potluck.core.tasks.counting import (
    CONFUSION_CLASSES,
    bincount,
    by_class_fault,
    by_class_of,
    by_class_values,
    counted_by_class,
    zero_counts,
)
from potluck.core.tasks.metric import AUROC, CALIBRATION_ERROR, CLASS_METRICS, Metric, Values
from potluck.core.tasks.scoring import (
    CALIBRATION_BINS,
    SCORE_BINS,
    calibration_counts,
    calibration_error,
    calibration_fault,
    mean_auroc,
    score_histograms,
)
from potluck.core.tasks.targets import range_fault
from potluck.core.tasks.task import Criterion, Sums, Task


@dataclass(frozen=True)
class Classification(Task):
    """One of `width` classes for each example; the network returns logits (n, width), targets are int64 (n,).

    Accuracy; macro F1 over classes that occur or are predicted; balanced accuracy, the mean recall of classes that
    occur. With `scores` also AUROC, the mean over classes of each against the rest, and the expected calibration error
    over `CALIBRATION_BINS` bins of the confidence in the predicted class. For up to `CONFUSION_CLASSES` classes the
    sums hold the confusion matrix (actual, predicted).

    Attributes:
        scores: whether to measure AUROC and calibration error too. They take 8 kB of sums for each class, and as much
            time as a small perceptron's predictions.
    """

    name = "classification"
    has_classes = True
    has_labels = True
    targets = "one class number from 0 to {0} for each example (int64)"
    scores: bool = False

    @property
    def metrics(self) -> tuple[Metric, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The metrics of classes, and with `scores` those of probabilities."""
        return (*CLASS_METRICS, AUROC, CALIBRATION_ERROR) if self.scores else CLASS_METRICS

    @property
    def criterion(self) -> Criterion:
        """Cross-entropy."""
        return nn.functional.cross_entropy

    def fault(self, targets: Tensor, width: int) -> str | None:
        """Anything but class numbers."""
        return self.form_fault(targets) or range_fault(targets, 0, width - 1)

    def width_for(self, targets: Tensor) -> int:
        """One more than the largest class."""
        return int(targets.max()) + 1

    def zeros(self, width: int) -> dict[str, Tensor]:
        """See `sums`."""
        shapes = {"confusion": (width, width)} if width <= CONFUSION_CLASSES else {"by_class": (3, width)}
        scores = {"calibration": (3, CALIBRATION_BINS), "scores": (width, 2, SCORE_BINS)} if self.scores else {}
        return zero_counts({**shapes, **scores})

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The confusion matrix, or counts by class; with `scores` also histograms of scores and confidences."""
        width, predicted = outputs.shape[1], outputs.argmax(1)
        if width <= CONFUSION_CLASSES:
            found = {"confusion": bincount(targets * width + predicted, width * width).view(width, width)}
        else:
            found = {"by_class": counted_by_class(predicted, targets, width)}
        return {**found, **self._of_scores(outputs, predicted, targets)} if self.scores else found

    def _of_scores(self, outputs: Tensor, predicted: Tensor, targets: Tensor) -> dict[str, Tensor]:
        width, at = outputs.shape[1], predicted[:, None]
        log_shares = outputs.float().log_softmax(1)
        shares = log_shares.exp()
        # Only the predicted class can exceed one half; its complement is summed so that it keeps its digits.
        complement = shares.scatter(1, at, 0.0).sum(1, keepdim=True)
        above = torch.where(complement < 0.5, -(2 * complement).log(), log_shares.gather(1, at) + math.log(2))
        scores = (log_shares + math.log(2)).scatter(1, at, above)
        return {
            "calibration": calibration_counts(shares.gather(1, at)[:, 0], predicted == targets),
            "scores": score_histograms(scores, targets + width * torch.arange(len(targets), device=targets.device)),
        }

    def impossible(self, sums: Sums, examples: int, positions: int) -> str | None:
        """Counts that do not add up to `examples`, or contradict one another."""
        by_class = by_class_of(sums)
        hits, _, actual = by_class
        wrong = by_class_fault(by_class, examples)
        if wrong or not self.scores:
            return wrong
        if not sums["scores"].sum(2).equal(torch.stack([examples - actual, actual], 1)):
            return "scores contradict the classes"
        return calibration_fault(sums["calibration"], examples, int(hits.sum()))

    def values(self, sums: Sums) -> Values:
        """All None if there are no examples."""
        found = by_class_values(by_class_of(sums))
        if self.scores:
            found[AUROC.name] = mean_auroc(sums["scores"])
            found[CALIBRATION_ERROR.name] = calibration_error(sums["calibration"])
        return found
