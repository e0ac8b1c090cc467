"""What a run writes down: one line a round, one line a client and evaluation, timings in a file of their own.

`rounds.jsonl` and `clients.jsonl` depend on the configuration alone, so that two runs can be compared byte by
byte; whatever a clock says goes to `timings.jsonl` and `manifest.json`.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from potluck.core.federation import ClientId
from potluck.engines.inprocess import RoundReport
from potluck.experiment.evaluate import ClientScore, Evaluation

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class RoundRecord:
    """One round. Accuracies are shares between 0 and 1, None in rounds that were not evaluated.

    Attributes:
        round: counted from 1.
        cohort: the clients drawn.
        replied: those that answered.
        failed: by client, why it did not.
        bytes_down: payload that the server sent for training, all clients together; `bytes_up` the other way.
        bytes_down_by_entry: the same, by name of the message's entry.
        bytes_evaluation: payload sent for evaluation, counted since the round before.
        loss_local: mean over clients of their mean training loss.
        accuracy_validation_mean: mean over clients on their own validation parts.
        accuracy_personal_mean: mean over clients on their own test parts; `_std` and `_worst` likewise.
        accuracy_common_mean: mean over clients on the common test set.
        accuracy_common_by_architecture: mean over an architecture's clients on the common test set.
        accuracy_personal_by_architecture: mean over an architecture's clients on their own test parts.
        accuracy_global: the server's model on the common test set.
    """

    round: int
    cohort: list[ClientId]
    replied: list[ClientId]
    failed: dict[str, str]
    bytes_down: int
    bytes_up: int
    bytes_down_by_entry: dict[str, int]
    bytes_up_by_entry: dict[str, int]
    bytes_evaluation: int
    loss_local: float | None
    accuracy_validation_mean: float | None
    accuracy_personal_mean: float | None
    accuracy_personal_std: float | None
    accuracy_personal_worst: float | None
    accuracy_personal_by_architecture: dict[str, float] | None
    accuracy_common_mean: float | None
    accuracy_common_by_architecture: dict[str, float] | None
    accuracy_global: float | None


def round_record(number: int, report: RoundReport, evaluation: Evaluation | None, evaluation_bytes: int) -> RoundRecord:
    """The record of a round from what the engine and the evaluation saw."""
    traffic, judged = report.traffic, evaluation
    return RoundRecord(
        round=number,
        cohort=list(report.cohort),
        replied=report.replied,
        failed={str(id): failure.reason for id, failure in sorted(report.failures.items())},
        bytes_down=traffic.bytes_down,
        bytes_up=traffic.bytes_up,
        bytes_down_by_entry=dict(sorted(traffic.down.items())),
        bytes_up_by_entry=dict(sorted(traffic.up.items())),
        bytes_evaluation=evaluation_bytes,
        loss_local=report.loss_local,
        accuracy_validation_mean=judged.mean("accuracy_validation") if judged else None,
        accuracy_personal_mean=judged.mean("accuracy_personal") if judged else None,
        accuracy_personal_std=judged.personal_std if judged else None,
        accuracy_personal_worst=judged.personal_worst if judged else None,
        accuracy_personal_by_architecture=judged.by_architecture("accuracy_personal") if judged else None,
        accuracy_common_mean=judged.mean("accuracy_common") if judged else None,
        accuracy_common_by_architecture=judged.by_architecture("accuracy_common") if judged else None,
        accuracy_global=judged.accuracy_global if judged else None,
    )


def client_lines(number: int, scores: Iterable[ClientScore]) -> list[dict[str, Any]]:
    """One object a client for `clients.jsonl`."""
    return [{"round": number, **asdict(score)} for score in scores]


def append(path: Path, objects: Iterable[dict[str, Any]]) -> None:
    """Add one JSON line an object; numbers that are not finite become null."""
    with path.open("a") as file:
        file.writelines(json.dumps(_finite(item), allow_nan=False) + "\n" for item in objects)


def keep_rounds(path: Path, last: int) -> None:
    """Drop lines of rounds after `last` and a half-written line, as a killed run may leave them."""
    if not path.exists():
        return
    kept: list[str] = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["round"] <= last:
                kept.append(line + "\n")
        except (json.JSONDecodeError, KeyError, TypeError):
            break
    path.write_text("".join(kept))


def _finite(node: Any) -> Any:
    if isinstance(node, float) and not math.isfinite(node):
        return None
    if isinstance(node, dict):
        return {key: _finite(value) for key, value in node.items()}
    return [_finite(value) for value in node] if isinstance(node, list) else node
