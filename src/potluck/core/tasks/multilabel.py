"""Any number of labels for each example."""

from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.core.tasks.counting import zero_counts
from potluck.core.tasks.metric import AUROC, MACRO_F1, Metric, Values
from potluck.core.tasks.scoring import SCORE_BINS, mean_auroc, score_histograms
from potluck.core.tasks.targets import binary_cross_entropy, width_fault
from potluck.core.tasks.task import Criterion, Sums, Task


@dataclass(frozen=True)
class MultiLabel(Task):
    """Any number of `width` labels for each example; logits (n, width), targets 0 or 1 of shape (n, width).

    Each label is predicted at a probability of one half. The share of single labels that are right, the share of
    examples with all of them right, macro F1 over all labels (0 for one that neither occurs nor is predicted), and
    AUROC as the mean over labels.
    """

    name = "multilabel"
    metrics = (
        Metric("label_accuracy", "accuracy by label", percent=True),
        Metric("subset_accuracy", "all labels right", percent=True),
        MACRO_F1,
        AUROC,
    )
    targets = "0 or 1 for each of {1} labels of an example, (n, {1})"
    dtypes = (torch.float32, torch.int64, torch.uint8, torch.bool)
    axes = (2,)

    @property
    def criterion(self) -> Criterion:
        """Binary cross-entropy with logits, the mean over examples and labels."""
        return binary_cross_entropy

    def fault(self, targets: Tensor, width: int) -> str | None:
        """Anything but 0 and 1 for each label."""
        found = self.form_fault(targets) or width_fault(width, targets.shape[1])
        if not found and not bool(((targets == 0) | (targets == 1)).all()):
            found = "hold other numbers than 0 and 1"
        return found

    def width_for(self, targets: Tensor) -> int:
        """The labels of one example."""
        return targets.shape[1]

    def zeros(self, width: int) -> dict[str, Tensor]:
        """See `sums`."""
        return zero_counts({"examples": (), "exact": (), "by_label": (3, width), "scores": (width, 2, SCORE_BINS)})

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """For each label true positives, predictions and occurrences; examples, and those without a mistake."""
        predicted, actual = outputs > 0, targets > 0
        return {
            "examples": torch.tensor(len(targets)),
            "exact": (predicted == actual).all(1).sum(),
            "by_label": torch.stack([(predicted & actual).sum(0), predicted.sum(0), actual.sum(0)]),
            "scores": score_histograms(outputs.float(), actual.flatten().nonzero()[:, 0]),
        }

    def impossible(self, sums: Sums, examples: int, positions: int) -> str | None:
        """Counts that do not add up to `examples`, or contradict one another."""
        hits, predicted, actual = sums["by_label"]
        if int(sums["examples"]) != examples:
            return f"examples is {int(sums['examples'])} of {examples}"
        if (
            bool((hits > torch.minimum(predicted, actual)).any())
            or int(torch.maximum(predicted, actual).max()) > examples
        ):
            return f"by_label contradicts itself, or counts more than {examples} examples"
        mistakes = predicted + actual - 2 * hits
        if bool((predicted + actual - hits > examples).any()):
            return f"by_label counts more than {examples} examples"
        if not examples - int(mistakes.sum()) <= int(sums["exact"]) <= examples - int(mistakes.max()):
            return "exact contradicts by_label"
        if not sums["scores"].sum(2).equal(torch.stack([examples - actual, actual], 1)):
            return "scores contradict by_label"
        return None

    def values(self, sums: Sums) -> Values:
        """All None if there are no examples."""
        if not (count := int(sums["examples"])):
            return {metric.name: None for metric in self.metrics}
        hits, predicted, actual = sums["by_label"].double()
        return {
            "label_accuracy": 1 - float((predicted + actual - 2 * hits).mean()) / count,
            "subset_accuracy": int(sums["exact"]) / count,
            MACRO_F1.name: float((2 * hits / (predicted + actual).clamp(min=1)).mean()),
            AUROC.name: mean_auroc(sums["scores"]),
        }
