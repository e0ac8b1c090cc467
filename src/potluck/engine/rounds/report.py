"""What an engine records of a round, and the place of an exchange in it."""

from dataclasses import dataclass, field
from statistics import fmean

from potluck.core.federation import ClientId
from potluck.core.message import Traffic
from potluck.core.roles import Failure, Server


@dataclass(frozen=True)
class WorkDone:
    """What one client's part in an exchange took, or the server's in a round.

    Attributes:
        exchange: its number within the round, from 1; 0 for the server.
        client: None for the server.
        flops: of what its handler requested, see `potluck.engine.client.costs`; None if it failed or does not say.
        memory: the most bytes of tensors that were there at once; None likewise.
        bytes_down: payload sent to it.
        bytes_up: payload of its reply; 0 if it failed.
    """

    exchange: int
    client: ClientId | None
    flops: int | None
    memory: int | None
    bytes_down: int = 0
    bytes_up: int = 0


@dataclass
class SumsReport:
    """What secure sums of a round came to, all exchanges together.

    Attributes:
        summed: numbers of the server's tensors that were summed.
        local: those that stayed with their clients, since too few of an exchange have them.
        lost: those that were not summed, since too few of those who have them were there to the end.
        clipped: numbers of clients that were larger than the largest allowed.
        refused: exchanges in which nothing was summed, since too few clients were there.
        bytes_down: what the server sent for the sums, all clients together.
        bytes_up: what they answered, their masked numbers included.
        clients: how many times a client took part in an exchange's sums.
    """

    summed: int = 0
    local: int = 0
    lost: int = 0
    clipped: int = 0
    refused: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    clients: int = 0


@dataclass
class RoundReport:
    """What the engine recorded of one round.

    Attributes:
        cohort: the clients drawn.
        replied: those that answered every exchange in which they took part.
        failures: by client, the failures of the others.
        losses: by client, the mean loss of each fit on its own training examples.
        seconds_local: time spent in client calls.
        lost: why the round was lost, that is, changed neither the server's state nor any client's; None if it was not.
        undone: the number of the round that was undone with it, if one was.
        outlier: the client whose reply everybody else diverged on, if one is named.
        server_notes: numbers that the server's half of the method reported; empty if the round was lost.
        client_notes: by client, those that its handlers reported.
        work: of each client in each exchange, and of the server.
        stale: of an asynchronous round, by client whose reply is stale, how many rounds have closed since it was asked.
        secure: what secure sums came to; None if the run has none.
    """

    cohort: list[ClientId]
    traffic: Traffic = field(default_factory=Traffic)
    failures: dict[ClientId, Failure] = field(default_factory=dict)
    losses: dict[ClientId, list[float]] = field(default_factory=dict)
    seconds_local: float = 0.0
    lost: str | None = None
    undone: int | None = None
    outlier: ClientId | None = None
    server_notes: dict[str, float] = field(default_factory=dict[str, float])
    client_notes: dict[ClientId, dict[str, float]] = field(default_factory=dict[ClientId, dict[str, float]])
    work: list[WorkDone] = field(default_factory=list[WorkDone])
    stale: dict[ClientId, int] = field(default_factory=dict[ClientId, int])
    secure: SumsReport | None = None

    @property
    def replied(self) -> list[ClientId]:
        """The clients of the cohort that did not fail."""
        return [id for id in self.cohort if id not in self.failures]

    @property
    def late(self) -> list[ClientId]:
        """The clients whose replies came too late, or who were still at work on what had."""
        return sorted(client for client, failure in self.failures.items() if failure.late)

    @property
    def loss_local(self) -> float | None:
        """Mean over clients of the mean loss of their fits."""
        return fmean(map(fmean, self.losses.values())) if self.losses else None

    @property
    def notes(self) -> dict[str, float]:
        """The server's notes, and as `clients/NAME` the mean of each note over the clients that made it."""
        by_name: dict[str, list[float]] = {}
        for _, notes in sorted(self.client_notes.items()):
            for name, value in notes.items():
                by_name.setdefault(f"clients/{name}", []).append(value)
        means = {name: fmean(values) for name, values in by_name.items()}
        return dict(sorted((self.server_notes | means).items()))


@dataclass
class ExchangePlace:
    """The place of an exchange in the run, and the handler whose replies are still to be read."""

    round: int
    exchange: int
    report: RoundReport
    server: Server
    unread: str | None = None
