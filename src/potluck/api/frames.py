"""Records as data frames."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from potluck.core.tasks.metric import Values
from potluck.records import ACCURACY, ClientRecord, RoundRecord

if TYPE_CHECKING:
    import pandas as pd

_SPREAD = {"personal_std": ("personal", "_std"), "personal_worst": ("personal", "_worst")}


def rounds_frame(rounds: Iterable[RoundRecord]) -> "pd.DataFrame":
    """One row for each round, in order; see `potluck.records.RoundRecord` for what they mean.

    Columns: round, cohort, replied and failed (numbers of clients), bytes_down, bytes_up and bytes_evaluation,
    loss_local, lost (why the round was lost), MEASURE_METRIC for every measure and metric, such as personal_accuracy,
    with personal_accuracy_std and personal_accuracy_worst over clients, and notes.NAME for the method's notes. What was
    not measured is missing (NaN).
    """
    import pandas as pd

    return pd.DataFrame([_of_round(record) for record in rounds])


def clients_frame(clients: Iterable[ClientRecord]) -> "pd.DataFrame":
    """One row for each client and evaluated round; see `potluck.records.ClientRecord`.

    Columns: round, client, architecture, examples_train, examples_test, and MEASURE_METRIC, such as common_accuracy.
    """
    import pandas as pd

    return pd.DataFrame([_of_client(record) for record in clients])


def _of_round(record: RoundRecord) -> dict[str, Any]:
    return {
        "round": record.round,
        "cohort": len(record.cohort),
        "replied": len(record.replied),
        "failed": len(record.failed),
        "bytes_down": record.bytes_down,
        "bytes_up": record.bytes_up,
        "bytes_evaluation": record.bytes_evaluation,
        "loss_local": record.loss_local,
        "lost": record.lost,
        **_columns(record.metrics if record.metrics is not None else _earlier(record)),
        **{f"notes.{name}": value for name, value in (record.notes or {}).items()},
    }


def _of_client(record: ClientRecord) -> dict[str, Any]:
    facts = ("round", "client", "architecture", "examples_train", "examples_test")
    measured = {measure: {ACCURACY.name: record.value(measure, ACCURACY.name)} for measure in ("personal", "common")}
    return {**{name: getattr(record, name) for name in facts}, **_columns(record.metrics or measured)}


def _earlier(record: RoundRecord) -> dict[str, Values]:
    """What records of earlier versions hold."""
    if not record.evaluated:
        return {}
    measures = ("validation", "personal", "personal_std", "personal_worst", "common", "global")
    return {measure: {ACCURACY.name: record.value(measure, ACCURACY.name)} for measure in measures}


def _columns(metrics: dict[str, Values]) -> dict[str, float | None]:
    """Values by measure and metric as columns."""
    found: dict[str, float | None] = {}
    for measure, values in metrics.items():
        base, ending = _SPREAD.get(measure, (measure, ""))
        found |= {f"{base}_{metric}{ending}": value for metric, value in values.items()}
    return found
