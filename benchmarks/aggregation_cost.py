"""The share of a round's processor time that is spent outside clients: messages, slices, means.

    OMP_NUM_THREADS=1 python benchmarks/aggregation_cost.py [--methods fedavg heterofl] [--rounds 3]

Ten clients with 500 images of 3 x 32 x 32 and 2 local epochs in batches of 32, as in the mini table. Methods that take
several architectures have two clients each of ResNet-10, 14, 18, 22 and 26 of width 16; those that cut up one network
have PreResNet-18 of width 16, and clients with all, a half, a quarter and an eighth of it. The images are noise, since
no time depends on what they show. Counted as spent outside clients is all that this process does but the handlers and
the training that they ask for: so the writing, checking and reading of messages as well as the mean itself.

The first round, in which nets are built and questions about them are answered for the first time, is not counted.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, islice

import torch

from potluck import Examples, Federation, Site, fl
from potluck.core.method import Method
from potluck.core.needs import Offer
from potluck.engine.client.runtime import ClientRuntime, Outcome
from potluck.engine.executors import Pending
from potluck.engine.executors.sequential import Sequential
from potluck.engine.rounds.engine import Engine
from potluck.methods import get_method, list_methods
from potluck.models import get_model
from potluck.testing.worlds import quick

CLIENTS, IMAGES, CLASSES, SHAPE = 10, 500, 10, (3, 32, 32)
RESNETS = ("resnet10", "resnet14", "resnet18", "resnet22", "resnet26")
CAPACITIES = (1.0, 0.5, 0.25, 0.125)


class Timed(Sequential):
    """Counts the processor time of clients' calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def run(self, host: ClientRuntime, tasks: Sequence[Pending]) -> Iterator[Outcome]:
        """Outcomes in the order of the tasks."""
        for task in tasks:
            job = task.make()
            begun = time.process_time()
            outcome = host.execute(job)
            self.seconds += time.process_time() - begun
            yield outcome


def noise(images: int) -> Examples:
    """Images of noise with random labels."""
    return Examples(torch.randn(images, *SHAPE), torch.randint(CLASSES, (images,)))


def federation(method: Method[object]) -> Federation:
    """Ten clients with networks that the method takes."""
    names = ("preresnet18",) if fl.Need.ONE_ARCHITECTURE in method.needs() else RESNETS
    capacities = islice(cycle(CAPACITIES if len(names) == 1 else (1.0,)), CLIENTS)
    assigned = zip(islice(cycle(names), CLIENTS), capacities, strict=True)
    sites = {
        id: Site(id, name, noise(IMAGES), noise(0), noise(0), capacity) for id, (name, capacity) in enumerate(assigned)
    }
    builders = {name: partial(get_model(name), CLASSES, SHAPE, width=16) for name in names}
    return Federation(sites, builders, names[0], CLASSES, public=noise(500))


def share_outside(name: str, rounds: int) -> tuple[float, float]:
    """Seconds of a round, and the share of it that is spent outside clients."""
    torch.manual_seed(0)
    method, timed = quick(get_method(name), epochs=2, batch_size=32), Timed()
    engine = Engine(method, federation(method), executor=timed)
    state, ids = engine.start(), list(range(CLIENTS))
    state, _ = engine.round(1, state, ids)
    timed.seconds, begun = 0.0, time.process_time()
    for number in range(2, rounds + 2):
        state, _ = engine.round(number, state, ids)
    whole = time.process_time() - begun
    engine.close()
    return whole / rounds, (whole - timed.seconds) / whole


def takes_part(name: str) -> bool:
    """Whether a method can run on the federation that is made for it."""
    method = get_method(name)()
    offer = Offer.of(federation(method))
    return not any(need.problem(offer) for need in method.needs())


def main() -> None:
    """Print a row for each method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=[name for name in list_methods() if name != "local"])
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    print("| method | seconds a round | outside clients |\n|---|--:|--:|")
    for name in filter(takes_part, options.methods):
        seconds, share = share_outside(name, options.rounds)
        print(f"| {name} | {seconds:.1f} | {100 * share:.1f} % |", flush=True)


if __name__ == "__main__":
    main()
