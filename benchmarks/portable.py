"""What portable kernels cost: steps of training with them, beside steps with those that torch chooses.

    OMP_NUM_THREADS=1 python benchmarks/portable.py [--repeats 5]

For each network, programs of each kind take turns, each one thread: five steps of Adam on a batch of 32 examples, after
two that are left out. Seconds are of processor time. "AVX2" is not offered by `run.computing.kernels`: it is what
portable kernels would be if they took eight numbers at a time instead of four. After the table come digests of the
weights after the last step, to be compared with those of other processors.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
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
KINDS: Mapping[str, Mapping[str, str]] = {
    "native": {},
    "portable": ENVIRONMENT,
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2"},
}
STEPS, FIRST = 5, 2


def steps(name: str, kernels: str) -> tuple[float, str]:
    """Seconds of the steps, in this process, and a digest of the weights after them."""
    import torch
    from torch.backends import mkldnn, nnpack
    from torch.nn import functional as F

    from potluck.core.ground.digest import digest
    from potluck.engine.numerics.numerics import Numerics
    from potluck.models import get_model

    torch.set_num_threads(1)
    torch.manual_seed(0)
    Numerics(kernels="portable" if kernels == "portable" else None).make_ready()
    if kernels == "AVX2":
        mkldnn.set_flags(False)
        nnpack.set_flags(False)
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
    taken = time.process_time() - began
    return taken, digest(b"".join(weight.detach().numpy().tobytes() for weight in net.state_dict().values()))[:16]


def elsewhere(name: str, kernels: str) -> tuple[float, str]:
    """The same, in a process of its own."""
    command = [sys.executable, __file__, "--steps", name, kernels]
    environment = {**os.environ, **KINDS[kernels]}
    seconds, end = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
    return seconds, end


def in_turns(name: str, repeats: int) -> dict[str, list[tuple[float, str]]]:
    """What programs of each kind took, and where they ended."""
    found: dict[str, list[tuple[float, str]]] = {kernels: [] for kernels in KINDS}
    for repeat in range(repeats):
        for kernels in list(KINDS) if repeat % 2 else reversed(list(KINDS)):
            found[kernels].append(elsewhere(name, kernels))
    return found


def row(name: str, found: Mapping[str, list[tuple[float, str]]]) -> str:
    """A network's line of the table."""
    taken = {kernels: [seconds for seconds, _ in each] for kernels, each in found.items()}
    cells = [name, f"{1e3 * median(taken['native']) / STEPS:.1f}"]
    for kernels in ("portable", "AVX2"):
        ratio = median(there / here for here, there in zip(taken["native"], taken[kernels], strict=True))
        cells += [f"{1e3 * median(taken[kernels]) / STEPS:.1f}", f"{ratio:.2f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="of each network and kind")
    parser.add_argument("--steps", nargs=2, metavar=("NET", "KERNELS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps:
        print(json.dumps(steps(*options.steps)))
        return
    print(describe(), "", "| network | native, ms a step | portable | ratio | AVX2 | ratio |", sep="\n")
    print("|---|--:|--:|--:|--:|--:|")
    ends = []
    for name in NETS:
        found = in_turns(name, options.repeats)
        print(row(name, found), flush=True)
        digests = [" ".join(sorted({end for _, end in each})) for each in found.values()]
        ends.append(f"| {' | '.join((name, *digests))} |")
    print("", f"| network | {' | '.join(KINDS)} |", "|---|---|---|---|", *ends, sep="\n")


if __name__ == "__main__":
    main()
