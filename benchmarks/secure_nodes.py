"""Secure sums over real nodes of which three tenths leave: are the bytes those of plain sums of the rest?

    OMP_NUM_THREADS=1 python benchmarks/secure_nodes.py [--methods fedavg scaffold]

Seven programs `potluck join`, each with a list of its peers, sum two rounds of each method with one `potluck serve`. In
the second round the workers of two nodes are killed: one node's when it has sent its boxes, so that it adds nothing,
and one's when it has sent its numbers, which count, so that the others have to take its mask off the sums. Then the run
is repeated in one process, where the same clients fail, and the same rounded numbers are added up. Both checkpoints
must have the same digest. Beside it: seconds of a round, and of a run over the same nodes without secure sums.

The page is `benchmarks/results/secure_nodes.md`. Needs the extra `flower`, and Linux.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import tomli_w
from speed.machine import describe

from potluck.core.roles import Failure
from potluck.engine.client.runtime import ClientRuntime, Outcome
from potluck.engine.client.session import Call
from potluck.engine.executors import Pending
from potluck.engine.executors.choice import ChosenExecutor
from potluck.engine.executors.sequential import Sequential
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.running.execute import execute, prepare
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.tables import read_toml
from potluck.flower.deploy.processes import free_port
from potluck.records import CHECKPOINT, CONFIG, LAST, ROUNDS, TIMINGS, Checkpoint

PAGE = Path(__file__).parent / "results" / "secure_nodes.md"
POTLUCK = str(Path(sys.executable).parent / "potluck")
NODES = [f"site-{number}" for number in range(7)]
LEAVES_AFTER = {"site-1": "boxes", "site-4": "words"}
HALVES = {"levels": [1.0, 0.5]}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {}, "scaffold": {}, "fedin": {}, "heterofl": HALVES, "fedrolex": HALVES, "fjord": HALVES,
    "depthfl": HALVES, "fedproto": {}, "fd": {"averaged": "all"}, "lgfedavg": {},
}  # fmt: skip


def tree_of(name: str, secure: bool) -> dict[str, Any]:
    """The experiment: seven clients, of two sizes where the method has slices of networks."""
    method = METHODS[name]
    federation = {"capacities": [1.0] * 5 + [0.5] * 2} if method == HALVES else {}
    model = {"name": "cnn2", "width": 4}
    return {
        "federation": {"dataset": "digits", "train_fraction": 0.3, "clients": 7, "models": [model], **federation},
        "method": {"name": name, **method},
        "run": {"rounds": 2, "common_test": False, "secure_sums": secure, "tolerate_failures": True},
    }


class Site:
    """A node's program, which is started anew for each run, and may lose its worker."""

    def __init__(self, place: Path, name: str, address: str) -> None:
        self.place, self.name, self._address = place, name, address
        self._state = place / f"state-{name}"

    @contextmanager
    def joined(self, secure: bool) -> Iterator["Site"]:
        """The program, until the block ends."""
        words = ["--keys", f"keys/nodes/{self.name}", "--state", self._state.name]
        words += ["--peers", "peers.txt"] if secure else []
        with (self.place / f"{self.name}.log").open("ab") as log:
            program = subprocess.Popen([POTLUCK, "join", self._address, *words], cwd=self.place, stdout=log, stderr=log)
        try:
            yield self
        finally:
            program.terminate()
            program.wait(60)

    def leave_after(self, answer: str) -> bool:
        """Kill the worker if it has given this answer in the second round; whether one was killed."""
        log = self._state / "audit.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        if not any(one["round"] == 2 and one["asked"] == f"secure sums: {answer}" for one in lines):
            return False
        killed = False
        for process in Path("/proc").glob("[0-9]*"):
            words = _read(process / "cmdline").split("\0")
            if "potluck.flower.node.resident" in words and str(self._state.resolve()) in words[-2]:
                os.kill(int(process.name), signal.SIGKILL)
                killed = True
        return killed


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def served(place: Path, sites: Sequence[Site], address: str, name: str, secure: bool) -> Path:
    """A run over the nodes, two of which leave in its second round if it is secure; its folder."""
    run = place / f"{name}-{'secure' if secure else 'clear'}"
    (place / "f.toml").write_text(tomli_w.dumps(tree_of(name, secure)))
    for site in sites:
        (site.place / f"state-{site.name}" / "audit.jsonl").unlink(missing_ok=True)
    words = ["serve", "f.toml", "--keys", "keys", "--listen", address, "--folder", run.name]
    waiting = dict(LEAVES_AFTER) if secure else {}
    with (place / "server.log").open("ab") as log, _all(site.joined(secure) for site in sites):
        server = subprocess.Popen([POTLUCK, *words], cwd=place, stdout=log, stderr=log)
        while server.poll() is None:
            for site in sites:
                if site.name in waiting and _there(site) and site.leave_after(waiting[site.name]):
                    del waiting[site.name]
            time.sleep(0.05)
    assert server.returncode == 0, (place / "server.log").read_text()[-2000:]
    assert not waiting, f"{', '.join(waiting)}: no worker was killed"
    return run


def _there(site: Site) -> bool:
    return (site.place / f"state-{site.name}" / "audit.jsonl").is_file()


@contextmanager
def _all(managers: Iterator[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        yield


class Leaving(Sequential):
    """Clients in this process that leave when others left at their nodes."""

    def __init__(self, failed: Mapping[int, set[int]]) -> None:
        self._failed = failed

    def run(self, host: ClientRuntime, tasks: Sequence[Pending]) -> Iterator[Outcome]:
        """Their outcomes are failures."""
        for task in tasks:
            job = task.make()
            outcome = host.execute(job)
            left = isinstance(job, Call) and job.client in self._failed.get(job.round, ())
            yield Failure(job.client, "left", "it has left") if left else outcome


def in_the_open(run: Path, records: Sequence[Mapping[str, Any]]) -> str:
    """The digest of the same run in this process, of which the same clients fail."""
    experiment, here = resolve(read_toml(run / CONFIG)), run.with_name(f"{run.name}-here")
    here.mkdir()
    failed = {record["round"]: {int(client) for client in record.get("failed", {})} for record in records}
    choice = ChosenExecutor(Leaving(failed), "sequential", 1, "")
    execute(prepare(experiment, assemble(experiment), here, choice), experiment, here)
    return digest_of(here)


def digest_of(run: Path) -> str:
    """What the run's last checkpoint holds, in a word."""
    found = Checkpoint.read(run / CHECKPOINT / LAST)
    assert found is not None
    return found.digest


def lines(path: Path) -> list[dict[str, Any]]:
    """The records in a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def seconds(run: Path) -> float:
    """Of a round, the mean of both."""
    return mean(float(record["seconds_total"]) for record in lines(run / TIMINGS))


def measured(place: Path, sites: Sequence[Site], address: str, name: str) -> dict[str, Any]:
    """One method."""
    run = served(place, sites, address, name, True)
    records = lines(run / ROUNDS)
    clear = served(place, sites, address, name, False)
    second = records[1]
    why = {client: re.sub(r"\s+", " ", reason)[:90] for client, reason in second.get("failed", {}).items()}
    return {
        "method": name,
        "equal": digest_of(run) == in_the_open(run, records),
        "lost": [record.get("lost") for record in records],
        "left": why,
        "summed": second["secure"]["summed"],
        "seconds": seconds(run),
        "clear": seconds(clear),
    }


def _verdict(one: Mapping[str, Any]) -> str:
    """Whether the bytes are the same, of rounds that were summed."""
    if any(one["lost"]):
        return "**a round was lost**"
    return "yes" if one["equal"] else "**no**"


def page(found: Sequence[Mapping[str, Any]]) -> str:
    """All that was measured, as Markdown."""
    head = ("method", "same bytes", "numbers summed in round 2", "clients not in it", "s a round", "in the clear, s")
    rows = [
        (one["method"], _verdict(one), f"{one['summed']:,}", ", ".join(one["left"]) or "none",
         f"{one['seconds']:.1f}", f"{one['clear']:.1f}")
        for one in found
    ]  # fmt: skip
    table = [head, ("---", "---", "---:", "---", "---:", "---:"), *rows]
    on, intro = describe(), (__doc__ or "").split("\n\n")[2]
    made = f"Made by `python benchmarks/secure_nodes.py` on {on['cores']} cores of {on['cpu']}."
    parts = ["# Secure sums over real nodes", intro, "\n".join(f"| {' | '.join(row)} |" for row in table), made]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Measure the methods that are asked for, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--page", type=Path, default=PAGE)
    asked = parser.parse_args()
    found: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        place, address = Path(folder), f"127.0.0.1:{free_port()}"
        words = [word for name in NODES for word in ("--node", name)]
        subprocess.run([POTLUCK, "keys", "keys", *words], cwd=place, check=True, capture_output=True)
        own = [
            subprocess.run(
                [POTLUCK, "peer", name, "--state", f"state-{name}"],
                cwd=place, check=True, capture_output=True, text=True,
            ).stdout
            for name in NODES
        ]  # fmt: skip
        (place / "peers.txt").write_text("".join(own))
        sites = [Site(place, name, address) for name in NODES]
        for name in asked.methods:
            found.append(measured(place, sites, address, name))
            print(json.dumps(found[-1]), flush=True)
            asked.page.write_text(page(found))


if __name__ == "__main__":
    main()
