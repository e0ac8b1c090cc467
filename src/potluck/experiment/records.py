"""Writing records: what the engine and the evaluation saw, line by line."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from potluck.engines.inprocess import RoundReport
from potluck.experiment.evaluate import Evaluation
from potluck.records import RoundRecord


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
