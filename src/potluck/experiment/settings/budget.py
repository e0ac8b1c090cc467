"""What a client's device can do: the budgets that models are assigned by, and that a run is watched for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from potluck.core.federation import ClientId
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.fields import Checked, above, at_least, require

_Amount = Annotated[float, above(0)]


@dataclass(frozen=True)
class Budget(Checked):
    """What a client's round may take, and how fast its device is; of several clients, if theirs are alike.

    Attributes:
        clients: whose it is.
        device: what it is called in messages.
        memory_mib: the most memory in training, beside what Python, torch and Potluck take by themselves.
        seconds: the longest round, with what is sent and received if the bandwidth is known.
        gflops: the device's sustained speed in fp32, by which seconds of another machine are converted; None counts
            seconds as they are.
        down_mbit: its bandwidth in Mbit/s for what it receives; None counts no time for it.
        up_mbit: likewise for what it sends.
        disk_mib: the most on its disk: its examples, a message, and its state from round to round.
    """

    clients: tuple[Annotated[int, at_least(0)], ...]
    device: str = ""
    memory_mib: _Amount | None = None
    seconds: _Amount | None = None
    gflops: _Amount | None = None
    down_mbit: _Amount | None = None
    up_mbit: _Amount | None = None
    disk_mib: _Amount | None = None

    def __post_init__(self) -> None:
        require(len(self.clients) > 0, "clients", "at least one", self.clients)


def check_budgets(budgets: Sequence[Budget], clients: int, where: str) -> None:
    """Check that budgets are of the federation's clients, and of each at most one.

    Raises:
        ConfigError: they are not.
    """
    seen = set[ClientId]()
    for budget in budgets:
        for client in budget.clients:
            if client >= clients:
                raise ConfigError(f"{where}: found client {client}; expected clients from 0 to {clients - 1}")
            if client in seen:
                raise ConfigError(f"{where}: client {client} has two budgets; expected one for each client")
            seen.add(client)
