"""Rounds on an accelerator by the number of processes that share it, and on the processor for comparison.

    POTLUCK_DATA=... python benchmarks/accelerator.py [--widths 8 32 64] [--processes 1 4 10] [--rounds 4] [--cpu]

Ten of a hundred clients a round with a hundred images of CIFAR-10 each, five epochs, batches of 16, ResNet-10 to 26,
which is FedIN's setting with a fifth of the images. A line is the median of the rounds after the first, in which
libraries are loaded; every configuration is run once in each of `--repeats` turns.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from potluck.engine.numerics.device import description, device_named

DEPTHS = (10, 14, 18, 22, 26)


@dataclass(frozen=True)
class Setting:
    """What is timed; no processes are one for each core of the processor, and no accelerator."""

    method: str
    width: int
    size: int
    processes: int

    @property
    def words(self) -> list[str]:
        """The settings of its run."""
        models = ", ".join(f'{{name = "resnet{depth}", width = {self.width}}}' for depth in DEPTHS)
        one = self.processes == 1
        how = ["run.executor=sequential"] if one else ["run.executor=workers", f"run.workers={self.processes}"]
        device = ["run.computing.device=auto", *how] if self.processes else ["run.executor=workers"]
        method = ["method.sharing.weighting=uniform"] if self.method == "fedavg" else []
        return [self.method, f"federation.models=[{models}]", f"federation.image_size={self.size}", *method, *device]


COMMON = (
    "federation.dataset=cifar10",
    "federation.train_fraction=0.2",
    "federation.validation_fraction=0.0",
    'federation.augmentation=["crop", "flip", "cutout"]',
    "federation.clients=100",
    'federation.partition={name = "dirichlet", alpha = 0.5}',
    "run.cohort_fraction=0.1",
    "method.training.epochs=5",
    "method.training.batch_size=16",
    "method.training.lr=0.001",
)


def seconds_a_round(setting: Setting, rounds: int) -> float:
    """The median without the first round, and without the last, which is evaluated."""
    with tempfile.TemporaryDirectory() as folder:
        often = [f"run.rounds={rounds + 2}", f"run.evaluate_every={rounds + 2}", "run.evaluate_clients=1"]
        words = [*setting.words, *COMMON, *often]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if not setting.processes:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        done = subprocess.run(
            [sys.executable, "-m", "potluck", "run", *words, "--to", folder],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{setting}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        (timings,) = Path(folder).glob("*/timings.jsonl")
        lines = timings.read_text(encoding="utf-8").splitlines()
    return median(json.loads(line)["seconds_total"] for line in lines[1:-1])


def settings_of(widths: list[int], processes: list[int]) -> Iterator[Setting]:
    """Small pictures for networks of width 8, as `claims-fedin` has them."""
    for width in widths:
        for method in ("fedavg", "fedin"):
            for count in processes:
                yield Setting(method, width, 16 if width == 8 else 32, count)


def main() -> None:
    """Time, and print a line each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 4, 10])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--cpu", action="store_true", help="also on the processor alone")
    options = parser.parse_args()
    print(f"{description(device_named('auto'))}, {len(os.sched_getaffinity(0))} cores\n", flush=True)
    print("| method | width | image | processes | seconds a round |\n|---|--:|--:|--:|--:|", flush=True)
    for _ in range(options.repeats):
        for one in settings_of(options.widths, [*options.processes, *([0] if options.cpu else [])]):
            shown = one.processes or "processor alone"
            found = seconds_a_round(one, options.rounds)
            print(f"| {one.method} | {one.width} | {one.size} | {shown} | {found:.2f} |", flush=True)


if __name__ == "__main__":
    main()
