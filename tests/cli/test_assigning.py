import tomllib

import pytest

from potluck.cli import main
from potluck.cli.assigning import print_assignment
from potluck.core.ground.errors import ConfigError
from potluck.experiment.settings.presets import experiment_for


def refused(capsys, monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["potluck", "plan", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("federation.toml",), "expected --budgets FILE.csv"),
        (("resnet10", "--to", "a.toml"), "expected --budgets FILE.csv"),
        (("fedavg", "--budgets", "b.csv", "--classes", "3"), "--classes is of a model"),
        (("fedavg", "--budgets", "none.csv"), "none.csv: cannot be read"),
        (("fedavg", "--budgets", "none.csv", "--to", "a.csv"), "expected a name that ends in .toml"),
        (("fedavg", "--budgets", "none.csv", "--to", "no/a.toml"), "in a folder that is there"),
    ],
)
def test_what_cannot_be_planned_is_one_line(capsys, monkeypatch, tmp_path, words, says):
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, monkeypatch, *words)
    assert says in said
    assert said.count("\n") == 1


@pytest.mark.slow
def test_a_planned_federation_is_written_with_its_budgets(tmp_path, capsys):
    """The larger net has 4 times the channels at 16 times the positions: tens of MiB more in a step."""
    table, to = tmp_path / "budgets.csv", tmp_path / "planned.toml"
    table.write_text("clients,device,memory\n1,pi-4,\n2,,30 MiB\n")
    models = "federation.models=[{name='cnn6', width=256}, 'cnn2']"
    print_assignment("local", ["federation.clients=3", models], table, to, 1)
    said = capsys.readouterr().out
    assert "client 0 (pi-4)" in said
    assert "cnn6(width=256): memory" in said
    found = experiment_for(str(to), [])
    assert [str(spec) for spec in found.models] == ["cnn6(width=256)", "cnn2", "cnn2"]
    assert [budget.memory_mib for budget in found.run.budgets] == [2048, 30]
    assert tomllib.loads(to.read_text())["run"]["budgets"][0]["device"] == "pi-4"


def test_a_table_of_too_few_is_refused_before_anything_is_measured(tmp_path):
    table = tmp_path / "budgets.csv"
    table.write_text("memory\n1 MiB\n")
    with pytest.raises(ConfigError, match=r"no budget for clients 1, 2"):
        print_assignment("fedavg", ["federation.clients=3"], table, None, 2)
