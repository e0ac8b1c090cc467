"""What one hostile node can do to a run of `potluck serve`: tries it, and writes the table of what it cost.

    python benchmarks/hostile.py [--only WORD] [--out docs/hostile-answers.md]

For each attack a real run is played, with the server's own code from the first message to the last checkpoint, over a
stand-in of Flower's grid (potluck.testing.loopback) with three nodes in this process, of which the first, client 0, has
a valid key and bad intentions; with six, where it takes others to tell that a reply is a lie. It is compared with a run
in which that node simply fails at the same point: records of rounds and clients have to be equal but for the reason,
checkpoints bit for bit. An audit hook of Python watches what is opened, imported, executed and started. The table says
what was observed. It takes over a thousand runs of two rounds; the tests try some of the attacks. Needs the extra
`flower`.
"""

import argparse
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import Any

import sklearn
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

import potluck
from potluck.core.ground.tree import pack, unpack
from potluck.flower import HELLO
from potluck.flower.node.config import NodeConfig
from potluck.flower.node.service import NodeService
from potluck.flower.server.serve import serve
from potluck.flower.wire.envelope import VERSION, unwrap, wrap
from potluck.methods import get_method, list_methods
from potluck.records import CHECKPOINT, CLIENTS, LAST, LOG, ROUNDS, Checkpoint
from potluck.testing.loopback import Answerer, Loopback
from potluck.testing.lying import spoilt
from potluck.testing.worlds import federation_table

HOSTILE = 0
"""The client whose node is hostile: the first, whom others' models are matched with."""

LOUD = "\x1b[2J\x1b]0;owned\x07\n2026-01-01 00:00:00,000 INFO potluck.experiment.running.run: round 99: all is well\r"
"""What would clear a terminal, rename its window, and forge a line of the log."""

MANY = 25 * 2**20
POINTS = {"introduction": "introduction", "reply": "reply", "failure": "reply", "evaluation": "evaluation"}
"""Where an attack happens, and where the node it is compared with fails."""

OPTIONS: dict[str, dict[str, Any]] = {
    "fedorion": {"method": {"noise_batches": 1}},
    "fedepth": {"federation": {"capacities": [1.0, 0.7, 0.7]}},
    "mfedepth": {"federation": {"capacities": [1.0, 0.7, 0.7]}},
}
CUSTOM = {"name": "cnn2", "width": 4}


@dataclass(frozen=True)
class Attack:
    """One thing that a node does.

    Attributes:
        point: where: a key of `POINTS`.
        what: in words, for the table.
        spoil: an honest message of the node's, made hostile.
        everywhere: whether it is tried on all methods, or on one, in turn.
        lie: whether it fits everything that a server can check, so that it stands in the node's own row.
        building: whether it is tried on a method whose server builds clients' models; elsewhere an architecture's name
            is a label, and the node takes part.
        nodes: how many there are.
    """

    point: str
    what: str
    spoil: Callable[[RecordDict], RecordDict]
    everywhere: bool = False
    lie: bool = False
    building: bool = False
    nodes: int = 3


@dataclass
class Observed:
    """What a run left.

    Attributes:
        error: what ended it before its time.
        rounds: records of its rounds, without reasons.
        clients: records of its clients.
        checkpoint: digest of the last one.
        reasons: why the hostile node's answers do not count, by round.
        said: what the server told whoever runs it.
        log: its log.
        touched: what it opened, imported, executed or started and had no reason to.
    """

    error: str | None = None
    rounds: list[Any] = field(default_factory=list[Any])
    clients: list[Any] = field(default_factory=list[Any])
    checkpoint: str | None = None
    reasons: list[str] = field(default_factory=list[str])
    said: list[str] = field(default_factory=list[str])
    log: str = ""
    touched: list[str] = field(default_factory=list[str])


class Watch:
    """Python's own account of what is opened, imported, executed and started while a run is played."""

    def __init__(self) -> None:
        self._own: list[Path] | None = None
        self._touched: list[str] = []
        sys.addaudithook(self._hook)

    def start(self, *own: Path) -> None:
        """From now on, these folders and those of the program are in order."""
        given = [
            *own,
            Path(sys.prefix),
            Path(sys.base_prefix),
            Path(next(iter(potluck.__path__))),
            Path(__file__).parent,
        ]
        given += [
            Path(sklearn.__file__).parent,
            Path(__file__).parents[1] / ".git",
            Path("/proc"),
            Path("/sys"),
            Path("/dev"),
        ]
        self._touched, self._own = [], [*given, *(place.resolve() for place in given)]

    def stop(self) -> list[str]:
        """What was touched beyond them."""
        self._own = None
        return self._touched

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        own = self._own
        if own is None:
            return
        noted = event == "subprocess.Popen" and Path(str(arguments[0])).name == "git"  # the manifest notes a commit
        if event in ("os.system", "os.exec", "os.posix_spawn", "pty.spawn", "subprocess.Popen") and not noted:
            self._touched.append(f"{event} {arguments[0]!r}")
        elif event in ("open", "os.listdir", "os.scandir", "os.remove", "os.mkdir", "os.rename") and arguments:
            self._see(event, arguments[0], own)
        elif event == "exec" and hasattr(arguments[0], "co_filename"):
            self._see(event, arguments[0].co_filename, own)
        elif event == "socket.connect":
            self._touched.append(event)

    def _see(self, event: str, place: Any, own: list[Path]) -> None:
        if not isinstance(place, str | bytes | Path):
            return
        text = place.decode(errors="replace") if isinstance(place, bytes) else str(place)
        if text.startswith("<"):  # code that dataclasses and the like write themselves
            return
        path = Path(text).absolute()
        if not any(path.is_relative_to(folder) for folder in own):
            self._touched.append(f"{event} {path}")


def tree_of(method: str, nodes: int) -> dict[str, Any]:
    """A small experiment; among six replies are compared, as `potluck serve` has it."""
    more, compared = OPTIONS.get(method, {}), {"outlier_factor": 100.0} if nodes > 3 else {}
    small = {"dataset": "digits", "train_fraction": 0.1, "clients": nodes}
    models = [{"name": name, "width": 4} for name in ("cnn2", "cnn3", "cnn4")]
    return {
        "federation": {
            **small,
            "models": models,
            **federation_table(get_method(method)()),
            **more.get("federation", {}),
        },
        "method": {"name": method, **more.get("method", {})},
        "run": {
            "rounds": 2,
            "executor": "sequential",
            "tolerate_failures": True,
            "rounds_close": {"deadline_s": 60.0, "patience_s": 5.0},
            **compared,
        },
    }


def at_home(state: Path) -> Answerer:
    """An honest node."""
    service = NodeService(NodeConfig(state))

    def answer(message: Message) -> Message:
        found = service.answer(message.metadata.message_type, unwrap(message.content))
        return Message(wrap(*found), reply_to=message)

    return answer


def spoiling(honest: Answerer, point: str, spoil: Callable[[RecordDict], RecordDict]) -> Answerer:
    """A node that is honest but for one kind of message."""

    def answer(message: Message) -> Message:
        words = unwrap(message.content)[0]
        asked = (
            "introduction"
            if message.metadata.message_type == HELLO
            else "reply"
            if "handler" in words
            else "evaluation"
        )
        reply = honest(message)
        return Message(spoil(reply.content), reply_to=message) if asked == POINTS[point] else reply

    return answer


def play(method: str, point: str, spoil: Callable[[RecordDict], RecordDict], watch: Watch, count: int = 3) -> Observed:
    """A run with so many nodes, one of which is not honest."""
    found = Observed()
    with TemporaryDirectory(prefix="hostile-") as name:
        place = Path(name)
        nodes = {f"node{client}": at_home(place / f"state{client}") for client in range(count)}
        nodes[f"node{HOSTILE}"] = spoiling(nodes[f"node{HOSTILE}"], point, spoil)
        watch.start(place)
        try:
            serve(Loopback(nodes), tree_of(method, count), place / "run", say=found.said.append)
        except BaseException as error:
            found.error = f"{type(error).__name__}: {error}"[:200]
        finally:
            found.touched = watch.stop()
        _read(place / "run", found)
    return found


def _read(run: Path, found: Observed) -> None:
    rounds = [json.loads(line) for line in _lines(run / ROUNDS)]
    for record in rounds:
        if (reason := record["failed"].pop(str(HOSTILE), None)) is not None:
            found.reasons.append(reason)
            record["failed"][str(HOSTILE)] = "failed"
        if record.get("lost"):
            record["lost"] = "lost"
    found.rounds, found.clients = rounds, [json.loads(line) for line in _lines(run / CLIENTS)]
    found.log = (run / LOG).read_text() if (run / LOG).is_file() else ""
    last = Checkpoint.read(run / CHECKPOINT / LAST)
    found.checkpoint = last.digest if last else None


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.is_file() else []


def failing(records: RecordDict) -> RecordDict:
    """What a node that simply fails does."""
    raise RuntimeError("this node fails")


def honest(records: RecordDict) -> RecordDict:
    """What an honest node does."""
    return records


def cost(attack: Attack, attacked: Observed, reference: Observed) -> str:
    """What an attack cost, by what it left: `nothing else`, or what else."""
    if attacked.error is not None:
        return f"the run: {attacked.error}"
    if more := [what for what in attacked.touched if what not in reference.touched]:
        return f"touched {more[0]}"
    if loud(attacked):
        return "the log: " + loud(attacked)
    if attacked.checkpoint != reference.checkpoint:
        return "what the others learnt"
    others = [[row for row in run.clients if row["client"] != HOSTILE] for run in (attacked, reference)]
    if others[0] != others[1]:
        return "the others' rows"
    if not attack.lie and (attacked.rounds != reference.rounds or attacked.clients != reference.clients):
        return "the records of rounds"
    return "nothing else"


def loud(found: Observed) -> str:
    """What of a node's text came through to a terminal, a record or a line of the log."""
    shown = [found.log, *found.said, *found.reasons]
    if any("\x1b" in text or "\r" in text for text in shown):
        return "it steers the terminal"
    if any(line.startswith("2026-01-01") for text in shown for line in text.splitlines()):
        return "it has a forged line"
    return "it is too long" if sum(map(len, shown)) > 200_000 else ""


# What a node can do to its messages.


def words(change: Callable[[dict[str, Any]], Any]) -> Callable[[RecordDict], RecordDict]:
    """Words in place of its own; the payload stays."""

    def spoil(records: RecordDict) -> RecordDict:
        said, payload = unwrap(records)
        return _sent(change(said), payload)

    return spoil


def replaced(**entries: Any) -> Callable[[RecordDict], RecordDict]:
    """Some words in place of its own."""
    return words(lambda said: {**said, **entries})


def inside(kind: str, **entries: Any) -> Callable[[RecordDict], RecordDict]:
    """Some words of an outcome in place of its own."""
    return words(lambda said: {**said, kind: {**said.get(kind, {}), **entries}})


def instead(said: Any, payload: bytes = b"") -> Callable[[RecordDict], RecordDict]:
    """Words, and nothing else."""
    return lambda records: _sent(said, payload)


def text(whole: str) -> Callable[[RecordDict], RecordDict]:
    """Text that need not be JSON."""
    return lambda records: RecordDict({"potluck": ConfigRecord({"version": VERSION, "words": whole})})


def payload(change: Callable[[bytes], bytes]) -> Callable[[RecordDict], RecordDict]:
    """Another payload; the words stay."""

    def spoil(records: RecordDict) -> RecordDict:
        said, before = unwrap(records)
        return _sent(said, change(before))

    return spoil


def entries(change: Callable[[dict[str, Any]], Any]) -> Callable[[RecordDict], RecordDict]:
    """Other entries in its reply."""
    return payload(lambda before: pack(change(unpack(before))))


def first_tensor(change: Callable[[torch.Tensor], Any]) -> Callable[[RecordDict], RecordDict]:
    """Its first tensor of floats changed; a reply without one has one too many."""

    def spoil(reply: dict[str, Any]) -> dict[str, Any]:
        for node in _dicts(reply):
            for name, value in node.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
                    node[name] = change(value)
                    return reply
        return {**reply, "weights": {"w": change(torch.ones(2, 3))}}

    return entries(spoil)


def all_tensors(value: float) -> Callable[[RecordDict], RecordDict]:
    """This number in place of every float in its tensors."""

    def spoil(reply: dict[str, Any]) -> dict[str, Any]:
        changed = spoilt(reply, value)
        floats = (v for node in _dicts(reply) for v in node.values() if isinstance(v, torch.Tensor) and v.numel())
        return changed if any(map(torch.is_floating_point, floats)) else {**reply, "weights": {"w": torch.ones(2, 3)}}

    return entries(spoil)


def _dicts(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.values():
        if isinstance(child, dict):
            yield from _dicts(child)


def number(value: Any) -> Callable[[RecordDict], RecordDict]:
    """A false number of examples."""
    return entries(lambda reply: {**reply, "examples": value})


def classes(change: Callable[[torch.Tensor], Any]) -> Callable[[RecordDict], RecordDict]:
    """Other classes for the common test set."""
    return payload(lambda before: pack(change(unpack(before))))


def failure(**more: Any) -> Callable[[RecordDict], RecordDict]:
    """A failure in place of a reply."""
    said = {"handler": "FedAvg.local_update", "reason": "ValueError: no", "trace": "", "kind": "error", **more}
    return lambda records: _sent({"client": HOSTILE, "failure": said}, b"")


def filled(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """The tensor with one number replaced."""
    changed = tensor.clone()
    changed.view(-1)[0] = value
    return changed


def nested(depth: int) -> dict[str, Any]:
    """Tables within tables."""
    node: dict[str, Any] = {}
    for _ in range(depth):
        node = {"a": node}
    return node


def _sent(said: Any, payload: bytes) -> RecordDict:
    """As `wrap`, of words that need not be a table."""
    records = RecordDict({"potluck": ConfigRecord({"version": VERSION, "words": json.dumps(said)})})
    if payload:
        array = Array(dtype="uint8", shape=(len(payload),), stype="potluck.packed", data=payload)
        records["payload"] = ArrayRecord({"packed": array})
    return records


def _kept(count: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """An introduction with so many tensors."""
    shapes = {f"w{number}": [1] for number in range(count)}
    return lambda said: {**said, "shapes": shapes, "dtypes": dict.fromkeys(shapes, "float32"), "parameters": []}


def _shape(shape: list[int]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """An introduction whose first tensor has this shape."""
    return lambda said: {**said, "shapes": {**said["shapes"], next(iter(said["shapes"])): shape}}


def _introductions(canary: str) -> Iterator[Attack]:
    """What a node can say of itself."""
    at = "introduction"
    yield Attack(
        at,
        "the name of a Python file as its model, as older versions had it",
        replaced(model={"name": canary, "options": {}}),
        everywhere=True,
    )
    yield Attack(at, "a Python file and a function as its architecture", replaced(architecture=canary), building=True)
    yield Attack(at, "`os:system` as its architecture", replaced(architecture="os:system"), building=True)
    yield Attack(
        at,
        "a model of Potluck's with a width of 10^9 as its architecture",
        replaced(architecture="cnn2(width=1000000000)"),
        building=True,
    )
    yield Attack(at, "an architecture of the experiment, other shapes", words(_shape([7, 7])))
    yield Attack(
        at,
        "an architecture of the experiment, other types",
        words(lambda said: {**said, "dtypes": dict.fromkeys(said["dtypes"], "float16")}),
    )
    yield Attack(
        at,
        "an architecture of the experiment, other trained tensors",
        words(lambda said: {**said, "parameters": said["parameters"][1:]}),
    )
    yield Attack(
        at,
        "an architecture of the experiment, one tensor less",
        words(lambda said: {**said, "shapes": dict(list(said["shapes"].items())[1:])}),
    )
    for value in ("many", -1, 0, 10**18, 1.5, math.nan, math.inf, True, None, [30], {"n": 30}):
        yield Attack(at, f"{_shown(value)} examples", replaced(train=value))
    yield Attack(
        at, "no number of examples", words(lambda said: {name: said[name] for name in said if name != "train"})
    )
    for value in (0, -0.5, 2.0, math.nan, "half"):
        yield Attack(at, f"a capacity of {_shown(value)}", replaced(capacity=value))
    yield Attack(at, "a tensor of negative size", words(_shape([-3, 3])))
    yield Attack(at, "a tensor of 10^27 numbers", words(_shape([10**9] * 3)))
    yield Attack(at, "a tensor of 300 dimensions", words(_shape([1] * 300)))
    yield Attack(at, "100,000 tensors", words(_kept(100_000)))
    yield Attack(
        at,
        "an unknown type of tensors",
        words(lambda said: {**said, "dtypes": dict.fromkeys(said["dtypes"], "object")}),
    )
    yield Attack(at, "a label that steers the terminal and forges a line", replaced(architecture=LOUD))
    yield Attack(at, "a label of 1 MB", replaced(architecture="x" * 2**20))
    yield Attack(at, "inputs of another shape", replaced(input_shape=[3, 32, 32]))
    yield Attack(at, "inputs of 10^27 numbers", replaced(input_shape=[10**9] * 3))
    yield Attack(at, "another number of classes", replaced(num_classes=1000))
    yield Attack(at, "an entry that nobody asked for", replaced(home="/root"))
    yield Attack(at, "an empty table", instead({}), everywhere=True)
    yield Attack(at, "a list", instead([1, 2]))
    yield Attack(at, "a number", instead(7))
    yield Attack(at, "no JSON", text("{"))
    yield Attack(at, "`Infinity`", text("Infinity"))
    yield Attack(at, "100,000 brackets", text("[" * 100_000))
    yield Attack(at, "tables 900 deep", instead(nested(900)))
    yield Attack(at, "half of a surrogate pair as a name", replaced(**{"\ud800": 1}))
    yield Attack(at, "a header of 25 MB", replaced(home="x" * MANY))
    yield Attack(at, "a payload of 8 MB beside its header", payload(lambda before: b"x" * 2**23))
    yield Attack(
        at,
        "a header of another version",
        lambda records: RecordDict({"potluck": ConfigRecord({"version": 99, "words": "{}"})}),
    )
    yield Attack(
        at,
        "a header that is a list of numbers",
        lambda records: RecordDict({"potluck": ConfigRecord({"version": VERSION, "words": [1.5]})}),
    )
    yield Attack(at, "no records at all", lambda records: RecordDict({}))
    yield Attack(at, "a refusal of 2 MB that steers the terminal", instead({"refusal": LOUD * 20_000}))
    yield Attack(at, "a refusal that is a list", instead({"refusal": [LOUD]}))


def _replies() -> Iterator[Attack]:
    """What a node can answer to a call."""
    at = "reply"
    yield Attack(at, "NaN among its numbers", first_tensor(lambda tensor: filled(tensor, math.nan)), everywhere=True)
    yield Attack(
        at, "infinity among its numbers", first_tensor(lambda tensor: filled(tensor, math.inf)), everywhere=True
    )
    yield Attack(at, "1e30 among its numbers", first_tensor(lambda tensor: filled(tensor, 1e30)), everywhere=True)
    yield Attack(at, "a tensor of another shape", first_tensor(lambda tensor: tensor[None, None]), everywhere=True)
    yield Attack(at, "integers for floats", first_tensor(lambda tensor: tensor.to(torch.int64)), everywhere=True)
    yield Attack(at, "text for a tensor", first_tensor(lambda tensor: "many"), everywhere=True)
    yield Attack(
        at,
        "an entry that nobody asked for",
        entries(lambda reply: {**reply, "backdoor": torch.ones(3)}),
        everywhere=True,
    )
    yield Attack(
        at, "a reply without entries, or with one", entries(lambda reply: {} if reply else {"a": 1}), everywhere=True
    )
    yield Attack(at, "random bytes", payload(lambda before: bytes(range(256)) * 20), everywhere=True)
    yield Attack(at, "an answer for another client", replaced(client=1), everywhere=True)
    yield Attack(at, "half precision for floats", first_tensor(lambda tensor: tensor.half()))
    yield Attack(at, "a list for a tensor", first_tensor(lambda tensor: [1, 2]))
    yield Attack(at, "a table for a tensor", first_tensor(lambda tensor: {"w": tensor}))
    yield Attack(at, "a tensor without numbers", first_tensor(lambda tensor: tensor.reshape(-1)[:0]))
    yield Attack(at, "a tensor of 64 MB", first_tensor(lambda tensor: torch.zeros(2**24)))
    yield Attack(
        at, "a layer that no model has", entries(lambda reply: {**reply, "weights": {"nobody.weight": torch.ones(2)}})
    )
    for value in ("many", -5, 0, 10**18, 2.5, math.nan, math.inf, True, 10**400, {"n": 1}):
        yield Attack(at, f"{_shown(value)} examples", number(value))
    yield Attack(at, "a list where entries belong", payload(lambda before: pack([1, 2])))
    yield Attack(at, "entries 60 deep", payload(lambda before: pack(nested(60))))
    yield Attack(at, "the first half of its bytes", payload(lambda before: before[: len(before) // 2]))
    yield Attack(at, "no bytes", payload(lambda before: b""))
    yield Attack(at, "a header that claims 2^63 bytes", payload(lambda before: b"\xff" * 7 + b"\x7f" + before[8:]))
    yield Attack(at, "25 MB of zeros", payload(lambda before: b"\0" * MANY))
    yield Attack(at, "losses that are text", inside("answer", losses=["0.5"]))
    yield Attack(at, "a loss of infinity", inside("answer", losses=[math.inf]))
    yield Attack(at, "a loss of 1e300", inside("answer", losses=[1e300]))
    yield Attack(at, "a million losses", inside("answer", losses=[0.5] * 10**6))
    yield Attack(at, "a path as the name of what it keeps", inside("answer", record="../../../etc/passwd"))
    yield Attack(at, "a list as the name of what it keeps", inside("answer", record=["a"]))
    yield Attack(at, "client `Infinity`", replaced(client=math.inf))
    yield Attack(
        at,
        "a result for an answer",
        instead({"client": HOSTILE, "result": {"model": "ab"}}, pack({})),
    )
    yield Attack(at, "a header that is a list", instead([]))
    yield Attack(at, "a header 900 deep", instead(nested(900)))
    yield Attack(
        at,
        "a header of another version",
        lambda records: RecordDict({"potluck": ConfigRecord({"version": 1, "words": "{}"})}),
    )
    yield Attack(at, "no records at all", lambda records: RecordDict({}))


def _failures() -> Iterator[Attack]:
    """What a node can say of why it failed."""
    at = "failure"
    yield Attack(
        at,
        "a failure that calls itself ContractError",
        failure(reason="ContractError: built a Fit but never yielded it"),
        everywhere=True,
    )
    yield Attack(at, "a failure that calls itself KeyboardInterrupt", failure(reason="KeyboardInterrupt: "))
    yield Attack(at, "a reason that steers the terminal and forges a line of the log", failure(reason=LOUD))
    yield Attack(at, "a traceback that does so", failure(trace=LOUD * 100))
    yield Attack(at, "a traceback of 5 MB", failure(trace="  File x, line 1\n" * 300_000))
    yield Attack(at, "a traceback of 25 MB", failure(trace="x" * MANY))
    yield Attack(at, "the name of another handler", failure(handler=LOUD))
    yield Attack(at, "a failure of divergence", failure(kind="divergence", reason="its loss is nan"))
    yield Attack(at, "a failure of an unknown kind", failure(kind="fatal"))
    yield Attack(at, "a reason that is a list", failure(reason=[1]))
    yield Attack(at, "a reason with half of a surrogate pair", failure(reason="\ud800"))
    yield Attack(at, "an error of Flower's own with 1 MB of text", _raising(LOUD * 10_000))


def _raising(reason: str) -> Callable[[RecordDict], RecordDict]:
    def spoil(records: RecordDict) -> RecordDict:
        raise ValueError(reason)

    return spoil


def _evaluations() -> Iterator[Attack]:
    """What a node can say of how good its model is."""
    at = "evaluation"
    for value in (1e9, -1, math.nan, "all", None, {"a": 1}):
        yield Attack(
            at,
            f"an accuracy of {_shown(value)}",
            inside("result", shares={"own": value, "validation": 0.5}),
            everywhere=value == 1e9,
        )
    yield Attack(at, "accuracy on a part that nobody asked for", inside("result", shares={"train": 1.0}))
    yield Attack(at, "no accuracy", inside("result", shares={}))
    yield Attack(at, "a list of accuracies", inside("result", shares=[1.0]))
    yield Attack(at, "a model's name that forges a line of the log", inside("result", model=LOUD))
    yield Attack(at, "no name of its model", inside("result", model=""))
    yield Attack(
        at, "classes for ten examples too many", classes(lambda found: torch.zeros(len(found) + 10, dtype=torch.int64))
    )
    yield Attack(at, "classes that are floats", classes(lambda found: found.double()), everywhere=True)
    yield Attack(at, "class 99 of ten", classes(lambda found: found + 99))
    yield Attack(at, "a table for classes", classes(lambda found: {"a": found}))
    yield Attack(at, "random bytes for classes", payload(lambda before: bytes(range(256)) * 20), everywhere=True)
    yield Attack(at, "64 MB for classes", classes(lambda found: torch.zeros(2**23, dtype=torch.int64)))
    yield Attack(
        at,
        "an answer to a call for a result",
        instead({"client": HOSTILE, "answer": {"losses": [], "record": None}}, pack({})),
    )
    yield Attack(at, "an answer for another client", replaced(client=1))
    yield Attack(at, "no records at all", lambda records: RecordDict({}))
    yield Attack(at, "a traceback of 5 MB that steers the terminal", failure(trace=LOUD * 50_000, handler="evaluation"))
    yield Attack(
        at,
        "a false accuracy of 1",
        inside("result", shares={"own": 1.0, "validation": 1.0}),
        everywhere=True,
        lie=True,
    )
    yield Attack(at, "false classes under a name that others' models have", classes(torch.zeros_like), lie=True)


def _poison() -> Iterator[Attack]:
    """What fits in everything but that the others' answers are unlike it."""
    yield Attack("reply", "9e8, which is within the bound, in all its tensors, among six", all_tensors(9e8), nodes=6)


def attacks(canary: str = "/nowhere/canary.py:main") -> list[Attack]:
    """All of them."""
    return [*_introductions(canary), *_replies(), *_failures(), *_evaluations(), *_poison()]


def _shown(value: Any) -> str:
    return "10^400" if value == 10**400 else f"`{json.dumps(value)}`"


def tried(chosen: list[Attack]) -> Iterator[tuple[Attack, list[str]]]:
    """Each attack with its methods: all, or the next one in turn."""
    methods, turns = list_methods(), cycle(list_methods())
    builds = {name: get_method(name).builds_clients_models for name in methods}
    for attack in chosen:
        if attack.everywhere:
            yield attack, methods
        else:
            yield attack, [next(name for name in turns if builds[name] or not attack.building)]


class References:
    """Runs in which the node simply fails, or where it lies, is honest; each is played once."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._played: dict[tuple[str, str, int], Observed] = {}

    def of(self, method: str, attack: Attack) -> Observed:
        """The run to compare with."""
        key = method, "lie" if attack.lie else POINTS[attack.point], attack.nodes
        if key not in self._played:
            spoil = honest if attack.lie else failing
            self._played[key] = play(method, attack.point, spoil, self._watch, attack.nodes)
        return self._played[key]


def main() -> None:
    """Try them, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="attacks whose description has this")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("potluck").setLevel(logging.CRITICAL)
    watch = Watch()
    references, rows, bad = References(watch), list[str](), 0
    play("fedavg", "reply", honest, watch)  # what is imported late is imported now
    with TemporaryDirectory(prefix="canary-") as folder:
        canary = Path(folder) / "canary.py"
        canary.write_text(
            f"open({str(Path(folder) / 'ran')!r}, 'w')\n\n\ndef main(*args, **options):\n    raise SystemExit\n"
        )
        chosen = [attack for attack in attacks(f"{canary}:main") if options.only in attack.what]
        for attack, methods in tried(chosen):
            costs: dict[str, list[str]] = {}
            for method in methods:
                reference = references.of(method, attack)
                found = cost(attack, play(method, attack.point, attack.spoil, watch, attack.nodes), reference)
                costs.setdefault(found, []).append(method)
                if found != "nothing else":
                    print(f"{attack.point}: {attack.what}: {method}: {found}", file=sys.stderr, flush=True)
                    bad += 1
            rows += [_row(attack, found, names, len(list_methods())) for found, names in costs.items()]
        if (Path(folder) / "ran").exists():
            raise SystemExit("the canary ran")
    page = _page(rows, chosen)
    print(page) if options.out is None else options.out.write_text(page)
    sys.exit(int(bad > 0))


def _row(attack: Attack, found: str, methods: list[str], all_methods: int) -> str:
    price = {"introduction": "its part in the run", "evaluation": "its row of this evaluation"}.get(
        attack.point, "its reply"
    )
    price = "its own row says so" if attack.lie else price
    where = "all" if len(methods) == all_methods else ", ".join(methods)
    return f"| {attack.point} | {attack.what} | {where} | {price} | {found.removeprefix('nothing else') or 'nothing'} |"


_PAGE = """\
# Hostile answers

{count} things that one node with a valid key did to a run of three nodes, or of six where the table says so, and what
each cost. The command `python benchmarks/hostile.py --out docs/hostile-answers.md` wrote it, from what it observed; it
says how. Failures are tolerated and, among six, replies compared (`run.tolerate_failures = true` and
`run.outlier_factor = 100`, which `potluck serve` has by default). *Else* is what differed from a run in which the node
simply failed at that point: of the records of rounds and clients, the checkpoint, the log, and files, programs and
connections that the server touched. [What this protects from](security.md).

*all* stands for {methods}.

| where | what the node sent | methods | what it cost | else |
|---|---|---|---|---|
"""


def _page(rows: list[str], chosen: list[Attack]) -> str:
    methods = fill(
        ", ".join(list_methods()), 120, initial_indent=" " * len("*all* stands for "), break_on_hyphens=False
    )
    return _PAGE.format(count=len(chosen), methods=methods.strip()) + "\n".join([*rows, ""])


if __name__ == "__main__":
    main()
