"""Do the papers' claims hold? What is finished of a recipe that runs over a whole horizon: lines, curves and a table.

    POTLUCK_DATA=... OMP_NUM_THREADS=1 potluck reproduce claims-fedin --runs FOLDER [--only FedIN] [--seeds 2]
    python benchmarks/claims.py claims-fedin FOLDER [--only FedIN] [--seeds 2]

The first takes hours of a core and goes on where it was stopped. A line of `results/claims-fedin.csv` is an evaluated
round of a finished run; the last one of a run has its checkpoint's digest. Lines of runs that are not at hand are kept.
Both take changed settings, such as method.training.lr=0.01; these are in the lines and the table, not in the picture.
With --between 120 160 the table is of these rounds alone, in which shorter runs compare with whole ones.
"""

import argparse
import csv
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean

from potluck.analysis.compare import confidence_interval
from potluck.analysis.provenance import stretches
from potluck.analysis.read import read_run
from potluck.analysis.tables import running_means
from potluck.recipes import Recipe, load_recipe
from potluck.recipes.beside import finished, plan
from potluck.records import CHECKPOINT, LAST, Checkpoint, Measure

RESULTS = Path(__file__).parent / "results"
COLUMNS = ("row", "changes", "seed", "round", "loss_local", "accuracy", "personal", "commit", "machine", "digest")
TARGETS = (0.25, 0.3, 0.35, 0.4)
SMOOTHED = 5  # evaluations, in the curves
COLOURS = [f"C{number}" for number in range(10) if number != 7]  # that one is the grey of the means behind
Line = Mapping[str, str]
Name = tuple[str, str, str]  # of a run: row, changes, seed
Runs = Mapping[Name, Sequence[Line]]


def lines_of(name: Name, folder: Path, by: Measure) -> Iterator[dict[str, str]]:
    """The evaluated rounds of a finished run.

    Args:
        name: of the run.
        folder: of the run.
        by: the accuracy that counts.
    """
    run = read_run(folder)
    evaluated = [record for record in run.rounds if record.evaluated]
    made_with = stretches(run)
    digest = Checkpoint.read(folder / CHECKPOINT / LAST).digest
    for record in evaluated:
        measures: tuple[Measure, Measure] = (by, "personal")
        numbers = (record.loss_local, *(record.value(measure, run.metric.name) for measure in measures))
        shown = ["" if number is None else f"{number:.4f}" for number in numbers]
        end = digest if record is evaluated[-1] else ""
        facts = next(facts for upto, facts in made_with if record.round <= upto)
        commit = str(facts.get("potluck_commit") or run.manifest["git_commit"])[:7]
        cells = [*name, str(record.round), *shown, commit, str(facts["machine"]), end]
        yield dict(zip(COLUMNS, cells, strict=True))


def runs_in(table: Path) -> dict[Name, Sequence[Line]]:
    """The runs of an earlier table, if there is one."""
    if not table.is_file():
        return {}
    with table.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    by_run = groupby(lines, key=lambda line: (line["row"], line["changes"], line["seed"]))
    return {name: list(of) for name, of in by_run}


def accuracies(lines: Sequence[Line], above: float = 0, upto: float = 1, of: str = "accuracy") -> list[float]:
    """In percent, of the rounds in a share of the run."""
    last = int(lines[-1]["round"])
    return [100 * float(line[of]) for line in lines if above * last < int(line["round"]) <= upto * last]


def still_moves(lines: Sequence[Line]) -> float:
    """By how many points the mean of the last fifth of a run's rounds is above that of the fifth before.

    A run has come to rest if it is less than one point.
    """
    return fmean(accuracies(lines, 0.8)) - fmean(accuracies(lines, 0.6, 0.8))


def reached(lines: Sequence[Line], target: float) -> str:
    """The first evaluated round with this accuracy."""
    return next((line["round"] for line in lines if float(line["accuracy"]) >= target), "–")


def interval(values: Sequence[float]) -> str:
    """The mean over seeds, with its interval of 95 % by Student's distribution where there are several."""
    found = confidence_interval(values)
    return f"{found.mean:.1f}" if found.half is None else f"{found.mean:.1f} ± {found.half:.1f}"


def titled(row: str, changes: str) -> str:
    """A line's first cell."""
    return ", ".join(filter(None, (row, changes)))


def print_table(runs: Runs) -> None:
    """A line for each row of the recipe and each change of it, in Markdown."""
    targets = " | ".join(f"to {target:.0%}" for target in TARGETS)
    print(f"| row | seeds | last tenth of the rounds, % | moves | on own test parts, % | {targets} |")
    print(f"|---|--:|--:|--:|--:|{'--:|' * len(TARGETS)}")
    for (row, changes), names in groupby(runs, key=lambda name: name[:2]):
        seeds = [runs[name] for name in names]
        cells = [", ".join(reached(lines, target) for lines in seeds) for target in TARGETS]
        means = interval([fmean(accuracies(lines, 0.9)) for lines in seeds])
        own = interval([fmean(accuracies(lines, 0.9, of="personal")) for lines in seeds])
        moves = ", ".join(f"{still_moves(lines):+.1f}" for lines in seeds)
        print(f"| {titled(row, changes)} | {len(seeds)} | {means} | {moves} | {own} | {' | '.join(cells)} |")


def print_between(runs: Runs, first: int, last: int) -> None:
    """The means of the evaluations from a round to another, for each seed by itself: others may lack a changed run."""
    print(f"| row | seeds | rounds {first} to {last}, % | on own test parts, % |")
    print("|---|--:|--:|--:|")
    for (row, changes), names in groupby(runs, key=lambda name: name[:2]):
        spans = {name[2]: [line for line in runs[name] if first <= int(line["round"]) <= last] for name in names}
        cells = [
            ", ".join(f"{fmean(accuracies(lines, of=of)):.1f}" if lines else "–" for lines in spans.values())
            for of in ("accuracy", "personal")
        ]
        print(f"| {titled(row, changes)} | {', '.join(spans)} | {' | '.join(cells)} |")


def panels(runs: Runs) -> list[list[str]]:
    """Rows with the same seeds share a panel, since only their means compare; those with the most seeds come first."""
    seeds = {row: tuple(seed for other, _, seed in runs if other == row) for row, *_ in runs}
    kinds = sorted(set(seeds.values()), key=lambda kind: (-len(kind), kind))
    return [[row for row in seeds if seeds[row] == kind] for kind in kinds]


def draw(runs: Runs, to: Path) -> None:
    """A colour for each row: thin lines are seeds, thick ones their mean, of several evaluations each.

    Behind the rows of a later panel are, in grey, the means of the first one's, over the later one's seeds.
    """
    from matplotlib.figure import Figure

    shown = panels(runs)
    figure = Figure(figsize=(8.5, 4 * len(shown)), layout="constrained")
    for axes, panel in zip(figure.subplots(len(shown), squeeze=False, sharey=True)[:, 0], shown, strict=True):
        seeds = {seed for row, _, seed in runs if row in panel}
        for row in [] if panel is shown[0] else shown[0]:
            if same := [lines for name, lines in runs.items() if name[0] == row and name[2] in seeds]:
                axes.plot(*mean_curve(same), color="0.7", linewidth=2)
        for number, row in enumerate(panel):
            style = {"color": COLOURS[number % len(COLOURS)], "linestyle": "-" if number < len(COLOURS) else "--"}
            of_seeds = [lines for name, lines in runs.items() if name[0] == row]
            for lines in of_seeds:
                axes.plot(places(lines), accuracies(lines), alpha=0.3, linewidth=1, **style)
            axes.plot(*mean_curve(of_seeds), linewidth=2, label=row, **style)
        axes.set_xlabel("round")
        axes.set_ylabel("accuracy, %")
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(to, dpi=120, metadata={"Software": None})


def places(lines: Sequence[Line]) -> list[int]:
    """The evaluated rounds."""
    return [int(line["round"]) for line in lines]


def mean_curve(of_seeds: Sequence[Sequence[Line]]) -> tuple[list[int], list[float]]:
    """Rounds, and the mean over seeds of several evaluations each, in percent."""
    mean = [fmean(at) for at in zip(*map(accuracies, of_seeds), strict=True)]
    return places(of_seeds[0]), running_means(mean, SMOOTHED)


def collected(
    recipe: Recipe, only: str, folder: Path, seeds: int, changes: Sequence[str]
) -> Iterator[tuple[Name, list[Line]]]:
    """The finished runs in a folder, of the rows that a shell-style pattern selects."""
    planned = plan(recipe, 1.0, seeds, changes, recipe.part(only))
    measures = {row.name: recipe.by(row) for row in recipe.rows}
    for one, end in zip(planned, finished(planned, folder), strict=True):
        if end is not None and end.folder is not None:
            name = one.row, " ".join(changes), str(one.seed)
            yield name, list(lines_of(name, end.folder, measures[one.row]))


def main() -> None:
    """Collect, write, draw, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("runs", type=Path, help="folder of the runs")
    parser.add_argument("changes", nargs="*", help="dotted keys, as the runs had them")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="*", help="rows, shell-style; some may not have a changed setting")
    parser.add_argument("--between", nargs=2, type=int, help="first and last round of the table")
    options = parser.parse_intermixed_args()
    recipe = load_recipe(options.recipe)
    table, rows = RESULTS / f"{recipe.name}.csv", [row.name for row in recipe.rows]
    found = collected(recipe, options.only, options.runs, options.seeds, options.changes)
    runs = runs_in(table) | dict(found)
    runs = dict(sorted(runs.items(), key=lambda run: (rows.index(run[0][0]), run[0][1], int(run[0][2]))))
    with table.open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        out.writeheader()
        out.writerows(line for lines in runs.values() for line in lines)
    if unchanged := {name: lines for name, lines in runs.items() if not name[1]}:
        draw(unchanged, RESULTS / f"{recipe.name}.png")
    if options.between:
        print_between(runs, *options.between)
    else:
        print_table(runs)


if __name__ == "__main__":
    main()
