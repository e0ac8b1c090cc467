"""Hub data sets from a miniature local copy; nothing here opens a connection beyond this machine."""

import importlib
import io
import os
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import datasets as hugging_face
import huggingface_hub
import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from potluck.core.ground.errors import DataError
from potluck.core.ground.rng import fold_in
from potluck.data.datasets import describe, load
from potluck.data.transforms import Augmentation, Cutout, Normalise, RandomCrop, RandomFlip

CIFAR = "uoft-cs/cifar10/plain_text"
WriteParquet = Callable[[Path, list[np.ndarray], list[int], str, str], None]


@pytest.fixture
def no_decoding(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called, it forbids to read any source from then on."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise AssertionError("read the source")

    return lambda: monkeypatch.setattr(hugging_face, "load_dataset", fail)


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch, no_decoding: Callable[[], None]) -> None:
    """The hub cannot be asked; neither may `load_dataset` be, which would wait."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise ConnectionError("Name or service not known\nand more on a second line")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", fail)
    no_decoding()


@pytest.mark.usefixtures("hub")
def test_decoding_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    load("cifar10")
    assert set(threading.enumerate()) <= before  # beside another thread no workers would be forked


@pytest.mark.usefixtures("hub")
def test_local_copy_is_read_in_order(photographs: np.ndarray) -> None:
    cifar = load("cifar10")
    expected = torch.from_numpy(photographs).permute(0, 3, 1, 2)
    assert torch.equal(torch.cat([cifar.train_inputs, cifar.test_inputs]), expected)
    assert cifar.train_targets.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert cifar.test_targets.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert cifar.description == describe("cifar10")


@pytest.mark.usefixtures("hub")
def test_second_time_comes_from_the_cache(cache: Path, no_decoding: Callable[[], None]) -> None:
    first = load("cifar10")
    assert sorted(file.name.split("--")[3] for file in cache.iterdir()) == ["test", "train"]
    no_decoding()
    assert load("cifar10").checksum == first.checksum


def test_changed_source_is_decoded_again(
    hub: Path, cache: Path, photographs: np.ndarray, write_parquet: WriteParquet
) -> None:
    first = load("cifar10")
    write_parquet(hub / CIFAR / "train-00001-of-00002.parquet", list(photographs[:4]), [0] * 4, "img", "label")
    second = load("cifar10")
    assert len(second.train) == 11
    assert torch.equal(second.test_inputs, first.test_inputs)
    assert len(list(cache.iterdir())) == 3


def test_a_source_changed_at_equal_size_and_time_is_decoded_again(
    hub: Path, cache: Path, photographs: np.ndarray, write_parquet: WriteParquet
) -> None:
    load("cifar10")
    file = hub / CIFAR / "test-00000-of-00001.parquet"
    before, renumbered = file.stat(), [9, 8, 7, 6, 5, 4, 3, 2]
    write_parquet(file, list(photographs[12:]), renumbered, "img", "label")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert load("cifar10").test_targets.tolist() == renumbered
    assert len(list(cache.iterdir())) == 3


@pytest.mark.usefixtures("hub")
def test_no_second_copy_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face.config, "HF_DATASETS_CACHE", tmp_path / "arrow")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    load("cifar10")
    assert not (tmp_path / "arrow").exists()
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.usefixtures("hub")
def test_augmentation_is_a_choice() -> None:
    standard, none = load("cifar10"), load("cifar10", augmentation="none")
    positions = torch.arange(12)
    plain, _, _ = standard.train.batch(positions)
    assert torch.equal(none.train.batch(positions)[0], plain)
    assert torch.equal(none.train.batch(positions, fold_in(0))[0], plain)
    assert not torch.equal(standard.train.batch(positions, fold_in(0))[0], plain)


@pytest.mark.usefixtures("hub")
def test_named_steps_are_drawn_as_those_that_were_once_called_the_papers() -> None:
    """Crop by 4, flip and Cutout of 16 of 32 pixels, bit for bit."""
    named, positions = load("cifar10", augmentation=["crop", "flip", "cutout"]), torch.arange(12)
    pixels, rng = named.train_inputs, fold_in(0).generator()
    normalise = Normalise(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
    expected = Cutout(16)(normalise(RandomFlip()(RandomCrop(4)(pixels, rng), rng)), rng)
    assert torch.equal(named.train.batch(positions, fold_in(0)).inputs, expected)
    assert torch.equal(named.test.batch(positions[:8]).inputs, normalise(named.test_inputs))


@pytest.mark.usefixtures("hub")
def test_the_standard_of_cifar_10_is_crop_and_flip_without_cutout() -> None:
    positions, key = torch.arange(12), fold_in(0)
    standard, named = load("cifar10"), load("cifar10", augmentation=["crop", "flip"])
    assert torch.equal(standard.train.batch(positions, key).inputs, named.train.batch(positions, key).inputs)


@pytest.mark.parametrize(
    ("name", "augmentations"),
    [
        ("mnist", []),
        ("fashion_mnist", []),
        ("cifar10", [RandomCrop(4), RandomFlip()]),
        ("cifar100", [RandomCrop(4), RandomFlip()]),
        ("svhn", [Cutout(16)]),
        ("cinic10", [RandomCrop(4), RandomFlip(), Cutout(16)]),
        ("tiny_imagenet", []),
    ],
)
def test_standard_augmentations(name: str, augmentations: list[Augmentation]) -> None:
    source = importlib.import_module(f"potluck.data.datasets.{name}")._SOURCE
    steps = source.preprocess.before + source.preprocess.after
    images = torch.rand(20, *source.image_shape, generator=fold_in(1).generator())
    assert len(steps) == len(augmentations)
    for step, expected in zip(steps, augmentations, strict=True):
        assert torch.equal(step(images, fold_in(0).generator()), expected(images, fold_in(0).generator()))


@pytest.mark.usefixtures("cache")
def test_grey_images_among_coloured_ones_become_rgb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_parquet: WriteParquet
) -> None:
    grey = np.arange(64 * 64, dtype=np.uint8).reshape(64, 64)
    coloured = np.stack([grey, grey // 2, grey // 3], axis=2)
    folder = tmp_path / "hub" / "zh-plus" / "tiny-imagenet" / "data"
    for split in ("train", "valid"):
        write_parquet(folder / f"{split}-00000-of-00001.parquet", [grey, coloured], [0, 199], "image", "label")
    monkeypatch.setenv("POTLUCK_DATA", str(tmp_path / "hub"))
    tiny = load("tiny_imagenet")
    assert torch.equal(tiny.test_inputs[0], torch.from_numpy(grey).expand(3, 64, 64))
    assert torch.equal(tiny.test_inputs[1], torch.from_numpy(coloured).permute(2, 0, 1))
    assert tiny.num_classes == 200


@pytest.mark.usefixtures("cache")
def test_only_the_configuration_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_parquet: WriteParquet, photographs: np.ndarray
) -> None:
    folder = tmp_path / "hub" / "ufldl-stanford" / "svhn"
    for split in ("train", "test", "extra"):
        file = f"{split}-00000-of-00001.parquet"
        write_parquet(folder / "cropped_digits" / file, list(photographs[:3]), [0, 9, 1], "image", "label")
        write_parquet(folder / "full_numbers" / file, list(photographs), [0] * 20, "image", "digits")
    monkeypatch.setenv("POTLUCK_DATA", str(tmp_path / "hub"))
    assert len(load("svhn").train) == 3


def test_local_copy_without_a_split(hub: Path) -> None:
    (hub / CIFAR / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(DataError, match=r"cifar10: no file test-\*.parquet in .*plain_text \(from POTLUCK_DATA\)"):
        load("cifar10")


@pytest.mark.parametrize(
    ("shapes", "labels", "column", "message"),
    [
        ([(32, 32, 3)], [0], "picture", r"no column img; found picture, label"),
        ([(32, 32, 3), (31, 32, 3)], [0, 1], "img", r"row 1: image of shape \(3, 31, 32\); expected \(3, 32, 32\)"),
        ([(28, 28, 3)], [0], "img", r"row 0: image of shape \(3, 28, 28\); expected \(3, 32, 32\)"),
        ([(32, 32, 3)], [-1], "img", r"label -1; expected labels from 0 to 9"),
    ],
)
def test_local_copy_of_something_else(
    hub: Path, write_parquet: WriteParquet, shapes: list[Any], labels: list[int], column: str, message: str
) -> None:
    images = [np.zeros(shape, dtype=np.uint8) for shape in shapes]
    write_parquet(hub / CIFAR / "test-00000-of-00001.parquet", images, labels, column, "label")
    with pytest.raises(DataError, match=f"^cifar10: .*{message}"):
        load("cifar10")


def png(*shape: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.zeros(shape, dtype=np.uint8)).save(buffer, format="PNG")
    return buffer.getvalue()


def large_png() -> bytes:
    """Cut off after the size, 30,000 x 30,000."""
    size = struct.pack(">II", 30_000, 30_000)
    header = b"IHDR" + size + bytes([8, 0, 0, 0, 0])
    return png(1, 1)[:8] + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header)) + b"\0\0\0\x09IDAT"


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pyarrow.array([1, 2]), r"column img holds Value\('int64'\); expected images"),
        (pyarrow.array([[1, 2], [3]]), r"column img holds List\(.*\); expected images"),
        (pyarrow.array(["secret.png", "/etc/passwd"]), r"column img holds Value\('string'\); expected images"),
        (pyarrow.array([{"a": 1}] * 2), "column img holds .*; expected images"),
        (pyarrow.array([png(32, 32, 3), b"none"]), "row 1: cannot be read as an image"),
        (pyarrow.array([png(32, 32, 3), None]), "row 1: no image; expected its bytes in column img"),
        (pyarrow.array([png(32, 32, 3), large_png()]), "row 1: more than 89,478,485 pixels"),
    ],
)
def test_a_column_that_is_not_of_images_is_told(hub: Path, column: Any, message: str) -> None:
    table = pyarrow.table({"img": column, "label": pyarrow.array([0, 1])})
    parquet.write_table(table, hub / CIFAR / "test-00000-of-00001.parquet")
    with pytest.raises(DataError, match=f"^cifar10: .*{message}"):
        load("cifar10")


@pytest.mark.usefixtures("cache")
def test_a_row_that_names_a_file_of_this_machine_does_not_open_it(hub: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(png(32, 32, 3))
    rows = [{"bytes": None, "path": str(tmp_path / "secret.png")}]
    column = pyarrow.array(rows, pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]))
    table = pyarrow.table({"img": column, "label": pyarrow.array([0])})
    parquet.write_table(table, hub / CIFAR / "test-00000-of-00001.parquet")
    with pytest.raises(DataError, match="row 0: no image"):
        load("cifar10")


def test_damaged_local_copy(hub: Path, cache: Path) -> None:
    (hub / CIFAR / "test-00000-of-00001.parquet").write_bytes(b"PAR1 no longer")
    found = r"^cifar10: .*test-00000-of-00001.parquet: cannot be read \(.*\); download it again$"
    with pytest.raises(DataError, match=found):
        load("cifar10")
    assert len(list(cache.iterdir())) == 1


@pytest.mark.usefixtures("cache", "unreachable")
def test_neither_local_nor_reachable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("POTLUCK_DATA", raising=False)
    with pytest.raises(DataError) as caught:
        load("cifar100")
    assert str(caught.value) == (
        "cifar100: uoft-cs/cifar100 is not on this machine (POTLUCK_DATA is unset) "
        "and is not available from the Hugging Face hub (ConnectionError: Name or service not known); "
        "connect to the hub, or let POTLUCK_DATA name a folder that holds uoft-cs/cifar100/cifar100/"
        "train-*.parquet, or set HF_HUB_OFFLINE=1 if it is in the Hugging Face cache"
    )
    monkeypatch.setenv("POTLUCK_DATA", str(tmp_path))
    with pytest.raises(DataError, match=f"cinic10: flwrlabs/cinic10 is not in POTLUCK_DATA={tmp_path} and is not"):
        load("cinic10")


@pytest.mark.usefixtures("cache")
def test_what_the_hub_gives_is_decoded_and_stored(
    monkeypatch: pytest.MonkeyPatch, photographs: np.ndarray, no_decoding: Callable[[], None]
) -> None:
    asked: list[object] = []

    def from_hub(repository: str, configuration: str, split: str) -> hugging_face.Dataset:
        asked.append((repository, configuration, split))
        assert hugging_face.are_progress_bars_disabled()
        features = hugging_face.Features(img=hugging_face.Image(), fine_label=hugging_face.Value("int64"))
        rows = {"img": list(photographs[:3]), "fine_label": [5, 99, 0]}
        return hugging_face.Dataset.from_dict(rows, features)

    monkeypatch.delenv("POTLUCK_DATA", raising=False)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    monkeypatch.setattr(hugging_face, "load_dataset", from_hub)
    bars_hidden = hugging_face.are_progress_bars_disabled()
    loaded = load("cifar100")
    assert hugging_face.are_progress_bars_disabled() == bars_hidden
    assert asked == [("uoft-cs/cifar100", "cifar100", "train"), ("uoft-cs/cifar100", "cifar100", "test")]
    assert torch.equal(loaded.train_inputs, torch.from_numpy(photographs[:3]).permute(0, 3, 1, 2))
    assert loaded.train_targets.tolist() == [5, 99, 0]
    no_decoding()
    assert load("cifar100").checksum == loaded.checksum


@pytest.mark.slow
@pytest.mark.parametrize("offline", [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}])
def test_a_hub_that_does_not_answer_is_told_soon(tmp_path: Path, offline: dict[str, str]) -> None:
    """With the real libraries, whose own retries last half a minute; port 9 of this machine refuses."""
    code = "from potluck.data.datasets import load; load('cifar100')"
    environment = {name: value for name, value in os.environ.items() if name != "POTLUCK_DATA"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "HF_HOME": str(tmp_path), **offline}
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert time.monotonic() - start < 20
    assert "DataError: cifar100: uoft-cs/cifar100 is not on this machine (POTLUCK_DATA is unset)" in done.stderr
