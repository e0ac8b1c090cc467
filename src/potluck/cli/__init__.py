"""The command line: each command parses, then imports what it needs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from potluck.core.errors import PotluckError

# Typer brings its own copy of click or uses the installed one, depending on its version.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    help="Federated learning where every client brings its own model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def run(
    target: Annotated[
        str | None,
        typer.Argument(help="A TOML file, a method's name or Python file; the demonstration without."),
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted keys, such as run.rounds=10.")] = None,
    to: Annotated[Path, typer.Option(help="Folder in which the run gets a folder of its own.")] = Path("runs"),
    resume: Annotated[Path | None, typer.Option(help="Folder of a run to go on with.")] = None,
) -> None:
    """Run a federation; records, checkpoints and the log go to a folder of the run's own."""
    from potluck.cli.play import play_new, play_on

    assignments = list(overrides or [])
    if target is not None and "=" in target:
        target, assignments = None, [target, *assignments]
    if resume is None:
        play_new(target, assignments, to)
    else:
        play_on(resume, target, assignments)


@app.command(name="list")
def list_things(
    kind: Annotated[str | None, typer.Argument(help="methods, models, datasets or partitions; all without.")] = None,
    pattern: Annotated[str, typer.Argument(help="Shell-style, such as 'fed*'.")] = "*",
) -> None:
    """List what can be named in a configuration."""
    from potluck.cli.catalogue import print_lists

    print_lists(kind, pattern)


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="A method, model, data set, partition, or the folder of a run.")],
    digest: Annotated[bool, typer.Option(help="Of a run: only what no clock has touched, as digests.")] = False,
) -> None:
    """Explain a method with its hyper-parameters, or sum up a run."""
    from potluck.cli.catalogue import print_details

    print_details(name, digest=digest)


@app.command()
def check(
    target: Annotated[str, typer.Argument(help="A method's name, or the Python file of a new one.")],
) -> None:
    """Put a method through the conformance suite and its own stated limits."""
    from potluck.cli.examine import examine

    if not examine(target):
        raise typer.Exit(1)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Runs, or folders of runs.")],
    to: Annotated[Path | None, typer.Option(help="Where to write; the run's own folder without.")] = None,
) -> None:
    """Write a picture of the curves and a summary in Markdown."""
    from potluck.analysis.report import write_report

    place = to or (folders[0] if len(folders) == 1 else Path("report"))
    typer.echo(write_report(folders, place))


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="A model of `potluck list models`.")],
    budgets: Annotated[list[str], typer.Argument(help="Such as 32MiB, 1/6 of the whole, or fair, lack, surplus.")],
    classes: Annotated[int, typer.Option(help="Classes of the task.")] = 10,
    shape: Annotated[str, typer.Option(help="Of one input.")] = "3x32x32",
    batch_size: Annotated[int, typer.Option(help="Examples a step.")] = 32,
) -> None:
    """Show into which pieces FeDepth cuts a model for budgets of memory, and what each piece takes."""
    from potluck.cli.plan import print_plan, shape_of

    print_plan(model, budgets, num_classes=classes, input_shape=shape_of(shape), batch_size=batch_size)


def main() -> None:
    """Run the command line; what the user can mend is one line on standard error and exit code 2."""
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except (PotluckError, _UsageError) as error:
        print(f"potluck: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
