"""What a server may name at a node: what is installed there, and what the node's owner has allowed."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from potluck.core.ground.digest import digest
from potluck.core.ground.errors import ConfigError
from potluck.experiment.settings.resolve import resolve
from potluck.flower import HELLO
from potluck.flower.node.config import NodeConfig
from potluck.flower.node.service import NodeService

CODE = """
from dataclasses import dataclass
from pathlib import Path

from potluck.methods.local import Local
from potluck.models import get_model

(Path(__file__).parent / "ran").touch()


@dataclass(frozen=True)
class Mine(Local):
    pass


def small(num_classes, input_shape):
    return get_model("cnn2")(num_classes, input_shape, width=4)
"""


@pytest.fixture
def code(tmp_path):
    """A method and a model in a file, which notes that it was run."""
    (tmp_path / "owner").mkdir()
    place = tmp_path / "owner" / "mine.py"
    place.write_text(CODE)
    return place


@pytest.fixture
def own(tmp_path):
    """A node's own data."""
    draw = np.random.default_rng(0)
    parts = {name: draw.integers(0, 255, (40, 1, 8, 8), dtype=np.uint8) for name in ("x_train", "x_test")}
    np.savez(tmp_path / "own.npz", **parts, y_train=np.arange(40) % 10, y_test=np.arange(40) % 10)
    return tmp_path / "own.npz"


def asked(home, code=None, client=0, **tables):
    """How a node introduces itself to a server with this experiment."""
    federation = {"dataset": "digits", "train_fraction": 0.1, "clients": 2, "models": [{"name": "cnn2", "width": 4}]}
    tree = {
        "federation": federation | tables.get("federation", {}),
        "method": tables.get("method", {"name": "local"}),
        "run": tables.get("run", {}),
    }
    header = {
        "experiment": tree,
        "run": "run-1",
        "client": client,
        "code": code,
        "classes": {"count": 10, "names": None},
    }
    return NodeService(home).answer(HELLO, (header, b""))[0]


@pytest.fixture(scope="module", autouse=True)
def data_at_hand(tmp_path_factory):
    """Reading data for the first time imports much, which is not these tests' to pay for."""
    asked(NodeConfig(tmp_path_factory.mktemp("first")))


def ran(code):
    return (code.parent / "ran").exists()


def test_permitted_is_what_is_installed(tmp_path):
    assert asked(NodeConfig(tmp_path / "state"))["architecture"] == "cnn2(width=4)"


@pytest.mark.parametrize(
    "tables",
    [
        {"method": {"name": "FILE"}},
        {"federation": {"models": ["FILE:small"]}},
        {"federation": {"models": [{"name": "FILE:small"}, "cnn2"]}},
        {"federation": {"server_model": "FILE:small"}},
    ],
)
def test_permitted_is_no_file_of_code_that_a_server_names(tmp_path, code, tables):
    named = eval(repr(tables).replace("FILE", str(code)))
    found = asked(NodeConfig(tmp_path / "state"), digest(code.read_bytes()), **named)
    assert not ran(code)
    assert "potluck join --allow-code" in found["refusal"]


def test_permitted_is_the_owners_copy_of_a_method_and_never_what_the_server_has(tmp_path, code):
    theirs = tmp_path / "server" / "mine.py"
    theirs.parent.mkdir()
    shutil.copy(code, theirs)
    home, named = NodeConfig(tmp_path / "state", code=(code,)), {"name": str(theirs)}
    assert asked(home, digest(theirs.read_bytes()), method=named)["architecture"] == "cnn2(width=4)"
    assert (ran(code), ran(theirs)) == (True, False)
    theirs.write_text(CODE + "\n# and more")
    assert "--allow-code" in asked(home, digest(theirs.read_bytes()), method=named)["refusal"]
    assert "is not installed here" in asked(home, None, method=named)["refusal"]
    assert not ran(theirs)


def test_permitted_is_a_model_in_a_file_that_the_owner_allows(tmp_path, code):
    named = {"models": [f"{code}:small"]}
    assert asked(NodeConfig(tmp_path / "state", code=(code,)), federation=named)["architecture"] == f"{code}:small"


def test_permitted_are_other_clients_models_unseen(tmp_path, code):
    """Of models that others have a node needs none, so a file among them does not keep it out."""
    models = {"models": [{"name": "cnn2", "width": 4}, f"{code}:small"], "server_model": {"name": "cnn2", "width": 4}}
    assert asked(NodeConfig(tmp_path / "state"), federation=models)["architecture"] == "cnn2(width=4)"
    assert "--allow-code" in asked(NodeConfig(tmp_path / "state2"), client=1, federation=models)["refusal"]
    assert not ran(code)


def test_a_node_has_the_model_that_the_server_deals_it_at_random(tmp_path):
    federation = {"clients": 4, "models": ["cnn2", "cnn3", "mlp2"], "dealing": "random"}
    for seed in (0, 1):
        tables = {"federation": federation, "run": {"seed": seed}}
        dealt = resolve({**tables, "method": {"name": "local"}}).model_of
        homes = {client: NodeConfig(tmp_path / f"{client}-{seed}") for client in range(4)}
        for client, home in homes.items():
            assert asked(home, client=client, **tables)["architecture"] == str(dealt(client))
        assert [str(dealt(client)) for client in homes] != ["cnn2", "cnn3", "mlp2", "cnn2"]


@pytest.mark.parametrize("where", ["dataset", "public", "data"])
def test_permitted_is_no_path_to_data_that_a_server_names(tmp_path, own, where):
    named = {where: [str(own)] * 2 if where == "data" else str(own)}
    refusal = asked(NodeConfig(tmp_path / "state"), federation=named)["refusal"]
    assert "ConfigError: the server's federation." in refusal
    opened = []
    audit.append(lambda event, arguments: event == "open" and opened.append(str(arguments[0])))
    try:
        asked(NodeConfig(tmp_path / "state2"), federation=named)
    finally:
        audit.clear()
    assert str(own) not in opened


audit = []
sys.addaudithook(lambda event, arguments: [hook(event, arguments) for hook in audit])


def test_permitted_with_data_of_its_own_is_a_server_whose_data_are_files(tmp_path, own):
    found = asked(
        NodeConfig(tmp_path / "state", data=own), federation={"dataset": "/srv/theirs.npz", "data": ["/a", "/b"]}
    )
    assert (found["train"] + found["validation"], found["test"]) == (40, 40)
    refused = asked(
        NodeConfig(tmp_path / "s", data=own), federation={"dataset": "/srv/theirs.npz", "public": "holdout"}
    )
    assert "federation.public" in refused["refusal"]


@pytest.mark.parametrize("name", ["no_such", "os", "potluck.methods.local", "", 7, None, ["local"]])
def test_permitted_is_no_method_that_is_not_installed(tmp_path, name):
    refusal = asked(NodeConfig(tmp_path / "state"), method={"name": name})["refusal"]
    assert "is not installed here" in refusal


def test_permitted_experiments_resolve_to_what_the_server_meant(tmp_path):
    """A node plays with its own model and the common one; all else is as the server has it."""
    from potluck.experiment.federation.assemble import assemble_server
    from potluck.flower.node.asked import asked as read
    from potluck.flower.server.serve import _told

    experiment = resolve({"federation": {"dataset": "digits", "models": ["cnn4", "cnn2"]}, "method": {"name": "fml"}})
    tree = _told(experiment, assemble_server(experiment))
    here = read(tree, NodeConfig(tmp_path), 4, None).tree()
    assert here["federation"].pop("models") == [tree["federation"].pop("models")[0]]
    assert here["federation"]["server_model"] == {"name": "cnn2"}  # the smallest, though this node never sees cnn4's
    assert here == tree


def test_home_says_which_file_of_code_is_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"--allow-code .*gone.py: no such file"):
        NodeConfig(tmp_path, code=(Path("gone.py"),)).check()


def test_home_of_a_configuration_has_its_files_of_code(tmp_path, code):
    home = NodeConfig(tmp_path, code=(code, tmp_path / "other.py"))
    assert NodeConfig.of(home.as_config()).code == (code, tmp_path / "other.py")
