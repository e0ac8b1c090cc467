import io
import struct
import unicodedata
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from potluck.core.ground.errors import DataError
from potluck.data.dataset import Description
from potluck.data.datasets import describe, load

RNG = np.random.default_rng(0)


def write_images(root: Path, part: str, images: dict[str, list[np.ndarray]], suffix: str = ".png") -> None:
    for name, group in images.items():
        (root / part / name).mkdir(parents=True, exist_ok=True)
        for number, pixels in enumerate(group):
            Image.fromarray(pixels).save(root / part / name / f"{number}{suffix}")


def pixels(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes, dogs and cats: three and two images to train on, one and none to test on."""
    root = tmp_path / "pets"
    write_images(root, "train", {"dog": [pixels(6, 5, 3) for _ in range(3)], "cat": [pixels(6, 5, 3)] * 2})
    write_images(root, "test", {"dog": [pixels(6, 5, 3)]}, suffix=".PNG")
    return root


def test_folder(folder: Path) -> None:
    (folder / "train" / ".hidden").mkdir()
    (folder / "train" / "dog" / "notes.txt").write_text("no image")
    pets = load(folder)
    assert describe(str(folder)) == pets.description == Description("pets", (3, 6, 5), 2, ("cat", "dog"))
    assert pets.train_targets.tolist() == [0, 0, 1, 1, 1], "cat is before dog"
    assert pets.test_targets.tolist() == [1]
    expected = np.asarray(Image.open(folder / "train" / "dog" / "0.png")).transpose(2, 0, 1)
    assert torch.equal(pets.train_inputs[2], torch.from_numpy(expected.copy()))
    inputs, _, _ = pets.train.batch(torch.arange(5))
    torch.testing.assert_close(inputs, pets.train_inputs / 255)


def test_relative_folder_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert load(".").name == describe(".").name == "pets"


def test_grey_folder_has_one_channel(tmp_path: Path) -> None:
    write_images(tmp_path, "train", {"a": [pixels(4, 4)], "b": [pixels(4, 4)]})
    write_images(tmp_path, "test", {"b": [pixels(4, 4)]})
    assert load(tmp_path).input_shape == describe(tmp_path).input_shape == (1, 4, 4)


def test_grey_among_coloured_becomes_rgb(folder: Path) -> None:
    write_images(folder, "test", {"cat": [pixels(6, 5)]})
    pets = load(folder)
    assert pets.test_inputs.shape == (2, 3, 6, 5)
    assert torch.equal(pets.test_inputs[0, 0], pets.test_inputs[0, 2])


def test_folder_without_a_part(folder: Path) -> None:
    (folder / "test").rename(folder / "validation")
    expected = "pets: no folder test; expected train/<class>/<image> and test/<class>/<image>, found train, validation$"
    with pytest.raises(DataError, match=expected):
        load(folder)


def test_folder_of_classes_without_parts_is_told_what_it_holds(tmp_path: Path) -> None:
    for name in ("ant", "bee", "cat", "dog", "emu"):
        (tmp_path / name).mkdir()
    with pytest.raises(DataError, match=r"no folder train; .*, found ant, bee, cat, \.\.\.$"):
        describe(tmp_path)


def test_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match="train: no images; expected train/<class>"):
        load(tmp_path)
    with pytest.raises(DataError, match="train: no images; expected train/<class>"):
        describe(tmp_path)


def test_empty_class(folder: Path) -> None:
    (folder / "train" / "bird").mkdir()
    with pytest.raises(DataError, match="train/bird: no images; add some or remove the folder"):
        load(folder)


def test_class_without_training_images(folder: Path) -> None:
    write_images(folder, "test", {"bird": [pixels(6, 5, 3)]})
    with pytest.raises(DataError, match="test/bird: a class without training images"):
        load(folder)


def test_mixed_sizes(folder: Path) -> None:
    write_images(folder, "train", {"horse": [pixels(7, 5, 3)]})
    with pytest.raises(DataError, match=r"pets/train: inputs of different shapes, \(6, 5, 3\) and \(7, 5, 3\)"):
        load(folder)


def test_sizes_of_the_parts_differ(folder: Path) -> None:
    write_images(folder, "test", {"dog": [pixels(7, 5, 3)]}, suffix=".PNG")
    with pytest.raises(DataError, match=r"shape \(3, 6, 5\) but test inputs \(3, 7, 5\)"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 60])
def test_unreadable_image(folder: Path, keep: int) -> None:
    file = folder / "train" / "dog" / "1.png"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"dog/1.png: cannot be read as an image"):
        load(folder)


def write_png_header(file: Path, height: int, width: int) -> None:
    """A file that says that it is an image of this size; its pixels are missing."""
    header = struct.pack(">4sIIBBBBB", b"IHDR", width, height, 8, 0, 0, 0, 0)
    chunks = [struct.pack(">I", 13), header, struct.pack(">I", zlib.crc32(header)), struct.pack(">I4s", 64, b"IDAT")]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize("read", [load, describe])
@pytest.mark.parametrize("size", [30_000, 10_000])
def test_an_image_that_bursts_is_not_decoded(tmp_path: Path, read, size: int) -> None:
    """PIL refuses the first itself, and warns of the second."""
    for part in ("train", "test"):
        write_png_header(tmp_path / part / "a" / "0.png", size, size)
    with pytest.raises(DataError, match=r"train/a/0\.png: more than 89,478,485 pixels; scale it down"):
        read(tmp_path)


@pytest.mark.usefixtures("nothing_is_read")
def test_a_folder_of_more_than_the_machine_holds_is_not_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.core.ground.machine.available_bytes", lambda: 6 * 6 * 5 * 3 - 1)
    with pytest.raises(DataError, match=r"pets: its images: at least 0\.0 GiB of memory needed"):
        load(folder)


@pytest.mark.usefixtures("nothing_is_read")
def test_mixed_sizes_are_found_before_anything_is_decoded(folder: Path) -> None:
    write_images(folder, "test", {"cat": [pixels(7, 5, 3)]})
    with pytest.raises(DataError, match=r"pets/test: inputs of different shapes, \(6, 5, 3\) and \(7, 5, 3\)"):
        load(folder)


def test_classes_are_spelt_alike_whatever_composed_their_letters(tmp_path: Path) -> None:
    for part in ("train", "test"):
        write_images(tmp_path, part, {unicodedata.normalize("NFD", "hibou grand-duc d'Écosse"): [pixels(4, 4)]})
    assert load(tmp_path).classes == describe(tmp_path).classes == ("hibou grand-duc d'Écosse",)


def write_arrays(path: Path, **changes: np.ndarray | None) -> Path:
    arrays = {
        "x_train": pixels(6, 4, 5, 3),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": pixels(2, 4, 5, 3),
        "y_test": np.array([2, 0]),
    } | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})  # type: ignore[arg-type]
    return path


def test_npz_round_trip(tmp_path: Path) -> None:
    images = pixels(6, 4, 5, 3)
    path = write_arrays(tmp_path / "mine.npz", x_train=images)
    mine = load(path)
    assert describe(path) == mine.description == Description("mine", (3, 4, 5), 3)
    assert torch.equal(mine.train_inputs, torch.from_numpy(images.transpose(0, 3, 1, 2).copy()))
    assert mine.train_targets.tolist() == [0, 1, 2, 0, 1, 2]
    assert mine.test.batch(torch.tensor([0]))[0].max() <= 1


@pytest.mark.parametrize(
    ("stored", "expected"),
    [((4, 5), (1, 4, 5)), ((4, 5, 1), (1, 4, 5)), ((3, 4, 5), (3, 4, 5)), ((4, 5, 4), (4, 4, 5))],
)
def test_npz_layouts(tmp_path: Path, stored: tuple[int, ...], expected: tuple[int, ...]) -> None:
    path = write_arrays(tmp_path / "mine.npz", x_train=pixels(6, *stored), x_test=pixels(2, *stored))
    assert load(path).input_shape == expected


def test_npz_features(tmp_path: Path) -> None:
    features = RNG.normal(size=(8, 7))
    labels = np.array([[0], [1], [2], [0], [1], [2]], dtype=np.uint8)
    path = write_arrays(tmp_path / "mine.npz", x_train=features[:6], x_test=features[6:], y_train=labels)
    mine = load(path)
    assert mine.train_inputs.dtype == torch.float32
    assert mine.preprocess is None
    assert mine.train_targets.tolist() == [0, 1, 2, 0, 1, 2]
    torch.testing.assert_close(mine.test.batch(torch.tensor([1]))[0][0], torch.from_numpy(features[7]).float())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"y_test": None, "x_test": None},
            "no array x_test, y_test; expected x_train, .* found x_train, y_train",
        ),
        ({"y_train": np.zeros(6)}, "y_train: expected whole-number labels, found float64"),
        ({"y_train": np.zeros(5, dtype=int)}, "6 inputs but 5 labels; give each input one label"),
        ({"y_test": np.array([0, 3])}, "test part: label 3; expected labels from 0 to 2"),
        ({"y_train": np.array([0, 1, 2, 0, 1, -1])}, "training part: label -1"),
        (
            {"x_train": np.zeros((6, 4), dtype=np.int64)},
            "x_train: expected uint8 images or float features, found int64",
        ),
        (
            {"x_train": np.zeros((6, 4), dtype=np.uint8)},
            r"x_train: expected uint8 images .* found shape \(6, 4\)",
        ),
        ({"x_train": pixels(0, 4, 5), "y_train": np.zeros(0, dtype=int)}, "training part: no examples"),
        ({"y_test": np.array([{}, {}])}, "not an .npz file of plain arrays"),
        (
            {"x_train": np.zeros((6, 1, 4, 5), dtype=np.float32), "x_test": pixels(2, 4, 5)},
            "x_train is float32 but x_test uint8; store both in one type",
        ),
        (
            {"x_train": np.array([[0.0], [0.0], [np.nan], [0.0], [-np.inf], [1e300]]), "x_test": np.zeros((2, 1))},
            "training part: 3 of 6 inputs hold NaN or infinity, the first in row 2; leave them out or fill them in",
        ),
    ],
)
def test_npz_errors(tmp_path: Path, changes: dict[str, np.ndarray | None], message: str) -> None:
    path = write_arrays(tmp_path / "mine.npz", **changes)
    with pytest.raises(DataError, match=message):
        load(path)


def write_header(path: Path, name: str, shape: tuple[int, ...], content: bytes) -> Path:
    """An archive, one of whose arrays has a made-up header."""
    write_arrays(path)
    with zipfile.ZipFile(path) as archive:
        members = {member: archive.read(member) for member in archive.namelist()}
    header = io.BytesIO()
    described = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, described)
    with zipfile.ZipFile(path, "w") as archive:
        for member, stored in (members | {f"{name}.npy": header.getvalue() + content}).items():
            archive.writestr(member, stored)
    return path


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """No array may be read, and no image decoded: both take memory."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("read")

    monkeypatch.setattr("numpy.load", fail)
    monkeypatch.setattr("PIL.Image.Image.convert", fail)


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize("read", [load, describe])
def test_npz_whose_header_claims_more_than_it_holds_is_not_read(tmp_path: Path, read) -> None:
    path = write_header(tmp_path / "mine.npz", "x_train", (62_500_000_000, 8, 8), b"x" * 64)
    message = r"x_train says that it is uint8 of shape \(62500000000, 8, 8\), 4,000,000,000,000 bytes, and holds 64;"
    with pytest.raises(DataError, match=message):
        read(path)


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize("read", [load, describe])
def test_npz_of_more_than_the_machine_holds_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read) -> None:
    path = write_arrays(tmp_path / "mine.npz")
    monkeypatch.setattr("potluck.core.ground.machine.available_bytes", lambda: 100)
    with pytest.raises(DataError, match=r"mine.npz: its arrays: at least 0.0 GiB of memory needed, 0.0 GiB left"):
        read(path)


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize("read", [load, describe])
@pytest.mark.parametrize("name", ["x_train", "y_train", "x_test", "y_test"])
def test_npz_arrays_have_dimensions(tmp_path: Path, read, name: str) -> None:
    path = write_arrays(tmp_path / "mine.npz", **{name: np.uint8(3)})
    with pytest.raises(DataError, match=f"mine.npz: {name} is a single value; expected an array with a row an example"):
        read(path)


def test_npz_is_described_without_its_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read, whole = write_arrays(tmp_path / "mine.npz"), [], np.lib.npyio.NpzFile.__getitem__

    def noted(archive: np.lib.npyio.NpzFile, name: str) -> np.ndarray:
        read.append(name)
        return whole(archive, name)

    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", noted)
    assert describe(path) == Description("mine", (3, 4, 5), 3)
    assert read == ["y_train"]


def test_npz_names_its_classes(tmp_path: Path) -> None:
    path = write_arrays(
        tmp_path / "mine.npz", classes=np.array(["owl", "cat", "dog", unicodedata.normalize("NFD", "é")])
    )
    assert load(path).description == describe(path) == Description("mine", (3, 4, 5), 4, ("owl", "cat", "dog", "é"))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (np.array(["cat", "dog"]), "training part: label 2; expected labels from 0 to 1"),
        (np.array(["cat", "dog", "cat"]), "two classes are called 'cat'"),
        (np.array([1, 2, 3]), r"classes: expected text of shape \(classes,\), found int64 \(3,\)"),
        (np.array([["cat", "dog", "owl"]]), r"found <U3 \(1, 3\)"),
    ],
)
def test_npz_names_that_are_none(tmp_path: Path, names: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(write_arrays(tmp_path / "mine.npz", classes=names))


def test_npz_labels_that_are_no_labels(tmp_path: Path) -> None:
    path = write_arrays(tmp_path / "mine.npz", y_train=np.array([0, 1, 2, 0, 1, 10**9]))
    for read in (load, describe):
        with pytest.raises(DataError, match="mine: 1000000001 classes; expected 1 to 1,000,000"):
            read(path)


def test_labels_that_begin_with_1_make_no_class_more(tmp_path: Path) -> None:
    labels = np.array([1, 2, 3, 1, 2, 3])
    path = write_arrays(tmp_path / "mine.npz", y_train=labels)
    for read in (load, describe):
        with pytest.raises(DataError, match=r"y_train: the smallest label is 1, .* subtract 1 .* an array 'classes'"):
            read(path)
    path = write_arrays(tmp_path / "named.npz", y_train=labels, classes=np.array(["none", "cat", "dog", "owl"]))
    assert load(path).num_classes == 4


def damaged(whole: bytes) -> Iterator[bytes]:
    rng = np.random.default_rng(0)
    for _ in range(120):
        content = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            content[rng.integers(len(content))] = rng.integers(256)
        yield bytes(content[: rng.integers(len(content))] if rng.integers(4) == 0 else content)


@pytest.mark.filterwarnings("ignore")  # of numpy and zipfile, on what they then refuse
def test_npz_with_any_damage_is_read_or_refused(tmp_path: Path) -> None:
    path, refused = write_arrays(tmp_path / "mine.npz"), 0
    for content in damaged(path.read_bytes()):
        path.write_bytes(content)
        try:
            load(path)
        except DataError:
            refused += 1
    assert refused > 40


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 cut off"])
def test_no_npz(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"mine.npz: not an .npz file of plain arrays"):
        load(path)


def test_a_single_array_is_no_npz(tmp_path: Path) -> None:
    np.save(tmp_path / "mine.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"mine.npy: not an .npz file"):
        load(tmp_path / "mine.npy")
