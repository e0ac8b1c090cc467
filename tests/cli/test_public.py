"""`potluck public`: the arrays that nodes without PyTorch need are those that networks are given."""

import json

import numpy as np
import pytest

from potluck.experiment.federation.assemble import assemble, public_digest
from potluck.experiment.settings.presets import experiment_for

HOLDOUT = "fedmd federation.dataset=digits federation.public=holdout"


def arrays(path):
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def test_it_writes_what_the_parties_have_in_common(potluck, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = potluck(f"public {HOLDOUT} --to public.npz")
    assert outcome.out == (
        "Wrote public.npz: 144 public examples and 359 examples of the common test set, prepared inputs of shape"
        " (1, 8, 8)\n"
    )
    found = arrays("public.npz")
    federation = assemble(experiment_for(None, HOLDOUT.replace("fedmd", "method.name=fedmd").split())).federation
    for name, examples in (("public", federation.public), ("common", federation.test)):
        prepared = [batch.inputs.numpy() for batch in examples.batches(100)]
        np.testing.assert_array_equal(found[f"x_{name}"], np.concatenate(prepared))
    np.testing.assert_array_equal(found["y_common"], federation.test.labels.numpy())
    assert str(found["digest"]) == public_digest(federation.public)
    (step,) = json.loads(str(found["preparation"]))
    assert step == {"step": "Normalise", "mean": [0.306], "std": [0.377], "largest": 16.0}


def test_another_seed_has_other_public_examples(potluck, tmp_path):
    for seed in (0, 1):
        potluck(f"public {HOLDOUT} run.seed={seed} --to {tmp_path}/{seed}.npz")
    one, other = (arrays(tmp_path / f"{seed}.npz") for seed in (0, 1))
    assert str(one["digest"]) != str(other["digest"])
    np.testing.assert_array_equal(one["x_common"], other["x_common"])


def test_without_public_examples_there_is_the_common_test_set(potluck, tmp_path):
    outcome = potluck(f"public fd federation.dataset=digits --to {tmp_path}/public.npz")
    assert "359 examples of the common test set, prepared" in outcome.out
    assert sorted(arrays(tmp_path / "public.npz")) == ["preparation", "x_common", "y_common"]


@pytest.mark.parametrize(
    ("to", "why"),
    [
        ("public.pt", "--to public.pt: expected a file whose name ends in .npz"),
        ("no/such.npz", "cannot write no/such.npz"),
    ],
)
def test_what_cannot_be_written_is_one_line(to, why, potluck, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = potluck(f"public {HOLDOUT} --to {to}")
    assert outcome.code == 2
    assert why in outcome.err
    assert outcome.err.count("\n") == 1


def test_inputs_with_names_are_refused(potluck, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text("from torch import nn\n\n\nclass Net(nn.Linear):\n    pass\n")
    inputs = {f"x_{part}.{name}": np.ones((12, 5), np.int64) for part in ("train", "test") for name in ("ids", "mask")}
    np.savez("named.npz", **inputs, y_train=np.arange(12) % 3, y_test=np.arange(12) % 3)
    models = "'federation.models=[\"nets.py:Net\"]'"
    outcome = potluck(f"public local federation.dataset=named.npz {models} --to public.npz")
    assert outcome.code == 2
    assert "public: the inputs of the examples of the common test set have names, ids" in outcome.err, outcome.err


def test_where_there_are_no_data_there_is_nothing_to_write(potluck, monkeypatch, tmp_path):
    monkeypatch.setenv("POTLUCK_DATA", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    outcome = potluck("public local federation.dataset=cifar10 --to public.npz")
    assert outcome.code == 2
    assert "found neither public examples nor the data set cifar10" in outcome.err, outcome.err
