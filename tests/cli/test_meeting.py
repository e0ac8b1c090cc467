"""`potluck inspect federation`, and what `potluck check`, a run and its report say of clients that share nothing."""

from collections import Counter

import pytest

from potluck.experiment.settings.presets import experiment_for

UNLIKE = "\"federation.models=['cnn2', 'vit', 'mlp2']\" federation.clients=3 method.sharing.scope=architecture"


def rows(shown):
    """The table's rows, as their cells."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]


def test_it_draws_which_layers_meet_group_by_group(potluck):
    shown = potluck("inspect federation fedavg \"federation.models=['mlp2', 'mlp3']\" federation.clients=3")
    assert shown.code == 0
    assert "3 clients; fedavg averages layers of one name and shape" in shown.out
    assert rows(shown.out) == [
        ["stages.stem", "mlp2 ×2, mlp3 ×1", "meet", "4,160"],
        ["stages.hidden1", "mlp2 ×2, mlp3 ×1", "meet", "4,160"],
        ["stages.hidden2", "mlp3 ×1", "alone", "4,160"],
        ["head", "mlp2 ×2, mlp3 ×1", "meet", "650"],
    ]
    assert "mlp3 (1 client): 8,970 of 13,130 weights meet another client's" in shown.out


def test_it_counts_the_clients_of_each_model_as_they_are_dealt_at_random(potluck):
    settings = "\"federation.models=['mlp2', 'mlp3']\" federation.dealing=random federation.clients=6"
    experiment = experiment_for("fedavg", ["federation.models=['mlp2', 'mlp3']", "federation.dealing=random"])
    held = Counter(str(experiment.model_of(client)) for client in range(6))
    assert held != {"mlp2": 3, "mlp3": 3}
    shown = potluck(f"inspect federation fedavg {settings}")
    assert shown.code == 0
    for name, count in held.items():
        assert f"{name} ({count} client" in shown.out


def test_it_draws_unlike_models_that_meet_nowhere(potluck):
    shown = potluck(f"inspect federation fedavg {UNLIKE}")
    assert shown.code == 0
    assert {word for *_, word, _ in rows(shown.out)} == {"alone"}
    for model in ("cnn2", "vit", "mlp2"):
        assert f"{model} (1 client): 0 of " in shown.out
    assert shown.out.count("it shares nothing") == 3


@pytest.mark.parametrize("line", ["inspect nothing", "inspect run"])
def test_what_else_it_is_asked_for_is_refused(potluck, line):
    shown = potluck(line)
    assert shown.code == 2
    assert "unknown model" in shown.err


def test_a_run_in_which_nobody_shares_anything_is_refused_on_one_line(potluck):
    shown = potluck(f"run fedavg {UNLIKE} run.rounds=1")
    assert shown.code == 2
    assert "no client has a layer in common with another (cnn2, mlp2, vit, one client each)" in shown.err
    assert shown.err.strip().count("\n") == 0


@pytest.mark.slow
def test_check_says_of_a_method_what_a_run_would(potluck, tmp_path):
    file = tmp_path / "federation.toml"
    file.write_text('[federation]\ndataset = "digits"\nclients = 3\nmodels = ["mlp2", "mlp2", "nets.py:Own"]\n')
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n\n\ndef Own(num_classes, input_shape):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))\n"
    )
    shown = potluck(f"check {file}")
    assert shown.code == 0
    said = " ".join(shown.out.split())
    assert "fedavg: client 2 (" in said
    assert "nets.py:Own) share no layer with any other" in said
    run = potluck(f"run {file} method.name=fedavg run.rounds=1 --to {tmp_path / 'runs'}")
    assert run.code == 0
    assert "share no layer with any other" in run.err
    report = potluck(f"report {tmp_path / 'runs'} --to {tmp_path / 'report'}")
    assert report.code == 0
    for name in ("report.md", "report.html"):
        assert "share no layer with any other" in (tmp_path / "report" / name).read_text()
