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
from potluck.records import BEST, LAST, Checkpoint, Undo, kept_rounds

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


def held(store):
    """What clients have in a store."""
    return {client: record for client in range(20) if (record := store.read(client)) is not None}


def records_of(folder, checkpoint, of):
    store = ClientStore(folder)
    Checkpoints(folder, store).restore(checkpoint, of)
    return held(store)


def test_states_of_clients_in_a_file_each_as_the_third_schema_has_them_are_taken_over(tmp_path):
    of, name, file = state(clients=1), "part-{}.safetensors", f"7-{digest(b'seven')}.safetensors"
    contents = {name.format(digest(pack(part))): pack(part) for part in parts_of(vars(of))} | {file: b"seven"}
    for part, content in contents.items():
        (tmp_path / part).write_bytes(content)
    parts = [part for part in contents if part != file]
    older = {"schema": 3, "round": 4, "state": parts, "clients": {"7": file}, "best_validation": None}
    older |= {"best_round": None, "records": {}, "config": {}, "undo": {"state": [], "clients": {}, "outlier": {}}}
    (tmp_path / LAST).write_text(json.dumps({**older, "seal": records._seal(older)}))
    found = Checkpoint.read(tmp_path / LAST)
    assert found.digest == digest(json.dumps([4, parts, [[7, file]]]).encode())
    store = ClientStore(tmp_path)
    checkpoints = Checkpoints(tmp_path, store)
    checkpoints.restore(found, of)
    assert checkpoints.mark is None
    assert store.read(7) == b"seven"
    last, _ = saved(checkpoints, 5, of)
    assert not (tmp_path / file).exists()
    assert records_of(tmp_path, last, of) == {7: b"seven"}


@pytest.mark.slow
def test_each_checkpoint_has_the_states_of_its_round_however_often_files_were_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("potluck.engine.disk.segments._LEAST_BYTES", 200)
    store, of, tables = ClientStore(tmp_path), state(clients=1), {}
    checkpoints = Checkpoints(tmp_path, store)
    checkpoints.prepare()
    for number in range(1, 41):
        if number == 20:  # as a run that is resumed
            store = ClientStore(tmp_path)
            checkpoints = Checkpoints(tmp_path, store)
            checkpoints.restore(Checkpoint.read(tmp_path / LAST), of)
        for client in {number % 7, number % 5, 19}:
            store.write(client, b"%d " % number * 10)
        tables[number] = held(store)
        best = number // 13 * 13 or None
        checkpoints.save(number, of, None, best, {}, {}, keep=number % 10 == 0)
        present = {BEST: best, LAST: number, **{f"round-{kept:06}.json": kept for kept in range(10, number + 1, 10)}}
        for name, at in present.items():
            if at is not None:
                assert records_of(tmp_path, Checkpoint.read(tmp_path / name), of) == tables[at]
        layouts = {int(path.stem.split("-")[1]) for path in tmp_path.glob("states-*.json")}
        assert layouts == {at for at in present.values() if at}
    assert len(list(tmp_path.glob("*.segment"))) < 30


def test_what_a_round_is_undone_with_lasts_until_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr("potluck.engine.disk.segments._LEAST_BYTES", 100)
    store, of = ClientStore(tmp_path), state(clients=1)
    checkpoints = Checkpoints(tmp_path, store)
    checkpoints.prepare()
    for number in range(1, 9):
        before = held(store)
        mark = store.mark()
        for client in range(1 + number % 3):
            store.write(client, b"%d " % number * 30)
        checkpoints.save(number, of, None, None, {}, {}, Undo((), {}), mark=mark)
        resumed = ClientStore(tmp_path)
        again = Checkpoints(tmp_path, resumed)
        again.restore(Checkpoint.read(tmp_path / LAST), of)
        resumed.roll_back(again.mark)
        assert held(resumed) == before


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
