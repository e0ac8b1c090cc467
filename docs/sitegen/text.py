"""From docstrings to Markdown: docstrings are prose with names in backticks, in which other signs mean themselves."""

import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import MISSING
from typing import Any

from potluck.experiment.settings.keys import Setting

_TOKEN = re.compile(r"(?P<code>`[^`]+`)|(?P<url>https?://\S+?)(?=[.,;:)]*(?:\s|$))")


def prose(text: str) -> str:
    """Text as Markdown: code in backticks and addresses as they are, other signs of Markdown escaped."""
    paragraphs = re.split(r"\n{2,}", text.strip("\n"))
    return "\n\n".join(_formula(one) if _indented(one) else _escaped(one) for one in paragraphs)


def _indented(paragraph: str) -> bool:
    return all(line.startswith("    ") for line in paragraph.split("\n"))


def _formula(paragraph: str) -> str:
    return fenced(textwrap.dedent(paragraph))


def _escaped(text: str) -> str:
    parts: list[str] = []
    end = 0
    for found in _TOKEN.finditer(text):
        parts += [_plain(text[end : found.start()]), found["code"] or f"<{found['url']}>"]
        end = found.end()
    return re.sub(r"^(\s*)([-+#>])", r"\1\\\2", "".join([*parts, _plain(text[end:])]), flags=re.MULTILINE)


def _plain(text: str) -> str:
    return re.sub(r"([\\*_<\[\]{}|~$])", r"\\\1", text)


def fenced(code: str, language: str = "text") -> str:
    """A block of code."""
    return f"```{language}\n{code.rstrip()}\n```"


def code(text: str) -> str:
    """Text in code font, also if it holds backticks."""
    marks = "``" if "`" in text else "`"
    space = " " if "`" in text else ""
    return f"{marks}{space}{text}{space}{marks}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown; cells may hold Markdown, bars in it are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in line) + " |" for line in lines)


def definitions(entries: Iterable[tuple[str, str]]) -> str:
    """A list of terms, each with its explanation."""
    return "\n\n".join(f"{term}\n: {textwrap.indent(meaning, '  ').strip()}" for term, meaning in entries)


def kind(setting: Setting) -> str:
    """A key's type and range in words, as Markdown."""
    if setting.kind == "one of":
        return "one of " + ", ".join(code(word) for word in setting.allowed.split(", "))
    return prose(", ".join(filter(None, (setting.kind, setting.allowed))))


def default(setting: Setting) -> str:
    """A key's default as it is written in TOML, as Markdown; in words if there is none."""
    if setting.default is MISSING:
        return "has no default"
    if setting.default is None:
        return "not set"
    return code(json.dumps(_plainly(setting.default)))


def _plainly(value: Any) -> Any:
    return [_plainly(one) for one in value] if isinstance(value, tuple | list) else value


def settings(entries: Iterable[Setting]) -> str:
    """Keys with default, type and meaning."""
    return definitions(
        (f"{code(one.key)} = {default(one)}, {kind(one)}" if one.default is not MISSING
         else f"{code(one.key)}, {kind(one)}; {default(one)}",
         prose(one.meaning))
        for one in entries
    )  # fmt: skip
