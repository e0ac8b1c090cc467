"""Clients that are made when they are asked for: the same run, and nobody's data but those of who is asked."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from potluck.core.federation import Outline, SitesOnDemand
from potluck.core.ground.errors import ConfigError, DataError
from potluck.experiment.running.run import Run
from potluck.experiment.settings.schema import RunConfig
from potluck.methods import get_method
from potluck.records import CHECKPOINT, CLIENTS, LAST, ROUNDS
from potluck.testing.worlds import World, quick, toy_federation

WORLD = World(clients=12, architectures=3)


def on_demand(federation, made=None, **changes):
    """The same federation, of clients that are made, and counted."""

    def make(client):
        if made is not None:
            made[client] += 1
        return {**federation.sites, **changes.get("sites", {})}[client]

    def known(name):
        return lambda client: getattr(Outline.of(federation.sites[client]), name)

    facts = {name: known(name) for name in ("architecture", "train", "capacity")}
    return replace(federation, sites=SitesOnDemand(len(federation.sites), make, validation=16, test=32, **facts))


def play(federation, folder, **settings):
    config = RunConfig(**{"rounds": 3, "cohort_fraction": 0.25, "executor": "sequential", **settings})
    return Run(quick(get_method("fedproto")), federation, config, folder).run()


@pytest.mark.slow
def test_a_run_has_the_bytes_that_it_has_with_sites_that_are_there(tmp_path):
    federation = toy_federation(WORLD)
    play(federation, tmp_path / "there")
    play(on_demand(federation), tmp_path / "made")
    for name in (ROUNDS, CLIENTS, f"{CHECKPOINT}/{LAST}"):
        assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "made" / name).read_bytes()


def test_only_who_is_asked_is_made_and_one_of_each_architecture(tmp_path):
    made = Counter()
    federation = on_demand(toy_federation(WORLD), made)
    result = play(federation, tmp_path / "run", rounds=2, evaluate_every=2, evaluate_clients=2)
    asked = {client for record in result.rounds for client in record.cohort}
    evaluated = {score.client for score in result.evaluation.scores}
    assert len(evaluated) == 2
    assert set(made) == asked | evaluated | {0, 1, 2}


def test_evaluated_clients_are_drawn_anew_and_the_same_for_every_method(tmp_path):
    config, ids = RunConfig(evaluate_clients=4), list(range(12))
    drawn = [config.evaluated(ids, number) for number in range(1, 5)]
    assert all(len(set(clients)) == 4 and clients == sorted(clients) for clients in drawn)
    assert len({tuple(clients) for clients in drawn}) > 1
    assert RunConfig().evaluated(ids, 1) == ids
    assert RunConfig(evaluate_clients=99).evaluated(ids, 1) == ids
    with pytest.raises(ConfigError, match="evaluate_clients"):
        RunConfig(evaluate_clients=0)


def test_a_site_that_is_not_what_its_outline_says_fails_alone(tmp_path):
    federation = toy_federation(WORLD)
    short = replace(federation.sites[7], train=federation.sites[7].train.take(torch.arange(3)))
    bad = on_demand(federation, sites={7: short})
    with pytest.raises(
        DataError, match=r"client 7: its site is not what its outline says: .*train=3.*; expected .*train"
    ):
        bad.sites[7]
    result = play(bad, tmp_path / "run", cohort_fraction=1.0, rounds=1, tolerate_failures=True)
    assert list(result.rounds[0].failed) == ["7"]
    assert "is not what its outline says" in result.rounds[0].failed["7"]


@pytest.mark.parametrize("harm", ["inputs", "targets"])
def test_data_that_cannot_be_trained_on_are_told_of_when_they_are_made(tmp_path, harm):
    federation = toy_federation(WORLD)
    site = federation.sites[7]
    whole = site.train.batch(torch.arange(len(site.train)))
    inputs, targets = whole.inputs.clone(), whole.targets.clone()
    inputs[1] = float("nan") if harm == "inputs" else inputs[1]
    targets[1] = 99 if harm == "targets" else targets[1]
    broken = replace(site, train=replace(site.train, inputs=inputs, targets=targets, rows=None))
    result = play(
        on_demand(federation, sites={7: broken}),
        tmp_path / "run",
        cohort_fraction=1.0,
        rounds=1,
        tolerate_failures=True,
    )
    assert list(result.rounds[0].failed) == ["7"]
    assert {"inputs": "NaN or infinity", "targets": "99"}[harm] in result.rounds[0].failed["7"]


def test_there_are_no_others(tmp_path):
    sites = on_demand(toy_federation(WORLD)).sites
    assert (list(sites), len(sites), 11 in sites, 12 in sites, "1" in sites) == (
        list(range(12)),
        12,
        True,
        False,
        False,
    )
    with pytest.raises(KeyError):
        sites[12]
    with pytest.raises(KeyError):
        on_demand(toy_federation(WORLD)).outline(12)
