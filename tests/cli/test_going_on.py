"""`potluck run --resume` and `--branch`, and how a run or server ends when told to, with nobody to tell, or no room."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from potluck.core.roles import ClientFailure
from potluck.engine.disk.files import using
from potluck.experiment.running.run import Run
from potluck.records import Checkpoint, kept_rounds
from potluck.testing.faults import Faulty

TINY = (
    "federation.clients=2 federation.train_fraction=0.1 federation.validation_fraction=0.2 run.common_test=false"
    " run.executor=sequential"
)
NET = "\"federation.models=[{name='cnn2',width=2}]\""
METHOD = '''"""Alone."""

from dataclasses import dataclass

from potluck.methods.local import Local


@dataclass(frozen=True)
class Alone(Local):
    """Under another name."""
'''
MODEL = """from potluck.models import get_model


def small(num_classes, input_shape, *, width=2):
    return get_model("cnn2")(num_classes, input_shape, width=width)
"""
SLOW_EXIT = """import atexit, time


@atexit.register
def clean_up():
    print("cleaning up", flush=True)
    for _ in range(600):
        time.sleep(0.1)
    print("cleaned up")
"""


@pytest.fixture
def started(potluck, tmp_path):
    """Plays one round of a tiny run; its folder."""

    def start(target="local", models=NET, more=""):
        outcome = potluck(f"run {target} {TINY} {models} run.rounds=1 {more}")
        assert outcome.code == 0, outcome.err
        return max((tmp_path / "runs").iterdir())

    return start


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(outcome, *expected):
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.startswith("potluck: ")
    for words in expected:
        assert words in outcome.err


@pytest.mark.slow
def test_an_edited_configuration_is_refused_or_becomes_a_branch(potluck, started, tmp_path):
    folder = started(more="run.keep_every=1")
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.01", "lr = 0.5").replace("threads = 1", "threads = 2"))
    before = content(folder)
    said = potluck(f"run --resume {folder} run.rounds=2")
    refused(said, "method.training.lr was 0.01 and is 0.5; run.threads was 1 and is 2.", f"--resume {folder} --branch")
    refused(potluck(f"run --resume {folder} --branch federation.clients=3"), "federation.clients changed")
    refused(potluck("run local --branch"), "give --resume FOLDER too")
    assert len(list((tmp_path / "runs").iterdir())) == 1

    outcome = potluck(f"run --resume {folder} --branch run.rounds=3")
    assert outcome.code == 0, outcome.err
    assert content(folder) == before
    (branched,) = set((tmp_path / "runs").iterdir()) - {folder}
    manifest = json.loads((branched / "manifest.json").read_text())
    parent = json.loads((folder / "checkpoint" / "last.json").read_text())
    assert manifest["parent"]["folder"] == str(folder)
    assert manifest["parent"]["round"] == 1
    assert manifest["status"] == "finished"
    assert manifest["data_checksum"] == json.loads((folder / "manifest.json").read_text())["data_checksum"]
    assert "lr = 0.5" in (branched / "config.toml").read_text()
    rounds = (branched / "rounds.jsonl").read_bytes()
    assert rounds.startswith((folder / "rounds.jsonl").read_bytes())
    assert rounds.count(b"\n") == 3
    kept = kept_rounds(branched / "checkpoint")
    assert list(kept) == [1, 2, 3]
    assert all((branched / "checkpoint" / name).is_file() for name in Checkpoint.read(kept[1]).files)
    assert parent["config"]["method"]["training"]["lr"] == 0.01
    assert potluck(f"run --resume {branched} run.rounds=4").code == 0


@pytest.mark.slow
def test_length_is_the_only_thing_given_and_never_shorter(potluck, started):
    folder = started(more="run.rounds=1")
    potluck(f"run --resume {folder} run.rounds=3")
    before = content(folder)
    refused(potluck(f"run --resume {folder} run.rounds=2"), "has 3 finished rounds", "expected at least 3")
    refused(potluck(f"run --resume {folder} run.seed=2"), "only run.rounds may be given")
    assert content(folder) == before


@pytest.mark.slow
def test_a_resumed_run_goes_on_counting_megabytes(potluck, started):
    net = NET.replace("width=2", "width=16")
    folder = started("fedavg", models=net)
    outcome = potluck(f"run --resume {folder} run.rounds=2")
    rounds = map(json.loads, (folder / "rounds.jsonl").read_text().splitlines())
    sent = [record["bytes_down"] + record["bytes_up"] for record in rounds]
    assert f"{sum(sent) / 1e6:.1f} MB" in outcome.err
    assert f"{sum(sent) / 1e6:.1f}" != f"{sent[1] / 1e6:.1f}"


@pytest.mark.slow
def test_a_run_keeps_the_users_code_and_goes_on_with_it_from_anywhere(potluck, started, tmp_path, monkeypatch):
    for name, text in (("alone.py", METHOD), ("nets.py", MODEL)):
        (tmp_path / name).write_text(text)
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "Mine"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    folder = started("alone.py", models="\"federation.models=['nets.py:small']\"")
    whole = started("alone.py", models="\"federation.models=['nets.py:small']\"", more="run.seed=0")
    potluck(f"run --resume {whole} run.rounds=2")

    manifest = json.loads((folder / "manifest.json").read_text())
    head = subprocess.run(["git", "-C", str(tmp_path), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert (manifest["git_commit"], manifest["git_dirty"]) == (head.stdout.strip(), False)
    assert [file["file"] for file in manifest["code"]] == ["alone.py", "nets.py"]
    assert (folder / "code" / "nets.py").read_text() == MODEL

    (tmp_path / "nets.py").write_text(MODEL.replace("width=2", "width=7"))
    (tmp_path / "alone.py").unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    outcome = potluck(f"run --resume ../runs/{folder.name} run.rounds=2")
    assert outcome.code == 0, outcome.err
    assert "nets.py has changed since the run was started; the run continues with its copy" in outcome.err
    assert "alone.py no longer exists; the run continues with its copy" in outcome.err
    assert os.getcwd() == str(tmp_path / "elsewhere")
    assert potluck(f"show {folder} --digest").out == potluck(f"show {whole} --digest").out

    refused(potluck(f"run --resume {folder} --branch run.rounds=3"), "no such file")
    (tmp_path / "alone.py").write_text(METHOD)
    (folder / "code" / "nets.py").write_text(MODEL + "\n")
    refused(potluck(f"run --resume {folder} run.rounds=3"), "code/nets.py is damaged")


@pytest.mark.slow
@pytest.mark.parametrize("step", ["rename config.toml", "append rounds.jsonl", "write last.json.tmp"])
def test_a_full_disk_is_one_line_and_the_run_can_go_on(step, potluck, tmp_path):
    command = f"run local {TINY} {NET} run.rounds=2"
    whole = Faulty()
    with using(whole):
        potluck(f"{command} --to whole")
    (reference,) = (tmp_path / "whole").iterdir()
    with using(Faulty(whole.steps.index(step), "full")):
        outcome = potluck(f"{command} --to full")
    (folder,) = (tmp_path / "full").iterdir()
    last = [line for line in outcome.err.splitlines() if not line.startswith("round ")]
    if step != "rename config.toml":  # which needs no room; what comes next does
        assert (folder / "config.toml").is_file()
    assert outcome.code == 2
    assert len(last) == 1
    assert "No space left on device" in last[0]
    assert f"potluck run --resume {folder.relative_to(tmp_path)}" in last[0]
    assert potluck(f"run --resume {folder}").code == 0
    assert potluck(f"show {folder} --digest").out == potluck(f"show {reference} --digest").out


def test_a_place_that_cannot_be_written_to_is_one_line(potluck, tmp_path):
    (tmp_path / "file").write_text("")
    refused(potluck(f"run local {TINY} {NET} --to file/runs"), "cannot write file", "File exists")
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.slow
@pytest.mark.parametrize("tolerated", ["true", "false"])
def test_a_worker_lost_while_judging_is_one_line_and_its_reason_is_kept(tolerated, potluck, tmp_path, monkeypatch):
    def lost(*arguments, **options):
        raise ClientFailure("evaluating client 1: its worker process was killed by SIGKILL")

    monkeypatch.setattr(Run, "_evaluate", lost)
    outcome = potluck(f"run local {TINY} {NET} run.rounds=1 run.tolerate_failures={tolerated}")
    refused(outcome, "evaluating client 1: its worker process was killed by SIGKILL")
    (folder,) = (tmp_path / "runs").iterdir()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["status"] == "failed"
    assert "evaluating client 1" in manifest["reason"]
    assert "the run failed after round 0: evaluating client 1" in (folder / "log.txt").read_text()


@pytest.mark.slow
def test_an_unexpected_error_is_in_the_log_with_its_traceback(potluck, tmp_path, monkeypatch):
    def breaks(*arguments, **options):
        raise RuntimeError("a bug")

    monkeypatch.setattr(Run, "_evaluate", breaks)
    with pytest.raises(RuntimeError, match="a bug"):
        potluck(f"run local {TINY} {NET} run.rounds=1")
    (folder,) = (tmp_path / "runs").iterdir()
    assert "Traceback" in (folder / "log.txt").read_text()
    assert json.loads((folder / "manifest.json").read_text())["reason"] == "RuntimeError: a bug"


def command(*words, first="pass"):
    heard = (  # background jobs are deaf to the first two, and those of nohup to the last
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        " signal.signal(signal.SIGQUIT, signal.SIG_DFL); signal.signal(signal.SIGHUP, signal.SIG_DFL)"
    )
    return [sys.executable, "-c", f"{heard}; {first}; from potluck.cli import main; main()", *words]


def long_run(folder, *more, first="pass", **options):
    """A run with workers in a process of its own, and in a group of its own as a terminal would have it."""
    words = ["run", "local", "run.rounds=100000", "run.executor=workers", "run.workers=2", "run.common_test=false"]
    words += ["federation.models=[{name='cnn2',width=2}]", "federation.clients=2", "--to", str(folder), *more]
    process = subprocess.Popen(
        command(*words, first=first),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        start_new_session=True,
        **options,
    )
    while not list(folder.glob("*/checkpoint/last.json")):
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.02)
    (run,) = folder.iterdir()
    return process, run


def status(run):
    return json.loads((run / "manifest.json").read_text())["status"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1"])
def test_a_signal_to_all_of_a_run_ends_it_in_order(name, tmp_path):
    number = getattr(signal, name)
    process, run = long_run(tmp_path / "runs", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if number == signal.SIGTERM:
        process.terminate()  # as `kill` does; its workers are told by it
    else:
        os.killpg(process.pid, number)  # as a terminal does
    _, err = process.communicate(timeout=240)
    assert process.returncode == 128 + number
    assert [line for line in err.splitlines() if not line.startswith("round ")] == [
        f"potluck: interrupted; resume with: potluck run --resume {run}"
    ]
    assert status(run) == "interrupted"
    assert all('"failed": {}' in line for line in (run / "rounds.jsonl").read_text().splitlines())


def gone(number):
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{number}/stat").read_text().split()[2] == "Z"  # dead, and not yet buried


@pytest.mark.slow
def test_a_second_signal_ends_a_run_at_once(tmp_path):
    process, run = long_run(tmp_path / "runs", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    for worker in map(int, workers.stdout.split()):
        os.kill(worker, signal.SIGSTOP)  # so that it does not hear the first one
    try:
        process.send_signal(signal.SIGINT)
        while status(run) != "interrupted" and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
        for worker in map(int, workers.stdout.split()):
            assert gone(worker)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert err.splitlines()[-1] == f"potluck: interrupted; resume with: potluck run --resume {run}"
    assert status(run) == "interrupted"


@pytest.mark.slow
def test_a_second_signal_while_python_cleans_up_is_no_error(tmp_path):
    (tmp_path / "slow_exit.py").write_text(SLOW_EXIT)
    first = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import slow_exit"
    process, run = long_run(tmp_path / "runs", first=first, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "cleaning up\n"  # what a run prints besides comes when it has finished
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 130
    assert out == ""  # it ended there
    last = [line for line in err.splitlines() if not line.startswith("round ")]
    assert last == [f"potluck: interrupted; resume with: potluck run --resume {run}"]
    assert status(run) == "interrupted"


@pytest.mark.slow
def test_an_interrupted_server_says_how_its_folder_is_served_again_and_it_is(tmp_path):
    pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
    from potluck.flower.deploy.processes import free_port

    words = ["fedavg", "federation.clients=2", "federation.models=['cnn2']", "--to", str(tmp_path / "runs")]
    for _ in range(2):
        listen = ["--insecure", "--listen", f"127.0.0.1:{free_port()}"]
        server = subprocess.Popen(command("serve", *listen, *words), stderr=subprocess.PIPE, text=True)
        try:
            assert any("nodes join by" in line for line in iter(server.stderr.readline, ""))
            server.send_signal(signal.SIGINT)
            _, err = server.communicate()
        finally:
            server.kill()
        assert server.returncode == 130
        (run,) = (tmp_path / "runs").iterdir()
        words = ["--folder", str(run)]
        assert err.splitlines()[-1] == f"potluck: interrupted; resume with: potluck serve {' '.join(words)}"
        assert "Traceback" not in err


@pytest.mark.slow
def test_a_run_whose_reader_has_gone_goes_on_to_its_end(tmp_path):
    words = ["run", "local", *TINY.split(), NET.strip('"'), "run.rounds=3", "--to", str(tmp_path / "runs")]
    process = subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout.readline().startswith("round 1")
    process.stdout.close()
    assert process.wait() == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert status(run) == "finished"
    assert (run / "rounds.jsonl").read_text().count("\n") == 3


@pytest.mark.slow
def test_a_list_whose_reader_has_gone_ends_quietly():
    process = subprocess.Popen(
        [sys.executable, "-c", "from potluck.cli import main; main()", "list", "models"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert err == b""
    assert process.wait() in (0, 1)


@pytest.mark.slow
def test_the_preset_of_digits_is_said_and_kept(potluck, started):
    folder = started("fedavg")
    config = (folder / "config.toml").read_text()
    assert config.startswith("# preset of digits: method.training.lr 0.01 (default 0.001)")
    assert '[preset]\n"method.training.lr" = 0.001\n' in config
    outcome = potluck(f"run --resume {folder} run.rounds=2")
    assert "after 2 rounds" in outcome.out
    assert "preset of digits: method.training.lr 0.01 (default 0.001)" in outcome.out
    assert "run.rounds" not in outcome.out
