"""Potluck, through the engine that `potluck run` plays with."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from nets import build, parameter_count
from torch import nn
from workloads import Workload, chosen_workload, draw_data

from contestants._turns import Turns, parser, play
from potluck.core.federation import Federation, Site, empty_like
from potluck.core.ground.rng import fold_in
from potluck.core.message import Message
from potluck.core.method import ClientWork, Method, on_client
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import LocalTraining
from potluck.core.roles import Client
from potluck.engine.executors.choice import choose_executor
from potluck.engine.numerics.allocator import keep_freed_memory
from potluck.engine.numerics.numerics import Numerics
from potluck.engine.rounds.engine import Engine
from potluck.methods.fedavg import FedAvg
from potluck.methods.fedin import FedIN
from potluck.models import get_model

STEPS = get_context("fork").Value("q")
"""Optimiser steps so far. Workers are forked, so that all processes count in the same place."""


def counted(work: ClientWork) -> ClientWork:
    """A handler's work as it is; what the engine reports of its fits is counted on the way."""
    try:
        fit = next(work)
        while True:
            report = yield fit
            with STEPS.get_lock():
                STEPS.value += report.steps
            fit = work.send(report)
    except StopIteration as end:
        return end.value


@dataclass(frozen=True)
class CountedFedAvg(FedAvg):
    """FedAvg whose optimiser steps can be asked for."""

    @on_client
    def local_update(self, client: Client, message: Message) -> ClientWork:
        """See FedAvg."""
        return (yield from counted(super().local_update(client, message)))


@dataclass(frozen=True)
class CountedFedIN(FedIN):
    """FedIN whose optimiser steps can be asked for."""

    @on_client
    def local_update(self, client: Client, message: Message) -> ClientWork:
        """See FedIN."""
        return (yield from counted(super().local_update(client, message)))


METHODS: dict[str, Callable[..., Method[Any]]] = {"fedavg": CountedFedAvg, "fedin": CountedFedIN}


def builder(name: str, workload: Workload) -> Callable[..., nn.Module]:
    """Potluck's own ResNets; the other nets are brought along as plain modules."""
    if name.startswith("resnet"):
        return partial(get_model(name), workload.classes, workload.shape, width=16, stem="cifar")
    return partial(build, name, workload.shape, workload.classes)


def federation_of(workload: Workload) -> Federation:
    """The workload's clients; they have nothing to be evaluated on."""
    sites: dict[int, Site] = {}
    for client, (inputs, targets) in enumerate(draw_data(workload)):
        train = Examples(torch.from_numpy(inputs), torch.from_numpy(targets))
        sites[client] = Site(client, workload.net_of(client), train, empty_like(train), empty_like(train))
    architectures = {name: builder(name, workload) for name in workload.nets}
    return Federation(sites, architectures, workload.nets[0], workload.classes)


def main() -> None:
    """Take turns."""
    arguments = parser(__doc__)
    arguments.add_argument("--method", choices=METHODS, default="fedavg")
    arguments.add_argument("--executor", choices=("auto", "sequential", "workers", "stacked"), default="auto")
    arguments.add_argument("--workers", type=int, help="processes; one a core if left out")
    arguments.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    arguments.add_argument("--layout", choices=("contiguous", "channels_last"), default="contiguous")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as `potluck run` does
    turns, workload = Turns("potluck", "torch"), chosen_workload(options.workload, options.smoke)
    federation = federation_of(workload)
    nets = [federation.build(name, fold_in(workload.seed, name)) for name in workload.nets]
    choice = choose_executor(options.executor, options.workers, 1, nets)
    training = LocalTraining("adam", workload.lr, workload.epochs, batch_size=workload.batch_size)
    engine = Engine(
        METHODS[options.method](training=training),
        federation,
        seed=workload.seed,
        executor=choice.executor,
        computing=Numerics(options.precision, options.layout),
    )
    state = engine.start()

    def play_round(number: int) -> int:
        nonlocal state
        before = STEPS.value
        state, _ = engine.round(number, state, workload.members(number))
        return STEPS.value - before

    try:
        play(turns, play_round, sum(map(parameter_count, nets)), **choice.facts)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
