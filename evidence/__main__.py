"""Runs all evidence and writes its tables: `make evidence`, or `python -m evidence METHOD ...` for some of it."""

import argparse
import subprocess
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

import torch

from evidence import compared, subjects
from potluck.core.ground.discovery import module_names
from potluck.methods import get_method
from potluck.testing.facts import behaviour_of

PAGE = Path(__file__).parents[1] / "docs" / "evidence.md"

TEXT = """\
# Evidence

Each of these methods was computed a second time, by a reference in plain PyTorch that was written from the paper and
uses nothing of the method's file: the same initial weights, examples and draws, two to six rounds, in double
precision. The table has the largest difference of any number, relative to numbers above 1; 1e-16 is one rounding. The
references are in the folder `evidence` of the source; each says what of a paper and of its authors' code was read. Who
wrote them knew the methods' files: they guard against slips of the code rather than against a paper read wrongly twice.

    make evidence

{about}

| method | what was compared | largest difference |
|---|---|--:|
{differences}

## What the engine saw

Of every method, with its default hyper-parameters, in two rounds: what clients store from round to round, and whether
those of one architecture train as one computation under `run.executor = "stacked"`.

| method | clients keep | stacked |
|---|---|---|
{seen}
"""


def commit() -> str:
    """The commit that this runs on, marked if files have changed since."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=PAGE.parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def main() -> None:
    """Print each difference; write the table if all ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", choices=[*subjects(), []], metavar="METHOD", help="all by default")
    chosen = parser.parse_args().methods
    rows: list[str] = []
    for name in chosen or subjects():
        for what, difference in compared(import_module(f"evidence.{name}")):
            print(f"{name:<14}{difference:8.0e}  {what}", flush=True)
            rows.append(f"| {name} | {what} | {difference:.0e} |")
    if not chosen:
        about = f"{datetime.now(UTC):%Y-%m-%d}, commit {commit()}, torch {torch.__version__}."
        seen = "\n".join(seen_of(name) for name in module_names("potluck.methods"))
        PAGE.write_text(TEXT.format(about=about, differences="\n".join(rows), seen=seen))


def seen_of(name: str) -> str:
    """A method's line of the second table."""
    seen = behaviour_of(get_method(name))
    return f"| {name} | {seen.keeps} | {'yes' if seen.stacks else 'no'} |"


if __name__ == "__main__":
    main()
