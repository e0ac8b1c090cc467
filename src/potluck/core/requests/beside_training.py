"""What a method asks the engine to compute beside training: forward passes, gradients, BatchNorm's statistics.

As with `Fit`, a client yields the request and receives the result; the server calls a method:

    logits = yield Predict(client.model, examples)          # in a handler
    logits = server.predict(Predict(net, examples))         # in `round`

All are computed on the run's device, in its precision and memory layout.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from potluck.core.ground.fields import Checked, at_least
from potluck.core.ground.inputs import Inputs
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import Extras, Objective, Request, check_frozen

NetPart = Literal["extracted", "features", "exits", "outputs"]
"""Outputs of parts of a net: of its extractor; of its last stage (the input of its head); of a staged net's exits,
(n, exits, ...), the net's own last; of the whole net."""


@runtime_checkable
class Parted(Protocol):
    """A net that can return its parts' outputs; `potluck.models.contract.StagedNet` is one."""

    def part_outputs(self, x: Inputs) -> Mapping[NetPart, Tensor]:
        """The output of each part for inputs (batch, ...)."""
        ...


@dataclass(eq=False)
class Predict(Request, Checked):
    """A request for forward passes: evaluation mode, no gradient, stored order, no augmentation.

    The result is a tensor (n, ...) if `parts` is one name, else a tuple of tensors in the order of `parts`; float32
    also if the run computes in lower precision.

    Attributes:
        net: its mode and buffers are unchanged afterwards.
        examples: the inputs.
        parts: what to return, see `NetPart`; anything but "outputs" needs a net that can be split.
        batch_size: examples in one forward pass.
    """

    kind = "predict"
    net: nn.Module
    examples: Examples
    parts: NetPart | tuple[NetPart, ...] = "outputs"
    batch_size: Annotated[int, at_least(1)] = 100


@dataclass(eq=False)
class Gradient(Request, Checked):
    """A request for the mean gradient of an objective over examples, without training.

    The net is in training mode, but running statistics do not change; examples are not augmented. The result is the
    gradient of each parameter that is not frozen, by name; zeros if the objective does not depend on it.

    Attributes:
        net: the gradient is taken of its parameters.
        objective: as in a `Fit`; must be a mean over its batch. Its observations are dropped.
        data: the examples, in stored order.
        extras: the objective's third argument.
        frozen: nets that the objective reads, as in a `Fit`.
        batch_size: examples in one forward pass, which BatchNorm normalises together.
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
class NormStatistics(Request, Checked):
    """A request to measure BatchNorm's running statistics for the net's current weights, see `measure_statistics`.

    The net's buffers are set in place. The result is the number of batches measured.

    Attributes:
        net: runs in training mode, without gradients.
        data: in random order, not augmented.
        batch_size: examples normalised together.
        layers: which layers' statistics are measured, "all" or those that are "unlearnt"; without such, nothing is run.
    """

    kind = "measure"
    net: nn.Module
    data: Examples
    batch_size: Annotated[int, at_least(1)] = 64
    layers: Literal["all", "unlearnt"] = "all"
