"""The tutorials, carried out: their files written, their commands run, their output compared, numbers apart."""

import glob
import io
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from potluck.cli import main

ROOT = Path(__file__).parents[1]
TUTORIALS, README = ROOT / "docs/tutorials", ROOT / "README.md"
NOT_CARRIED_OUT = ("make demo", "source .venv/bin/activate", "pip install")
"""Commands that install; `.ci/run` begins with them."""


@dataclass(frozen=True)
class File:
    """A block that is to be saved, named by its first line."""

    name: str
    content: str


@dataclass(frozen=True)
class Command:
    """A command, and the lines that it prints."""

    line: str
    output: list[str]


def steps(text: str) -> Iterator[File | Command]:
    """What a reader of a tutorial does, in order."""
    for language, code in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        if language in ("python", "toml"):
            named = re.match(r"# (\w+\.\w+)\n", code)
            assert named, f"the first line of a file is its name: {code[:40]!r}"
            yield File(named[1], code)
        elif language == "console":
            first, *commands = re.split(r"^\$ ", code, flags=re.MULTILINE)
            assert not first, f"a command stands behind a $: {first!r}"
            for command in commands:
                line, *output = command.splitlines()
                yield Command(line, output)
        else:
            assert language == "bash", f"a block in {language!r}"  # several terminals: tests/flower does it


def carry_out(line: str) -> str:
    """What a command prints."""
    words = shlex.split(line)
    words = [name for word in words for name in (sorted(glob.glob(word)) if "*" in word else [word])]
    assert words[0] == "potluck", f"cannot carry out {line!r}"
    printed = io.StringIO()
    before = sys.argv
    sys.argv = words
    try:
        with redirect_stdout(printed), redirect_stderr(printed), pytest.raises(SystemExit) as stopped:
            main()
    finally:
        sys.argv = before
    assert not stopped.value.code, f"{line}: {printed.getvalue()}"
    return printed.getvalue()


def numbers_apart(text: str) -> str:
    """Text in which numbers, digests, the time that is left and the width of columns do not matter."""
    text = re.sub(r"\S+ (s|min) left", "LEFT", text)
    text = re.sub(r"\b(?=[a-z]*\d)[0-9a-f]{8,}\b", "DIGEST", text)
    text = re.sub(r"-?\d+(?:[.,:]\d+)*(?:e-\d+)?", "0", text)
    text = re.sub(r"([━─═])+", r"\1", text)
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def shows(expected: list[str], actual: str) -> bool:
    """Whether output has the lines that are expected; `...` stands for any lines."""
    pattern = "".join(
        "(?:.*\n)*?" if line.strip() == "..." else re.escape(numbers_apart(line)) for line in expected if line.strip()
    )
    return re.fullmatch(pattern, numbers_apart(actual)) is not None


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(TUTORIALS.glob("*.md")), ids=lambda page: page.stem)
def test_a_tutorial_can_be_followed_and_shows_what_appears(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for step in steps(page.read_text()):
        if isinstance(step, File):
            Path(step.name).write_text(step.content)
        elif not step.line.startswith(NOT_CARRIED_OUT):
            printed = carry_out(step.line)
            assert shows(step.output, printed), (
                f"{step.line}\nexpected:\n" + "\n".join(step.output) + f"\nfound:\n{printed}"
            )


@pytest.mark.slow
def test_the_readme_shows_what_the_demo_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (shown,) = re.findall(r"^```text\n(.*?)^```", README.read_text(), flags=re.DOTALL | re.MULTILINE)
    printed = re.sub(r"^ *preset of .*\n", "", carry_out("potluck run run.rounds=1"), flags=re.MULTILINE)
    assert shows(["...", *shown.splitlines(), "..."], printed)


def test_shows__notices_another_line_and_no_other_number():
    assert shows(["a 1", "...", "c"], "a 22.5\n b\nb\n  c\n")
    assert shows(["p  0.5", "1:10 min left"], "p 3\n\n3 s left\n")
    assert not shows(["a 1", "c"], "a 1\nb\nc\n")
    assert not shows(["a 1"], "b 1\n")
    assert not shows(["a 1"], "a 1\nb\n")


def test_steps__refuses_blocks_that_nobody_carries_out():
    for block in ("```python\nprint(1)\n```", "```\nx\n```", "```console\nls\n```"):
        with pytest.raises(AssertionError):
            list(steps(block + "\n"))
    assert list(steps("```console\n$ a b\nc\n$ d\n```\n")) == [Command("a b", ["c"]), Command("d", [])]
