"""`result.attack` on real runs: what it finds is so, and the run's folder stays as it was."""

import hashlib
import math

import pytest

import potluck
from potluck import ConfigError

SMALL = {"federation.train_fraction": 0.1, "run.workers": 1, "method.training.epochs": 1, "method.training.lr": 0.01}
QUICK = {"images": 4, "steps": 150, "canaries": 32}


@pytest.fixture
def small(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(method, **settings):
        models = [{"name": "cnn2", "width": 6}]
        return potluck.run(method, clients=2, models=models, rounds=1, settings={**SMALL, **settings}, to="runs")

    return run


def content(folder):
    """Every file below a folder, with its bytes and the time of its last change."""
    return {
        path.relative_to(folder): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.slow
def test_attack__features_show_the_images_and_the_run_stays_as_it_was(small, tmp_path):
    run = small("fedin")
    before = content(run.folder)
    found = potluck.open_run(run.folder).attack(**QUICK)
    assert content(run.folder) == before
    table = found.frames["inversion"]
    assert len(table) == 4
    assert sorted(table["client"]) == [0, 0, 1, 1]
    assert table["ssim"].mean() > 0.8 > table["blind_ssim"].mean()
    assert table["LPIPS-rand"].between(0, 4).all()
    assert set(found.frames) == {"labels", "membership", "inversion"}
    assert (found.frames["membership"]["low"] <= found.frames["membership"]["auc"]).all()
    assert not found.broken
    page = found.write(tmp_path / "out").read_text(encoding="utf-8")
    assert found.sentences[-1] in page
    assert "data:image/svg+xml;base64" in page
    names = {path.name for path in (tmp_path / "out" / "attack").iterdir()}
    assert names == {"labels.csv", "membership.csv", "inversion.csv", "inversion.svg", "inversion.pdf"}
    again = potluck.open_run(run.folder).attack(**QUICK)
    assert str(again) == str(found) == str(run.attack(**QUICK))  # of the models that are at hand, too


@pytest.mark.slow
def test_attack__noise_makes_images_worse_and_calibrated_noise_hides_them(small):
    noisy = small("fedin", **{"method.noise": 0.8}).attack(**QUICK).frames["inversion"]
    clean = small("fedin").attack(**QUICK).frames["inversion"]
    assert noisy["mse"].mean() > 3 * clean["mse"].mean()
    private = small("fedin", **{"method.privacy": {"clip": 1.0, "epsilon": 2.0, "delta": 1e-5}}).attack(**QUICK)
    assert private.frames["inversion"]["ssim"].mean() < private.frames["inversion"]["blind_ssim"].mean()
    (row,) = private.frames["audit"].to_dict("records")
    assert 0 <= row["lower_epsilon"] < row["upper_epsilon"] == pytest.approx(2.0)
    assert private.sentences[0].startswith("One private release: epsilon 2 at delta 1e-05 is stated")


def test_attack__what_cannot_be_attacked_is_said(small):
    found = small("local").attack()
    assert found.frames == {}
    assert found.sentences == []
    assert str(found).splitlines() == [
        "No label inference of clients 0 and 1: nothing in the reply tells classes.",
        "No membership inference of clients 0 and 1: found neither a whole network nor outputs in the reply.",
    ]


@pytest.mark.slow
def test_attack__counts_that_are_sent_are_the_clients(small):
    table = small("fedproto").attack(**QUICK).frames["labels"]
    assert table["from"].tolist() == ["counts"] * 2
    assert table["f1"].tolist() == [1.0, 1.0]
    assert all(math.isclose(distance, 0, abs_tol=1e-12) for distance in table["distance"])


@pytest.mark.parametrize("wrong", [{"images": 0}, {"steps": 1.5}, {"canaries": True}, {"seed": -1}])
def test_attack__numbers_out_of_range_are_refused(wrong):
    from potluck.api.attack import Effort

    (name,) = wrong
    with pytest.raises(ConfigError, match=f"{name}: expected a whole number of at least"):
        Effort(**wrong)
