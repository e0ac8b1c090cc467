"""Documentation as a terminal shows it: paragraphs as wide as the terminal is, lists of sections with their indent."""

import re
import textwrap

_COLUMNS = re.compile(r" +(\d+\. |\S+(?: \S+)*  +)(?=\S)")
"""What stands before an entry's text: its number, or a first column."""


def reflowed(text: str, width: int) -> str:
    """Text whose lines were broken for source files, broken for a terminal.

    Lines of one indent are a paragraph. Of others each is an entry, such as those below a heading, with the lines that
    are indented further than it; what continues an entry stays below its text. An indented block is left as it is, such
    as a formula or code, unless it goes on with the entries of a heading.

    Args:
        text: with blank lines between paragraphs.
        width: columns of the terminal; an entry keeps at least 20 of them.
    """
    shown, listed = list[str](), False
    for block in re.split(r"\n[ \t]*\n", text.strip("\n")):
        lines = block.split("\n")
        if not _indent(lines[0]):
            listed = _indent(lines[-1]) > 0
        quoted = _indent(lines[0]) and (not listed or shown[-1].endswith(":"))
        shown.append(block if quoted else "\n".join(_filled(entry, width) for entry in _entries(lines)))
    return "\n\n".join(shown)


def _entries(lines: list[str]) -> list[list[str]]:
    """A block's one paragraph, or its entries, each with the lines that continue it."""
    if len({_indent(line) for line in lines}) == 1 and not _COLUMNS.match(lines[0]):
        return [lines]
    entries = [[lines[0]]]
    for line in lines[1:]:
        heading = _indent(entries[-1][0]) == 0
        if _indent(line) > _indent(entries[-1][0]) and not heading:
            entries[-1].append(line)
        else:
            entries.append([line])
    return entries


def _filled(lines: list[str], width: int) -> str:
    """A paragraph or an entry, broken anew."""
    start, hanging = _indent(lines[0]), _hanging(lines)
    words = [lines[0][start:].rstrip(), *(line.strip() for line in lines[1:])]
    return textwrap.fill(
        " ".join(words),
        max(width, hanging + 20),
        initial_indent=" " * start,
        subsequent_indent=" " * hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _hanging(lines: list[str]) -> int:
    """The indent of what continues an entry: as in the source, else below its second column, or a little further."""
    if len(lines) > 1:
        return _indent(lines[1])
    start, columns = _indent(lines[0]), _COLUMNS.match(lines[0])
    return columns.end() if columns else start + 2 if start else 0


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
