"""A client's budgets beside what its round takes."""

from dataclasses import dataclass

from potluck.experiment.settings.budget import Budget

_MIB, _MEGABIT = 2**20, 10**6


@dataclass(frozen=True)
class Taken:
    """What a client's round takes.

    Attributes:
        memory: bytes that its process held at most, beyond its floor.
        seconds: of this machine's processor.
        gflops: this machine's speed at that time.
        down: bytes that it received.
        up: bytes that it sent.
        disk: bytes of its examples, the largest message, and its state.
        floor: bytes of the process before it had anything of the client's.
    """

    memory: int
    seconds: float
    gflops: float
    down: int
    up: int
    disk: int
    floor: int


@dataclass(frozen=True)
class Allowance:
    """One of a client's budgets, and what a candidate needs of it, in the same unit."""

    name: str
    unit: str
    has: float
    needs: float

    @property
    def is_kept(self) -> bool:
        """Whether it suffices."""
        return self.needs <= self.has

    @property
    def excess(self) -> str:
        """By how much it is exceeded, in words."""
        return f"{self.name} {self.needs:.4g} of {self.has:.4g} {self.unit}, {self.needs - self.has:.3g} too much"


def limits(budget: Budget, taken: Taken) -> list[Allowance]:
    """Every limit of a budget, with what a round needs of it."""
    found = [
        ("memory", "MiB", budget.memory_mib, taken.memory / _MIB),
        ("seconds", "s", budget.seconds, seconds_on(budget, taken)),
        ("disk", "MiB", budget.disk_mib, taken.disk / _MIB),
    ]
    return [Allowance(name, unit, has, needs) for name, unit, has, needs in found if has is not None]


def seconds_on(budget: Budget, taken: Taken) -> float:
    """An estimate of a round's seconds on the device: this machine's by both speeds, and those of messages."""
    slower = 1.0 if budget.gflops is None else taken.gflops / budget.gflops
    return taken.seconds * slower + download(budget, taken) + _transfer(taken.up, budget.up_mbit)


def download(budget: Budget, taken: Taken) -> float:
    """Seconds to receive a round's messages; 0 if the bandwidth is not known."""
    return _transfer(taken.down, budget.down_mbit)


def clients_of(budget: Budget) -> str:
    """The clients of a budget and their device, in words."""
    first, last = budget.clients[0], budget.clients[-1]
    clients = f"client {first}" if len(budget.clients) == 1 else f"clients {first} to {last}"
    return f"{clients} ({budget.device})" if budget.device else clients


def _transfer(count: int, megabits: float | None) -> float:
    return 0.0 if megabits is None else count * 8 / megabits / _MEGABIT
