"""How much memory this process holds, and how much it held at most; known on Linux alone."""

import ctypes
import gc
from contextlib import suppress
from pathlib import Path

_STATUS, _RESTART = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def settled() -> int | None:
    """Give freed memory back, and count the peak from here; return the bytes held now, or None if nothing tells."""
    gc.collect()
    with suppress(OSError, TypeError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    try:
        _RESTART.write_text("5")
        return _held("VmRSS")
    except (OSError, LookupError):
        return None


def peak() -> int:
    """The most bytes held since `settled` told how many there were."""
    return _held("VmHWM")


def _held(name: str) -> int:
    found = [line.split()[1] for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return int(found[0]) * 1024
