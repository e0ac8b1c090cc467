"""What a twin takes of this machine: of simulated hours, and beside a run.

    OMP_NUM_THREADS=1 python benchmarks/twin.py [--hours 1000] [--shares 0.1 1.0] [--rounds 3] [--repeats 7]

*Hours*: what `potluck twin FEDERATION --devices DEVICES --hours HOURS` does, once it has tried two rounds of a few
clients: the course of so many hours, of clients whose devices are of five kinds, there all day, at some hours of each
day, or by a trace in which each comes and goes as was drawn; with a tenth of the clients in each round, and with all.
*Beside a run*: the same run, of smaller networks, with a twin and without one, in turns, after a first one of each that
is left out. All seconds are of processor time, of one thread.
"""

import argparse
import random
import time
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from potluck.experiment.federation.assemble import assemble
from potluck.experiment.federation.suitability import federation_of
from potluck.experiment.running.execute import execute, prepare
from potluck.experiment.running.foresee import Foreseen, foresee
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import Experiment
from potluck.twin.devices import Fleet
from potluck.twin.simulate import Summary, simulate

DAY = 86_400
CLOSE = {"deadline_s": 120, "quorum": 20}


def trace(path: Path, clients: range, days: int = 7) -> None:
    """Write when these clients' devices are there: for minutes or hours at a time, as drawn."""
    draws = random.Random(0)
    rows = ["client,from_s,to_s"]
    for client in clients:
        moment = draws.uniform(0, 7200)
        while moment < days * DAY:
            end = min(moment + draws.uniform(600, 6 * 3600), days * DAY)
            rows.append(f"{client},{moment:.0f},{end:.0f}")
            moment = end + draws.uniform(600, 8 * 3600)
    path.write_text("\n".join(rows) + "\n")


def experiment_of(clients: int, fraction: float, place: Path, width: int = 64, epochs: int = 5) -> Experiment:
    """A federation of devices that come and go."""
    fifth = clients // 5
    trace(place / "trace.csv", range(4 * fifth, clients))
    kinds = [("phone-entry", "22-6"), ("phone-high", "0-7, 21-24"), ("pi-zero-2", "always"), ("office-pc", "8-18")]
    named = [
        {"clients": f"{at * fifth}-{(at + 1) * fifth - 1}", "device": device, "available": hours, "latency_s": 5.0}
        for at, (device, hours) in enumerate(kinds)
    ]
    last = {"device": "pi-4", "available": str(place / "trace.csv"), "latency_s": 5.0}
    run = {"cohort_fraction": fraction, "tolerate_failures": True, "rounds_close": CLOSE, "executor": "sequential"}
    models = [{"name": name, "width": width} for name in ("cnn2", "cnn3", "cnn4")]
    federation = {"dataset": "mnist", "clients": clients, "partition": {"name": "iid"}, "models": models}
    method = {"name": "fedproto", "training": {"epochs": epochs}}
    return resolve({"federation": federation, "method": method, "run": {**run, "twin": {"devices": [*named, last]}}})


def hours(experiment: Experiment, known: Foreseen, count: float) -> tuple[Summary, float]:
    """The course of so many hours, and the seconds that it took."""
    began, found, run = time.process_time(), Summary(), experiment.run
    assert run.twin is not None
    course = run.course(Fleet(run.twin.devices, sorted(known.like)))
    rounds = simulate(course, known.loads(experiment, lambda _: ()), run.needed)
    for timed in takewhile(lambda timed: timed.end <= count * 3600, rounds):
        found.add(timed)
    return found, time.process_time() - began


def beside(experiment: Experiment, place: Path, rounds: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of a run without and with a twin whose devices are always there, in turns."""
    assert experiment.run.twin is not None
    there = tuple(replace(device, available="always") for device in experiment.run.twin.devices)
    tree: dict[str, Any] = {**experiment.tree()}
    tree["run"] |= {"rounds": rounds, "evaluate_every": rounds, "common_test": False, "cohort_fraction": 0.1}
    tree["run"] |= {"rounds_close": {"deadline_s": 1e6, "quorum": 1}, "twin": None}
    without = resolve(tree)
    both = {
        "without": without,
        "with": replace(without, run=replace(without.run, twin=replace(experiment.run.twin, devices=there))),
    }
    taken: dict[str, list[float]] = {name: [] for name in both}
    for repeat in range(1 + repeats):
        for name, one in both.items() if repeat % 2 else reversed(both.items()):
            folder = place / f"{name}-{repeat}"
            folder.mkdir()
            run = prepare(one, assemble(one), folder)
            began = time.process_time()
            execute(run, one, folder)
            taken[name].append(time.process_time() - began)
    return {name: seconds[1:] for name, seconds in taken.items()}


def main() -> None:
    """Measure, and print both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=1000, help="that are simulated")
    parser.add_argument("--clients", type=int, default=1000, help="of the federation")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.1, 1.0], help="of the clients in a round")
    parser.add_argument("--rounds", type=int, default=3, help="of the run beside which there is a twin")
    parser.add_argument("--repeats", type=int, default=7, help="of the run, of each kind")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        place = Path(folder)
        print(
            "| clients in a round | hours | rounds | turns of clients | seconds |",
            "|--:|--:|--:|--:|--:|",
            sep="\n",
        )
        for fraction in options.shares:
            experiment = experiment_of(options.clients, fraction, place)
            known = foresee(experiment, federation_of(experiment))
            found, seconds = hours(experiment, known, options.hours)
            cells = [f"{fraction:.0%}", f"{options.hours:g}", f"{found.rounds:,}", f"{found.asked:,}", f"{seconds:.0f}"]
            print(f"| {' | '.join(cells)} |", flush=True)
        taken = beside(
            experiment_of(options.clients, 0.1, place, width=16, epochs=1), place, options.rounds, options.repeats
        )
        ratios = [mine / other for mine, other in zip(taken["with"], taken["without"], strict=True)]
        print("", "| run | seconds, median | least | most |", "|---|--:|--:|--:|", sep="\n")
        for name, seconds in taken.items():
            print(f"| {name} a twin | {median(seconds):.2f} | {min(seconds):.2f} | {max(seconds):.2f} |")
        print(f"\nWith against without, turn by turn: {median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
