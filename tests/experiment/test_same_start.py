"""Runs of one seed start alike, whatever the method: what sets them apart is what methods do."""

import pytest

from potluck.experiment.running.run import Run
from potluck.experiment.settings.schema import RunConfig
from potluck.methods import get_method
from potluck.testing.worlds import World, quick, toy_federation

STILL = ("training.lr=0.0",)


def scores(name, world, overrides=(), seed=0):
    """What every client scores after a round that teaches nothing."""
    method = quick(get_method(name), (*STILL, *overrides))
    run = Run(method, toy_federation(world), RunConfig(rounds=1, seed=seed))
    return run.run().evaluation.scores


OPTIONS = {
    "fedavg": [],
    "fedproto": ["prediction='head'"],
    "fml": [],
    "lgfedavg": [],
    "fedgh": ["server_training.lr=0.0"],
    "fedmd": ["digestion.lr=0.0", "pretrain=false"],
    "feddf": ["server_training.lr=0.0"],
}
"""Of methods that predict by the clients' own networks, what else must rest."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_with_a_learning_rate_of_zero_clients_score_as_those_of_local(name):
    world = World(architectures=1)
    found = scores(name, world, OPTIONS[name])
    assert found == scores("local", world)
    assert found != scores("local", world, seed=1)


@pytest.mark.slow
def test_with_several_architectures_too():
    world = World(architectures=2)
    local = scores("local", world)
    assert scores("fedavg", world, ["sharing.scope='architecture'"]) == local
    assert scores("fedproto", world, OPTIONS["fedproto"]) == scores("fml", world) == local
