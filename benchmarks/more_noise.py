"""One more round of a finished FedORION run of the mini table, with more and more noise to distil on.

    POTLUCK_DATA=... python benchmarks/more_noise.py [--runs runs/mini_table] [--seed 0] [--batches 20 100 400]

Does the server's distillation do nothing for want of noise, or for want of teachers? The round starts each time from
the same checkpoint, so the global model before it is the same, as are the clients' models that teach it. Prints its
accuracy on the common test set without distillation, and by the number of batches.
"""

import argparse
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from mini_table import HERE, entries
from table_runs import Entry, finished

from potluck.experiment.federation.assemble import assemble
from potluck.experiment.running.run import Run
from potluck.methods.fedorion import FedORION
from potluck.records import CHECKPOINT, LAST, Checkpoint


def accuracy_after(entry: Entry, stored: Path, batches: int) -> float | None:
    """Of the global model after one more round; 0 batches distil nothing."""
    experiment = entry.experiment
    method = experiment.method
    assert isinstance(method, FedORION)
    epochs = method.server_training.epochs
    method = replace(method, noise_batches=batches // epochs) if batches else replace(method, distillation=False)
    checkpoint = Checkpoint.read(stored / CHECKPOINT / LAST)
    assert checkpoint is not None
    config = replace(experiment.run, rounds=checkpoint.round + 1)
    with TemporaryDirectory() as place:
        folder = Path(place) / "run"
        shutil.copytree(stored, folder)
        return Run(method, assemble(experiment).federation, config, folder).run().evaluation.accuracy_global


def main() -> None:
    """Play and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/mini_table"), help="folder of the runs")
    parser.add_argument("--seed", type=int, default=0, help="of the run to go on with")
    parser.add_argument("--batches", type=int, nargs="+", default=[20, 100, 400], help="of noise, all epochs together")
    options = parser.parse_args()
    table = tomllib.loads((HERE / "mini_table.toml").read_text())
    (entry,) = [entry for entry in entries(table) if entry.row == "FedORION" and entry.seed == options.seed]
    stored = [folder for _, folder in finished([entry], options.runs)]
    if not stored:
        parser.error(f"{options.runs}: no finished run of FedORION with seed {options.seed}; play it by mini_table.py")
    for batches in [0, *options.batches]:
        found = accuracy_after(entry, stored[0], batches)
        print(f"{batches:4d} batches: {found:.4f}", flush=True)


if __name__ == "__main__":
    main()
