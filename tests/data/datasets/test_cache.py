import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from potluck.core.ground.errors import DataError
from potluck.data.datasets._cache import cache_folder, cached

INPUTS = torch.arange(24, dtype=torch.uint8).view(6, 1, 2, 2)
TARGETS = torch.arange(6)


def decode() -> tuple[Tensor, Tensor]:
    return INPUTS.clone(), TARGETS.clone()


def never() -> tuple[Tensor, Tensor]:
    raise AssertionError("decoded although it was stored")


def assert_stored(path: Path) -> None:
    inputs, targets = cached(path, never)
    assert torch.equal(inputs, INPUTS)
    assert torch.equal(targets, TARGETS)
    assert list(path.parent.iterdir()) == [path], "nothing unfinished is left behind"


def test_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "potluck"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "potluck"


def test_second_time_is_a_hit(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "images.safetensors"
    inputs, targets = cached(path, decode)
    assert torch.equal(inputs, INPUTS)
    assert torch.equal(targets, TARGETS)
    assert_stored(path)


@pytest.mark.parametrize("damage", ["cut off", "altered", "no archive", "another archive", "empty"])
def test_damaged_file_is_decoded_again(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "images.safetensors"
    cached(path, decode)
    whole = path.read_bytes()
    if damage == "another archive":
        save_file({"inputs": INPUTS}, path)
    else:
        altered = whole[:-1] + bytes([whole[-1] ^ 1])
        path.write_bytes({"cut off": whole[:-9], "altered": altered, "no archive": b"x" * 99, "empty": b""}[damage])
    with caplog.at_level(logging.WARNING):
        inputs, targets = cached(path, decode)
    assert torch.equal(inputs, INPUTS)
    assert torch.equal(targets, TARGETS)
    assert "is damaged" in caplog.text
    assert path.read_bytes() == whole
    assert_stored(path)


def test_two_that_decode_at_once(tmp_path: Path) -> None:
    path = tmp_path / "images.safetensors"
    both_decoding = threading.Barrier(2)

    def decode_together() -> tuple[Tensor, Tensor]:
        both_decoding.wait(timeout=30)
        return decode()

    results: list[tuple[Tensor, Tensor]] = []
    threads = [threading.Thread(target=lambda: results.append(cached(path, decode_together))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert all(torch.equal(inputs, INPUTS) for inputs, _ in results)
    assert_stored(path)


def test_failing_to_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "images.safetensors"
    path.write_bytes(b"old and damaged")

    def disk_full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", disk_full)
    with pytest.raises(DataError, match=r"cannot be stored here \(disk full\); set XDG_CACHE_HOME"):
        cached(path, decode)
    assert path.read_bytes() == b"old and damaged"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="this system has no limit on the size of files")
def test_a_file_that_cannot_be_written_whole_is_told(tmp_path: Path) -> None:
    code = (
        "import resource, torch\nfrom pathlib import Path\nfrom potluck.data.datasets._cache import cached\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        f"cached(Path({str(tmp_path / 'images.safetensors')!r}), lambda: (torch.zeros(5000), torch.zeros(1)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("potluck.core.ground.errors.DataError: "), done.stderr
    assert "decoded images cannot be stored here" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_reader_keeps_what_it_read_when_the_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "images.safetensors"
    cached(path, decode)
    inputs, _ = cached(path, never)
    path.unlink()
    cached(path, lambda: (INPUTS + 1, TARGETS))
    assert torch.equal(inputs, INPUTS)
