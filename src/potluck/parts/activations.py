"""Outputs of finished stages for all of a client's examples, kept in memory or in a temporary file."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Self

import torch
from torch import Size, Tensor, nn

from potluck.core.nets.modes import mode
from potluck.core.requests.examples import Examples


class Buffer:
    """A client's examples as outputs of the finished stages.

    Use it in a `with` block, which closes its file, if any. The file has no name if the system allows that, so a killed
    process leaves nothing behind.

    Attributes:
        examples: the inputs of the next stages, with the client's targets.
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
        """Pass the examples through further stages, in evaluation mode and without gradients.

        They pass batch by batch, and each batch is stored before the next one is read, so that, besides outputs kept in
        memory by choice, memory never holds more than one batch of activations.

        Args:
            stages: the finished stages.
            batch_size: examples read at a time.
            at_once: examples that pass the stages at a time, see `outputs`.
            in_memory: whether to keep the outputs in memory, or in a file in the system's temporary folder.
        """
        before = self.examples
        found = (outputs(stages, batch.inputs, at_once) for batch in before.batches(batch_size))
        if in_memory:
            self.examples = before.with_inputs(_in_one_tensor(found, len(before)))
            self._replace_file(None)
        else:
            file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by the next one or by __exit__
            try:
                rows = _written(file, found)
            except BaseException:
                file.close()
                raise
            self.examples = before.with_inputs(torch.arange(len(before)), rows)
            self._replace_file(file)

    def _replace_file(self, file: IO[bytes] | None) -> None:
        if self._file is not None:
            self._file.close()
        self._file = file


def outputs(stages: nn.Module, inputs: Tensor, at_once: int) -> Tensor:
    """The stages' outputs on a batch, in evaluation mode and without gradients.

    Args:
        stages: applied to the inputs.
        inputs: (batch, ...).
        at_once: examples that pass at a time; fewer than the batch if memory is short.
    """
    with mode(stages, training=False), torch.no_grad():
        if len(inputs) <= at_once:
            return stages(inputs)
        return _in_one_tensor((stages(part) for part in inputs.split(at_once)), len(inputs))


@dataclass(frozen=True)
class RowsOnDisk:
    """Rows of one shape and type in a file; reads rows by their numbers.

    It is a `potluck.core.requests.examples.Preprocess`, so that `Examples` of row numbers are examples of the rows.
    Rows are read, not mapped, so that none stays in this process's memory after its batch.
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
        """Fill a row from the file's current position; the system may return a long row in pieces."""
        while len(left):
            count: int = self.file.readinto(left)  # type: ignore[attr-defined]
            if not count:
                raise OSError("a temporary file of activations has been truncated")
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
    """The rows of all batches, `count` in all, each written to its place as soon as it is computed."""
    found, start = torch.empty(0), 0
    for rows in batches:
        if start == 0:
            found = rows.new_empty((count, *rows.shape[1:]))
        found[start : start + len(rows)] = rows
        start += len(rows)
        del rows  # before the next batch is computed
    return found
