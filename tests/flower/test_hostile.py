"""One hostile node costs its own part and nothing else: a sample of the attacks of `benchmarks/hostile.py`."""

import json
import logging
import re
import sys
from pathlib import Path

import pytest

from potluck.flower.server.serve import serve
from potluck.flower.wire.envelope import unwrap
from potluck.methods import get_method, list_methods
from potluck.testing.loopback import Loopback

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "hostile-answers.md"

IN_ALL_METHODS = "reply", "an entry that nobody asked for"
SAMPLE = {
    ("introduction", "a Python file and a function as its architecture"): "fedavg",
    ("introduction", "`os:system` as its architecture"): "fedepth",
    ("introduction", "a label that steers the terminal and forges a line"): "local",
    ("introduction", '`"many"` examples'): "felo",
    ("introduction", "100,000 brackets"): "fedin",
    ("reply", "NaN among its numbers"): "scaffold",
    ("reply", "1e30 among its numbers"): "velo",
    ("reply", "a tensor of another shape"): "fedorion",
    ("reply", "integers for floats"): "heterofl",
    ("reply", "random bytes"): "fedepth",
    ("reply", "10^400 examples"): "fedavg",
    ("reply", "a path as the name of what it keeps"): "mfedepth",
    ("reply", "a result for an answer"): "local",
    ("reply", "9e8, which is within the bound, in all its tensors, among six"): "fedavg",
    ("failure", "a failure that calls itself ContractError"): "fedin",
    ("failure", "a traceback that does so"): "fedavg",
    ("failure", "a failure of divergence"): "fedavg",
    ("evaluation", "an accuracy of `1000000000.0`"): "fedmd",
    ("evaluation", "classes for ten examples too many"): "fedavg",
    ("evaluation", "a model's name that forges a line of the log"): "local",
    ("evaluation", "false classes under a name that others' models have"): "fedavg",
}


@pytest.fixture(scope="module")
def hostile():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import hostile

        yield hostile
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
        del sys.modules["hostile"]


@pytest.fixture(scope="module")
def references(hostile):
    watch = hostile.Watch()
    hostile.play("fedavg", "reply", hostile.honest, watch)  # what is imported late is imported now
    yield hostile.References(watch)
    watch.stop()


@pytest.fixture
def canary(tmp_path_factory):
    """A file of code at a place that is not the run's, which notes that it ran."""
    place = tmp_path_factory.mktemp("canary")
    (place / "canary.py").write_text(f"open({str(place / 'ran')!r}, 'w')\n")
    yield f"{place / 'canary.py'}:main"
    assert not (place / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("point", "what"), SAMPLE)
def test_a_hostile_node_costs_its_own_part_and_nothing_else(hostile, references, canary, point, what):
    (attack,) = [found for found in hostile.attacks(canary) if (found.point, found.what) == (point, what)]
    method, logger = SAMPLE[point, what], logging.getLogger("potluck")
    level = logger.level
    try:
        reference = references.of(method, attack)
        attacked = hostile.play(method, point, attack.spoil, references._watch, attack.nodes)
    finally:
        logger.setLevel(level)
    assert hostile.cost(attack, attacked, reference) == "nothing else"
    heard = [*attacked.reasons, *attacked.said, attacked.log]
    assert not any("speaks version" in text for text in heard), "the attack went no further than its version"
    others = {row["client"] for row in attacked.clients}
    assert others >= {1, 2}
    if point in ("reply", "failure"):
        assert len(attacked.reasons) == 2  # one a round
        assert others == set(range(attack.nodes))
    if point == "introduction":
        assert others == {1, 2}


@pytest.mark.slow
@pytest.mark.rotates
@pytest.mark.parametrize("method", list_methods())
def test_an_entry_that_nobody_asked_for_costs_its_reply_whatever_the_method(hostile, references, method):
    (attack,) = [found for found in hostile.attacks() if (found.point, found.what) == IN_ALL_METHODS]
    attacked = hostile.play(method, attack.point, attack.spoil, references._watch)
    assert hostile.cost(attack, attacked, references.of(method, attack)) == "nothing else"


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in list_methods() if not get_method(name).builds_clients_models])
def test_where_the_server_builds_nobodys_model_an_architectures_name_is_a_label(hostile, references, canary, method):
    attacked = hostile.play(method, "introduction", hostile.replaced(architecture=canary), references._watch)
    assert attacked.error is None
    assert not [what for what in attacked.touched if str(Path(canary).parent) in what]
    assert {row["client"] for row in attacked.clients} == {0, 1, 2}


@pytest.mark.slow
def test_the_command_writes_the_table_of_what_it_tried(hostile, tmp_path, monkeypatch):
    table, logger = tmp_path / "table.md", logging.getLogger("potluck")
    level = logger.level
    monkeypatch.setattr(sys, "argv", ["hostile.py", "--only", "a list where entries belong", "--out", str(table)])
    try:
        with pytest.raises(SystemExit) as end:
            hostile.main()
    finally:
        logger.setLevel(level)
    assert end.value.code == 0
    method = list_methods()[0]  # what is not tried on all is tried on the next in turn
    row = f"| reply | a list where entries belong | {method} | its reply | nothing |"
    assert table.read_text().splitlines()[-1] == row


@pytest.mark.slow
def test_among_three_nodes_the_round_that_one_has_spoilt_is_undone_and_the_records_blame_it_alone(hostile, tmp_path):
    """With MOON the nodes go back to what they kept before the round."""
    rounds = 6
    tree = hostile.tree_of("moon", 3)
    tree["run"] = {**tree["run"], "rounds": rounds, "outlier_factor": 100.0, "common_test": False}
    said = []

    def lying(records):
        words, _ = unwrap(records)
        return hostile.all_tensors(9e8)(records) if "answer" in words else records

    nodes = {f"node{client}": hostile.at_home(tmp_path / f"state{client}") for client in range(3)}
    nodes["node0"] = hostile.spoiling(nodes["node0"], "reply", lying)
    serve(Loopback(nodes), tree, tmp_path / "run", say=said.append)
    records = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [record.get("undone") for record in records] == [None, 1, None, 3, None, None]
    assert [record.get("outlier") for record in records] == [None, 0, None, 0, None, None]
    for record in records:
        for client, reason in record["failed"].items():
            assert client == "0" or "client 0's reply of round" in reason
    assert [record["replied"] for record in records[4:]] == [[1, 2], [1, 2]]
    assert not [reason for record in records for reason in record["failed"].values() if "is missing" in reason]


def test_the_comparison_sees_what_others_would_lose(hostile):
    """The table's own evaluate: each thing that it looks at is a difference, if it differs."""
    attack = hostile.Attack("reply", "", hostile.honest)
    row = {"client": 1, "accuracy_personal": 0.5}

    def left(**more):
        return hostile.Observed(**{"rounds": [1], "clients": [row], "checkpoint": "a", **more})

    assert hostile.cost(attack, left(), left()) == "nothing else"
    for different in (
        left(error="WireError"),
        left(touched=["open /etc/passwd"]),
        left(checkpoint="b"),
        left(clients=[{**row, "accuracy_personal": 0.6}]),
        left(rounds=[2]),
        left(log="\x1b[2J"),
        left(said=["fine\n2026-01-01 00:00 INFO forged"]),
        left(reasons=["x" * 300_000]),
    ):
        assert hostile.cost(attack, different, left()) != "nothing else"


def test_the_watch_sees_files_programs_and_code_of_elsewhere(hostile, tmp_path):
    import subprocess

    (tmp_path / "code.py").write_text("x = 1")
    watch = hostile.Watch()
    watch.start(tmp_path / "run")
    (tmp_path / "code.py").read_text()
    exec(compile("x = 1", str(tmp_path / "code.py"), "exec"))
    subprocess.run(["true"], check=True)
    seen = " ".join(watch.stop())
    assert f"open {tmp_path / 'code.py'}" in seen
    assert f"exec {tmp_path / 'code.py'}" in seen
    assert "subprocess.Popen 'true'" in seen


def test_the_table_in_the_docs_is_of_these_attacks_and_says_that_none_cost_more(hostile):
    text = TABLE.read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    (named,) = re.findall(r"^\*all\* stands for (.*?)\.$", text, flags=re.DOTALL | re.MULTILINE)
    tried = re.split(r",\s+", named)
    everywhere = {(attack.point, attack.what): attack.everywhere for attack in hostile.attacks()}
    assert set(tried) <= set(list_methods())
    assert [(row[0], row[1]) for row in rows] == [(attack.point, attack.what) for attack in hostile.attacks()]
    assert len(rows) >= 60
    for point, what, where, price, more in rows:
        assert where == "all" if everywhere[point, what] else where in tried, what
        assert more == "nothing", what
        assert re.match("its (own )?(part|reply|row)", price)
    assert {where for _, _, where, _, _ in rows} == {"all", *tried}


def test_an_attack_by_architecture_meets_a_server_that_builds_it(hostile):
    attacks = [attack for attack in hostile.attacks() if attack.building]
    assert len(attacks) == 3
    for attack, (name,) in hostile.tried(attacks * len(list_methods())):
        assert get_method(name).builds_clients_models, attack.what
