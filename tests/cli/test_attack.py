"""`potluck attack`, from the command line to the page."""

import shlex

import pytest

import potluck as library
from potluck.parts.privacy import FeaturePrivacy

SETTINGS = {"federation.train_fraction": 0.1, "method.training.epochs": 1, "run.workers": 1}
PRIVATE = {"method.privacy": {"clip": 0.5, "epsilon": 1.0, "delta": 1e-5}}


@pytest.fixture
def private(potluck):
    models = [{"name": "cnn2", "width": 4}]
    run = library.run("fedin", clients=2, models=models, rounds=1, settings={**SETTINGS, **PRIVATE}, to="runs")
    return shlex.quote(str(run.folder))


@pytest.mark.slow
def test_attack__prints_the_lower_epsilon_beside_the_upper_one_and_writes_the_page(potluck, private, tmp_path):
    outcome = potluck(f"attack {private} --to out --images 2 --steps 50 --canaries 64")
    assert outcome.code == 0, outcome.err
    first, *_, page = outcome.out.splitlines()
    assert first.startswith("One private release: epsilon 1 at delta 1e-05 is stated, and the attack shows at least 0.")
    assert page == "out/attack.html"
    assert first in (tmp_path / page).read_text(encoding="utf-8").replace("&#39;", "'")
    assert (tmp_path / "out" / "attack" / "audit.csv").is_file()


@pytest.mark.slow
def test_attack__ends_with_code_1_where_a_claim_does_not_hold(potluck, private, monkeypatch):
    monkeypatch.setattr(FeaturePrivacy, "_clipped", lambda self, features: features.detach().double())
    outcome = potluck(f"attack {private} --to out --images 1 --steps 1 --canaries 64")
    assert outcome.code == 1, outcome.err
    assert "The claim does not hold." in outcome.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("nowhere", "nowhere"),
        ("nowhere --canaries 1", "1 is not in the range x>=2"),
        ("nowhere --steps 0", "0 is not in the range x>=1"),
    ],
)
def test_attack__refuses_in_one_line(potluck, tmp_path, words, expected):
    outcome = potluck(f"attack {words}")
    assert outcome.code == 2
    assert expected in outcome.err
    assert outcome.err.count("\n") == 1
    assert not list(tmp_path.iterdir())
