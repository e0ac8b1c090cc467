"""Parts of the user's own by FILE.py:NAME: one form, one set of messages, copied into the run's folder."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from potluck.core.ground.errors import ConfigError, DataError, PotluckError
from potluck.core.ground.rng import Key
from potluck.core.tasks.metric import Metric
from potluck.core.tasks.named import CLASSIFICATION, TASKS
from potluck.core.tasks.own_metrics import own_metric, with_metrics
from potluck.core.tasks.task import added
from potluck.data.datasets import describe, load
from potluck.data.partition import get_partition
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.federation.parts import part_of
from potluck.experiment.folder.code import as_started, keep_code
from potluck.experiment.settings.presets import experiment_for
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.tables import read_experiment
from potluck.methods import get_method
from potluck.models import get_model

PARTS = '''
import numpy as np, torch
from torch import nn
from potluck.core.tasks.metric import metric
from potluck.methods.fedavg import FedAvg

def data():
    x = np.arange(240, dtype=np.float32).reshape(60, 4) / 240
    y = np.arange(60) % 3
    return {"x_train": x[:40], "y_train": y[:40], "x_test": x[40:], "y_test": y[40:]}

def rows(targets, clients, key, *, first: int = 2):
    """Args:
        first: examples of the first client.
    """
    return [torch.arange(first), *torch.arange(first, len(targets)).tensor_split(clients - 1)]

def net(num_classes, input_shape):
    return nn.Linear(input_shape[0], num_classes)

@metric("spread", higher_is_better=False)
def spread(outputs, targets):
    return outputs.amax(1) - outputs.amin(1)

class Mine(FedAvg):
    """Another name."""
'''
NAMED = {
    "federation": {
        "dataset": "parts.py:data",
        "clients": 3,
        "partition": {"name": "parts.py:rows", "first": 5},
        "models": ["parts.py:net"],
        "metrics": ["parts.py:spread"],
    },
    "method": {"name": "parts.py:Mine"},
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts.py").write_text(PARTS)
    return tmp_path


def test_own_parts__make_a_federation(here):
    experiment = resolve(NAMED)
    made = assemble(experiment)
    assert [len(site.train) + len(site.validation) for site in made.federation.sites.values()] == [5, 18, 17]
    assert type(experiment.method).__name__ == "Mine"
    assert [metric.name for metric in made.federation.task.metrics][-1] == "spread"
    assert experiment.files == ("parts.py",)
    assert resolve(experiment.tree()).experiment_id == experiment.experiment_id


def test_own_parts__are_accepted_on_the_command_line(here):
    given = (
        "federation.dataset=parts.py:data federation.clients=3 federation.partition=parts.py:rows"
        " federation.partition.first=5 federation.models=parts.py:net federation.metrics=parts.py:spread"
    )
    assert experiment_for("parts.py:Mine", given.split()).tree() == resolve(NAMED).tree()


def test_own_parts__are_found_beside_the_toml_file_first(here, tmp_path, monkeypatch):
    import tomli_w

    (here / "sub").mkdir()
    (here / "sub" / "parts.py").write_text(PARTS.replace("range(240", "range(240"))
    (here / "sub" / "mine.toml").write_text(tomli_w.dumps(NAMED))
    (here / "parts.py").unlink()
    assert resolve(read_experiment(Path("sub/mine.toml"))).files == (os.path.join("sub", "parts.py"),)
    (here / "parts.py").write_text(PARTS)
    (here / "sub" / "parts.py").unlink()
    assert resolve(read_experiment(Path("sub/mine.toml"))).files == ("parts.py",)


def test_own_parts__resume_with_the_copies_of_their_file(here):
    folder = here / "run"
    folder.mkdir()
    code = keep_code(folder, resolve(NAMED))
    assert [file["file"] for file in code] == ["parts.py"]
    before = assemble(resolve(NAMED))
    (here / "parts.py").write_text(PARTS.replace("% 3", "% 2").replace("torch.arange(first)", "torch.arange(1)"))
    with as_started(folder, json.loads(json.dumps({"code": code, "started_in": str(here)}))) as notes:
        again = assemble(resolve(NAMED))
    assert "has changed since the run was started" in notes[0]
    assert (again.data_checksum, again.partition_fingerprint) == (before.data_checksum, before.partition_fingerprint)
    assert load("parts.py:data").num_classes == 2  # outside, the file counts


def test_own_parts__find_what_lies_beside_their_file_also_from_a_copy(here):
    (here / "numbers.npy").write_bytes(b"")
    np.save(here / "numbers.npy", np.ones((4, 2), dtype=np.float32))
    (here / "parts.py").write_text(
        "from pathlib import Path\nimport numpy as np\ndef data():\n"
        "    x = np.load(Path(__file__).parent / 'numbers.npy')\n    y = np.array([0, 1, 0, 1])\n"
        "    return {'x_train': x, 'y_train': y, 'x_test': x, 'y_test': y}\n"
    )
    folder = here / "run"
    code = keep_code(folder, resolve({"federation": {"dataset": "parts.py:data", "models": ["mlp2"]}}))
    with as_started(folder, {"code": code, "started_in": str(here)}):
        assert describe("parts.py:data").num_classes == 2


GETTERS = {
    "method": get_method,
    "model": get_model,
    "partition": get_partition,
    "data set": load,
    "metric": own_metric,
}


@pytest.mark.parametrize("kind", GETTERS)
def test_own_parts__are_missed_in_the_same_words(kind, here):
    with pytest.raises(ConfigError, match=r"none\.py: no such file; expected a Python file"):
        GETTERS[kind]("none.py:thing")
    with pytest.raises(ConfigError, match=r"parts\.py has no 'thing' that fits; expected .*; it has "):
        GETTERS[kind]("parts.py:thing")
    (here / "broken.py").write_text("import nothing_of_this_name")
    with pytest.raises(ConfigError, match=r"broken\.py: cannot be imported: ModuleNotFoundError.*broken\.py, line 1"):
        GETTERS[kind]("broken.py:thing")


FAILING = {
    "data": {"dataset": "parts.py:data"},
    "rows": {"partition": "parts.py:rows"},
    "net": {"models": ["parts.py:net"]},
    "spread": {"metrics": ["parts.py:spread"]},
}


@pytest.mark.parametrize("name", FAILING)
def test_own_parts__name_the_file_and_line_of_an_error_once(name, here):
    (here / "parts.py").write_text(f"def {name}(*given):\n    return 1 / 0\n")

    def measure():
        assemble(resolve({"federation": FAILING[name]})).federation.task.zeros(10)

    with pytest.raises(PotluckError, match="ZeroDivisionError") as caught:
        measure()
    assert str(caught.value).count(f"{here / 'parts.py'}, line 2") == 1


@pytest.mark.parametrize("name", ["Mine", "data", "rows", "net", "spread"])
def test_kind_of__goes_by_what_a_part_takes(name, here):
    kinds = {"Mine": "method", "data": "data set", "rows": "partition", "net": "model", "spread": "metric"}
    assert part_of(f"parts.py:{name}")[1] == kinds[name]


def test_kind_of__refuses_what_is_no_part(here):
    (here / "odd.py").write_text("def odd(a, b, c, d):\n    return 1\n")
    with pytest.raises(ConfigError, match=r"odd\.py:odd takes \(a, b, c, d\); expected a class"):
        part_of("odd.py:odd")


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ("[]", "returned 0 parts for 3 clients"),
        ("[[0, 1], [2], []]", "client 2 has no examples|expected row numbers"),
        ("[[0], [1], [9]]", "client 2 has row 9; expected rows from 0 to 5"),
        ("[[0], [1], [0]]", "row 0 is given 2 times"),
        ("[[0.5], [1.0], [2.0]]", "expected row numbers"),
        ("7", "expected a list of row numbers"),
    ],
)
def test_partition__checks_what_comes_back(returned, problem, here):
    (here / "cut.py").write_text(f"def cut(targets, clients, key):\n    return {returned}\n")
    with pytest.raises(DataError, match=rf"cut\.py:cut: .*({problem})"):
        get_partition("cut.py:cut")()(torch.arange(6), 3, Key((0,)))


def test_partition__refuses_an_option_that_the_function_has_not(here):
    with pytest.raises(ConfigError, match=r"unknown key federation\.partition\.frist; nearest: federation\.partition"):
        resolve({"federation": {"partition": {"name": "parts.py:rows", "frist": 1}}})


def test_data__says_what_a_function_should_return(here):
    (here / "less.py").write_text("def less():\n    return {'x_train': [1]}\n")
    with pytest.raises(DataError, match=r"less\.py:less: no array y_train, x_test, y_test; expected a dict"):
        load("less.py:less")


def test_data__may_be_a_dataset_or_two_torch_data_sets(here):
    (here / "two.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\ndef two():\n"
        "    part = TensorDataset(torch.ones(6, 3), torch.arange(6) % 2)\n    return part, part\n"
    )
    assert load("two.py:two").train_inputs.shape == (6, 3)


@pytest.mark.parametrize("name", TASKS)
def test_metric__is_measured_beside_those_of_any_task(name, here):
    (here / "m.py").write_text("def largest(outputs, targets):\n    return outputs.flatten(1).amax(1)\n")
    task = with_metrics(TASKS[name], ["m.py:largest"])
    assert isinstance(task, type(TASKS[name]))
    assert task.metrics == (*TASKS[name].metrics, Metric("largest", "largest"))
    width = 1 if name == "binary" else 3
    shape = (4, 2, width) if task.by_position else (4, width)
    outputs = torch.arange(4 * shape[-1] * (2 if task.by_position else 1)).float().reshape(shape)
    targets = torch.zeros({"multilabel": (4, 3), "regression": (4, 3)}.get(name, shape[:-1]), dtype=task.dtypes[0])
    whole = task.sums(outputs, targets)
    halves = added(task.sums(outputs[:2], targets[:2]), task.sums(outputs[2:], targets[2:]))
    assert {key: (value.shape, value.dtype) for key, value in task.zeros(width).items()} == {
        key: (value.shape, value.dtype) for key, value in whole.items()
    }
    assert task.values(halves)["largest"] == pytest.approx(float(outputs.flatten(1).amax(1).mean()))
    assert task.impossible(whole, 4, 2 if task.by_position else 1) is None
    assert task.values(whole)[task.primary.name] == TASKS[name].values(whole)[task.primary.name]


def test_metric__leaves_out_nan_and_is_none_without_values(here):
    (here / "m.py").write_text("def first(outputs, targets):\n    return outputs[:, 0]\n")
    metric = own_metric("m.py:first")
    outputs = torch.tensor([[1.0], [torch.nan], [3.0]])
    assert metric.value(metric.sums(outputs, torch.zeros(3))) == 2
    assert metric.value(metric.sums(outputs[1:2], torch.zeros(1))) is None
    assert metric.sums(outputs * torch.inf, torch.zeros(3))["own_first_total"].isfinite()


def test_metric__of_a_class_is_no_mean(here):
    (here / "m.py").write_text(
        "class Ratio:\n    def sums(self, outputs, targets):\n"
        "        return {'up': outputs.clamp(min=0).sum(), 'down': outputs.clamp(max=0).sum()}\n"
        "    def value(self, sums):\n        return float(sums['up'] / -sums['down']) if sums['down'] else None\n"
    )
    task = with_metrics(CLASSIFICATION, ["m.py:Ratio"])
    assert task.values(task.sums(torch.tensor([[3.0, -1.0]]), torch.tensor([0])))["Ratio"] == 3
    assert task.values(task.zeros(2))["Ratio"] is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def accuracy(outputs, targets):\n    return targets\n", "two metrics are called 'accuracy'"),
        ("def accuracy(outputs, targets):\n    return targets.sum()\n", "two metrics are called"),
        ("class accuracy:\n    def sums(self):\n        pass\n", "no method 'value'"),
    ],
)
def test_metric__is_refused_with_a_reason(text, problem, here):
    (here / "m.py").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        with_metrics(CLASSIFICATION, ["m.py:accuracy"])


def test_metric__must_have_a_value_for_each_example(here):
    (here / "m.py").write_text("def total(outputs, targets):\n    return outputs.sum()\n")
    with pytest.raises(ConfigError, match=r"m\.py:total: returned a tensor of shape \(\) for 1 examples"):
        with_metrics(CLASSIFICATION, ["m.py:total"]).zeros(3)
