"""Play the MNIST-1D table: every row of `mnist1d.toml`, tuned with three seeds and played with ten others.

    python benchmarks/mnist1d.py [--processes 2] [--only 'Fed*'] [--seeds 0 1 2]

Each row is first played with each learning rate, with the seeds of tuning; the rate with which the clients' models do
best on their own validation parts, on average over these seeds, is the row's. Test examples have no part in it.
Finished runs are not played again; a row whose settings change gets new runs. At the end, or with `--processes 0` at
once, all finished runs go to `benchmarks/results/mnist1d.csv`, the trials of tuning among them, and the table is
printed.
"""

import argparse
import csv
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from table_runs import Entry, finished, megabytes_of, play_all, records_of, rounds_of, seconds_of, share, spread

from potluck.experiment.settings.resolve import resolve

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "mnist1d.csv"
FAMILIES = ("logistic", "mlp", "gru", "cnn")
MEASURES = ("validation", "common", "personal", "global")
COLUMNS = ("row", "lr", "seed", "rounds", *MEASURES, *FAMILIES, "megabytes", "seconds", "records")
BASELINE = "Local"
Line = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Trial(Entry):
    """One row of the table with one learning rate and one seed."""

    lr: float

    @property
    def key(self) -> tuple[str, str, str]:
        """Its name among the lines of the results."""
        return self.row, str(self.lr), str(self.seed)


def trial(table: dict[str, Any], row: dict[str, Any], lr: float, seed: int) -> Trial:
    """A row's run with this learning rate of the clients' training."""
    common, method = table["common"], row["method"]
    tree = {
        "federation": {**common["federation"], **row.get("federation", {})},
        "method": {**method, "training": {**common["training"], **method.get("training", {}), "lr": lr}},
        "run": {**common["run"], "seed": seed},
    }
    experiment = resolve(tree, f"mnist1d.toml, {row['name']}")
    return Trial(row=row["name"], seed=seed, experiment=experiment, lr=lr)


def tuning(table: dict[str, Any]) -> Iterator[Trial]:
    """Every row with every learning rate and every seed of tuning."""
    for seed, row, lr in product(table["tuning"]["seeds"], table["rows"], table["tuning"]["learning_rates"]):
        yield trial(table, row, lr, seed)


def tuned(table: dict[str, Any], lines: Sequence[Line]) -> Iterator[Trial]:
    """Seed by seed all rows that are tuned, with the learning rate that did best on validation examples."""
    best = choices(table, lines)
    for seed in table["seeds"]:
        for row in table["rows"]:
            if row["name"] in best:
                yield trial(table, row, best[row["name"]], seed)


def choices(table: dict[str, Any], lines: Sequence[Line]) -> dict[str, float]:
    """By row, the best learning rate; the smaller one of two that are equally good. Only rows that have all trials."""
    rates, seeds = sorted(table["tuning"]["learning_rates"]), table["tuning"]["seeds"]
    best: dict[str, float] = {}
    tried = {(line["row"], float(line["lr"]), int(line["seed"])): float(line["validation"]) for line in lines}
    for row in dict.fromkeys(line["row"] for line in lines):
        if all((row, lr, seed) in tried for lr, seed in product(rates, seeds)):
            best[row] = max(rates, key=lambda lr, row=row: fmean(tried[row, lr, seed] for seed in seeds))
    return best


def result_of(entry: Trial, folder: Path) -> Line:
    """The line of a finished run, measured after its last round."""
    rounds = rounds_of(entry, folder)
    last = rounds[-1]
    by_family = {name.partition("(")[0]: value for name, value in last.by_architecture("common", "accuracy").items()}
    return {
        **dict(zip(("row", "lr", "seed"), entry.key, strict=True)),
        "rounds": str(len(rounds)),
        **{measure: share(last.value(measure, "accuracy")) for measure in MEASURES},
        **{family: share(by_family.get(f"mnist1d_{family}")) for family in FAMILIES},
        "megabytes": megabytes_of(rounds),
        "seconds": f"{seconds_of(entry, folder):.1f}",
        "records": records_of(entry, folder),
    }


def lines_of(trials: Sequence[Trial], runs: Path) -> list[Line]:
    """A line for each trial that is finished, here or in earlier results."""
    known = {(line["row"], line["lr"], line["seed"]): line for line in read_results()}
    known |= {entry.key: result_of(entry, folder) for entry, folder in finished(trials, runs)}
    return [known[entry.key] for entry in trials if entry.key in known]


def read_results() -> list[Line]:
    """The lines so far."""
    if not RESULTS.is_file():
        return []
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def write_results(table: dict[str, Any], runs: Path) -> list[Line]:
    """One line a run, trials of tuning first; runs that lie in other folders keep their lines."""
    lines = lines_of(list(tuning(table)), runs)
    lines += lines_of(list(tuned(table, lines)), runs)
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("w", newline="") as file:
        out = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        out.writeheader()
        out.writerows(lines)
    return lines


def print_table(table: dict[str, Any], lines: Sequence[Line]) -> None:
    """The results as Markdown, mean and standard deviation over seeds in percent.

    "Over Local" is the difference on own test parts in points, seed by seed.
    """
    lines = [line for line in lines if int(line["seed"]) not in table["tuning"]["seeds"]]
    baseline = {line["seed"]: float(line["personal"]) for line in lines if line["row"] == BASELINE}
    names = ("row", "lr", "seeds", "common", "personal", "over Local", *FAMILIES, "MB", "seconds")
    print(f"\n| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for row in dict.fromkeys(line["row"] for line in lines):
        runs = [line for line in lines if line["row"] == row]
        over = [str(float(run["personal"]) - baseline[run["seed"]]) for run in runs if run["seed"] in baseline]
        families = [spread([run[family] for run in runs]) for family in FAMILIES]
        cells = [
            *(row, runs[0]["lr"], str(len(runs)), spread([run["common"] for run in runs])),
            *(spread([run["personal"] for run in runs]), spread(over), *families),
            *(f"{fmean(float(run[cost]) for run in runs):.1f}" for cost in ("megabytes", "seconds")),
        ]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    """Tune, play, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2, help="runs at a time; 0 plays nothing")
    parser.add_argument("--runs", type=Path, default=Path("runs/mnist1d"), help="folder of the runs")
    parser.add_argument("--only", default="*", help="rows to play, such as 'FedMD*'")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds to play; all by default")
    options = parser.parse_args()
    table = tomllib.loads((HERE / "mnist1d.toml").read_text())
    if options.processes:
        trials = [entry for entry in tuning(table) if fnmatch(entry.row, options.only)]
        play_all(trials, options.runs, options.processes)
        final = tuned(table, lines_of(trials, options.runs))
        wanted = [entry for entry in final if options.seeds is None or entry.seed in options.seeds]
        play_all(wanted, options.runs, options.processes)
    print_table(table, write_results(table, options.runs))


if __name__ == "__main__":
    main()
