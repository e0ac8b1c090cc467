"""Groups of test examples by a column, and clients by their names, beside what pandas finds by itself."""

import numpy as np
import pandas as pd
import pytest
import torch

import potluck
from potluck.analysis.findings_tables import tables_of
from potluck.core.ground.errors import ConfigError, DataError

INPUTS = ["a", "b", "c"]
NATURAL = {
    "run.workers": 1,
    "method.training.epochs": 1,
    "federation.partition": "natural",
    "federation.validation_fraction": 0.0,
    "federation.columns": {"target": "outcome", "by": "hospital", "inputs": INPUTS},
}


def drawn(count, seed):
    draws = np.random.default_rng(seed)
    rows = pd.DataFrame(draws.normal(size=(count, 3)), columns=INPUTS)
    rows["hospital"] = draws.choice(["south", "north"], count)
    rows["sex"] = draws.choice(["f", "m"], count)
    rows["age"] = range(count)
    rows["outcome"] = np.where(rows.a * np.where(rows.sex == "f", 1, -1) + rows.b > 0, "ill", "well")
    return rows


@pytest.fixture
def hospitals(tmp_path, monkeypatch):
    """A folder with rows for training and for tests, and what runs a method on it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "heart").mkdir()
    train, test = drawn(120, 0), drawn(80, 1)
    train.to_csv("heart/train.csv", index=False)
    test.to_csv("heart/test.csv", index=False)

    def run(method, **keywords):
        given = {"dataset": "heart", "clients": 2, "models": ["mlp4"], "rounds": 1, "settings": NATURAL, "to": "runs"}
        return potluck.run(method, **{**given, **keywords})

    return run, train, test


def right(result, train, test):
    """Of each test row whether its hospital's model is right."""
    inputs = (test[INPUTS] - train[INPUTS].mean()) / train[INPUTS].std(ddof=0)
    found = pd.Series(False, index=test.index)
    for client, name in enumerate(["north", "south"]):
        mine = test.hospital == name
        with torch.no_grad():
            outputs = result.model(client)(torch.tensor(inputs[mine].to_numpy(np.float32)))
        found[mine] = np.array(["ill", "well"])[outputs.argmax(1).numpy()] == test.outcome[mine]
    return found


@pytest.mark.slow
def test_by__finds_what_each_group_and_each_client_gains_in_each_class(hospitals):
    run, train, test = hospitals
    local, fedavg = run("local"), run("fedavg")
    found = fedavg.analyse(local, by="sex", examples=20)
    ours, alone = right(fedavg, train, test), right(local, train, test)
    table = found.frames["groups"].set_index("group")
    for sex in ("f", "m"):
        rows = test.sex == sex
        row = table.loc[f"sex = {sex}"]
        assert (row.examples, row.alone, row.value) == (rows.sum(), alone[rows].mean(), ours[rows].mean())
        assert row.gain == pytest.approx(ours[rows].mean() - alone[rows].mean())
    sure = found.frames["calibration"].query("kind == 'group' and experiment == 'local'").set_index("whose")
    assert sure.loc["sex = f", "accuracy"] == alone[test.sex == "f"].mean()
    classes = found.frames["client_classes"].set_index(["name", "label"])
    rows = (test.hospital == "south") & (test.outcome == "well")
    assert classes.loc[("south", 1), "examples"] == rows.sum()
    assert classes.loc[("south", 1), "gain"] == pytest.approx(ours[rows].mean() - alone[rows].mean())


@pytest.mark.slow
def test_clients_have_the_names_of_the_owners_of_their_examples(hospitals, tmp_path):
    run, _, _ = hospitals
    local, fedavg = run("local"), run("fedavg")
    found = fedavg.analyse(local, examples=20)
    assert set(found.frames["clients"].name) == {"north", "south"}
    assert list(found.frames["calibration"].query("kind == 'client'").whose) == ["north", "south"] * 2
    page = found.write("out").read_text(encoding="utf-8")
    assert ">north<" in page
    assert ">well<" in page
    assert "client 0" not in page
    assert tables_of(found.findings)["client_classes"][0]["name"] == "north"


def test_clients_with_data_of_their_own_have_the_names_of_the_files(hospitals, tmp_path):
    run, train, _ = hospitals
    for name in ("west", "harbour"):
        train[train.hospital == "north"].to_csv(f"{name}.csv", index=False)
    settings = {"run.workers": 1, "federation.data": ["west.csv", "harbour.csv"], "method.training.epochs": 1}
    settings["federation.columns"] = {"target": "outcome", "inputs": INPUTS}
    found = run("local", settings=settings).analyse(by="sex", examples=20)
    table = found.frames["calibration"]
    assert list(table.query("kind == 'client'").whose) == ["west", "harbour"]
    assert table.query("kind == 'group'").examples.sum() == table.query("kind == 'all'").examples.sum()


@pytest.mark.parametrize(
    ("by", "kind", "expected"),
    [
        ("sexx", DataError, "heart: no column 'sexx'; found a, b, c, hospital, sex"),
        ("age", ConfigError, "heart: age: found 80 different values, such as '0'; expected at most 20 groups"),
    ],
)
def test_by__refuses_in_one_line(hospitals, by, kind, expected):
    run, _, _ = hospitals
    with pytest.raises(kind, match=expected):
        run("local").analyse(by=by)


def test_by__needs_a_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"federation.train_fraction": 0.1, "run.workers": 1, "method.training.epochs": 1}
    local = potluck.run("local", clients=2, models=["mlp4"], rounds=1, settings=settings, to="runs")
    with pytest.raises(DataError, match="digits: no column 'sex', since it is no table"):
        local.analyse(by="sex")
