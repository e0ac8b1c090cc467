"""How much memory the server needs to average the replies of a cohort, in copies of the model.

    OMP_NUM_THREADS=1 python benchmarks/aggregation_memory.py
    python benchmarks/aggregation_memory.py --model 8 --clients 30    # one row: a linear net of 8 MiB

Each number is measured in a process of its own. Clients' work is left out: an executor hands on replies as they would
arrive from elsewhere, each as the bytes of a message that is read from a file when it is its turn. What is counted is
this process's memory at its peak during the round, less what it had before with the server's weights in it. The first
column is FedAvg as it is; the second is FedAvg with `cohort.ask`, which has all replies in memory. Needs Linux.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from potluck import Examples, Federation, Site, fl
from potluck.core.nets.weights import buffers_of, parameters_of
from potluck.engine.client.runtime import ClientRuntime, Outcome
from potluck.engine.client.session import Answer
from potluck.engine.executors import Executor, Pending
from potluck.engine.rounds.engine import Engine
from potluck.methods.fedavg import FedAvg, State
from potluck.models import get_model

FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
"""What was freed before the measurement would otherwise be used again, and not be counted."""

ROWS = [("resnet18", 10, True), ("resnet18", 100, False)]
"""Model, clients, and whether to measure what holding all replies takes: for 100 of these more than 4 GiB."""


class Arrivals(Executor):
    """Every client answers with the message in a file, which is read when it is the client's turn."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def run(self, host: ClientRuntime, tasks: Sequence[Pending]) -> Iterator[Outcome]:
        """Outcomes in the order of the tasks."""
        return (Answer(client, self._file.read_bytes(), None, ()) for client in range(len(tasks)))


class Together(FedAvg):
    """FedAvg that waits for all replies."""

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        """One round, in which all replies are in memory."""
        replies = cohort.ask(self.local_update, self.sharing.send(state.weights, cohort, server))
        return State(self.sharing.merge(state.weights, replies, server.roster))


def net(model: str) -> nn.Module:
    """A model by name, or a linear one of this many MiB."""
    if model.isdigit():
        return nn.Linear(1024, 256 * int(model), bias=False)
    return get_model(model)(10, (3, 32, 32))


def peak(model: str, clients: int, together: bool) -> float:
    """The peak of one round's aggregation, in copies of the model."""
    images = torch.zeros(1, 3, 32, 32) if not model.isdigit() else torch.zeros(1, 1024)
    data = Examples(images, torch.zeros(1, dtype=torch.int64))
    sites = {id: Site(id, "net", data, data, data) for id in range(clients)}
    federation = Federation(sites, {"net": lambda: net(model)}, "net", 10)
    method = Together() if together else FedAvg()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "reply")
        trained = net(model)
        reply = fl.Message(weights=parameters_of(trained), buffers=buffers_of(trained) or None, examples=1)
        file.write_bytes(reply.encode())
        size = reply.nbytes
        del trained, reply
        engine = Engine(method, federation, executor=Arrivals(file))
        state = engine.start()
        engine.round(1, state, [0])  # what is loaded once is not counted
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        engine.round(2, state, range(clients))
        return (resident("VmHWM") - before) / size


def resident(which: str) -> int:
    """Bytes of this process in memory, now ("VmRSS") or at most ("VmHWM")."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


def measured(model: str, clients: int, together: bool) -> float:
    """`peak`, in a process of its own."""
    command = [
        sys.executable,
        __file__,
        "--model",
        model,
        "--clients",
        str(clients),
        *["--together"] * together,
        "--here",
    ]
    environment = {**os.environ, **FREED_AT_ONCE}
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def main() -> None:
    """Print the table, or one number."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--here", action="store_true", help="measure in this process and print the number alone")
    asked = parser.parse_args()
    if asked.here:
        print(json.dumps(peak(asked.model, asked.clients, asked.together)))
        return
    print("| model | clients | one at a time | all together |")
    print("|---|--:|--:|--:|")
    for model, clients, both in [(asked.model, asked.clients, True)] if asked.model else ROWS:
        one, together = measured(model, clients, False), measured(model, clients, True) if both else None
        print(f"| {model} | {clients} | {one:.2f} | {'' if together is None else f'{together:.2f}'} |", flush=True)


if __name__ == "__main__":
    main()
