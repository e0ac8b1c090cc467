"""Docstrings as Sphinx reads them: prose with names in single backticks becomes reStructuredText."""

import re

_TOKEN = re.compile(r"(?P<code>`+)(?P<inside>[^`]+)(?P=code)(?P<after>\w?)|(?P<url>https?://\S+)")


def as_rst(lines: list[str]) -> list[str]:
    """The lines of a docstring with code in double backticks, other signs escaped, and formulas as blocks."""
    found: list[str] = []
    for number, line in enumerate(lines):
        if _begins_block(lines, number):
            found += ["::", ""]
        found.append(line if _in_block(lines, number) else _escaped(line))
    return found


def _in_block(lines: list[str], number: int) -> bool:
    """Whether a line belongs to an indented block that is no section such as `Args:`."""
    for above in range(number, -1, -1):
        line = lines[above]
        if line and not line.startswith("    "):
            return False
        if _begins_block(lines, above):
            return bool(lines[number])
    return False


def _begins_block(lines: list[str], number: int) -> bool:
    """Whether an indented block begins here: indented, below an empty line and a paragraph."""
    if not lines[number].startswith("    ") or number < 2 or lines[number - 1]:
        return False
    above = next((line for line in reversed(lines[: number - 1]) if line and not line.startswith("    ")), "")
    return bool(above) and not re.fullmatch(r"[A-Z]\w*:", above)


def _escaped(line: str) -> str:
    parts: list[str] = []
    end = 0
    for token in _TOKEN.finditer(line):
        parts.append(_plain(line[end : token.start()]))
        glue = "\\ " if token["after"] else ""
        parts.append(token["url"] or f"``{token['inside']}``{glue}{token['after']}")
        end = token.end()
    return "".join([*parts, _plain(line[end:])])


def _plain(text: str) -> str:
    return re.sub(r"([\\*|])|(?<=\w)(_)(?!\w)", r"\\\1\2", text)
