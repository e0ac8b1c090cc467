"""Histograms of scores and of confidences, from which the area under the ROC curve and the calibration error follow.

The area depends on ranks, which do not add up over clients, so scores are counted in a histogram of `SCORE_BINS` bins
of equal width from -`SCORE_RANGE` to `SCORE_RANGE`, scores beyond that range in the outermost. A score is the log-odds
of a label, or of a class among several log(2 p) up to a probability p of one half and -log(2 (1 - p)) above. A bin is
1/16 wide: probabilities below one half (above, their complements) that differ by more than 6.5 percent are never in one
bin as long as they are above 1e-7. Pairs in one bin count as ties, and `auroc_error` bounds the resulting error.
"""

import torch
from torch import Tensor

from potluck.core.tasks.counting import ROUNDING, bincount

SCORE_BINS = 512
SCORE_RANGE = 16.0
CALIBRATION_BINS = 15
_UNIT = 2.0**-24  # of confidences, which are float32


def auroc(histogram: Tensor) -> float | None:
    """The area under the ROC curve from counts (2, bins) of negatives and positives by score; None without both.

    The share of pairs of a positive and a negative in which the positive is in a higher bin, ties counting half.
    """
    return mean_auroc(histogram[None])


def auroc_error(histogram: Tensor) -> float:
    """The largest error of `auroc` due to binning: half of the share of pairs in one bin."""
    negatives, positives = histogram.double()
    pairs = float(negatives.sum() * positives.sum())
    return float((positives * negatives).sum()) / 2 / pairs if pairs else 0.0


def calibration_counts(confidence: Tensor, right: Tensor) -> Tensor:
    """For each bin of confidences (n,): examples, hits, and the sum of confidences in units of `_UNIT`, (3, bins)."""
    confidence = confidence.nan_to_num(0.0)
    bins = (confidence * CALIBRATION_BINS).long().clamp(0, CALIBRATION_BINS - 1)
    missed, hits = bincount(bins + CALIBRATION_BINS * right, 2 * CALIBRATION_BINS).view(2, CALIBRATION_BINS)
    # Integers, so that the sum does not depend on the order of summation, which varies on accelerators.
    units = (confidence / _UNIT).round().double()
    total = torch.bincount(bins, units, CALIBRATION_BINS).long()
    return torch.stack([missed + hits, hits, total])


def calibration_fault(calibration: Tensor, examples: int, hits: int) -> str | None:
    """What contradicts itself in `calibration_counts` of so many examples with so many hits; None if nothing does."""
    counted, right, total = calibration
    if int(counted.sum()) != examples or int(right.sum()) != hits or bool((right > counted).any()):
        return f"calibration is not of {examples} examples with {hits} hits"
    share = total * _UNIT * CALIBRATION_BINS - counted * torch.arange(CALIBRATION_BINS)
    slack = ROUNDING * CALIBRATION_BINS * counted
    outside = (share < -slack) | (share > counted + slack)
    return "calibration has confidences outside their bins" if bool(outside.any()) else None


def calibration_error(calibration: Tensor) -> float | None:
    """The expected calibration error; None over no examples."""
    counted, right, total = calibration.double()
    examples = float(counted.sum())
    return float((right - total * _UNIT).abs().sum()) / examples if examples else None


def score_histograms(scores: Tensor, positive: Tensor) -> Tensor:
    """Counts (k, 2, bins) of negatives and positives by score (n, k); `positive` holds flat indices into the scores."""
    columns = scores.shape[1]
    bins = (scores.nan_to_num(0.0) + SCORE_RANGE).mul_(SCORE_BINS / (2 * SCORE_RANGE)).clamp_(0, SCORE_BINS - 1).long()
    bins += SCORE_BINS * torch.arange(columns, device=bins.device)
    whole = bincount(bins, columns * SCORE_BINS)
    positives = bincount(bins.flatten()[positive], columns * SCORE_BINS)
    return torch.stack([whole - positives, positives]).view(2, columns, SCORE_BINS).transpose(0, 1).contiguous()


def mean_auroc(histograms: Tensor) -> float | None:
    """The mean over the columns (k, 2, bins) that have positives and negatives; None if none has both."""
    negatives, positives = histograms.double().unbind(1)
    pairs = negatives.sum(1) * positives.sum(1)
    below = negatives.cumsum(1) - negatives / 2
    areas = ((positives * below).sum(1) / pairs)[pairs > 0]
    return float(areas.mean()) if len(areas) else None
