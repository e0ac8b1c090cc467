"""The state of a run while it goes on: on the terminal, and in its folder for `potluck watch`."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from potluck.core.tasks.metric import ACCURACY, Metric
from potluck.engine.answers.events import ClientEnd
from potluck.experiment.watching.observers import EvaluationStart, Observer, RoundStart, RunEnd, RunStart, Waiting
from potluck.records import PROGRESS, Progress, RoundRecord

_EVERY = 1.0  # seconds between two writings of the file


class Standing(Observer):
    """Keeps account of how a run stands, and shows it after every event.

    Args:
        clock: seconds from any moment on.

    Attributes:
        progress: the state after the last event.
    """

    may_fail: ClassVar[bool] = True

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.progress = Progress()
        self._clock = clock
        self._metric: Metric = ACCURACY
        self._began = 0.0
        self._share_at_start = 0.0
        self._losses: list[float] = []
        self._events = self._usual = 0  # of clients, in this round, and in a whole one

    def show(self, progress: Progress, *, round_ended: bool = False) -> None:
        """Show how the run stands, as a subclass sees fit."""

    def on_run_start(self, event: RunStart) -> None:
        """Begin with what was done before."""
        self._metric, self._began = event.metric, self._clock()
        self._share_at_start = float(event.rounds_done)
        self._usual = event.cohort_size + event.clients
        self.progress = Progress(
            method=event.method, round=event.rounds_done, rounds=event.rounds, share=self._share_at_start, phase="start"
        )
        for record in event.earlier():
            self._count(record)
        self.show(self.progress)

    def on_round_start(self, event: RoundStart) -> None:
        """The round's clients are asked."""
        self._events, self._losses = 0, []
        self._now(round=event.round, phase="training", done=0, of=len(event.cohort), share=float(event.round - 1))

    def on_waiting(self, event: Waiting) -> None:
        """Nothing is done."""
        self._now(phase="waiting", round=event.round, done=event.here, of=event.clients)

    def on_client_end(self, event: ClientEnd) -> None:
        """One more is done."""
        self._events += 1
        changes: dict[str, Any] = {"done": event.done, "of": event.of}
        if event.work == "training":
            self._losses += [event.loss] if event.loss is not None else []
            changes["loss"] = sum(self._losses) / len(self._losses) if self._losses else self.progress.loss
            changes["phase"] = "training" if event.done < event.of else "server"
        share = max(self.progress.share, event.round - 1 + min(0.99, self._events / max(1, self._usual)))
        self._now(**changes, share=share)

    def on_evaluation_start(self, event: EvaluationStart) -> None:
        """Models are evaluated."""
        self._now(phase="evaluation", done=0, of=event.clients)

    def on_round_end(self, event: RoundRecord) -> None:
        """The round counts."""
        self._usual = self._events
        self._count(event)
        self._now(round_ended=True, round=event.round, share=float(event.round))

    def _count(self, record: RoundRecord) -> None:
        value = record.value("personal", self._metric.name)
        if value is not None:
            self.progress = self.progress.changed(score=f"{self._metric.label} {self._metric.text(value)}")
        loss = self.progress.loss if record.loss_local is None else record.loss_local
        sent = self.progress.bytes + record.bytes_down + record.bytes_up
        self.progress = self.progress.changed(loss=loss, bytes=sent)

    def _now(self, *, round_ended: bool = False, **changes: Any) -> None:
        share = changes.get("share", self.progress.share)
        if (made := share - self._share_at_start) > 0:
            changes["seconds_left"] = (self._clock() - self._began) / made * (self.progress.rounds - share)
        self.progress = self.progress.changed(**changes)
        self.show(self.progress, round_ended=round_ended)


class ProgressFile(Standing):
    """Writes how the run stands to a file in its folder, at most once a second, and removes it at the end.

    The file is for those who watch; no record and no digest depends on it, and it may be lost.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._place = folder / PROGRESS
        self._written: float | None = None

    def show(self, progress: Progress, *, round_ended: bool = False) -> None:
        """Replace the file; not by `engine.disk.files`, since nothing is lost with it."""
        now = self._clock()
        if self._written is not None and now - self._written < _EVERY:
            return
        self._written = now
        aside = self._place.with_name(f"{PROGRESS}.tmp")
        aside.write_text(json.dumps(progress.facts()))
        aside.replace(self._place)

    def on_run_end(self, event: RunEnd) -> None:
        """Remove the file."""
        self._place.unlink(missing_ok=True)
