"""What a network's outputs mean: the training loss, the form of targets, and the metrics.

A task measures by *sums*: tensors that add up over batches and over clients, and from which every metric follows. The
sums of two halves of some data, added, are those of the whole, so a client reports sums and keeps its predictions, and
a metric over all clients' examples is exact although no party has them all.

Counts are int64 and add up exactly; the others are float64 and add up to rounding. The area under the ROC curve depends
on ranks, which do not add up, so scores are counted in a histogram of `SCORE_BINS` bins of equal width from
-`SCORE_RANGE` to `SCORE_RANGE`, scores beyond that range in the outermost. A score is the log-odds of a label, or of a
class among several log(2 p) up to a probability p of one half and -log(2 (1 - p)) above. A bin is 1/16 wide:
probabilities below one half (above, their complements) that differ by more than 6.5 percent are never in one bin as
long as they are above 1e-7. Pairs in one bin count as ties, and `auroc_error` bounds the resulting error.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck.core.errors import ConfigError, DataError, nearest
from potluck.core.metric import ACCURACY, Metric

Criterion = Callable[[Tensor, Tensor], Tensor]
Sums = Mapping[str, Tensor]
Values = dict[str, float | None]

CONFUSION_CLASSES = 100
SCORE_BINS = 512
SCORE_RANGE = 16.0
CALIBRATION_BINS = 15
IGNORED = -100
"""The target of a position that counts neither for the loss nor for a metric; torch's own default."""

_LARGEST_ERROR = 1e18  # predictions beyond it, and NaN, count as this error, so that sums stay finite
_LARGEST_LOSS = 1e4  # of a token, likewise
_LARGEST_EXPONENT = 700.0  # exp of it is finite
_UNIT = 2.0**-24  # of confidences, which are float32
_ROUNDING = 1e-6  # relative tolerance for comparing sums of floats with bounds that other sums imply

_MACRO_F1 = Metric("macro_f1", "macro F1", percent=True)
_BALANCED = Metric("balanced_accuracy", "balanced accuracy", percent=True)
_AUROC = Metric("auroc", "AUROC")
_ECE = Metric("ece", "calibration error", higher_is_better=False, percent=True)
_CLASS_METRICS = (ACCURACY, _MACRO_F1, _BALANCED)


class Task(ABC):
    """The meaning of outputs and targets. A task is a frozen dataclass without state, the same on every machine.

    `width` always means the size of an output's last axis, a federation's `num_classes`.

    Attributes:
        name: the name in configurations.
        metrics: the metrics; the first is the primary one, by which the best round is chosen.
        has_classes: whether an output (width,) holds one logit for each class, and a target is one class. Methods that
            count, average or distil by class assume it.
        has_labels: whether every example has one label, by which a partition can divide examples.
        by_position: whether there is an output (width,) for each position of an example, not one for the example.
        targets: the required form of targets, as text with {0} for `width` - 1 and {1} for `width`.
        dtypes: allowed types of targets.
        axes: allowed numbers of axes of targets.
    """

    name: ClassVar[str]
    metrics: tuple[Metric, ...]
    has_classes: ClassVar[bool] = False
    has_labels: ClassVar[bool] = False
    by_position: ClassVar[bool] = False
    targets: ClassVar[str]
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.int64,)
    axes: ClassVar[tuple[int, ...]] = (1,)

    @property
    def primary(self) -> Metric:
        """The metric in headlines, by which the best round is chosen."""
        return self.metrics[0]

    @property
    @abstractmethod
    def criterion(self) -> Criterion:
        """The training loss: (outputs, targets) to a scalar."""

    @abstractmethod
    def fault(self, targets: Tensor, width: int) -> str | None:
        """What is wrong with targets (n, ...), at least one, for outputs of this width; None if nothing is."""

    def form_fault(self, targets: Tensor) -> str | None:
        """What is wrong with targets at any width: their type or number of axes; None if nothing is."""
        return _kind_fault(targets, self.dtypes, self.axes)

    def targets_for(self, width: int | None = None) -> str:
        """The required form of targets, as text."""
        return self.targets.format(*(("width - 1", "width") if width is None else (width - 1, width)))

    @abstractmethod
    def width_for(self, targets: Tensor) -> int:
        """The output width that these training targets need; they must have no `form_fault`."""

    @abstractmethod
    def zeros(self, width: int) -> dict[str, Tensor]:
        """The sums over no examples, which fix the names, types and shapes of sums."""

    @abstractmethod
    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The sums over a batch, from outputs (n, ..., width) and targets (n, ...); finite whatever the outputs are."""

    @abstractmethod
    def impossible(self, sums: Sums, examples: int, positions: int) -> str | None:
        """Why no predictions can have these sums; None if some can.

        Args:
            sums: with the names, types and shapes of `zeros`; finite, and counts not negative.
            examples: the number of examples that they are claimed to cover.
            positions: positions of one example.
        """

    @abstractmethod
    def values(self, sums: Sums) -> Values:
        """Every metric by name; None if these sums do not define it."""

    def labels(self, targets: Tensor) -> Tensor:
        """A label (n,), int64, for each example; all 0 if the task has no labels."""
        return targets if self.has_labels else torch.zeros(len(targets), dtype=torch.int64)

    def output_shape(self, inputs: Tensor, width: int) -> tuple[int, ...]:
        """The shape that outputs must have for a batch of prepared inputs (n, ...)."""
        return (*inputs.shape[:2], width) if self.by_position else (len(inputs), width)

    def check_targets(self, targets: Tensor, width: int, whose: str) -> None:
        """Check that targets suit this task.

        Args:
            targets: (n, ...); n may be 0.
            width: of the outputs.
            whose: whose targets they are; opens the message.

        Raises:
            DataError: they do not; says what was found and what was expected.
        """
        if targets.numel() and (found := self.fault(targets, width)):
            raise DataError(f"{whose} {found}; {self.name} expects {self.targets_for(width)}")


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
        return (*_CLASS_METRICS, _AUROC, _ECE) if self.scores else _CLASS_METRICS

    @property
    def criterion(self) -> Criterion:
        """Cross-entropy."""
        return nn.functional.cross_entropy

    def fault(self, targets: Tensor, width: int) -> str | None:
        """Anything but class numbers."""
        return self.form_fault(targets) or _range_fault(targets, 0, width - 1)

    def width_for(self, targets: Tensor) -> int:
        """One more than the largest class."""
        return int(targets.max()) + 1

    def zeros(self, width: int) -> dict[str, Tensor]:
        """See `sums`."""
        shapes = {"confusion": (width, width)} if width <= CONFUSION_CLASSES else {"by_class": (3, width)}
        scores = {"calibration": (3, CALIBRATION_BINS), "scores": (width, 2, SCORE_BINS)} if self.scores else {}
        return _counts({**shapes, **scores})

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The confusion matrix, or counts by class; with `scores` also histograms of scores and confidences."""
        width, predicted = outputs.shape[1], outputs.argmax(1)
        if width <= CONFUSION_CLASSES:
            found = {"confusion": _bincount(targets * width + predicted, width * width).view(width, width)}
        else:
            found = {"by_class": _by_class(predicted, targets, width)}
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
            "calibration": _calibration(shares.gather(1, at)[:, 0], predicted == targets),
            "scores": _histograms(scores, targets + width * torch.arange(len(targets), device=targets.device)),
        }

    def impossible(self, sums: Sums, examples: int, positions: int) -> str | None:
        """Counts that do not add up to `examples`, or contradict one another."""
        by_class = _classes_of(sums)
        hits, _, actual = by_class
        wrong = _by_class_fault(by_class, examples)
        if wrong or not self.scores:
            return wrong
        if not sums["scores"].sum(2).equal(torch.stack([examples - actual, actual], 1)):
            return "scores contradict the classes"
        return _calibration_fault(sums["calibration"], examples, int(hits.sum()))

    def values(self, sums: Sums) -> Values:
        """All None if there are no examples."""
        found = _by_class_values(_classes_of(sums))
        if self.scores:
            found[_AUROC.name] = _mean_auroc(sums["scores"])
            found[_ECE.name] = _calibration_error(sums["calibration"])
        return found


@dataclass(frozen=True)
class Binary(Task):
    """Two classes; the network returns one logit (n, 1), targets are 0 or 1, int64 (n,).

    Accuracy at a probability of one half, F1 of the positive class (0 where there is none and none is predicted),
    balanced accuracy, AUROC and the expected calibration error.
    """

    name = "binary"
    metrics = (ACCURACY, Metric("f1", "F1", percent=True), _BALANCED, _AUROC, _ECE)
    has_labels = True
    targets = "0 or 1 for each example (int64), and networks with one output"

    @property
    def criterion(self) -> Criterion:
        """Binary cross-entropy with logits."""
        return _binary_cross_entropy

    def fault(self, targets: Tensor, width: int) -> str | None:
        """Anything but 0 and 1."""
        return self.form_fault(targets) or _range_fault(targets, 0, 1) or _width_fault(width, 1)

    def width_for(self, targets: Tensor) -> int:
        """One."""
        return 1

    def zeros(self, width: int) -> dict[str, Tensor]:
        """See `sums`."""
        return _counts({"confusion": (2, 2), "calibration": (3, CALIBRATION_BINS), "scores": (1, 2, SCORE_BINS)})

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The confusion matrix (actual, predicted), and histograms as in `Classification`."""
        predicted = (outputs[:, 0] > 0).long()
        return {
            "confusion": _bincount(2 * targets + predicted, 4).view(2, 2),
            "calibration": _calibration(outputs[:, 0].float().abs().sigmoid(), predicted == targets),
            "scores": _histograms(outputs.float(), targets.nonzero()[:, 0]),
        }

    def impossible(self, sums: Sums, examples: int, positions: int) -> str | None:
        """Counts that do not add up to `examples`, or contradict one another."""
        table = sums["confusion"]
        if int(table.sum()) != examples:
            return f"confusion counts {int(table.sum())} examples of {examples}"
        if not sums["scores"].sum(2)[0].equal(table.sum(1)):
            return "scores contradict confusion"
        return _calibration_fault(sums["calibration"], examples, int(table.trace()))

    def values(self, sums: Sums) -> Values:
        """All None if there are no examples."""
        by_class = _classes_of(sums)
        found = _by_class_values(by_class)
        del found[_MACRO_F1.name]
        hits, predicted, actual = by_class[:, 1].tolist()
        f1 = 2 * hits / (predicted + actual) if predicted + actual else 0.0
        found["f1"] = f1 if int(sums["confusion"].sum()) else None
        error = _calibration_error(sums["calibration"])
        return {**found, _AUROC.name: _mean_auroc(sums["scores"]), _ECE.name: error}


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
        _MACRO_F1,
        _AUROC,
    )
    targets = "0 or 1 for each of {1} labels of an example, (n, {1})"
    dtypes = (torch.float32, torch.int64, torch.uint8, torch.bool)
    axes = (2,)

    @property
    def criterion(self) -> Criterion:
        """Binary cross-entropy with logits, the mean over examples and labels."""
        return _binary_cross_entropy

    def fault(self, targets: Tensor, width: int) -> str | None:
        """Anything but 0 and 1 for each label."""
        found = self.form_fault(targets) or _width_fault(width, targets.shape[1])
        if not found and not bool(((targets == 0) | (targets == 1)).all()):
            found = "hold other numbers than 0 and 1"
        return found

    def width_for(self, targets: Tensor) -> int:
        """The labels of one example."""
        return targets.shape[1]

    def zeros(self, width: int) -> dict[str, Tensor]:
        """See `sums`."""
        return _counts({"examples": (), "exact": (), "by_label": (3, width), "scores": (width, 2, SCORE_BINS)})

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """For each label true positives, predictions and occurrences; examples, and those without a mistake."""
        predicted, actual = outputs > 0, targets > 0
        return {
            "examples": torch.tensor(len(targets)),
            "exact": (predicted == actual).all(1).sum(),
            "by_label": torch.stack([(predicted & actual).sum(0), predicted.sum(0), actual.sum(0)]),
            "scores": _histograms(outputs.float(), actual.flatten().nonzero()[:, 0]),
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
            _MACRO_F1.name: float((2 * hits / (predicted + actual).clamp(min=1)).mean()),
            _AUROC.name: _mean_auroc(sums["scores"]),
        }


@dataclass(frozen=True)
class Regression(Task):
    """One number or several for each example; outputs are (n, width), targets float32 (n,) or (n, width).

    The mean absolute error, the root of the mean squared error, and the coefficient of determination, averaged over
    several numbers. They are in the targets' units, so targets should be scaled alike at all clients, and their mean
    should not be large against their spread: R2 loses a digit if it is ten times as large.
    """

    name = "regression"
    metrics = (
        Metric("mae", "MAE", higher_is_better=False),
        Metric("rmse", "RMSE", higher_is_better=False),
        Metric("r2", "R2"),
    )
    targets = "finite numbers (float32), (n,) for networks with one output or (n, {1})"
    dtypes = (torch.float32, torch.float64)
    axes = (1, 2)

    @property
    def criterion(self) -> Criterion:
        """The mean squared error."""
        return _squared_error

    def fault(self, targets: Tensor, width: int) -> str | None:
        """Anything but finite numbers, one for each output."""
        found = self.form_fault(targets) or _width_fault(width, self.width_for(targets))
        return found or (None if bool(targets.isfinite().all()) else "hold NaN or infinity")

    def width_for(self, targets: Tensor) -> int:
        """The numbers of one example."""
        return 1 if targets.dim() == 1 else targets.shape[1]

    def zeros(self, width: int) -> dict[str, Tensor]:
        """See `sums`."""
        names = ("absolute", "squared", "target", "target_squared")
        return {**_counts({"examples": ()}), **{name: torch.zeros(width, dtype=torch.float64) for name in names}}

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """For each output, sums of absolute and squared errors, of targets and of their squares."""
        targets = targets.view(len(targets), -1).double()
        errors = (outputs.double() - targets).abs().nan_to_num(_LARGEST_ERROR).clamp(max=_LARGEST_ERROR)
        return {
            "examples": torch.tensor(len(targets)),
            "absolute": errors.sum(0),
            "squared": errors.square().sum(0),
            "target": targets.sum(0),
            "target_squared": targets.square().sum(0),
        }

    def impossible(self, sums: Sums, examples: int, positions: int) -> str | None:
        """A wrong number of examples, or sums of squares that are negative or impossible with the other sums."""
        if int(sums["examples"]) != examples:
            return f"examples is {int(sums['examples'])} of {examples}"
        for first, second in (("absolute", "squared"), ("target", "target_squared")):
            whole, squares = sums[first], sums[second]
            if bool((squares < 0).any()) or bool((whole.square() > examples * squares * (1 + _ROUNDING)).any()):
                return f"{second} is too small for {first}"
        absolute, squared = sums["absolute"], sums["squared"]
        if bool((absolute < 0).any()) or bool((squared > absolute.square() * (1 + _ROUNDING)).any()):
            return "absolute is too small for squared"
        return None

    def values(self, sums: Sums) -> Values:
        """All None if there are no examples; R2 also if all targets are equal."""
        if not (count := int(sums["examples"])):
            return {metric.name: None for metric in self.metrics}
        around_mean = sums["target_squared"] - sums["target"].square() / count
        spread = bool((around_mean > _ROUNDING**2 * sums["target_squared"]).all())
        return {
            "mae": float(sums["absolute"].mean()) / count,
            "rmse": float((sums["squared"] / count).sqrt().mean()),
            "r2": float((1 - sums["squared"] / around_mean).mean()) if spread else None,
        }


@dataclass(frozen=True)
class NextToken(Task):
    """A distribution over `width` tokens for each position; logits (n, t, width), targets int64 (n, t).

    Inputs have t positions too. A target of `IGNORED` counts for nothing, neither in the loss, which is the mean over
    the other positions of a batch, nor in perplexity and accuracy, which are over the positions of all examples.
    """

    name = "next_token"
    metrics = (Metric("perplexity", "perplexity", higher_is_better=False), ACCURACY)
    by_position = True
    targets = f"a token from 0 to {{0}}, or {IGNORED} for none, for each position of an example (int64), (n, t)"
    axes = (2,)

    @property
    def criterion(self) -> Criterion:
        """Cross-entropy over the positions that count; 0 if none does."""
        return _token_cross_entropy

    def fault(self, targets: Tensor, width: int) -> str | None:
        """Anything but tokens."""
        return self.form_fault(targets) or _range_fault(torch.where(targets == IGNORED, 0, targets), 0, width - 1)

    def width_for(self, targets: Tensor) -> int:
        """One more than the largest token."""
        return max(int(targets.max()), 0) + 1

    def zeros(self, width: int) -> dict[str, Tensor]:
        """See `sums`."""
        return {**_counts({"tokens": (), "right": ()}), "loss": torch.zeros((), dtype=torch.float64)}

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The numbers of tokens that count and of those predicted correctly, and the sum of their losses in nats."""
        outputs, targets = _that_count(outputs, targets)
        losses = F.cross_entropy(outputs.float(), targets, reduction="none").double()
        return {
            "tokens": torch.tensor(len(targets)),
            "right": (outputs.argmax(1) == targets).sum(),
            "loss": losses.nan_to_num(_LARGEST_LOSS).clamp(0, _LARGEST_LOSS).sum(),
        }

    def impossible(self, sums: Sums, examples: int, positions: int) -> str | None:
        """More tokens than there are positions, or more right than there are tokens, or a negative loss."""
        tokens, right, loss = (sums[name].item() for name in ("tokens", "right", "loss"))
        if tokens > examples * positions:
            return f"tokens is {tokens}, of {examples} examples with {positions} positions"
        if right > tokens:
            return f"right is {right} of {tokens} tokens"
        # A wrong token has at most half of the probability.
        least, most = (tokens - right) * math.log(2), tokens * _LARGEST_LOSS
        return None if least <= loss * (1 + _ROUNDING) <= most * (1 + _ROUNDING) ** 2 else "loss contradicts right"

    def values(self, sums: Sums) -> Values:
        """All None if there are no tokens."""
        if not (tokens := int(sums["tokens"])):
            return {metric.name: None for metric in self.metrics}
        perplexity = math.exp(min(float(sums["loss"]) / tokens, _LARGEST_EXPONENT))
        return {"perplexity": perplexity, "accuracy": int(sums["right"]) / tokens}


@dataclass(frozen=True)
class TokenClassification(Task):
    """One of `width` classes for each position; logits (n, t, width), targets int64 (n, t), `IGNORED` for none.

    Accuracy, macro F1 and balanced accuracy over the positions that count.
    """

    name = "token_classification"
    metrics = _CLASS_METRICS
    by_position = True
    targets = f"a class from 0 to {{0}}, or {IGNORED} for none, for each position of an example (int64), (n, t)"
    axes = (2,)

    @property
    def criterion(self) -> Criterion:
        """Cross-entropy over the positions that count; 0 if none does."""
        return _token_cross_entropy

    def fault(self, targets: Tensor, width: int) -> str | None:
        """Anything but classes."""
        return self.form_fault(targets) or _range_fault(torch.where(targets == IGNORED, 0, targets), 0, width - 1)

    def width_for(self, targets: Tensor) -> int:
        """One more than the largest class."""
        return max(int(targets.max()), 0) + 1

    def zeros(self, width: int) -> dict[str, Tensor]:
        """See `sums`."""
        return _counts({"by_class": (3, width)})

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """For each class the numbers of correct predictions, of predictions and of occurrences."""
        outputs, targets = _that_count(outputs, targets)
        return {"by_class": _by_class(outputs.argmax(1), targets, outputs.shape[1])}

    def impossible(self, sums: Sums, examples: int, positions: int) -> str | None:
        """More than there are positions, or counts that contradict one another."""
        counted = int(sums["by_class"][2].sum())
        if counted > examples * positions:
            return f"by_class counts {counted} positions, of {examples} examples with {positions}"
        return _by_class_fault(sums["by_class"], counted)

    def values(self, sums: Sums) -> Values:
        """All None if there are no positions."""
        return _by_class_values(sums["by_class"])


CLASSIFICATION = Classification()
TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (CLASSIFICATION, Binary(), MultiLabel(), Regression(), NextToken(), TokenClassification())
}
"""Every task by its name in configurations."""


def task_named(name: str) -> Task:
    """The task of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in TASKS:
        raise ConfigError(f"unknown task {name!r}; nearest: {nearest(name, TASKS, 1)[0]}; all: {', '.join(TASKS)}")
    return TASKS[name]


def added(first: Sums, second: Sums) -> dict[str, Tensor]:
    """The sums over the examples of both."""
    return {name: total + second[name] for name, total in first.items()}


def auroc(histogram: Tensor) -> float | None:
    """The area under the ROC curve from counts (2, bins) of negatives and positives by score; None without both.

    The share of pairs of a positive and a negative in which the positive is in a higher bin, ties counting half.
    """
    return _mean_auroc(histogram[None])


def auroc_error(histogram: Tensor) -> float:
    """The largest error of `auroc` due to binning: half of the share of pairs in one bin."""
    negatives, positives = histogram.double()
    pairs = float(negatives.sum() * positives.sum())
    return float((positives * negatives).sum()) / 2 / pairs if pairs else 0.0


def _binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, targets.reshape(outputs.shape).to(outputs.dtype))


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets.reshape(outputs.shape).to(outputs.dtype))


def _token_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    targets = targets.flatten()
    total = F.cross_entropy(outputs.flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum")
    return total / (targets != IGNORED).sum().clamp(min=1)


def _that_count(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (m, width) and targets (m,) of the positions whose target is not ignored."""
    counts = targets != IGNORED
    return outputs[counts], targets[counts]


def _kind_fault(targets: Tensor, dtypes: tuple[torch.dtype, ...], axes: tuple[int, ...]) -> str | None:
    if targets.dtype in dtypes and targets.dim() in axes:
        return None
    return f"are {str(targets.dtype).removeprefix('torch.')} of shape {tuple(targets.shape)}"


def _range_fault(targets: Tensor, least: int, most: int) -> str | None:
    low, high = (int(end) for end in torch.aminmax(targets))
    return None if least <= low and high <= most else f"go from {low} to {high}"


def _width_fault(width: int, needed: int) -> str | None:
    return None if width == needed else f"need networks with {needed} outputs; these have {width}"


def _counts(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}


def _bincount(indices: Tensor, length: int) -> Tensor:
    return torch.bincount(indices.flatten(), minlength=length)


def _by_class(predicted: Tensor, targets: Tensor, width: int) -> Tensor:
    """Counts (3, width): correct predictions, predictions and occurrences of each class."""
    return torch.stack([_bincount(of, width) for of in (targets[predicted == targets], predicted, targets)])


def classes_of(sums: Sums) -> Tensor | None:
    """Correct predictions, predictions and occurrences (3, width) of each class; None if the task counts no classes."""
    return _classes_of(sums) if sums.keys() & {"confusion", "by_class"} else None


def _classes_of(sums: Sums) -> Tensor:
    """The counts of `_by_class`, from a confusion matrix if there is one."""
    if "confusion" not in sums:
        return sums["by_class"]
    table = sums["confusion"]
    return torch.stack([table.diagonal(), table.sum(0), table.sum(1)])


def _by_class_fault(by_class: Tensor, count: int) -> str | None:
    hits, predicted, actual = by_class
    if not int(predicted.sum()) == int(actual.sum()) == count:
        return f"the classes count {int(actual.sum())} true and {int(predicted.sum())} predicted of {count}"
    return "the classes contradict one another" if bool((hits > torch.minimum(predicted, actual)).any()) else None


def _by_class_values(by_class: Tensor) -> Values:
    """In Python numbers, which for a few classes takes a tenth of the time."""
    hits, predicted, actual = by_class.tolist()
    if not (count := sum(actual)):
        return {metric.name: None for metric in _CLASS_METRICS}
    scores = [2 * hit / (said + is_) for hit, said, is_ in zip(hits, predicted, actual, strict=True) if said + is_]
    recalls = [hit / is_ for hit, is_ in zip(hits, actual, strict=True) if is_]
    return {
        ACCURACY.name: sum(hits) / count,
        _MACRO_F1.name: sum(scores) / len(scores),
        _BALANCED.name: sum(recalls) / len(recalls),
    }


def _calibration(confidence: Tensor, right: Tensor) -> Tensor:
    """For each bin of confidences (n,): examples, hits, and the sum of confidences in units of `_UNIT`, (3, bins)."""
    confidence = confidence.nan_to_num(0.0)
    bins = (confidence * CALIBRATION_BINS).long().clamp(0, CALIBRATION_BINS - 1)
    missed, hits = _bincount(bins + CALIBRATION_BINS * right, 2 * CALIBRATION_BINS).view(2, CALIBRATION_BINS)
    # Integers, so that the sum does not depend on the order of summation, which varies on accelerators.
    units = (confidence / _UNIT).round().double()
    total = torch.bincount(bins, units, CALIBRATION_BINS).long()
    return torch.stack([missed + hits, hits, total])


def _calibration_fault(calibration: Tensor, examples: int, hits: int) -> str | None:
    counted, right, total = calibration
    if int(counted.sum()) != examples or int(right.sum()) != hits or bool((right > counted).any()):
        return f"calibration is not of {examples} examples with {hits} hits"
    share = total * _UNIT * CALIBRATION_BINS - counted * torch.arange(CALIBRATION_BINS)
    slack = _ROUNDING * CALIBRATION_BINS * counted
    outside = (share < -slack) | (share > counted + slack)
    return "calibration has confidences outside their bins" if bool(outside.any()) else None


def _calibration_error(calibration: Tensor) -> float | None:
    counted, right, total = calibration.double()
    examples = float(counted.sum())
    return float((right - total * _UNIT).abs().sum()) / examples if examples else None


def _histograms(scores: Tensor, positive: Tensor) -> Tensor:
    """Counts (k, 2, bins) of negatives and positives by score (n, k); `positive` holds flat indices into the scores."""
    columns = scores.shape[1]
    bins = (scores.nan_to_num(0.0) + SCORE_RANGE).mul_(SCORE_BINS / (2 * SCORE_RANGE)).clamp_(0, SCORE_BINS - 1).long()
    bins += SCORE_BINS * torch.arange(columns, device=bins.device)
    whole = _bincount(bins, columns * SCORE_BINS)
    positives = _bincount(bins.flatten()[positive], columns * SCORE_BINS)
    return torch.stack([whole - positives, positives]).view(2, columns, SCORE_BINS).transpose(0, 1).contiguous()


def _mean_auroc(histograms: Tensor) -> float | None:
    """The mean over the columns (k, 2, bins) that have positives and negatives; None if none has both."""
    negatives, positives = histograms.double().unbind(1)
    pairs = negatives.sum(1) * positives.sum(1)
    below = negatives.cumsum(1) - negatives / 2
    areas = ((positives * below).sum(1) / pairs)[pairs > 0]
    return float(areas.mean()) if len(areas) else None
