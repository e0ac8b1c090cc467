"""The result of a run."""

from dataclasses import dataclass

from potluck.experiment.results.evaluate import Evaluation
from potluck.records import Checkpoint, RoundRecord


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        rounds: the records of the rounds run in this process.
        evaluation: of the last round.
        checkpoint: of the last round; None if the run has no folder.
    """

    rounds: list[RoundRecord]
    evaluation: Evaluation
    checkpoint: Checkpoint | None
