"""The energy that this machine's processors take, where Linux tells it.

It counts whole packages, all cores and caches of a processor, and so whatever else the machine does meanwhile; neither
graphics cards nor, on most machines, memory. Only reading tells: nothing is asked of a machine that has no counters.
"""

from dataclasses import dataclass
from pathlib import Path

from potluck.engine.answers.events import ClientEnd
from potluck.experiment.watching.observers import Observer

COUNTERS = Path("/sys/class/powercap")
_PACKAGE = "package"  # others count parts of one, or the whole board besides
_MICRO = 1e-6


@dataclass(frozen=True)
class Counter:
    """One package's counter, in microjoules, which begins again after `span`."""

    path: Path
    span: int

    @classmethod
    def at(cls, folder: Path) -> "Counter | None":
        """The counter in a folder; None if it is no package's, or may not be read."""
        try:
            if not (folder / "name").read_text().startswith(_PACKAGE):
                return None
            found = cls(folder / "energy_uj", int((folder / "max_energy_range_uj").read_text()))
            found.read()
        except (OSError, ValueError):
            return None
        return found

    def read(self) -> int:
        """The counter now."""
        return int(self.path.read_text())


class EnergyMeter(Observer):
    """Adds up what the packages take; it looks after every client, so that no counter goes round twice unseen.

    Args:
        place: the folder of the counters.
    """

    def __init__(self, place: Path | None = None) -> None:
        folders = sorted((COUNTERS if place is None else place).glob("intel-rapl:*"))
        self._counters = [counter for folder in folders if (counter := Counter.at(folder))]
        self._last: list[int] = []
        self._joules = 0.0

    @property
    def counts(self) -> bool:
        """Whether this machine tells."""
        return bool(self._counters)

    def on_client_end(self, event: ClientEnd) -> None:
        """Look."""
        self._look()

    def take(self) -> float | None:
        """Joules since this was last asked; None at first, and where the machine does not tell."""
        known = bool(self._last)
        self._look()
        joules, self._joules = self._joules, 0.0
        return joules if known and self._counters else None

    def _look(self) -> None:
        try:
            now = [counter.read() for counter in self._counters]
        except (OSError, ValueError):
            self._counters, now = [], []
        spans = (counter.span for counter in self._counters)
        for before, after, span in zip(self._last, now, spans, strict=False):
            self._joules += (after - before + (span if after < before else 0)) * _MICRO
        self._last = now
