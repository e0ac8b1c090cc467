"""Whether mutated bytes and words come out of Potluck's decoders as anything but a message or a WireError.

    python benchmarks/fuzz.py [--inputs 160000] [--seed 0] [--keep FOLDER]

Every input begins as something that Potluck wrote, or as a file of the corpus (tests/flower/corpus), and is changed in
one to four places: bits, lengths, brackets, whole parts; in words any value by one of those that other programs have
stumbled over. It counts as refused if `WireError` comes out, as accepted if what comes out can also be used: measured,
written again, compared. Anything else is a failure, is shown, and with --keep saved as a file. Takes some ten minutes;
the tests do the same with fewer inputs. Needs the extra `flower`.
"""

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from potluck.core.ground.errors import WireError
from potluck.core.ground.rng import fold_in
from potluck.core.ground.tree import pack, unpack
from potluck.core.message import Message
from potluck.core.roles import Failure
from potluck.engine.client.runtime import EvalRequest, EvalResult
from potluck.engine.client.session import Answer, Call
from potluck.flower.wire.envelope import VERSION, read_header, unwrap
from potluck.flower.wire.introduction import Introduction, Network
from potluck.flower.wire.schemas import from_job, from_outcome, to_job, to_outcome

CORPUS = Path(__file__).parents[1] / "tests" / "flower" / "corpus"
LONGEST = 5.0
"""Seconds of the processor that an input of a few thousand bytes may take."""

NUMBERS: list[Any] = [
    *(0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308, math.inf, -math.inf, math.nan, True, False),
]
TEXTS = [
    *(
        "",
        "x",
        "1",
        "nan",
        "many",
        "\ud800",
        "\udfff\ud800",
        "\x1b[2J",
        "\x00",
        "a\nb",
        "../../x",
        "nets.py:main",
        "x" * 5000,
    ),
]
SHAPES: list[Any] = [
    *(None, [], {}, [[]], [None], {"": None}, [0] * 300),
    *({"value": {"value": 1}}, {"tensor": 0}, {"tensor": -1}, {"dict": [[[], 1]]}),
]
VALUES = [*NUMBERS, *TEXTS, *SHAPES]
LENGTHS = [0, 1, 2**16, 2**26, 2**40, 2**63]
BYTES = [
    *(b"", b"\x00", b"\xff" * 8, b"\xed\xa0\x80", b"1e999", b"-1", b"NaN", b"Infinity"),
    *(b"[" * 4000, b'{"list":[' * 400),
]
NAMES = ["", "\ud800", "tensor", "failure", "answer", "__metadata__", "x" * 300]


def whole_messages() -> list[bytes]:
    """Encoded messages as methods send them."""
    state = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2)).state_dict()
    return [
        Message().encode(),
        Message(weights=dict(state), buffers=None, examples=37).encode(),
        Message(logits=torch.arange(6.0).view(2, 3), rate=0.5, name="half", flag=True, deep={"a": {"b": {}}}).encode(),
        pack([None, (1, 2.5), {"a": torch.zeros(0, 3), 3: torch.tensor(7, dtype=torch.int8)}, "text"]),
        pack({"state": {"k": torch.ones(2, dtype=torch.bfloat16)}, "model": {}}),
    ]


def whole_words() -> dict[str, list[dict[str, Any]]]:
    """Words as servers and nodes send them."""
    key, record = fold_in(3, "client", 2, 1, 0), b"0123456789abcdef" * 2
    setting = {"experiment": {"federation": {"clients": 2}}, "run": "run-1", "code": None}
    jobs = [Call("local_update", 0, b"", record, key), EvalRequest(0, b"", None, ("own", "common"))]
    outcomes = [
        Answer(0, b"", record, (0.5, 1 / 3)),
        Failure(0, "FedAvg.local_update", "ValueError: no", "Traceback\n  File"),
        EvalResult(0, "ab" * 16, b""),
    ]
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    introduction = Introduction("cnn2(width=8)", 0.5, Network.of(net), 30, 3, 5, (1, 8, 8), 10, ("cat", "dog"))
    return {
        "job": [from_job(job, setting)[0] for job in jobs],
        "outcome": [from_outcome(outcome)[0] for outcome in outcomes],
        "introduction": [introduction.header(), {"refusal": "ConfigError: no"}],
    }


def use_tree(data: bytes) -> None:
    """Read a tree, also as views of the bytes, and write it again."""
    try:
        tree, refused = unpack(data), None
    except WireError as error:
        tree, refused = None, error
    views = pack(unpack(data, views=True))
    if refused is not None:
        raise AssertionError(f"read as views, and refused otherwise: {refused}")
    if pack(tree) != views:
        raise AssertionError("its views are another tree")


def use_message(data: bytes) -> None:
    """Read a message, and do with it what the engine does."""
    message = Message.decode(data)
    repr((message.sizes(), message.nbytes, message.identity))
    message.encode()


def use_outcome(text: bytes) -> None:
    """Read an outcome, and write it in a log and a record."""
    outcome = to_outcome((_through_flower(text), b""))
    str(outcome).encode()
    json.dumps(from_outcome(outcome)[0])


def use_job(text: bytes) -> None:
    """Read a job, and draw from its key."""
    job = to_job((_through_flower(text), b""))
    if isinstance(job, Call):
        job.key.generator()
    json.dumps(from_job(job, {})[0])


def use_introduction(text: bytes) -> None:
    """Read an introduction, and see a client in it."""
    found = Introduction.read(_through_flower(text))
    found.member(0)
    json.dumps(found.header(), allow_nan=False).encode()


def use_records(text: bytes) -> None:
    """Records of which the words are anything that Flower carries."""
    spoiled: Any = {0: text, 1: 7, 2: ["x"], 3: 1.5, 4: "\ud800"}.get(len(text) % 7, text.decode("latin-1"))
    records = RecordDict({"potluck": ConfigRecord({"version": VERSION, "words": spoiled})})
    if len(text) % 2:
        records["payload"] = ArrayRecord({"packed": Array("uint8", (3,), "potluck.packed", b"abc")})
    unwrap(records)


def _through_flower(text: bytes) -> dict[str, Any]:
    return read_header(text)


TARGETS: dict[str, tuple[str, Callable[[bytes], None]]] = {
    "tree": ("bytes", use_tree),
    "message": ("bytes", use_message),
    "job": ("words", use_job),
    "outcome": ("words", use_outcome),
    "introduction": ("words", use_introduction),
    "records": ("words", use_records),
}
"""What reads an input, by name, and what kind of input it reads."""


def seeds(target: str) -> list[bytes]:
    """What inputs begin as: what Potluck writes, and the corpus."""
    found = [path.read_bytes() for path in sorted(CORPUS.glob(f"{target}-*"))]
    if TARGETS[target][0] == "bytes":
        return [*whole_messages(), *found]
    words = whole_words()
    known = words[target] if target in words else [words for several in words.values() for words in several]
    return [*(json.dumps(each).encode() for each in known), *found]


def inputs(target: str, count: int, seed: int) -> Iterator[bytes]:
    """Mutated inputs, the same for the same seed."""
    draw, known = random.Random(f"{target} {seed}"), seeds(target)
    for _ in range(count):
        data = draw.choice(known)
        for _ in range(draw.randint(1, 4)):
            data = _mutated(data, known, draw, TARGETS[target][0])
        yield data


def _mutated(data: bytes, known: list[bytes], draw: random.Random, kind: str) -> bytes:
    if draw.random() < 0.6:
        spoiled = _in_words(data, draw) if kind == "words" else _in_skeleton(data, draw)
        if spoiled is not None:
            return spoiled
    at, length = draw.randrange(len(data) + 1), draw.choice((1, 2, 8, 40))
    part = bytearray(data)
    match draw.randrange(7):
        case 0 if data:
            part[at % len(data)] ^= 1 << draw.randrange(8)
        case 1:
            part[at:at] = draw.choice(BYTES)
        case 2:
            del part[at : at + length]
        case 3:
            part[at : at + 1] = bytes([draw.randrange(256)])
        case 4:
            part[:8] = draw.choice((0, 1, 2**16, 2**26, 2**40, 2**63, len(data), max(0, len(data) - 8))).to_bytes(
                8, "little"
            )
        case 5:
            other = draw.choice(known)
            part = bytearray(data[:at] + other[draw.randrange(len(other) + 1) :])
        case _:
            part[at:at] = data[at : at + length] * draw.randint(1, 5)
    return bytes(part)


def _in_words(data: bytes, draw: random.Random) -> bytes | None:
    """JSON with one value changed; None if it is none any more."""
    try:
        tree = json.loads(data)
        return json.dumps(_with_a_change(tree, draw)).encode()
    except (ValueError, RecursionError):
        return None


def _in_skeleton(data: bytes, draw: random.Random) -> bytes | None:
    """An encoded tree with one value of its header or its skeleton changed, and lengths that fit."""
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        if draw.random() < 0.7:
            skeleton = json.loads(header["__metadata__"]["potluck"])
            header["__metadata__"]["potluck"] = json.dumps(_with_a_change(skeleton, draw))
        else:
            header = _with_a_change(header, draw)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + data[8 + length :]
    except (ValueError, RecursionError, LookupError, TypeError):
        return None


def _with_a_change(tree: Any, draw: random.Random) -> Any:
    """The tree with one of its nodes replaced, renamed, doubled or lost."""
    places: list[tuple[Any, Any]] = []
    level: list[Any] = [tree]
    while level:
        node = level.pop()
        children = (
            list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
        )
        places += [(node, key) for key, _ in children]
        level += [child for _, child in children]
    if not places:
        return draw.choice(VALUES)
    node, key = draw.choice(places)
    change = draw.randrange(6)
    if change == 0:
        del node[key]
    elif change == 1 and isinstance(node, dict):
        node[draw.choice(NAMES)] = node.pop(key)
    elif change == 2 and isinstance(node, list):
        node.insert(key, node[key])
    elif change == 3:
        deep: Any = node[key]
        for _ in range(draw.choice((2, 20, 80, 600))):
            deep = draw.choice(({"list": [deep]}, {"dict": [["k", deep]]}, [deep], {"k": deep}))
        node[key] = deep
    else:
        node[key] = draw.choice(VALUES)
    return tree


def evaluate(target: str, data: bytes) -> str:
    """What becomes of an input: `refused`, `accepted`, or what else came out."""
    started = time.process_time()
    try:
        TARGETS[target][1](data)
        found = "accepted"
    except WireError:
        found = "refused"
    except Exception as error:
        found = f"{type(error).__name__}: {str(error)[:100]}"
    return found if time.process_time() - started < LONGEST else f"slow: {found}"


def main() -> int:
    """Mutate, evaluate, and say how many."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=160_000, help="all targets together")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations")
    parser.add_argument("--keep", type=Path, help="folder for inputs that fail")
    options = parser.parse_args()
    counts: dict[str, Counter[str]] = {target: Counter() for target in TARGETS}
    for target in TARGETS:
        for number, data in enumerate(inputs(target, options.inputs // len(TARGETS), options.seed)):
            found = evaluate(target, data)
            if found not in ("refused", "accepted"):
                print(f"{target} {number}: {found}", file=sys.stderr, flush=True)
                if options.keep and counts[target][found] == 0:
                    options.keep.mkdir(parents=True, exist_ok=True)
                    (options.keep / f"{target}-{number}").write_bytes(data)
            counts[target][found] += 1
    print("| read as | inputs | refused | accepted | failed |\n|---|---|---|---|---|")
    for target, found in counts.items():
        failed = found.total() - found["refused"] - found["accepted"]
        print(f"| {target} | {found.total()} | {found['refused']} | {found['accepted']} | {failed} |")
    return int(any(found.total() > found["refused"] + found["accepted"] for found in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
