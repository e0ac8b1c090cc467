"""Checkpoints: what is written, what comes back, and what earlier versions wrote."""

import json
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from potluck import records
from potluck.core.ground.digest import digest
from potluck.core.ground.errors import CheckpointError
from potluck.core.ground.tree import pack
from potluck.engine.disk.files import Disk, using
from potluck.engine.disk.store import ClientStore
from potluck.experiment.folder.checkpoint import Checkpoints, joined, parts_of
from potluck.records import BEST, LAST, Checkpoint, kept_rounds

MODEL = 300_000  # numbers, more than a part has


@dataclass(frozen=True)
class State:
    """The models of all clients, as a method for personal models keeps them, and a few numbers."""

    models: dict
    affinity: torch.Tensor


class Counting(Disk):
    """Counts what is written by file."""

    def __init__(self):
        self.written = {}

    def write(self, path, content):
        self.written[path.name] = len(content)
        super().write(path, content)


def state(clients=10, seed=0):
    rng = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(MODEL, generator=rng) for _ in range(2 * clients)]
    models = {str(i): {"head": drawn[2 * i], "body": drawn[2 * i + 1]} for i in range(clients)}
    return State(models, torch.eye(clients))


def changed(before, client):
    """One client's model moved, and nothing else."""
    moved = {name: tensor + 1 for name, tensor in before.models[client].items()}
    return State({**before.models, client: moved}, before.affinity)


def saved(checkpoints, number, of):
    disk = Counting()
    with using(disk):
        checkpoint = checkpoints.save(number, of, None, None, {}, {})
    return checkpoint, disk.written


@pytest.fixture
def checkpoints(tmp_path):
    found = Checkpoints(tmp_path, ClientStore(tmp_path))
    found.prepare()
    return found


def test_save_writes_only_what_changed_since_the_checkpoint_before(checkpoints):
    first = state()
    _, whole = saved(checkpoints, 1, first)
    assert sum(whole.values()) > 10 * 2 * MODEL * 4
    _, second = saved(checkpoints, 2, changed(first, "3"))
    model = 2 * MODEL * 4
    assert model < sum(second.values()) < 1.01 * model + 2**14
    _, nothing = saved(checkpoints, 3, changed(first, "3"))
    assert set(nothing) == {f"{LAST}.tmp"}


def test_save_deletes_the_parts_that_no_checkpoint_needs(checkpoints, tmp_path):
    first = state(clients=3)
    saved(checkpoints, 1, first)
    last, _ = saved(checkpoints, 2, changed(first, "1"))
    assert {path.name for path in tmp_path.glob("*.safetensors")} == last.files
    restored = Checkpoints(tmp_path, ClientStore(tmp_path)).restore(last, first)
    assert pack(vars(restored)) == pack(vars(changed(first, "1")))


def test_save_keeps_the_rounds_that_it_is_told_to_and_each_of_their_parts_once(checkpoints, tmp_path):
    first = state(clients=3)
    checkpoints.save(1, first, None, None, {}, {}, keep=True)
    checkpoints.save(2, changed(first, "1"), None, None, {}, {})
    again = Checkpoints(tmp_path, ClientStore(tmp_path))  # as a run that is resumed
    last = again.save(3, changed(first, "2"), None, None, {}, {}, keep=True)
    again.save(4, changed(first, "0"), None, None, {}, {})
    assert list(kept_rounds(tmp_path)) == [1, 3]
    kept = [Checkpoint.read(path) for path in kept_rounds(tmp_path).values()]
    assert kept[1] == last
    files = kept[0].files | kept[1].files | Checkpoint.read(tmp_path / LAST).files
    assert {path.name for path in tmp_path.glob("*.safetensors")} == files
    assert kept[0].files & kept[1].files  # those of the clients that have not moved
    restored = Checkpoints(tmp_path, ClientStore(tmp_path)).restore(kept[0], first)
    assert pack(vars(restored)) == pack(vars(first))


def test_save_forgets_kept_rounds_that_the_last_checkpoint_did_not_speak_of(checkpoints, tmp_path):
    checkpoints.save(1, state(clients=1), None, None, {}, {}, keep=True)
    checkpoints.save(2, state(clients=1, seed=2), None, None, {}, {}, keep=True)
    place = kept_rounds(tmp_path)[1]
    place.write_text("{")
    again = Checkpoints(tmp_path, ClientStore(tmp_path))
    last = again.save(2, state(clients=1, seed=3), None, None, {}, {})
    assert list(kept_rounds(tmp_path)) == []
    assert place.with_name(f"{place.name}.damaged-1").exists()
    assert {path.name for path in tmp_path.glob("*.safetensors")} == last.files


def test_save_mends_a_part_that_a_killed_run_left_torn(checkpoints, tmp_path):
    last, _ = saved(checkpoints, 1, state(clients=2))
    place = tmp_path / last.state[0]
    place.write_bytes(place.read_bytes()[:100])
    again = Checkpoints(tmp_path, ClientStore(tmp_path))
    saved(again, 1, state(clients=2))
    again.restore(Checkpoint.read(tmp_path / LAST), state(clients=2))


def test_a_damaged_part_is_named(checkpoints, tmp_path):
    last, _ = saved(checkpoints, 1, state(clients=2))
    place = tmp_path / last.state[1]
    content = bytearray(place.read_bytes())
    content[-1] ^= 1
    place.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{place.name} is damaged"):
        checkpoints.restore(last, state(clients=2))


def test_a_state_in_one_file_as_the_second_schema_has_it_is_restored(tmp_path):
    of = state(clients=2)
    content = pack(vars(of))
    name = f"state-{digest(content)}.safetensors"
    (tmp_path / name).write_bytes(content)
    older = Checkpoint(4, (name,), {}, None, None, {}, {})
    (tmp_path / LAST).write_bytes(older.sealed())
    checkpoints = Checkpoints(tmp_path, ClientStore(tmp_path))
    last = Checkpoint.read(tmp_path / LAST)
    assert pack(vars(checkpoints.restore(last, of))) == content
    following, _ = saved(checkpoints, 5, of)
    assert not (tmp_path / name).exists()
    assert pack(vars(checkpoints.restore(following, of))) == content


def test_sealed_of_the_second_schema_is_read_with_the_digest_that_it_had(tmp_path):
    content = {"schema": 2, "round": 3, "state": "state-00.safetensors", "clients": {"1": "1-00.safetensors"}}
    content |= {"best_validation": None, "best_round": None, "records": {}, "config": {}}
    (tmp_path / BEST).write_text(json.dumps({**content, "seal": records._seal(content)}))
    found = Checkpoint.read(tmp_path / BEST)
    assert found.state == ("state-00.safetensors",)
    assert found.digest == digest(json.dumps([3, "state-00.safetensors", [[1, "1-00.safetensors"]]]).encode())


sizes = st.integers(0, 200_000)
trees = st.recursive(
    st.one_of(st.integers(), st.text(max_size=5), sizes.map(lambda n: torch.arange(n, dtype=torch.uint8) % 7)),
    lambda inner: st.dictionaries(st.one_of(st.text(max_size=3), st.integers(0, 5)), inner, max_size=6),
    max_leaves=12,
)


@given(st.dictionaries(st.text(min_size=1, max_size=4), trees, max_size=5))
def test_joined_gives_back_what_parts_of_divided_in_the_same_order(tree):
    assert pack(joined(list(parts_of(tree)))) == pack(tree)
