"""Six unrelated networks in one federation: plays what `six.toml` lists, and writes the table.

    make .venv-zoo/installed
    POTLUCK_DATA=... OMP_NUM_THREADS=1 .venv-zoo/bin/python benchmarks/six_models/run.py [--only ROW ...] [--seeds N ...]

Runs go to --runs, and one that was stopped goes on.
"""

import argparse
import sys
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "any_module")]

import torch  # noqa: E402
from table_runs import Entry  # noqa: E402
from torchvision_ops import stand_in  # noqa: E402

import potluck  # noqa: E402
from potluck.experiment.running.several import found, rounds_done  # noqa: E402
from potluck.experiment.settings.resolve import resolve  # noqa: E402


def entries(table: dict[str, Any], only: list[str], seeds: list[int], rounds: int | None):
    common = table["common"]
    for seed, row in product(seeds or table["seeds"], table["rows"]):
        if only and row["name"] not in only:
            continue
        training = {**common["training"], **row["method"].get("training", {})}
        federation = dict(common["federation"])
        federation["models"] = [str(HERE / m) if str(m).startswith("nets.py") else m for m in federation["models"]]
        tree = {
            "federation": federation,
            "method": {**row["method"], "training": training},
            "run": {**common["run"], "seed": seed, **({"rounds": rounds, "evaluate_every": rounds} if rounds else {})},
        }
        yield Entry(row=row["name"], seed=seed, experiment=resolve(tree, f"six.toml, {row['name']}"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--seeds", nargs="+", type=int, default=[])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--runs", type=Path, default=Path("runs/six_models"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    stand_in()
    table = tomllib.loads((HERE / "six.toml").read_text())
    wanted = list(entries(table, options.only, options.seeds, options.rounds))
    for entry, folder in zip(wanted, found(options.runs, [e.experiment for e in wanted]), strict=True):
        if folder is not None and rounds_done(folder) >= entry.experiment.run.rounds:
            continue
        tree = entry.experiment.tree()
        settings = {
            f"{a}.{b}": v
            for a in ("federation", "run", "method")
            for b, v in tree[a].items()
            if not (a == "method" and b == "name")
        }
        try:
            if folder is not None:
                result = potluck.resume(folder)
            else:
                result = potluck.run(tree["method"]["name"], settings=settings, to=options.runs, progress=False)
        except Exception as e:
            print(entry.row, entry.seed, "FAILED", type(e).__name__, e, flush=True)
            continue
        print(entry.row, entry.seed, "done", flush=True)


if __name__ == "__main__":
    main()
