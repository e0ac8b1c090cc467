"""How a run goes, in a notebook or a terminal."""

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from potluck.experiment.watching.observers import RunEnd
from potluck.experiment.watching.progress import Standing
from potluck.records import Progress

_EVERY = 0.2  # seconds between two pictures, unless a round has ended
_WIDTH = 24  # of a bar of text


class ProgressLine(Standing):
    """One line: rounds, what is done in the current one, the primary metric, and megabytes sent."""

    def __init__(self, draw: Callable[[float, str], None]) -> None:
        super().__init__()
        self._draw = draw
        self._drawn = -_EVERY

    def show(self, progress: Progress, *, round_ended: bool = False) -> None:
        """Draw it, unless that was done a moment ago."""
        if round_ended or time.monotonic() - self._drawn >= _EVERY:
            self._picture("" if round_ended else progress.words)

    def on_run_end(self, event: RunEnd) -> None:
        """The last picture."""
        self._picture(event.status)

    def _picture(self, now: str) -> None:
        self._drawn = time.monotonic()
        one = self.progress
        words = [f"{one.method}: round {one.round} of {one.rounds}", one.score, f"{one.bytes / 10**6:.1f} MB"]
        text = ", ".join(filter(None, words))
        self._draw(one.share / max(1, one.rounds), f"{text}{f'; {now}' if now else ''}")


def progress() -> ProgressLine | None:
    """A display for where this code runs; None where nobody looks: output in a file or a pipe."""
    if (show := _in_notebook()) is not None:
        return ProgressLine(show)
    if sys.stderr.isatty():
        return ProgressLine(_Line(sys.stderr).show)
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
