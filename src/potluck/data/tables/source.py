"""A table as a data set: a CSV or Parquet file, or a folder with `train` and `test` of one."""

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from potluck.core.ground.errors import DataError, explained
from potluck.core.ground.machine import check_fits
from potluck.core.ground.rng import Key
from potluck.core.tasks.named import CLASSIFICATION
from potluck.core.tasks.task import Task
from potluck.data.dataset import Dataset, Description
from potluck.data.tables.columns import Columns
from potluck.data.tables.reading import ColumnReading, Table
from potluck.data.tables.tokenizer import text_of

C = TypeVar("C", bound=Columns | None)
Rows: TypeAlias = Table | tuple[Table, Table]

SUFFIXES = (".csv", ".parquet")
_UNSAID = Columns()
_TIMES_LARGER = 8  # a table in memory, and what is made of it, than as a CSV file


class _Parts(NamedTuple):
    train: Table
    test: Table


def is_table(path: Path) -> bool:
    """Whether a path is a table: a file by its suffix, or a folder by its `train`."""
    return path.suffix.lower() in SUFFIXES or (path.is_dir() and _part_in(path, "train") is not None)


@dataclass(frozen=True)
class TableSource:
    """A file of rows, or a folder that has one for training and one for tests.

    Rows of a file alone are divided: of each owner's, a share drawn at random is for tests, the same at every time.
    """

    path: Path
    columns: Columns = _UNSAID
    task: Task = CLASSIFICATION

    def describe(self) -> Description:
        """Reads everything."""
        return self.load("none").description

    def load(self, augmentation: str) -> Dataset:
        """All rows; they are not augmented.

        Raises:
            DataError: the file cannot be read, a column is missing or does not suit, or rows that belong together are
                in both parts.
        """
        return _loaded(self.path, _state(self.path), ByText.of(self.columns), self.task)

    def rows(self) -> Rows:
        """As they are stored; raises as `load` does if they cannot be read."""
        return _rows(self.path)

    def reading(self) -> ColumnReading:
        """How other tables are to be read, to be read alike."""
        return _reading_at(self.path, _state(self.path), ByText.of(self.columns), self.task)


@dataclass(frozen=True)
class ByText(Generic[C]):
    """Columns, or None, as a key of a cache, by their text, since they may hold tables.

    Attributes:
        text: of the columns, and the content of their tokenizer.
    """

    columns: C = field(compare=False)
    text: str

    @classmethod
    def of(cls, columns: C) -> "ByText[C]":
        """The key of these columns."""
        file = None if columns is None else columns.tokenizer
        return cls(columns, f"{columns!r} {'' if file is None else text_of(file)}")


def _state(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Of each file, what changes when it is written again."""
    files = [found for part in ("train", "test") if (found := _part_in(path, part))] if path.is_dir() else [path]
    stats = [(str(file), file.stat()) for file in files]
    return tuple((name, found.st_mtime_ns, found.st_size) for name, found in stats)


@lru_cache(maxsize=2)  # a run describes its data more than once before it loads them
def _loaded(path: Path, state: object, key: ByText[Columns], task: Task) -> Dataset:
    return dataset_of(_rows(path), key.columns, task, path.stem, str(path))


@lru_cache(maxsize=1)  # it is asked for once for each client with a table of its own
def _reading_at(path: Path, state: object, key: ByText[Columns], task: Task) -> ColumnReading:
    return reading_of(_rows(path), key.columns, task, str(path))


def dataset_of(rows: Rows, columns: Columns, task: Task, name: str, where: str) -> Dataset:
    """Rows, or those for training and those for tests, as a data set.

    Args:
        rows: one table, which is divided, or a pair.
        columns: what they are.
        task: what targets mean.
        name: of the data set.
        where: opens messages.

    Raises:
        DataError: see `TableSource.load`.
    """
    parts = _parts(rows, columns, where)
    reading = _reading(parts.train, columns, task, where)
    train, test = (reading.inputs(part, columns, where) for part in parts)
    targets = [reading.targets(part, columns, task, where) for part in parts]
    owners, names = (None, None) if columns.by is None else _owners(parts, columns.by)
    return Dataset(
        name=name,
        train_inputs=train,
        train_targets=targets[0],
        test_inputs=test,
        test_targets=targets[1],
        num_classes=len(reading.classes) if task.has_classes else task.width_for(targets[0]),
        classes=reading.classes or None,
        task=task,
        owners=owners,
        groups=None if columns.group is None else torch.from_numpy(_numbers(parts.train, columns.group)),
        owner_names=names,
    )


def values_of_tests(rows: Rows, columns: Columns, name: str, where: str) -> np.ndarray:
    """The values of a column, as text, of the rows for tests in the order of their data set.

    Raises:
        DataError: there is no such column.
    """
    test = _parts(rows, columns, where).test
    _check_there(test, name, where)
    return _texts(test, name, "(none)")


def tables_in(found: Any) -> Rows | None:
    """The DataFrame that something is, or the pair of them; None if it is something else."""
    import pandas as pd

    if isinstance(found, pd.DataFrame):
        return found
    is_pair = isinstance(found, tuple | list) and len(found) == 2
    return tuple(found) if is_pair and all(isinstance(one, pd.DataFrame) for one in found) else None


def reading_of(rows: Rows, columns: Columns, task: Task, where: str) -> ColumnReading:
    """How other tables are to be read, to be read as these rows are; arguments as of `dataset_of`."""
    return _reading(_parts(rows, columns, where).train, columns, task, where)


def _reading(train: Table, columns: Columns, task: Task, where: str) -> ColumnReading:
    if columns.known is not None:
        return ColumnReading.told(columns.known, where)
    return ColumnReading.found(train, columns, task, where)


def _rows(path: Path) -> Rows:
    if not path.is_dir():
        return _read(path)
    train, test = (_part_in(path, part) for part in ("train", "test"))
    if train is None or test is None:
        raise DataError(f"{path}: no test part; expected train and test as {' or '.join(SUFFIXES)}")
    return _read(train), _read(test)


def _parts(rows: Rows, columns: Columns, where: str) -> _Parts:
    """The rows for training and those for tests."""
    if isinstance(rows, tuple):
        parts = _Parts(*(_named(part, where) for part in rows))
        for part in parts:
            _check_named(part, columns, where)
        _check_apart(parts, columns.group, where)
    else:
        parts = _divided(_named(rows, where), columns, where)
    if any(len(part) == 0 for part in parts):
        raise DataError(f"{where}: no rows for {'training' if not len(parts.train) else 'tests'}; give at least one")
    return parts


def _part_in(folder: Path, part: str) -> Path | None:
    return next((file for suffix in SUFFIXES if (file := folder / f"{part}{suffix}").is_file()), None)


def _read(file: Path) -> Table:
    import pandas as pd

    check_fits(_TIMES_LARGER * file.stat().st_size, f"{file}: its rows", "use fewer of them", DataError)
    try:
        return pd.read_parquet(file) if file.suffix.lower() == ".parquet" else pd.read_csv(file)
    except MemoryError:
        raise
    except Exception as error:  # any error that damage causes in pandas, pyarrow and codecs
        raise DataError(f"{file}: cannot be read as a table: {explained(error)}") from error


def _named(rows: Table, where: str) -> Table:
    """The rows with names of columns that are text, each of one column."""
    names = [str(name) for name in rows.columns]
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{where}: two columns are called {twice[0]!r}; give each its own name")
    return rows.set_axis(names, axis=1)


def _check_named(rows: Table, columns: Columns, where: str) -> None:
    """Check that rows say whose they are and which belong together, if they are to be divided by that."""
    for name in (columns.by, columns.group):
        if name is not None:
            _check_there(rows, name, where)


def _check_there(rows: Table, name: str, where: str) -> None:
    if name not in rows.columns:
        raise DataError(f"{where}: no column {name!r}; found {', '.join(rows.columns[:20])}")


def _check_apart(parts: _Parts, group: str | None, where: str) -> None:
    """Check that no rows of a group are in both parts."""
    if group is None:
        return
    both = sorted({*map(str, parts.train[group])} & {*map(str, parts.test[group])})
    if both:
        raise DataError(
            f"{where}: {group}: {len(both)} of its groups are in train and in test, the first {both[0]!r}; a test on"
            " what was trained on says nothing: move all rows of a group to one part"
        )


def _divided(rows: Table, columns: Columns, where: str) -> _Parts:
    """Rows for training and for tests: of each owner's rows, or groups of rows, the share that is for tests."""
    _check_named(rows, columns, where)
    owners = _numbers(rows, columns.by)
    groups = _numbers(rows, columns.group) if columns.group else np.arange(len(rows))
    draws = np.random.default_rng(Key(("table", "test")).seed)
    settled = dict[Any, bool]()  # groups that have rows of several owners are settled by the first
    for owner in np.unique(owners):
        own = [group for group in np.unique(groups[owners == owner]) if group not in settled]
        chosen = set(draws.permutation(own)[: round(columns.test * len(own))])
        settled |= {group: group in chosen for group in own}
    tested = np.array([settled[group] for group in groups], dtype=bool)
    return _Parts(rows[~tested], rows[tested])


def _numbers(rows: Table, column: str | None) -> np.ndarray:
    """A number for each different value of a column, in their order as text; 0 without a column."""
    if column is None:
        return np.zeros(len(rows), np.int64)
    return np.unique(_texts(rows, column), return_inverse=True)[1].astype(np.int64)


def _texts(rows: Table, column: str, missing: str = "") -> np.ndarray:
    return rows[column].astype("string").fillna(missing).to_numpy(str)


def _owners(parts: _Parts, column: str) -> tuple[tuple[Tensor, Tensor], tuple[str, ...]]:
    """Whose each row is, by the order of the owners' names in both parts together, and these names."""
    import pandas as pd

    both = pd.concat(parts)
    numbers = torch.from_numpy(_numbers(both, column))
    names = tuple(np.unique(_texts(both, column)).tolist())
    return (numbers[: len(parts.train)], numbers[len(parts.train) :]), names
