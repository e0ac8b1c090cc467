"""Flower's programs as child processes: quiet, confined to one folder, and ended with their parent."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from potluck.core.ground.errors import ConfigError, StorageError
from potluck.flower.deploy.logs import keep_short

PYTHON = Path(sys.executable).name
"""Python, as a program beside Flower's."""

_BIN = Path(sys.executable).parent
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl
_LOOKS_EVERY = 0.2  # seconds
_LONGEST_SOCKET = 103  # bytes of a socket's path: the limit of macOS; Linux allows 107


def private_folder(path: Path) -> None:
    """Make a folder if there is none, and let no other user look into it.

    Raises:
        StorageError: it cannot be made, or is another user's.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise StorageError(f"cannot keep {path} from other users: {error.strerror or error}") from error


def socket_in(folder: Path, name: str) -> Path:
    """The path of a socket in a folder.

    Raises:
        ConfigError: the path is longer than the system allows.
    """
    path = folder.resolve() / name
    if (length := len(os.fsencode(path))) > _LONGEST_SOCKET:
        raise ConfigError(
            f"{folder}: the path of its socket, {path}, has {length} bytes; expected at most {_LONGEST_SOCKET};"
            " choose a folder with a shorter path"
        )
    return path


def environment(home: Path) -> dict[str, str]:
    """An environment in which Flower sends no telemetry, installs nothing and writes to `home` alone."""
    return os.environ | {
        "PATH": f"{_BIN}{os.pathsep}{os.environ.get('PATH', '')}",  # Flower finds its programs by name
        "FLWR_HOME": str(home.resolve()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # seconds; the default is every second
        "PYTHONUNBUFFERED": "1",
    }


def start(
    program: str, arguments: Sequence[str], home: Path, log: Path, more: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start one of Flower's programs; its output is appended to a file, which is kept short.

    A pipe would not work: orphaned children would keep it open, and its last lines would come after its end.

    Args:
        program: the program's name.
        arguments: its arguments.
        home: the folder for Flower's own files.
        log: the file.
        more: further environment variables.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            [str(_BIN / program), *arguments],
            env=environment(home) | dict(more or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_dying_with_parent(),
            start_new_session=True,  # Ctrl-C reaches us alone, and we end it
        )
    threading.Thread(target=keep_short, args=(log, process), name=f"log of {program}", daemon=True).start()
    return process


def stop(process: subprocess.Popen[bytes], patience: float = 15.0) -> None:
    """End a program and its children: by SIGTERM, then by SIGKILL."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_with_parent() -> None:
    """Have this process end when the one that started it has ended, whatever it does at that moment.

    For a process that Flower starts, and ends by an interrupt: where that comes while it waits, or its threads ask a
    server that is gone, it stays for minutes, or more than an hour. It ends as if it were killed.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOKS_EVERY)
        os._exit(1)

    threading.Thread(target=watch, name="watching the parent", daemon=True).start()


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now."""
    with socket.socket() as found:
        found.bind((host, 0))
        return found.getsockname()[1]


def lines_after(log: Path, position: int) -> tuple[list[str], int]:
    """The whole lines of a log after a position, and the position after them; all lines of a log begun anew."""
    if not log.is_file():
        return [], position
    with log.open("rb") as file:
        position = position if position <= file.seek(0, os.SEEK_END) else 0
        file.seek(position)
        content = file.read()
    whole = content[: content.rfind(b"\n") + 1]
    return whole.decode(errors="replace").splitlines(), position + len(whole)


def _dying_with_parent() -> Callable[[], None] | None:
    """A pre-exec hook that makes the kernel kill the child when its parent dies (Linux only; None elsewhere)."""
    if sys.platform != "linux":
        return None
    c = ctypes.CDLL(None)  # loaded before the fork
    return lambda: c.prctl(_DIE_WITH_PARENT, signal.SIGTERM)
