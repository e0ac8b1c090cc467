"""What a method asks the engine to compute beside training: forward passes, gradients, BatchNorm's statistics.

As with `Fit`, a client yields the request and gets what was computed; the server calls for it:

    logits = yield Predict(client.model, examples)          # in a handler
    logits = server.predict(Predict(net, examples))         # in `round`

All are computed as the run computes, in its precision and layout.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from potluck.core.examples import Examples
from potluck.core.fields import Checked, at_least
from potluck.core.fit import Extras, Objective, Request, check_frozen

NetPart = Literal["extracted", "features", "exits", "outputs"]
"""What a staged net computes on its way: what its extractor gives, what its head reads, the outputs of all its exits
(n, exits, ...) with its own last, and those alone."""


@runtime_checkable
class Parted(Protocol):
    """A net that can say what its parts give; `potluck.models.contract.StagedNet` is one."""

    def part_outputs(self, x: Tensor) -> Mapping[NetPart, Tensor]:
        """What each part makes of inputs (batch, ...)."""
        ...


@dataclass(eq=False)
class Predict(Request, Checked):
    """A request for forward passes: evaluation mode, no gradient, stored order, no augmentation.

    It is answered by a tensor (n, ...) if `parts` is one name, and by a tuple of tensors in the order of `parts`
    otherwise. Where the run computes in a lower precision, they are widened to float32.

    Attributes:
        net: whose mode and buffers are left as they are.
        examples: to pass through it.
        parts: what to return, see `NetPart`; anything but "outputs" needs a staged net.
        batch_size: examples that pass together.
    """

    kind = "predict"
    net: nn.Module
    examples: Examples
    parts: NetPart | tuple[NetPart, ...] = "outputs"
    batch_size: Annotated[int, at_least(1)] = 100


@dataclass(eq=False)
class Gradient(Request, Checked):
    """A request for the mean gradient of an objective over examples, without training.

    The net is in training mode, but running statistics are left alone; examples are not augmented. It is answered by
    the gradient of each parameter that is not frozen, by name; zeros where the objective does not depend on it.

    Attributes:
        net: whose gradient is taken.
        objective: as in a `Fit`; must be a mean over its batch. What it observes is dropped.
        data: all of which is passed through, in stored order.
        extras: what the objective reads.
        frozen: nets that the objective reads, as in a `Fit`.
        batch_size: examples that pass together, and are normalised together by BatchNorm.
    """

    kind = "gradient"
    net: nn.Module
    objective: Objective
    data: Examples
    extras: Extras = field(default_factory=dict)
    frozen: Mapping[str, nn.Module] = field(default_factory=dict[str, nn.Module])
    batch_size: Annotated[int, at_least(1)] = 256

    def __post_init__(self) -> None:
        check_frozen(self.frozen, self.extras)
        super().__post_init__()


@dataclass(eq=False)
class Measure(Request, Checked):
    """A request to measure BatchNorm's running statistics for the net's weights as they are, see `measure_statistics`.

    The net's buffers are set in place. It is answered by the number of batches that were measured.

    Attributes:
        net: in training mode meanwhile, without gradients.
        data: in random order, not augmented.
        batch_size: examples that are normalised together.
    """

    kind = "measure"
    net: nn.Module
    data: Examples
    batch_size: Annotated[int, at_least(1)] = 64
