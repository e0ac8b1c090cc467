"""Lines of docs/security.md that no other file of tests holds."""

import math

import pytest
import torch

from potluck.core.ground.errors import DivergenceError
from potluck.core.ground.tree import pack, unpack
from potluck.core.message import Message
from potluck.core.roles import Failure
from potluck.experiment.folder.checkpoint import joined
from potluck.flower import HELLO, REFUSAL
from potluck.flower.node.config import NodeConfig
from potluck.flower.node.service import NodeService
from potluck.flower.server.serve import serve
from potluck.flower.wire.envelope import unwrap, wrap
from potluck.flower.wire.schemas import to_outcome
from potluck.records import CHECKPOINT, LAST, ROUNDS, Checkpoint
from potluck.testing.loopback import Loopback

LOUD = "\x1b[2J\x1b]0;owned\x07\n2026-01-01 00:00:00,000 INFO potluck: all is well\r\u202e\ud800"


def tree(method, clients=1, **run):
    federation = {
        "dataset": "digits",
        "train_fraction": 0.1,
        "clients": clients,
        "models": [{"name": "cnn2", "width": 4}],
    }
    run = {"rounds": 1, "executor": "sequential", "tolerate_failures": True, **run}
    return {"federation": federation, "method": {"name": method}, "run": run}


def played(method, folder, spoil=lambda said, payload: (said, payload), clients=1, **run):
    """What the first node's messages held on a run; it may change the payload of its answers."""
    heard = []

    def at(number):
        service = NodeService(NodeConfig(folder / f"state{number}"))

        def answer(message):
            from flwr.app import Message as FlowerMessage

            said, payload = service.answer(message.metadata.message_type, unwrap(message.content))
            if number == 0:
                said, payload = spoil(said, payload)
                heard.append((message.metadata.message_type, said, payload))
            return FlowerMessage(wrap(said, payload), reply_to=message)

        return answer

    grid = Loopback({f"node{number}": at(number) for number in range(clients)})
    serve(grid, tree(method, clients, **run), folder / "run", say=lambda line: None)
    return heard


def state_of(run):
    """What the server holds after the run."""
    folder = run / CHECKPOINT
    return joined([unpack((folder / name).read_bytes()) for name in Checkpoint.read(folder / LAST).state])


@pytest.mark.slow
def test_a_node_tells_what_the_method_sends_and_some_counts(tmp_path):
    """With the method that sends nothing, this is all that leaves."""
    introduction, answer, result, farewell = played("local", tmp_path)
    assert introduction[0] == HELLO
    network = {"architecture", "shapes", "dtypes", "parameters", "frozen", "capacity", "outputs", "software"}
    assert introduction[1].keys() == network | {"train", "validation", "test", "input_shape", "num_classes", "classes"}
    assert answer[1].keys() == {"client", "answer"}
    assert answer[1]["answer"].keys() == {"losses", "record", "releases", "released", "notes", "cost"}
    assert answer[1]["answer"]["notes"] == {}
    assert len(answer[1]["answer"]["losses"]) == 1
    assert dict(Message.decode(answer[2])) == {}
    assert result[1].keys() == {"client", "result"}
    assert result[1]["result"].keys() == {"model"}
    sums = unpack(result[2])
    assert sums.keys() <= {"own", "validation", "common"}
    for of_part in sums.values():
        assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in of_part.items()} == {
            "confusion": (torch.int64, (10, 10))
        }
    assert farewell == (REFUSAL, {}, b"")


@pytest.mark.parametrize("sent", [LOUD, LOUD * 10_000, "x" * 2**20, ("y" * 100 + "\n") * 10_000, "\r" * 10_000])
def test_failure_text_is_clean_and_short(sent):
    said = {"client": 0, "failure": {"handler": sent, "reason": sent, "trace": sent, "kind": "error"}}
    failure = to_outcome((said, b""))
    assert isinstance(failure, Failure)
    assert (failure.handler + failure.reason).isprintable()
    assert all(line.isprintable() for line in failure.trace.splitlines())
    assert (len(failure.handler) <= 100, len(failure.reason) <= 500, len(failure.trace) <= 31_000) == (True,) * 3


@pytest.mark.slow
def test_what_is_not_protected_the_server_reads_every_reply(tmp_path):
    _, answer, *_ = played("fedavg", tmp_path)
    state = state_of(tmp_path / "run")
    sent = Message.decode(answer[2])["weights"]
    assert all(torch.equal(sent[name], state["weights"]["all"][name]) for name in sent)


def zeros(said, payload):
    """Weights of the right names and shapes that nobody has trained."""
    if "answer" not in said:
        return said, payload
    reply = unpack(payload)
    return said, pack({**reply, "weights": {name: torch.zeros_like(w) for name, w in reply["weights"].items()}})


@pytest.mark.slow
def test_what_is_not_protected_a_lie_that_fits_is_believed(tmp_path):
    played("fedavg", tmp_path, zeros)
    state = state_of(tmp_path / "run")
    weights = [tensor for name, tensor in state["weights"]["all"].items() if name.endswith("weight")]
    assert all(not tensor.any() for tensor in weights)
    assert '"failed": {}' in (tmp_path / "run" / ROUNDS).read_text()


def spoiled(said, payload):
    if "answer" not in said:
        return said, payload
    return {**said, "answer": {**said["answer"], "losses": [math.nan]}}, payload


@pytest.mark.slow
def test_what_is_not_protected_a_node_ends_a_run_that_tolerates_nothing(tmp_path):
    with pytest.raises(DivergenceError):
        played("local", tmp_path, spoiled, clients=2, on_divergence="stop")
    assert not (tmp_path / "run" / ROUNDS).exists()


def test_what_is_not_protected_a_server_sets_the_work(tmp_path):
    asked = tree("local")
    asked["method"]["training"] = {"epochs": 10**9}
    header = {"experiment": asked, "run": "run-1", "client": 0, "code": None, "classes": {"count": 10, "names": None}}
    assert NodeService(NodeConfig(tmp_path)).answer(HELLO, (header, b""))[0]["train"] > 100


def test_a_node_that_is_asked_for_nothing_known_writes_no_more_than_that_it_was_asked(tmp_path):
    NodeService(NodeConfig(tmp_path / "state")).answer("train.job", ({"run": "x"}, b""))
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["audit.jsonl"]
