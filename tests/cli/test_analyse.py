"""`potluck analyse`, from the command line to the page."""

import shlex

import pytest

import potluck as library

SETTINGS = {"federation.train_fraction": 0.1, "method.training.epochs": 1, "run.workers": 1}


@pytest.fixture
def runs(potluck, tmp_path):
    models = [{"name": "cnn2", "width": 4}]
    for method in ("local", "fedavg"):
        library.run(method, clients=2, models=models, rounds=1, settings=SETTINGS, to="runs")
    return tmp_path / "runs"


@pytest.mark.slow
def test_analyse__prints_who_profits_and_writes_the_page_with_its_files(potluck, runs, tmp_path):
    outcome = potluck("analyse runs --to out --examples 40 --target 0.1")
    assert outcome.code == 0, outcome.err
    first, *_, page = outcome.out.splitlines()
    assert first.startswith("With fedavg ")
    assert " of 2 clients do" in first
    assert page == "out/analysis.html"
    text = (tmp_path / page).read_text(encoding="utf-8")
    assert first in text
    assert "Until the target" in text
    names = {path.name for path in (tmp_path / "out" / "analysis").iterdir()}
    assert {"clients.csv", "similarity.csv", "pivot.tex", "gains.svg", "drift.pdf"} <= names
    before = sorted(path for path in runs.rglob("*") if path.is_file())
    (folder, _) = sorted(runs.iterdir())
    outcome = potluck(f"analyse {shlex.quote(str(folder))} --chosen --examples 40")
    assert outcome.code == 0, outcome.err
    assert "Who profits and who loses cannot be told" in outcome.out
    assert (folder / "analysis.html").is_file()
    assert library.open_run(folder).rounds  # what lies beside its files does not make a run another
    assert {path for path in before if path.is_file()} == set(before)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("nowhere", "nowhere: no such folder; expected a run, or a folder of runs"),
        ("nowhere --measure everything", "--measure everything: expected one of"),
        ("nowhere --clients 1", "1 is not in the range x>=2"),
    ],
)
def test_analyse__refuses_in_one_line(potluck, tmp_path, words, expected):
    outcome = potluck(f"analyse {words}")
    assert outcome.code == 2
    assert expected in outcome.err
    assert outcome.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_report__inside_has_what_the_analysis_shows_of_the_models(potluck, runs, tmp_path):
    assert potluck("report runs --to plain").code == 0
    outcome = potluck("report runs --to out --inside --measure global")  # a measure of no single client
    assert outcome.code == 0, outcome.err
    plain, text = ((tmp_path / place / "report.html").read_text(encoding="utf-8") for place in ("plain", "out"))
    for heading in ("How alike clients see", "How far weights are apart", "How sure predictions are"):
        assert (f"<h2>{heading}</h2>" in plain, f"<h2>{heading}</h2>" in text) == (False, True)
    assert text.index("<h2>Who profits, who loses</h2>") < text.index(">Experiments</h2>")
    assert len(text.encode()) < 2_000_000
    page = library.report(*sorted(runs.iterdir()), to="again", measure="global", inside=True)
    assert page.read_text(encoding="utf-8") == text
