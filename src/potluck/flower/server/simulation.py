"""A run in Flower's simulation, whose nodes are Ray actors on this machine."""

import os
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from potluck.core.ground.errors import ConfigError
from potluck.experiment.federation.assemble import matched_classes
from potluck.experiment.settings.schema import Experiment
from potluck.experiment.settings.tables import override
from potluck.experiment.watching.observers import Observer
from potluck.flower.deploy.processes import environment
from potluck.flower.node.clientapp import client_app
from potluck.flower.node.config import SIMULATION
from potluck.flower.server.serve import serve

_DEADLINE = 3600.0
"""The least seconds until an exchange closes: many nodes wait for their turn on one machine."""


def simulate(experiment: Experiment, folder: Path, *observers: Observer) -> None:
    """Run an experiment; its clients' states are in the run's folder.

    Raises:
        ConfigError: Ray is not installed.
    """
    os.environ.update({**environment(folder / "flower"), SIMULATION: str(folder.resolve() / "nodes")})
    failures: list[BaseException] = []
    server_app = ServerApp()
    deadline = max(_DEADLINE, experiment.run.rounds_close.deadline_s)

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            serve(
                grid,
                override(experiment.tree(), {"run.rounds_close.deadline_s": deadline}),
                folder,
                observers=observers,
                say=lambda line: None,
                matched=matched_classes(experiment),
            )
        except BaseException as error:
            failures.append(error)
            raise

    resources: dict[str, dict[str, Any]] = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    try:
        run_simulation(server_app, client_app, experiment.federation.clients, backend_config=resources)
    except SystemExit:
        raise ConfigError("Flower's simulation needs Ray: pip install 'potluck[flower,ray]'") from None
    except Exception:
        if not failures:
            raise
    if failures:
        raise failures[0]
