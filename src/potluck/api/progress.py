"""How a run goes, in a notebook or a terminal."""

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from potluck.engine.events import ClientEnd
from potluck.experiment.observers import Observer, RunEnd, RunStart
from potluck.records import Metric, RoundRecord

_EVERY = 0.2  # seconds between two pictures, unless a round has ended
_WIDTH = 24  # of a bar of text


class Progress(Observer):
    """One line: rounds, clients of the current one, the primary metric, and megabytes sent."""

    may_fail = True

    def __init__(self, show: Callable[[float, str], None]) -> None:
        self._show = show
        self._shown = 0.0
        self._method, self._rounds, self._done = "", 1, 0
        self._metric, self._megabytes, self._part = "", 0.0, 0.0
        self._primary: Metric | None = None

    def on_run_start(self, event: RunStart) -> None:
        """The first picture."""
        self._method, self._rounds, self._done = event.method, event.rounds, event.rounds_done
        self._primary = event.metric
        self._draw("training", force=True)

    def on_client_end(self, event: ClientEnd) -> None:
        """A client more."""
        self._part = event.done / event.of if event.work == "training" else 1.0
        self._draw(f"{event.work}, {event.done} of {event.of} clients")

    def on_round_end(self, event: RoundRecord) -> None:
        """A round more."""
        self._done, self._part = event.round, 0.0
        self._megabytes += (event.bytes_down + event.bytes_up) / 10**6
        if self._primary and (value := event.value("personal", self._primary.name)) is not None:
            self._metric = f", {self._primary.label} {self._primary.text(value)}"
        self._draw("", force=True)

    def on_run_end(self, event: RunEnd) -> None:
        """The last picture."""
        self._draw(event.status, force=True)

    def _draw(self, now: str, *, force: bool = False) -> None:
        if not force and time.monotonic() - self._shown < _EVERY:
            return
        self._shown = time.monotonic()
        share = (self._done + self._part * 0.9) / self._rounds if self._done < self._rounds else 1.0
        text = f"{self._method}: round {self._done} of {self._rounds}{self._metric}, {self._megabytes:.1f} MB"
        self._show(share, f"{text}{f'; {now}' if now else ''}")


def progress() -> Progress | None:
    """A display for where this code runs; None where nobody looks: output in a file or a pipe."""
    if (show := _in_notebook()) is not None:
        return Progress(show)
    if sys.stderr.isatty():
        return Progress(_Line(sys.stderr).show)
    return None


class _Line:
    """A line of a terminal that is written again and again."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, share: float, text: str) -> None:
        """Draw it; the last picture stays."""
        full = round(share * _WIDTH)
        ends = text.rpartition("; ")[2] in ("finished", "failed", "interrupted")
        self._stream.write(f"\r\x1b[K[{'#' * full}{'.' * (_WIDTH - full)}] {text}{chr(10) if ends else ''}")
        self._stream.flush()


def _in_notebook() -> Callable[[float, str], None] | None:
    """A function that draws in the output of the notebook's current cell; None outside of notebooks."""
    shell: Any = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from html import escape

    from IPython.display import HTML, display  # pyright: ignore

    made: list[Any] = []

    def show(share: float, text: str) -> None:
        page = HTML(f'<progress value="{share:.3f}" max="1"></progress> {escape(text)}')
        if made:
            made[0].update(page)
        else:
            made.append(display(page, display_id=True))

    return show
