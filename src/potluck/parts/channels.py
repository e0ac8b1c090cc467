"""A question for `server.about`: which channels of a net a narrower one of the same kind may take.

Channels that belong together, because one layer reads what others have written, are found by tracing, see
`potluck.core.nets.slicing`. Leading slices agree by themselves where layers keep the order of their channels; windows
that roll and sets that are drawn must be the same wherever the channels occur.
"""

from dataclasses import dataclass, field

from torch import Size, nn

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.inputs import InputShape
from potluck.core.nets.slicing import Channels, NoSlices, channels_to, cut_by
from potluck.core.nets.weights import tensors_of


@dataclass(frozen=True)
class Narrowing:
    """A question for `server.about`: the channels of a net that is cut to these shapes.

    Attributes:
        shapes: of the narrower net's parameters and buffers, by name.
        narrow: the narrower net.
    """

    shapes: tuple[tuple[str, Size], ...]
    narrow: nn.Module = field(compare=False)

    @classmethod
    def to(cls, narrow: nn.Module) -> "Narrowing":
        """The cut to this net's shapes."""
        return cls(tuple((name, tensor.shape) for name, tensor in tensors_of(narrow).items()), narrow)

    def __call__(self, net: nn.Module, input_shape: InputShape) -> Channels:
        """The net's channels.

        Raises:
            ConfigError: some layer reads channels in an order of its own, or cannot be followed.
        """
        if (cut := cut_by(self.narrow)) is not None:
            return cut.channels
        try:
            return channels_to(net, self.narrow, input_shape)
        except NoSlices as problem:
            raise ConfigError(
                f"{type(net).__name__}: the channels of its layers cannot change places: {problem};"
                " choose another model"
            ) from problem
