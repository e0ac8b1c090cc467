"""A submitted run is followed to its end, whatever that is."""

import json
import tomllib
from dataclasses import asdict
from itertools import count

import pytest

from potluck.core.ground.digest import digest
from potluck.engine.disk.files import write_atomically
from potluck.experiment.settings.resolve import resolve
from potluck.flower.deploy.superlink import FlowerError
from potluck.flower.server import hosting
from potluck.flower.server.hosting import EventLog, NodeRefused, run_app, write_app
from potluck.records import CHECKPOINT, LAST, ROUNDS, Checkpoint, Extent, RoundRecord


def line(number):
    """A round in which nothing was seen."""
    empty = dict.fromkeys(RoundRecord.__dataclass_fields__)
    filled = {"round": number, "cohort": [0], "replied": [0], "failed": {}, "bytes_down": 1, "bytes_up": 1}
    return json.dumps(asdict(RoundRecord(**{**empty, **filled}))) + "\n"


class Link:
    """A SuperLink on which a run does what a script says, a step each time it is looked at."""

    def __init__(self, *steps):
        self.steps = list(steps)
        self.submitted, self.stopped = [], []
        self.log = "superlink.log"

    def submit(self, app):
        self.submitted.append(app)
        return "7"

    def stop_run(self, number):
        self.stopped.append(number)

    def register(self):
        if self.steps:
            self.steps.pop(0)()
        return []

    def check(self):
        pass

    def status(self, number):
        return "finished:failed", "the server app crashed"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("potluck.flower.server.hosting._LOOK_EVERY", 0.0)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def writes(run, *numbers):
    def step():
        with (run / ROUNDS).open("a") as file:
            file.writelines(map(line, numbers))

    return step


def test_rounds_are_given_once_and_words_are_passed_on(run, tmp_path):
    events, heard = EventLog(run), []
    link = Link(writes(run, 1), lambda: events.say("waiting"), writes(run, 2, 3), events.end)
    assert [record.round for record in run_app(link, tmp_path / "app", run, heard.append)] == [1, 2, 3]
    assert heard == ["waiting"]
    assert (link.submitted, link.stopped) == ([tmp_path / "app"], [])


def test_what_was_played_and_said_before_is_not_given_again(run, tmp_path):
    events, heard = EventLog(run), []
    writes(run, 1, 2)()
    events.say("old")
    events.end("an old failure")
    link = Link(writes(run, 3), events.end)
    assert [record.round for record in run_app(link, tmp_path, run, heard.append)] == [3]
    assert heard == []


def test_a_half_written_line_waits_for_its_end(run, tmp_path):
    text = line(1)

    def write(part):
        with (run / ROUNDS).open("a") as file:
            file.write(part)

    link = Link(lambda: write(text[:20]), lambda: write(text[20:]), EventLog(run).end)
    assert [record.round for record in run_app(link, tmp_path, run, print)] == [1]


def checkpoint(run, number):
    """A checkpoint after a round, which states the extent of the records that are there."""
    (run / CHECKPOINT).mkdir(exist_ok=True)
    content = (run / ROUNDS).read_bytes()
    extent = Extent(len(content), digest(content), "")
    (run / CHECKPOINT / LAST).write_bytes(Checkpoint(number, (), {}, None, None, {ROUNDS: extent}).sealed())


def test_a_round_beyond_the_checkpoint_is_given_when_it_has_been_run_again(run, tmp_path):
    writes(run, 1, 2)()
    checkpoint(run, 2)
    whole = (run / ROUNDS).read_bytes()
    writes(run, 3)()

    def goes_on():
        write_atomically(run / ROUNDS, whole)

    link = Link(lambda: None, goes_on, writes(run, 3), writes(run, 4), EventLog(run).end)
    assert [record.round for record in run_app(link, tmp_path, run, print)] == [3, 4]


def test_each_line_is_read_once_however_many_there_are(run, tmp_path, monkeypatch):
    writes(run, *range(1, 501))()
    checkpoint(run, 500)
    read, after = [], hosting.lines_after

    def counted(path, position):
        lines, position = after(path, position)
        read.extend(lines if path.name == ROUNDS else ())
        return lines, position

    monkeypatch.setattr(hosting, "lines_after", counted)
    link = Link(*(writes(run, number) for number in range(501, 511)), *[lambda: None] * 20, EventLog(run).end)
    assert [record.round for record in run_app(link, tmp_path, run, print)] == list(range(501, 511))
    assert len(read) == 10


def test_nodes_that_take_no_part_are_news(run, tmp_path):
    events, said = EventLog(run), []
    link = Link(lambda: events.refuse("c", "it has three legs"), events.end)
    assert list(run_app(link, tmp_path, run, said.append)) == [NodeRefused("c", "it has three legs")]
    assert said == []


def test_a_failure_is_told_as_it_was_said(run, tmp_path):
    link = Link(writes(run, 1), lambda: EventLog(run).end("1 of 3 nodes came"))
    with pytest.raises(FlowerError, match="1 of 3 nodes came"):
        list(run_app(link, tmp_path, run, print))


def test_a_run_that_ends_without_a_word_is_noticed(run, tmp_path, monkeypatch):
    monkeypatch.setattr("potluck.flower.server.hosting._QUIET", 0.0)
    with pytest.raises(FlowerError, match="the server app crashed"):
        list(run_app(Link(), tmp_path, run, print))


def test_flower_is_not_asked_about_a_run_that_speaks(run, tmp_path, monkeypatch):
    clock, events, asked = count(0, 10), EventLog(run), []
    monkeypatch.setattr("potluck.flower.server.hosting.time.monotonic", lambda: next(clock))
    words = [lambda: events.say("still here")] * 20
    link = Link(*words, events.end)
    monkeypatch.setattr(link, "status", lambda number: asked.append(number) or ("running", ""))
    list(run_app(link, tmp_path, run, print))
    assert not asked


def test_a_run_that_nobody_follows_is_stopped(run, tmp_path):
    link = Link(writes(run, 1))
    rounds = run_app(link, tmp_path, run, print)
    next(rounds)
    rounds.close()
    assert link.stopped == ["7"]


METHOD = """
from dataclasses import dataclass

from potluck.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Mine(FedAvg):
    pass
"""


def test_an_app_is_a_description_and_no_code(run, tmp_path):
    (tmp_path / "mine.py").write_text(METHOD)
    experiment = resolve({"method": {"name": str(tmp_path / "mine.py")}})
    app = write_app(tmp_path / "app", experiment, run, largest=7, allow_versions=True)
    assert sorted(path.name for path in app.iterdir()) == ["pyproject.toml"]
    config = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert resolve(json.loads(config["experiment"])).tree() == experiment.tree()
    assert config.keys() == {"experiment", "folder", "largest-reply", "allow-versions"}
    assert config["allow-versions"] is True
    assert config["folder"] == str(run.resolve())
    assert config["largest-reply"] == 7
