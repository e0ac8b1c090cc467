"""What a node may say of itself, and what a false introduction costs: its own part, not the run."""

import json
import re
import threading
from dataclasses import replace

import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, RecordDict
from torch import nn

from potluck.core.ground.errors import CheckpointError, ConfigError, WireError
from potluck.core.ground.inputs import Form
from potluck.core.ground.rng import Key
from potluck.experiment.federation.assemble import assemble_server, common_classes
from potluck.experiment.settings.resolve import resolve
from potluck.flower import HELLO, REFUSAL
from potluck.flower.node.audit import in_words
from potluck.flower.node.config import NodeConfig
from potluck.flower.node.service import NodeService
from potluck.flower.server.nodes import NodesMissing
from potluck.flower.server.serve import NODES, _Meeting, _Met, remote_assembly
from potluck.flower.wire.envelope import unwrap, wrap
from potluck.flower.wire.introduction import Introduction, Network, Refusal
from potluck.flower.wire.software import Software
from potluck.testing.loopback import Loopback

NET = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
RIGHT = Introduction("cnn2(width=4)", 0.5, Network.of(NET), 30, 3, 5, (1, 8, 8), 10, ("9", "2"))

DIGITS = tuple("0123456789")


def test_introduction_comes_back_as_it_was():
    header = json.loads(json.dumps(RIGHT.header()))
    assert Introduction.read(header) == RIGHT
    member = RIGHT.member(7)
    assert (member.id, member.examples, member.capacity) == (7, 30, 0.5)
    assert member.shapes == {name: tensor.shape for name, tensor in NET.state_dict().items()}
    assert member.parameters == {name for name, _ in NET.named_parameters()}


NAMED = {"image": Form((1, 8, 8), torch.float32), "ids": Form((5,), torch.int64)}


def test_introduction_tells_of_inputs_with_names_their_shapes_and_types():
    named = replace(RIGHT, input_shape=NAMED)
    assert Introduction.read(json.loads(json.dumps(named.header()))).input_shape == NAMED


@pytest.mark.parametrize(
    "told",
    [
        {"ids": [5]},
        {"ids": {"shape": [5]}},
        {"ids": {"shape": [0], "dtype": "int64"}},
        {"ids": {"shape": [5], "dtype": "object"}},
        {"ids": {"shape": [5], "dtype": "__class__"}},
        {"i\nds": {"shape": [5], "dtype": "int64"}},
        {f"input{n}": {"shape": [5], "dtype": "int64"} for n in range(2_000)},
    ],
)
def test_introduction_refuses_inputs_that_are_none(told):
    with pytest.raises(WireError):
        Introduction.read({**RIGHT.header(), "input_shape": told})


def test_introduction_has_no_place_for_the_name_of_code():
    with pytest.raises(WireError, match="model: extra inputs are not permitted"):
        Introduction.read({**RIGHT.header(), "model": {"name": "evil.py:main", "options": {}}})


WRONG = [None, "many", -1, 0, 1.5, True, float("nan"), float("inf"), 10**18, [], {}, ["\x1b[2J"]]
IN_ORDER = {
    "architecture": ["many"],
    "validation": [0],
    "test": [0],
    "parameters": [[]],
    "frozen": [[]],
    "classes": [None, []],
    "outputs": [None],
    "input_shape": [[]],  # whether they are the experiment's is looked at when they are met
}


@pytest.mark.parametrize(
    ("entry", "value"),
    [(entry, value) for entry in RIGHT.header() for value in WRONG if value not in IN_ORDER.get(entry, [])],
)
def test_introduction_refuses_what_its_schema_does_not_have(entry, value):
    with pytest.raises(WireError):
        Introduction.read({**RIGHT.header(), entry: value})


@pytest.mark.parametrize("entry", sorted(RIGHT.header()))
def test_introduction_refuses_to_lack_anything(entry):
    with pytest.raises(WireError, match=f"its introduction: {entry}: field required"):
        Introduction.read({name: value for name, value in RIGHT.header().items() if name != entry})


def test_introduction_that_is_a_refusal_is_one_clean_line():
    with pytest.raises(Refusal) as caught:
        Introduction.read({"refusal": "\x1b[2Jno\n2026-01-01 INFO all is well" + "x" * 10_000})
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= 500


def experiment(clients=3, method="fedavg", **run):
    federation = {
        "dataset": "digits",
        "train_fraction": 0.1,
        "clients": clients,
        "models": [{"name": "cnn2", "width": 4}],
    }
    return resolve({"federation": federation, "method": {"name": method}, "run": {"tolerate_failures": True, **run}})


def introduced(client=0, method="fedavg", **changed):
    """How an honest node would introduce itself, with some words replaced."""
    base = assemble_server(experiment())
    network = Network.of(base.build("cnn2(width=4)", Key(("test",))))
    header = Introduction("cnn2(width=4)", 1.0, network, 40, 4, 10, (1, 8, 8), 10, DIGITS).header()
    return {**header, **software(method), **changed}


def software(method):
    """What a node with the server's own software says of it."""
    return {"software": Software.with_method(experiment(method=method).method).entries()}


def saying(header):
    """A node that introduces itself so."""
    return lambda message: Message(wrap(header() if callable(header) else header), reply_to=message)


def silent(message):
    raise RuntimeError("this node fails")


def meet(nodes, of=None, *, allow_versions=False):
    of, said = of or experiment(), []
    grid = Loopback(nodes)
    header = {"experiment": of.tree(), "run": "run-1", "code": None}
    meeting = _Meeting(grid, of, assemble_server(of), common_classes(of), header, said.append)
    return replace(meeting, allow_versions=allow_versions).first(), said


def test_meeting_takes_nodes_in_the_order_of_their_names():
    met, said = meet({name: saying(introduced()) for name in "cab"})
    assert met.names == {0: "a", 1: "b", 2: "c"}
    assert said == []


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (saying({}), "field required"),
        (saying(introduced(train="many")), "train: input should be a valid integer, found 'many'"),
        (saying(introduced(architecture="evil.py:main")), "'evil.py:main' is not in the experiment"),
        (saying(introduced(shapes={})), "dtypes: expected the names of shapes"),
        (saying(introduced(num_classes=3)), "3 classes; expected (1, 8, 8) and 10, as in digits"),
        (saying(introduced(input_shape=[3, 8, 8])), "inputs of shape (3, 8, 8)"),
        (saying(introduced(classes=["0", "ten"])), "its data: class 'ten' is none of the 10 of digits; nearest: 0"),
        (saying({"refusal": "DataError: no data"}), "DataError: no data"),
        (silent, "this node fails"),
    ],
)
def test_meeting_goes_on_without_a_node_that_introduces_itself_wrongly(bad, reason):
    met, said = meet({"a": saying(introduced()), "b": bad, "c": saying(introduced())})
    assert met.names == {0: "a", 2: "c"}
    assert said[0].startswith("node b takes no part: ")
    assert reason in said[0]
    assert said[1] == "2 of 3 nodes take part; continuing without the others"


def test_meeting_takes_nodes_with_some_of_the_classes_and_says_where_only_numbers_tell_them_apart():
    classes = {"a": ["7", "3"], "b": None, "c": None}
    met, said = meet({name: saying(introduced(classes=names)) for name, names in classes.items()})
    assert [of.classes for of in met.introductions.values()] == [("7", "3"), None, None]
    assert said == [
        "classes are matched by number at b, c, whose data do not name them: 0 there is 0 in digits, and so on"
    ]


def test_a_node_that_takes_no_part_hears_why_in_its_own_terminal(tmp_path):
    of = experiment()
    grid = Loopback({"a": saying(introduced()), "b": saying(introduced(num_classes=3)), "c": saying(introduced())})
    header = {"experiment": of.tree(), "run": "run-1", "code": None}
    _Meeting(grid, of, assemble_server(of), common_classes(of), header, lambda line: None).first()
    (told,) = [message for message in grid.sent if message.metadata.message_type == REFUSAL]
    assert told.metadata.dst_node_id == next(number for number, node in grid.nodes.items() if node.name == "b")
    said, payload = unwrap(told.content)
    home = NodeConfig(tmp_path)
    for why in (said["why"], "\x1b[2Jno\nall is well"):
        assert NodeService(home).answer(REFUSAL, ({**said, "why": why}, payload)) == ({}, b"")
    first, second = map(in_words, home.audit_log.read_text().splitlines())
    assert first.startswith("takes no part, says the server: it has inputs of shape (1, 8, 8) and 3 classes; expected")
    assert second.isprintable()


def test_meeting_takes_another_node_for_one_that_is_refused():
    met, said = meet({"a": saying({}), **{name: saying(introduced()) for name in "bcd"}})
    assert met.names == {0: "d", 1: "b", 2: "c"}
    assert len(said) == 1


def test_meeting_does_not_wait_longer_than_told_for_a_node_that_says_nothing():
    grid_nodes = {"a": saying(introduced()), "b": saying(introduced()), "c": saying(introduced())}
    of, said = experiment(rounds_close={"deadline_s": 0.5}), []
    grid = Loopback(grid_nodes)
    grid.silent.add("b")
    header = {"experiment": of.tree(), "run": "run-1", "code": None}
    met = _Meeting(grid, of, assemble_server(of), common_classes(of), header, said.append).first()
    assert met.names == {0: "a", 2: "c"}
    assert said[0].startswith("node b takes no part: no answer within ")


def test_meeting_waits_beyond_the_deadline_for_as_many_as_are_needed_and_asks_again_for_the_same_client(monkeypatch):
    """A node remembers which client it was asked to be, and refuses to be another."""
    asked, of, said = [], experiment(rounds_close={"deadline_s": 0.05, "quorum": 3}), []

    def flighty(message):
        asked.append(unwrap(message.content)[0]["client"])
        if len(asked) < 3:
            return Message(Error(5, "Node Unavailable"), reply_to=message)
        return Message(wrap(introduced()), reply_to=message)

    grid = Loopback({"a": saying(introduced()), "b": flighty, "c": saying(introduced())})
    grid.silent.add("c")
    threading.Timer(0.3, grid.silent.discard, ["c"]).start()
    header = {"experiment": of.tree(), "run": "run-1", "code": None}
    met = _Meeting(grid, of, assemble_server(of), common_classes(of), header, said.append).first()
    assert met.names == {0: "a", 1: "b", 2: "c"}
    assert asked == [1, 1, 1]
    assert said == ["node b takes no part: Node Unavailable"] * 2


@pytest.mark.slow
def test_meeting_does_not_wait_for_the_answer_of_a_node_that_was_started_anew():
    of, said = experiment(rounds_close={"quorum": 3}), []
    grid = Loopback({name: saying(introduced()) for name in "abc"})
    grid.silent.add("b")

    def restart():
        (node,) = [node for node in grid.nodes.values() if node.name == "b"]
        node.last_activated_at = "2026-01-02T00:00:00+00:00"
        grid._waiting.clear()  # it has forgotten what it was asked
        grid.silent.clear()

    threading.Timer(0.3, restart).start()
    header = {"experiment": of.tree(), "run": "run-1", "code": None}
    met = _Meeting(grid, of, assemble_server(of), common_classes(of), header, said.append).first()
    assert met.names == {0: "a", 1: "b", 2: "c"}
    assert said == ["node b takes no part: it was restarted meanwhile"]


def test_meeting_ends_where_failures_are_not_tolerated():
    of = experiment(tolerate_failures=False)
    with pytest.raises(NodesMissing, match="2 of 3 nodes take part, and 3 are needed; node b: its intro"):
        meet({"a": saying(introduced()), "b": saying({}), "c": saying(introduced())}, of)


def test_meeting_ends_where_nobody_is_left():
    with pytest.raises(NodesMissing, match="0 of 3 nodes take part"):
        meet({name: saying({}) for name in "abc"})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda header: {"shapes": {**header["shapes"], next(iter(header["shapes"])): [1]}}, r"is torch.Size\(\[1\]\)"),
        (lambda header: {"dtypes": dict.fromkeys(header["dtypes"], "float16")}, "is float16; expected float32"),
        (lambda header: {"parameters": header["parameters"][1:]}, "it trains other tensors"),
        (lambda header: {"capacity": 0}, "capacity"),
    ],
)
def test_meeting_compares_a_network_of_the_experiments_name_with_the_experiments(change, reason):
    header = introduced()
    nodes = {"a": saying(header), "b": saying({**header, **change(header)}), "c": saying(header)}
    met, said = meet(nodes)
    assert met.names == {0: "a", 2: "c"}
    assert re.search(reason, said[0]), said[0]


def own_network(method="local"):
    net = nn.Linear(64, 10)
    network = Network.of(net)
    return Introduction("nets.py:mine", 1.0, network, 40, 4, 10, (1, 8, 8), 10, DIGITS).header() | software(method)


def test_meeting_takes_a_network_of_a_nodes_own_where_the_server_builds_none():
    def nodes(method):
        like_the_server = saying(introduced(method=method))
        return {"a": like_the_server, "b": saying(own_network(method)), "c": like_the_server}

    met, said = meet(nodes("local"), experiment(method="local"))
    assert (met.names, said) == ({0: "a", 1: "b", 2: "c"}, [])
    met, said = meet(nodes("fedavg"), experiment(method="fedavg"))
    assert met.names == {0: "a", 2: "c"}
    assert "add it to federation.models, or use a method that does not, such as fedmd" in said[0]


def test_a_network_of_a_nodes_own_is_never_built():
    of = experiment(method="local", clients=1)
    federation = remote_assembly(
        of, assemble_server(of), common_classes(of), {0: Introduction.read(own_network())}
    ).federation
    assert federation.roster[0].shapes == {"weight": torch.Size([10, 64]), "bias": torch.Size([10])}
    with pytest.raises(ConfigError, match="which builds only those of its experiment"):
        federation.build("nets.py:mine", Key(("test",)))


def test_who_was_met_is_found_again_and_damage_is_said(tmp_path):
    met, _ = meet({name: saying(introduced()) for name in "abc"})
    place = tmp_path / NODES
    place.write_bytes(met.to_json())
    assert _Met.read(place) == met
    spoiled = json.loads(met.to_json())
    spoiled["clients"]["0"]["introduction"]["train"] = -3
    for content in (b"{", b"[]", b'{"run": "r", "clients": {"x": 1}}', json.dumps(spoiled).encode()):
        place.write_bytes(content)
        with pytest.raises(CheckpointError, match="cannot be read"):
            _Met.read(place)


def test_a_nodes_service_answers_whatever_it_is_sent(tmp_path):
    service = NodeService(NodeConfig(tmp_path))
    for kind in (HELLO, "train.job", "nonsense"):
        for header in ({}, {"client": 0}, {"experiment": 1, "run": "r", "client": 0}, {"client": 0, "handler": 7}):
            assert "refusal" in service.answer(kind, (header, b""))[0]


def test_words_of_another_version_are_refused_by_name():
    with pytest.raises(WireError, match="the other side speaks version 1 of the wire, this one 5"):
        unwrap(RecordDict({"potluck": ConfigRecord({"version": 1, "words": "{}"})}))


OURS = Software.with_method(experiment().method)


def saying_of_itself(**changed):
    """A node that says something else of its software."""
    return saying(introduced(software={**OURS.entries(), **changed}))


def unsaid():
    """A node as they were before they said which software they have."""
    header = introduced()
    del header["software"]
    return saying(header)


OTHERS = {
    "another version": (saying_of_itself(version="0.0.9"), "the node has Potluck 0.0.9, and the server "),
    "another method": (saying_of_itself(method="ab" * 16), "the node's copy of the run's method is another"),
    "no method": (saying_of_itself(method=None), "digest none, there "),
    "nothing": (unsaid(), "the node does not say which version of Potluck it has"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_node_with_other_software_is_named_and_refused_unless_it_is_allowed(case):
    node, why = OTHERS[case]
    nodes = {"a": saying(introduced()), "b": node, "c": saying(introduced())}
    met, said = meet(nodes)
    assert met.names == {0: "a", 2: "c"}
    assert said[0].startswith("node b takes no part: ")
    assert why in said[0]
    assert said[0].endswith("or let others take part: potluck serve --allow-versions")
    met, said = meet(nodes, allow_versions=True)
    assert met.names == {0: "a", 1: "b", 2: "c"}
    (line,) = said
    assert line.startswith("node b takes part all the same: ")
    assert why in line


def test_a_node_without_a_network_has_code_of_its_own_and_need_not_say_which():
    bare = Introduction("forest", 1.0, Network({}, {}, frozenset()), 40, 4, 10, (1, 8, 8), 10, DIGITS).header()
    of = experiment(method="fd")
    nodes = {"a": saying(bare), **{name: saying(introduced(method="fd")) for name in "bc"}}
    met, said = meet(nodes, of)
    assert (met.names, said) == ({0: "a", 1: "b", 2: "c"}, [])


def test_what_is_not_protected_a_node_says_of_its_software_what_it_likes():
    met, said = meet({name: saying_of_itself() for name in "abc"})
    assert (len(met.names), said) == (3, [])


@pytest.mark.parametrize(
    "said",
    [
        3, [], {}, "1.0", {"version": "1.0"}, {"method": None}, {**OURS.entries(), "others": True},
        *({**OURS.entries(), "version": version} for version in (None, 1, "", "x" * 65, ["1"])),
        *({**OURS.entries(), "method": method} for method in ("", "x" * 32, "AB" * 16, "ab" * 17, 3, ["ab" * 16])),
    ],
)  # fmt: skip
def test_introduction_refuses_software_that_is_none(said):
    with pytest.raises(WireError, match="its introduction: software"):
        Introduction.read({**RIGHT.header(), "software": said})


def test_a_version_cannot_forge_a_line():
    loud = {**OURS.entries(), "version": "1\x1b[2J\n2026 INFO all is well"}
    found = Introduction.read({**RIGHT.header(), "software": loud}).software
    assert found.version.isprintable()
    assert found.difference(OURS).isprintable()


def header_of(**software):
    """What a server asks with."""
    of = experiment(clients=1)
    told = {"count": 10, "names": list(DIGITS)}
    return {"experiment": of.tree(), "run": "run-1", "client": 0, "code": None, "classes": told, **software}


def test_a_node_says_its_software_to_those_who_say_theirs(tmp_path):
    service = NodeService(NodeConfig(tmp_path))
    assert "software" not in service.answer(HELLO, (header_of(), b""))[0]  # an earlier server would refuse it
    for others in (False, True):
        asked = {"version": "9.9", "method": None, "others": others, "more": "by and by"}
        said = service.answer(HELLO, (header_of(software=asked), b""))[0]
        assert said["software"] == OURS.entries()


@pytest.mark.parametrize("theirs", [{"version": "9.9"}, {"method": "ab" * 16}])
def test_a_node_computes_nothing_for_a_server_with_other_software_that_wants_the_same(tmp_path, theirs):
    """Also if it has introduced itself long ago: either side may have been exchanged since."""
    service = NodeService(NodeConfig(tmp_path))
    job = {"handler": "local_update", "key": [0, "client", 1, 0, 0], "round": 1, "record": None}

    def reason(others, **changed):
        header = header_of(software={**OURS.entries(), **changed, "others": others}) | job
        return service.answer("train.job", (header, b""))[0]["failure"]["reason"]

    refusal = "or let others take part: potluck serve --allow-versions"
    assert refusal in reason(False, **theirs)
    assert refusal not in reason(True, **theirs)
    assert refusal not in reason(False)


@pytest.mark.parametrize("software", [3, {}, {"version": "", "method": None, "others": True}, {"version": "1.0"}])
def test_a_node_refuses_what_is_no_software_of_a_servers(tmp_path, software):
    assert "refusal" in NodeService(NodeConfig(tmp_path)).answer(HELLO, (header_of(software=software), b""))[0]
