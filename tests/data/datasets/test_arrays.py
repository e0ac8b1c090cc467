"""Inputs with names, and owners, from files, functions and memory."""

import numpy as np
import pytest
import torch

import potluck
from potluck.core.ground.errors import DataError
from potluck.core.ground.inputs import Form
from potluck.data.dataset import Dataset
from potluck.data.datasets import ArraySource, describe, load

DRAWS = np.random.default_rng(0)
LABELS = np.arange(12) % 3


def parts(count=12):
    return {
        "image": DRAWS.integers(0, 256, (count, 6, 6), dtype=np.uint8),
        "ids": DRAWS.integers(0, 9, (count, 4), dtype=np.int32),
        "age": DRAWS.normal(50, 10, count),
        "smokes": np.arange(count) % 2 == 0,
    }


TRAIN, TEST = parts(), parts()
WHOLE = {"x_train": TRAIN, "y_train": LABELS, "x_test": TEST, "y_test": LABELS}
SHAPE = {
    "image": Form((1, 6, 6), torch.float32),
    "ids": Form((4,), torch.int64),
    "age": Form((1,), torch.float32),
    "smokes": Form((1,), torch.bool),
}


def flat(**more):
    inputs = {f"x_{part}.{name}": x for part, of in (("train", TRAIN), ("test", TEST)) for name, x in of.items()}
    return {**inputs, "y_train": LABELS, "y_test": LABELS, **more}


def check(found):
    assert found.input_shape == SHAPE
    inputs = found.train.batch(torch.tensor([3])).inputs
    np.testing.assert_allclose(inputs["image"][0, 0], TRAIN["image"][3] / 255, rtol=1e-6)
    assert inputs["ids"].tolist() == [TRAIN["ids"][3].tolist()]
    assert float(inputs["age"]) == pytest.approx(TRAIN["age"][3])


def test_a_file_names_its_inputs_behind_a_point(tmp_path):
    np.savez(tmp_path / "named.npz", **flat())
    check(load(tmp_path / "named.npz"))
    assert describe(tmp_path / "named.npz").input_shape == SHAPE, "without reading the inputs"


def test_in_memory_and_from_a_function_they_are_a_mapping(tmp_path):
    one = ArraySource(WHOLE, "mine").load("none")
    check(one)
    np.savez(tmp_path / "named.npz", **flat())
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n\n\ndef data():\n"
        f"    with np.load({str(tmp_path / 'named.npz')!r}) as file:\n"
        "        found = dict(file)\n"
        "    named = {part: {k.split('.')[1]: x for k, x in found.items() if k.startswith(part)}"
        " for part in ('x_train', 'x_test')}\n"
        "    return {**named, 'y_train': found['y_train'], 'y_test': found['y_test']}\n"
    )
    other = load(f"{tmp_path / 'mine.py'}:data")
    check(other)
    assert one.checksum == other.checksum


def test_the_checksum_of_data_depends_on_names():
    renamed = {**WHOLE, "x_train": {**TRAIN}, "x_test": {**TEST}}
    for part in ("x_train", "x_test"):
        renamed[part]["years"] = renamed[part].pop("age")
    first, second = (ArraySource(arrays, "mine").load("none").checksum for arrays in (WHOLE, renamed))
    assert first != second


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"x_test": {**TEST, "more": TEST["age"]}}, "training inputs are called 'image', .* but test inputs 'image', "),
        ({"x_train": {**TRAIN, "ids": TRAIN["ids"][:5]}}, r"training part: 5 inputs 'ids' and 12 of another name"),
        ({"x_test": {**TEST, "ids": TEST["ids"][:, :2]}}, r"training inputs 'ids' have shape \(4,\) but test inputs"),
        ({"x_train": {**TRAIN, "age": np.full(12, np.nan)}}, r"'age': 12 of 12 inputs hold NaN or infinity"),
        ({"x_train": {}}, "no array x_train; expected"),
        ({"owner_train": LABELS}, "found one of owner_train and owner_test; give both or neither"),
        ({"owner_train": LABELS, "owner_test": LABELS[:3]}, r"test part: owners of shape \(3,\)"),
        ({"y_trian": LABELS}, "unknown array 'y_trian'.*nearest: y_train"),
    ],
)
def test_what_does_not_fit_together_is_said_by_name(change, expected):
    with pytest.raises(DataError, match=expected):
        ArraySource({**WHOLE, **change}, "mine").load("none")


def test_whole_numbers_without_a_name_could_be_anything():
    tokens = np.ones((12, 4), dtype=np.int64)
    with pytest.raises(DataError, match=r"found int64; convert them or, if they are tokens, name them: {'ids': ...}"):
        ArraySource({"x_train": tokens, "y_train": LABELS, "x_test": tokens, "y_test": LABELS}, "mine").load("none")


def owned(owners):
    x = DRAWS.normal(size=(60, 5)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    return {
        "x_train": x,
        "y_train": y,
        "x_test": x,
        "y_test": y,
        **({"owner_train": owners, "owner_test": owners} if owners is not None else {}),
    }


def test_a_natural_federation_has_a_client_for_each_owner_who_is_tested_on_its_own():
    owners = np.repeat([7, 1, 4], [30, 20, 10])
    result = potluck.run(
        "local", dataset=owned(owners), clients=3, partition="natural", models="mlp2", rounds=1, progress=False
    )
    clients = result.clients
    assert dict(zip(clients.client, clients.examples_train, strict=True)) == {0: 18, 1: 9, 2: 27}
    assert list(clients.examples_test) == [20, 10, 30]


def test_a_natural_federation_of_data_without_owners_is_refused_with_what_to_do():
    with pytest.raises(
        DataError, match=r"natural divides by owner, and .* does not say whose its examples are; name a"
    ):
        potluck.run("local", dataset=owned(None), clients=3, partition="natural", models="mlp2", rounds=1)


def test_a_data_set_says_whose_its_examples_are():
    x, y = torch.randn(4, 2), torch.tensor([0, 1, 0, 1])
    with pytest.raises(DataError, match="training part: owners of shape"):
        Dataset("mine", x, y, x, y, 2, owners=(torch.tensor([0, 1, 2, -1]), y))
