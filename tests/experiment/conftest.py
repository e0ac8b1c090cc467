import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from potluck.experiment.running.run import Result, Run
from potluck.experiment.settings.schema import RunConfig
from potluck.testing.worlds import World, quick, toy_federation


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., Result]:
    """Plays a method in a toy world, in a named folder below the test's own."""

    def played(method, name: str = "run", world: World = World(batchnorm=True), **config) -> Result:
        subject = quick(method)
        federation = toy_federation(world.fit_for(subject))
        run = dataclasses.replace(RunConfig(rounds=3), **config)
        return Run(subject, federation, run, tmp_path / name).run()

    return played
