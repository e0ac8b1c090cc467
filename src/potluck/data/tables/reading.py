"""How the columns of one table become inputs and targets, and those of other tables alike."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from potluck.core.ground.errors import DataError, PotluckWarning, nearest
from potluck.core.ground.inputs import Inputs
from potluck.core.ground.machine import check_fits
from potluck.core.tasks.task import Task
from potluck.data.tables.columns import MOST_DIFFERENT, Columns
from potluck.data.tables.tokenizer import text_of, told_text, vocabulary_in
from potluck.data.tables.tokens import tokens_of

Table: TypeAlias = Any
"""A DataFrame of pandas, whose stubs know less of it than it can do."""

Column: TypeAlias = Any
"""A Series of pandas, likewise."""

_BYTES, _BYTES_A_TOKEN = 16, 40  # of what is made on the way to an input, too
_FAR = 10  # deviations by which the mean of a column differs if it is in other units, and hardly ever else


@dataclass(frozen=True)
class ColumnReading:
    """What was found in the training rows of one table, to read others alike.

    Attributes:
        numbers: mean and deviation of the columns of numbers, by name, in their order.
        names: the different names of the other columns, by the column's, in their order.
        text: the columns that are texts.
        classes: of the target, in the order of their numbers; none if it is no class.
        tokenizer: the content of the tokenizer's file; None if a token is a byte.
    """

    numbers: Mapping[str, tuple[float, float]]
    names: Mapping[str, tuple[str, ...]]
    text: tuple[str, ...]
    classes: tuple[str, ...]
    tokenizer: str | None = None

    @classmethod
    def found(cls, train: Table, columns: Columns, task: Task, where: str) -> "ColumnReading":
        """By looking at training rows.

        Raises:
            DataError: a column is not there, or cannot be read; `where` opens the message.
        """
        inputs = _input_columns(train, columns, where)
        named = [name for name in inputs if name in columns.names or not _is_number(train[name])]
        names = {name: _names_in(train[name], f"{where}: {name}") for name in named if name not in columns.text}
        numbers = {name: _scale(train[name]) for name in inputs if name not in names and name not in columns.text}
        if not (numbers or names or columns.text):
            raise DataError(f"{where}: no column is left to predict from; name some in federation.columns.inputs")
        classes = _classes(train[cast(str, columns.target)], where) if task.has_classes else ()
        text = tuple(name for name in inputs if name in columns.text)
        return cls(numbers, names, text, classes, None if columns.tokenizer is None else text_of(columns.tokenizer))

    @classmethod
    def told(cls, table: Mapping[str, Any], where: str) -> "ColumnReading":
        """As another machine has written it in `table`.

        Raises:
            DataError: it is no such table.
            ConfigError: its tokenizer is no text, or too long.
        """
        tokenizer = told_text(table)
        try:
            numbers = {str(name): (float(mean), float(std)) for name, (mean, std) in table["numbers"].items()}
            names = {str(name): tuple(map(str, found)) for name, found in table["names"].items()}
            text = tuple(map(str, table["text"]))
            if not all(math.isfinite(number) for pair in numbers.values() for number in pair):
                raise ValueError("a number is not finite")
            if not (numbers or names or text) or any(len(found) > MOST_DIFFERENT for found in names.values()):
                raise ValueError(f"no column, or more than {MOST_DIFFERENT} names in one")
            return cls(numbers, names, text, tuple(map(str, table["classes"])), tokenizer)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"{where}: federation.columns.known: expected the tables numbers and names and the lists text and"
                f" classes ({type(error).__name__}: {error})"
            ) from error

    def table(self) -> dict[str, Any]:
        """As settings have it."""
        return {
            "numbers": {name: list(pair) for name, pair in self.numbers.items()},
            "names": {name: list(found) for name, found in self.names.items()},
            "text": list(self.text),
            "classes": list(self.classes),
            **({} if self.tokenizer is None else {"tokenizer": self.tokenizer}),
        }

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns that inputs are made of."""
        return (*self.numbers, *self.names, *self.text)

    def inputs(self, rows: Table, columns: Columns, where: str) -> Inputs:
        """Of n rows: numbers and names as float32 (n, width); with texts, tokens beside them, see `tokens_of`.

        Raises:
            DataError: a column is not there, a number is missing or none, or memory is short.
        """
        _check_there(rows, self.needed, where)
        width = len(self.numbers) + sum(map(len, self.names.values()))
        needed = len(rows) * (_BYTES * width + _BYTES_A_TOKEN * columns.tokens * bool(self.text))
        check_fits(needed, f"{where}: its inputs", "use fewer rows, columns or federation.columns.tokens", DataError)
        blocks = [self._numbers(rows, columns, where), *(self._one_hot(rows[name], name) for name in self.names)]
        features = torch.from_numpy(np.concatenate(blocks, 1, dtype=np.float32))
        if not self.text:
            return features
        tokens = tokens_of(texts_in(rows, self.text, where), columns.tokens, vocabulary_in(self.tokenizer))
        return {**tokens, **({"columns": features} if features.shape[1] else {})}

    def _numbers(self, rows: Table, columns: Columns, where: str) -> np.ndarray:
        found = [self._standardised(rows[name], name, columns, where) for name in self.numbers]
        return np.stack(found, 1) if found else np.zeros((len(rows), 0))

    def _standardised(self, column: Column, name: str, columns: Columns, where: str) -> np.ndarray:
        import pandas as pd

        values = _as_numbers(column)
        odd = [value for value, known in zip(column, np.isfinite(values), strict=True) if not (known or pd.isna(value))]
        if odd:
            raise DataError(f"{where}: {name}: found {odd[0]!r}; expected numbers: correct it, or call them names")
        mean, std = self.numbers[name]
        if gaps := int(np.isnan(values).sum()):
            if columns.missing == "refuse":
                raise DataError(
                    f"{where}: {name}: {gaps} of {len(values)} numbers are missing; fill them in, leave the column out"
                    " of federation.columns.inputs, or set federation.columns.missing = 'mean'"
                )
            values = np.where(np.isnan(values), mean, values)
        if std and len(values) and abs(float(values.mean()) - mean) > _FAR * std:
            warnings.warn(
                f"{where}: {name}: mean {values.mean():.4g}, and {mean:.4g} in the common data with a deviation of"
                f" {std:.4g}; is it in the same unit?",
                PotluckWarning,
                stacklevel=2,
            )
        return (values - mean) / (std or 1.0)

    def _one_hot(self, column: Column, name: str) -> np.ndarray:
        numbers = _positions(_as_names(column), self.names[name])
        return (numbers[:, None] == np.arange(len(self.names[name]))).astype(np.float32)

    def targets(self, rows: Table, columns: Columns, task: Task, where: str) -> Tensor:
        """Of n rows: classes int64 (n,), or numbers float32 (n,).

        Raises:
            DataError: the column is not there, a target is missing, or is a class that is not known.
        """
        name = cast(str, columns.target)
        _check_there(rows, (name,), where)
        if gaps := int(rows[name].isna().sum()):
            raise DataError(f"{where}: {name}: {gaps} of {len(rows)} targets are missing; leave these rows out")
        if not task.has_classes:
            numbers = _as_numbers(rows[name]).astype(np.float32)
            if not np.isfinite(numbers).all():
                raise DataError(f"{where}: {name}: found what is no number; {task.name} expects numbers")
            return torch.from_numpy(numbers)
        found = _as_names(rows[name])
        if strange := sorted(set(found.dropna()) - {*self.classes}):
            near = ", ".join(nearest(strange[0], self.classes))
            raise DataError(
                f"{where}: {name}: class {strange[0]!r} is none of the {len(self.classes)} of the common data (nearest:"
                f" {near}); call classes alike everywhere"
            )
        return torch.from_numpy(_positions(found, self.classes))


def texts_in(rows: Table, names: Sequence[str], where: str) -> Iterator[str]:
    """The text of each row: of several columns, each in a line.

    Raises:
        DataError: a column is not there.
    """
    _check_there(rows, names, where)
    parts = [rows[name].astype("string").fillna("") for name in names]
    return ("\n".join(row) for row in zip(*parts, strict=True))


def _input_columns(train: Table, columns: Columns, where: str) -> list[str]:
    if columns.target is None:
        raise DataError(
            f"{where}: which column is to be predicted? Name it in federation.columns.target: {_shown(train.columns)}"
        )
    _check_there(train, (*columns.besides, *columns.names, *columns.text, *(columns.inputs or ())), where)
    given = columns.inputs or [name for name in train.columns if name not in columns.besides]
    return [str(name) for name in given]


def _check_there(rows: Table, names: Sequence[str], where: str) -> None:
    known = list(map(str, rows.columns))
    if missing := [name for name in names if name not in known]:
        near = ", ".join(nearest(missing[0], known))
        raise DataError(f"{where}: no column {missing[0]!r} (nearest: {near}); found {_shown(known)}")


def _is_number(column: Column) -> bool:
    import pandas as pd

    return pd.api.types.is_numeric_dtype(column)  # bool is, too


def _scale(column: Column) -> tuple[float, float]:
    values = column.to_numpy(np.float64, na_value=np.nan)
    found = values[np.isfinite(values)]
    return (float(found.mean()), float(found.std())) if len(found) else (0.0, 0.0)


def _positions(values: Column, among: Sequence[str]) -> np.ndarray:
    """The position of each value among these, int64; -1 if it is none of them."""
    import pandas as pd

    return pd.Index(list(among), dtype=object).get_indexer(values.astype(object)).astype(np.int64)


def _as_numbers(column: Column) -> np.ndarray:
    """Values as float64, NaN for what is missing or no number."""
    import pandas as pd

    numbers: Any = pd.to_numeric(column, errors="coerce")
    return numbers.to_numpy(np.float64, na_value=np.nan)


def _names_in(column: Column, where: str) -> tuple[str, ...]:
    found = sorted(set(_as_names(column).dropna()))
    if len(found) > MOST_DIFFERENT:
        raise DataError(
            f"{where}: {len(found)} different names, such as {found[0]!r}; expected at most {MOST_DIFFERENT}: list it"
            " in federation.columns.text if it is text, or leave it out of federation.columns.inputs"
        )
    return tuple(found)


def _as_names(column: Column) -> Column:
    """Values as text; whole numbers without a point, so that 3 and 3.0 are one name."""
    import pandas as pd

    if pd.api.types.is_float_dtype(column) and bool((column.dropna() % 1 == 0).all()):
        column = column.astype("Int64")
    return column.astype("string")


def _classes(target: Column, where: str) -> tuple[str, ...]:
    import pandas as pd

    name = str(target.name)
    if pd.api.types.is_float_dtype(target) and not bool((target.dropna() % 1 == 0).all()):
        raise DataError(
            f"{where}: {name}: found numbers with fractions; expected classes: for numbers to predict, name the task:"
            " federation.task = 'regression'"
        )
    found = set(_as_names(target).dropna())
    return tuple(sorted(found, key=int if all(one.lstrip("-").isdecimal() for one in found) else None))


def _shown(names: Sequence[Any]) -> str:
    listed = list(map(str, names))
    return ", ".join(listed[:20]) + (" ..." if len(listed) > 20 else "")
