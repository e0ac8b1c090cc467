"""The command line: each command parses, then imports what it needs."""

import errno
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from potluck._version import __version__
from potluck.cli import completion, stages
from potluck.cli.commands import Commands, option_advice
from potluck.core.ground.errors import PotluckError, PotluckWarning, explained
from potluck.records import TITLES

# Typer brings its own copy of click or uses the installed one, depending on its version.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
_COMPLETING = "_POTLUCK_COMPLETE"  # set by the shell that asks what would complete a line
_SIGNAL = 128  # plus the signal's number is the exit code of what a signal ended, as in shells

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

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
Parent = Annotated[Path, typer.Option(help="Folder in which the run's folder is made.")]
Processes = Annotated[int | None, typer.Option(help="Runs at a time. Default: one for each core.", min=1)]
MeasureOption = Annotated[
    str,
    typer.Option(help=f"By which score: {', '.join(f'{name} ({title})' for name, title in TITLES.items())}."),
]
Chosen = Annotated[bool, typer.Option("--chosen", help="Compare the rounds that are best on validation parts.")]
Against = Annotated[str | None, typer.Option(help="The row to compare the others with. Default: the first.")]
Goal = Annotated[float | None, typer.Option(help="Show what it took to reach this value, such as 0.6.")]
Export = Annotated[Path | None, typer.Option(help="File for the table: .md, .csv or .tex.")]


def _version(asked: bool) -> None:
    """Print the version, if it was asked for, and end."""
    if asked:
        typer.echo(f"potluck {__version__}")
        raise typer.Exit


@app.callback()
def potluck(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Federated learning where every client brings its own model."""


@app.command()
def run(
    target: TargetArgument = None,
    overrides: OverridesArgument = None,
    to: Parent = Path("runs"),
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

    target, assignments = _asked(target, overrides)
    if resume is None:
        if branch:
            raise typer.BadParameter("--branch: give --resume FOLDER too, the run to branch from")
        start_run(target, assignments, to)
    elif branch:
        branch_run(resume, target, assignments)
    else:
        resume_run(resume, target, assignments)


@app.command(name="list")
def list_things(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="methods, models, datasets, partitions or tasks. Default: all.", autocompletion=completion.of_kinds
        ),
    ] = None,
    pattern: Annotated[str, typer.Argument(help="Shell-style, such as 'fed*'.")] = "*",
    long: Annotated[bool, typer.Option("--long", help="Whole lines, and what each method sends and keeps.")] = False,
) -> None:
    """List the methods, models, data sets and partitions that a configuration can name."""
    from potluck.cli.catalogue import print_lists

    print_lists(kind, pattern, long=long)


@app.command()
def show(
    name: Annotated[
        str,
        typer.Argument(
            help="A method, model, data set, partition or task; run or federation; FILE.py:NAME; a run's folder.",
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


@app.command()
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

    target, assignments = _asked(target, overrides)
    if target is None or target.endswith(".toml"):
        examine_federation(target, assignments)
    elif assignments:
        raise typer.BadParameter(f"{assignments[0]}: a method is checked as it is; name a TOML file, or no target")
    elif not examine(target):
        raise typer.Exit(1)


@app.command()
def inspect(
    what: Annotated[str, typer.Argument(help="federation.", autocompletion=completion.of_inspected)],
    target: TargetArgument = None,
    overrides: OverridesArgument = None,
) -> None:
    """Draw which layers of which clients meet, where a method averages layers by name."""
    from potluck.cli.meeting import print_meeting

    target, assignments = _asked(target, overrides)
    print_meeting(what, target, assignments)


@app.command()
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


@app.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Runs, or folders of runs.", autocompletion=completion.of_folders)
    ],
    to: Annotated[Path | None, typer.Option(help="Folder to write to. Default: the run's folder.")] = None,
    target: Goal = None,
    measure: MeasureOption = "personal",
    smooth: Annotated[
        int,
        typer.Option(
            help="Draw curves as the mean of the latest N values, over pale ones as measured.", metavar="N", min=1
        ),
    ] = 1,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Write a report that opens in any browser: curves, tables, classes; and a short one in Markdown beside it."""
    from potluck.analysis.report import Target, write_report
    from potluck.cli.compare import measure_of

    place = to or (folders[0] if len(folders) == 1 else Path("report"))
    of = measure_of(measure)
    goal = None if target is None else Target(target, of)
    page = write_report(folders, place, goal, measure=of, smooth=smooth)
    typer.echo(page)
    if show and typer.launch(page.resolve().as_uri()) != 0:
        typer.echo(f"Found no browser; open {page} yourself.", err=True)


@app.command()
def watch(
    folders: Annotated[list[Path] | None, typer.Argument(help="Runs, or folders of runs. Default: runs.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print how they stand, and do not wait.")] = False,
) -> None:
    """Follow runs that other processes execute, until they end; exits with 1 if one of them does not finish."""
    from potluck.cli.watch import watch_to_the_end

    if not watch_to_the_end(folders or [Path("runs")], once=once) and not once:
        raise typer.Exit(1)


@app.command()
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
    to: Parent = Path("runs"),
    processes: Processes = None,
    measure: MeasureOption = "personal",
    chosen: Chosen = False,
    against: Against = None,
    target: Goal = None,
    table: Export = None,
) -> None:
    """Compare methods over seeds, and start the runs that are missing; or compare runs that are there."""
    stages.show_stages("starting")
    from potluck.cli.compare import View, print_comparison

    view = View(measure, chosen=chosen, against=against, target=target, file=table)
    if not print_comparison(what or [], seeds=seeds, on=on, parent=to, processes=processes, view=view):
        raise typer.Exit(1)


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="TOML file of a run with a table [sweep].")],
    overrides: OverridesArgument = None,
    to: Annotated[Path | None, typer.Option(help="Folder of the runs. Default: runs/NAME, after the file.")] = None,
    processes: Processes = None,
    measure: MeasureOption = "personal",
    chosen: Chosen = False,
    against: Against = None,
    target: Goal = None,
    table: Export = None,
) -> None:
    """Run a grid of settings, or tune them, and compare the results; a sweep that was stopped goes on."""
    stages.show_stages("starting")
    from potluck.cli.compare import View, print_sweep

    view = View(measure, chosen=chosen, against=against, target=target, file=table)
    if not print_sweep(file, overrides or [], parent=to or Path("runs") / file.stem, processes=processes, view=view):
        raise typer.Exit(1)


@app.command()
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
    processes: Processes = None,
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

    recipe, assignments = _asked(recipe, overrides)
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


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="A model of `potluck list models`.", autocompletion=completion.of_models)
    ],
    budgets: Annotated[list[str], typer.Argument(help="Such as 32MiB, 1/6 of the whole, or fair, lack, surplus.")],
    classes: Annotated[int, typer.Option(help="Classes of the task.")] = 10,
    shape: Annotated[str, typer.Option(help="Of one input.")] = "3x32x32",
    batch_size: Annotated[int, typer.Option(help="Examples a step.")] = 32,
    optimizer: Annotated[
        str, typer.Option(help="adam, momentum or sgd, whose state a run's own estimate counts; none: as in the paper.")
    ] = "none",
) -> None:
    """Show into which pieces FeDepth cuts a model for given memory budgets, and what each piece takes."""
    from potluck.cli.plan import print_plan, shape_of

    print_plan(
        model,
        budgets,
        num_classes=classes,
        input_shape=shape_of(shape),
        batch_size=batch_size,
        optimizer=optimizer,
    )


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    to: Annotated[Path, typer.Option(help="File: .pt, .safetensors (weights), .pt2, .ts or .onnx (a program).")],
    client: Annotated[int | None, typer.Option(help="Number of the client whose model it is.")] = None,
    server: Annotated[bool, typer.Option("--global", help="The global model instead.")] = False,
    format: Annotated[
        str | None, typer.Option(help="state-dict, exported, torchscript or onnx. Default: by the file's ending.")
    ] = None,
    chosen: Annotated[bool, typer.Option("--chosen", help="Of the round that is best on validation parts.")] = False,
) -> None:
    """Write the model that a client predicts with to a file that works without the run."""
    from potluck.cli.export import write_network

    write_network(run, to, client=client, server=server, format=format, chosen=chosen)


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="Folder of the keys; existing ones are kept.")] = Path("keys"),
    address: Annotated[
        list[str] | None, typer.Option(help="Host name or IP address under which nodes reach the server.")
    ] = None,
    node: Annotated[list[str] | None, typer.Option(help="Name of a node that gets a key.")] = None,
    revoke: Annotated[list[str] | None, typer.Option(help="Name of a node to revoke.")] = None,
    days: Annotated[int, typer.Option(help="Days for which the server's certificate is valid.")] = 365,
) -> None:
    """Make certificates and nodes' keys for a federation across machines."""
    from potluck.cli.flower import make_keys, require_flower

    require_flower()
    make_keys(folder, address or [], node or [], revoke or [], days)


@app.command()
def serve(
    target: TargetArgument = None,
    overrides: OverridesArgument = None,
    listen: Annotated[str, typer.Option(help="HOST:PORT to listen at for nodes.")] = "0.0.0.0:8443",
    keys: Annotated[Path | None, typer.Option(help="Folder made by `potluck keys`.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No encryption; anybody may be a node.")] = False,
    to: Parent = Path("runs"),
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the run, which is resumed if it was started before.")
    ] = None,
    superlink: Annotated[
        str | None, typer.Option(help="HOST:PORT of your own SuperLink. Default: start one behind a gate.")
    ] = None,
    largest_reply: Annotated[
        float, typer.Option(min=0.0, max=16.0, help="The most GiB of one reply of a node; a larger one is refused.")
    ] = 4.0,
) -> None:
    """Run a federation whose clients are nodes on other machines."""
    from potluck.cli.flower import host, require_flower

    require_flower()
    target, assignments = _asked(target, overrides)
    trusted = _trusted(keys, insecure)
    host(
        target,
        assignments,
        parent=to,
        folder=folder,
        address=listen,
        keys=trusted,
        superlink=superlink,
        largest_reply=largest_reply,
    )


@app.command()
def join(
    address: Annotated[str, typer.Argument(help="HOST:PORT of the server.")],
    keys: Annotated[Path | None, typer.Option(help="This node's folder, made by `potluck keys`.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Without encryption and without a key.")] = False,
    data: Annotated[
        Path | None,
        typer.Option(help="Own data: an .npz file or a folder of images. Default: a share of the server's."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Own model: of `potluck list models`, or path/to/file.py:function.")
    ] = None,
    capacity: Annotated[float | None, typer.Option(help="Share of the full model that fits in this machine.")] = None,
    device: Annotated[str, typer.Option(help="Device to compute on: cpu, auto, cuda, cuda:1, mps or xpu.")] = "cpu",
    allow_code: Annotated[
        list[Path] | None,
        typer.Option(help="Own copy of a Python file that the server may name as method or model."),
    ] = None,
    policy: Annotated[Path | None, typer.Option(help="A TOML file with what the server may ask of this node.")] = None,
    audit: Annotated[
        Path | None, typer.Option(help="File of the audit log, a line for each request. Default: in the state folder.")
    ] = None,
    state: Annotated[Path, typer.Option(help="Folder for the node's state.")] = Path("node"),
) -> None:
    """Take part in a federation as a node, until interrupted."""
    from potluck.cli.flower import require_flower, take_part

    require_flower()
    take_part(
        address,
        keys=_trusted(keys, insecure),
        state=state,
        data=data,
        model=model,
        capacity=capacity,
        device=device,
        code=allow_code or [],
        policy=policy,
        audit=audit,
    )


def _asked(target: str | None, overrides: list[str] | None) -> tuple[str | None, list[str]]:
    """Target and assignments; if there is no target, its place holds the first assignment."""
    given = list(overrides or [])
    return (None, [target, *given]) if target is not None and "=" in target else (target, given)


def _trusted(keys: Path | None, insecure: bool) -> Path | None:
    """The keys; None only with --insecure."""
    if (keys is None) != insecure:
        raise typer.BadParameter("give --keys FOLDER, made by `potluck keys`, or --insecure; one of them")
    if insecure:
        typer.echo("Warning: no encryption; anyone in this network can read the messages and take part.", err=True)
    return keys


def _showing(others: Callable[..., None]) -> Callable[..., None]:
    """The function that shows warnings: Potluck's once, on one line, others as before."""
    shown: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if not issubclass(category, PotluckWarning):
            others(message, category, *place, **more)
        elif str(message) not in shown:
            shown.add(str(message))
            stages.clear()
            print(f"potluck: {' '.join(str(message).split())}", file=sys.stderr)  # noqa: T201

    return show


def _unread() -> int:
    """End well although the reader of our output has closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python reports an error when it flushes
    return 0


def main() -> None:
    """Run the command line; an error that the user can fix is one line on standard error and exit code 2."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", PotluckWarning)
            warnings.showwarning = _showing(warnings.showwarning)
            logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells of folders for its cache
            code = app(prog_name="potluck", standalone_mode=False) or 0
        sys.stdout.flush()
    except PotluckError as error:
        code = _refuse(str(error))
    except _UsageError as error:
        code = _refuse(option_advice(error, sys.argv[1:]))
    except (typer.Abort, KeyboardInterrupt):
        stages.clear()
        code = _SIGNAL + signal.SIGINT
    except SystemExit as error:  # an exit code of 0 would say that all went well
        if _COMPLETING in os.environ:  # which ends this way
            raise
        if isinstance(error.__context__, BrokenPipeError):  # as rich ends the program
            code = _unread()
        else:
            what = explained(error)
            code = _refuse(f"your code ended the program, and the command is not done: {what}; raise an error")
    except BrokenPipeError:
        code = _unread()
    except (OSError, MemoryError) as error:
        code = _refuse(_of_the_machine(error))
    if code > _SIGNAL:  # all is said and saved: while Python cleans up, Ctrl-C again is no error to report
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(_SIGNAL + number))
    sys.exit(code)


def _refuse(reason: str) -> int:
    """Print the error on one line; return the exit code of errors that the user can fix."""
    stages.clear()
    with suppress(OSError):  # the reader may be gone
        if not reason:  # the help was asked for, and has been shown
            return 2
        print(f"potluck: {' '.join(reason.split())}", file=sys.stderr)  # noqa: T201
    return 2


def _of_the_machine(error: OSError | MemoryError) -> str:
    """Advice for an error of the machine: a full disk, missing permission, no memory."""
    if isinstance(error, MemoryError):
        return f"no memory is left ({str(error) or 'MemoryError'}); use smaller models, fewer workers or less data"
    places = ", ".join(str(place) for place in (error.filename, error.filename2) if place is not None)
    advice = {
        errno.ENOSPC: "make room on the disk",
        errno.EDQUOT: "make room within your quota",
        errno.EROFS: "name a folder that can be written",
        errno.EACCES: "name one in which you may read and write",
        errno.EPERM: "name one in which you may read and write",
        errno.ENOTDIR: "a part of this path is a file; name a folder",
    }.get(error.errno or 0)
    return "; ".join(filter(None, [f"{places}: {error.strerror}" if places else str(error), advice]))
