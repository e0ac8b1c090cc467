"""Sites that know other classes: each network has outputs for its own, in one process and on nodes."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from torch import nn

from potluck.core.ground.errors import WireError
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.running.execute import execute, prepare
from potluck.experiment.settings.resolve import resolve
from potluck.flower.node.clientapp import client_app
from potluck.flower.server.nodes import NodesMissing
from potluck.flower.server.serve import NODES, serve
from potluck.flower.wire.envelope import unwrap, wrap
from potluck.flower.wire.introduction import Introduction, Network
from potluck.records import CHECKPOINT, CLIENTS, LAST, ROUNDS, Checkpoint
from potluck.testing.loopback import Loopback, through

ANIMALS = ("cat", "dog", "fox", "owl")
KNOWN = (("cat", "dog"), ("dog", "owl", "fox"), ("cat", "fox", "owl"))

NETS = """
from torch import nn


def own(num_classes, input_shape):
    (width,) = input_shape["columns"].shape if isinstance(input_shape, dict) else input_shape
    return nn.Sequential(nn.Linear(width, 12), nn.Tanh(), nn.Linear(12, num_classes))
"""


def sightings(count, seed, animals=ANIMALS):
    """Weights and heights of animals that can be told apart by them."""
    draws = np.random.default_rng(seed)
    seen = draws.choice(animals, count)
    number = np.array([ANIMALS.index(one) for one in seen])
    weight, height = 4.0 * (number % 2) + draws.normal(0, 0.5, count), 4.0 * (number // 2) + draws.normal(0, 0.5, count)
    return pd.DataFrame({"weight": weight.round(3), "height": height.round(3), "animal": seen})


@pytest.fixture
def sites(tmp_path):
    """The server's table of all animals, those of three sites of some, and a file of networks."""
    tmp_path.joinpath("nets.py").write_text(NETS)
    sightings(200, 0).to_csv(tmp_path / "common.csv", index=False)
    for number, animals in enumerate(KNOWN):
        sightings(80, 1 + number, animals).to_csv(tmp_path / f"site{number}.csv", index=False)
    return tmp_path


def tree(sites, models, method="fedproto", **run):
    return {
        "federation": {
            "dataset": str(sites / "common.csv"),
            "columns": {"target": "animal"},
            "classes": "own",
            "clients": 3,
            "models": models,
        },
        "method": {"name": method},
        "run": {"rounds": 2, "executor": "sequential", "common_test": False, **run},
    }


def found_in(folder):
    records = [(folder / name).read_bytes() for name in (ROUNDS, CLIENTS)]
    return [*records, Checkpoint.read(folder / CHECKPOINT / LAST).digest]


def here(wanted, sites):
    own = {**wanted["federation"], "data": [str(sites / f"site{n}.csv") for n in range(3)]}
    experiment, folder = resolve({**wanted, "federation": own}), sites / "here"
    folder.mkdir()
    execute(prepare(experiment, assemble(experiment), folder), experiment, folder)
    return found_in(folder)


def homes(sites, models=(None, None, None)):
    own = [{"state": str(sites / f"node{n}"), "data": str(sites / f"site{n}.csv")} for n in range(3)]
    return [{**home, **({"model": model} if model else {})} for home, model in zip(own, models, strict=True)]


def loopback(sites, *models):
    return Loopback({f"node{n}": through(client_app, home) for n, home in enumerate(homes(sites, *models))})


def at_nodes(wanted, sites):
    serve(loopback(sites), wanted, sites / "flower", say=lambda line: None)
    return found_in(sites / "flower")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "models"),
    [
        ("fedproto", ["mlp2", "mlp3"]),
        ("fedavg", ["mlp2"]),
        ("lgfedavg", ["mlp2", "mlp3"]),
        ("fml", ["mlp2", "mlp3"]),
        ("heterofl", ["mlp2"]),
        ("depthfl", ["mlp4"]),
    ],
)
def test_sites_of_other_classes_give_the_bytes_at_nodes_that_they_give_in_process(sites, method, models):
    wanted = tree(sites, models, method)
    found = at_nodes(wanted, sites)
    assert found == here(wanted, sites)
    told = json.loads((sites / "flower" / NODES).read_text())["clients"]
    assert [len(told[str(client)]["introduction"]["outputs"]) for client in range(3)] == [2, 3, 3]


@pytest.mark.slow
def test_a_network_of_ones_own_learns_the_classes_of_its_site_among_strangers(sites):
    models = [f"{sites / 'nets.py'}:own", "mlp2", f"{sites / 'nets.py'}:own"]
    wanted = tree(sites, ["mlp2"], "fml", rounds=6)
    wanted["method"]["training"] = {"lr": 0.02, "epochs": 3}
    serve(loopback(sites, models), wanted, sites / "flower", say=lambda line: None)
    last = [json.loads(line) for line in (sites / "flower" / CLIENTS).read_text().splitlines()][-3:]
    assert all(one["accuracy_personal"] > 0.8 for one in last), last


NET = nn.Linear(3, 2)
TOLD = Introduction("mlp2", 1.0, Network.of(NET), 30, 3, 5, (3,), 4, ("a", "b"), (2, 0))


def test_an_introduction_tells_which_classes_the_outputs_are_for():
    header = json.loads(json.dumps(TOLD.header()))
    assert Introduction.read(header) == TOLD
    assert Introduction.read(json.loads(json.dumps(replace(TOLD, outputs=None).header()))).outputs is None


@pytest.mark.parametrize("outputs", [[4], [0, 0], [-1], [], ["0"], [0.5], {"0": 1}, "01"])
def test_outputs_that_are_no_classes_of_the_federation_are_refused(outputs):
    with pytest.raises(WireError, match="its introduction: outputs"):
        Introduction.read({**json.loads(json.dumps(TOLD.header())), "outputs": outputs})


def lying(honest, outputs):
    """A node that says that its network has outputs for other classes than it has."""

    def answer(message):
        reply = honest(message)
        header, payload = unwrap(reply.content)
        if "outputs" in header:
            reply.content = wrap({**header, "outputs": outputs}, payload)
        return reply

    return answer


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [None, [0, 1, 2]])
def test_a_node_whose_network_is_not_of_the_classes_that_it_tells_takes_no_part(sites, outputs):
    honest = {f"node{n}": through(client_app, home) for n, home in enumerate(homes(sites))}
    grid = Loopback({**honest, "node0": lying(honest["node0"], outputs)})
    with pytest.raises(NodesMissing, match="is not the experiment's"):
        serve(grid, tree(sites, ["mlp2"], "fedavg"), sites / "flower", say=lambda line: None)


@pytest.mark.slow
def test_a_node_has_classes_of_its_own_only_where_the_server_says_so(sites):
    wanted = tree(sites, ["mlp2"])
    honest = {f"node{n}": through(client_app, home) for n, home in enumerate(homes(sites))}
    del wanted["federation"]["classes"]
    grid = Loopback({**honest, "node0": lying(honest["node0"], [0, 1])})
    with pytest.raises(NodesMissing, match="outputs for classes of its own; expected all"):
        serve(grid, wanted, sites / "flower", say=lambda line: None)
