"""Time a federated round in Potluck and in other frameworks, from one interleaved run, and print the ratios.

    python benchmarks/speed/run.py --peers /path/to/peers/bin/python [--workloads mlp cnn] [--repeats 5]
    python benchmarks/speed/run.py --show benchmarks/results/speed.json

`requirements-peers.txt` says what the peers' environment holds; without `--peers` Potluck plays against a plain loop.
The README beside this file says what is measured and what is not.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from entries import CAVEATS, base, entries
from machine import describe
from referee import Contestant, play_all
from tables import page
from workloads import WORKLOADS, chosen_workload

RESULTS = Path(__file__).parents[1] / "results" / "speed.json"


def interpreter(path: str) -> str:
    """A Python by its path from here, since contestants run in another folder; links are kept, as venvs need them."""
    if not os.access(path, os.X_OK):
        raise argparse.ArgumentTypeError(f"{path} is no program; expected the python of an environment")
    return str(Path(path).absolute())


def checkout(path: str) -> Path:
    """Another checkout of Potluck."""
    if not Path(path, "benchmarks", "speed", "contestants", "potluck.py").is_file():
        raise argparse.ArgumentTypeError(f"{path} has no benchmarks/speed; expected a checkout of Potluck")
    return Path(path).absolute()


def play_workload(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Let everybody who can play it play it; what to write down."""
    pythons = {"own": sys.executable, "peers": options.peers, "older_jax": options.older_jax}
    workload, load = chosen_workload(name, options.smoke), os.getloadavg()
    print(name, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        contestants = [
            Contestant(entry, name, options.smoke, pythons[entry.environment], Path(folder, f"{number}.log"))
            for number, entry in enumerate(entries(name, options.cores, options.before))
            if pythons[entry.environment] and fnmatch(entry.label, options.only)
        ]
        play_all(contestants, options.repeats, tell=lambda line: print(line, flush=True))
    return {
        "workload": asdict(workload),
        "steps": workload.steps,
        "base": base(name, options.cores).label,
        "load_average_before": load,
        "contestants": [contestant.record() for contestant in contestants],
    }


def play(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The results after each workload, so that an interrupted run leaves what it has."""
    results: dict[str, Any] = {
        "machine": describe(),
        "repeats": options.repeats,
        "smoke": options.smoke,
        "workloads": {},
        "caveats": CAVEATS,
    }
    for name in options.workloads:
        results["workloads"][name] = play_workload(name, options)
        yield results


def main() -> None:
    """Play and write, or read; then print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=interpreter, help="Python of the environment with the other frameworks")
    parser.add_argument(
        "--older-jax", type=interpreter, help="Python of an environment with FedJAX and the JAX of its time"
    )
    parser.add_argument(
        "--before", type=checkout, metavar="FOLDER", help="an earlier checkout of Potluck to compare with"
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=5, help="measured rounds of each contestant")
    parser.add_argument("--cores", type=int, default=2, help="processes or threads of the variants with several")
    parser.add_argument("--only", default="*", help="contestants to play, such as 'Potluck*'")
    parser.add_argument("--smoke", action="store_true", help="everything in small, to see whether it runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of the results")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the tables of such a file and play nothing")
    options = parser.parse_args()
    if options.show:
        results = json.loads(options.show.read_text())
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # not before all contestants have gone
        options.out.parent.mkdir(parents=True, exist_ok=True)
        for results in play(options):
            options.out.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(page(results)))


if __name__ == "__main__":
    main()
