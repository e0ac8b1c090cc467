"""A run that knows its clients' budgets says which client's round took more than it may, in the log and for the report.

Memory is what the client's calls took in the run's own processes, with its examples; it is the same measure as that of
`potluck plan`, but for parts of libraries that the process has used before. Seconds are converted as there.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from potluck.core.federation import ClientId, Federation
from potluck.core.ground.text import ON_SCREEN
from potluck.engine.client.runtime import ClientRuntime
from potluck.engine.disk.files import write_atomically
from potluck.engine.executors.choice import ChosenExecutor
from potluck.engine.executors.metered import Meter, Metered, Metering
from potluck.engine.executors.workers import Workers
from potluck.engine.numerics.footprint import settled
from potluck.engine.numerics.speed import sustained_gflops
from potluck.experiment.budgets.apart import Belongings, stored_bytes
from potluck.experiment.budgets.limits import Allowance, Taken, limits
from potluck.experiment.settings.budget import Budget
from potluck.experiment.watching.observers import Observer, RoundStart, RunStart
from potluck.records import BUDGETS, RoundRecord

log = logging.getLogger(__name__)
_CAN = ("sequential", "workers")


class BudgetWatch(Observer):
    """Compares what clients' rounds take with their budgets.

    Args:
        budgets: of the clients.
        federation: whose clients they are.

    Attributes:
        problem: why nothing is measured; None if it is.
    """

    def __init__(self, budgets: Sequence[Budget], federation: Federation) -> None:
        self.problem: str | None = None
        self._budgets = {client: budget for budget in budgets for client in budget.clients}
        self._federation = federation
        self._gflops = 0.0
        self._folder: Path | None = None
        self._current: dict[ClientId, Taken] = {}
        self._found: dict[str, dict[str, Any]] = {}

    def watched(self, choice: ChosenExecutor, fresh: Callable[[], ClientRuntime]) -> ChosenExecutor:
        """The executor with its calls metered; the same one, and a `problem`, where that cannot be.

        Args:
            choice: the executor.
            fresh: makes a runtime of its clients.
        """
        if choice.name not in _CAN:
            self.problem = f"clients' work is {choice.name}; expected run.executor 'sequential' or 'workers'"
        elif settled() is None:
            self.problem = "this system does not tell how much memory a process holds; expected Linux"
        if self.problem is not None:
            self.problem = f"run.budgets: it is not measured what clients take: {self.problem}"
            return choice
        inner = Metered(fresh)
        carried = inner if choice.name == "sequential" else Workers(choice.processes, inner)
        return replace(choice, executor=Metering(carried, self.note))

    def note(self, client: ClientId, meter: Meter) -> None:
        """Add what one call of a client's round took."""
        own = Belongings.of(self._federation, client).nbytes
        stored = own + stored_bytes(self._federation.sites[client].test)
        memory, disk = (meter.memory or 0) + own, stored + meter.down + meter.kept
        before = self._current.get(client, Taken(0, 0.0, self._gflops, 0, 0, 0, 0))
        self._current[client] = replace(
            before,
            memory=max(before.memory, memory),
            seconds=before.seconds + meter.seconds,
            down=before.down + meter.down,
            up=before.up + meter.up,
            disk=max(before.disk, disk),
        )

    def on_run_start(self, event: RunStart) -> None:
        """Measure this machine, if seconds are to be converted; go on from what was found before."""
        self._folder = event.folder
        if self.problem is None and any(one.seconds and one.gflops for one in self._budgets.values()):
            self._gflops = sustained_gflops()
        if event.folder is not None and event.rounds_done and (event.folder / BUDGETS).is_file():
            self._found = json.loads((event.folder / BUDGETS).read_text(encoding="utf-8"))["exceeded"]
        self._write()

    def on_round_start(self, event: RoundStart) -> None:
        """Forget what an undone round took."""
        self._current = {}

    def on_round_end(self, event: RoundRecord) -> None:
        """Compare, and warn of each budget that a client exceeds for the first time."""
        broken = [
            (client, limit)
            for client, taken in sorted(self._current.items())
            if client in self._budgets
            for limit in limits(self._budgets[client], taken)
            if not limit.is_kept
        ]
        self._current = {}
        for client, limit in broken:
            self._note_broken(client, limit, event.round)
        if broken:
            self._write()

    def _note_broken(self, client: ClientId, limit: Allowance, number: int) -> None:
        device = self._budgets[client].device
        who = f"client {client} ({device})" if device else f"client {client}"
        found = self._found.get(f"{client} {limit.name}")
        if found is None:
            log.warning("round %d: %s exceeded its budget: %s", number, who, limit.excess, extra=ON_SCREEN)
            found = dict[str, Any](who=who, first=number, rounds=0, **asdict(limit))
        found |= {"rounds": found["rounds"] + 1, "needs": max(found["needs"], limit.needs)}
        self._found[f"{client} {limit.name}"] = found

    def _write(self) -> None:
        """Leave what was found in the run's folder, for its report."""
        if self._folder is not None and (self._found or self.problem):
            lines = [self.problem] if self.problem else [_line(one) for one in self._found.values()]
            content = json.dumps({"lines": lines, "exceeded": self._found}, indent=1)
            write_atomically(self._folder / BUDGETS, content.encode())


def _line(found: Mapping[str, Any]) -> str:
    """What was found of one client's budget, in words."""
    limit = Allowance(found["name"], found["unit"], found["has"], found["needs"])
    rounds = f"{found['rounds']} round{'s' * (found['rounds'] > 1)}, first in round {found['first']}"
    return f"{found['who']} exceeded its budget in {rounds}: {limit.excess} at most"
