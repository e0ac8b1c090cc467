"""What a network's outputs mean: the training loss, the form of targets, and the metrics.

A task measures by *sums*: tensors that add up over batches and over clients, and from which every metric follows. The
sums of two halves of some data, added, are those of the whole, so a client reports sums and keeps its predictions, and
a metric over all clients' examples is exact although no party has them all. Counts are int64 and add up exactly; the
others are float64 and add up to rounding.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from potluck.core.ground.errors import DataError
from potluck.core.ground.inputs import Inputs, first_of
from potluck.core.tasks.metric import Metric, Values
from potluck.core.tasks.targets import kind_fault

Criterion = Callable[[Tensor, Tensor], Tensor]
Sums = Mapping[str, Tensor]


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
        return kind_fault(targets, self.dtypes, self.axes)

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

    def output_shape(self, inputs: Inputs, width: int) -> tuple[int, ...]:
        """The shape that outputs must have for a batch of prepared inputs (n, ...), of named ones for the first."""
        first = first_of(inputs)
        return (*first.shape[:2], width) if self.by_position else (len(first), width)

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


def added(first: Sums, second: Sums) -> dict[str, Tensor]:
    """The sums over the examples of both."""
    return {name: total + second[name] for name, total in first.items()}
