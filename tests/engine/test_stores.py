"""Clients' states, in memory and in segments on disk; and files named by their content."""

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.ground.digest import digest
from potluck.core.ground.errors import CheckpointError, StorageError
from potluck.engine.disk import segments
from potluck.engine.disk.files import Disk, using
from potluck.engine.disk.segments import StatesDigest
from potluck.engine.disk.store import ClientStore, ContentFiles, Layout, write_atomically
from potluck.flower.server.elsewhere import KeptElsewhere
from potluck.testing.faults import Faulty

HEADER = 36
FIRST = "states-000001.segment"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def records_of(store, clients):
    return {client: record for client in range(clients) if (record := store.read(client)) is not None}


@pytest.fixture
def small_segments(monkeypatch):
    """A segment is full with a hundred bytes."""
    monkeypatch.setattr(segments, "_LEAST_BYTES", 100)


# Reading and writing


def test_a_client_that_never_left_a_record_has_none(tmp_path):
    assert ClientStore(tmp_path).read(0) is None


def test_the_last_record_is_read(tmp_path):
    store = ClientStore(tmp_path)
    store.write(0, b"old")
    store.write(1, b"other")
    store.write(0, b"new")
    assert (store.read(0), store.read(1)) == (b"new", b"other")
    assert names(tmp_path) == []


def on_disk(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


def test_the_least_recently_used_record_goes_to_disk(tmp_path):
    store = ClientStore(tmp_path, cap_bytes=8)
    store.write(0, b"0000")
    store.write(1, b"1111")
    store.read(0)
    store.write(2, b"2222")
    assert (tmp_path / FIRST).read_bytes()[HEADER:] == b"1111"
    assert [store.read(client) for client in (0, 1, 2)] == [b"0000", b"1111", b"2222"]


def test_writing_counts_as_use(tmp_path):
    store = ClientStore(tmp_path, cap_bytes=8)
    for client in (0, 1, 0, 2):
        store.write(client, bytes([client]) * 4)
    assert (tmp_path / FIRST).read_bytes()[HEADER:] == b"\1\1\1\1"


def test_as_many_go_to_disk_as_must(tmp_path):
    store = ClientStore(tmp_path, cap_bytes=9)
    for client in range(3):
        store.write(client, bytes([client]) * 3)
    assert names(tmp_path) == []
    store.write(3, b"33333")
    assert on_disk(tmp_path) == 2 * (HEADER + 3)


def test_a_record_larger_than_the_cap_is_kept(tmp_path):
    store = ClientStore(tmp_path, cap_bytes=1)
    store.write(0, b"large")
    assert store.read(0) == b"large"
    assert names(tmp_path) == []


def test_a_record_on_disk_is_replaced(tmp_path):
    store = ClientStore(tmp_path, cap_bytes=1)
    store.write(0, b"old")
    store.write(1, b"other")
    store.write(0, b"new")
    assert store.read(0) == b"new"
    other = ClientStore(tmp_path)
    other.restore(store.save())
    assert records_of(other, 2) == {0: b"new", 1: b"other"}


def test_saving_again_writes_only_what_changed(tmp_path):
    store = ClientStore(tmp_path)
    for client in range(100):
        store.write(client, b"%060d" % client)
    first = store.save()
    before = (tmp_path / FIRST).read_bytes()
    store.write(1, b"uno")
    second = store.save()
    after = (tmp_path / FIRST).read_bytes()
    assert after.startswith(before)
    assert len(after) == len(before) + HEADER + 3
    assert (first.segments, second.segments) == ({FIRST: len(before)}, {FIRST: len(after)})
    assert store.save() == second


def test_saved_records_leave_memory_without_being_written_again(tmp_path):
    store = ClientStore(tmp_path, cap_bytes=4)
    store.write(0, b"0000")
    store.save()
    store.write(1, b"1111")
    assert store.read(0) == b"0000"
    assert on_disk(tmp_path) == HEADER + 4


def test_another_store_goes_on_from_what_was_saved(tmp_path):
    first = ClientStore(tmp_path)
    first.write(0, b"zero")
    layout = first.save()
    second = ClientStore(tmp_path)
    second.write(9, b"forgotten")
    second.restore(layout)
    assert second.read(0) == b"zero"
    assert second.read(9) is None
    assert second.save() == layout


def test_a_layout_is_read_as_it_was_written(tmp_path):
    store = ClientStore(tmp_path)
    store.write(0, b"zero")
    store.save()
    mark = store.mark()
    store.write(0, b"nil")
    store.write(1, b"one")
    layout = store.save(mark)
    assert set(layout.before) == {0, 1}
    (tmp_path / "layout").write_bytes(layout.sealed())
    assert Layout.read(tmp_path / "layout") == layout


def test_going_back_to_a_checkpoint_forgets_what_came_after(tmp_path):
    store = ClientStore(tmp_path)
    store.write(0, b"then")
    layout = store.save()
    store.write(0, b"later")
    store.write(1, b"new")
    store.save()
    store.restore(layout)
    assert records_of(store, 2) == {0: b"then"}


def test_what_was_appended_after_a_checkpoint_does_not_count_and_is_not_appended_to(tmp_path):
    store = ClientStore(tmp_path)
    store.write(0, b"zero")
    layout = store.save()
    whole = (tmp_path / FIRST).read_bytes()
    (tmp_path / FIRST).write_bytes(whole + b"half of a rec")
    again = ClientStore(tmp_path)
    again.restore(layout)
    again.write(1, b"one")
    following = again.save()
    assert following.segments == {FIRST: len(whole), "states-000002.segment": HEADER + 3}
    third = ClientStore(tmp_path)
    third.restore(following)
    assert records_of(third, 2) == {0: b"zero", 1: b"one"}


def test_a_store_whose_disk_was_full_goes_on_in_another_segment(tmp_path):
    store = ClientStore(tmp_path)
    store.write(0, b"zero")
    store.save()
    store.write(1, b"one")
    with using(Faulty(0, "full")), pytest.raises(StorageError):
        store.save()
    layout = store.save()
    assert list(layout.segments) == [FIRST, "states-000002.segment"]
    other = ClientStore(tmp_path)
    other.restore(layout)
    assert records_of(other, 2) == {0: b"zero", 1: b"one"}


# Damage


def test_a_flipped_byte_anywhere_is_noticed(tmp_path):
    store = ClientStore(tmp_path)
    store.write(0, b"a record of some bytes")
    layout = store.save()
    path = tmp_path / FIRST
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(bytes(damaged))
        with pytest.raises(
            CheckpointError, match=rf"^{path} is damaged, at byte \d+; the checkpoint cannot be resumed$"
        ):
            ClientStore(tmp_path).restore(layout)


def test_a_byte_that_is_flipped_while_a_run_goes_on_is_noticed_by_who_reads_the_record(tmp_path):
    store = ClientStore(tmp_path, cap_bytes=1)
    store.write(0, b"zero")
    store.write(1, b"one")
    (tmp_path / FIRST).write_bytes((tmp_path / FIRST).read_bytes()[:-1] + b"O")
    with pytest.raises(CheckpointError, match=r"is damaged, at byte 36"):
        store.read(0)


def test_a_flipped_byte_anywhere_in_a_layout_is_noticed(tmp_path):
    store = ClientStore(tmp_path)
    store.write(0, b"a record")
    layout = store.save()
    whole, path = layout.sealed(), tmp_path / "layout"
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(bytes(damaged))
        with pytest.raises(CheckpointError, match="is damaged"):
            Layout.read(path)


@pytest.mark.parametrize("left", [0, 1, 35, 36, 40])
def test_a_cut_file_is_noticed(tmp_path, left):
    store = ClientStore(tmp_path)
    store.write(0, b"a record")
    layout = store.save()
    (tmp_path / FIRST).write_bytes((tmp_path / FIRST).read_bytes()[:left])
    with pytest.raises(CheckpointError, match="is damaged"):
        ClientStore(tmp_path).restore(layout)


def test_a_missing_file_is_noticed_and_nothing_is_changed(tmp_path):
    store = ClientStore(tmp_path)
    store.write(0, b"zero")
    layout = store.save()
    store.write(0, b"later")
    missing = Layout(layout.states, {**layout.segments, "states-000007.segment": 9})
    with pytest.raises(CheckpointError, match=r"states-000007.segment is missing; the checkpoint cannot be resumed$"):
        store.restore(missing)
    assert store.read(0) == b"later"


def test_segments_of_other_states_are_refused(tmp_path):
    store = ClientStore(tmp_path)
    store.write(0, b"zero")
    first = store.save()
    store.write(0, b"one")
    second = store.save()
    with pytest.raises(CheckpointError, match="are not what the checkpoint says"):
        ClientStore(tmp_path).restore(Layout(second.states, first.segments))


def test_a_name_that_no_store_gave_is_refused(tmp_path):
    (tmp_path / "0.safetensors").write_bytes(b"zero")
    with pytest.raises(CheckpointError, match=r"0\.safetensors"):
        ClientStore(tmp_path).restore(Layout("", {"../0.safetensors": 4}))
    with pytest.raises(CheckpointError, match=r"0\.safetensors"):
        ClientStore(tmp_path).adopt({0: "0.safetensors"})


# Which files there are


def test_what_neither_a_checkpoint_nor_a_client_needs_is_deleted(tmp_path, small_segments):
    store = ClientStore(tmp_path)
    for number in range(5):
        store.write(0, b"%0100d" % number)
        store.save()
    (tmp_path / "state.json").touch()
    assert len(names(tmp_path)) == 6
    store.discard_except(["states-000002.segment"])
    assert names(tmp_path) == ["state.json", "states-000002.segment", "states-000005.segment"]


def test_records_that_went_to_disk_are_never_deleted(tmp_path):
    store = ClientStore(tmp_path, cap_bytes=1)
    store.write(0, b"zero")
    store.write(1, b"one")
    store.discard_except([])
    assert store.read(0) == b"zero"


def test_files_are_at_most_half_as_large_again_as_what_they_hold_and_the_last_one(tmp_path, small_segments):
    store = ClientStore(tmp_path)
    for number in range(300):
        store.write(number * 7 % 20, b"%050d" % number)
        store.save()
        store.discard_except([])
        assert on_disk(tmp_path) <= 1.5 * 20 * (HEADER + 50) + 2 * (100 + HEADER + 50)
    assert records_of(store, 20) == {number * 7 % 20: b"%050d" % number for number in range(280, 300)}


def test_a_segment_that_a_checkpoint_needs_stays_as_it_is(tmp_path, small_segments):
    store = ClientStore(tmp_path)
    for client in range(2):
        store.write(client, b"%050d" % client)
    first = store.save()
    for _ in range(5):
        store.write(1, b"%0100d" % 1)
        last = store.save(held=first.segments)
    assert FIRST in last.segments
    store.discard_except([*first.segments, *last.segments])
    other = ClientStore(tmp_path)
    other.restore(first)
    assert records_of(other, 2) == {0: b"%050d" % 0, 1: b"%050d" % 1}
    assert FIRST not in store.save().segments


def test_a_store_without_a_folder_has_files_too_and_goes_without_a_word(tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = ClientStore(cap_bytes=1)
    store.restore(Layout())
    assert names(tmp_path) == []
    store.write(0, b"zero")
    store.write(1, b"one")
    assert store.read(0) == b"zero"
    assert len(names(tmp_path)) == 1
    del store
    gc.collect()
    assert names(tmp_path) == []
    assert not recwarn.list


def test_a_folder_is_made_when_it_is_needed(tmp_path):
    store = ClientStore(tmp_path / "deep" / "clients")
    store.write(0, b"zero")
    assert not (tmp_path / "deep").exists()
    store.save()
    assert store.read(0) == b"zero"


def test_a_round_with_a_thousand_clients_of_twenty_thousand_writes_one_file_once_and_syncs_it_once(tmp_path):
    store, disk = ClientStore(tmp_path), Faulty()
    for client in range(20_000):
        store.write(client, b"x")
    store.save()
    with using(disk):
        for client in range(1000):
            store.write(client * 20, b"y")
        store.save()
    assert disk.steps == [f"append {FIRST}", f"sync {FIRST}"]


def test_records_of_earlier_versions_are_taken_over(tmp_path):
    name = f"0-{digest(b'zero')}.safetensors"
    (tmp_path / name).write_bytes(b"zero")
    store = ClientStore(tmp_path)
    store.adopt({0: name})
    assert store.read(0) == b"zero"
    (tmp_path / name).unlink()
    assert store.read(0) == b"zero"
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        ClientStore(tmp_path).adopt({0: name})
    (tmp_path / name).write_bytes(b"null")
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        ClientStore(tmp_path).adopt({0: name})


# What can be returned to


def test_a_store_is_what_a_table_in_memory_is_whatever_happens_to_it(tmp_path_factory, monkeypatch):
    """Writing, marking, rolling back, saving and going on from what was saved, with files of any size."""
    monkeypatch.setattr(segments, "_LEAST_BYTES", 200)
    sizes = st.integers(0, 60)
    write = st.tuples(st.just("write"), st.integers(0, 4), sizes)
    other = st.sampled_from(["mark", "back", "back", "save", "undoable", "resume", "undo"]).map(
        lambda word: (word, 0, 0)
    )

    @given(st.lists(st.one_of(write, write, other), max_size=60), st.sampled_from([0, 50, 10**6]))
    def check(steps, cap):
        folder = tmp_path_factory.mktemp("store")
        store, table, layout, saved = ClientStore(folder, cap), {}, Layout(), {}
        mark = then = undoable = None
        for number, (word, client, size) in enumerate(steps):
            if word == "write":
                table[client] = b"%d " % number + bytes(size)
                store.write(client, table[client])
            elif word == "mark":
                mark, then = store.mark(), dict(table)
            elif word == "back" and mark is not None:
                store.roll_back(mark)
                table = dict(then)
            elif word in ("save", "undoable"):
                undoable = None if word == "save" or mark is None else dict(then)
                mark = None if undoable is None else mark
                layout, saved = store.save(mark), dict(table)
                store.discard_except(layout.files)
            elif word in ("resume", "undo"):
                store = ClientStore(folder, cap)
                mark, table = store.restore(layout), dict(saved)
                then = undoable
                assert (mark is None) == (undoable is None)
                if word == "undo" and mark is not None:
                    store.roll_back(mark)
                    table = dict(undoable)
            assert records_of(store, 5) == table
        again = ClientStore(folder, cap)
        again.restore(store.save())
        assert records_of(again, 5) == table
        assert again.save().states == states_of(table)

    check()


def states_of(table):
    found = StatesDigest()
    for client, record in table.items():
        found.add(client, bytes.fromhex(digest(record)))
    return found.text if table else ""


def test_the_digest_of_states_is_that_of_who_has_what_and_of_nothing_else(tmp_path):
    one, other, swapped, elsewhere = (
        ClientStore(tmp_path / "1"),
        ClientStore(tmp_path / "2", 0),
        ClientStore(),
        KeptElsewhere(),
    )
    for client, record in ((0, b"old"), (1, b"one"), (0, b"zero")):
        one.write(client, record)
        one.save()
    for client, record in ((1, b"one"), (0, b"zero")):
        other.write(client, record)
        swapped.write(1 - client, record)
        elsewhere.write(client, digest(record).encode())
    found = one.save().states
    assert found == other.save().states == elsewhere.save().states
    assert found != swapped.save().states
    assert ClientStore().save().states == KeptElsewhere().save().states == ""


def test_a_mark_that_nobody_holds_costs_nothing(tmp_path):
    store = ClientStore(tmp_path)
    store.write(0, b"zero")
    store.save()
    store.mark()
    assert len(store._marks) == 0


# Files named by their content


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def crash(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", crash)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path):
    for content in (b"old", b"new"):
        write_atomically(tmp_path / "file", content)
    assert (tmp_path / "file").read_bytes() == b"new"
    assert names(tmp_path) == ["file"]


class Noting(Disk):
    """A disk that notes what is written and what is synced, in which calls."""

    def __init__(self):
        self.written, self.synced = [], []

    def rename(self, source, target):
        super().rename(source, target)
        self.written.append(target.name)

    def sync_all(self, paths):
        super().sync_all(paths)
        self.synced.append([path.name for path in paths])

    def sync(self, path):
        """Of one among others here."""


def named(*contents):
    return {f"part-{digest(content)}.safetensors": content for content in contents}


def put(files, folder, contents):
    for name, content in contents.items():
        files.put(folder / name, content)
    files.sync()


def test_files_are_synced_together_each_once(tmp_path):
    files, disk = ContentFiles(), Noting()
    with using(disk):
        put(files, tmp_path, named(b"0", b"1", b"2", b"3"))
        put(files, tmp_path, named(b"0", b"5", b"6", b"7", b"8"))
    assert [set(names) for names in disk.synced] == [
        set(named(b"0", b"1", b"2", b"3")),
        set(named(b"5", b"6", b"7", b"8")),
    ]
    assert len(disk.written) == 8


def test_what_a_killed_run_left_under_a_files_name_is_not_believed(tmp_path):
    """Without power, a file may have its name and not all of its content; a whole one may not be synced yet."""
    contents = named(b"zero", b"one", b"two", b"three")
    torn, whole = list(contents)[:2]
    (tmp_path / torn).write_bytes(b"ze")
    (tmp_path / whole).write_bytes(b"one")
    files, disk = ContentFiles(), Noting()
    with using(disk):
        put(files, tmp_path, contents)
    assert set(disk.synced[0]) == set(contents)
    assert whole not in disk.written
    assert (tmp_path / torn).read_bytes() == b"zero"


def test_files_that_a_checkpoint_vouches_for_are_not_written_again(tmp_path):
    contents = named(b"zero")
    put(ContentFiles(), tmp_path, contents)
    files, disk = ContentFiles(), Noting()
    files.found(tmp_path / name for name in contents)
    with using(disk):
        put(files, tmp_path, contents)
    assert (disk.written, disk.synced) == ([], [])


def test_writing_takes_as_many_steps_for_each_client_however_many_there_are(tmp_path):
    """The records in memory are not gone through for every one that is written."""

    class Counted(bytes):
        looks = 0

        def __len__(self):
            Counted.looks += 1
            return super().__len__()

    def looks(clients):
        Counted.looks = 0
        store = ClientStore(tmp_path)
        for client in range(clients):
            store.write(client, Counted(b"record"))
        return Counted.looks

    assert looks(400) == 40 * looks(10)


def test_the_cap_counts_what_is_in_memory_now(tmp_path):
    """After replacing, going to disk and going back to a checkpoint."""
    store = ClientStore(tmp_path, cap_bytes=10)
    for size in (9, 1, 5):
        store.write(0, bytes(size))
    layout = store.save()
    store.write(1, b"fifth")
    assert on_disk(tmp_path) == HEADER + 5
    store.restore(layout)
    store.write(2, bytes(10))
    store.write(3, b"")
    assert on_disk(tmp_path) == HEADER + 5
    store.write(3, b"3")
    assert on_disk(tmp_path) == 2 * HEADER + 15
