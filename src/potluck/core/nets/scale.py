"""How much of a full net is built: narrower, shallower, or both."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch import nn

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.inputs import InputShape
from potluck.core.nets.classes import OwnHead, with_classes
from potluck.core.nets.entrance import with_entrance
from potluck.core.nets.slicing import Cut, NoSlices, cut_of
from potluck.core.nets.splitting import Splits

B = TypeVar("B", bound=Callable[..., nn.Module])

_COLLECTS, _CUT = "_potluck_collects", "_potluck_cut"  # attributes of builders
_ROUNDING = 1e-9  # 0.07 * 100 is a little more than 7


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
        """How many are left of this number of channels: ceil(width * channels), up to the rounding of the product.

        Raises:
            ConfigError: there are none to begin with.
        """
        if channels < 1:
            raise ConfigError(f"width {channels}; expected at least 1")
        return max(math.ceil(self.width * channels - _ROUNDING), 1)


FULL = Scale()


class Cuts:
    """How the nets of a federation are made narrower whose builders take no `scale`; each is worked out once.

    Args:
        input_shape: of one example.
    """

    def __init__(self, input_shape: InputShape) -> None:
        self._input_shape = input_shape
        self._known: dict[tuple[str, float], Cut] = {}

    def of(self, builder: Callable[..., nn.Module], width: float, architecture: str) -> Cut:
        """The cut of an architecture to this width.

        Raises:
            NoSlices: see `potluck.core.nets.slicing.cut_of`.
        """
        if (architecture, width) not in self._known:
            net = with_entrance(builder(), self._input_shape)
            self._known[architecture, width] = cut_of(net, Scale(width).of, self._input_shape)
        return self._known[architecture, width]


def built(builder: Callable[..., nn.Module], scale: Scale, architecture: str, cuts: Cuts, splits: Splits) -> nn.Module:
    """What a builder makes at this scale, or the narrower net that is cut out of what it makes.

    Args:
        builder: is called without arguments for the full net, and with `scale`, if it takes that, for any other.
        scale: of the net.
        architecture: its name, for the error.
        cuts: of nets whose builders take no `scale`. Their narrower nets begin with values of the full net.
        splits: of nets that do not say themselves how they are split; see `cutting_at`.

    Raises:
        ConfigError: the builder takes no `scale` and the net cannot be cut, or does not build the net at this one, or
            anything but a network.
    """
    own, builder = (builder, builder.builder) if isinstance(builder, OwnHead) else (None, builder)
    net = with_entrance(_made(builder, scale, architecture, cuts), splits.input_shape)
    splits.remember(net, (architecture, scale), cut_marked(builder), builder)
    return net if own is None else with_classes(net, own.classes)


def _made(builder: Callable[..., nn.Module], scale: Scale, architecture: str, cuts: Cuts) -> nn.Module:
    if scale == FULL:
        return _network(builder(), architecture)
    if takes_scale(builder):
        return _network(builder(scale=scale), architecture)
    if scale.depth is not None:
        raise ConfigError(
            f"{architecture}: cannot be built at {scale}, since its builder takes no `scale`;"
            " choose another model, or give its builder one"
        )
    net = builder()
    try:
        return cuts.of(builder, scale.width, architecture).of(net)
    except NoSlices as problem:
        raise NoSlices(
            f"{architecture}: cannot be built at {scale}: {problem};"
            " choose another model, or give its builder a `scale`"
        ) from problem


def _network(made: object, architecture: str) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"model {architecture}: its builder returned {type(made).__name__}; expected a torch.nn.Module: return the"
            " network"
        )
    return made


def takes_scale(builder: Callable[..., nn.Module]) -> bool:
    """Whether a builder makes narrower or shallower nets itself, when it is called with `scale`."""
    parameters = inspect.signature(builder).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return "scale" in parameters or (anything and not collects_options(builder))


def collects_options(builder: Callable[..., nn.Module]) -> bool:
    """Whether a builder hands options of any name to another library, which knows no `scale`."""
    return getattr(builder.func if isinstance(builder, partial) else builder, _COLLECTS, False)


def cutting_at(builder: B, cut: tuple[str, ...]) -> B:
    """Mark a builder with where its nets are cut, see `potluck.core.nets.splitting.make_plan`."""
    setattr(builder, _CUT, cut)
    return builder


def cut_marked(builder: Callable[..., nn.Module]) -> tuple[str, ...]:
    """Where a builder's nets are cut, if it is marked with that; else nothing."""
    return getattr(builder, _CUT, ())


def collecting_options(builder: B) -> B:
    """Mark a builder as one of which `collects_options` is true."""
    setattr(builder, _COLLECTS, True)
    return builder
