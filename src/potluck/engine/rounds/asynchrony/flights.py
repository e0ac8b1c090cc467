"""What a client was asked, and its reply, until a round closes with it."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch

from potluck.core.federation import ClientId
from potluck.core.message import Message
from potluck.core.roles import Failure
from potluck.engine.rounds.report import RoundReport, WorkDone


@dataclass(frozen=True)
class Flight:
    """A client's part in an asynchronous round.

    Attributes:
        version: how many rounds had closed when it was asked.
        sent: of what it was sent, the entries that its reply revises.
        reply: its reply, or why there is none.
        record: its state from then on; None if it keeps none.
        work: what it took.
        losses: the mean loss of each of its fits.
        notes: numbers that its handler reported.
    """

    client: ClientId
    version: int
    sent: Message
    reply: Message | Failure
    record: bytes | None
    work: WorkDone
    losses: tuple[float, ...] = ()
    notes: Mapping[str, float] | None = None

    def tell(self, report: RoundReport) -> None:
        """Add what is known of it to the report of a round."""
        report.cohort.append(self.client)
        report.work.append(self.work)
        if isinstance(self.reply, Failure):
            report.failures[self.client] = self.reply
            return
        report.traffic.up.update(self.reply.sizes())
        if self.losses:
            report.losses[self.client] = list(self.losses)
        if self.notes:
            report.client_notes[self.client] = dict(self.notes)

    def packed(self) -> dict[str, Any]:
        """The flight as a tree of tensors and plain values."""
        failure = list(astuple(self.reply)) if isinstance(self.reply, Failure) else None
        return {
            "version": self.version,
            "sent": dict(self.sent),
            "reply": None if isinstance(self.reply, Failure) else dict(self.reply),
            "failure": failure,
            "record": None if self.record is None else torch.frombuffer(bytearray(self.record), dtype=torch.uint8),
            "work": list(astuple(self.work)),
            "losses": list(self.losses),
            "notes": dict(self.notes or {}),
        }

    @classmethod
    def unpacked(cls, client: ClientId, tree: Mapping[str, Any]) -> "Flight":
        """The flight that `packed` was made of."""
        record = tree["record"]
        return cls(
            client,
            tree["version"],
            Message(**tree["sent"]),
            Message(**tree["reply"]) if tree["failure"] is None else Failure(*tree["failure"]),
            None if record is None else record.numpy().tobytes(),
            WorkDone(*tree["work"]),
            tuple(tree["losses"]),
            tree["notes"],
        )
