"""A server and its nodes as real programs, each with a folder and a terminal of its own."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import tomli_w

from potluck.flower.deploy.processes import free_port
from potluck.records import ROUNDS

POTLUCK = str(Path(sys.executable).parent / "potluck")
TWO_CLIENTS = {
    "federation": {"dataset": "digits", "clients": 2, "train_fraction": 0.1, "models": [{"name": "cnn2", "width": 2}]},
    "method": {"name": "fedavg"},
    "run": {"rounds": 1000, "common_test": False, "evaluate_every": 1000},
}


class Deployment:
    """A server and nodes, each with a folder and a terminal of its own.

    What a node carries is a copy of what `potluck keys` made for it, as it is on another machine.
    """

    def __init__(self, place, tree=TWO_CLIENTS):
        self.place, self.address, self.running = place, f"127.0.0.1:{free_port()}", {}
        self.printed = ""
        (place / "f.toml").write_text(tomli_w.dumps(tree))

    def keys(self, *words):
        done = subprocess.run(
            [POTLUCK, "keys", "keys", *words], cwd=self.place, capture_output=True, text=True, check=True
        )
        self.printed += done.stdout

    def carry(self, name, *files):
        """Copy a node's folder to its machine, or some of its files over those that are there."""
        for file in files or ("ca.crt", "node.key"):
            (self.place / name).mkdir(mode=0o700, exist_ok=True)
            shutil.copy(self.place / "keys/nodes" / name / file, self.place / name / file)

    def serve(self, folder, *words):
        words = ["f.toml", "--keys", "keys", "--listen", self.address, "--folder", folder, *words]
        words += ["--log-json", "server.jsonl"]
        self.start("server", "serve", *words)

    def join(self, name, address=None, *more):
        words = ("--keys", name, "--state", f"state-{name}", "--log-json", f"{name}.jsonl")
        self.start(name, "join", address or self.address, *words, *more)

    def begin(self, folder, *names):
        """Make keys for nodes, serve a run, and have these nodes join it."""
        self.keys(*(word for name in names for word in ("--node", name)))
        self.serve(folder)
        self.hears("server", "nodes join by")
        for name in names:
            self.carry(name)
            self.join(name)

    def end(self, name, within=60):
        self.running[name].terminate()
        return self.running.pop(name).wait(within)

    def lines(self, name):
        log = self.place / f"{name}.log"
        return log.read_text().splitlines() if log.is_file() else []

    def hears(self, name, pattern, since=0, within=240):
        """Wait for a line in a terminal, after the first ones; return how many there are up to it."""
        deadline = time.monotonic() + within
        while True:
            for number, line in enumerate(self.lines(name)[since:], start=since + 1):
                if re.search(pattern, line):
                    return number
            assert time.monotonic() < deadline, (name, pattern, self.lines(name), self.lines("server"))
            time.sleep(0.2)

    def close(self):
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            process.wait(60)

    def start(self, name, *words):
        with (self.place / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [POTLUCK, *words], cwd=self.place, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    @property
    def heard(self):
        """All lines of all terminals, numbers apart."""
        logs = [line for log in self.place.glob("*.log") for line in log.read_text().splitlines()]
        return {numbers_apart(line) for line in [*logs, *self.printed.splitlines()]}


def numbers_apart(line):
    return re.sub(r"\d+", "0", line.strip())


def rounds_of(run):
    """The records of the rounds that have ended."""
    file = run / ROUNDS
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def replied(deployment, within=240):
    """Wait for a round that began after now, and in which both nodes replied, of the run in the folder `run`."""
    run, deadline = deployment.place / "run", time.monotonic() + within
    done = len(rounds_of(run))
    while not any(record["replied"] == [0, 1] for record in rounds_of(run)[done + 1 :]):
        assert time.monotonic() < deadline, rounds_of(run)
        time.sleep(0.2)
