"""How a command ends: exit codes, signals, and errors and warnings on one line."""

import errno
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import typer

from potluck.cli import stages
from potluck.cli.commands.advice import option_advice
from potluck.core.ground.errors import PotluckError, PotluckWarning, StartAnew, explained

# Typer brings its own copy of click or uses the installed one, depending on its version.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
_COMPLETING = "_POTLUCK_COMPLETE"  # set by the shell that asks what would complete a line
_SIGNAL = 128  # plus the signal's number is the exit code of what a signal ended, as in shells


def run_and_exit(command: Callable[[], int | None]) -> NoReturn:
    """Carry out a command and end the program with its exit code.

    Args:
        command: returns its exit code, None for 0. An error that the user can fix is one line on standard error and
            exit code 2.

    Raises:
        SystemExit: always.
    """
    code = _exit_code(command)
    if code > _SIGNAL:  # all is said and saved: while Python cleans up, Ctrl-C again is no error to report
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(_SIGNAL + number))
    sys.exit(code)


def _exit_code(command: Callable[[], int | None]) -> int:
    """The exit code of a command, of which all is said."""
    try:
        code = _warning_on_a_line(command)
        sys.stdout.flush()
        return code
    except StartAnew as error:
        _start_anew(error.environment)
    except PotluckError as error:
        return _refuse(str(error))
    except _UsageError as error:
        return _refuse(option_advice(error, sys.argv[1:]))
    except (typer.Abort, KeyboardInterrupt):
        stages.clear()
        return _SIGNAL + signal.SIGINT
    except SystemExit as error:  # an exit code of 0 would say that all went well
        if _COMPLETING in os.environ:  # which ends this way
            raise
        if isinstance(error.__context__, BrokenPipeError):  # as rich ends the program
            return _unread()
        what = explained(error)
        return _refuse(f"your code ended the program, and the command is not done: {what}; raise an error")
    except BrokenPipeError:
        return _unread()
    except (OSError, MemoryError) as error:
        return _refuse(of_the_machine(error))


def _warning_on_a_line(command: Callable[[], int | None]) -> int:
    """Carry out a command whose warnings are each one line."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", PotluckWarning)
        warnings.showwarning = _showing(warnings.showwarning)
        logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells of folders for its cache
        return command() or 0


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


def _start_anew(environment: Mapping[str, str]) -> NoReturn:
    """Carry out the same command in a program with other environment variables, in place of this one."""
    stages.clear()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **environment})


def _unread() -> int:
    """End well although the reader of our output has closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python reports an error when it flushes
    return 0


def _refuse(reason: str) -> int:
    """Print the error on one line; return the exit code of errors that the user can fix."""
    stages.clear()
    with suppress(OSError):  # the reader may be gone
        if not reason:  # the help was asked for, and has been shown
            return 2
        print(f"potluck: {' '.join(reason.split())}", file=sys.stderr)  # noqa: T201
    return 2


def of_the_machine(error: OSError | MemoryError) -> str:
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
