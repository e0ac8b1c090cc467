"""Commands that look at runs: `compare`, `sweep`, `reproduce`, which start them; `report`, `attack` and others."""

from pathlib import Path
from typing import Annotated

import typer

from potluck.cli import completion, stages
from potluck.cli.commands.shared import (
    AgainstOption,
    ChosenOption,
    GoalOption,
    MeasureOption,
    OverridesArgument,
    ParentOption,
    ProcessesOption,
    TableOption,
    told_apart,
)
from potluck.records import TITLES_OF_A_CLIENT


def compare(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help="Methods, TOML files, runs, folders of runs; then dotted keys.",
            autocompletion=completion.of_compared,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Run every method with this many seeds, from run.seed on.", min=1)] = 1,
    on: Annotated[
        Path | None, typer.Option(help="TOML file with the federation, run and local training of all methods.")
    ] = None,
    to: ParentOption = Path("runs"),
    processes: ProcessesOption = None,
    measure: MeasureOption = "personal",
    chosen: ChosenOption = False,
    against: AgainstOption = None,
    target: GoalOption = None,
    table: TableOption = None,
) -> None:
    """Compare methods over seeds, and start the runs that are missing; or compare runs that are there."""
    stages.show_stages("starting")
    from potluck.cli.compare import View, print_comparison

    view = View(measure, chosen=chosen, against=against, target=target, file=table)
    if not print_comparison(what or [], seeds=seeds, on=on, parent=to, processes=processes, view=view):
        raise typer.Exit(1)


def sweep(
    file: Annotated[Path, typer.Argument(help="TOML file of a run with a table [sweep].")],
    overrides: OverridesArgument = None,
    to: Annotated[Path | None, typer.Option(help="Folder of the runs. Default: runs/NAME, after the file.")] = None,
    processes: ProcessesOption = None,
    measure: MeasureOption = "personal",
    chosen: ChosenOption = False,
    against: AgainstOption = None,
    target: GoalOption = None,
    table: TableOption = None,
) -> None:
    """Run a grid of settings, or tune them, and compare the results; a sweep that was stopped goes on."""
    stages.show_stages("starting")
    from potluck.cli.compare import View, print_sweep

    view = View(measure, chosen=chosen, against=against, target=target, file=table)
    if not print_sweep(file, overrides or [], parent=to or Path("runs") / file.stem, processes=processes, view=view):
        raise typer.Exit(1)


def reproduce(
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="A recipe, or a file of your own. Default: list them.", autocompletion=completion.of_recipes
        ),
    ] = None,
    overrides: OverridesArgument = None,
    scale: Annotated[float, typer.Option(help="Size of the experiments, 1 for the paper's; 0.1 is a trial.")] = 1.0,
    seeds: Annotated[int, typer.Option(help="Run everything with this many seeds.", min=1)] = 1,
    only: Annotated[str, typer.Option(help="Rows, shell-style, such as 'FedIN*'.")] = "*",
    columns: Annotated[str, typer.Option(help="Columns, shell-style, such as 'CIFAR-10*'.")] = "*",
    runs: Annotated[Path, typer.Option(help="Folder of the runs, in which finished ones are found again.")] = Path(
        "runs/reproduce"
    ),
    processes: ProcessesOption = None,
    finished: Annotated[bool, typer.Option("--finished", help="Run nothing; show what is finished.")] = False,
    card: Annotated[Path | None, typer.Option(help="File for a reproduction card, in Markdown.")] = None,
    note: Annotated[str, typer.Option(help="What the card's reader must know besides, such as of the data.")] = "",
    listed: Annotated[
        bool, typer.Option("--list", help="List the papers' tables and figures, and what reproduces each.")
    ] = False,
    paper: Annotated[str, typer.Option(help="Papers to list, shell-style, such as 'fedin*'.")] = "*",
) -> None:
    """Run a table of a paper, at any scale, and print ours beside the paper's numbers; what was stopped goes on."""
    stages.show_stages("starting")
    from potluck.cli.reproduce import Asked, print_papers, print_recipes, print_reproduction

    recipe, assignments = told_apart(recipe, overrides)
    if paper != "*" and not listed:
        raise typer.BadParameter("--paper chooses what --list lists; expected both: potluck reproduce --list --paper X")
    if recipe is not None and listed:
        raise typer.BadParameter(f"--list runs no recipe, found {recipe}; leave out one of the two")
    if recipe is None:
        if assignments or (scale, only, columns, card) != (1.0, "*", "*", None):
            raise typer.BadParameter("name a recipe too; all: potluck reproduce")
        print_papers(paper) if listed else print_recipes()
        return
    asked = Asked(scale, seeds, only, columns, runs, processes, run=not finished, card=card, note=note)
    if not print_reproduction(recipe, assignments, asked):
        raise typer.Exit(1)


def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Runs, or folders of runs.", autocompletion=completion.of_folders)
    ],
    to: Annotated[Path | None, typer.Option(help="Folder to write to. Default: the run's folder.")] = None,
    target: GoalOption = None,
    measure: MeasureOption = "personal",
    smooth: Annotated[
        int,
        typer.Option(
            help="Draw curves as the mean of the latest N values, over pale ones as measured.", metavar="N", min=1
        ),
    ] = 1,
    inside: Annotated[
        bool, typer.Option("--inside", help="Also what the models show, as `potluck analyse`, which takes as long.")
    ] = False,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Write a report that opens in any browser: curves, tables, classes; and a short one in Markdown beside it."""
    from potluck.analysis.report import Target, write_report
    from potluck.cli.compare import measure_of

    place = to or (folders[0] if len(folders) == 1 else Path("report"))
    of = measure_of(measure)
    goal = None if target is None else Target(target, of)
    findings = None
    if inside:
        stages.show_stages("starting")
        from potluck.api.analyse import inside_of

        findings = inside_of(folders, of, stages.show_stages)
        stages.clear()
    page = write_report(folders, place, goal, measure=of, smooth=smooth, findings=findings)
    typer.echo(page)
    if show and typer.launch(page.resolve().as_uri()) != 0:
        typer.echo(f"Found no browser; open {page} yourself.", err=True)


def analyse(
    folders: Annotated[
        list[Path], typer.Argument(help="Runs, or folders of runs.", autocompletion=completion.of_folders)
    ],
    to: Annotated[Path | None, typer.Option(help="Folder to write to. Default: the run's folder.")] = None,
    measure: Annotated[
        str, typer.Option(help=f"By which score of clients: {', '.join(TITLES_OF_A_CLIENT)}.")
    ] = "personal",
    chosen: Annotated[
        bool, typer.Option("--chosen", help="The rounds that are best on validation parts, not the last.")
    ] = False,
    alone: Annotated[
        str | None, typer.Option(help="The experiment that stands for training alone. Default: that of `local`.")
    ] = None,
    target: GoalOption = None,
    clients: Annotated[int, typer.Option(help="Compare the networks of so many clients.", min=2)] = 10,
    examples: Annotated[int, typer.Option(help="Compare them on so many common test examples.", min=8)] = 512,
    bins: Annotated[int, typer.Option(help="Of confidence, for the calibration.", min=2)] = 15,
    by: Annotated[
        str | None, typer.Option(help="A column of the runs' tables: what each group of test examples gains.")
    ] = None,
    map_class: Annotated[
        int | None, typer.Option(help="The map of features shows examples of this class alone.", min=0)
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Analyse what runs have trained: who profits and who loses, at what cost, and how alike clients' models are."""
    stages.show_stages("starting")
    from potluck.api.analyse import Scope, analysis_of
    from potluck.cli.compare import measure_of

    scope = Scope(measure_of(measure), chosen, alone, target, clients, examples, bins, by, map_class)
    analysis = analysis_of(folders, scope, stages.show_stages)
    page = analysis.write(to or (folders[0] if len(folders) == 1 else Path("analysis")))
    stages.clear()
    for line in (*analysis.sentences, *analysis.findings.remarks, page):
        typer.echo(line)
    if show and typer.launch(page.resolve().as_uri()) != 0:
        typer.echo(f"Found no browser; open {page} yourself.", err=True)


def attack(
    folder: Annotated[Path, typer.Argument(help="A run.", autocompletion=completion.of_folders)],
    to: Annotated[Path | None, typer.Option(help="Folder to write to. Default: the run's folder.")] = None,
    images: Annotated[int, typer.Option(help="Look for so many examples in features.", min=1)] = 16,
    steps: Annotated[int, typer.Option(help="Of the search for each.", min=1)] = 2000,
    canaries: Annotated[int, typer.Option(help="Audit a private release by so many examples.", min=2)] = 512,
    seed: Annotated[int, typer.Option(help="Of the attacker's draws.", min=0)] = 0,
    lpips: Annotated[
        Path | None, typer.Option(help="Weights of LPIPS on AlexNet. Default: a random trunk, under that name.")
    ] = None,
    chosen: Annotated[
        bool, typer.Option("--chosen", help="After the round that is best on validation parts, not the last.")
    ] = False,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Attack a run as its server could: classes, members and inputs of its clients, and what its privacy is worth."""
    stages.show_stages("starting")
    from potluck.api.result import open_run

    found = open_run(folder).attack(
        images=images, steps=steps, canaries=canaries, seed=seed, lpips=lpips, chosen=chosen, tell=stages.show_stages
    )
    page = found.write(to or folder)
    stages.clear()
    for line in (*found.sentences, *found.found.remarks, page):
        typer.echo(line)
    if show and typer.launch(page.resolve().as_uri()) != 0:
        typer.echo(f"Found no browser; open {page} yourself.", err=True)
    if found.broken:
        raise typer.Exit(1)


def twin(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help="TOML files, methods, runs, folders of runs; then dotted keys.",
            autocompletion=completion.of_compared,
        ),
    ] = None,
    devices: Annotated[Path | None, typer.Option(help="CSV file of the clients' devices.")] = None,
    hours: Annotated[float | None, typer.Option(help="How long it goes on. Default: the rounds of the run.")] = None,
    doubt: Annotated[
        float, typer.Option(help="How wrong speeds may be: 0.3 for a third; shows what that comes to.", min=0)
    ] = 0.0,
    target: GoalOption = None,
) -> None:
    """Show how long federations take on given devices, without training, or how long finished runs would have taken."""
    from potluck.cli.twin import Question, print_twins

    print_twins(what or [], Question(devices, hours, doubt, target))
