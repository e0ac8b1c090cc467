"""Which tensors of clients' networks meet when layers are averaged by name: those of layers that others have too.

Clients of one architecture have all of them in common, so everything is worked out by architecture, whatever the number
of clients.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass

from torch import Size, nn

from potluck.core.nets.weights import in_common, parameters_of

TrainedTensor = tuple[str, Size]
"""A trained tensor's name and shape; tensors meet if both agree, in layers that do, see `in_common`."""


@dataclass(frozen=True)
class Meeting:
    """The clients of one architecture, and whose tensors theirs meet.

    Attributes:
        architecture: its name.
        clients: how many have it.
        partners: by trained tensor, the architectures whose clients have it too; itself if several clients have it.
    """

    architecture: str
    clients: int
    partners: Mapping[TrainedTensor, tuple[str, ...]]

    @property
    def weights(self) -> int:
        """How many weights the network trains."""
        return sum(shape.numel() for _, shape in self.partners)

    @property
    def weights_met(self) -> int:
        """How many of them another client has too."""
        return sum(shape.numel() for (_, shape), others in self.partners.items() if others)


def meetings(
    nets: Mapping[str, nn.Module],
    assigned: Iterable[str],
    *,
    across: bool = True,
    staying: Callable[[nn.Module], Container[str]] = lambda net: (),
) -> list[Meeting]:
    """Whom the clients of each architecture meet, in order of the architectures' names.

    Args:
        nets: a network of each architecture.
        assigned: the architecture of every client.
        across: whether tensors meet across architectures; otherwise only among clients of one.
        staying: the names of a network's tensors that stay at its clients.
    """
    clients = Counter(assigned)
    trained = {
        name: {n: t.shape for n, t in parameters_of(nets[name]).items() if n not in staying(nets[name])}
        for name in sorted(clients)
    }
    partners: dict[str, dict[TrainedTensor, tuple[str, ...]]] = {}
    for name, shapes in trained.items():
        others = [other for other in (trained if across else [name]) if other != name or clients[name] > 1]
        shared = {other: in_common(shapes, trained[other]) for other in others}
        partners[name] = {
            (tensor, shape): tuple(other for other in others if tensor in shared[other])
            for tensor, shape in shapes.items()
        }
    return [Meeting(name, clients[name], partners[name]) for name in trained]
