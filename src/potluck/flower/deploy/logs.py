"""Logs of Flower's programs, which cannot fill the disk: a long one is begun anew, and its end is kept beside it."""

import os
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

LONGEST_LOG = 2**23
"""The bytes at which a log is begun anew; as many of its end are kept in `NAME.1`."""

_LOOK_EVERY = 0.5
_ONE_AT_A_TIME = threading.Lock()  # programs share logs


def keep_short(log: Path, process: subprocess.Popen[bytes]) -> None:
    """Keep a log short until the program that appends to it has ended."""
    while process.poll() is None:
        time.sleep(_LOOK_EVERY)
        with suppress(OSError):  # the log was taken away, or the disk is full
            shorten(log)


def shorten(log: Path) -> None:
    """Begin a log anew if it has become long; programs that append to it go on at its start."""
    with _ONE_AT_A_TIME, log.open("rb") as file:
        if file.seek(0, os.SEEK_END) <= LONGEST_LOG:
            return
        file.seek(-LONGEST_LOG, os.SEEK_END)
        try:
            log.with_name(f"{log.name}.1").write_bytes(file.read(LONGEST_LOG))  # more may come while this is read
        finally:
            os.truncate(log, 0)
