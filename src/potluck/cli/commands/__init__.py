"""What `potluck` understands: its commands, in the order in which the help shows them.

Files beside this one declare the commands' arguments and options. A command parses, then imports what it needs, so that
help and completion wait for nothing.
"""

from typing import Annotated

import typer

from potluck._version import __version__
from potluck.cli.commands import comparing, deploying, looking, running
from potluck.cli.commands.group import CommandGroup

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


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


_COMMANDS = {
    "run": running.run,
    "list": looking.list_things,
    "show": looking.show,
    "check": looking.check,
    "inspect": looking.inspect,
    "new": looking.new,
    "report": comparing.report,
    "analyse": comparing.analyse,
    "attack": comparing.attack,
    "watch": running.watch,
    "compare": comparing.compare,
    "sweep": comparing.sweep,
    "reproduce": comparing.reproduce,
    "plan": looking.plan,
    "twin": comparing.twin,
    "export": deploying.export,
    "keys": deploying.keys,
    "public": deploying.public,
    "tokenizer": deploying.tokenizer,
    "serve": deploying.serve,
    "join": deploying.join,
    "peer": deploying.peer,
}

for _name, _command in _COMMANDS.items():
    app.command(name=_name)(_command)
