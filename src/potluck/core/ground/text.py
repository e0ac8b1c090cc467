"""Untrusted text, sanitised for logs, records and terminals: it cannot forge a line or control the terminal."""

ON_SCREEN = {"on_screen": True}
"""Extra of log records that are also shown on the terminal while a run is in progress."""

LINE, LINES = 500, 60
"""The most characters of a line, and lines of a traceback, that are kept."""


def one_line(text: str, most: int = LINE) -> str:
    """The text on one line of printable characters, cut to `most`; white space of any kind becomes one space."""
    words = " ".join(_printable(text[: 8 * most]).split())
    return words if len(words) <= most and len(text) <= 8 * most else f"{words[: most - 3]}..."


def last_lines(text: str, most: int = LINES) -> str:
    """The last `most` lines of a traceback, each printable and cut."""
    lines = text[-most * LINE :].splitlines()[-most:]
    return "\n".join(_printable(line[:LINE]).rstrip() for line in lines)


def quoted(text: str) -> str:
    """Continuation lines of a log line, marked so that none can pass for a log line itself."""
    return "".join(f"\n  | {line}" for line in text.splitlines())


def _printable(text: str) -> str:
    """Control characters, escape sequences' first characters and lone surrogates become spaces."""
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)
