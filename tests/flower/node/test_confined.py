"""A real node's worker opens, imports, writes and starts nothing at a server's word, whatever key that word is in."""

import copy
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from itertools import count

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from potluck.core.ground.access import only
from potluck.core.ground.errors import ConfigError
from potluck.core.tasks.own_metrics import own_metric
from potluck.data.datasets import load
from potluck.data.partition import get_partition
from potluck.experiment.settings.resolve import resolve
from potluck.flower import HELLO
from potluck.flower.node.config import NodeConfig
from potluck.flower.node.confined import environment_of
from potluck.flower.node.resident import delegate
from potluck.methods import get_method, list_methods
from potluck.models import get_model
from potluck.models.initial import file_digest, tensors_in

CODE = """
from pathlib import Path

Path(__file__).with_name("ran").touch()


def thing(*args, **options):
    Path(__file__).with_name("called").touch()
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Files of every kind that a setting might have a node open."""
    place = tmp_path_factory.mktemp("planted")
    (place / "code.py").write_text(CODE)
    (place / "folder").mkdir()
    save_file({"head.weight": torch.zeros(10, 64)}, place / "weights.safetensors")
    images = {"x_train": np.zeros((20, 8, 8), np.uint8), "x_test": np.zeros((20, 8, 8), np.uint8)}
    np.savez(place / "data.npz", **images, y_train=np.arange(20) % 10, y_test=np.arange(20) % 10)
    return place


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """A node's worker in its own process, as `potluck join` starts it, and how a server's messages reach it."""
    with worker_of(NodeConfig(tmp_path_factory.mktemp("n") / "state")) as asked:
        yield asked


@contextmanager
def worker_of(home):
    """The worker of a node, and how a server's messages reach it."""
    home.state.mkdir()
    command = [sys.executable, "-P", "-m", "potluck.flower.node.resident", json.dumps(home.as_config())]
    worker = subprocess.Popen(command, env={**os.environ, **environment_of(home)})
    numbers = count()

    def asked(tree, code=None):
        header = {
            "experiment": tree,
            "run": f"run-{next(numbers)}",
            "client": 0,
            "code": code,
            "classes": {"count": 10, "names": None},
        }
        return delegate({**home.as_config(), "resident": True}, HELLO, (header, b""))[0]

    yield asked
    assert worker.poll() is None, "it ended"
    worker.kill()
    worker.wait()


def values(place):
    """A path in each form in which a setting may name one."""
    code = f"{place / 'code.py'}:thing"
    plain = [
        code,
        str(place / "code.py"),
        *(str(place / name) for name in ("weights.safetensors", "data.npz", "folder")),
    ]
    tables = [{"name": value, "cmd": "touch " + str(place / "ran")} for value in plain[:3]]
    model = [{"name": "vit", "pretrained_path": value} for value in plain]
    model += [{"name": "mlp2", "weights": value} for value in plain[-3:]]
    return [
        *plain,
        *tables,
        *model,
        [code],
        [tables[0]],
        [model[2]],
        [model[-3]],
        str(place / "new"),
        f"~/../../{place}/code.py:thing",
    ]


def keys(tree, before=()):
    """Every key of the tables, and of the tables in them."""
    for key, value in tree.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from keys(value, (*before, key))


def hostile(method, place, turn):
    """For each key of a method's experiment, the experiment with a planted path there."""
    tree = resolve({"federation": {"clients": 2, "train_fraction": 0.1}, "method": {"name": method}})
    told, forms = tree.tree(), values(place)
    for number, path in enumerate([*keys(tree.settings()), ("federation", "no_such"), ("no_such",)]):
        made = copy.deepcopy(told)
        *tables, last = path
        at = made
        for table in tables:
            at = at.setdefault(table, {})
        at[last] = forms[(turn + number) % len(forms)]
        yield path, at[last], made


@pytest.mark.slow
def test_a_node_opens_no_file_that_a_server_names_under_any_key_of_any_method(node, planted, touched):
    taken = 0
    with touched(planted) as found:
        for turn, method in enumerate(list_methods()):
            for path, value, tree in hostile(method, planted, turn):
                answer = node(tree)
                assert "refusal" in answer or path == ("run", "computing", "device"), (path, value, answer)
                taken += 1
    assert taken > 40 * len(list_methods())
    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "save"), [("mine.safetensors", save_file), ("mine.pt", torch.save)])
def test_a_confined_worker_reads_its_owners_weights(tmp_path, name, save):
    (tmp_path / "owners").mkdir()
    place = tmp_path / "owners" / name
    save(get_model("mlp2")(10, (1, 8, 8)).state_dict(), place)
    model = {"name": "mlp2", "weights": file_digest(str(place)), "train_only": ["head"]}
    federation = {"clients": 2, "train_fraction": 0.1, "models": [model], "server_model": model}
    tree = {"federation": {"dataset": "digits", **federation}, "method": {"name": "fedavg"}}
    with worker_of(NodeConfig(tmp_path / "state", weights=place)) as asked:
        answer = asked(tree)
    assert answer["architecture"] == f"mlp2(train_only=['head'], weights={model['weights'][:8]})", answer
    assert set(answer["parameters"]) == {"head.weight", "head.bias"}


ATTEMPTS = """
import os, shutil, subprocess, sys, tempfile
from pathlib import Path

from potluck.flower.node.config import NodeConfig
from potluck.flower.node.confined import Confined, confine

state, owners, others = map(Path, sys.argv[1:])
os.chdir(others)
confine(NodeConfig(state, code=(owners / "mine.py",)))


def refused(attempt):
    try:
        attempt()
    except Confined:
        return True
    return False


print([name for name, attempt in {
    "read": lambda: (others / "secret").read_text(),
    "read by a relative path": lambda: open("secret"),
    "read through its own folder": lambda: (state / ".." / others.name / "secret").read_text(),
    "list": lambda: os.listdir(others),
    "list here": lambda: list(os.scandir()),
    "write": lambda: (others / "new").write_text("x"),
    "open for writing": lambda: os.open(others / "new", os.O_CREAT | os.O_WRONLY),
    "make a folder": lambda: (others / "new").mkdir(),
    "remove": lambda: (others / "secret").unlink(),
    "rename to": lambda: (state / "mine").rename(others / "new"),
    "rename from": lambda: (others / "secret").rename(state / "new"),
    "link": lambda: os.link(others / "secret", state / "new"),
    "link and read": lambda: (state / "way out").symlink_to(others),
    "make executable": lambda: os.chmod(others / "secret", 0o777),
    "start": lambda: subprocess.run(["true"]),
    "start by a shell": lambda: os.system("true"),
    "become": lambda: os.execv("/bin/true", ["true"]),
    "overwrite the owner's code": lambda: (owners / "mine.py").write_text("x"),
}.items() if not refused(attempt)])
sys.path.insert(0, str(owners))
import mine
(state / "mine").mkdir()
(state / "mine" / "kept").write_text((owners / "beside").read_text())
(state / "link").symlink_to(state / "mine" / "kept")
with tempfile.TemporaryDirectory() as scratch:
    (Path(scratch) / "deep").mkdir()
    (Path(scratch) / "deep" / "file").write_text("x")
shutil.rmtree(state / "mine")
import wave, sklearn
print(mine.FOUND)
"""


@pytest.mark.slow
def test_a_confined_worker_reads_what_is_installed_or_its_owners_and_writes_to_its_state_alone(tmp_path):
    state, owners, others = (tmp_path / name for name in ("state", "owners", "others"))
    for folder in (state, owners, others):
        folder.mkdir()
    (others / "secret").write_text("x")
    (owners / "mine.py").write_text("FOUND = 'works'")
    (owners / "beside").write_text("x")
    command = [sys.executable, "-P", "-c", ATTEMPTS, *map(str, (state, owners, others))]
    env = {**os.environ, **environment_of(NodeConfig(state))}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", "works"], done.stderr
    assert [path.name for path in others.iterdir()] == ["secret"]


@pytest.mark.parametrize(
    "opens",
    [
        lambda place: get_method(f"{place / 'code.py'}:thing"),
        lambda place: get_partition(f"{place / 'code.py'}:thing"),
        lambda place: get_model(f"{place / 'code.py'}:thing"),
        lambda place: get_model("vit")(10, (1, 8, 8), patch=4, pretrained_path=str(place / "weights.safetensors")),
        lambda place: tensors_in(str(place / "weights.safetensors")),
        lambda place: file_digest(str(place / "weights.safetensors")),
        lambda place: (
            resolve({"federation": {"models": [{"name": "mlp2", "weights": str(place / "weights.safetensors")}]}})
            .models[0]
            .architecture
        ),
        lambda place: own_metric(f"{place / 'code.py'}:thing"),
        lambda place: load(f"{place / 'code.py'}:thing"),
        lambda place: load(place / "data.npz"),
        lambda place: load(str(place / "folder")),
    ],
)
def test_access_is_asked_by_whatever_makes_code_data_or_weights_of_a_path(planted, touched, opens):
    with touched(planted) as found, only([planted / "other.py"]), pytest.raises(ConfigError, match="owner named"):
        opens(planted)
    assert found == []


def test_access_is_to_what_lies_below_an_owners_folder_and_is_limited_in_the_block_alone(planted, tmp_path):
    with only([planted]):
        assert load(planted / "data.npz").num_classes == 10
        with pytest.raises(ConfigError, match="owner named"):
            load(planted / ".." / tmp_path.name / "data.npz")
    assert load(planted / "data.npz").num_classes == 10
