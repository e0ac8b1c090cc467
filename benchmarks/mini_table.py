"""Play the mini table: every row of `mini_table.toml` with every seed, each a run that goes on where it was stopped.

    POTLUCK_DATA=... python benchmarks/mini_table.py [--roles method ablation] [--processes 2] [--only 'FedIN*'] [--new]

The methods come first with all their seeds, then their ablations, other precisions, references, and rows that look for
the cause of what does not order as in the papers. Finished runs are not played again; a row whose settings change gets
new runs; `--new` also leaves out runs that have a line in the results, from whatever folder or machine. At the end,
or with `--processes 0` at once, the results of all finished runs go to `benchmarks/results/mini_table.csv`, and the
table is printed.
"""

import argparse
import csv
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import groupby, product
from pathlib import Path
from statistics import fmean
from typing import Any

from table_runs import Entry, finished, megabytes_of, play_all, records_of, rounds_of, seconds_of, share, spread

from potluck.experiment.settings.resolve import resolve
from potluck.records import RoundRecord

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "mini_table.csv"
LAST_EVALUATIONS = 3  # cohorts differ from round to round; a mean over the last evaluated rounds sways less
ROLES = ("method", "ablation", "precision", "reference", "cause")  # of a row, in the order of play
MEASURES = {
    "common": "accuracy_common_mean",
    "personal": "accuracy_personal_mean",
    "global": "accuracy_global",
}
COLUMNS = ("family", "row", "seed", "rounds", *MEASURES, "megabytes", "minutes", "records")


@dataclass(frozen=True, kw_only=True)
class MiniEntry(Entry):
    """One row of the table with one seed."""

    family: str
    role: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Its name among the lines of the results."""
        return self.family, self.row, str(self.seed)


def entries(table: dict[str, Any]) -> Iterator[MiniEntry]:
    """Role by role all rows with the first seed, then all with the second, and so on."""
    for role, seed in product(ROLES, table["seeds"]):
        for row in (row for row in table["rows"] if row.get("role", ROLES[0]) == role):
            family = table["families"][row["family"]]
            tree = {
                "federation": {**table["common"]["federation"], **family["federation"], **row.get("federation", {})},
                "method": {"training": family["training"], **row["method"]},
                "run": {**table["common"]["run"], **row.get("run", {}), "seed": seed},
            }
            experiment = resolve(tree, f"mini_table.toml, {row['name']}")
            yield MiniEntry(row=row["name"], seed=seed, experiment=experiment, family=row["family"], role=role)


def accuracy(rounds: Sequence[RoundRecord], field: str) -> float | None:
    """Mean of one accuracy over the last evaluated rounds."""
    evaluated = [record for record in rounds if record.evaluated][-LAST_EVALUATIONS:]
    values = [getattr(record, field) for record in evaluated]
    return None if None in values else fmean(values)


def write_results(everything: list[MiniEntry], runs: Path, families: Sequence[str]) -> None:
    """One line a run, family by family; runs that lie in other folders keep their lines."""
    RESULTS.parent.mkdir(exist_ok=True)
    known = {key_of(line): line for line in read_results()}
    known |= {entry.key: result_of(entry, folder) for entry, folder in finished(everything, runs)}
    wanted = [entry.key for entry in everything]
    with RESULTS.open("w", newline="") as file:
        out = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        out.writeheader()
        out.writerows(known[key] for key in sorted(wanted, key=lambda key: families.index(key[0])) if key in known)


def key_of(line: dict[str, str]) -> tuple[str, str, str]:
    """The name of a line of the results."""
    return line["family"], line["row"], line["seed"]


def read_results() -> list[dict[str, str]]:
    """The lines so far."""
    if not RESULTS.is_file():
        return []
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def result_of(entry: MiniEntry, folder: Path) -> dict[str, str]:
    """The line of a finished run."""
    rounds = rounds_of(entry, folder)
    return {
        "family": entry.family,
        "row": entry.row,
        "seed": str(entry.seed),
        **{measure: share(accuracy(rounds, field)) for measure, field in MEASURES.items()},
        "rounds": str(len(rounds)),
        "megabytes": megabytes_of(rounds),
        "minutes": f"{seconds_of(entry, folder) / 60:.1f}",
        "records": records_of(entry, folder),
    }


def print_table(table: dict[str, Any]) -> None:
    """The results as Markdown, mean and standard deviation over seeds in percent."""
    for family, of_family in groupby(read_results(), lambda line: line["family"]):
        print(f"\n{table['families'][family]['title']}\n")
        print(f"| row | seeds | {' | '.join(MEASURES)} | MB | minutes |\n|---|---|{'---|' * len(MEASURES)}---|---|")
        members = list(of_family)
        for row in dict.fromkeys(line["row"] for line in members):
            runs = [line for line in members if line["row"] == row]
            cells = [spread([line[measure] for line in runs]) for measure in MEASURES]
            megabytes = fmean(float(line["megabytes"]) for line in runs)
            minutes = fmean(float(line["minutes"]) for line in runs)
            print(f"| {row} | {len(runs)} | {' | '.join(cells)} | {megabytes:.0f} | {minutes:.1f} |")


def main() -> None:
    """Play, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2, help="runs at a time; 0 plays nothing")
    parser.add_argument("--runs", type=Path, default=Path("runs/mini_table"), help="folder of the runs")
    parser.add_argument("--only", default="*", help="rows to play, such as 'FedIN*'")
    parser.add_argument("--new", action="store_true", help="only runs without a line in the results")
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=ROLES, help="kinds of rows to play")
    options = parser.parse_args()
    table = tomllib.loads((HERE / "mini_table.toml").read_text())
    everything = list(entries(table))
    if options.processes:
        wanted = [entry for entry in everything if entry.role in options.roles and fnmatch(entry.row, options.only)]
        if options.new:
            known = {key_of(line) for line in read_results()}
            wanted = [entry for entry in wanted if entry.key not in known]
        play_all(wanted, options.runs, options.processes)
    write_results(everything, options.runs, list(table["families"]))
    print_table(table)


if __name__ == "__main__":
    main()
