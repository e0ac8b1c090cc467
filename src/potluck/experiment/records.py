"""Writing records: what the engine and the evaluation saw, line by line."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

from potluck.core.federation import ClientId
from potluck.engines.inprocess import RoundReport
from potluck.experiment.evaluate import Evaluation
from potluck.records import ROUNDS, RoundRecord


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
        lost=report.lost,
    )


def line_of(record: RoundRecord) -> dict[str, Any]:
    """What a round's line holds; only a round that was lost says so."""
    line = asdict(record)
    if record.lost is None:
        del line["lost"]
    return line


def lost_in_a_row(path: Path) -> int:
    """How many of the last rounds of `rounds.jsonl` were lost."""
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(1 for _ in takewhile(lambda line: "lost" in json.loads(line), reversed(lines)))


def append(path: Path, objects: Iterable[dict[str, Any]]) -> None:
    """Add one JSON line an object.

    Raises:
        ValueError: a number is not finite; the engine lets none through.
    """
    with path.open("a") as file:
        file.writelines(json.dumps(item, allow_nan=False) + "\n" for item in objects)


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


def releases(folder: Path) -> Counter[ClientId]:
    """By client, the rounds of a run in which it answered."""
    lines = (folder / ROUNDS).read_text().splitlines()
    return Counter(client for line in lines for client in json.loads(line)["replied"])
