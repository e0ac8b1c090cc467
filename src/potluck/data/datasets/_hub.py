"""Data sets of the Hugging Face hub, from a local copy or from the hub, decoded once.

If the environment variable POTLUCK_DATA names a folder that holds `<owner>/<name>`, the parquet files in it
are read and no network is needed; otherwise the hub is asked, and `datasets` keeps its own copy in the
Hugging Face cache.
"""

import os
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import blake2b, file_digest
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from potluck.core.ground.errors import DataError
from potluck.data.dataset import Dataset, Description
from potluck.data.datasets._cache import cache_folder, cached
from potluck.data.datasets._images import as_inputs, as_targets, opened, stacked
from potluck.data.transforms import Pipeline

HUB_VERSION = 1
"""Part of a cache file's name; increase it when decoding changes."""

_PATIENCE_SECONDS = 10


@dataclass(frozen=True)
class HubSource:
    """An image classification data set of the hub.

    Attributes:
        name: its name in Potluck.
        repository: `<owner>/<name>` on the hub.
        configuration: the configuration, which is also the folder of its parquet files; None if there is only one.
        image_shape: (channels, height, width) of a stored image; one channel is grey, three are RGB.
        num_classes: labels lie in 0 .. num_classes - 1.
        preprocess: the usual preprocessing of images, with augmentation.
        image: name of the column with images.
        label: name of the column with labels.
        test_split: the split that is tested on.
        classes: names of the classes in order; None if they are known by number.
    """

    name: str
    repository: str
    configuration: str | None
    image_shape: tuple[int, int, int]
    num_classes: int
    preprocess: Pipeline
    image: str = "image"
    label: str = "label"
    test_split: str = "test"
    classes: tuple[str, ...] | None = None

    def describe(self) -> Description:
        """The description, without reading any data."""
        prepared = self.preprocess(torch.zeros(1, *self.image_shape, dtype=torch.uint8), None)
        return Description(self.name, tuple(prepared.shape[1:]), self.num_classes, self.classes)

    def load(self, augmentation: str) -> Dataset:
        """Both splits, from the cache of decoded images if possible.

        Raises:
            DataError: the data set is neither local nor available from the hub, or is invalid.
        """
        train_inputs, train_targets = self._split("train")
        test_inputs, test_targets = self._split(self.test_split)
        return Dataset(
            name=self.name,
            train_inputs=train_inputs,
            train_targets=train_targets,
            test_inputs=test_inputs,
            test_targets=test_targets,
            num_classes=self.num_classes,
            preprocess=self.preprocess if augmentation == "standard" else self.preprocess.without_augmentation(),
            classes=self.classes,
        )

    def _split(self, split: str) -> tuple[Tensor, Tensor]:
        """Images (n, channels, height, width), uint8, and targets (n,) of one split."""
        files = self._local_files(split)
        # A changed local copy is decoded again, since its files' content is part of the key.
        origin = [(file.name, _content_digest(file)) for file in files] or "hub"
        key = (
            HUB_VERSION,
            self.repository,
            self.configuration,
            split,
            self.image,
            self.label,
            self._mode,
            origin,
        )
        stem = "--".join([*self.repository.split("/"), self.configuration or "default", split])
        digest = blake2b(repr(key).encode(), digest_size=8).hexdigest()
        path = cache_folder() / "datasets" / f"{stem}--{digest}.safetensors"
        return cached(path, lambda: self._decode(split, files))

    @property
    def _mode(self) -> str:
        """The PIL mode to which images are converted; a few of Tiny-ImageNet's are grey."""
        return "L" if self.image_shape[0] == 1 else "RGB"

    def _local_files(self, split: str) -> list[Path]:
        """The split's parquet files under POTLUCK_DATA; none if the data set is not in that folder."""
        named = os.environ.get("POTLUCK_DATA")
        folder = Path(named or "").expanduser() / self.repository
        if not named or not folder.is_dir():
            return []
        if self.configuration and (folder / self.configuration).is_dir():
            folder /= self.configuration
        files = sorted(folder.rglob(f"{split}-*.parquet"))
        if not files:
            raise DataError(
                f"{self.name}: no file {split}-*.parquet in {folder} (from POTLUCK_DATA); "
                f"complete this copy of {self.repository}, or remove it to use the hub"
            )
        return files

    def _decode(self, split: str, files: list[Path]) -> tuple[Tensor, Tensor]:
        where = f"{self.name}: {', '.join(map(str, files)) or f'{self.repository} from the hub'}"
        with TemporaryDirectory() as scratch, _without_progress_bars():
            try:
                rows = _open_local(files, split, scratch) if files else self._open_hub(split)
                return self._read_rows(rows, where)
            except (DataError, MemoryError):
                raise
            except Exception as error:  # any error that damage causes in pyarrow and datasets
                raise DataError(f"{where}: cannot be read ({_one_line(error)}); download it again") from error

    def _open_hub(self, split: str) -> Any:
        """The split as `datasets` gives it, downloaded if need be into the Hugging Face cache.

        The Hugging Face cache is kept, since other tools share it, and with HF_HUB_OFFLINE=1 it works without a
        network.
        """
        import datasets
        import huggingface_hub

        try:
            if not huggingface_hub.constants.HF_HUB_OFFLINE:
                # Without a network load_dataset tries for half a minute; this request fails at once.
                huggingface_hub.HfApi().dataset_info(self.repository, timeout=_PATIENCE_SECONDS)
            return datasets.load_dataset(self.repository, self.configuration, split=split)
        # An error of datasets, of huggingface_hub, or of whichever HTTP library their versions use.
        except Exception as error:
            raise self._unreachable(split, error) from error

    def _unreachable(self, split: str, error: Exception) -> DataError:
        named = os.environ.get("POTLUCK_DATA")
        looked = f"not in POTLUCK_DATA={named}" if named else "not on this machine (POTLUCK_DATA is unset)"
        folder = "/".join(filter(None, [self.repository, self.configuration]))
        return DataError(
            f"{self.name}: {self.repository} is {looked} and is not available from the Hugging Face hub "
            f"({_one_line(error)}); connect to the hub, or let POTLUCK_DATA name a folder that holds "
            f"{folder}/{split}-*.parquet, or set HF_HUB_OFFLINE=1 if it is in the Hugging Face cache"
        )

    def _read_rows(self, rows: Any, where: str) -> tuple[Tensor, Tensor]:
        """Decode all images; `rows` is a data set of the `datasets` library, streamed or not."""
        import datasets

        missing = {self.image, self.label} - set(rows.column_names)
        if missing:
            raise DataError(f"{where}: no column {', '.join(sorted(missing))}; found {', '.join(rows.column_names)}")
        if not _may_hold_images(kind := rows.features[self.image]):
            raise DataError(f"{where}: column {self.image} holds {kind}; expected images")
        images: list[np.ndarray] = []
        labels: list[int] = []
        for number, row in enumerate(rows.cast_column(self.image, datasets.Image(decode=False))):
            images.append(self._pixels(row[self.image], f"{where}: row {number}"))
            labels.append(row[self.label])
        return as_inputs(stacked(images, where), where), as_targets(np.array(labels), where)

    def _pixels(self, stored: Mapping[str, Any] | None, where: str) -> np.ndarray:
        """One image, decoded here so that only its own bytes are opened, and only if its size is right."""
        from PIL import ImageOps

        content = None if stored is None else stored.get("bytes")
        if not content:
            raise DataError(f"{where}: no image; expected its bytes in column {self.image}")
        with opened(BytesIO(content), where) as image:
            ImageOps.exif_transpose(image, in_place=True)
            pixels = np.asarray(image if image.mode == self._mode else image.convert(self._mode))
        found = (self.image_shape[0], *pixels.shape[:2])
        if found != self.image_shape:
            raise DataError(f"{where}: image of shape {found}; expected {self.image_shape}")
        return pixels


def _may_hold_images(kind: Any) -> bool:
    """Whether a column's type in `datasets` is an image type, or a struct with an image's bytes."""
    import datasets

    inner = kind.get("bytes") if isinstance(kind, dict) else kind
    return isinstance(kind, datasets.Image) or getattr(inner, "dtype", None) in ("binary", "large_binary")


def _content_digest(file: Path) -> str:
    """Hex digest of a file's bytes."""
    try:
        with file.open("rb") as content:
            return file_digest(content, blake2b).hexdigest()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({_one_line(error)}); download it again") from error


def _open_local(files: list[Path], split: str, scratch: str) -> Any:
    """Parquet files as a streamed data set.

    Streamed, because otherwise `datasets` first writes all rows as Arrow files, a second copy that is never used again;
    the little that it still writes goes to the `scratch` folder.
    """
    import datasets

    paths = {split: [str(file) for file in files]}
    return datasets.load_dataset("parquet", data_files=paths, split=split, streaming=True, cache_dir=scratch)


@contextmanager
def _without_progress_bars() -> Generator[None]:
    """Silence the progress bars of `datasets` and of the hub's downloads inside the block.

    Even a silent bar starts a thread that remains, and workers are not forked beside a second thread.
    """
    import datasets.utils
    import huggingface_hub.utils
    from tqdm.std import tqdm

    with ExitStack() as stack:
        stack.callback(setattr, tqdm, "monitor_interval", tqdm.monitor_interval)
        tqdm.monitor_interval = 0
        for library in (datasets.utils, huggingface_hub.utils):
            if not library.are_progress_bars_disabled():
                library.disable_progress_bars()
                stack.callback(library.enable_progress_bars)
        yield


def _one_line(error: Exception) -> str:
    """Type and first line of an error."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
