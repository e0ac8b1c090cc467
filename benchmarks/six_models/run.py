"""Six unrelated networks in one federation: plays what `six.toml` lists, and writes the tables.

    make .venv-zoo/installed
    POTLUCK_DATA=... OMP_NUM_THREADS=1 .venv-zoo/bin/python benchmarks/six_models/run.py [--only ROW ...]

To be called in the repository's root. Runs go to the first folder of --runs, and one that was stopped goes on; --show
plays none. What is finished in any folder of --runs goes to results/six_models.json, and the tables to six_models.md,
between the words that were written by hand.
"""

import argparse
import json
import os
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import potluck
from potluck.analysis.compare import interval
from potluck.analysis.read import StoredRun, read_run, seconds
from potluck.core.ground.errors import PotluckError
from potluck.experiment.running.several import found, rounds_done
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import Experiment
from potluck.records import CONFIG

sys.path.insert(0, str(Path(__file__).parents[1] / "any_module"))
sys.path.insert(0, str(Path(__file__).parents[1] / "speed"))
from machine import describe
from torchvision_ops import stand_in

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
BASELINE = "Local"
MODELS = {
    "resnet10": "our ResNet-10",
    "timm:test_efficientnet": "timm CNN",
    "timm:vit_tiny_patch16_224": "timm ViT",
    "nets.py:picture_bert": "HF BERT",
    "nets.py:functional_cnn": "user's CNN",
    "mlp3": "MLP",
}
"""The models' names in the tables, by how their architectures' names begin or their file is called."""
MEASURES = {"personal": "own test parts", "common": "common test set"}
ENOUGH = 4  # pairs for an interval
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


@dataclass(frozen=True)
class Entry:
    """A row of the tables with one seed."""

    row: str
    seed: int
    experiment: Experiment


def entries(table: Mapping[str, Any], only: Sequence[str], seeds: Sequence[int]) -> Iterator[Entry]:
    """What is to be played, seed by seed."""
    common = table["common"]
    here = os.path.relpath(HERE)
    models = [f"{here}/{name}" if str(name).startswith("nets.py") else name for name in common["federation"]["models"]]
    for seed, row in product(seeds or table["seeds"], table["rows"]):
        if only and row["name"] not in only:
            continue
        tree = {
            "federation": {**common["federation"], "models": models},
            "method": {**row["method"], "training": {**common["training"], **row["method"].get("training", {})}},
            "run": {**common["run"], "seed": seed},
        }
        yield Entry(row["name"], seed, resolve(tree, f"six.toml, {row['name']}"))


def play(wanted: Sequence[Entry], runs: Path) -> None:
    """Play what is not finished, one after the other in this process: a new one would not know torchvision's names."""
    for entry, folder in zip(wanted, found(runs, [entry.experiment for entry in wanted]), strict=True):
        if folder is not None and rounds_done(folder) >= entry.experiment.run.rounds:
            continue
        tree = entry.experiment.tree()
        name = tree["method"].pop("name")
        settings = {f"{part}.{key}": value for part in tree for key, value in tree[part].items()}
        try:
            if folder is None:
                potluck.run(name, settings=settings, to=runs, progress=False)
            else:
                potluck.resume(folder, progress=False)
        except PotluckError as problem:
            print(f"{entry.row}, seed {entry.seed}: {problem}", flush=True)
        else:
            print(f"{entry.row}, seed {entry.seed}", flush=True)


def observed(wanted: Sequence[Entry], folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Of each finished run what the tables need, row by row."""
    stored = [read_run(path.parent) for folder in folders for path in sorted(folder.glob(f"*/{CONFIG}"))]
    lines = list[dict[str, Any]]()
    for entry in sorted(wanted, key=lambda entry: entry.seed):
        tree = entry.experiment.tree()
        for run in stored:
            same = run.config["method"] == tree["method"] and run.seed == entry.seed
            if same and len(run.rounds) == entry.experiment.run.rounds:
                lines.append(line(entry, run))
                break
    return lines


def line(entry: Entry, run: StoredRun) -> dict[str, Any]:
    """What the tables need of a run."""
    last = [record for record in run.clients if record.round == len(run.rounds)]
    return {
        "row": entry.row,
        "seed": entry.seed,
        "commit": run.manifest["potluck_commit"][:7],
        "seconds": round(sum(seconds(run).values())),
        "megabytes": round(sum(record.bytes_down + record.bytes_up for record in run.rounds) / 1e6, 1),
        "notes": run.rounds[-1].notes or {},
        "clients": [
            {
                "client": record.client,
                "model": next(model for start, model in MODELS.items() if start in record.architecture),
                "examples": record.examples_train,
                **{measure: record.value(measure, "accuracy") for measure in MEASURES},
            }
            for record in last
        ],
    }


def cell(values: Sequence[float], *, gain: bool) -> str:
    """Values in points, as their mean with its interval, if they are enough; in bold where that is without 0."""
    over = interval(values)
    assert over is not None
    if not gain or len(values) < ENOUGH:
        return f"{over.mean:+.1f}" if gain else f"{over.mean:.1f}"
    half = over.half or 0.0
    text = f"{over.mean:+.1f} ± {half:.1f}"
    return f"**{text}**" if abs(over.mean) > half > 0 else text


def tables(lines: Sequence[dict[str, Any]]) -> str:
    """Both tables as Markdown."""
    local = {
        (line["seed"], client["client"]): client
        for line in lines
        if line["row"] == BASELINE
        for client in line["clients"]
    }
    text = ""
    for measure, title in MEASURES.items():
        text += f"\n### {title[0].upper()}{title[1:]}\n\n"
        text += f"| | seeds | {' | '.join(MODELS.values())} | all | MB |\n"
        text += f"|---|--:|{'--:|' * len(MODELS)}--:|--:|\n"
        for row in dict.fromkeys(line["row"] for line in lines):
            mine = [line for line in lines if line["row"] == row]
            values = defaultdict[str, list[float]](list)
            for seed, client in ((one["seed"], client) for one in mine for client in one["clients"]):
                other = local[seed, client["client"]]
                base = 0.0 if row == BASELINE else other[measure]
                for column in (client["model"], "all"):
                    values[column].append(100 * (client[measure] - base))
            cells = [cell(values[column], gain=row != BASELINE) for column in (*MODELS.values(), "all")]
            sent = fmean(one["megabytes"] for one in mine)
            text += f"| {row} | {len(mine)} | {' | '.join(cells)} | {sent:.1f} |\n"
    return text


def main() -> None:
    """Play, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="these rows alone")
    parser.add_argument("--seeds", nargs="+", type=int, default=[], metavar="N", help="these seeds alone")
    parser.add_argument("--show", action="store_true", help="play nothing")
    parser.add_argument("--runs", nargs="+", type=Path, default=[Path("runs/six_models")], help="folders of runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    stand_in()
    table = tomllib.loads((HERE / "six.toml").read_text())
    if not options.show:
        play(list(entries(table, options.only, options.seeds)), options.runs[0])
    lines = observed(list(entries(table, [], [])), options.runs)
    store, page = RESULTS / "six_models.json", RESULTS / "six_models.md"
    store.write_text(json.dumps({"machine": describe(), "runs": lines}, indent=1) + "\n")
    text = page.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    page.write_text(f"{before}\n{tables(lines)}\n{after}")
    print(tables(lines))


if __name__ == "__main__":
    main()
