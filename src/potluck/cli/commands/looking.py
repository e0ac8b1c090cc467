"""Commands that look at parts and federations, or begin a part: `list`, `show`, `check`, `inspect`, `plan`, `new`."""

from pathlib import Path
from typing import Annotated

import typer

from potluck.cli import completion
from potluck.cli.commands.shared import OverridesArgument, TargetArgument, told_apart

_OF_A_MODEL = (10, "3x32x32", 32, "none")  # what `plan` takes of classes, shape, batches and optimiser


def list_things(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="methods, models, datasets, partitions, tasks or devices. Default: all.",
            autocompletion=completion.of_kinds,
        ),
    ] = None,
    pattern: Annotated[str, typer.Argument(help="Shell-style, such as 'fed*'.")] = "*",
    long: Annotated[bool, typer.Option("--long", help="Whole lines, and what each method needs and sends.")] = False,
) -> None:
    """List the methods, models, data sets and partitions that a configuration can name, and devices of budgets."""
    from potluck.cli.catalogue import print_lists

    print_lists(kind, pattern, long=long)


def show(
    name: Annotated[
        str,
        typer.Argument(
            help="A method, model, data set, partition, task, device; run or federation; FILE.py:NAME; a run's folder.",
            autocompletion=completion.of_names,
        ),
    ],
    digest: Annotated[
        bool, typer.Option(help="For a run: only the digests of its results, which contain no times.")
    ] = False,
) -> None:
    """Explain a method with its hyper-parameters, or sum up a run."""
    from potluck.cli.catalogue import print_details

    print_details(name, digest=digest)


def check(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A method name, FILE.py or FILE.py:NAME of an own part, or a TOML file.",
            autocompletion=completion.of_target,
        ),
    ] = None,
    overrides: OverridesArgument = None,
) -> None:
    """Check a method: the conformance suite and its stated limits. Or a federation: which methods can run on it."""
    from potluck.cli.examine import examine, examine_federation

    target, assignments = told_apart(target, overrides)
    if target is None or target.endswith(".toml"):
        examine_federation(target, assignments)
    elif assignments:
        raise typer.BadParameter(f"{assignments[0]}: a method is checked as it is; name a TOML file, or no target")
    elif not examine(target):
        raise typer.Exit(1)


def inspect(
    what: Annotated[
        str,
        typer.Argument(
            help="federation; or a model: FILE.py:NAME, or one of `potluck list models`.",
            autocompletion=completion.of_inspected,
        ),
    ],
    target: TargetArgument = None,
    overrides: OverridesArgument = None,
    classes: Annotated[int, typer.Option(help="Classes of the task, of a model.")] = 10,
    shape: Annotated[str, typer.Option(help="Of one input, of a model.")] = "3x32x32",
    tokens: Annotated[bool, typer.Option("--tokens", help="Inputs are whole numbers.")] = False,
    cut: Annotated[
        list[str] | None,
        typer.Option(help="Twice or more: what the extractor shall end with, further stages, and the head."),
    ] = None,
) -> None:
    """Draw which layers of which clients meet, where layers are averaged by name; or where a model can be cut."""
    if what == "federation":
        from potluck.cli.meeting import print_meeting

        target, assignments = told_apart(target, overrides)
        print_meeting(target, assignments)
        return
    from potluck.cli.cutting import inputs_of, print_cuts

    if target is not None:
        raise typer.BadParameter(f"{target}: a model is inspected as it is; its options are --classes, --shape, --cut")
    print_cuts(what, classes, inputs_of(shape, tokens=tokens), cut or (), tokens=tokens)


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A model of `potluck list models`; with --budgets a TOML file or a method's name.",
            autocompletion=completion.of_models,
        ),
    ],
    budgets: Annotated[
        list[str] | None,
        typer.Argument(
            help="Such as 32MiB, 1/6 of the whole, or lack, surplus; with --budgets dotted keys.", show_default="fair"
        ),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option("--budgets", help="A .csv of what clients' devices can do: assigns each the largest that fits."),
    ] = None,
    to: Annotated[Path | None, typer.Option(help="With --budgets: a .toml for what was assigned, to be run.")] = None,
    rounds: Annotated[int, typer.Option(help="With --budgets: how many are measured.", min=1)] = 2,
    classes: Annotated[int, typer.Option(help="Classes of the task.")] = _OF_A_MODEL[0],
    shape: Annotated[str, typer.Option(help="Of one input.")] = _OF_A_MODEL[1],
    batch_size: Annotated[int, typer.Option(help="Examples a step.")] = _OF_A_MODEL[2],
    optimizer: Annotated[
        str, typer.Option(help="adam, momentum or sgd, whose state a run's own estimate counts; none: as in the paper.")
    ] = _OF_A_MODEL[3],
) -> None:
    """Show FeDepth's pieces of a model for memory budgets; or assign each client what its device can train."""
    if table is not None:
        _check_alone(classes, shape, batch_size, optimizer)
        from potluck.cli.assigning import print_assignment

        print_assignment(model, budgets or [], table, to, rounds)
        return
    if to is not None or model.endswith(".toml"):
        raise typer.BadParameter("a federation is planned by a table of its devices; expected --budgets FILE.csv")
    from potluck.cli.plan import parsed_shape, print_plan

    print_plan(
        model,
        budgets or ["fair"],
        num_classes=classes,
        input_shape=parsed_shape(shape),
        batch_size=batch_size,
        optimizer=optimizer,
    )


def _check_alone(*given: object) -> None:
    """Check that options of a model are left out where a federation says what they would."""
    for option, value, usual in zip(("classes", "shape", "batch-size", "optimizer"), given, _OF_A_MODEL, strict=True):
        if value != usual:
            raise typer.BadParameter(f"--{option} is of a model; with --budgets the federation says it")


def new(
    kind: Annotated[
        str,
        typer.Argument(help="method, model, data, partition or metric.", autocompletion=completion.of_new),
    ],
    name: Annotated[str, typer.Argument(help="Its name, and that of the file: NAME.py and test_NAME.py.")],
) -> None:
    """Write a part of your own and its test to the current folder, both working, as a start."""
    from potluck.cli.new import write_new

    write_new(kind, name)
