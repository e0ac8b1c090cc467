"""A distribution over the next token at each position."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from potluck.core.tasks.counting import ROUNDING, zero_counts
from potluck.core.tasks.metric import ACCURACY, Metric, Values
from potluck.core.tasks.targets import IGNORED, range_fault, that_count, token_cross_entropy
from potluck.core.tasks.task import Criterion, Sums, Task

_LARGEST_LOSS = 1e4  # of a token, likewise
_LARGEST_EXPONENT = 700.0  # exp of it is finite


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
        return token_cross_entropy

    def fault(self, targets: Tensor, width: int) -> str | None:
        """Anything but tokens."""
        return self.form_fault(targets) or range_fault(torch.where(targets == IGNORED, 0, targets), 0, width - 1)

    def width_for(self, targets: Tensor) -> int:
        """One more than the largest token."""
        return max(int(targets.max()), 0) + 1

    def zeros(self, width: int) -> dict[str, Tensor]:
        """See `sums`."""
        return {**zero_counts({"tokens": (), "right": ()}), "loss": torch.zeros((), dtype=torch.float64)}

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The numbers of tokens that count and of those predicted correctly, and the sum of their losses in nats."""
        outputs, targets = that_count(outputs, targets)
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
        return None if least <= loss * (1 + ROUNDING) <= most * (1 + ROUNDING) ** 2 else "loss contradicts right"

    def values(self, sums: Sums) -> Values:
        """All None if there are no tokens."""
        if not (tokens := int(sums["tokens"])):
            return {metric.name: None for metric in self.metrics}
        perplexity = math.exp(min(float(sums["loss"]) / tokens, _LARGEST_EXPONENT))
        return {"perplexity": perplexity, "accuracy": int(sums["right"]) / tokens}
