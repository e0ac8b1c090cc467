"""A miniature of the hub: twenty images in the hub's own layout, and a private cache."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

WriteParquet = Callable[[Path, list[np.ndarray], list[int], str, str], None]


@pytest.fixture(scope="session", autouse=True)
def _imported_once() -> None:
    """Heavy libraries are loaded before the clock of a test runs."""
    import datasets  # noqa: F401
    import sklearn.datasets  # noqa: F401


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that decoded images go to, empty and of this test only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "potluck" / "datasets"


@pytest.fixture
def write_parquet() -> WriteParquet:
    """Writes images as PNG and labels as the hub stores them, under given names of columns."""

    def png(pixels: np.ndarray) -> bytes:
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, format="PNG")
        return buffer.getvalue()

    def write(file: Path, images: list[np.ndarray], labels: list[int], image: str, label: str) -> None:
        import pyarrow
        from pyarrow import parquet

        file.parent.mkdir(parents=True, exist_ok=True)
        rows = [{"bytes": png(pixels), "path": None} for pixels in images]
        column = pyarrow.array(rows, pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())]))
        parquet.write_table(pyarrow.table({image: column, label: pyarrow.array(labels, pyarrow.int64())}), file)

    return write


@pytest.fixture
def photographs() -> np.ndarray:
    """Twenty noisy images (20, 32, 32, 3)."""
    return np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)


@pytest.fixture
def hub(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cache: Path,
    write_parquet: WriteParquet,
    photographs: np.ndarray,
) -> Path:
    """POTLUCK_DATA with a CIFAR-10 of the twenty: twelve for training in two files, eight for testing."""
    folder = tmp_path / "hub" / "uoft-cs" / "cifar10" / "plain_text"
    images, labels = list(photographs), [n % 10 for n in range(20)]
    write_parquet(folder / "train-00000-of-00002.parquet", images[:7], labels[:7], "img", "label")
    write_parquet(folder / "train-00001-of-00002.parquet", images[7:12], labels[7:12], "img", "label")
    write_parquet(folder / "test-00000-of-00001.parquet", images[12:], labels[12:], "img", "label")
    monkeypatch.setenv("POTLUCK_DATA", str(tmp_path / "hub"))
    return tmp_path / "hub"
