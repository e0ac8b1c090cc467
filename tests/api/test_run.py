"""`potluck.run` and its result: the same run as the command line's, with plain values and with objects."""

import ast
import enum
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import potluck
from potluck import ConfigError, Examples, Federation, Observer, PotluckWarning, Site, fl, get_method
from potluck.api.given import given
from potluck.cli.run import start_run
from potluck.core.ground.errors import CheckpointError, DataError
from potluck.data.datasets import from_torch
from potluck.experiment.folder.folder import run_digest
from potluck.testing.worlds import World, quick, toy_federation

SMALL = {"federation.train_fraction": 0.15, "run.workers": 1, "method.training.epochs": 1}
NARROW = {"name": "cnn2", "width": 4}


def small(method="fedavg", settings=None, **keywords):
    given = {"clients": 2, "models": [NARROW], "rounds": 2, **keywords}
    return potluck.run(method, settings={**SMALL, **(settings or {})}, **given)


class Net(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.out = nn.Linear(64, num_classes)

    def forward(self, x):
        return self.out(x.flatten(1))


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_run__with_a_folder_is_what_the_command_line_would_have_done(here, capsys):
    ours = small("fedprox", {"method.mu": 0.2}, seed=3, to="ours")
    words = [f"{key}={value}" for key, value in SMALL.items()]
    words += ["federation.clients=2", "run.rounds=2", "run.seed=3", "method.mu=0.2"]
    start_run("fedprox", [*words, "federation.models=[{name='cnn2',width=4}]"], here / "theirs")
    (theirs,) = (here / "theirs").iterdir()
    assert ours.folder is not None
    assert {file.name for file in ours.folder.iterdir()} == {file.name for file in theirs.iterdir()}
    assert (ours.folder / "config.toml").read_bytes() == (theirs / "config.toml").read_bytes()
    assert run_digest(ours.folder) == run_digest(theirs)
    in_memory = small("fedprox", {"method.mu": 0.2}, seed=3)
    assert in_memory.rounds == ours.rounds
    assert in_memory.scores == ours.scores


@pytest.mark.slow
def test_run__a_folder_of_it_is_resumed_by_the_command_line_to_the_same_bytes(here, capsys):
    from potluck.cli.run import resume_run

    whole, part = small(to="runs", rounds=3), small(to="runs", rounds=1)
    resume_run(part.folder, None, ["run.rounds=3"])
    assert run_digest(part.folder) == run_digest(whole.folder)


def test_result__records_and_clients_are_frames_of_the_records():
    result = small()
    assert list(result.records["round"]) == [1, 2]
    assert list(result.records["personal_accuracy"]) == [r.value("personal", "accuracy") for r in result.rounds]
    assert {"personal_accuracy_worst", "bytes_up", "loss_local", "common_macro_f1"} <= set(result.records.columns)
    assert len(result.clients) == 4
    last = result.clients[result.clients["round"] == 2]
    assert last["personal_accuracy"].mean() == pytest.approx(result.evaluation.value("personal"))
    assert f"{100 * result.evaluation.value('personal'):.1f} %" in repr(result)


def test_result__model_predicts_as_the_records_say_and_export_writes_it(tmp_path):
    result = small()
    with pytest.raises(ConfigError, match="a client's number, or 'global'"):
        result.model("server")
    test = result._trained(False).federation.sites[1].test
    right = (fl.predict(result.model(1), test).argmax(1) == test.labels).double().mean()
    assert float(right) == result.scores[-1].accuracy_personal
    facts = result.export(1, tmp_path / "m.pt").facts
    assert (facts["method"], facts["dataset"], facts["run"], facts["digest"]) == ("fedavg", "digits", None, None)
    result.model("global")
    with pytest.raises(ConfigError, match="without a folder"):
        result.model(0, chosen=True)


def test_open_run__is_the_same_object_as_the_run_that_has_made_the_folder(here):
    made = small(to="runs")
    opened = potluck.open_run(made.folder)
    assert (opened.rounds, opened.scores, opened.digest, repr(opened)) == (
        made.rounds,
        made.scores,
        made.digest,
        repr(made),
    )
    assert opened.evaluation == made.evaluation
    before = {path: path.read_bytes() for path in made.folder.rglob("*") if path.is_file()}
    for whose in (0, 1, "global"):
        found, expected = opened.model(whose).state_dict(), made.model(whose).state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert {path: path.read_bytes() for path in made.folder.rglob("*") if path.is_file()} == before
    best = opened.model(0, chosen=True)
    assert type(best) is type(opened.model(0))
    assert opened.export(0, here / "m.pt").facts["run"] == made.folder.name


@pytest.mark.slow
def test_open_run__models_after_the_chosen_round_are_that_round_s(here):
    made = small(to="runs", rounds=3)
    best = json.loads((made.folder / "checkpoint" / "best.json").read_text())["round"]
    if best == 3:
        pytest.skip("the last round is the best")
    facts = made.export(0, here / "m.pt", chosen=True).facts
    assert facts["round"] == best
    again = small(to="runs", rounds=best)
    ours, theirs = made.model(0, chosen=True).state_dict(), again.model(0).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_resume__ends_as_without_the_interruption(here):
    def stop(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small("fedprox", rounds=3, to="runs", observers=stop)
    (folder,) = Path("runs").iterdir()
    heard = []
    resumed = potluck.resume(str(folder), observers=lambda record: heard.append(record.round))
    assert heard == [2, 3]
    assert resumed.folder == folder
    assert resumed.digest == small("fedprox", rounds=3, to="whole").digest
    assert [record.round for record in resumed.rounds] == [1, 2, 3]
    theirs = potluck.open_run(folder).model(0).state_dict()
    assert all(torch.equal(weight, theirs[name]) for name, weight in resumed.model(0).state_dict().items())


@pytest.mark.slow
def test_resume__goes_further_and_branches(here):
    made = small("fedprox", rounds=1, to="runs")
    longer = potluck.resume(made.folder, rounds=2, settings={"run.workers": 1})
    assert longer.digest == small("fedprox", rounds=2, to="whole").digest
    other = potluck.resume(longer.folder, rounds=3, settings={"method.mu": 0.5}, branch=True)
    assert other.folder is not None
    assert other.folder != longer.folder
    assert other.folder.parent == made.folder.parent
    assert len(other.rounds) == 3
    assert potluck.open_run(made.folder).digest == longer.digest


def test_resume__refuses_what_would_change_finished_rounds(here):
    made = small("fedprox", rounds=2, to="runs")
    with pytest.raises(ConfigError, match=r"potluck.resume\(.*\): found method.mu; .* only run.rounds .* branch=True"):
        potluck.resume(made.folder, settings={"method.mu": 0.5})
    with pytest.raises(CheckpointError, match="found 1, expected at least 2"):
        potluck.resume(made.folder, rounds=1)
    with pytest.raises(CheckpointError, match="is not a run"):
        potluck.resume(here)
    with pytest.raises(ConfigError, match="federation"):
        potluck.resume(made.folder, rounds=3, settings={"federation.clients": 5}, branch=True)


def test_resume__says_on_the_callers_line_that_code_has_changed(here):
    Path("nets.py").write_text(
        "from torch import nn\n\n\ndef small(num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))\n"
    )
    made = small(models="nets.py:small", rounds=1, to="runs")
    Path("nets.py").write_text(Path("nets.py").read_text() + "\n\nMORE = 1\n")
    with pytest.warns(PotluckWarning, match="has changed since the run was started") as warned:
        potluck.resume(made.folder, rounds=2)
    assert {warning.filename for warning in warned} == {__file__}


def test_open_run__refuses_what_is_no_run(here):
    with pytest.raises(CheckpointError, match="is not a run"):
        potluck.open_run(here)


def test_open_run__refuses_models_of_clients_on_other_machines(here):
    made = small(to="runs")
    manifest = json.loads((made.folder / "manifest.json").read_text())
    manifest["computing"]["executor"] = "flower"
    (made.folder / "manifest.json").write_text(json.dumps(manifest))
    opened = potluck.open_run(made.folder)
    assert len(opened.records) == 2
    with pytest.raises(CheckpointError, match="its clients were on other machines"):
        opened.model(0)


def test_open_run__refuses_models_if_the_data_have_changed(here):
    x, y = np.random.default_rng(0).random((40, 64), dtype=np.float32), np.arange(40) % 4
    np.savez("mine.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    made = potluck.run(
        "local", dataset="mine.npz", models="mlp2", clients=2, rounds=1, to="runs", settings={"run.workers": 1}
    )
    np.savez("mine.npz", x_train=x + 1, y_train=y, x_test=x, y_test=y)
    opened = potluck.open_run(made.folder)
    assert opened.evaluation == made.evaluation
    with pytest.raises(CheckpointError, match="data_checksum was"):
        opened.model(0)


def test_run__takes_a_method_as_an_object_with_its_hyper_parameters(here):
    prox = get_method("fedprox")(mu=0.25)
    keys = {"clients": 2, "models": [NARROW], "rounds": 1, "to": "runs"}
    ours = potluck.run(prox, settings={"federation.train_fraction": 0.15, "run.workers": 1}, **keys)
    assert 'name = "fedprox"' in (text := (ours.folder / "config.toml").read_text())
    assert "mu = 0.25" in text
    with pytest.raises(ConfigError, match=r"method\.mu: the FedProx that is given has its own"):
        potluck.run(prox, settings={"method.mu": 1.0})


@dataclass(frozen=True)
class Mine(get_method("fedavg")):
    """A method of this program."""

    share: float = 0.5


def test_run__takes_methods_models_and_arrays_of_this_program_but_not_with_a_folder(here):
    x, y = np.random.default_rng(0).random((60, 8, 8), dtype=np.float32), np.arange(60) % 3
    arrays = {"x_train": x, "y_train": y, "x_test": torch.from_numpy(x), "y_test": torch.from_numpy(y)}
    keys = {"dataset": arrays, "clients": 2, "rounds": 1, "settings": {"run.workers": 1}}
    result = potluck.run(Mine(share=0.75), models=[Net, partial(Net)], **keys)
    assert result.method == "mine"
    assert {score.architecture for score in result.scores} == {"Net", "Net()"}
    assert result.model(0).out.out_features == 3
    with pytest.raises(
        ConfigError, match=r"to: .* cannot name mine, arrays, Net of this program; .*run without a folder"
    ):
        potluck.run(Mine(), models=[Net], to="runs", **keys)
    assert not (here / "runs").exists()


def test_run__builders_get_those_arguments_that_they_name():
    seen = {}

    def by_name(input_shape, width=4):
        seen["shape"], seen["width"] = input_shape, width
        return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, 10))

    small(models=[by_name], rounds=1, settings={})
    assert seen == {"shape": (1, 8, 8), "width": 4}


def test_run__a_function_with_the_name_of_a_known_model_is_another_one():
    def cnn2():
        return Net()

    result = small("local", models=[cnn2, "cnn2"], rounds=1)
    assert {score.architecture for score in result.scores} == {"cnn2-2", "cnn2"}


def test_run__a_data_set_in_memory_may_have_the_name_of_a_known_one():
    items = [(torch.rand(64), index % 2) for index in range(40)]
    result = potluck.run(
        "local",
        dataset=from_torch(items, items, name="digits"),
        models="mlp2",
        clients=2,
        rounds=1,
        settings={"run.workers": 1},
    )
    assert result.dataset == "own digits"
    assert len(result.clients) == 2


def test_run__takes_tables_of_this_program_as_a_function_of_a_file_gives_them(here):
    draws = np.random.default_rng(0)
    rows = pd.DataFrame({"age": draws.normal(50, 10, 80), 7: draws.choice(["f", "m"], 80), "note": "ab"})
    rows["ill"] = np.where(rows["age"] > 50, "yes", "no")
    rows.to_pickle(here / "rows.pickle")
    (here / "own.py").write_text(
        "import pandas as pd\n"
        "def one():\n    return pd.read_pickle('rows.pickle')\n"
        "def two():\n    return one(), one().iloc[:9]\n"
    )
    keys = {"columns": {"target": "ill", "inputs": ["age", "7"]}, "clients": 2, "rounds": 1, "models": "mlp2"}
    keys["settings"] = {"run.workers": 1, "federation.columns.test": 0.3}
    for dataset, name in ((rows, "one"), ((rows, rows.iloc[:9]), "two")):
        found, same = (potluck.run("local", dataset=of, **keys) for of in (dataset, f"own.py:{name}"))
        assert found.scores == same.scores
        assert found.dataset == "table"
        assert [found.model(n)(torch.zeros(1, 3)).tolist() for n in (0, 1)] == [
            same.model(n)(torch.zeros(1, 3)).tolist() for n in (0, 1)
        ]
    assert list(rows.columns) == ["age", 7, "note", "ill"], "the caller's stays as it is"
    with pytest.raises(ConfigError, match=r"to: .* cannot name table of this program; .* an .npz or .csv file"):
        potluck.run("local", dataset=rows, to="runs", **keys)
    with pytest.raises(DataError, match=r"which column is to be predicted\? Name it in federation.columns.target"):
        potluck.run("local", dataset=rows, models="mlp2")


def test_run__reads_a_table_again_that_has_changed():
    rows = pd.DataFrame({"age": np.arange(40.0), "ill": np.arange(40) % 2})
    keys = {"columns": {"target": "ill"}, "clients": 2, "rounds": 1, "models": "mlp2", "settings": {"run.workers": 1}}
    before = potluck.run("local", dataset=rows, **keys).scores
    rows["age"] = rows["ill"] * 1.0
    assert potluck.run("local", dataset=rows, **keys).scores != before


def test_run__takes_a_federation_that_was_built_in_python():
    federation = toy_federation(World(clients=3))
    result = potluck.run(quick(get_method("fedavg")), federation=federation, rounds=2, settings={"run.workers": 1})
    assert (result.dataset, len(result.records), len(result.clients)) == ("own data", 2, 6)
    for keys, expected in (
        ({"clients": 3}, "federation.clients: the federation that is given has its own"),
        ({"to": "runs"}, "cannot describe a federation that was built in Python"),
    ):
        with pytest.raises(ConfigError, match=expected):
            potluck.run("fedavg", federation=federation, **keys)


def test_run__tells_observers_and_functions():
    class Clients(Observer):
        def __init__(self):
            self.seen = []

        def on_client_end(self, event):
            if event.work == "training":
                self.seen.append((event.round, event.client))

    rounds, clients = [], Clients()
    small(observers=[clients, lambda record: rounds.append(record.round)])
    assert rounds == [1, 2]
    assert sorted(clients.seen) == [(1, 0), (1, 1), (2, 0), (2, 1)]


class Word(enum.StrEnum):
    TURN = "turn"


def test_settings_of_numpys_types_and_of_enumerations_are_plain_values():
    settings = {"method.mu": np.float64(0.25), "run.lost_rounds": np.int64(3), "federation.dealing": Word.TURN}
    made = given("fedprox", {"capacities": (np.float64(0.5), np.float32(1))}, settings).values
    assert made == {
        "method.mu": 0.25, "run.lost_rounds": 3, "federation.dealing": "turn", "federation.capacities": [0.5, 1.0]
    }  # fmt: skip
    plain = [*list(made.values())[:3], *made["federation.capacities"]]
    assert [type(one) for one in plain] == [float, int, str, float, float]


REFUSED = [
    ({"method": "fedprxo"}, "unknown method 'fedprxo'; nearest: fedprox"),
    ({"clients": "3"}, "federation.clients: expected a whole number, found '3'"),
    ({"rounds": 0}, "run.rounds: expected at least 1, found 0"),
    ({"settings": {"method.muu": 1}}, "unknown key method.muu"),
    ({"settings": {"run.rounds": 2}}, "rounds: given as an argument and in settings, as run.rounds; give it once"),
    ({"settings": {"method.mu": None}}, "method.mu: .* found None; leave the key out"),
    (
        {"settings": {"method.mu": object()}},
        "settings: method.mu: expected a number, text, a list or a table, found object",
    ),
    ({"settings": {3: 1}}, "settings: found the key 3"),
    ({"settings": ["method.mu=1"]}, "settings: found list; expected values by dotted key"),
    ({"models": [NARROW] * 3}, "models: 3 models for 2 clients; expected at most one for each"),
    ({"models": []}, "federation.models: expected at least one"),
    ({"models": [Net()]}, "models: Net is a network; expected the class or a function"),
    ({"models": nn.Linear}, "models: Linear needs an argument in_features; .* functools.partial"),
    ({"models": [3]}, "models: found int; expected a name"),
    ({"models": [lambda: "net"]}, "model-0: returned str; expected a torch.nn.Module"),
    (
        {"models": [lambda: Net(7)]},
        r"model-0: returns a tensor of shape \(batch, 7\); .*: give its last layer one output a",
    ),
    ({"models": [lambda: 1 / 0]}, "model-0: cannot be built: ZeroDivisionError"),
    ({"dataset": "nosuch"}, "unknown data set 'nosuch'"),
    ({"dataset": np.zeros(3)}, "dataset: found ndarray; expected a name, a path, a Dataset"),
    ({"method": Net}, "method: expected a name, a file, a Method or its class, found Net"),
    ({"observers": Observer}, "observers: found the class Observer; make one"),
    ({"observers": ["tqdm"]}, "observers: found 'tqdm'; expected an Observer, or a function"),
]


@pytest.mark.parametrize(("keys", "expected"), REFUSED, ids=[f"{i}" for i in range(len(REFUSED))])
def test_run__refuses_in_one_line_before_anything_trains(keys, expected, here):
    given = {"clients": 2, "models": [NARROW], "rounds": 2, "to": "runs" if "models" not in keys else None, **keys}
    with pytest.raises(ConfigError, match=expected) as refused:
        potluck.run(given.pop("method", "fedprox"), **given)
    assert "\n" not in str(refused.value)
    assert not (here / "runs").exists()


X, Y = np.zeros((20, 64), np.float32), np.arange(20) % 2
ARRAYS = {"x_train": X, "y_train": Y, "x_test": X, "y_test": Y}
BAD_DATA = [
    ({"x": X}, r"dataset: no array x_train, y_train, x_test, y_test; expected .*, found x"),
    ({**ARRAYS, "y_tset": Y}, "dataset: unknown array 'y_tset'; .*nearest: y_test"),
    ({**ARRAYS, "y_train": Y + 0.5}, "dataset: y_train: expected whole-number labels, found float64"),
    ({**ARRAYS, "y_test": Y + 5}, "test part: label 6; expected labels from 0 to 1"),
    ({**ARRAYS, "y_train": Y - 1}, "training part: label -1"),
    ({**ARRAYS, "y_train": Y[:5]}, "20 inputs but 5 labels"),
    ({**ARRAYS, "x_train": [[1.0], [1.0, 2.0]]}, "dataset: x_train: .*bring all rows to one shape"),
    ({**ARRAYS, "x_train": [object()]}, "dataset: x_train: expected an array with a row an example"),
    ({**ARRAYS, "x_train": X + np.nan}, "training part: 20 of 20 inputs hold NaN"),
]


@pytest.mark.parametrize(("arrays", "expected"), BAD_DATA, ids=[f"{i}" for i in range(len(BAD_DATA))])
def test_run__refuses_arrays_that_are_no_data_set(arrays, expected):
    with pytest.raises(DataError, match=expected) as refused:
        potluck.run("local", dataset=arrays, models="mlp2", clients=2, rounds=1)
    assert "\n" not in str(refused.value)


def test_dir__lists_and_every_name_is_there():
    assert {"run", "resume", "open_run", "compare", "report", "RunResult", "get_method", "Observer"} <= set(
        dir(potluck)
    )
    assert len(potluck._HOMES) <= 20
    for name in potluck._HOMES:
        assert getattr(potluck, name) is not None


def test_every_exported_name_is_known_to_type_checkers_and_editors():
    tree = ast.parse(Path(potluck.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    known = {
        alias.asname: node.module.removeprefix("potluck.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert known == potluck._HOMES


def small_federation(**changes) -> Federation:
    inputs = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
    examples = Examples(inputs, inputs[:, :3].argmax(1))
    sites = {id: Site(id, "net", examples, examples, examples) for id in (0, 1)}
    given = {"sites": sites, "architectures": {"net": partial(nn.Linear, 8, 3)}, "server_architecture": "net"}
    return Federation(**{**given, "num_classes": 3, **changes})


class Pair(nn.Linear):
    def forward(self, input):
        return super().forward(input), input


class Lost(nn.Linear):
    def forward(self, input):
        return {"a": input}["b"]


NARROWER = Examples(torch.randn(4, 7), torch.zeros(4, dtype=torch.int64))
EIGHT = Examples(torch.randn(4, 8), torch.arange(4) % 3)
BAD_FEDERATIONS = [
    ({"sites": {0: Site(0, "b", EIGHT, EIGHT, EIGHT)}}, "client 0: architecture: found 'b'; .*: net"),
    ({"server_architecture": "nut"}, "server_architecture: found 'nut'; expected one of the federation's .*: net"),
    ({"sites": {5: Site(1, "net", EIGHT, EIGHT, EIGHT)}}, "found a site with the id 1 under 5"),
    ({"sites": {}}, "the federation has no clients"),
    ({"num_classes": "3"}, "num_classes: expected a whole number of at least 1, found '3'"),
    ({"num_classes": 5}, r"model net: returns a tensor of shape \(batch, 3\); expected logits of shape \(batch, 5\)"),
    ({"num_classes": 2}, "client 0: the targets of its training part go from 0 to 2"),
    ({"architectures": {"net": nn.Linear(8, 3)}}, "architectures: net: found Linear; expected a class or function"),
    ({"architectures": {"net": lambda: [nn.Linear(8, 3)]}}, "model net: its builder returned list"),
    ({"architectures": {"net": partial(Pair, 8, 3)}}, "model net: returns tuple; .* return the logits alone"),
    (
        {"architectures": {"net": partial(Lost, 8, 3)}},
        r"model net: cannot read inputs .*: KeyError: 'b'; .*test_run",
    ),
    ({"sites": {0: Site(0, "net", EIGHT, EIGHT, NARROWER)}}, r"shape \(batch, 7\) of client 0's test part"),
    ({"sites": {0: Site(0, "net", EIGHT, NARROWER, EIGHT)}}, r"shape \(batch, 7\) of client 0's validation part"),
    ({"test": NARROWER}, r"shape \(batch, 7\) of the common test set"),
    ({"public": NARROWER}, r"shape \(batch, 7\) of the public data"),
]


@pytest.mark.filterwarnings("ignore:num_classes is 5")
@pytest.mark.parametrize(("changes", "expected"), BAD_FEDERATIONS, ids=[f"{i}" for i in range(len(BAD_FEDERATIONS))])
def test_run__refuses_a_federation_in_one_line_before_anything_trains(changes, expected):
    rounds = []
    with pytest.raises((ConfigError, DataError), match=expected) as refused:
        potluck.run("fedavg", federation=small_federation(**changes), rounds=1, observers=rounds.append)
    assert "\n" not in str(refused.value)
    assert not rounds


def test_run__warns_of_classes_that_no_example_has():
    wide = small_federation(num_classes=5, architectures={"net": partial(nn.Linear, 8, 5)})
    with pytest.warns(PotluckWarning, match="num_classes is 5, and no example has a class above 2"):
        potluck.run("local", federation=wide, rounds=1, settings={"run.workers": 1})


def test_examples__refuse_what_is_no_tensor():
    with pytest.raises(DataError, match="inputs: found ndarray; expected a tensor"):
        Examples(np.zeros((3, 2)), torch.zeros(3))
    with pytest.raises(DataError, match="targets: found list; expected a tensor"):
        Examples(torch.zeros(3, 2), [0, 1, 2])


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ((torch.zeros(3), 1.5), r"custom: training part: item 0: found the label 1\.5; expected a whole number"),
        ((torch.zeros(3), "cat"), "found the label 'cat'; expected a whole number"),
        ((torch.zeros(3), 1, 2), r"found 3 values; expected a pair \(input, label\)"),
        ({"image": torch.zeros(3), "label": 1}, r"found dict with image, label; expected a pair \(input, label\)"),
    ],
)
def test_from_torch__refuses_items_that_are_no_pairs_of_input_and_label(item, expected):
    with pytest.raises(DataError, match=expected):
        from_torch([item], [item])


def test_from_torch__takes_labels_of_numpy_and_torch():
    items = [(torch.zeros(3), label) for label in (np.int32(0), torch.tensor(2), 1.0)]
    assert from_torch(items, items).train_targets.tolist() == [0, 2, 1]
