import gc

import pytest

from potluck.core.ground.digest import digest
from potluck.core.ground.errors import CheckpointError
from potluck.engine.disk.files import Disk, using
from potluck.engine.disk.store import ClientStore, write_atomically


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def name_of(client, record):
    return f"{client}-{digest(record)}.safetensors"


def test_a_client_that_never_left_a_record_has_none(tmp_path):
    assert ClientStore(tmp_path).read(0) is None


def test_the_last_record_is_read(tmp_path):
    store = ClientStore(tmp_path)
    store.write(0, b"old")
    store.write(1, b"other")
    store.write(0, b"new")
    assert (store.read(0), store.read(1)) == (b"new", b"other")
    assert names(tmp_path) == []


def test_the_least_recently_used_record_goes_to_disk(tmp_path):
    store = ClientStore(tmp_path, cap_bytes=8)
    store.write(0, b"0000")
    store.write(1, b"1111")
    store.read(0)
    store.write(2, b"2222")
    assert names(tmp_path) == [name_of(1, b"1111")]
    assert [store.read(client) for client in (0, 1, 2)] == [b"0000", b"1111", b"2222"]


def test_writing_counts_as_use(tmp_path):
    store = ClientStore(tmp_path, cap_bytes=8)
    for client in (0, 1, 0, 2):
        store.write(client, bytes([client]) * 4)
    assert names(tmp_path) == [name_of(1, b"\1\1\1\1")]


def test_as_many_go_to_disk_as_must(tmp_path):
    store = ClientStore(tmp_path, cap_bytes=9)
    for client in range(3):
        store.write(client, bytes([client]) * 3)
    assert names(tmp_path) == []
    store.write(3, b"33333")
    assert names(tmp_path) == sorted([name_of(0, b"\0\0\0"), name_of(1, b"\1\1\1")])


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
    assert store.save()[0] == name_of(0, b"new")


def test_files_are_named_by_their_content(tmp_path):
    store = ClientStore(tmp_path)
    store.write(2, b"two")
    store.write(1, b"one")
    files = store.save()
    assert files == {1: name_of(1, b"one"), 2: name_of(2, b"two")}
    assert list(files) == [1, 2]
    assert (tmp_path / files[1]).read_bytes() == b"one"
    assert names(tmp_path) == sorted(files.values())


def test_saving_again_writes_only_what_changed(tmp_path):
    store = ClientStore(tmp_path)
    store.write(0, b"zero")
    store.write(1, b"one")
    first = store.save()
    times = {name: (tmp_path / name).stat().st_mtime_ns for name in first.values()}
    store.write(1, b"uno")
    second = store.save()
    assert second[0] == first[0]
    assert (tmp_path / first[0]).stat().st_mtime_ns == times[first[0]]
    assert (tmp_path / first[1]).read_bytes() == b"one"


def test_saved_records_are_still_spilled(tmp_path):
    store = ClientStore(tmp_path, cap_bytes=4)
    store.write(0, b"0000")
    store.save()
    store.write(1, b"1111")
    assert store.read(0) == b"0000"
    assert names(tmp_path) == [name_of(0, b"0000")]


def test_another_store_goes_on_from_what_was_saved(tmp_path):
    first = ClientStore(tmp_path)
    first.write(0, b"zero")
    files = first.save()
    second = ClientStore(tmp_path)
    second.write(9, b"forgotten")
    second.restore(files)
    assert second.read(0) == b"zero"
    assert second.read(9) is None
    assert second.save() == files


def test_going_back_to_a_checkpoint_forgets_what_came_after(tmp_path):
    store = ClientStore(tmp_path)
    store.write(0, b"then")
    files = store.save()
    store.write(0, b"later")
    store.restore(files)
    assert store.read(0) == b"then"


def test_a_flipped_byte_anywhere_is_noticed(tmp_path):
    store = ClientStore(tmp_path)
    store.write(0, b"a record of some bytes")
    files = store.save()
    path = tmp_path / files[0]
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(bytes(damaged))
        with pytest.raises(CheckpointError, match=f"^{path} is damaged; the checkpoint cannot be resumed$"):
            ClientStore(tmp_path).restore(files)


@pytest.mark.parametrize("content", [b"", b"a recor", b"a record."])
def test_a_cut_or_longer_file_is_noticed(tmp_path, content):
    store = ClientStore(tmp_path)
    store.write(0, b"a record")
    files = store.save()
    (tmp_path / files[0]).write_bytes(content)
    with pytest.raises(CheckpointError, match="is damaged"):
        ClientStore(tmp_path).restore(files)


def test_a_missing_file_is_noticed_and_nothing_is_changed(tmp_path):
    store = ClientStore(tmp_path)
    store.write(0, b"zero")
    files = {**store.save(), 1: name_of(1, b"one")}
    store.write(0, b"later")
    with pytest.raises(CheckpointError, match=rf"{name_of(1, b'one')} is missing; the checkpoint cannot be resumed$"):
        store.restore(files)
    assert store.read(0) == b"later"


def test_a_name_that_no_store_gave_is_refused(tmp_path):
    (tmp_path / "0.safetensors").write_bytes(b"zero")
    with pytest.raises(CheckpointError, match=r"0\.safetensors"):
        ClientStore(tmp_path).restore({0: "0.safetensors"})


def test_what_neither_a_checkpoint_nor_a_client_needs_is_deleted(tmp_path):
    store = ClientStore(tmp_path)
    for record in (b"first", b"second", b"third"):
        store.write(0, record)
        store.save()
    (tmp_path / "state.json").touch()
    store.discard_except([name_of(0, b"first")])
    assert names(tmp_path) == sorted([name_of(0, b"first"), name_of(0, b"third"), "state.json"])


def test_spilled_records_are_never_deleted(tmp_path):
    store = ClientStore(tmp_path, cap_bytes=1)
    store.write(0, b"zero")
    store.write(1, b"one")
    store.discard_except([])
    assert store.read(0) == b"zero"


def test_a_store_without_a_folder_spills_too_and_goes_without_a_word(tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = ClientStore(cap_bytes=1)
    store.write(0, b"zero")
    store.write(1, b"one")
    assert store.read(0) == b"zero"
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


def test_records_of_a_round_are_synced_together_each_once_also_those_that_were_spilled(tmp_path):
    store, disk = ClientStore(tmp_path, cap_bytes=12), Noting()
    with using(disk):
        for client in range(6):
            store.write(client, b"%04d" % client)
        assert (len(disk.written), disk.synced) == (3, [])
        files = store.save()
        assert [sorted(names) for names in disk.synced] == [sorted(files.values())]
        for client in range(5):
            store.write(client, b"%04d" % (10 + client))
        changed = store.save()
        assert sorted(disk.synced[1]) == sorted(set(changed.values()) - set(files.values()))
    assert len(disk.written) == 11


def test_what_a_killed_run_left_under_a_records_name_is_not_believed(tmp_path):
    """Without power, a file may have its name and not all of its content; a whole one may not be synced yet."""
    torn, whole = name_of(0, b"zero"), name_of(1, b"one")
    (tmp_path / torn).write_bytes(b"ze")
    (tmp_path / whole).write_bytes(b"one")
    store, disk = ClientStore(tmp_path), Noting()
    for client, record in enumerate([b"zero", b"one", b"two", b"three"]):
        store.write(client, record)
    with using(disk):
        files = store.save()
    assert sorted(disk.synced[0]) == sorted(files.values())
    assert whole not in disk.written
    ClientStore(tmp_path).restore(files)


def test_records_that_a_checkpoint_vouches_for_are_not_written_again(tmp_path):
    first = ClientStore(tmp_path)
    first.write(0, b"zero")
    files = first.save()
    second, disk = ClientStore(tmp_path), Noting()
    second.restore(files)
    with using(disk):
        second.write(0, b"zero")
        assert second.save() == files
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
    """After replacing, spilling and going back to a checkpoint."""
    store = ClientStore(tmp_path, cap_bytes=10)
    for size in (9, 1, 5):
        store.write(0, bytes(size))
    files = store.save()
    store.write(1, b"fifth")
    assert names(tmp_path) == [*files.values()]
    store.restore(files)
    store.write(2, bytes(10))
    store.write(3, b"")
    assert names(tmp_path) == [*files.values()]
    store.write(3, b"3")
    assert names(tmp_path) == sorted([*files.values(), name_of(2, bytes(10))])
