"""What portable kernels cost: steps of training with them, beside steps with those that torch chooses.

    OMP_NUM_THREADS=1 python benchmarks/portable.py [--repeats 5]

For each network, programs of both kinds take turns, each one thread: five steps of Adam on a batch of 32 examples,
after two that are left out. Seconds are of processor time.
"""

import argparse
import os
import subprocess
import sys
import time
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


def elsewhere(name: str, kernels: str) -> float:
    """The same, in a process of its own."""
    environment = {**os.environ, **(ENVIRONMENT if kernels == "portable" else {})}
    command = [sys.executable, __file__, "--steps", name, kernels]
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="of each network and kind")
    parser.add_argument("--steps", nargs=2, metavar=("NET", "KERNELS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps:
        print(steps(*options.steps))
        return
    print(describe(), "", "| network | native, ms a step | portable | ratio |", "|---|--:|--:|--:|", sep="\n")
    for name in NETS:
        taken: dict[str, list[float]] = {"native": [], "portable": []}
        for repeat in range(options.repeats):
            for kernels in list(taken) if repeat % 2 else reversed(list(taken)):
                taken[kernels].append(elsewhere(name, kernels))
        native, portable = (1e3 * median(seconds) / STEPS for seconds in taken.values())
        ratio = median(there / here for here, there in zip(*taken.values(), strict=True))
        print(f"| {name} | {native:.1f} | {portable:.1f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
