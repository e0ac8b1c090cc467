"""A million clients with states of their own, of five architectures, a thousand of them a round.

    python benchmarks/million.py [--clients 1000000] [--rounds 1000] [--cohort 1000] [--method fedproto] [--to FOLDER]

Each client has twenty examples for training and ten for tests, made from its number when it is asked, and a network of
about 500 to 2,000 weights that it keeps. Of all clients as many as are in a round are evaluated at the end. Every
twenty rounds one line says how fast these were in updates a second, how much memory all processes hold that nobody
else shares (PSS), and what is on the disk. Then another process goes on for one round, and it is timed until it can.
Prints a table; `--json FILE` keeps the readings.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from speed.machine import Processes, describe
from torch import nn

from potluck.core.federation import Federation, Site, SitesOnDemand
from potluck.core.ground.rng import fold_in
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import LocalTraining
from potluck.experiment.running.run import Run
from potluck.experiment.settings.schema import RunConfig
from potluck.experiment.watching.observers import Observer
from potluck.methods import get_method
from potluck.records import RoundRecord

CLASSES, FEATURES, TRAIN, TEST = 4, 16, 20, 10
EMBEDDED = 12


def network(width: int) -> nn.Module:
    """A network of 29 weights for each unit of its width, and 64 more."""
    body = nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, EMBEDDED), nn.ReLU()
    return nn.Sequential(*body, nn.Linear(EMBEDDED, CLASSES))


BUILDERS = {f"width {width}": partial(network, width) for width in (16, 24, 36, 48, 58)}
NAMES = list(BUILDERS)
EVERY = 20  # rounds
BOUNDARY = torch.randn(FEATURES, CLASSES, generator=fold_in(0, "boundary").generator())


def architecture(client: int) -> str:
    """The name of a client's network."""
    return NAMES[client % len(NAMES)]


def make(client: int) -> Site:
    """A client, by its number alone: points about a place of its own, in classes that a plane for all divides."""
    draws = fold_in(0, "client", client).generator()
    inputs = torch.randn(TRAIN + TEST, FEATURES, generator=draws) + torch.randn(FEATURES, generator=draws)
    whole = Examples(inputs, (inputs @ BOUNDARY).argmax(1))
    places = torch.arange(TRAIN + TEST)
    train, none, test = whole.take(places[:TRAIN]), whole.take(places[:0]), whole.take(places[TRAIN:])
    return Site(client, architecture(client), train, none, test)


class Watching(Observer):
    """Notes how fast rounds are, and what they hold."""

    def __init__(self, folder: Path, cohort: int) -> None:
        self.readings: list[dict[str, float]] = []
        self._folder, self._cohort, self._since = folder, cohort, time.perf_counter()

    def on_round_end(self, record: RoundRecord) -> None:
        """Read every few rounds."""
        if record.round % EVERY:
            return
        now = time.perf_counter()
        reading = {
            "round": record.round,
            "updates_a_second": EVERY * self._cohort / (now - self._since),
            "memory_mib": sum(map(_pss_mib, Processes().tree(os.getpid()))),
            "disk_mib": sum(path.stat().st_size for path in self._folder.rglob("*") if path.is_file()) / 2**20,
            "files": sum(1 for path in self._folder.rglob("*") if path.is_file()),
        }
        self.readings.append(reading)
        print(json.dumps(reading), file=sys.stderr, flush=True)
        self._since = time.perf_counter()


def run_of(options: argparse.Namespace, folder: Path, rounds: int) -> Run:
    """The run in a folder."""
    sites = SitesOnDemand(options.clients, make, architecture=architecture, train=TRAIN, test=TEST)
    federation = Federation(sites, BUILDERS, NAMES[0], CLASSES)
    training = LocalTraining("sgd", lr=0.05, epochs=1, batch_size=10)
    config = RunConfig(
        rounds=rounds,
        cohort_fraction=options.cohort / options.clients,
        evaluate_every=10**9,
        evaluate_clients=options.cohort,
        executor=options.executor,
        memory_gib=0.25,
    )
    return Run(get_method(options.method)(training=training), federation, config, folder)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--cohort", type=int, default=1000)
    parser.add_argument("--method", default="fedproto")
    parser.add_argument("--executor", default="auto")
    parser.add_argument("--to", type=Path, help="the run's folder; by default a temporary one")
    parser.add_argument("--json", type=Path, help="where the readings go")
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.resume:
        print(json.dumps(resumed(options)))
        return
    with TemporaryDirectory() as temporary:
        options.to = options.to or Path(temporary) / "run"
        found = {"machine": describe(), "options": {"clients": options.clients, "method": options.method}}
        found |= measured(options)
        print("\n".join(table(found)))
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """The readings of a run, and of another process that goes on with it."""
    began = time.perf_counter()
    run = run_of(options, options.to, options.rounds)
    watching = Watching(options.to, options.cohort)
    run.run(watching)
    seconds = time.perf_counter() - began
    command = [sys.executable, __file__, "--resume", "--to", str(options.to), "--rounds", str(options.rounds + 1)]
    command += ["--clients", str(options.clients), "--cohort", str(options.cohort)]
    command += ["--method", options.method, "--executor", options.executor]
    again = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {"seconds": seconds, "readings": watching.readings, "resumed": again}


def resumed(options: argparse.Namespace) -> dict[str, float]:
    """How long it takes until a run can go on, and how long the next round is."""
    began = time.perf_counter()
    run = run_of(options, options.to, options.rounds)
    run.load()
    ready = time.perf_counter() - began
    run.run()
    return {"seconds_until_it_goes_on": ready, "memory_mib": _pss_mib(os.getpid())}


def table(found: dict[str, Any]) -> list[str]:
    """The readings as Markdown."""
    rows = ["| round | updates a second | memory, MiB | on disk, MiB | files |", "|--:|--:|--:|--:|--:|"]
    readings = found["readings"]
    step = max(1, len(readings) // 10)
    for one in [*readings[:1], *readings[step - 1 :: step]]:
        cells = [f"{one['round']:,}", f"{one['updates_a_second']:,.0f}", f"{one['memory_mib']:,.0f}"]
        cells += [f"{one['disk_mib']:,.0f}", f"{one['files']:.0f}"]
        rows.append(f"| {' | '.join(cells)} |")
    again = found["resumed"]
    rows += ["", f"All rounds: {found['seconds']:,.0f} s. Another process goes on after"]
    return [*rows, f"{again['seconds_until_it_goes_on']:.1f} s, with {again['memory_mib']:,.0f} MiB."]


def _pss_mib(process: int) -> float:
    """The memory of a process, what it shares with others divided among them."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has just ended
        return 0.0
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    main()
