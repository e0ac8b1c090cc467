"""Do the papers' claims hold? What is finished of a recipe that runs over a whole horizon: lines, curves and a table.

    POTLUCK_DATA=... OMP_NUM_THREADS=1 potluck reproduce claims-fedin --runs FOLDER [--only FedIN] [--seeds 2]
    python benchmarks/claims.py claims-fedin FOLDER [--seeds 2]

The first takes days of a core and goes on where it was stopped. A line of `results/claims-fedin.csv` is an evaluated
round of a finished run; the last one of a run has its checkpoint's digest. Lines of runs that are not at hand are kept.
"""

import argparse
import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from long_horizon import draw, evaluated, grouped, rounds_of

from potluck.analysis.compare import confidence_interval
from potluck.recipes import load_recipe
from potluck.recipes.beside import finished, plan
from potluck.records import CHECKPOINT, LAST, Checkpoint

RESULTS = Path(__file__).parent / "results"
COLUMNS = ("method", "seed", "round", "loss_local", "common", "megabytes", "commit", "machine", "digest")
TARGETS = (0.25, 0.3, 0.35, 0.4)
Line = Mapping[str, str]
Runs = Mapping[tuple[str, str], Sequence[Line]]


def lines_of(row: str, folder: Path) -> Iterator[dict[str, str]]:
    """The evaluated rounds of a finished run, under the name of its row in the recipe."""
    found = [line for line in rounds_of(folder) if line["common"]]
    digest = Checkpoint.read(folder / CHECKPOINT / LAST).digest
    for line in found:
        told = {**line, "method": row, "digest": digest if line is found[-1] else ""}
        yield {column: told[column] for column in COLUMNS}


def of_last_tenth(lines: Sequence[Line]) -> float:
    """The mean accuracy on the common test set in the last tenth of a run's rounds, in percent."""
    found = evaluated(lines)
    last, _ = found[-1]
    return 100 * fmean(accuracy for number, accuracy in found if number > 0.9 * last)


def reached(lines: Sequence[Line], target: float) -> str:
    """The first evaluated round with this accuracy."""
    return next((str(number) for number, accuracy in evaluated(lines) if accuracy >= target), "–")


def interval(values: Sequence[float]) -> str:
    """The mean over seeds, with its interval of 95 % by Student's distribution where there are several."""
    found = confidence_interval(values)
    return f"{found.mean:.1f}" if found.half is None else f"{found.mean:.1f} ± {found.half:.1f}"


def print_table(rows: Sequence[str], runs: Runs) -> None:
    """A line a row of the recipe, in Markdown."""
    targets = " | ".join(f"to {target:.0%}" for target in TARGETS)
    print(f"| row | seeds | last tenth of the rounds, % | {targets} |\n|---|--:|--:|{'--:|' * len(TARGETS)}")
    for row in rows:
        of_row = [lines for (name, _), lines in runs.items() if name == row]
        if of_row:
            cells = [", ".join(reached(lines, target) for lines in of_row) for target in TARGETS]
            means = interval([of_last_tenth(lines) for lines in of_row])
            print(f"| {row} | {len(of_row)} | {means} | {' | '.join(cells)} |")


def main() -> None:
    """Collect, write, draw, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("runs", type=Path, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    recipe = load_recipe(options.recipe)
    planned, table = plan(recipe, 1.0, options.seeds), RESULTS / f"{recipe.name}.csv"
    known: list[Line] = []
    if table.is_file():
        with table.open(newline="", encoding="utf-8") as file:
            known = list(csv.DictReader(file))
    runs: dict[tuple[str, str], Sequence[Line]] = dict(grouped(known))
    for one, end in zip(planned, finished(planned, options.runs), strict=True):
        if end is not None and end.folder is not None:
            runs[one.row, str(one.seed)] = list(lines_of(one.row, end.folder))
    rows = [row.name for row in recipe.rows]
    runs = dict(sorted(runs.items(), key=lambda run: (rows.index(run[0][0]), int(run[0][1]))))
    with table.open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        out.writeheader()
        out.writerows(line for lines in runs.values() for line in lines)
    draw(runs, RESULTS / f"{recipe.name}.png")
    print_table(rows, runs)


if __name__ == "__main__":
    main()
