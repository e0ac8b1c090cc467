"""The same experiment in process and over Flower's messages gives the same bytes."""

import json

import numpy as np
import pytest
import torch

from potluck.experiment.federation.assemble import assemble, builder_of
from potluck.experiment.running.execute import execute, prepare
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import ModelSpec
from potluck.experiment.watching.observers import Observer
from potluck.flower.node.clientapp import client_app
from potluck.flower.node.config import NodeConfig
from potluck.flower.server.serve import serve
from potluck.methods import get_method, list_methods
from potluck.records import CHECKPOINT, CLIENTS, COSTS, LAST, ROUNDS, Checkpoint
from potluck.testing.loopback import Loopback, through
from potluck.testing.worlds import federation_table

FAMILY = ["cnn2", "cnn3", "cnn4"]
SETTINGS = {
    "fedorion": {"method": {"noise_batches": 2}},
    "fedepth": {"federation": {"capacities": [1.0, 0.7, 0.7]}},
    "mfedepth": {
        "federation": {"capacities": [1.0, 0.7, 0.7]},
        "method": {"assignment": "dynamic", "mu": 0.1, "slack": 1.2},
    },
}
"""By method, what it is quicker with, or does nothing special without."""


def experiment_of(name, rounds=2, **federation):
    more = SETTINGS.get(name, {})
    return {
        "federation": {
            "dataset": "digits",
            "train_fraction": 0.1,
            "clients": 3,
            "models": FAMILY,
            **federation_table(get_method(name)()),
            **more.get("federation", {}),
            **federation,
        },
        "method": {"name": name, **more.get("method", {})},
        "run": {"rounds": rounds, "executor": "sequential"},
    }


def in_process(tree, folder):
    folder.mkdir()
    experiment = resolve(tree)
    execute(prepare(experiment, assemble(experiment), folder), experiment, folder)
    return found_in(folder)


def found_in(folder):
    records = [(folder / name).read_bytes() for name in (ROUNDS, CLIENTS, COSTS)]
    return [*records, Checkpoint.read(folder / CHECKPOINT / LAST).digest]


@pytest.fixture
def grid(tmp_path):
    """Three nodes whose numbers say nothing of their clients."""
    nodes = {f"node{n}": through(client_app, {"state": str(tmp_path / f"node{n}")}) for n in range(3)}
    return Loopback(nodes)


def over_flower(grid, tree, folder, **options):
    serve(grid, tree, folder, **{"say": lambda line: None} | options)
    return found_in(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedproto"])
def test_models_that_begin_with_a_file_and_train_their_heads_are_the_same(name, tmp_path):
    """The server's file and the owner's copies lie at different places, and nobody is told where."""
    torch.manual_seed(0)
    tensors = builder_of(ModelSpec("cnn2", {"width": 4}), 10, (1, 8, 8))().state_dict()
    nodes, places = {}, [tmp_path / "server.pt", *(tmp_path / f"copy{n}.pt" for n in range(3))]
    torch.save(tensors, places[0])
    for number, place in enumerate(places[1:]):
        place.write_bytes(places[0].read_bytes())
        home = NodeConfig(tmp_path / f"node{number}", weights=place)
        nodes[f"node{number}"] = through(client_app, home.as_config())
    model = {"name": "cnn2", "width": 4, "weights": str(places[0]), "train_only": "head"}
    tree = experiment_of(name, models=[model])
    assert over_flower(Loopback(nodes), tree, tmp_path / "flower") == in_process(tree, tmp_path / "here")


@pytest.mark.slow
@pytest.mark.rotates
@pytest.mark.parametrize("name", list_methods())
def test_records_and_checkpoints_are_the_same(name, grid, tmp_path):
    tree = experiment_of(name)
    assert over_flower(grid, tree, tmp_path / "flower") == in_process(tree, tmp_path / "here")


@pytest.mark.slow
def test_models_dealt_at_random_are_the_same(grid, tmp_path):
    tree = experiment_of("fedmd", models=FAMILY, dealing="random")
    assert [str(resolve(tree).model_of(client)) for client in range(3)] != FAMILY
    assert over_flower(grid, tree, tmp_path / "flower") == in_process(tree, tmp_path / "here")


OWN = """
from math import prod
from torch import nn


def mine(num_classes, input_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(input_shape), 12), nn.Tanh(), nn.Linear(12, num_classes))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in list_methods() if not get_method(name).builds_clients_models])
def test_a_node_brings_a_network_that_the_server_has_never_seen(name, tmp_path):
    (tmp_path / "nets.py").write_text(OWN)
    images, labels = np.random.default_rng(0).random((40, 1, 8, 8), dtype=np.float32), np.arange(40) % 10
    np.savez(tmp_path / "own.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    own = {"model": f"{tmp_path / 'nets.py'}:mine", "data": str(tmp_path / "own.npz")}
    homes = [{"state": str(tmp_path / f"node{n}"), **(own if n == 0 else {})} for n in range(3)]
    nodes = {f"node{n}": through(client_app, home) for n, home in enumerate(homes)}
    rounds, clients, *_ = over_flower(Loopback(nodes), experiment_of(name), tmp_path / "flower")
    assert all(json.loads(line)["replied"] == [0, 1, 2] for line in rounds.splitlines())
    last = {row["client"]: row for row in map(json.loads, clients.splitlines())}
    assert last[0]["architecture"] == own["model"]
    assert 0 <= last[0]["accuracy_personal"] <= 1


@pytest.mark.slow
def test_observers_are_told_of_every_client_at_its_node(grid, tmp_path):
    told = []
    observer = Observer.of(on_client_end=lambda event: told.append(event))
    over_flower(grid, experiment_of("fedavg"), tmp_path / "flower", observers=[observer])
    trained = [event for event in told if event.work == "training" and event.round == 1]
    assert sorted(event.client for event in trained) == [0, 1, 2]
    assert [(event.done, event.of) for event in trained] == [(1, 3), (2, 3), (3, 3)]
    assert all(event.loss is not None for event in trained)
    assert {event.client for event in told if event.work == "evaluation"} == {0, 1, 2}
