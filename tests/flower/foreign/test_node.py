"""The reference node without PyTorch, in this process: what it does, what it refuses, and what is refused of it."""

import ast
import json
import re
from types import SimpleNamespace

import forest
import node
import numpy as np
import pytest

from potluck.experiment.settings.resolve import resolve
from potluck.flower.node.clientapp import client_app
from potluck.flower.server.nodes import NodesMissing
from potluck.flower.server.serve import serve
from potluck.records import CLIENTS, ROUNDS
from potluck.testing.loopback import Loopback, through

pytestmark = pytest.mark.rotates("src/potluck/flower/", "examples/foreign/")


@pytest.fixture
def served(tmp_path, own_of, common_of):
    """The records of a run with one node of Potluck's and these models at the others, and what the server said."""

    def run(tree, *models, changed=()):
        own, common = own_of(tree, *range(1, 1 + len(models))), common_of(tree)
        own |= {client: change(own[client]) for client, change in dict(changed).items()}
        nodes = {"node0": through(client_app, {"state": str(tmp_path / "node0")})}
        for client, make in enumerate(models, start=1):
            label, state = make.__name__.lower(), tmp_path / f"node{client}"
            nodes[f"node{client}"] = node.Node(label, make, own[client], common, state).reply
        said = []
        serve(Loopback(nodes), tree, tmp_path / "run", say=said.append)
        return (*(_lines(tmp_path / "run" / name) for name in (ROUNDS, CLIENTS)), said)

    return run


def _lines(place):
    return [json.loads(line) for line in place.read_text().splitlines()]


def without_the_second_half(arrays):
    """Of the training examples, those of the first five classes."""
    mine = arrays["y_train"] < 5
    return {**arrays, "x_train": arrays["x_train"][mine], "y_train": arrays["y_train"][mine]}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "learns"), [("dsfl", True), ("fedmd", True), ("local", False)])
def test_a_forest_learns_classes_from_others_that_it_has_never_met(method, learns, tree_of, served):
    """Alone it cannot be right about more than half of the digits."""
    tree = tree_of(method, 3, rounds=3, training={"epochs": 10})
    _, clients, _ = served(tree, forest.Forest, forest.Forest, changed={1: without_the_second_half})
    (score,) = [one for one in clients if (one["round"], one["client"]) == (3, 1)]
    assert (score["accuracy_common"] > 0.6) == learns, score["accuracy_common"]


PUBLIC = 144  # examples, of no other part of which there are as many


class Broken(forest.Forest):
    """Its predictions are of one kind of nonsense."""

    def predict_proba(self, x):
        return self.spoilt(super().predict_proba(x))


class NotNumbers(Broken):
    @staticmethod
    def spoilt(found):
        return np.full_like(found, np.nan)


class RowsMissing(Broken):
    @staticmethod
    def spoilt(found):
        return found[:-1] if len(found) == PUBLIC else found


class NoShares(Broken):
    @staticmethod
    def spoilt(found):
        return found + 1


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dsfl", "fd", "fedmd", "local"])
def test_a_forest_learns_beside_a_network(method, tree_of, served):
    rounds, clients, _ = served(tree_of(method, 2), forest.Forest)
    assert [one["replied"] for one in rounds] == [[0, 1], [0, 1]]
    last = [one for one in clients if one["round"] == 2]
    assert [one["architecture"] for one in last] == ["cnn2", "forest"]
    assert last[1]["accuracy_personal"] > 0.7
    assert last[1]["accuracy_common"] > 0.7
    assert rounds[1]["loss_local"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "model", "why"),
    [
        ("fedmd", NotNumbers, "logits holds nan"),
        ("dsfl", NotNumbers, "predictions holds nan"),
        ("fd", NotNumbers, "means holds nan"),
        ("dsfl", RowsMissing, r"predictions is a tensor \(143, 10\) of float32; expected a tensor \(144, 10\)"),
        ("dsfl", NoShares, "predictions has a row whose sum is 11"),
        ("fd", NoShares, "means has a row whose sum is 11"),
    ],
)
def test_predictions_that_are_none_are_refused_as_of_any_node(method, model, why, tree_of, served):
    rounds, clients, _ = served(tree_of(method, 3, rounds=1), model, forest.Forest)
    assert rounds[0]["replied"] == [0, 2]
    assert re.search(why, rounds[0]["failed"]["1"]), rounds[0]["failed"]
    assert clients[-1]["accuracy_personal"] > 0.7


@pytest.mark.slow
def test_a_method_whose_clients_need_networks_refuses_a_forest_by_name(tree_of, own_of, common_of, tmp_path):
    """The server says so, before anything trains, whatever the node would say itself."""
    tree = tree_of("fedproto", 1)
    own = own_of(tree, 0)[0]

    class Eager(node.Node):
        def answer(self, kind, header, payload):
            if kind == "query.hello":
                return self.introduction(header, self.data(header["classes"])), b""
            return super().answer(kind, header, payload)

    grid = Loopback({"node": Eager("forest", forest.Forest, own, common_of(tree), tmp_path).reply})
    why = "'forest' is no network of PyTorch's, and clients of fedproto need one; nodes with other models take part in"
    with pytest.raises(NodesMissing, match=f"{why} dsfl, fd, fedmd, local"):
        serve(grid, tree, tmp_path / "run", say=print)
    assert [message.metadata.message_type for message in grid.sent] == ["query.hello", "query.refusal"]


@pytest.fixture
def header():
    """What a server says of an experiment with every message."""

    def of(method="dsfl", federation=(), **options):
        tables = {"federation": {"dataset": "digits", "public": "holdout", **dict(federation)}}
        tree = resolve({**tables, "method": {"name": method, **options}}).tree()
        classes = {"count": 10, "names": None}
        told = {"experiment": tree, "run": "run-1", "client": 0, "classes": classes, "code": None}
        return {**told, "task": "classification", "public": "abc", "record": None, "round": 1}

    return of


@pytest.fixture
def at_home(tmp_path):
    """A node with some clouds of examples."""
    draws = np.random.default_rng(0)
    x, y = draws.normal(size=(60, 4)).astype(np.float32), np.arange(60) % 3
    x[:, 0] += 3 * y
    own = {"x_train": x[:40], "y_train": y[:40], "x_test": x[40:], "y_test": y[40:]}
    common = {"x_public": draws.normal(size=(20, 4)).astype(np.float32), "digest": np.array("abc")}
    return node.Node("forest", forest.Forest, own, common, tmp_path / "state")


def asked(header, handler="local_update", **more):
    return {**header, "handler": handler, "key": ["client", 0, 1, 0, 0], **more}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"method": "fedavg"}, "this node knows dsfl, fd, fedmd, local, and classification of up to 100"),
        ({"average": "logits"}, "method.average = 'logits': this node does not know it"),
        ({"method": "fd", "exchanged": "logits"}, "method.exchanged = 'logits'"),
        ({"method": "fedmd", "public_labels": True}, "method.public_labels = True"),
        ({"federation": {"task": {"name": "classification", "scores": True}}}, "leave out federation.metrics and"),
    ],
)
def test_what_it_does_not_know_it_refuses_before_anything_is_learned(options, why, header, at_home):
    said, payload = at_home.answer("query.hello", header(**options), b"")
    assert why in said["refusal"]
    assert "\n" not in said["refusal"]
    assert payload == b""


def test_options_that_methods_have_are_all_known_or_refused_by_name(header, at_home):
    """A new one would be refused, and this test says so first."""
    for method in node.METHODS:
        assert "refusal" not in at_home.answer("query.hello", header(method), b"")[0], method


def test_it_does_not_believe_other_public_examples_or_another_task(header, at_home):
    assert "other public examples" in at_home.answer("query.hello", {**header(), "public": "other"}, b"")[0]["refusal"]
    assert "refusal" not in at_home.answer("query.hello", {**header("fd"), "public": None}, b"")[0]
    assert "this node knows" in at_home.answer("query.hello", {**header(), "task": "regression"}, b"")[0]["refusal"]
    hostile = {**header(), "run": "../../etc"}
    assert "the name of a run" in at_home.answer("query.hello", hostile, b"")[0]["refusal"]


def test_classes_are_matched_by_name(header, at_home):
    at_home.names = ["c", "a", "b"]
    told = {"count": 10, "names": list("abcdefghij")}
    said, _ = at_home.answer("query.hello", {**header(), "classes": told}, b"")
    assert said["classes"] == ["c", "a", "b"]
    assert at_home.data(told)["y_train"][:3].tolist() == [2, 0, 1]
    at_home.names = ["c", "a", "z"]
    said, _ = at_home.answer("query.hello", {**header(), "classes": told}, b"")
    assert "class 'z' is none of the server's" in said["refusal"]
    said, _ = at_home.answer("query.hello", header(), b"")
    assert "class 'c' is none of the server's: they have numbers" in said["refusal"]
    at_home.names = None
    said, _ = at_home.answer("query.hello", {**header(), "classes": {"count": 2, "names": None}}, b"")
    assert "index 2 is out of bounds" in said["refusal"]


def test_it_goes_on_from_the_state_that_the_server_names(header, at_home):
    """A server that was set back asks again, and gets the same answer; one that names no state gets a beginner's."""
    message = node.pack({"rows": np.arange(5)})
    first, scored = at_home.answer("train.job", asked(header("fedmd"), "score_public"), message)
    consensus = node.pack({"consensus": node.unpack(scored)["logits"]})
    job = asked(header("fedmd"), "digest_and_revisit", record=first["answer"]["record"])
    second, again = (at_home.answer("train.job", job, consensus)[0] for _ in range(2))
    assert second["answer"]["losses"] == again["answer"]["losses"]
    for record, uniform in ((None, True), (second["answer"]["record"], False)):
        evaluation = {**header("fedmd"), "parts": ["own", "common", "validation"], "record": record}
        said, payload = at_home.answer("train.job", evaluation, node.pack({}))
        (part,) = sums = node.unpack(payload)
        assert part == "own"
        assert sums["own"]["confusion"].sum() == 20
        assert (np.trace(sums["own"]["confusion"]) < 10) == uniform
        assert re.fullmatch("[0-9a-f]{32}", said["result"]["model"])


@pytest.mark.parametrize("record", ["0" * 32, "../secret", "x"])
def test_a_state_that_is_not_there_is_a_failure_of_that_job(record, header, at_home):
    said, payload = at_home.answer("train.job", asked(header("fd"), record=record), node.pack({}))
    assert said["failure"]["reason"] == "ValueError: the client's state that the server names is missing"
    assert payload == b""


def test_a_handler_is_one_of_the_methods_own(header, at_home):
    said, _ = at_home.answer("train.job", asked(header("fd"), "__init__"), node.pack({}))
    assert "there is no handler '__init__'" in said["failure"]["reason"]


def test_old_states_are_removed(header, at_home, monkeypatch):
    monkeypatch.setattr(at_home, "make", Remembering)
    record = None
    for _ in range(node.KEPT + 3):
        said, _ = at_home.answer("train.job", asked(header("local"), record=record), node.pack({}))
        record = said["answer"]["record"]
        at_home.own["x_train"] = at_home.own["x_train"] + 0.1  # another model
    assert len(list((at_home.folder / "run-1").iterdir())) == node.KEPT
    assert (at_home.folder / "run-1" / record).is_file()


def test_a_server_of_another_version_is_refused_by_flowers_error(at_home, monkeypatch):
    records = node.wrap({})
    monkeypatch.setattr(node, "VERSION", node.VERSION + 1)
    metadata = SimpleNamespace(message_type="query.hello")
    heard = []
    monkeypatch.setattr(node, "Message", lambda content, reply_to: heard.append(content))
    at_home.reply(SimpleNamespace(content=records, metadata=metadata))
    assert (
        heard[0].reason
        == f"ValueError: the server speaks version {node.VERSION - 1} of the wire, this node {node.VERSION}"
    )


class Remembering:
    """A model that predicts the class of its first input and remembers what it was fitted to."""

    def __init__(self, classes):
        self.classes = classes

    def fit(self, x, targets, weight):
        self.x, self.targets, self.weight = x, targets, weight

    def predict_proba(self, x):
        return np.full((len(x), self.classes), 0.2 / (self.classes - 1)) + np.eye(self.classes)[0] * (
            0.8 - 0.2 / (self.classes - 1)
        )


@pytest.fixture
def client(at_home, header):
    """The client's half of a method, with a model that remembers."""

    def of(method, **options):
        data = at_home.data({"count": 10, "names": None})
        return node.Client(header(method, **options)["experiment"]["method"], 10, data, Remembering(10), False, None)

    return of


def test_fd_learns_the_sum_of_both_cross_entropies_and_reports_means_by_class(client):
    subject, gamma = client("fd", gamma=0.5), 0.5
    means = np.random.default_rng(1).dirichlet(np.ones(10), 10).astype(np.float32)
    known = np.arange(10) != 1
    reply, _ = subject.local_update({"averages": {"means": means, "known": known}})
    y, model = subject.data["y_train"], subject.model
    logs = np.log(np.random.default_rng(2).dirichlet(np.ones(10), len(y)))
    own = -logs[np.arange(len(y)), y]
    others = -(means[y] * logs).sum(1) * known[y]
    learned = -model.weight * (model.targets * logs).sum(1)
    np.testing.assert_allclose(learned, own + gamma * others, rtol=1e-6)
    assert reply["labels"].tolist() == [0, 1, 2]
    np.testing.assert_allclose(reply["means"][:, 0], 0.8, rtol=1e-6)
    assert reply["means"].dtype == np.float32
    assert reply["labels"].dtype == np.int64


def test_public_examples_are_learned_with_half_of_the_weight(client):
    subject, rows = client("dsfl"), np.array([3, 1, 7])
    labels = np.random.default_rng(1).dirichlet(np.ones(10), 3).astype(np.float32)
    subject.local_update({"rows": rows, "lesson": {"rows": rows, "labels": labels}})
    model = subject.model
    np.testing.assert_array_equal(model.x[:3], subject.data["x_public"][rows])
    np.testing.assert_allclose(model.targets[:3], labels, rtol=1e-6)
    assert model.weight[:3].sum() == pytest.approx(model.weight[3:].sum())
    assert model.weight[3:].tolist() == [1.0] * 40


def test_fedmd_sends_logits_and_learns_the_consensus_as_a_distribution(client):
    subject, rows = client("fedmd"), np.array([3, 1])
    reply, losses = subject.score_public({"rows": rows})
    shares = np.exp(reply["logits"])
    smoothed = (0.8 + node.SMALL) / (1 + 10 * node.SMALL)
    np.testing.assert_allclose((shares / shares.sum(1, keepdims=True))[:, 0], smoothed, rtol=1e-6)
    assert len(losses) == 1, "the training before the first exchange"
    assert subject.score_public({"rows": rows})[1] == []
    subject.digest_and_revisit({"consensus": reply["logits"] + 7})
    np.testing.assert_allclose(subject.model.targets[:2, 0], smoothed, rtol=1e-6)
    subject = client("fedmd", pretrain=False)
    assert np.ptp(subject.score_public({"rows": rows})[0]["logits"]) == 0


def test_a_forest_counts_a_soft_label_once_for_each_class():
    x = np.array([[0.0], [0.0], [1.0]])
    targets = np.array([[0.75, 0.25, 0.0], [0.75, 0.25, 0.0], [0.0, 1.0, 0.0]])
    subject = forest.Forest(3)
    subject.learner.set_params(bootstrap=False, min_samples_leaf=1)
    subject.fit(x, targets, np.ones(3))
    np.testing.assert_allclose(subject.predict_proba(x), targets)


def test_the_reference_node_is_short_and_imports_neither_torch_nor_potluck(examples):
    for file in examples.glob("*.py"):
        found = ast.walk(ast.parse(file.read_text()))
        names = {name.name for one in found if isinstance(one, ast.Import) for name in one.names}
        names |= {one.module for one in ast.walk(ast.parse(file.read_text())) if isinstance(one, ast.ImportFrom)}
        assert not [name for name in names if name.split(".")[0] in ("torch", "potluck")], file.name
    text = (examples / "node.py").read_text()
    lines, said = text.splitlines(), in_docstrings(text)
    assert len([number for number, line in enumerate(lines, 1) if line.strip() and number not in said]) <= 200


def in_docstrings(text):
    """The lines of docstrings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    owners = [one for one in ast.walk(ast.parse(text)) if isinstance(one, kinds) and ast.get_docstring(one)]
    return {line for one in owners for line in range(one.body[0].lineno, one.body[0].end_lineno + 1)}


def test_what_a_server_says_does_not_steer_the_owners_terminal(at_home, capsys):
    assert at_home.answer("query.refusal", {"run": "x", "why": "\x1b[2Jgone"}, b"") == ({}, b"")
    assert "\x1b" not in capsys.readouterr().err
