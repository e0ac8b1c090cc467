"""Which tensors of clients' networks meet when layers are averaged by name: those that another client has too.

Clients of one architecture have all of them in common, so everything is worked out by architecture, whatever the number
of clients.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Size, nn

from potluck.core.nets.weights import parameters_of

TrainedTensor = tuple[str, Size]
"""A trained tensor's name and shape; tensors meet if both agree."""


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


def meetings(nets: Mapping[str, nn.Module], assigned: Iterable[str], *, across: bool = True) -> list[Meeting]:
    """Whom the clients of each architecture meet, in order of the architectures' names.

    Args:
        nets: a network of each architecture.
        assigned: the architecture of every client.
        across: whether tensors meet across architectures; otherwise only among clients of one.
    """
    clients = Counter(assigned)
    trained = {name: [(n, t.shape) for n, t in parameters_of(nets[name]).items()] for name in sorted(clients)}
    owners: dict[TrainedTensor, list[str]] = {}
    for name, tensors in trained.items():
        for tensor in tensors:
            owners.setdefault(tensor, []).append(name)

    def partners(name: str, tensor: TrainedTensor) -> tuple[str, ...]:
        others = owners[tensor] if across else [name]
        return tuple(other for other in others if other != name or clients[name] > 1)

    return [
        Meeting(name, clients[name], {tensor: partners(name, tensor) for tensor in tensors})
        for name, tensors in trained.items()
    ]
