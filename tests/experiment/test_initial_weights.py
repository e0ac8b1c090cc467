"""Runs whose models begin with a file's tensors and train some modules alone: whoever trains, and taken up again."""

import json
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import potluck
from potluck.core.ground.errors import CheckpointError, ConfigError
from potluck.core.nets.weights import frozen_names
from potluck.engine.rounds.engine import Engine
from potluck.experiment.federation.assemble import assemble, builder_of
from potluck.experiment.running.several import found
from potluck.experiment.settings.presets import experiment_for
from potluck.experiment.settings.schema import ModelSpec
from potluck.models.initial import file_digest
from potluck.testing.checks.networks import Overhearing
from potluck.testing.worlds import run_rounds

pytestmark = pytest.mark.filterwarnings("ignore:.* as drawn:potluck.PotluckWarning")
NET = {"name": "cnn2", "width": 4}
QUICK = {"federation.train_fraction": 0.15, "method.training.epochs": 1}


@pytest.fixture(scope="module", autouse=True)
def data_at_hand():
    """Reading data for the first time imports much, which is not these tests' to pay for."""
    assemble(experiment_for("fedavg", {"federation.clients": 2}))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tensors(here):
    """Those in the file net.pt: of the net for seven classes."""
    return store("net.pt", 0)


def store(file, seed):
    torch.manual_seed(seed)
    tensors = builder_of(ModelSpec("cnn2", {"width": 4}), 7, (1, 8, 8))().state_dict()
    torch.save(tensors, file)
    return tensors


def play(method, executor="sequential", *, weights="net.pt", **keywords):
    models = [{**NET, "weights": weights, "train_only": "head"}]
    workers = {"run.workers": 2} if executor == "workers" else {}
    settings = {**QUICK, "run.executor": executor, **workers}
    return potluck.run(method, settings=settings, **{"clients": 2, "models": models, "rounds": 2, **keywords})


def named(tensors, name):
    """The tensor of a net, which may be a part of the model that is evaluated."""
    return next(tensor for own, tensor in tensors.items() if f".{own}".endswith(f".{name}"))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedproto"])
def test_whoever_trains_all_but_the_head_is_the_files_byte_for_byte(tensors, method):
    one, workers, stacked = (play(method, executor) for executor in ("sequential", "workers", "stacked"))
    for client in (0, 1):
        mine, theirs, together = (run.model(client).state_dict() for run in (one, workers, stacked))
        for net in (mine, together):
            body = {name: named(net, name) for name in tensors if not name.startswith("head.")}
            assert all(torch.equal(tensor, tensors[name]) for name, tensor in body.items())
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
        assert_close(together, mine)
    assert one.scores == workers.scores
    heads = [named(one.model(client).state_dict(), "head.weight") for client in (0, 1)]
    assert torch.equal(*heads) == (method == "fedavg")


@pytest.mark.parametrize("method", ["fedavg", "fedproto"])
def test_what_is_not_trained_is_never_sent(tensors, method):
    model = {**NET, "weights": "net.pt", "train_only": ["head"]}
    federation = {"federation.clients": 2, "federation.models": [model], "federation.train_fraction": 0.1}
    experiment = experiment_for(None, {"method.name": method, "method.training.epochs": 1, **federation})
    hearing = Overhearing()
    engine = Engine(experiment.method, assemble(experiment).federation, seed=0, executor=hearing)
    run_rounds(engine, 1)
    assert hearing.names >= ({"head.weight"} if method == "fedavg" else set())
    assert not hearing.names & (tensors.keys() - {"head.weight", "head.bias"})


def test_a_file_is_looked_for_beside_the_configuration(tensors, here, monkeypatch):
    (here / "one.toml").write_text(
        "[federation]\ndataset = 'digits'\n"
        "models = [{name = 'cnn2', width = 4, weights = 'net.pt', train_only = ['head', 'stages.block1']}]\n"
        "server_model = {name = 'cnn2', width = 4, weights = 'net.pt'}\n"
    )
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    experiment = experiment_for(str(here / "one.toml"), [])
    (spec,), server = experiment.models, experiment.server_model
    assert server is not None
    assert (spec.weights, server.weights) == (str(here / "net.pt"), str(here / "net.pt"))
    assert spec.train_only == ("head", "stages.block1")
    assert experiment_for(None, {f"federation.{key}": value for key, value in experiment.tree()["federation"].items()})


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"weights": 3}, "cnn2: weights: found 3; expected a file's path"),
        ({"train_only": []}, r"cnn2: train_only: found \[\]; expected 'head' or a list of modules' names"),
        ({"train_only": [1]}, r"cnn2: train_only: found \[1\]; expected"),
        ({"weight": "net.pt"}, "unknown key .*weight.*"),
    ],
)
def test_what_a_table_says_wrongly_is_refused_in_one_line(said, expected):
    with pytest.raises(ConfigError, match=expected) as caught:
        experiment_for(None, {"federation.models": [{**NET, **said}]})
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_file_and_with_no_other(tensors, here, monkeypatch):
    made = play("fedavg", rounds=1, to="runs")
    manifest = json.loads((made.folder / "manifest.json").read_text())
    assert manifest["initial_weights"] == {"net.pt": file_digest("net.pt")}
    assert {"timm", "transformers"} <= manifest["packages"].keys()
    (name,) = manifest["frozen"]
    assert set(manifest["frozen"][name]) == tensors.keys() - {"head.weight", "head.bias"}
    folder = made.folder.resolve()
    monkeypatch.chdir("/")
    assert (
        potluck.resume(folder, rounds=2).digest
        == play("fedavg", weights=str(here / "net.pt"), to=here / "whole").digest
    )

    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    store(here / "net.pt", 1)
    expected = r"net\.pt, a file of initial weights, had the digest .* has changed since the run was started"
    for goes_on in (
        lambda: potluck.resume(folder, rounds=3),
        lambda: potluck.resume(folder, rounds=3, branch=True),
        lambda: potluck.open_run(folder).model(0),
    ):
        with pytest.raises(CheckpointError, match=expected):
            goes_on()
    assert {file: file.read_bytes() for file in before} == before


def test_a_run_with_another_file_is_another_run(tensors, here):
    made = play("fedavg", rounds=1, to="runs")
    config = (made.folder / "config.toml").read_text()
    Path("again.toml").write_text(config)
    again = experiment_for("again.toml", [])
    assert found(Path("runs"), [again]) == [made.folder]
    store("net.pt", 1)
    assert found(Path("runs"), [again]) == [None]


def test_two_models_of_one_name_and_two_files_are_two_architectures(tensors, here):
    store("other.pt", 1)
    models = [{**NET, "weights": file, "train_only": "head"} for file in ("net.pt", "other.pt")]
    federation = assemble(experiment_for(None, {"federation.models": models, "federation.clients": 2})).federation
    nets = [federation.build(name, potluck.fl.Key(("a",))) for name in federation.architectures]
    assert len(nets) == 2
    assert not torch.equal(*(net.state_dict()["stages.stem.conv.weight"] for net in nets))
    assert frozen_names(nets[0]) == frozen_names(nets[1])
