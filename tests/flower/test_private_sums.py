"""Nodes add noise to what they add to secure sums: once, enough of it, counted by themselves, or not at all."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from potluck.core.ground.errors import ConfigError
from potluck.core.roles import ClientFailure
from potluck.flower import JOB
from potluck.flower.server.sums import AddingOverNodes
from potluck.parts import privacy
from potluck.parts.privacy import SumPrivacy
from potluck.records import MANIFEST
from potluck.secure.fixed import FixedPoint
from potluck.secure.server import SecureServer

from .test_secure_sums import Nodes, experiment_of

CLIP, MULTIPLIER, CLIENTS, MAY_LEAVE = 0.5, 2.0, 7, 2
SUMS = []


@pytest.fixture(autouse=True)
def told(monkeypatch):
    """Notes what servers learn."""
    SUMS.clear()
    sums = SecureServer.sums

    def noting(server):
        SUMS.append(sums(server))
        return SUMS[-1]

    monkeypatch.setattr(SecureServer, "sums", noting)


def tree(rounds=1, **run):
    private = {"clip_update": CLIP, "private_weights": {"noise_multiplier": MULTIPLIER, "delta": 1e-5}}
    run = {**private, "tolerate_failures": True, **run}
    return experiment_of("fedavg", CLIENTS, rounds, run=run, sharing={"weighting": "uniform"})


def served(place, leaves=None, **run):
    nodes = Nodes(place, CLIENTS)
    nodes.leaves = leaves or nodes.leaves
    return nodes, nodes.serve(tree(**run), place / "run")


def total(sums):
    """All sums in a row."""
    units = torch.cat([tensor.flatten() for _, tensor in sorted(sums.sums.items())])
    return units.double() * 2.0**-sums.bits


@pytest.mark.slow
@pytest.mark.parametrize("leave", [0, MAY_LEAVE])
def test_nodes_that_stay_have_noise_enough_in_a_sum_and_each_counts_it(leave, tmp_path, monkeypatch):
    def once(place):
        return served(place, lambda client, job: client < leave and getattr(job, "step", -1) >= 2)

    _, run = once(tmp_path / "noisy")
    with monkeypatch.context() as patch:
        patch.setattr(privacy, "_noise", partial(torch.zeros, dtype=torch.float64))
        once(tmp_path / "clean")
    noisy, clean = SUMS
    assert len(noisy.survivors) == len(clean.survivors) == CLIENTS - leave
    found = float((total(noisy) - total(clean)).std())
    expected = MULTIPLIER * CLIP * math.sqrt((CLIENTS - leave) / (CLIENTS - MAY_LEAVE))
    assert expected >= MULTIPLIER * CLIP
    assert found == pytest.approx(expected, rel=0.13)  # some 600 numbers: 4.5 deviations of chance
    said = json.loads((run / MANIFEST).read_text())["privacy"]
    epsilon = SumPrivacy(MULTIPLIER, 1e-5).spent(1)
    assert epsilon <= float(said.split("epsilon ")[1].split()[0]) < 1.01 * epsilon
    assert said.endswith("for nodes that list their peers, and for no others.")
    counts = [json.loads(path.read_text()) for path in tmp_path.glob("noisy/node*/*/releases.json")]
    assert counts == [1] * CLIENTS


@pytest.mark.slow
def test_a_node_that_is_asked_twice_for_its_numbers_says_the_same_with_the_same_noise(tmp_path):
    nodes, _ = served(tmp_path)
    words = [one for one in nodes.asked("step") if one[1][0]["step"] == 2]
    assert len(words) == CLIENTS
    for name, asked, answer in words:
        assert nodes.ask(name, JOB, asked) == answer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"largest": 8.0}, "run.secure_sums.largest: found 8; expected at least"),
        ({"bits": 8}, "run.secure_sums.bits: found 8, units of"),
    ],
)
def test_a_server_by_whose_numbers_noise_would_be_lost_gets_none_of_a_nodes(numbers, said, tmp_path, monkeypatch):
    adding = AddingOverNodes.__call__

    def coarse(self, addition):
        rule = addition.numbers
        kept = {"largest": rule.largest, "bits": rule.bits, "weight": rule.weight}
        return adding(self, replace(addition, numbers=FixedPoint(**{**kept, **numbers})))

    monkeypatch.setattr(AddingOverNodes, "__call__", coarse)
    nodes = Nodes(tmp_path, CLIENTS)
    with pytest.raises(ClientFailure) as caught:
        nodes.serve(tree(lost_rounds=1), tmp_path / "run")
    assert said in str(caught.value)
    steps = [asked[0]["step"] for _, asked, _ in nodes.asked("step")]
    assert set(steps) == {0}  # nobody has gone further
    assert SUMS == []


@pytest.mark.slow
def test_what_is_not_private_is_refused_by_the_server_before_a_node_trains(tmp_path):
    nodes = Nodes(tmp_path, CLIENTS)
    by_examples = {**tree(), "method": {"name": "fedavg"}}
    with pytest.raises(ConfigError, match=r"^run\.private_weights: found all/weights/.* weighed by examples"):
        nodes.serve(by_examples, tmp_path / "run")
    assert nodes.asked("handler") == []
