"""Programs that are started as copies of one that has imported what they need."""

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from potluck.engine.frames import receive, send


class Copied:
    """Stands for the module `subprocess` where Flower starts programs: one of them is copied, others are started.

    Args:
        name: of the program that is copied.
        imports: imports what that needs.
        program: acts as it; ends the process.
    """

    DEVNULL = subprocess.DEVNULL

    def __init__(self, name: str, imports: Callable[[], object], program: Callable[[], object]) -> None:
        self._name = name
        self._door, theirs = socket.socketpair()
        if os.fork() == 0:
            self._door.close()
            _copy(theirs, imports, program)
        theirs.close()

    def Popen(self, words: Sequence[str], **streams: Any) -> None:
        """Start a program with these words, the first of which is its name."""
        if words[0] == self._name:
            with suppress(ConnectionError):  # it was killed, to free memory, say
                send(self._door, json.dumps(list(words)).encode())
                return
        subprocess.Popen(words, **streams)


def _copy(asked: socket.socket, imports: Callable[[], object], program: Callable[[], object]) -> NoReturn:
    """Copy this process for every list of words that comes, until nobody can send one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with who asks
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the copies
    imports()
    with suppress(EOFError, ConnectionError):
        while True:
            words = json.loads(receive(asked))
            if os.fork() == 0:
                asked.close()
                _become(words, program)
    os._exit(0)


def _become(words: Sequence[str], program: Callable[[], object]) -> NoReturn:
    """Act as a program that was started with these words."""
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = list(words)
    code = 1
    try:
        program()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
