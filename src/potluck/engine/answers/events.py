"""What the engine reports while clients work: one event for each client, when its outcome arrives."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from potluck.core.federation import ClientId
from potluck.core.roles import Failure
from potluck.engine.client.runtime import Outcome
from potluck.engine.client.session import Answer

WorkKind = Literal["training", "evaluation"]


@dataclass(frozen=True)
class ClientEnd:
    """One client has done its work in an exchange. Its reply is not checked yet and may still be refused.

    Attributes:
        round: the number of the round; for an evaluation, of the round after which it takes place.
        work: "training" if the method sent it a message, "evaluation" if its model was evaluated.
        exchange: the number of the exchange within the round, from 1; counted apart for evaluations.
        handler: the name of the method's handler that ran; "evaluation" for an evaluation.
        client: the client.
        done: how many of this exchange's clients are done, this one included. Clients are in the order in which they
            end, which differs between runs.
        of: how many clients this exchange has.
        loss: mean of the mean losses of its fits; None if it has none, or they are not finite.
        failure: why it failed; None if it did not.
        seconds: since the exchange began.
    """

    round: int
    work: WorkKind
    exchange: int
    handler: str
    client: ClientId
    done: int
    of: int
    loss: float | None
    failure: str | None
    seconds: float


@dataclass
class Attendance:
    """Reports each client of one exchange once, when its outcome arrives.

    Attributes:
        tell: called with each event.
        round: see `ClientEnd`; so are the following.
    """

    tell: Callable[[ClientEnd], None]
    round: int
    work: WorkKind
    exchange: int
    handler: str
    of: int
    _started: float = field(default_factory=time.perf_counter, init=False)
    _seen: set[ClientId] = field(default_factory=set[ClientId], init=False)

    def note(self, outcome: Outcome) -> None:
        """Report this outcome's client, unless that was done when it arrived."""
        if outcome.client in self._seen:
            return
        self._seen.add(outcome.client)
        self.tell(
            ClientEnd(
                round=self.round,
                work=self.work,
                exchange=self.exchange,
                handler=self.handler,
                client=outcome.client,
                done=len(self._seen),
                of=self.of,
                loss=_loss_of(outcome),
                failure=outcome.reason if isinstance(outcome, Failure) else None,
                seconds=time.perf_counter() - self._started,
            )
        )


def _loss_of(outcome: Outcome) -> float | None:
    """The mean of a client's losses. None without any, and of what is no number: a reply is checked only later."""
    losses = outcome.losses if isinstance(outcome, Answer) else None
    try:
        loss = fmean(losses) if losses else None
    except (TypeError, ValueError, OverflowError):
        return None
    return loss if loss is not None and math.isfinite(loss) else None
