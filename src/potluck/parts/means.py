"""Combination of several clients' tensors: a weighted mean, or a robust one that a few outliers cannot move far.

Yin, Chen, Ramchandran, Bartlett. ICML 2018. https://arxiv.org/abs/1803.01498, for the median and the trimmed mean.
Sun, Kairouz, Suresh, McMahan. 2019. https://arxiv.org/abs/1911.07963, for limiting norms; around a robust centre as in
Karimireddy, He, Jaggi. ICML 2021. https://arxiv.org/abs/2012.10333.
Blanchard, El Mhamdi, Guerraoui, Stainer. NeurIPS 2017. https://arxiv.org/abs/1703.02757, for Krum and Multi-Krum.
Pillutla, Kakade, Harchaoui. IEEE TSP 2022. https://arxiv.org/abs/1912.13445, for the geometric median.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Size, Tensor

from potluck.core.federation import ClientId
from potluck.core.ground.fields import Checked, at_least, below, require
from potluck.core.message import Message
from potluck.core.nets.weights import RunningMean, Weights, mean, mean_where_present
from potluck.core.roles import Arriving, Replies

MeanRule = Literal["mean", "median", "trimmed", "clipped", "geometric_median", "krum", "multi_krum"]
_TRIMS: tuple[MeanRule, ...] = ("trimmed", "krum", "multi_krum")
_STEPS, _CLOSE = 200, 1e-7  # of Weiszfeld's iteration, and what is close beside the median distance


@dataclass(frozen=True)
class Aggregate(Checked):
    """A rule for combining clients' tensors, one tensor at a time.

    Attributes:
        rule: "mean" weighs clients by the method's weights. "median" and "trimmed" work coordinate by coordinate and
            count every client once: the middle value, or the mean without the shares `trim` of largest and of smallest
            values. "clipped" is the weighted mean after each client's distance from the coordinate-wise median, in L2
            over the tensor, is limited to the median of these distances. The others take tensors as points, in each
            block of coordinates that the same clients cover, and count every client once: "geometric_median" is the
            point with the smallest sum of distances to theirs; "krum" that of the client with the smallest sum of
            squared distances to its nearest n - f - 2 others, of n clients f of which may lie, one other at least (the
            mean of several that are equally near); "multi_krum" the mean of the n - f clients with the smallest. All
            but "mean" need all clients' tensors in memory together.
        trim: share of the clients, rounded down to whole clients, that "trimmed" drops at each end, and that may lie
            under "krum" and "multi_krum", which is f.
    """

    rule: MeanRule = "mean"
    trim: Annotated[float, at_least(0), below(0.5)] = 0.2

    def __post_init__(self) -> None:
        found, unset = self.trim, type(self).trim
        belongs = self.rule in _TRIMS or found == unset
        require(belongs, "trim", f"{unset}, as it was, since it belongs to the rules {', '.join(_TRIMS)}", found)

    def __call__(self, tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
        """The combination of tensors of one shape, clients in ascending order; `shares` are their weights.

        Integer tensors (counters) give their maximum under "mean" and their lower median otherwise.
        """
        if self.rule == "mean":
            return mean(tensors, shares)
        stack = torch.stack(list(tensors))
        if not stack.is_floating_point():
            return stack.sort(0).values[(len(stack) - 1) // 2]
        return self.of_covered(stack, shares)

    @property
    def needs_single_tensors(self) -> str:
        """Why the rule needs each client's tensors; empty for the plain mean, which their sum suffices."""
        return "" if self.rule == "mean" else f"the rule {self.rule!r} compares them with each other"

    def running(self) -> "RunningMean | Gathered":
        """An accumulator of clients' tensors; for the plain mean it holds none of them."""
        return RunningMean() if self.rule == "mean" else Gathered(self)

    def arriving(self, replies: Arriving) -> Iterable[tuple[ClientId, Message]]:
        """Replies one at a time under the plain mean, which needs none of them twice; else all of them together."""
        return replies if self.rule == "mean" else replies.all().items()

    def of_covered(self, stack: Tensor, shares: Sequence[float] | None = None) -> Tensor:
        """The combination, for each coordinate, of the clients that cover it.

        Args:
            stack: (clients, ...), NaN where a client does not cover a coordinate.
            shares: weight of each client; equal by default.

        Returns:
            (...), NaN where no client covers a coordinate.
        """
        if self.rule == "trimmed":
            return _without_ends(stack, self.trim)
        if self.rule == "geometric_median":
            return _by_block(stack, _geometric_median)
        if self.rule == "krum" or self.rule == "multi_krum":
            return _by_block(stack, partial(_krum, trim=self.trim, several=self.rule == "multi_krum"))
        middle = _without_ends(stack, 0.5)
        if self.rule == "median":
            return middle
        weights = torch.tensor(shares or [1.0] * len(stack), dtype=stack.dtype).view(-1, *[1] * (stack.dim() - 1))
        gaps = stack - middle
        if self.rule == "clipped":
            norms = gaps.nan_to_num().view(len(stack), -1).norm(dim=1)
            limits = (norms.quantile(0.5) / norms).nan_to_num(1.0).clamp(max=1.0)  # 0 / 0: a client at the median
            gaps = gaps * limits.view(weights.shape)
        present = weights * ~stack.isnan()
        return middle + (gaps.nan_to_num() * present).sum(0) / present.sum(0)


def mean_of(replies: Replies, entry: str, weighting: Literal["samples", "uniform"], combine: Aggregate) -> Weights:
    """What clients sent under an entry, tensors by name, combined name by name.

    Args:
        replies: under "samples" each also has its number of "examples".
        entry: its name.
        weighting: what a client weighs under rules that weigh: its examples, or as much as any other.
        combine: the rule.
    """
    shares = replies.entries("examples") if weighting == "samples" else [1.0] * len(replies)
    return mean_where_present(replies.entries(entry), shares, {}, combine)


class Gathered:
    """Tensors of one shape that a rule needs all together.

    Attributes:
        weight: the sum of the shares.
    """

    def __init__(self, rule: Aggregate) -> None:
        self.weight = 0.0
        self._rule = rule
        self._tensors: list[Tensor] = []
        self._shares: list[float] = []

    @property
    def shape(self) -> Size | None:
        """The shape of the tensors so far; None before the first."""
        return self._tensors[0].shape if self._tensors else None

    def add(self, tensor: Tensor, share: float = 1.0) -> None:
        """Add a tensor."""
        self.weight += share
        self._tensors.append(tensor)
        self._shares.append(share)

    def value(self) -> Tensor:
        """Their combination."""
        return self._rule(self._tensors, self._shares)


def _without_ends(stack: Tensor, trim: float) -> Tensor:
    """Coordinate by coordinate, the mean without a share `trim` of the values at each end."""
    ordered = stack.sort(0).values  # NaN sorts last
    count = (~stack.isnan()).sum(0)
    dropped = torch.minimum((trim * count).long(), (count - 1).clamp(min=0) // 2)
    rank = torch.arange(len(stack)).view(-1, *[1] * (stack.dim() - 1))
    left = (rank >= dropped) & (rank < count - dropped)
    return torch.where(left, ordered, 0.0).sum(0) / left.sum(0)


def _by_block(stack: Tensor, combined: Callable[[Tensor], Tensor]) -> Tensor:
    """The combination of points (clients, numbers) in each block of coordinates that the same clients cover."""
    points = stack.reshape(len(stack), -1).double()  # squares of any numbers that a reply may have
    present = ~points.isnan()
    found = torch.full_like(points[0], torch.nan)
    block = torch.zeros(points.shape[1], dtype=torch.int64)
    for covers in () if present.all() else present:
        block = (2 * block + covers).unique(return_inverse=True)[1]
    for number in block.unique().tolist():
        at = block == number
        owners = present[:, at.nonzero()[0, 0]]
        if owners.any():
            found[at] = combined(points[owners][:, at])
    return found.view(stack.shape[1:]).to(stack.dtype)


def _geometric_median(points: Tensor) -> Tensor:
    """Weiszfeld's iteration, with distances smoothed as in Pillutla et al., from the coordinate-wise median."""
    centre = _without_ends(points, 0.5)
    for _ in range(_STEPS):
        distances = (points - centre).norm(dim=1)
        scale = distances.median()
        if scale == 0:  # where most are
            break
        pulls = 1 / distances.clamp(min=_CLOSE * scale)
        moved = (pulls / pulls.sum()) @ points
        step, centre = (moved - centre).norm(), moved
        if step <= _CLOSE * scale:
            break
    return centre


def _krum(points: Tensor, trim: float, several: bool) -> Tensor:
    """Blanchard et al., section 4; clients that score alike count alike."""
    clients = len(points)
    if clients == 1:
        return points[0]
    liars = int(trim * clients)
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").square()
    nearest = distances.sort(1).values[:, 1 : 1 + max(1, clients - liars - 2)]  # the first is the client itself
    scores = nearest.sum(1)
    return points[scores <= scores.kthvalue(clients - liars if several else 1).values].mean(0)
