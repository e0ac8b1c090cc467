"""What terminals are told is in a file, a JSON object a line, whatever is said and whatever becomes of the file."""

import errno
import json
import os
import stat
import sys
import threading
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.cli import main
from potluck.cli.jsonlog import JsonLog
from potluck.core.ground.errors import ConfigError, PotluckWarning
from potluck.locks import shortly_locked


def entries(path):
    """The objects of a file, all of whose lines are whole."""
    content = path.read_bytes()
    assert content[-1:] == b"\n"
    return [json.loads(line) for line in content.decode("ascii").split("\n")[:-1]]


@given(st.text() | st.sampled_from(["a\nb", "\x1b[2J{}", "\u2028", "\ud800", "x" * 10**5, 'a"}\n{"level": "info"']))
def test_any_text_is_one_line_that_steers_no_terminal(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    log = JsonLog(path, "server")
    log.note(text, "gate")
    (found,) = entries(path)
    assert (found["event"], found["level"]) in {("gate", "info"), ("gate", "warning")}
    assert found["text"].isprintable()
    assert len(found["text"]) <= 2000


def test_a_line_says_when_and_where_and_what_it_is_about(tmp_path):
    log = JsonLog(tmp_path / "log", "server", tmp_path / "keys")
    about = {"side": "server", "run": "first", "round": 2, "node": "ward-1"}
    log.note("open at 127.0.0.1:8443", "server")
    log.tell(run="first", round=2)
    log.note("node ward-1 is revoked", "node")
    log.note("warning: node ward-1 has not come with its new key", "gate")
    log.note("refused a request of node ward-1 at 192.0.2.1: no", "gate")
    log.note("round 3/9", "round", round=3)
    found = entries(tmp_path / "log")
    assert [entry.pop("time")[-1] for entry in found] == ["Z"] * 5
    assert found == [
        {"level": "info", "event": "server", "side": "server", "text": "open at 127.0.0.1:8443"},
        *(
            {"level": level, "event": event, **about, "text": text}
            for level, event, text in (
                ("info", "node", "node ward-1 is revoked"),
                ("warning", "gate", "warning: node ward-1 has not come with its new key"),
                ("warning", "gate", "refused a request of node ward-1 at 192.0.2.1: no"),
            )
        ),
        {"level": "info", "event": "round", "side": "server", "run": "first", "round": 3, "text": "round 3/9"},
    ]


@pytest.mark.parametrize(
    "text",
    [
        "refused 192.0.2.1: GET /node ward-1 is not for nodes",
        "refused 192.0.2.1: GET /\nnode ward-1 is revoked is not for nodes",
        "2 of 3 nodes are here: a, node ward-1 ",
    ],
)
def test_no_caller_has_a_line_count_as_about_another_node(text, tmp_path):
    JsonLog(tmp_path / "log", "server", tmp_path / "keys").note(text, "gate")
    assert "node" not in entries(tmp_path / "log")[0]


def test_without_keys_a_caller_has_no_name(tmp_path):
    JsonLog(tmp_path / "log", "server").note("refused a request of node at 192.0.2.1: no", "gate")
    assert "node" not in entries(tmp_path / "log")[0]


@pytest.mark.parametrize(
    ("keys", "text", "expected"),
    [
        ("keys", "keys/ca.key: others may read", "KEYS/ca.key: others may read"),
        ("keys", "chmod 600 keys/ca.key", "chmod 600 KEYS/ca.key"),
        ("keys", "monkeys/ca.key and the keys are new", "monkeys/ca.key and the keys are new"),
        ("ward-1", "its key, of node ward-1, was revoked", "its key, of node ward-1, was revoked"),
        ("ward-1", "ward-1/node.key: others", "KEYS/node.key: others"),
        ("/etc/potluck/keys", "potluck keys /etc/potluck/keys --renew-server", "potluck keys KEYS --renew-server"),
        ("/etc/potluck/keys", "/etc/potluck/keys-2/ca.crt", "/etc/potluck/keys-2/ca.crt"),
        ("keys", "HERE/keys/server.key", "KEYS/server.key"),
    ],
)
def test_no_line_has_the_path_of_a_key(keys, text, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    JsonLog(Path("log"), "server", Path(keys)).note(text.replace("HERE", str(tmp_path)), "server")
    assert entries(tmp_path / "log")[0]["text"] == expected


def test_a_file_that_is_renamed_or_emptied_is_gone_on_with(tmp_path):
    path = tmp_path / "log"
    log = JsonLog(path, "node")
    log.note("one", "work")
    path.rename(tmp_path / "log.1")  # as logrotate does by default
    log.note("two", "work")
    os.truncate(path, 0)  # as it does by copytruncate
    log.note("three", "work")
    assert [entry["text"] for entry in entries(tmp_path / "log.1")] == ["one"]
    assert [entry["text"] for entry in entries(path)] == ["three"]


def test_what_was_cut_off_does_not_spoil_the_next_line(tmp_path):
    path = tmp_path / "log"
    path.write_text('{"time": "20')
    JsonLog(path, "node").note("next", "work")
    torn, whole = path.read_text().splitlines()
    assert torn == '{"time": "20'
    assert json.loads(whole)["text"] == "next"


def test_a_full_disk_is_said_once_and_ends_nothing(tmp_path, monkeypatch, capsys):
    log = JsonLog(tmp_path / "log", "node")

    def full(file, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as then:
        then.setattr("potluck.cli.jsonlog.os.write", full)
        log.note("lost", "work")
        log.note("lost, too", "work")
    log.note("there is room", "work")
    assert [entry["text"] for entry in entries(tmp_path / "log")] == ["there is room"]
    assert capsys.readouterr().err.count("No space left on device; it lacks what is said meanwhile") == 1


def test_lines_of_several_threads_and_processes_are_whole(tmp_path):
    logs = [JsonLog(tmp_path / "log", side) for side in ("server", "node")]
    threads = [
        threading.Thread(target=lambda log=log: [log.note("x" * 500, "work") for _ in range(50)])
        for log in logs
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(entries(tmp_path / "log")) == 200


def test_a_line_that_another_one_is_writing_is_not_taken_for_a_torn_one(tmp_path):
    """Of a line that is longer than a page of memory, the system shows the first pages before the last one."""
    log = JsonLog(tmp_path / "log", "server")
    begun, ended = b'{"text": "a line', b' in two parts"}\n'
    with open(tmp_path / "log", "ab", buffering=0) as other, shortly_locked(other.fileno(), 1):
        other.write(begun)
        thread = threading.Thread(target=log.note, args=("after it", "work"))
        thread.start()
        thread.join(0.1)
        other.write(ended)
    thread.join()
    assert [entry["text"] for entry in entries(tmp_path / "log")] == ["a line in two parts", "after it"]


def test_who_keeps_the_lock_of_the_file_stops_no_line(tmp_path, monkeypatch):
    monkeypatch.setattr("potluck.cli.jsonlog._PATIENCE", 0.02)
    log = JsonLog(tmp_path / "log", "server")
    with open(tmp_path / "log") as collector, shortly_locked(collector.fileno(), 1):
        log.note("nevertheless", "work")
        assert [entry["text"] for entry in entries(tmp_path / "log")] == ["nevertheless"]


def test_where_files_have_no_locks_lines_are_written(tmp_path, monkeypatch):
    def refuse(file, kind):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("potluck.locks.fcntl.flock", refuse)
    JsonLog(tmp_path / "log", "server").note("without", "work")
    assert [entry["text"] for entry in entries(tmp_path / "log")] == ["without"]


def test_a_new_file_is_its_owners_and_one_that_was_made_for_a_collector_stays_so(tmp_path):
    JsonLog(tmp_path / "new", "node").note("a", "work")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600
    (tmp_path / "made").touch()
    (tmp_path / "made").chmod(0o640)
    JsonLog(tmp_path / "made", "node").note("a", "work")
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o640


def warned_and_refused(path):
    with JsonLog(path, "server"):
        for _ in range(2):
            warnings.warn("few examples", PotluckWarning, stacklevel=1)
        warnings.warn("of another library", UserWarning, stacklevel=1)
        raise ConfigError("no such\nkey")


def test_warnings_and_the_error_that_ends_a_command_are_lines(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        shown = []
        warnings.showwarning = lambda *words, **more: shown.append(str(words[0]))
        with pytest.raises(ConfigError):
            warned_and_refused(tmp_path / "log")
        assert shown == ["few examples", "few examples", "of another library"]
    found = [(entry["level"], entry["event"], entry["text"]) for entry in entries(tmp_path / "log")]
    assert found == [("warning", "warning", "few examples"), ("error", "ended", "no such key")]


def test_a_command_that_is_refused_says_so_in_its_log(tmp_path, monkeypatch, capsys):
    pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    monkeypatch.chdir(tmp_path)
    for words in (["serve", "--keys", "k"], ["join", "x:1", "--keys", "k"], ["serve", "--insecure", "run.round=3"]):
        monkeypatch.setattr(sys, "argv", ["potluck", *words, "--log-json", "log"])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 2
        last = entries(tmp_path / "log")[-1]
        assert (last["level"], last["event"]) == ("error", "ended")
        assert capsys.readouterr().err.splitlines()[-1] == f"potluck: {last['text']}"
