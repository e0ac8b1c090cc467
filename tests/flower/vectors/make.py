"""Writes the test vectors of the wire, each a message as values and as the bytes that Potluck sends.

    PYTHONPATH=src python tests/flower/vectors/make.py

A file has the type of the message in Flower's format, who sends it, its header as values and as text, and if it has a
payload, its entries as values and the payload's bytes in base64. A tensor is a table of dtype, shape and values in
order; all of these are exact in binary.
"""

import json
import re
from base64 import b64encode
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from potluck.core.ground.rng import Key
from potluck.core.ground.tree import pack
from potluck.core.roles import Failure
from potluck.engine.client.runtime import EvalRequest, EvalResult
from potluck.engine.client.session import Answer, Call
from potluck.flower import HELLO, JOB, REFUSAL
from potluck.flower.wire.introduction import Introduction, Network
from potluck.flower.wire.schemas import from_job, from_outcome

HERE = Path(__file__).parent
STATE = "00112233445566778899aabbccddeeff"


def tensor(dtype: torch.dtype, shape: tuple[int, ...], *values: float) -> Tensor:
    """A tensor of these values in order."""
    assert len(values) == prod(shape)
    return torch.tensor(values, dtype=dtype).reshape(shape)


def floats(shape: tuple[int, ...], *values: float) -> Tensor:
    """Of float32."""
    return tensor(torch.float32, shape, *values)


def whole(*values: int) -> Tensor:
    """Of int64, in one dimension."""
    return tensor(torch.int64, (len(values),), *values)


ROWS = whole(5, 0, 3)
ON_ROWS = floats((3, 2), 0.75, 0.25, 0.5, 0.5, 0.0, 1.0)
LOGITS = floats((3, 2), 1.5, -1.5, 0.0, 0.0, -2.25, 2.25)
MESSAGES: dict[str, dict[str, Any]] = {
    "fedmd-score": {"rows": ROWS},
    "fedmd-scored": {"logits": LOGITS},
    "fedmd-digest": {"consensus": LOGITS},
    "fedmd-digested": {},
    "dsfl-first": {"rows": ROWS},
    "dsfl-update": {"rows": ROWS, "lesson": {"rows": whole(1, 2, 4), "labels": ON_ROWS}},
    "dsfl-updated": {"predictions": ON_ROWS},
    "fd-first": {},
    "fd-update": {
        "averages": {
            "means": floats((2, 2), 0.875, 0.125, 0.0, 0.0),
            "known": tensor(torch.bool, (2,), 1, 0),
        }
    },
    "fd-updated": {"means": floats((2, 2), 0.75, 0.25, 0.125, 0.875), "labels": whole(0, 1)},
    "evaluate": {},
    "evaluated": {"own": {"confusion": tensor(torch.int64, (2, 2), 8, 1, 2, 9)}},
    "plain-values": {
        "number": 3,
        "share": 0.1,
        "yes": True,
        "text": 'naïve "quote"',
        "scalar": tensor(torch.float64, (), 0.5),
        "nothing": floats((0, 2)),
        "bytes": tensor(torch.uint8, (3,), 0, 128, 255),
        "inner": {"deep": {"half": tensor(torch.float16, (1,), 0.5)}},
    },
}
"""The entries of each message with a payload."""

METHODS: dict[str, Any] = {
    "fedmd": {"name": "fedmd", "digest_loss": "l1", "pretrain": True, "public_labels": False},
    "dsfl": {"name": "dsfl", "aggregation": "era", "temperature": 0.1, "average": "probabilities"},
    "fd": {"name": "fd", "gamma": 1.0, "exchanged": "probabilities", "averaged": "others"},
}
"""Shortened: in a run, all options are there."""

HANDLERS = {"score": "score_public", "digest": "digest_and_revisit", "first": "local_update", "update": "local_update"}


def setting(method: str) -> dict[str, Any]:
    """What a server says of a run with every message; here the tables have few keys."""
    return {
        "experiment": {"federation": {"dataset": "digits", "public": "holdout"}, "method": METHODS[method], "run": {}},
        "run": "first-1a2b3c4d",
        "code": None,
        "classes": {"count": 2, "names": ["ill", "well"]},
        "task": "classification",
        "public": "f" * 32 if method != "fd" else None,
    }


def vectors() -> dict[str, dict[str, Any]]:
    """All vectors by name."""
    found = {
        "hello": vector(HELLO, "server", {**setting("dsfl"), "client": 2}),
        "introduction": vector(HELLO, "node", forest().header()),
        "introduction-refused": vector(
            HELLO, "node", {"refusal": "ValueError: this node knows dsfl, fd, fedmd, local"}
        ),
        "told-refused": vector(REFUSAL, "server", {"run": "first-1a2b3c4d", "why": "it has inputs of shape (3,)"}),
        "failure": vector(JOB, "node", *from_outcome(Failure(2, "", "ValueError: no memory", "", kind="error"))),
    }
    for name, entries in MESSAGES.items():
        found[name] = vector(JOB, *envelope(name, entries), entries)
    return found


def envelope(name: str, entries: dict[str, Any]) -> tuple[str, dict[str, Any], bytes]:
    """Who sends the message, and its header and payload."""
    method, _, step = name.partition("-")
    payload, told = pack(entries), setting(method if method in METHODS else "dsfl")
    if name == "evaluate":
        return "server", *from_job(EvalRequest(2, payload, STATE.encode(), ("own", "validation", "common"), 1), told)
    if name == "evaluated":
        return "node", *from_outcome(EvalResult(2, STATE, payload))
    if step in HANDLERS:
        record = None if step in ("score", "first") else STATE.encode()
        call = Call(HANDLERS[step], 2, payload, record, Key((0, "client", 1, 0, 2)), 1)
        return "server", *from_job(call, told)
    return "node", *from_outcome(Answer(2, payload, STATE.encode(), (0.625,)))


def forest() -> Introduction:
    """The introduction of a client without a network."""
    return Introduction("forest", 1.0, Network({}, {}, frozenset()), 120, 0, 30, (1, 8, 8), 2, ("ill", "well"))


def vector(
    kind: str, sender: str, header: dict[str, Any], payload: bytes = b"", entries: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One vector."""
    found = {"type": kind, "from": sender, "header": header, "words": json.dumps(header)}
    if entries is None:
        return found
    return {**found, "entries": values(entries), "payload": b64encode(payload).decode("ascii")}


def values(node: Any) -> Any:
    """Entries with tables in place of tensors."""
    if isinstance(node, Tensor):
        dtype = str(node.dtype).removeprefix("torch.")
        return {"dtype": dtype, "shape": list(node.shape), "values": node.flatten().tolist()}
    return {name: values(child) for name, child in node.items()} if isinstance(node, dict) else node


def written(one: dict[str, Any]) -> str:
    """A vector as JSON to read, with short lists on one line."""
    lists = re.compile(r"\[\n\s+([^\[\]{}]*?)\n\s+\]")
    return lists.sub(lambda of: f"[{' '.join(of[1].split())}]", json.dumps(one, indent=1)) + "\n"


if __name__ == "__main__":
    for name, one in vectors().items():
        (HERE / f"{name}.json").write_text(written(one))
