"""What a run's folder says of classes: how they are divided among clients, and how they were predicted at the end."""

import json

import pytest
import torch

from potluck.analysis.read import by_class, partition, read_run
from potluck.core.tasks.regression import Regression
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.results.evaluate import Evaluation, evaluate
from potluck.experiment.running.execute import execute, prepare
from potluck.experiment.settings.presets import experiment_for
from potluck.methods import get_method

TINY = (
    "federation.clients=3",
    "federation.train_fraction=0.1",
    "federation.models=[{name='cnn2',width=4}]",
    "run.rounds=2",
    "run.executor=sequential",
)


@pytest.fixture
def run(tmp_path):
    """A tiny finished run of digits: its assembly and its folder."""
    experiment = experiment_for("local", TINY)
    assembly = assemble(experiment)
    started = prepare(experiment, assembly, tmp_path / "run")
    execute(started, experiment, tmp_path / "run")
    return assembly, started, tmp_path / "run"


def test_a_run_of_classes_says_how_they_are_divided_and_predicted(run):
    assembly, _, folder = run
    stored = read_run(folder)

    found = partition(stored)
    expected = []
    for _, site in sorted(assembly.federation.sites.items()):
        labels = torch.cat([batch.targets for batch in site.train.batches(64)])
        expected.append([int((labels == number).sum()) for number in range(len(assembly.classes))])
    assert found.train == expected
    assert [sum(counts) for counts in found.train] == [
        len(s.train) for _, s in sorted(assembly.federation.sites.items())
    ]

    counts = by_class(stored)
    assert counts.round == 2
    right, predicted, actual = counts.counts
    assert [row[place] for place, row in enumerate(counts.confusion)] == right
    assert list(map(sum, counts.confusion)) == actual
    assert list(map(sum, zip(*counts.confusion, strict=True))) == predicted
    assert sum(right) / sum(actual) == stored.rounds[-1].value("pooled", "accuracy")
    assert sum(actual) == sum(line.examples_test for line in stored.clients if line.round == 2)


def test_they_are_in_files_of_their_own(run):
    _, _, folder = run
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    lines += [json.loads(line) for line in (folder / "clients.jsonl").read_text().splitlines()]
    assert not any("confusion" in line or "counts" in line or "train" in line for line in lines)
    assert "confusion" not in (folder / "manifest.json").read_text()


@pytest.mark.slow
def test_a_run_that_goes_on_has_the_counts_of_its_new_last_round(play, tmp_path):
    local = get_method("local")
    play(local, rounds=3)
    once = (tmp_path / "run" / "classes.json").read_text()
    assert json.loads(once)["round"] == 3
    play(local, name="longer", rounds=2)
    assert json.loads((tmp_path / "longer" / "classes.json").read_text())["round"] == 2
    play(local, name="longer", rounds=3)
    assert (tmp_path / "longer" / "classes.json").read_text() == once


def test_a_task_without_classes_has_no_counts():
    assert Evaluation([], task=Regression(), sums=Regression().zeros(1)).by_class(1) is None


def test_nothing_tested_nothing_counted(run, monkeypatch):
    _, started, _ = run
    monkeypatch.setattr(type(started._engine), "evaluate", lambda *arguments, **options: [])
    assert evaluate(started._engine, None, common_test=False).by_class(1) is None
