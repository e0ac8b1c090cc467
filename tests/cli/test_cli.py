import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from potluck.core.families import FAMILIES
from potluck.core.tasks.regression import Regression
from potluck.data.dataset import Description
from potluck.methods import get_method, list_methods

from .conftest import SMALL


def only_run(folder: Path) -> Path:
    (run,) = (folder / "runs").iterdir()
    return run


@pytest.mark.slow
def test_a_run_ends_in_a_table_per_architecture(potluck, tmp_path):
    outcome = potluck(f"run fedmd {SMALL}")
    assert outcome.code == 0, outcome.err
    for expected in ("fedmd on digits after 2 rounds", "cnn2(width=4)", "all clients", "Checkpoint digest:"):
        assert expected in outcome.out
    assert "round 2" in outcome.err
    assert {path.name for path in only_run(tmp_path).iterdir()} == {
        "config.toml",
        "manifest.json",
        "rounds.jsonl",
        "clients.jsonl",
        "costs.jsonl",
        "timings.jsonl",
        "partition.json",
        "classes.json",
        "checkpoint",
        "log.txt",
        "lock",
    }
    manifest = json.loads((only_run(tmp_path) / "manifest.json").read_text())
    assert manifest["status"] == "finished"
    assert manifest["packages"]["torch"]


@pytest.mark.slow
def test_the_same_command_twice_gives_the_same_digests(potluck, tmp_path):
    digests = set()
    for _ in range(2):
        potluck(f"run fedin {SMALL}")
    for run in (tmp_path / "runs").iterdir():
        digests.add(potluck(f"show {run} --digest").out)
    assert len(digests) == 1
    assert digests.pop().startswith("rounds.jsonl ")


@pytest.mark.slow
def test_a_run_can_be_made_longer_and_nothing_else_changed(potluck, tmp_path):
    potluck(f"run fedmd {SMALL}")
    folder = only_run(tmp_path)
    refused = potluck(f"run --resume {folder} method.training.lr=0.5")
    assert refused.code == 2
    assert "only run.rounds may be given" in refused.err
    assert potluck(f"run --resume {folder} run.rounds=3").code == 0
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 3
    potluck(f"run fedmd {SMALL} run.rounds=3 --to whole")
    (whole,) = (tmp_path / "whole").iterdir()
    assert potluck(f"show {folder} --digest").out == potluck(f"show {whole} --digest").out


@pytest.mark.slow
def test_config_toml_of_a_run_is_a_command_of_its_own(potluck, tmp_path):
    potluck(f"run fedin {SMALL}")
    folder = only_run(tmp_path)
    assert potluck(f"run {folder / 'config.toml'} --to again").code == 0
    (again,) = (tmp_path / "again").iterdir()
    assert potluck(f"show {folder} --digest").out == potluck(f"show {again} --digest").out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("run fedinn", "unknown method 'fedinn'; nearest: fedin"),
        ("run fedin federation.clinets=3", "unknown key federation.clinets"),
        ("run fedin method.training.lr=fast", "method.training.lr: expected a finite number, found 'fast'"),
        ("run fedin federation.partition.alpha=-1", "federation.partition.alpha: expected above 0"),
        ("run fedin alpha=-1", "unknown key alpha; nearest: federation.partition.alpha"),
        ("run fedin federation.clients=3000", "3000 clients but only 1438 examples"),
        ("run fedavg method.sharing.scope=model", "it needs one architecture"),
        ("run fedmd", "needs public data"),
        ("run nosuch.toml", "nosuch.toml: no such file"),
        ("run nosuch.py", "no such file"),
        ("run fedin federation.dataset=nosuch.npz", "nosuch.npz: no such file or folder"),
        ("run fedin federation.dataset=scans/", "scans: no such file or folder; expected a folder of images"),
        ("run --resume .", "is not a run"),
        ("run --frobnicate", "`potluck run` has no such option"),
        ("frobnicate", "there is no command 'frobnicate'; nearest:"),
        ("list nonsense", "unknown kind 'nonsense'"),
        ("list methods 'zzz*'", "no methods match 'zzz*'"),
        ("show nothing", "nothing is called 'nothing'"),
        ("report .", "run"),
        ("report . --smooth 0", "--smooth: 0 is not in the range x>=1"),
        ("check fedinn", "unknown method 'fedinn'"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(potluck, tmp_path, line, expected):
    outcome = potluck(line)
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith("potluck: ")
    assert expected in outcome.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("when", ["the network is built", "it is called"])
def test_code_of_the_users_that_ends_the_program_is_one_line(potluck, tmp_path, when):
    leaves = "sys.exit(0)" if when == "the network is built" else "self.forward = lambda x: sys.exit(0)"
    (tmp_path / "own.py").write_text(
        f"import sys\nfrom torch import nn\nclass Net(nn.Linear):\n    def __init__(self, num_classes, input_shape):\n"
        f"        super().__init__(64, num_classes)\n        {leaves}\n"
    )
    done = potluck("run fedavg federation.models=own.py:Net federation.clients=2 run.rounds=1")
    line = f"SystemExit: 0; {tmp_path / 'own.py'}, line 6; raise an error"
    assert (done.code, done.out, done.err) == (
        2,
        "",
        f"potluck: your code ended the program, and the command is not done: {line}\n",
    )


@pytest.mark.slow
def test_a_data_set_that_is_neither_local_nor_reachable_is_one_line(potluck, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("POTLUCK_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    outcome = potluck("run fedin federation.dataset=cifar100")
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert "cifar100" in outcome.err
    assert "POTLUCK_DATA" in outcome.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_flipped_byte_in_a_checkpoint_is_one_line(potluck, tmp_path):
    potluck(f"run fedmd {SMALL}")
    folder = only_run(tmp_path)
    state = next((folder / "checkpoint").glob("*.segment"))
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    outcome = potluck(f"run --resume {folder} run.rounds=3")
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert "is damaged" in outcome.err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_lists_show_every_method_with_its_title(potluck):
    outcome = potluck("list methods")
    lines = outcome.out.splitlines()
    titles = [line for line in lines if not line.startswith("  ")]
    assert titles == [family.title for word, family in FAMILIES.items() if word != "other"]
    assert sorted(line.split()[0] for line in lines if line.startswith("  ")) == list_methods()
    assert max(map(len, lines)) <= 120  # columns of the tests' terminal
    assert "federated averaging" in outcome.out
    for name, networks in (
        ("fml", "with any network"),
        ("fedmd", "with any model"),
        ("fedavg", "with networks of the experiment"),
    ):
        assert f"nodes      {networks}" in potluck(f"list methods {name} --long").out
    everything = potluck("list").out
    for name in ("fedin", "resnet26", "cifar10", "balanced_dirichlet"):
        assert name in everything


@pytest.mark.parametrize("name", ["fedin", "resnet10", "cifar10", "dirichlet"])
def test_show_explains_whatever_has_a_name(potluck, name):
    outcome = potluck(f"show {name}")
    assert outcome.code == 0
    assert len(outcome.out) > 20


def test_show_lists_hyper_parameters_with_defaults(potluck):
    out = potluck("show fedin").out
    assert "method.training.lr" in out
    assert "Departures from the paper" in out
    assert "no robust rule keeps liars out: pairs of features go from client to client" in out


def test_show_fedin_quotes_where_its_two_texts_differ_from_each_other_or_from_potluck(potluck):
    shown = " ".join(potluck("show fedin").out.split())
    for sentence in (
        "We apply 0.8σ to the IN feature inputs and outputs",
        "z ∼ N(0, 0.8σ²)",
        "such information is unnecessary to transmit to the server",
        "is set for the optimum point of the primal problem",
        "no data is received if it is in the initial training process",
        "all the clients",
        "the sampled clients",
    ):
        assert f'"{sentence}"' in shown, sentence


@pytest.mark.slow
def test_report_writes_a_page_a_picture_and_a_summary_and_opens_it_only_when_asked(potluck, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("typer.launch", lambda address: opened.append(address) or 0)
    potluck(f"run fedin {SMALL}")
    folder = only_run(tmp_path)
    outcome = potluck(f"report {folder}")
    assert outcome.code == 0, outcome.err
    assert outcome.out == f"{folder / 'report.html'}\n"
    assert "fedin on digits" in (folder / "report.html").read_text()
    assert opened == []
    assert potluck(f"report {folder} --open").code == 0
    assert opened == [(folder / "report.html").resolve().as_uri()]
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert "cnn2(width=4)" in (folder / "report.md").read_text()
    nowhere = {**os.environ, "HOME": "/dev/null", "MPLCONFIGDIR": "", "XDG_CACHE_HOME": "", "XDG_CONFIG_HOME": ""}
    command = [sys.executable, "-m", "potluck", "report", str(folder)]
    homeless = subprocess.run(command, env=nowhere, capture_output=True, text=True, check=False)
    assert (homeless.returncode, homeless.stderr) == (0, "")


NEW_METHOD = '''"""Twice: FedAvg under another name.

Nobody. 2026.

Symbols
    w         state.weights

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    equals fedavg
    {limit}

Departures from the paper
    None: there is no paper.
"""

from dataclasses import dataclass

from potluck.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Twice(FedAvg):
    """As FedAvg."""
'''


@pytest.mark.slow
def test_a_new_file_is_checked_and_run_with_nothing_else_touched(potluck, tmp_path):
    (tmp_path / "twice.py").write_text(NEW_METHOD.format(limit="descends the gradient"))
    checked = potluck("check twice.py")
    assert checked.code == 0, checked.out
    assert "limit: equals fedavg" in checked.out
    assert potluck(f"run twice.py {SMALL}").code == 0
    potluck(f"run fedavg {SMALL} --to other")
    (theirs,) = (tmp_path / "other").iterdir()
    mine = potluck(f"show {only_run(tmp_path)} --digest").out
    assert mine.splitlines()[-1] == potluck(f"show {theirs} --digest").out.splitlines()[-1]


@pytest.mark.slow
def test_a_method_that_does_not_do_what_it_says_fails_its_check(potluck, tmp_path):
    (tmp_path / "liar.py").write_text(NEW_METHOD.format(limit="reaches the optimum"))
    checked = potluck("check liar.py")
    assert checked.code == 1
    assert "failed  limit: reaches the optimum" in checked.out


@pytest.mark.slow
def test_a_run_killed_at_any_moment_resumes_to_the_same_digest(potluck, tmp_path):
    arguments = ["run", "fedmd", *shlex.split(SMALL), "run.rounds=6", "--to", "killed"]
    command = [sys.executable, "-c", "from potluck.cli import main; main()"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    potluck(f"run fedmd {SMALL} run.rounds=6 --to whole")
    (whole,) = (tmp_path / "whole").iterdir()
    expected = potluck(f"show {whole} --digest").out

    process = subprocess.Popen(
        [*command, *arguments], env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    for kill_after_round in (1, 3, 4):
        while not rounds_written(tmp_path / "killed") >= kill_after_round and process.poll() is None:
            time.sleep(0.005)
        time.sleep(0.03)  # somewhere in the middle of the next round
        process.send_signal(signal.SIGKILL)
        process.wait()
        (folder,) = (tmp_path / "killed").iterdir()
        process = subprocess.Popen(
            [*command, "run", "--resume", str(folder)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    assert process.wait() == 0
    assert potluck(f"show {folder} --digest").out == expected


def rounds_written(parent: Path) -> int:
    files = list(parent.glob("*/rounds.jsonl"))
    return files[0].read_text().count("\n") if files else 0


@pytest.mark.slow
@pytest.mark.every_commit
def test_the_demonstration_teaches_five_networks_to_read_digits(potluck, tmp_path):
    outcome = potluck("run")
    assert outcome.code == 0, outcome.err
    last = json.loads((only_run(tmp_path) / "rounds.jsonl").read_text().splitlines()[-1])
    assert last["accuracy_personal_mean"] > 0.9
    assert len(last["accuracy_personal_by_architecture"]) == 5


@pytest.mark.slow
def test_a_private_run_ends_with_what_it_spent(potluck, tmp_path):
    outcome = potluck(f'run fedin {SMALL} "method.privacy={{clip=1.0, epsilon=2.0, delta=1e-5}}"')
    assert outcome.code == 0, outcome.err
    assert "Privacy: Features: epsilon" in outcome.out
    assert "2 times" in outcome.out
    manifest = json.loads((only_run(tmp_path) / "manifest.json").read_text())
    assert "no epsilon can be stated for the run as a whole" in manifest["privacy"]
    assert "another run of this seed differs" in manifest["computing"]["private_noise"]
    counts = json.loads((only_run(tmp_path) / "releases.json").read_text())
    assert set(map(tuple, counts.values())) == {(2, 0, 2)}  # made, not heard of, asked for


@pytest.mark.slow
def test_slow_bfloat16_is_said_before_the_first_round_and_noted(potluck, tmp_path, monkeypatch):
    monkeypatch.setattr("potluck.engine.numerics.numerics.bf16_time_over_fp32", lambda: 9.04)
    outcome = potluck(f"run local {SMALL} run.computing.precision=bf16")
    assert outcome.code == 0, outcome.err
    first, *others = outcome.err.splitlines()
    assert "in bf16 takes 9.0 times as long as in fp32" in first
    assert any(line.startswith("round 1") for line in others)
    folder = only_run(tmp_path)
    assert json.loads((folder / "manifest.json").read_text())["computing"]["bf16_time_over_fp32"] == 9.04
    log = (folder / "log.txt").read_text()
    assert log.index("takes 9.0 times") < log.index("round 1")


KILLED_ONCE = """
import os
from dataclasses import dataclass
from pathlib import Path

from potluck.core.method import on_client
from potluck.methods.fedavg import FedAvg

first = os.getpid()


@dataclass(frozen=True)
class KilledOnce(FedAvg):
    @on_client
    def local_update(self, client, message):
        if client.id == 1 and os.getpid() != first and Path("once").exists():
            Path("once").unlink()
            os.kill(os.getpid(), 9)
        return (yield from super().local_update(client, message))
"""


@pytest.mark.slow
def test_a_lost_worker_is_a_line_on_the_terminal_and_changes_no_digest(potluck, tmp_path):
    (tmp_path / "killed.py").write_text(KILLED_ONCE)
    (tmp_path / "once").touch()
    disturbed = potluck(f"run killed.py {SMALL} run.executor=workers run.workers=2")
    assert disturbed.code == 0, disturbed.err
    lines = [line for line in disturbed.err.splitlines() if not line.startswith("round")]
    assert re.sub(r"\d+", "N", lines[0], count=1) == (
        "potluck: worker process N, at work for client 1, was lost: its worker process was killed by SIGKILL; is there"
        " enough memory?; its work is done again"
    )
    assert len(lines) == 1
    undisturbed = potluck(f"run killed.py {SMALL} run.executor=workers run.workers=2 --to other")
    assert "Checkpoint digest" in undisturbed.out
    assert digest_of(disturbed) == digest_of(undisturbed)


def digest_of(outcome):
    return re.search(r"Checkpoint digest: (\w+)", outcome.out)[1]


def test_a_warning_of_potlucks_own_is_one_line_before_the_first_round(potluck):
    run = "run heterofl run.rounds=1 federation.clients=2 federation.capacities=[1.0,0.5] federation.train_fraction=0.1"
    outcome = potluck(f"{run} method.levels=[1.0,0.6] run.executor=sequential federation.models=\"['mlp2']\"")
    assert outcome.code == 0
    told, *rounds = outcome.err.splitlines()
    assert told.startswith("potluck: heterofl: client 1: capacity 0.5 lies below the smallest level, 0.6")
    assert [line.split()[0] for line in rounds] == ["round"]


def test_what_concerns_whoever_watches_is_said_on_the_screen(potluck, tmp_path, monkeypatch):
    monkeypatch.setattr("potluck.engine.rounds.exchange.available_bytes", lambda: 1000)
    said = potluck(f"run fedavg {SMALL} run.rounds=1 federation.train_fraction=0.1")
    assert said.code == 0
    assert said.err.startswith(
        "potluck: a reply and the running sums of all replies are in memory together and may take"
    )
    assert said.err.splitlines()[1].startswith("round 1")


def test_a_run_that_diverges_ends_in_a_line(potluck):
    said = potluck(f"run fedavg {SMALL} method.training.lr=1e20 method.training.optimizer=sgd")
    assert said.code == 2
    assert len(said.err.splitlines()) == 1
    assert said.err.startswith("potluck: round 1: client ")


def test_a_run_that_goes_on_without_diverged_clients_says_so_and_counts_what_was_lost(potluck):
    said = potluck(f"run fedavg {SMALL} method.training.lr=1e20 method.training.optimizer=sgd run.on_divergence=drop")
    assert said.code == 0
    assert "round 1 continues without client 0, which diverged" in said.err
    assert "round 1 is lost: no client answered" in said.err
    assert "2 rounds were lost and changed nothing" in said.out


def test_list_methods__says_what_a_method_needs_and_sends_and_how_it_was_verified(potluck):
    listed = potluck("list methods scaffold --long").out
    assert "needs      layers of one name have one shape at all clients" in listed
    assert "exchanges  1 a round: local_update" in listed
    assert "down       weights |w|, buffers |b|, control |w|" in listed
    assert re.search(r"verified   \d+ stated limits", listed)


def test_list_methods__takes_a_method_without_the_sections(potluck, tmp_path, monkeypatch):
    monkeypatch.setattr("potluck.methods.plugins", lambda group: {"odd": Odd()})
    assert re.search(
        r"^  odd .*\n    potluck check .*: the Wire section", potluck("list methods odd --long").out, re.MULTILINE
    )


class Odd:
    """An entry point of a method whose module says nothing."""

    def load(self):
        return type("Plain", (get_method("fedavg"),), {"__module__": "tests"})


def test_show__names_what_a_method_needs(potluck):
    assert "public data" in potluck("list methods fedmd --long").out
    shown = potluck("show heterofl").out
    assert "needs a model whose width can be cut: if not, choose another model" in shown
    assert "needs one architecture for all clients: if not, give federation.models one name" in shown
    assert shown.splitlines()[-1].endswith("/potluck/methods/heterofl.py")


def test_list_and_show__name_the_task_of_a_data_set_without_classes(potluck, monkeypatch):
    described = {
        "digits": Description("digits", (1, 8, 8), 10),
        "svhn": Description("svhn", (4,), 1, task=Regression()),
    }
    monkeypatch.setattr("potluck.cli.catalogue.describe", described.__getitem__)
    assert potluck("show svhn").out.startswith("svhn: inputs (4,), regression, 1 output\n")
    assert potluck("show digits").out.startswith("digits: inputs (1, 8, 8), 10 classes\n")
    assert re.search(r"svhn +inputs \(4,\), regression, 1 output", potluck("list datasets svhn").out)


def test_check_of_a_federation__says_which_methods_can_run_on_it_and_why_others_cannot(potluck, tmp_path):
    (tmp_path / "ours.toml").write_text(
        '[federation]\ndataset = "digits"\nclients = 4\nmodels = ["cnn2", "cnn3"]\n\n[method]\nname = "heterofl"\n'
    )
    outcome = potluck("check ours.toml federation.clients=5")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("5 clients, digits, models cnn2, cnn3\n")
    assert re.search(r"^can run     fedavg$", outcome.out, re.MULTILINE)
    assert re.search(r"^cannot run  heterofl\n +it needs one architecture, but client 0", outcome.out, re.MULTILINE)
    assert re.search(rf"^\d+ of {len(list_methods())} methods can run here", outcome.out, re.MULTILINE)


def test_check_of_a_method__takes_no_overrides(potluck):
    outcome = potluck("check fedavg run.rounds=3")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "a method is checked as it is" in outcome.err
