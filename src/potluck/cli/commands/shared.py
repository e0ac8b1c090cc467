"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from potluck.cli import completion
from potluck.records import TITLES

TargetArgument = Annotated[
    str | None,
    typer.Argument(
        help="A TOML file, a method name or a Python file. Default: the demo.", autocompletion=completion.of_target
    ),
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Dotted keys, such as run.rounds=10.", autocompletion=completion.of_overrides),
]
ParentOption = Annotated[Path, typer.Option(help="Folder in which the run's folder is made.")]
ProcessesOption = Annotated[int | None, typer.Option(help="Runs at a time. Default: one for each core.", min=1)]
MeasureOption = Annotated[
    str,
    typer.Option(help=f"By which score: {', '.join(f'{name} ({title})' for name, title in TITLES.items())}."),
]
ChosenOption = Annotated[bool, typer.Option("--chosen", help="Compare the rounds that are best on validation parts.")]
AgainstOption = Annotated[str | None, typer.Option(help="The row to compare the others with. Default: the first.")]
GoalOption = Annotated[float | None, typer.Option(help="Show what it took to reach this value, such as 0.6.")]
TableOption = Annotated[Path | None, typer.Option(help="File for the table: .md, .csv or .tex.")]


def told_apart(target: str | None, overrides: list[str] | None) -> tuple[str | None, list[str]]:
    """Target and assignments; if there is no target, its place holds the first assignment."""
    given = list(overrides or [])
    return (None, [target, *given]) if target is not None and "=" in target else (target, given)
