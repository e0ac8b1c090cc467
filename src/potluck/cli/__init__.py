"""The command line.

`commands` has what can be typed, `ending` how that ends; the other files do what the commands say.
"""

from functools import partial

from potluck.cli.commands import app
from potluck.cli.ending import run_and_exit


def main() -> None:
    """Run the command line; an error that the user can fix is one line on standard error and exit code 2."""
    run_and_exit(partial(app, prog_name="potluck", standalone_mode=False))
