"""FedIN's claim over its whole horizon: collect the rounds of long runs, draw their curves, print their table.

The runs are those of `benchmarks/long_horizon/*.toml`. Each takes many hours of a core and goes on where it
was stopped:

    POTLUCK_DATA=... OMP_NUM_THREADS=1 potluck run benchmarks/long_horizon/fedin.toml --to runs/long_horizon
    POTLUCK_DATA=... OMP_NUM_THREADS=1 potluck run --resume runs/long_horizon/<folder>
    python benchmarks/long_horizon.py runs/long_horizon

A row of `results/long_horizon.csv` is one round of one run. Rows of a run that has since gone further are replaced,
those of runs that are not at hand are kept.
"""

import argparse
import csv
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean

RESULTS = Path(__file__).parent / "results"
TABLE = RESULTS / "long_horizon.csv"
CURVES = RESULTS / "long_horizon.png"
COLUMNS = ("method", "seed", "round", "loss_local", "common", "personal", "megabytes", "commit", "machine")
TARGETS = (0.3, 0.4, 0.5, 0.6)
LAST = 50  # rounds whose mean is a run's result
SMOOTHED = 5  # evaluations, in the curves

Row = Mapping[str, str]


def rounds_of(folder: Path) -> Iterator[dict[str, str]]:
    """One row a round of the run in this folder."""
    config = tomllib.loads((folder / "config.toml").read_text())
    manifest = json.loads((folder / "manifest.json").read_text())
    sent = 0
    for line in (folder / "rounds.jsonl").read_text().splitlines():
        record = json.loads(line)
        sent += record["bytes_down"] + record["bytes_up"]
        yield {
            "method": name_of(config["method"]),
            "seed": str(config["run"]["seed"]),
            "round": str(record["round"]),
            "loss_local": shown(record["loss_local"]),
            "common": shown(record["accuracy_common_mean"]),
            "personal": shown(record["accuracy_personal_mean"]),
            "megabytes": f"{sent / 1e6:.1f}",
            "commit": str(manifest.get("potluck_commit") or manifest["git_commit"])[:7],
            "machine": manifest["machine"],
        }


def name_of(method: Mapping[str, object]) -> str:
    """The row's name; FedProx is FedIN without features where runs were made before it had a file of its own."""
    if method["name"] != "fedin":
        return str(method["name"])
    if not method.get("feature_training", True):
        return "fedprox"
    return "fedin + noise" if method.get("noise") else "fedin"


def shown(value: float | None) -> str:
    """A number with the digits that mean something; empty where a round has none."""
    return "" if value is None else f"{value:.4f}"


def collected(known: Sequence[Row], folders: Sequence[Path]) -> list[Row]:
    """What was known and what the folders hold; of each method and seed the longer run."""
    runs: dict[tuple[str, int], list[Row]] = {}
    for rows in [*grouped(known).values(), *(list(rounds_of(folder)) for folder in folders)]:
        if rows:
            place = rows[0]["method"], int(rows[0]["seed"])
            runs[place] = max(runs.get(place, []), list(rows), key=len)
    return [row for place in sorted(runs) for row in runs[place]]


def grouped(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by method and seed."""
    return {place: list(of) for place, of in groupby(rows, key=lambda row: (row["method"], row["seed"]))}


def evaluated(rows: Sequence[Row]) -> list[tuple[int, float]]:
    """Round and accuracy on the common test set, where it was measured."""
    return [(int(row["round"]), float(row["common"])) for row in rows if row["common"]]


def print_table(runs: Mapping[tuple[str, str], Sequence[Row]]) -> None:
    """One row a run in Markdown: the mean of its last rounds, and when it first reached each target."""
    targets = " | ".join(f"to {target:.0%}" for target in TARGETS)
    print(f"| run | rounds | mean of the last {LAST} | {targets} |\n|---|--:|--:|{'--:|' * len(TARGETS)}")
    for (method, seed), rows in runs.items():
        found, last = evaluated(rows), int(rows[-1]["round"])
        recent = [accuracy for number, accuracy in found if number > last - LAST]
        reached = (next((number for number, accuracy in found if accuracy >= target), None) for target in TARGETS)
        cells = [f"{100 * fmean(recent):.1f} %" if recent else "–", *(str(at) if at else "–" for at in reached)]
        print(f"| {method}, seed {seed} | {last} | {' | '.join(cells)} |")


def draw(runs: Mapping[tuple[str, str], Sequence[Row]], to: Path) -> None:
    """Accuracy on the common test set over rounds, as measured and smoothed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for number, ((method, seed), rows) in enumerate(runs.items()):
        found, color = evaluated(rows), f"C{number}"
        places, values = [place for place, _ in found], [100 * accuracy for _, accuracy in found]
        smooth = [fmean(values[max(0, i + 1 - SMOOTHED) : i + 1]) for i in range(len(values))]
        axes.plot(places, values, color=color, alpha=0.3, linewidth=1)
        axes.plot(places, smooth, color=color, linewidth=2, label=f"{method}, seed {seed}")
    axes.set_xlabel("round")
    axes.set_ylabel("accuracy on the common test set, %")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(to, dpi=120, metadata={"Software": None})


def main() -> None:
    """Collect, write, draw, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, help="folder that holds the folders of the runs")
    folders = [path.parent for path in sorted(parser.parse_args().runs.glob("*/rounds.jsonl"))]
    known: list[Row] = []
    if TABLE.is_file():
        with TABLE.open(newline="") as file:
            known = list(csv.DictReader(file))
    rows = collected(known, folders)
    with TABLE.open("w", newline="") as file:
        out = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        out.writeheader()
        out.writerows(rows)
    draw(grouped(rows), CURVES)
    print_table(grouped(rows))


if __name__ == "__main__":
    main()
