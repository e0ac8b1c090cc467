"""What a client of FeDepth holds in memory during its round, beside its budget.

    OMP_NUM_THREADS=1 python benchmarks/fedepth_memory.py

Each round is played in a process of its own: one client with PreResNet-20, 450 images of 32 x 32 as one of a hundred
clients has of CIFAR-10, and Adam. The process first plays a round of a tiny network, so that what is loaded once is not
counted. Writes the tables to `benchmarks/results/fedepth_memory.md`, with the machine's name. Needs Linux.
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from speed.machine import describe
from torch.profiler import ProfilerActivity, profile

from potluck.core.federation import Federation, Site
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import LocalTraining
from potluck.engine.client.runtime import ClientRuntime, Outcome
from potluck.engine.client.session import Answer
from potluck.engine.executors import Executor, Pending
from potluck.engine.numerics.allocator import keep_freed_memory
from potluck.engine.rounds.engine import Engine
from potluck.methods import get_method
from potluck.models.preresnet import preresnet20
from potluck.parts.depthwise import Plan
from potluck.parts.memory import MemoryModel, parameter_copies

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "fedepth_memory.md"
IMAGE = (3, 32, 32)
MIB = 2**20
FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": str(2**17), "MALLOC_TRIM_THRESHOLD_": str(2**17)}


@dataclass(frozen=True)
class Round:
    """One client's round, and how it is watched.

    Attributes:
        capacity: as a fraction.
        method: "fedepth" or "mfedepth".
        partial: "freeze" or "bypass".
        kept: where z_j is: where the method puts it ("by room"), in "memory" whatever the budget, or computed "anew".
        batch_size: examples a step.
        epochs: of every piece.
        examples: that the client has.
        watched: bytes of "tensors", or those of the "process"; nothing ("time") gives seconds alone.
    """

    capacity: str
    method: str = "fedepth"
    partial: str = "freeze"
    kept: str = "by room"
    batch_size: int = 32
    epochs: int = 1
    examples: int = 450
    watched: str = "tensors"

    @property
    def training(self) -> LocalTraining:
        """Adam, with these batches and epochs."""
        return LocalTraining("adam", epochs=self.epochs, batch_size=self.batch_size)

    def federation(self, widths: tuple[int, ...], examples: int, capacity: float) -> Federation:
        """One client."""
        data = Examples(torch.rand(examples, *IMAGE), torch.arange(examples) % 10)
        build = partial(preresnet20, 10, IMAGE, widths=widths)
        return Federation({0: Site(0, "net", data, data, data, capacity)}, {"net": build}, "net", num_classes=10)


@dataclass
class Found:
    """What was seen.

    Attributes:
        peak: bytes at most, beyond those before the client's call.
        seconds: of the processor.
    """

    peak: int
    seconds: float


class Watched(Executor):
    """Plays one client and looks at what it holds."""

    def __init__(self, watched: str) -> None:
        self.found = Found(0, 0.0)
        self._watched = watched

    def run(self, host: ClientRuntime, tasks: Sequence[Pending]) -> Iterator[Outcome]:
        """One call; it must not fail."""
        for task in tasks:
            call = task.make()
            gc.collect()
            started = time.process_time()
            if self._watched == "tensors":
                with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
                    outcome = host.execute(call)
                peak = most_allocated(watched)
            else:
                ctypes.CDLL(None).malloc_trim(0)
                Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
                before = resident("VmRSS")
                outcome = host.execute(call)
                peak = resident("VmHWM") - before
            self.found = Found(peak, time.process_time() - started)
            assert isinstance(outcome, Answer), outcome
            yield outcome


def most_allocated(watched: profile) -> int:
    """The most bytes that torch's allocations and releases, in order, add up to."""
    assert watched.profiler is not None
    assert watched.profiler.kineto_results is not None
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def resident(name: str) -> int:
    """Bytes of this process in memory, now ("VmRSS") or at most ("VmHWM")."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def play_here(round: Round) -> Found:
    """Play it in this process, which is not used for anything else."""
    torch.set_num_threads(1)
    if not FREED_AT_ONCE.keys() <= os.environ.keys():
        keep_freed_memory()  # as runs do
    if round.kept == "memory":
        Plan.has_room = lambda *_: True
    method = get_method(round.method)(training=round.training, partial=round.partial, buffer=round.kept != "anew")
    _one_round(method, round.federation((2, 2, 2), 2 * round.batch_size, 1.0), Watched("process"))
    watched = Watched(round.watched)
    _one_round(method, round.federation((16, 32, 64), round.examples, float(Fraction(round.capacity))), watched)
    return watched.found


def _one_round(method: Any, federation: Federation, executor: Executor) -> None:
    engine = Engine(method, federation, executor=executor)
    engine.round(1, engine.start(), [0])


def play(round: Round, **environment: str) -> Found:
    """Play it in a process of its own."""
    command = [sys.executable, __file__, "--client", json.dumps(asdict(round))]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return Found(**json.loads(done.stdout.splitlines()[-1]))


def whole(round: Round) -> int:
    """The estimate for the whole network, of which budgets are shares."""
    net = preresnet20(10, IMAGE)
    return MemoryModel.of(net, IMAGE, round.batch_size, parameter_copies(round.training)).whole


def weights() -> int:
    """Bytes of the network's weights."""
    return sum(tensor.numel() * tensor.element_size() for tensor in preresnet20(10, IMAGE).state_dict().values())


PEAKS = [
    *(Round(capacity) for capacity in ("1", "1/2", "1/3", "1/6", "1/8")),
    *(Round(capacity, kept="anew") for capacity in ("1/6", "1/8")),
    Round("1/8", partial="bypass"),
    *(Round(capacity, method="mfedepth") for capacity in ("1/6", "1/8")),
    *(Round(capacity, batch_size=16) for capacity in ("1", "1/2", "1/3", "1/6", "1/8")),
]
TIMES = [
    Round(capacity, kept=kept, epochs=5, watched="time")
    for capacity in ("1/6", "1/2")
    for kept in ("by room", "memory", "anew")
]


def peaks() -> Iterator[str]:
    """The table of peaks, row by row."""
    yield "| method | capacity | batch | budget | tensors | process | process that keeps freed memory |"
    yield "|---|---|---|---|---|---|---|"
    for round in PEAKS:
        watched = replace(round, watched="process")
        found = [play(round), play(watched, **FREED_AT_ONCE), play(watched)]
        budget = float(Fraction(round.capacity)) * whole(round)
        cells = [_name(round), round.capacity, str(round.batch_size), *map(_mib, (budget, *(f.peak for f in found)))]
        yield f"| {' | '.join(cells)} |"


def times(repeats: int) -> Iterator[str]:
    """The table of times, row by row; the ways take turns."""
    yield "| capacity | z_j in a file | in memory, beyond the budget | computed anew |"
    yield "|---|---|---|---|"
    seconds = {round: [0.0] * repeats for round in TIMES}
    for repeat in range(repeats):
        for round in TIMES:
            seconds[round][repeat] = play(round).seconds
    for capacity in dict.fromkeys(round.capacity for round in TIMES):
        ways = [seconds[round] for round in TIMES if round.capacity == capacity]
        cells = [f"{median(way):.1f} ({min(way):.1f} to {max(way):.1f})" for way in ways]
        yield f"| {capacity} | {' | '.join(cells)} |"


def _name(round: Round) -> str:
    marks = [*(["z_j anew"] if round.kept == "anew" else []), *(["bypass"] if round.partial == "bypass" else [])]
    return ", ".join([{"fedepth": "FeDepth", "mfedepth": "m-FeDepth"}[round.method], *marks])


def _mib(count: float) -> str:
    return f"{count / MIB:.1f}"


TEXT = """# FeDepth's budgets, and what its clients hold

    OMP_NUM_THREADS=1 python benchmarks/fedepth_memory.py

{machine}. PreResNet-20, 450 images of 32 x 32, Adam, one epoch a piece. Each round is played
in a process of its own, from the message's arrival to the reply's departure. MiB.

- *budget*: the capacity's share of the estimate for the whole network, at this batch size and with Adam's moments. The
  tolerance of 1.05 with which pieces are packed is not in it.
- *tensors*: the most bytes that torch's allocations and releases add up to.
- *process*: the most memory that the process had, beyond what it had before the call. Here the C library gives memory
  back as soon as it is freed (`{environment}`). It holds what tensors do not
  show: messages as bytes, and what torch's kernels use while they run.
- *process that keeps freed memory*: the same as runs play it, which keep freed memory for the next tensors since that
  is faster. What this adds is no part of any budget.

Both hold the weights of the whole network beside what the budget counts: {weights} MiB a copy, once in the network and
once as the weights that its process starts new networks with; the process holds the message besides.

{peaks}

Seconds of the processor for a round of five epochs a piece, batches of 32, by where z_j is: median (least to most)
of {repeats}.

{times}
"""


def main() -> None:
    """Play a client's round, or all of them and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=3, help="of the rounds whose time is taken")
    options = parser.parse_args()
    if options.client:
        print(json.dumps(asdict(play_here(Round(**json.loads(options.client))))))
        return
    facts = describe()
    machine = (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, {facts['system']}; torch"
        f" {torch.__version__}; Potluck at {facts['commit']}"
    )
    text = TEXT.format(
        machine=machine,
        environment=" ".join(f"{name}={value}" for name, value in FREED_AT_ONCE.items()),
        weights=_mib(weights()),
        peaks="\n".join(peaks()),
        repeats=options.repeats,
        times="\n".join(times(options.repeats)),
    )
    RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
