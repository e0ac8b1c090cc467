"""The numbers of an analysis as tables, as they are written as CSV and given as data frames."""

import csv
import io
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from potluck.analysis.compare import ComparedRow, Interval
from potluck.analysis.findings import Findings
from potluck.analysis.gains import Gain
from potluck.analysis.inside import Inside, Map

Numbers = list[dict[str, Any]]
"""Numbers and words by column; None where there is none."""


def tables_of(found: Findings) -> dict[str, Numbers]:
    """All numbers by the name of the table; tables without rows are left out."""
    inside = found.inside
    tables = {
        "gains": [_of_gain(gain) for gain in found.gains],
        "clients": [row for gain in found.gains for row in _of_clients(gain)],
        "groups": [{**_flat(row), "seeds": row.gain.count, "sure": row.sure} for row in found.groups],
        "architectures": [row for gain in found.gains for row in _of_architectures(gain)],
        "classes": [row for gain in found.gains for row in _of_classes(gain)],
        "client_classes": [{**_flat(row), "seeds": row.gain.count} for row in found.classes],
        "fairness": [_flat(row) for row in found.fairness],
        "costs": [_of_costs(row) for row in found.rows],
        "speed": [_flat(row) for row in found.speeds],
        "similarity": [row for one in inside for row in _of_similarity(one)],
        "drift": [{**_run(one), **_flat(row)} for one in inside for row in one.drift],
        "calibration": [row for one in inside for row in _of_calibration(one)],
        "bins": [row for one in inside for row in _of_bins(one)],
        "separation": [_of_map(one, one.map) for one in inside if one.map],
        "map": [{**_run(one), **_flat(point)} for one in inside if one.map for point in one.map.points],
        **_over_rounds([one for one in inside if len(one.moments) > 1]),
    }
    return {name: rows for name, rows in tables.items() if rows}


def as_csv(rows: Numbers) -> str:
    """A table as CSV."""
    text = io.StringIO()
    out = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    out.writeheader()
    out.writerows(rows)
    return text.getvalue()


def _run(inside: Inside) -> dict[str, Any]:
    return {"run": inside.name, "experiment": inside.experiment, "round": inside.round}


def _flat(row: Any) -> dict[str, Any]:
    """The fields of a row, an interval as its mean and, under `NAME_half`, its half width."""
    found: dict[str, Any] = {}
    for spec in fields(row):
        value = getattr(row, spec.name)
        found |= _both(spec.name, value) if isinstance(value, Interval) else {spec.name: value}
    return found


def _both(name: str, value: Interval | None) -> dict[str, Any]:
    return {name: value and value.mean, f"{name}_half": value and value.half}


def _of_gain(gain: Gain) -> dict[str, Any]:
    return {
        "experiment": gain.experiment,
        "against": gain.against,
        "seeds": gain.over_seeds.count,
        "clients": len(gain.clients),
        "profiting": len(gain.profiting),
        "losing": len(gain.losing),
        "surely_profiting": sum(one.sure for one in gain.profiting),
        "surely_losing": sum(one.sure for one in gain.losing),
        "gain": gain.over_seeds.mean,
        "gain_half_over_seeds": gain.over_seeds.half,
        "gain_half_over_clients": gain.over_clients.half,
        "p": gain.p,
    }


def _of_clients(gain: Gain) -> Numbers:
    return [
        {"experiment": gain.experiment, **_flat(one), "seeds": one.gain.count, "sure": one.sure} for one in gain.clients
    ]


def _of_architectures(gain: Gain) -> Numbers:
    return [
        {"experiment": gain.experiment, "architecture": name, **_both("gain", over), "seeds": over.count}
        for name, over in gain.by_architecture.items()
    ]


def _of_classes(gain: Gain) -> Numbers:
    return [
        {"experiment": gain.experiment, "class": number, **_both("gain", over), "seeds": over.count}
        for number, over in gain.by_class.items()
    ]


def _of_costs(row: ComparedRow) -> dict[str, Any]:
    found = {"experiment": row.label, "block": row.block, "seeds": len(row.seeds), "rounds": row.rounds}
    for name, value in row.scores.items():
        found |= _both(name, value)
    found |= {**_both("megabytes", row.megabytes), **_both("seconds", row.seconds)}
    if row.reached:
        found["seeds_at_target"] = row.reached.count
        for name in ("rounds", "megabytes", "seconds"):
            found |= _both(f"{name}_to_target", getattr(row.reached, name))
    return found


def _of_similarity(inside: Inside) -> Numbers:
    return [{**_run(inside), "examples": inside.examples, **_flat(row)} for row in inside.similarity]


def _of_map(inside: Inside, found: Map) -> dict[str, Any]:
    return {
        **_run(inside),
        "clients": len(found.clients),
        "width": found.width,
        "points": found.features,
        "silhouette_by_client": found.by_client,
        "silhouette_by_class": found.by_class,
    }


def _over_rounds(inside: Sequence[Inside]) -> dict[str, Numbers]:
    """What curves over rounds are drawn of."""
    moments = [({**_run(one), "round": moment.round}, moment) for one in inside for moment in one.moments]
    return {
        "similarity_by_round": [
            {**of, "stage": stage, "cka": exact, "unbiased_cka": unbiased}
            for of, moment in moments
            for stage, (exact, unbiased) in moment.similarity.items()
        ],
        "separation_by_round": [
            {**of, "silhouette_by_client": moment.by_client, "silhouette_by_class": moment.by_class}
            for of, moment in moments
            if moment.by_client is not None
        ],
        "drift_by_round": [{**of, **_flat(row)} for of, moment in moments for row in moment.drift],
    }


_OF_BINS = ("counts", "hits", "sure")


def _of_calibration(inside: Inside) -> Numbers:
    return [
        {
            **_run(inside),
            "kind": one.kind,
            "whose": one.whose,
            "clients": one.clients,
            **{name: value for name, value in _flat(one.values).items() if name not in _OF_BINS},
        }
        for one in inside.calibration
    ]


def _of_bins(inside: Inside) -> Numbers:
    """Bins with examples, of confidence from `low` on to below `high`."""
    return [
        {
            **_run(inside),
            "whose": one.whose,
            "low": place / len(one.values.counts),
            "high": (place + 1) / len(one.values.counts),
            "examples": count,
            "accuracy": one.values.hits[place] / count,
            "confidence": one.values.sure[place] / count,
        }
        for one in inside.calibration
        for place, count in enumerate(one.values.counts)
        if count
    ]
