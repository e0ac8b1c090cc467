"""The wire's test vectors: what Potluck and the reference node without PyTorch read and write, byte for byte."""

import importlib.util
import json
import sys
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest
import torch

from potluck.core.ground.tree import pack, unpack
from potluck.flower.wire.envelope import VERSION, unwrap, wrap
from potluck.flower.wire.introduction import Introduction
from potluck.flower.wire.schemas import from_job, from_outcome, to_job, to_outcome

VECTORS = Path(__file__).parents[1] / "vectors"
ROOT = Path(__file__).parents[3]
NAMES = sorted(path.stem for path in VECTORS.glob("*.json"))


def loaded(name, place):
    """A module from a file that is in no package."""
    spec = importlib.util.spec_from_file_location(name, place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def node():
    return loaded("reference_node", ROOT / "examples/foreign/node.py")


@pytest.fixture(params=NAMES)
def vector(request):
    return json.loads((VECTORS / f"{request.param}.json").read_text())


def entries(node, array):
    """A vector's entries with tensors made by `array` of their dtype, shape and values."""
    if not isinstance(node, dict):
        return node
    if node.keys() == {"dtype", "shape", "values"}:
        return array(node["dtype"], node["shape"], node["values"])
    return {name: entries(child, array) for name, child in node.items()}


def of_torch(dtype, shape, values):
    return torch.tensor(values, dtype=getattr(torch, dtype)).reshape(shape)


def of_numpy(dtype, shape, values):
    return np.array(values, dtype=dtype).reshape(shape)


def same(found, expected):
    """Whether two trees are equal, in the types of their leaves too."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[name], expected[name]) for name in expected)
    if hasattr(expected, "shape"):
        alike = (found.dtype, tuple(found.shape)) == (expected.dtype, tuple(expected.shape))
        return alike and bool((found == expected).all())
    return type(found) is type(expected) and found == expected


def test_the_vectors_are_those_that_their_script_writes():
    make = loaded("make_vectors", VECTORS / "make.py")
    assert {name: (VECTORS / f"{name}.json").read_text() for name in NAMES} == {
        name: make.written(one) for name, one in make.vectors().items()
    }


def test_potluck_reads_and_writes_these_bytes(vector):
    payload = b64decode(vector.get("payload", ""))
    records = wrap(vector["header"], payload)
    assert dict(records["potluck"]) == {"version": VERSION, "words": vector["words"]}
    assert unwrap(records) == (vector["header"], payload)
    if payload:
        values = entries(vector["entries"], of_torch)
        assert pack(values) == payload
        assert same(unpack(payload), values)


def test_the_reference_node_reads_and_writes_these_bytes(vector, node):
    payload = b64decode(vector.get("payload", ""))
    records = node.wrap(vector["header"], payload)
    assert dict(records["potluck"]) == {"version": VERSION, "words": vector["words"]}
    assert node.unwrap(records) == (vector["header"], payload)
    assert records.object_id == wrap(vector["header"], payload).object_id, "what Flower makes of it"
    if payload:
        values = entries(vector["entries"], of_numpy)
        assert node.pack(values) == payload
        assert same(node.unpack(payload), values)


def test_headers_are_those_of_jobs_outcomes_and_introductions(vector):
    header, payload = vector["header"], b64decode(vector.get("payload", ""))
    if vector["type"] == "query.refusal" or "refusal" in header:
        return
    if vector["type"] == "query.hello":
        assert vector["from"] == "server" or Introduction.read(header).header() == header
    elif vector["from"] == "server":
        job = to_job((header, payload))
        assert from_job(job, {name: header[name] for name in SETTING}) == (header, payload)
    else:
        assert from_outcome(to_outcome((header, payload))) == (header, payload)


SETTING = ("experiment", "run", "code", "classes", "task", "public")


def test_a_reader_without_any_library_finds_the_tensors():
    """As the page on the wire describes the payload: eight bytes, a JSON text, numbers one after the other."""
    vector = json.loads((VECTORS / "dsfl-updated.json").read_text())
    payload = b64decode(vector["payload"])
    length = int.from_bytes(payload[:8], "little")
    head = json.loads(payload[8 : 8 + length])
    assert json.loads(head["__metadata__"]["potluck"]) == {"dict": [["predictions", {"tensor": 0}]]}
    begin, end = head["0"]["data_offsets"]
    assert (8 + length) % 8 == 0
    numbers = memoryview(payload[8 + length + begin : 8 + length + end]).cast("f")
    assert (sys.byteorder, numbers.tolist()) == ("little", vector["entries"]["predictions"]["values"])
