"""What a server may name at a node: what is installed there, and what the node's owner has allowed."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from potluck.core.ground.digest import digest
from potluck.core.ground.errors import ConfigError
from potluck.experiment.federation.assemble import builder_of
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import ModelSpec
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


@pytest.fixture
def weights(tmp_path):
    """Tensors of `cnn2` with four channels, in a file of the owner's."""
    place = tmp_path / "weights" / "mine.pt"
    place.parent.mkdir()
    torch.save(builder_of(ModelSpec("cnn2", {"width": 4}), 10, (1, 8, 8))().state_dict(), place)
    return place


@pytest.mark.parametrize("key", ["models", "server_model"])
@pytest.mark.parametrize(
    "said", ["FILE", "~/FILE", "weights/mine.pt", "mine", "DIGEST", "0" * 32, ["FILE"], {"name": "FILE"}, 3, True, ""]
)
def test_permitted_are_no_weights_that_a_server_names(tmp_path, weights, touched, monkeypatch, key, said):
    """Not by path or name, nor by a digest of what lies at the node, which its owner did not name."""
    monkeypatch.chdir(tmp_path)
    said = eval(repr(said).replace("FILE", str(weights)).replace("DIGEST", digest(weights.read_bytes())))
    model = {"name": "cnn2", "width": 4, "weights": said}
    federation = {"models": [model]} if key == "models" else {"server_model": model}
    with touched(weights.parent) as found:
        answer = asked(NodeConfig(tmp_path / "state"), federation=federation)
    assert "weights: found" in answer["refusal"]
    assert "potluck join --weights FILE" in answer["refusal"]
    assert found == []


def test_permitted_are_the_owners_weights_if_the_server_names_their_digest(tmp_path, weights):
    home = NodeConfig(tmp_path / "state", weights=weights)
    model = {"name": "cnn2", "width": 4, "weights": digest(weights.read_bytes()), "train_only": ["head"]}
    found = asked(home, federation={"models": [model], "server_model": model})
    assert found["architecture"] == f"cnn2(train_only=['head'], weights={model['weights'][:8]}, width=4)"
    assert set(found["parameters"]) == {"head.weight", "head.bias"}
    assert str(weights) not in str(found)
    for other in ("0" * 32, str(weights), weights.name):
        answer = asked(home, federation={"models": [{**model, "weights": other}]})
        assert "expected the digest of the file that this node's owner named" in answer["refusal"]


@pytest.mark.parametrize("names", ["../up", ["head", "a/b"], [3], [], {"a": "b"}])
def test_permitted_in_train_only_are_names_of_modules_alone(tmp_path, names):
    answer = asked(NodeConfig(tmp_path / "state"), federation={"models": [{"name": "cnn2", "train_only": names}]})
    assert "train_only" in answer["refusal"]
    known = asked(NodeConfig(tmp_path / "other"), federation={"models": [{"name": "cnn2", "train_only": "head"}]})
    assert known["architecture"] == "cnn2(train_only=['head'])"


def test_an_owners_model_begins_with_the_owners_weights_and_trains_what_the_owner_says(tmp_path, own, weights):
    home = NodeConfig(tmp_path / "state", own, "cnn2", weights=weights, train_only=("head", "stages.block1"))
    assert NodeConfig.of(home.as_config()) == home
    assert weights in home.named
    with pytest.raises(ConfigError, match=r"stages\.stem\.conv\.weight has the shape \(4, 1, 3, 3\); expected"):
        home.check()  # they are of a narrower net
    torch.save(builder_of(ModelSpec("cnn2", {}), 10, (1, 8, 8))().state_dict(), weights)
    home.check()
    named = {"models": [{"name": "cnn3", "weights": "/etc/passwd"}], "server_model": "cnn2"}
    found = asked(home, federation=named)
    assert found["architecture"] == (
        f"cnn2(train_only=['head', 'stages.block1'], weights={digest(weights.read_bytes())[:8]})"
    )
    assert {name.partition(".block1.")[0] for name in found["parameters"]} == {"stages", "head.weight", "head.bias"}
    torch.save(builder_of(ModelSpec("cnn2", {}), 10, (1, 8, 8))().double().state_dict(), weights)
    assert "the model was cnn2(" in asked(home, federation=named)["refusal"]  # in the same run


def test_what_an_owner_says_of_weights_is_checked_before_a_server_asks(tmp_path):
    with pytest.raises(ConfigError, match=r"gone\.pt: cannot be read"):
        NodeConfig(tmp_path, weights=tmp_path / "gone.pt").check()
    with pytest.raises(ConfigError, match="--train-only head needs --model"):
        NodeConfig(tmp_path, train_only=("head",)).check()


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
