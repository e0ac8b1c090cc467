"""The processes of single clients: each hears what it has, then carries out calls and tells what each took.

    python -m potluck.experiment.budgets.alone DESCRIPTOR

The descriptor is that of a socket to the process that started it, `potluck.experiment.budgets.apart`.
"""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import NoReturn

import torch

from potluck.core.federation import Federation, Site
from potluck.core.ground.errors import PotluckError
from potluck.engine.client.runtime import ClientRuntime
from potluck.engine.executors.metered import metered, warm
from potluck.engine.numerics.footprint import settled
from potluck.engine.numerics.speed import sustained_gflops
from potluck.experiment.budgets.apart import Belongings, Opening, hear, tell
from potluck.experiment.federation.assemble import architectures_of, own_heads
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import Experiment


def serve(channel: Connection) -> None:
    """Fork a process for each client that is asked for, one after another, until the other side is gone."""
    torch.set_num_threads(1)
    warm()
    while True:
        asked: Opening = hear(channel)
        if not (child := os.fork()):
            _end(partial(be_client, channel, asked))
        _, status = os.waitpid(child, 0)
        tell(channel, ("ended", os.waitstatus_to_exitcode(status)))


def be_client(channel: Connection, asked: Opening) -> None:
    """Answer calls until there are no more."""
    try:
        experiment = resolve(dict(asked.tree), "the experiment")
        torch.set_num_threads(experiment.run.threads)
        warm()  # what is read from torch's files counts as this process's once it has read it
        gflops = sustained_gflops()
        floor = settled()
        tell(channel, ("ready", (floor, gflops)))
        run, federation = experiment.run, federation_of_one(experiment, asked, hear(channel))
        host = ClientRuntime(experiment.method, federation, run.seed, run.computing, run.clipping)
        tell(channel, ("ready", None))
        while (call := hear(channel)) is not None:
            tell(channel, ("done", metered(host, call, floor)))
    except PotluckError as error:
        tell(channel, ("refused", str(error)))
        while hear(channel) is not None:
            tell(channel, ("refused", str(error)))


def federation_of_one(experiment: Experiment, asked: Opening, own: Belongings) -> Federation:
    """The federation as one client sees it."""
    task = (asked.num_classes, asked.input_shape)
    architectures, server_architecture = architectures_of(experiment, *task)
    name = experiment.model_of(own.client).architecture
    if own.classes is not None:
        heads = own_heads(experiment, *task)
        name = heads.named(experiment.model_of(own.client), own.classes)
        architectures |= heads.builders
    nobody = own.train.take(torch.arange(0))
    return Federation(
        sites={own.client: Site(own.client, name, own.train, own.validation, nobody, own.capacity)},
        architectures=architectures,
        server_architecture=server_architecture,
        num_classes=asked.num_classes,
        public=own.public,
        public_labels=experiment.federation.public_labels,
        task=asked.task,
    )


def _end(work: Callable[[], None]) -> NoReturn:
    """Do the work of a forked process, and end it there."""
    code = 1
    try:
        with suppress(EOFError, ConnectionError):
            work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Serve the process that started this one."""
    with suppress(EOFError, ConnectionError):
        serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
