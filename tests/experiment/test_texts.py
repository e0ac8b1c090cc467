"""Runs on texts: a run keeps the tokenizer that it began with."""

import sys
from types import ModuleType

import pandas as pd
import pytest

import potluck
from potluck.core.ground.errors import CheckpointError, PotluckWarning
from potluck.data.tables.tokenizer import learned

pytest.importorskip("tokenizers", reason="the extra 'text' is not installed")

NETS = """
from torch import nn


class Bag(nn.Module):
    def __init__(self, num_classes, vocab_size):
        super().__init__()
        self.embed, self.out = nn.Embedding(vocab_size, 4), nn.Linear(4, num_classes)

    def forward(self, input_ids):
        return self.out(self.embed(input_ids).mean(1).relu())
"""
NOTES = ["cough and fever", "fine and calm", "fever", "calm"] * 10


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs rounds on texts, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "tokenizer.json").write_text(learned(NOTES, 270))
    pd.DataFrame({"note": NOTES, "y": [1, 0, 1, 0] * 10}).to_csv("notes.csv", index=False)
    columns = {"target": "y", "text": ["note"], "tokens": 4, "tokenizer": "tokenizer.json"}

    def run(rounds, models="nets.py:Bag"):
        return potluck.run(
            "fedavg",
            dataset="notes.csv",
            models=models,
            clients=2,
            rounds=rounds,
            settings={"federation.columns": columns, "run.executor": "sequential"},
            to=f"runs{rounds}",
            progress=False,
        )

    return run


def test_a_run_goes_on_with_the_tokenizer_that_it_began_with(run, tmp_path):
    whole, stopped = run(2), run(1)
    (tmp_path / "tokenizer.json").write_text(learned(["something else"], 270))
    with pytest.warns(PotluckWarning, match=r"tokenizer.json has changed since the run was started; .*its copy"):
        resumed = potluck.resume(stopped.folder, rounds=2, progress=False)
    assert resumed.digest == whole.digest


def test_a_tokenizer_that_a_toml_file_names_may_lie_beside_it(run, tmp_path, monkeypatch):
    whole = run(1)
    (tmp_path / "elsewhere").mkdir()
    config = (whole.folder / "config.toml").read_text()
    assert 'tokenizer = "tokenizer.json"' in config
    (tmp_path / "same.toml").write_text(config)
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = potluck.run("../same.toml", progress=False)
    assert {score.architecture for score in found.scores} == {"../nets.py:Bag(vocab_size=270)"}


def test_a_run_keeps_no_code_that_lies_beside_a_tokenizer(run, tmp_path, monkeypatch):
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets.py").rename(tmp_path / "nets" / "nets.py")
    helper = ModuleType("helper")
    helper.__file__ = str(tmp_path / "helper.py")
    monkeypatch.setitem(sys.modules, "helper", helper)
    made = run(1, models="nets/nets.py:Bag")
    assert sorted(path.name for path in (made.folder / "code").iterdir()) == ["nets.py", "tokenizer.json"]


def test_a_branch_with_another_tokenizer_is_refused(run, tmp_path):
    stopped = run(1)
    (tmp_path / "tokenizer.json").write_text(learned(["something else"], 270))
    with pytest.raises(CheckpointError, match=r"data_checksum was \w+ and now is \w+; the data or their division has"):
        potluck.resume(stopped.folder, rounds=2, branch=True, progress=False)
