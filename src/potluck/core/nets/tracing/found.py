"""What tracing finds: the classes of channels of a net, and what keeps some of them together."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Size

FIXED = 0
"""The class of everything that keeps its number: inputs, outputs, and what an operation ties to them."""


class Unfollowed(Exception):
    """The net does something whose channels cannot be followed; the text says which layer, and what."""


class Written(NamedTuple):
    """Channels that one layer writes, or that one sum reads, in their order.

    Attributes:
        where: the layer's name.
        channels: their classes.
    """

    where: str
    channels: tuple[int, ...]


class Runs(NamedTuple):
    """Channels of which the first, the second, the third `unit` stay together and keep their order."""

    where: str
    channels: tuple[int, ...]
    unit: int


class Multiple(NamedTuple):
    """Channels whose number stays a multiple of `of`."""

    where: str
    channels: tuple[int, ...]
    of: int


@dataclass(frozen=True)
class Trace:
    """The classes of channels of a net.

    Attributes:
        axes: of every parameter and buffer by name, for each dimension the classes of its positions; None of a
            dimension that is no dimension of channels, or whose channels keep their number.
        written: what layers write, and what sums of products run over.
        runs: channels that go together in runs.
        multiples: channels that are counted in multiples.
        together: pairs of runs (numbers among `runs`) of which the same are kept, such as the inputs and the outputs of
            the groups of a convolution.
        heads: channels of a head by the name of the attention layer.
        grouped: names of the weights of convolutions in groups, whose second dimension counts within a group.
        normed: by the name of a norm, the classes of the channels that it counts, or of each dimension that it is over.
        classifier: names of the weights and biases whose rows are the net's outputs.
        outputs: shapes of the outputs on the two examples.
    """

    axes: Mapping[str, tuple[tuple[int, ...] | None, ...]]
    written: tuple[Written, ...]
    runs: tuple[Runs, ...]
    multiples: tuple[Multiple, ...]
    together: tuple[tuple[int, int], ...]
    heads: Mapping[str, int]
    grouped: frozenset[str]
    normed: Mapping[str, tuple[tuple[int, ...] | None, ...]]
    classifier: frozenset[str]
    outputs: tuple[Size, ...]
