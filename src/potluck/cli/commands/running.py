"""Commands that run a federation on this machine, and follow it: `run` and `watch`."""

from pathlib import Path
from typing import Annotated

import typer

from potluck.cli import completion, stages
from potluck.cli.commands.shared import OverridesArgument, ParentOption, TargetArgument, told_apart


def run(
    target: TargetArgument = None,
    overrides: OverridesArgument = None,
    to: ParentOption = Path("runs"),
    resume: Annotated[
        Path | None, typer.Option(help="Folder of a run to resume.", autocompletion=completion.of_folders)
    ] = None,
    branch: Annotated[
        bool, typer.Option("--branch", help="With --resume: continue in a new folder beside it, with the overrides.")
    ] = False,
) -> None:
    """Run a federation; records, checkpoints and the log go to a new folder."""
    stages.show_stages("starting")
    from potluck.cli.run import branch_run, resume_run, start_run

    target, assignments = told_apart(target, overrides)
    if resume is None:
        if branch:
            raise typer.BadParameter("--branch: give --resume FOLDER too, the run to branch from")
        start_run(target, assignments, to)
    elif branch:
        branch_run(resume, target, assignments)
    else:
        resume_run(resume, target, assignments)


def watch(
    folders: Annotated[list[Path] | None, typer.Argument(help="Runs, or folders of runs. Default: runs.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print how they stand, and do not wait.")] = False,
) -> None:
    """Follow runs that other processes execute, until they end; exits with 1 if one of them does not finish."""
    from potluck.cli.watch import watch_to_the_end

    if not watch_to_the_end(folders or [Path("runs")], once=once) and not once:
        raise typer.Exit(1)
