"""What portable kernels cost: steps of training with them, beside steps with those that torch chooses; and whole runs.

    OMP_NUM_THREADS=1 python benchmarks/portable.py [--repeats 5] [--runs]

For each network, programs of both kinds take turns, each one thread: five steps of Adam on a batch of 32 examples,
after two that are left out. With `--runs`, commands of both kinds take turns, from their start to their end, each with
the executor that it chooses itself: clients with small nets are stacked with torch's own kernels alone. Seconds are of
processor time. The digest is that of the portable run's checkpoint, meant to be the same on
every processor.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median

from speed.machine import describe

from potluck.engine.numerics.kernels import ENVIRONMENT

NETS = {
    "mlp3": ({}, (1, 28, 28)),
    "cnn4": ({"width": 32}, (3, 32, 32)),
    "preresnet20": ({}, (3, 32, 32)),
    "resnet10": ({"width": 16}, (3, 32, 32)),
    "mobilenetv2": ({}, (3, 32, 32)),
    "vit": ({"depth": 2}, (3, 32, 32)),
}
STEPS, FIRST = 5, 2
_TESTED = (
    "federation.dataset=digits",
    "federation.train_fraction=0.2",
    "federation.public=holdout",
    "federation.clients=3",
)
_CIFAR = (
    "federation.dataset=cifar10",
    "federation.train_fraction=0.02",
    "federation.clients=10",
    "run.evaluate_every=5",
)
_RESNETS = ", ".join(f'{{name = "resnet{depth}", width = 8}}' for depth in (10, 14, 18))
RUNS: dict[str, tuple[str, ...]] = {
    "the demonstration": (),
    "FedMD, digits, 3 clients, `cnn2` and `vit` of depth 1, 20 rounds": (
        *("fedmd", *_TESTED, 'federation.models=["cnn2", {name = "vit", depth = 1}]', "run.rounds=20"),
    ),
    "FedAvg, digits, 2 clients, `cnn2` and `cnn3`, 100 rounds": (
        *("fedavg", "federation.dataset=digits", "federation.clients=2", 'federation.models=["cnn2", "cnn3"]'),
        "run.rounds=100",
    ),
    "FedAvg, CIFAR-10, 10 clients, `cnn4` of width 16, 10 rounds": (
        *("fedavg", *_CIFAR, 'federation.models=[{name = "cnn4", width = 16}]', "run.rounds=10"),
    ),
    "FedIN, CIFAR-10, 10 clients, `resnet10` to `resnet18` of width 8, 5 rounds": (
        *("fedin", *_CIFAR, "run.rounds=5"),
        f"federation.models=[{_RESNETS}]",
    ),
}
"""The second and the third are as in the tests that the digest is one, but longer."""


def steps(name: str, kernels: str) -> float:
    """Seconds of the steps, in this process."""
    import torch
    from torch.nn import functional as F

    from potluck.engine.numerics.numerics import Numerics
    from potluck.models import get_model

    torch.set_num_threads(1)
    Numerics(kernels="portable" if kernels == "portable" else None).make_ready()
    options, shape = NETS[name]
    net = get_model(name)(10, shape, **options)
    optimizer = torch.optim.Adam(net.parameters(), fused=True)
    images, classes = torch.rand(32, *shape), torch.arange(32) % 10
    began = 0.0
    for step in range(FIRST + STEPS):
        if step == FIRST:
            began = time.process_time()
        optimizer.zero_grad()
        F.cross_entropy(net(images), classes).backward()
        optimizer.step()
    return time.process_time() - began


def elsewhere(name: str, kernels: str) -> tuple[float, str]:
    """The same, in a process of its own, and no digest."""
    environment = {**os.environ, **(ENVIRONMENT if kernels == "portable" else {})}
    command = [sys.executable, __file__, "--steps", name, kernels]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout), ""


def whole(name: str, kernels: str) -> tuple[float, str]:
    """Seconds of a run, with all of its processes, and its digest."""
    choice = ("run.computing.kernels=portable",) if kernels == "portable" else ()
    command = [sys.executable, "-m", "potluck", "run", *RUNS[name], *choice]
    before = _of_children()
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(command, cwd=place, check=True, capture_output=True, text=True)
    return _of_children() - before, done.stdout.rpartition("Checkpoint digest: ")[2].split()[0]


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def by_turns(
    measured: Callable[[str, str], tuple[float, str]], name: str, repeats: int
) -> tuple[float, float, float, str]:
    """Median seconds with torch's own kernels and with portable ones, the median of the quotients, and the digest."""
    taken: dict[str, list[float]] = {"native": [], "portable": []}
    digests = set[str]()
    for repeat in range(repeats):
        for kernels in list(taken) if repeat % 2 else reversed(list(taken)):
            seconds, digest = measured(name, kernels)
            taken[kernels].append(seconds)
            digests |= {digest} if kernels == "portable" else set()
    native, portable = map(median, taken.values())
    ratio = median(there / here for here, there in zip(*taken.values(), strict=True))
    return native, portable, ratio, " ".join(sorted(digests))


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="of each network and kind")
    parser.add_argument("--runs", action="store_true", help="whole runs instead of steps")
    parser.add_argument("--steps", nargs=2, metavar=("NET", "KERNELS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps:
        print(steps(*options.steps))
        return
    print(describe(), "")
    if options.runs:
        print("| run | native, s | portable | ratio | digest |", "|---|--:|--:|--:|---|", sep="\n")
        for name in RUNS:
            native, portable, ratio, digest = by_turns(whole, name, options.repeats)
            print(f"| {name} | {native:.1f} | {portable:.1f} | {ratio:.2f} | {digest} |", flush=True)
        return
    print("| network | native, ms a step | portable | ratio |", "|---|--:|--:|--:|", sep="\n")
    for name in NETS:
        native, portable, ratio, _ = by_turns(elsewhere, name, options.repeats)
        print(f"| {name} | {1e3 * native / STEPS:.1f} | {1e3 * portable / STEPS:.1f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
