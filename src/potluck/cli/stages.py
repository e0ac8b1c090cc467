"""What a command does before its run begins, on a terminal: a line that the next one replaces.

This module imports nothing heavy, so that the first word is there before torch is.
"""

import os
import sys
from contextlib import suppress

_shown = False


def show_stages(words: str) -> None:
    """Show what is being done; nothing without a terminal."""
    global _shown
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        _shown = True
        _write(f"\r\x1b[2K{words} ...")


def clear() -> None:
    """Remove the line, before anything else is written."""
    global _shown
    if _shown:
        _shown = False
        _write("\r\x1b[2K")


def _write(text: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        sys.stderr.write(text)
        sys.stderr.flush()
