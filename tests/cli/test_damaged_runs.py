"""What every command says of a finished run that somebody has changed."""

import json
import re
import shutil

import pytest

import potluck as library
from potluck import ConfigError, PotluckWarning
from potluck.core.ground.errors import CheckpointError

KEYS = {"clients": 2, "models": [{"name": "cnn2", "width": 4}], "rounds": 1}
ALONE = {"federation.train_fraction": 0.1, "method.training.epochs": 1, "run.workers": 1}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two finished runs, of `local` and `fedavg`, in one folder."""
    parent = tmp_path_factory.mktemp("finished")
    for method in ("local", "fedavg"):
        library.run(method, settings=ALONE, to=parent, **KEYS)
    return parent


@pytest.fixture
def runs(finished, tmp_path):
    """Copies of them, by method."""
    shutil.copytree(finished, tmp_path / "runs")
    return {folder.name.split("-")[2]: folder for folder in (tmp_path / "runs").iterdir()}


def improved(folder):
    place = folder / "rounds.jsonl"
    place.write_text(re.sub(r'("accuracy": )0\.\d+', r"\g<1>0.99", place.read_text()))


def emptied(folder):
    (folder / "rounds.jsonl").write_text("")


def faster(folder):
    place = folder / "config.toml"
    text = place.read_text()
    place.write_text(re.sub(r"\nlr = [\d.]+", "\nlr = 0.5", text))
    assert place.read_text() != text


DAMAGES = [
    (improved, "rounds.jsonl, line 1, is damaged: it is not what the run wrote"),
    (emptied, "rounds.jsonl, which is missing or empty, is damaged"),
    (faster, "the configuration has changed since the last checkpoint: method.training.lr was"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "named"), DAMAGES)
def test_compare_and_report_name_it_and_leave_it_out(damage, named, runs, potluck):
    damage(runs["fedavg"])
    for line in ("compare runs", "report runs --to out"):
        outcome = potluck(line)
        assert outcome.code == 0
        (said,) = outcome.err.splitlines()
        assert said.startswith("potluck: Left out: ")
        assert named in said
    compared = potluck("compare runs").out
    assert "local" in compared
    assert f"Left out: {runs['fedavg'].relative_to(runs['fedavg'].parents[1])}" in compared
    assert named in compared
    assert "99.0" not in compared
    assert "lr=" not in compared


@pytest.mark.parametrize(("damage", "named"), DAMAGES)
def test_of_a_single_run_every_command_ends_with_it(damage, named, runs, potluck):
    damage(runs["local"])
    place = runs["local"]
    for line in (
        f"compare {place}",
        f"report {place}",
        f"show {place}",
        f"show {place} --digest",
        f"export {place} --client 0 --to net.pt",
    ):
        outcome = potluck(line)
        assert (outcome.code, outcome.out) == (2, ""), line
        assert outcome.err.startswith("potluck: ")
        assert named in outcome.err
        assert outcome.err.count("\n") == 1
    assert not (place / "report.html").exists()


@pytest.mark.parametrize(("damage", "named"), DAMAGES)
def test_python_refuses_it_or_leaves_it_out(damage, named, runs):
    kept = library.open_run(runs["local"])
    damage(runs["local"])
    with pytest.raises(CheckpointError, match=re.escape(named)):
        library.open_run(runs["local"])
    with pytest.raises(CheckpointError, match=re.escape(named)):
        kept.model(0)
    with pytest.warns(PotluckWarning, match=f"Left out: .*{re.escape(named)}"):
        comparison = library.compare(runs["local"].parent)
    assert list(comparison.frame["experiment"]) == ["fedavg"]
    assert named in comparison.remarks[0]
    assert comparison.remarks[0] in comparison.text
    assert "Left out: " in comparison._repr_html_()


def test_a_run_whose_checkpoint_is_gone_is_shown_and_said_to_be_unchecked(runs, potluck):
    shutil.rmtree(runs["fedavg"] / "checkpoint")
    outcome = potluck("compare runs")
    assert outcome.code == 0
    assert f"potluck: Not checked: {runs['fedavg'].name}: there is no checkpoint" in outcome.err
    assert f"Not checked: {runs['fedavg'].name}" in outcome.out
    assert "fedavg" in outcome.out.split("Means over")[0]
    with pytest.warns(PotluckWarning, match="there is no checkpoint; it cannot be checked whether records"):
        assert library.open_run(runs["fedavg"]).method == "fedavg"


def test_untouched_runs_are_read_without_a_word(runs, potluck):
    for line in ("compare runs", "report runs --to out", f"show {runs['local']}"):
        outcome = potluck(line)
        assert (outcome.code, outcome.err) == (0, ""), line
    assert json.loads((runs["local"] / "manifest.json").read_text())["status"] == "finished"


def test_the_reference_is_looked_for_before_anything_runs(runs, potluck, tmp_path):
    (tmp_path / "s.toml").write_text('[sweep]\n"method.name" = ["local", "fedavg"]\n"run.seed" = [0]\n')
    for line in (
        "compare local fedavg --against fedprox --to new",
        "compare runs local --against fedprox --to new",
        "sweep s.toml --against fedprox --to new",
    ):
        outcome = potluck(line)
        assert outcome.code == 2
        assert "no experiment 'fedprox' to compare with; expected one of these: " in outcome.err
        assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match="no experiment 'fedprox' to compare with"):
        library.compare("local", against="fedprox", to=tmp_path / "new")
    assert not (tmp_path / "new").exists()
