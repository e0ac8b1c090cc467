"""What finished stages put out for all of a client's examples: kept in memory, or in a temporary file."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Self

import torch
from torch import Size, Tensor, nn

from potluck.core.examples import Examples
from potluck.core.modes import mode


class Buffer:
    """A client's examples behind the stages that are finished.

    Use it in a `with` block, which ends the file that it may have. The file has no name where the system allows that,
    so nothing is left behind by a process that is killed.

    Attributes:
        examples: what the next stages read, with the client's targets.
    """

    def __init__(self, examples: Examples) -> None:
        self.examples = examples
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._replace_file(None)

    def advance(self, stages: nn.Module, batch_size: int, at_once: int, *, in_memory: bool) -> None:
        """Put the examples behind further stages, in evaluation mode and without gradients.

        They pass batch by batch, and each batch is put away before the next one is read: at no time are there more
        activations in memory than those of a batch, beside what is kept in memory by choice.

        Args:
            stages: that are finished.
            batch_size: examples that are read together.
            at_once: examples that pass the stages together, see `outputs`.
            in_memory: whether to keep what comes out in memory, or in a file in the system's temporary folder.
        """
        before, labels = self.examples, self.examples.labels
        found = (outputs(stages, batch.inputs, at_once) for batch in before.batches(batch_size))
        if in_memory:
            self.examples = Examples(_in_one_tensor(found, len(before)), labels)
            self._replace_file(None)
        else:
            file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - it lasts until the next one, or __exit__
            try:
                rows = _written(file, found)
            except BaseException:
                file.close()
                raise
            self.examples = Examples(torch.arange(len(before)), labels, preprocess=rows)
            self._replace_file(file)

    def _replace_file(self, file: IO[bytes] | None) -> None:
        if self._file is not None:
            self._file.close()
        self._file = file


def outputs(stages: nn.Module, inputs: Tensor, at_once: int) -> Tensor:
    """What stages make of a batch in evaluation mode and without gradients.

    Args:
        stages: applied to the inputs.
        inputs: (batch, ...).
        at_once: examples that pass together; fewer than the batch where memory is too short for all of it.
    """
    with mode(stages, training=False), torch.no_grad():
        if len(inputs) <= at_once:
            return stages(inputs)
        return _in_one_tensor((stages(part) for part in inputs.split(at_once)), len(inputs))


@dataclass(frozen=True)
class RowsOnDisk:
    """Rows of one shape and type, one after another in a file; reads those whose numbers it is given.

    It is a `potluck.core.examples.Preprocess`, so that `Examples` of row numbers are examples of the rows. Rows are
    read and not mapped, so that none stays in this process's memory after its batch.
    """

    on_host = True  # whose inputs are row numbers, not to be moved to a device

    file: IO[bytes]
    shape: Size
    dtype: torch.dtype

    def __call__(self, inputs: Tensor, rng: torch.Generator | None) -> Tensor:
        """The rows (batch, *shape) at these places (batch,)."""
        found = torch.empty((len(inputs), *self.shape), dtype=self.dtype)
        left = found.view(-1).view(torch.uint8).numpy().data
        row_bytes = self.shape.numel() * found.element_size()
        for place in inputs.tolist():
            self.file.seek(place * row_bytes)
            self._read_into(left[:row_bytes])
            left = left[row_bytes:]
        return found

    def _read_into(self, left: memoryview) -> None:
        """Fill a row from where the file stands; the system may give a long row piece by piece."""
        while len(left):
            count: int = self.file.readinto(left)  # type: ignore[attr-defined]
            if not count:
                raise OSError("a temporary file of activations is shorter than what was written to it")
            left = left[count:]


def _written(file: IO[bytes], batches: Iterator[Tensor]) -> RowsOnDisk:
    """The rows of all batches, in the file."""
    shape, dtype = Size(), torch.float32
    for rows in batches:
        shape, dtype = rows.shape[1:], rows.dtype
        left = rows.contiguous().view(-1).view(torch.uint8).numpy().data
        while len(left):
            left = left[file.write(left) :]
        del rows, left  # before the next batch is computed
    return RowsOnDisk(file, shape, dtype)


def _in_one_tensor(batches: Iterator[Tensor], count: int) -> Tensor:
    """The rows of all batches, `count` in all, each written where it belongs as soon as it is there."""
    found, start = torch.empty(0), 0
    for rows in batches:
        if start == 0:
            found = rows.new_empty((count, *rows.shape[1:]))
        found[start : start + len(rows)] = rows
        start += len(rows)
        del rows  # before the next batch is computed
    return found
