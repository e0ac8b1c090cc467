"""Measure the engine's parts, each against what one would write without it.

    OMP_NUM_THREADS=1 python benchmarks/speed/parts.py [--only step] [--repeats 5] [--out results.json]

The ways of a part are tried in turn, and a ratio is the median over repeats of the quotient within one. Seconds are
those of the processor, so that another process on the machine disturbs little; where two cores work, of the clock.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import describe
from torch import Tensor, nn
from torch.nn import functional as F

from potluck.core.federation import Federation, Site, empty_like
from potluck.core.ground.rng import fold_in
from potluck.core.ground.tree import pack
from potluck.core.message import Message
from potluck.core.method import on_client
from potluck.core.nets.weights import Weights, mean_where_present, weights_of
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import Fit, LocalTraining
from potluck.core.roles import Client, Supervised
from potluck.engine.client.runtime import ClientRuntime
from potluck.engine.client.training import train
from potluck.engine.disk.store import ClientStore
from potluck.engine.executors.workers import Workers
from potluck.engine.numerics.costs import forward_flops
from potluck.engine.numerics.numerics import PLAIN, Numerics
from potluck.engine.rounds.engine import Engine
from potluck.methods.fedavg import FedAvg
from potluck.methods.local import Local
from potluck.models import get_model

IMAGES = (3, 32, 32)
WAYS = {
    "Potluck, fp32": PLAIN,
    "Potluck, fp32, channels last": Numerics(layout="channels_last"),
    "Potluck, bf16, channels last": Numerics("bf16", "channels_last"),
}


@dataclass(frozen=True)
class Reading:
    """One way of doing one part.

    Attributes:
        values: one a repeat, in `unit`.
        ratio: how many times as fast as the first way of the part.
        note: what else is to be said.
    """

    part: str
    way: str
    unit: str
    values: list[float]
    ratio: float
    note: str = ""


def compare(part: str, unit: str, ways: dict[str, Callable[[], float]], repeats: int) -> list[Reading]:
    """Try every way in turn, once unmeasured and then so many times; each says what it took."""
    for way in ways.values():
        way()
    found = [{name: way() for name, way in ways.items()} for _ in range(repeats)]
    first = next(iter(ways))
    return [
        Reading(part, name, unit, [of[name] for of in found], median(of[first] / of[name] for of in found))
        for name in ways
    ]


def seconds(work: Callable[[], Any]) -> float:
    """Of the processor, in this process."""
    started = time.process_time()
    work()
    return time.process_time() - started


def resnet18() -> nn.Module:
    """The net of the step and of evaluation: 11 million weights, a stem that keeps the image's size."""
    return get_model("resnet18")(10, IMAGES, stem="cifar")


def random_examples(count: int) -> Examples:
    """Noise; what it shows does not matter to the clock."""
    draws = torch.Generator().manual_seed(0)
    return Examples(torch.randn(count, *IMAGES, generator=draws), torch.arange(count) % 10)


def floor(repeats: int) -> Iterable[Reading]:
    """The matrix product that nothing can be faster than."""

    def product(dtype: torch.dtype, size: int = 2048) -> float:
        a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
        return seconds(lambda: a @ b) / (2 * size**3) * 1e12

    ways = {"fp32": partial(product, torch.float32), "bf16": partial(product, torch.bfloat16)}
    return compare("product of 2048 x 2048", "ms/GFLOP", ways, 3 * repeats)


def step(repeats: int) -> Iterable[Reading]:
    """Training steps of ResNet-18, batches of 16, by Adam."""
    examples, count = random_examples(16 * 12), 16 * 12

    def plain() -> float:
        net = resnet18().train()
        optimizer = torch.optim.Adam(net.parameters(), foreach=False)

        def epoch() -> None:
            for rows in torch.randperm(count).split(16):
                optimizer.zero_grad()
                F.cross_entropy(net(examples.inputs[rows]), examples.targets[rows]).backward()
                optimizer.step()

        return 1e3 * seconds(epoch) / count

    def ours(computing: Numerics) -> float:
        fit = Fit(resnet18(), Supervised(F.cross_entropy), examples, LocalTraining())
        return 1e3 * seconds(lambda: train(fit, fold_in(0, "fit"), computing)) / count

    gflop = 3 * forward_flops(resnet18(), IMAGES) / 1e9
    ways = {"a plain loop": plain} | {name: partial(ours, computing) for name, computing in WAYS.items()}
    for reading in compare("a step of ResNet-18", "ms/example", ways, repeats):
        rate = gflop / (median(reading.values) / 1e3)
        yield Reading(**{**asdict(reading), "note": f"{rate:.0f} GFLOP/s"})


def evaluation(repeats: int) -> Iterable[Reading]:
    """ResNet-18 on images, in batches."""
    examples, net = random_examples(1500), resnet18().eval()

    def ours(computing: Numerics) -> Callable[[], Tensor]:
        host = ClientRuntime(FedAvg(), federation(resnet18, 1), 0, computing)
        return lambda: host.sums(net, examples)

    works = {"a plain loop": partial(_judge_plainly, net, examples)} | {
        name: ours(computing) for name, computing in WAYS.items()
    }
    ways = {name: partial(_milliseconds_each, work, len(examples)) for name, work in works.items()}
    return compare("evaluating a ResNet-18", "ms/example", ways, repeats)


def evaluation_on_two_cores(repeats: int) -> Iterable[Reading]:
    """Five ResNet-18s, of five clients who learn alone, each on all images of the common test set."""
    examples, clients = random_examples(800), 5
    nets = [resnet18().eval() for _ in range(clients)]

    def plain(threads: int) -> None:
        torch.set_num_threads(threads)
        for net in nets:
            _judge_plainly(net, examples)
        torch.set_num_threads(1)

    def ours(computing: Numerics) -> Callable[[], object]:
        whole = replace(federation(resnet18, clients), test=examples)
        engine = Engine(Local(), whole, executor=Workers(2), computing=computing)
        state = engine.start()
        engine.round(1, state, range(clients))  # so that each has a model of its own
        return lambda: engine.evaluate(state, dict.fromkeys(range(clients), ("common",)))

    ways = {
        "a plain loop, 1 thread": partial(plain, 1),
        "a plain loop, 2 threads": partial(plain, 2),
        "Potluck, fp32, channels last, 2 processes": ours(WAYS["Potluck, fp32, channels last"]),
        "Potluck, bf16, channels last, 2 processes": ours(WAYS["Potluck, bf16, channels last"]),
    }
    return compare(
        "evaluating five ResNet-18s", "s", {name: partial(_on_the_clock, way) for name, way in ways.items()}, repeats
    )


def _judge_plainly(net: nn.Module, examples: Examples) -> None:
    with torch.no_grad():
        for rows in torch.arange(len(examples)).split(100):
            net(examples.inputs[rows]).argmax(1)


def _on_the_clock(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _milliseconds_each(work: Callable[[], Any], count: int) -> float:
    return 1e3 * seconds(work) / count


def aggregation(repeats: int) -> Iterable[Reading]:
    """The mean of ten models of 11 million weights."""
    models = [weights_of(resnet18()) for _ in range(10)]

    def stacked() -> Weights:
        return {name: torch.stack([model[name].float() for model in models]).mean(0) for name in models[0]}

    works = {
        "torch.stack(...).mean(0)": stacked,
        "Potluck": lambda: mean_where_present(models, [1.0] * 10, models[0]),
    }
    ways = {name: partial(_milliseconds_each, work, 1) for name, work in works.items()}
    return compare("averaging ten models", "ms", ways, repeats)


class Empty(FedAvg):
    """FedAvg without training: what is left is the engine's."""

    @on_client
    def local_update(self, client: Client, message: Message) -> Message:
        """Load the weights and send them back."""
        self.sharing.receive(client, message)
        return Message(**self.sharing.reply(client))


def federation(build: Callable[[], nn.Module], clients: int) -> Federation:
    """Clients with two examples each."""
    two = random_examples(2)
    sites = {id: Site(id, "net", two, empty_like(two), empty_like(two)) for id in range(clients)}
    return Federation(sites, {"net": build}, "net", num_classes=10)


def overhead(repeats: int) -> Iterable[Reading]:
    """A round of a hundred clients who do not train, in this process: encode, decode, load, average."""
    ways = {"25 thousand weights": _empty_round(8), "0.66 million weights": _empty_round(200)}
    for name, way in ways.items():
        yield from compare("a client of an empty round", "ms", {name: way}, repeats)


def _empty_round(width: int) -> Callable[[], float]:
    """Milliseconds a client, with three linear layers of this width."""

    def mlp() -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(3072, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 10)
        )

    engine = Engine(Empty(), federation(mlp, 100))
    state = engine.start()
    return lambda: _milliseconds_each(lambda: engine.round(1, state, range(100)), 100)


def states(repeats: int) -> Iterable[Reading]:
    """What a hundred clients keep, twenty of each of five ResNets of width 64, in a new process."""
    command = [sys.executable, __file__, "--states"]
    gib = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    yield Reading("states of 100 ResNets", "fp32", "GiB", [gib], 1.0, "1.23 G weights")


def _states_gib() -> float:
    """Memory that the store takes for them, in this process."""
    store = ClientStore(cap_bytes=2**40)
    nets = [get_model(name)(10, IMAGES) for name in ("resnet10", "resnet14", "resnet18", "resnet22", "resnet26")]
    before = _resident_gib()
    for client in range(100):
        store.write(client, pack({"state": {}, "model": weights_of(nets[client % 5])}))
    return _resident_gib() - before


def _resident_gib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**30


PARTS = {
    part.__name__: part for part in (floor, step, evaluation, evaluation_on_two_cores, aggregation, overhead, states)
}


def show(readings: Iterable[Reading]) -> None:
    """As Markdown."""
    print("| part | way | median | least to most | times as fast | |\n|---|---|---|---|---|---|")
    for of in readings:
        low, mid, high = min(of.values), median(of.values), max(of.values)
        print(f"| {of.part} | {of.way} | {mid:.3g} {of.unit} | {low:.3g} to {high:.3g} | {of.ratio:.2f} | {of.note} |")


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=sorted(PARTS), nargs="+", default=list(PARTS), help="parts to measure")
    parser.add_argument("--repeats", type=int, default=5, help="of every way")
    parser.add_argument("--out", type=Path, help="a JSON file for every reading")
    parser.add_argument("--states", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.states:
        print(_states_gib())
        return
    torch.set_num_threads(1)
    readings = [reading for name in options.only for reading in PARTS[name](options.repeats)]
    if options.out:
        found = {
            "machine": describe(),
            "torch": torch.__version__,
            "readings": [asdict(reading) for reading in readings],
        }
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    show(readings)


if __name__ == "__main__":
    main()
