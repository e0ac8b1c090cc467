"""How much of a full net is built: narrower, shallower, or both."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from potluck.core.errors import ConfigError


@dataclass(frozen=True)
class Scale:
    """The part of a full net that a builder makes.

    Builders take it as one argument, `scale`, since families and users' own models have a `width` and a `depth`
    among their options, which say how large the full net is.

    Attributes:
        width: share of the channels of every hidden layer, above 0 and at most 1. Tensors of the narrower net are
            slices of the full one's.
        depth: how many blocks are left, counted from the input; None for all. The shallower net ends in an exit behind
            the last of them.

    Raises:
        ConfigError: either is outside its range.
    """

    width: float = 1.0
    depth: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.width <= 1:
            raise ConfigError(f"width {self.width:g}; expected a share of the channels, more than 0 and at most 1")
        if self.depth is not None and self.depth < 1:
            raise ConfigError(f"depth {self.depth}; expected at least 1 block")

    def __str__(self) -> str:
        parts = [f"width {self.width:g}"] * (self.width != 1) + [f"depth {self.depth}"] * (self.depth is not None)
        return " and ".join(parts) or "full size"

    def of(self, channels: int) -> int:
        """How many are left of this number of channels: ceil(width * channels).

        Raises:
            ConfigError: there are none to begin with.
        """
        if channels < 1:
            raise ConfigError(f"width {channels}; expected at least 1")
        return math.ceil(self.width * channels)


FULL = Scale()


def built(builder: Callable[..., nn.Module], scale: Scale, architecture: str) -> nn.Module:
    """What a builder makes at this scale.

    Args:
        builder: is called without arguments for the full net, and with `scale` for any other.
        scale: of the net.
        architecture: its name, for the error.

    Raises:
        ConfigError: the builder takes no `scale`, or does not build the net at this one.
    """
    if scale == FULL:
        return builder()
    if not _takes_scale(builder):
        raise ConfigError(
            f"{architecture}: cannot be built at {scale}, since its builder takes no `scale`;"
            " choose another model, or give its builder one"
        )
    return builder(scale=scale)


def _takes_scale(builder: Callable[..., nn.Module]) -> bool:
    parameters = inspect.signature(builder).parameters
    return "scale" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
