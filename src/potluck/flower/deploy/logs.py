"""Logs of Flower's programs, which cannot fill the disk: a full one is begun anew, and the one before it is kept."""

import threading
from contextlib import suppress
from pathlib import Path
from typing import IO

LONGEST_LOG = 2**23
"""The most bytes of a log; with the one before it, it takes twice as many."""

_CHUNK = 2**16
_WRITING = threading.Lock()  # programs share logs


def copy(output: IO[bytes], log: Path) -> None:
    """Append a program's output to its log until the output ends."""
    with output:
        while chunk := output.read(_CHUNK):
            with suppress(OSError):  # of a full disk; the program must not wait for its log
                append(log, chunk)


def append(log: Path, text: bytes) -> None:
    """Append to a log. If it would become too long, what follows the next line's end goes to a new one.

    Args:
        log: the file; `NAME.1` beside it is the one before.
        text: no longer than `LONGEST_LOG`.
    """
    with _WRITING:
        with log.open("ab") as file:
            if file.tell() + len(text) <= LONGEST_LOG:
                file.write(text)
                return
            end = text.find(b"\n") + 1
            file.write(text[:end])
        log.replace(log.with_name(f"{log.name}.1"))
        log.write_bytes(text[end:])
