"""A class means the same at the server and at every node, whatever numbers their data sets have for it."""

import json
import re

import numpy as np
import pytest
from flwr.app import Message

from potluck.core.ground.errors import DataError
from potluck.data.dataset import Description
from potluck.data.federate import MatchedClasses
from potluck.experiment.federation.assemble import assemble, common_classes, matched_classes
from potluck.experiment.running.execute import execute, prepare
from potluck.experiment.settings.resolve import resolve
from potluck.flower import HELLO
from potluck.flower.node.clientapp import client_app
from potluck.flower.node.config import NodeConfig
from potluck.flower.node.service import NodeService
from potluck.flower.server.nodes import NodesMissing
from potluck.flower.server.serve import NODES, serve
from potluck.flower.wire.classes import MOST_NAMES, Classes, told
from potluck.flower.wire.envelope import wrap
from potluck.flower.wire.software import Software
from potluck.records import CHECKPOINT, CLIENTS, LAST, MANIFEST, PARTITION, ROUNDS, Checkpoint
from potluck.testing.loopback import Loopback, through

XRAYS = ("covid", "normal", "pneumonia")
TEN = tuple(f"kind {letter}" for letter in "jabcdefghi")


def written(path, classes, *, named=True, each=6, more=()):
    """An archive with `each` images of every class, which look alike everywhere, and names of `more` without any."""
    draw = np.random.default_rng(sum(map(ord, path.stem)))
    labels = np.repeat(np.arange(len(classes)), each)
    brightness = np.array([sum(map(ord, name)) % 200 for name in classes], dtype=np.uint8)[labels]
    images = brightness[:, None, None] + draw.integers(0, 50, (len(labels), 8, 8), dtype=np.uint8)
    names = {"classes": np.array([*classes, *more])} if named else {}
    np.savez(path, x_train=images, y_train=labels, x_test=images[::2], y_test=labels[::2], **names)
    return path


def table(dataset, clients, **federation):
    """An experiment."""
    models = [{"name": "cnn2", "width": 4}]
    federation = {"dataset": str(dataset), "clients": clients, "models": models, **federation}
    return {
        "federation": federation,
        "method": {"name": "fedproto"},
        "run": {"rounds": 1, "executor": "sequential", "tolerate_failures": False},
    }


def introduced(home, tree):
    """What a node says to a server with this experiment, and the only line of it if it refuses."""
    of = resolve(tree)
    software = {**Software.with_method(of.method).entries(), "others": False}
    header = {"experiment": tree, "run": "run-1", "client": 0, "classes": told(common_classes(of))}
    said = NodeService(home).answer(HELLO, ({**header, "software": software}, b""))[0]
    assert "\n" not in said.get("refusal", "")
    return said


def joined(tree, folder, places, lines=None):
    """Serve an experiment to nodes with these data, and play its first round."""
    nodes = {
        f"node{number}": through(client_app, {"state": str(folder.parent / f"state{number}"), "data": str(place)})
        for number, place in enumerate(places)
    }
    serve(Loopback(nodes), tree, folder, say=(lambda line: None) if lines is None else lines.append)
    return records(folder)


def records(folder):
    """What a run computed."""
    lines = [json.loads(line) for name in (ROUNDS, CLIENTS) for line in (folder / name).read_text().splitlines()]
    manifest = json.loads((folder / MANIFEST).read_text())
    return lines, Checkpoint.read(folder / CHECKPOINT / LAST).digest, manifest["classes"]


def without_common(found):
    """Records but for the common test set, which nodes lack where it is in a file of the server's."""
    if isinstance(found, dict):
        return {key: without_common(value) for key, value in found.items() if not re.search("common|evaluation", key)}
    return [without_common(value) for value in found] if isinstance(found, list | tuple) else found


@pytest.mark.parametrize("own", [("normal", "pneumonia", "zoster"), ("zoster",)])
def test_a_node_refuses_a_class_that_the_server_lacks_even_if_the_numbers_fit(tmp_path, own):
    server, place = written(tmp_path / "server.npz", XRAYS), written(tmp_path / "own.npz", own)
    said = introduced(NodeConfig(tmp_path / "state", place), table(server, 1))
    assert said["refusal"] == (
        f"DataError: client 0 ({place}): class 'zoster' is none of the 3 of the server's data set; nearest: normal;"
        " call classes alike everywhere, or have the server's data set name it too"
    )


def test_a_server_adds_a_class_of_which_it_has_no_example_by_naming_it(tmp_path):
    server = written(tmp_path / "server.npz", XRAYS, more=["zoster"])
    place = written(tmp_path / "own.npz", ("normal", "zoster"))
    said = introduced(NodeConfig(tmp_path / "state", place), table(server, 1))
    assert (said["num_classes"], said["classes"]) == (4, ["normal", "zoster"])


def test_a_server_says_in_one_line_whose_class_it_lacks_and_begins_no_run(tmp_path):
    server = written(tmp_path / "server.npz", XRAYS)
    places = [written(tmp_path / f"{name}.npz", own) for name, own in {"x": XRAYS, "y": (*XRAYS[1:], "zoster")}.items()]
    lines = []
    with pytest.raises(NodesMissing, match=r"1 of 2 nodes take part, and 2 are needed; node node1: .*class 'zoster'"):
        joined(table(server, 2), tmp_path / "run", places, lines)
    (line,) = [line for line in lines if "zoster" in line]
    assert line.startswith("node node1 takes no part: DataError: client 1 (")
    assert not (tmp_path / "run" / ROUNDS).exists()


def test_a_server_does_not_take_a_nodes_word_for_it(tmp_path):
    """A node of somebody else's making, which introduces itself with the right number of classes and a wrong name."""
    tree = table(written(tmp_path / "server.npz", XRAYS), 1)
    honest = introduced(NodeConfig(tmp_path / "state", written(tmp_path / "x.npz", XRAYS)), tree)
    assert honest["classes"] == list(XRAYS)
    false = {**honest, "classes": ["covid", "normal", "zoster"]}
    grid = Loopback({"x": lambda message: Message(wrap(false), reply_to=message)})
    with pytest.raises(NodesMissing, match="its data: class 'zoster' is none of the 3 of server; nearest: normal"):
        serve(grid, tree, tmp_path / "run", say=lambda line: None)


@pytest.mark.parametrize(
    ("server_names", "own", "own_names", "message"),
    [
        (
            True,
            ("covid", "Normal"),
            True,
            r"calls a class 'Normal', and the server's data set 'normal'; spell it alike",
        ),
        (
            False,
            ("covid", "normal"),
            True,
            "names its classes, covid, normal, and the server's data set numbers them; nam",
        ),
        (
            True,
            "0123",
            False,
            "numbers its classes up to 3, and the server's data set has 3, covid, normal, pneumonia; n",
        ),
    ],
)
def test_what_a_run_in_one_process_refuses_a_node_refuses_in_its_words(tmp_path, server_names, own, own_names, message):
    server = written(tmp_path / "server.npz", XRAYS, named=server_names)
    place = written(tmp_path / "own.npz", own, named=own_names)
    assert message in introduced(NodeConfig(tmp_path / "state", place), table(server, 1))["refusal"]
    with pytest.raises(DataError, match=message.replace("the server's data set", "server")):
        matched_classes(resolve(table(server, 1, data=[str(place)])))


@pytest.mark.parametrize("dataset", ["digits", "server.npz"])
@pytest.mark.parametrize("names", [("7", "3", "0", "9", "1"), None])
def test_a_node_with_five_of_ten_classes_has_ten_outputs(tmp_path, dataset, names):
    """With names in an order of its own, or with the first five numbers; the server's data set installed, or a file."""
    if dataset != "digits":
        dataset = written(tmp_path / dataset, tuple("0123456789"))
    place = written(tmp_path / "own.npz", names or range_of(5), named=names is not None)
    said = introduced(NodeConfig(tmp_path / "state", place), table(dataset, 1))
    assert (said["num_classes"], said["classes"]) == (10, None if names is None else list(names))


def range_of(count):
    return tuple(map(str, range(count)))


def test_a_node_without_data_of_its_own_has_the_classes_of_its_copy_of_the_servers(tmp_path):
    tree = table("digits", 1, train_fraction=0.1)
    assert introduced(NodeConfig(tmp_path / "state"), tree)["classes"] == list(range_of(10))
    header = {"experiment": tree, "run": "run-1", "client": 0, "classes": {"count": 10, "names": list(TEN)}}
    said = NodeService(NodeConfig(tmp_path / "state")).answer(HELLO, (header, b""))[0]
    assert said["refusal"].startswith("ConfigError: digits has other classes here than at the server; install the same")


@pytest.mark.parametrize(
    "classes",
    [
        None,
        {"count": 3},
        {"count": 3, "names": "abc"},
        {"count": 3, "names": [1, 2, 3]},
        {"count": 3, "names": ["a", "b", ""]},
        {"count": 3, "names": ["a", "b", "c" * 201]},
        {"count": 3, "names": ["a", "b", "\x1b[2J"]},
        {"count": 3, "names": ["a", "b", "/etc\n2026-01-01 INFO all is well"]},
        {"count": 3, "names": ["a", "b"]},
        {"count": 3, "names": ["a", "b", "b"]},
        {"count": 0, "names": []},
        {"count": 10**7, "names": None},
        {"count": "3", "names": None},
        {"count": 3, "names": None, "data": "/etc/passwd"},
    ],
)
def test_a_node_takes_nothing_else_for_the_names_of_classes(tmp_path, classes):
    tree, home = table("server.npz", 1), NodeConfig(tmp_path / "state", written(tmp_path / "own.npz", ("a", "b", "c")))
    header = {"experiment": tree, "run": "run-1", "client": 0, "classes": classes}
    refusal = NodeService(home).answer(HELLO, (header, b""))[0]["refusal"]
    assert "classes" in refusal
    assert refusal.isprintable()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a\nb",), r"xrays: class 'a\\nb': expected a name of 1 to 200 printable characters; rename it"),
        (("",), "class '': expected a name"),
        (("a" * 201,), "expected a name of 1 to 200 printable characters"),
        (tuple(f"{n:0200}" for n in range(MOST_NAMES // 200)), "the names of its classes take 4278084 bytes"),
    ],
)
def test_a_server_tells_no_names_that_nodes_would_refuse(names, message):
    with pytest.raises(DataError, match=message):
        told(MatchedClasses.matching(Description("xrays", (1,), len(names), names)))


def test_what_a_server_tells_a_node_reads():
    numbered, named = Description("digits", (1,), 3), Description("xrays", (1,), 3, XRAYS)
    for common, expected in ((numbered, ("0", "1", "2")), (named, XRAYS)):
        task = Classes.model_validate(told(MatchedClasses.matching(common))).matched(numbered)
        assert (task.classes, task.common.classes) == (expected, common.classes)


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "dataset"), [(TEN, "server.npz"), (tuple("0123456789"), "digits")])
def test_three_nodes_with_classes_in_orders_of_their_own_compute_what_one_process_does(tmp_path, classes, dataset):
    """The first has five of the ten classes, the last numbers without names."""
    if dataset != "digits":
        dataset = written(tmp_path / dataset, classes)
    own = {"a": classes[6:1:-1], "b": classes[3:] + classes[:3], "c": classes}
    places = [written(tmp_path / f"{name}.npz", names, named=name != "c") for name, names in own.items()]
    experiment = resolve(table(dataset, 3, data=list(map(str, places))))
    (tmp_path / "here").mkdir()
    execute(prepare(experiment, assemble(experiment), tmp_path / "here"), experiment, tmp_path / "here")
    lines = []
    there, here = joined(table(dataset, 3), tmp_path / "flower", places, lines), records(tmp_path / "here")
    assert there == here if dataset == "digits" else without_common(there) == without_common(here)
    name = "digits" if dataset == "digits" else "server, kind j"
    assert lines == [
        f"classes are matched by number at node2, whose data do not name them: 0 there is 0 in {name}, and so on"
    ]
    met = json.loads((tmp_path / "flower" / NODES).read_text())["clients"]
    assert [client["introduction"]["classes"] for client in met.values()] == [list(own["a"]), list(own["b"]), None]
    assert not (tmp_path / "flower" / PARTITION).exists()
