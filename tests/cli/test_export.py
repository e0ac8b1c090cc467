"""`potluck export`, from the command line to the file."""

import json

import pytest
import torch

import potluck as library
from potluck.models import get_model


@pytest.fixture
def run(potluck, tmp_path):
    settings = {"federation.train_fraction": 0.1, "method.training.epochs": 1, "run.workers": 1}
    models = [{"name": "cnn2", "width": 4}, {"name": "cnn3", "width": 4}]
    return library.run("fedavg", clients=2, models=models, rounds=1, settings=settings, to="runs")


def test_export__writes_what_the_client_predicts_with_and_says_how_to_read_it(potluck, run, tmp_path):
    outcome = potluck(f"export {run.folder} --client 1 --to out/model.pt")
    assert outcome.code == 0, outcome.err
    accuracy = run.metric.text(run.scores[-1].accuracy_personal)
    assert f"client 1, cnn3(width=4), after round 1, accuracy {accuracy} on its own test part" in outcome.out
    assert "float32 inputs (batch, 1, 8, 8), prepared as out/model.pt.json says" in outcome.out
    facts = json.loads((tmp_path / "out/model.pt.json").read_text())
    assert (facts["run"], facts["digest"]) == (run.folder.name, run.digest)
    net = get_model("cnn3")(facts["outputs"], tuple(facts["input"]["shape"]), width=4)
    net.load_state_dict(torch.load(tmp_path / "out/model.pt"))
    images = torch.rand(3, 1, 8, 8)
    assert torch.equal(net.eval()(images), run.model(1)(images))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--to m.pt", "export: give --client and its number, or --global"),
        ("--client 0 --global --to m.pt", "export: give --client and its number, or --global"),
        ("--client 5 --to m.pt", "client 5: expected one of the 2 from 0 to 1"),
        ("--global --to m.pt", "FedAvg has no single global model with these settings"),
        ("--client 0 --to m.bin", "m.bin: its name says no format"),
        ("--client 0 --to m.pt --format pickle", "format 'pickle': expected one of state-dict"),
    ],
)
def test_export__refuses_in_one_line(potluck, run, tmp_path, words, expected):
    outcome = potluck(f"export {run.folder} {words}")
    assert outcome.code == 2
    assert expected in outcome.err
    assert outcome.err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}
