"""Numbers for each example."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from potluck.core.tasks.counting import ROUNDING, zero_counts
from potluck.core.tasks.metric import Metric, Values
from potluck.core.tasks.targets import width_fault
from potluck.core.tasks.task import Criterion, Sums, Task

_LARGEST_ERROR = 1e18  # predictions beyond it, and NaN, count as this error, so that sums stay finite


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
        found = self.form_fault(targets) or width_fault(width, self.width_for(targets))
        return found or (None if bool(targets.isfinite().all()) else "hold NaN or infinity")

    def width_for(self, targets: Tensor) -> int:
        """The numbers of one example."""
        return 1 if targets.dim() == 1 else targets.shape[1]

    def zeros(self, width: int) -> dict[str, Tensor]:
        """See `sums`."""
        names = ("absolute", "squared", "target", "target_squared")
        return {**zero_counts({"examples": ()}), **{name: torch.zeros(width, dtype=torch.float64) for name in names}}

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
            if bool((squares < 0).any()) or bool((whole.square() > examples * squares * (1 + ROUNDING)).any()):
                return f"{second} is too small for {first}"
        absolute, squared = sums["absolute"], sums["squared"]
        if bool((absolute < 0).any()) or bool((squared > absolute.square() * (1 + ROUNDING)).any()):
            return "absolute is too small for squared"
        return None

    def values(self, sums: Sums) -> Values:
        """All None if there are no examples; R2 also if all targets are equal."""
        if not (count := int(sums["examples"])):
            return {metric.name: None for metric in self.metrics}
        around_mean = sums["target_squared"] - sums["target"].square() / count
        spread = bool((around_mean > ROUNDING**2 * sums["target_squared"]).all())
        return {
            "mae": float(sums["absolute"].mean()) / count,
            "rmse": float((sums["squared"] / count).sqrt().mean()),
            "r2": float((1 - sums["squared"] / around_mean).mean()) if spread else None,
        }


def _squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets.reshape(outputs.shape).to(outputs.dtype))
