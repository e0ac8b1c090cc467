"""A node's worker, confined: it reads what is installed and what its owner named, and writes to its state alone.

The last of three walls. A server's experiment has no place for a path (`potluck.flower.node.asked`), and nothing makes
code or data of a path that the owner did not name (`potluck.core.ground.access`). This one does not ask which code it
is that opens a file: Python reports every opening, every change to a folder and every program that it is about to
start, and what does not fit is stopped before it happens. Libraries written in other languages open files unseen by it.
"""

import os
import site
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from potluck.core.ground.text import one_line
from potluck.flower.node.config import NodeConfig

_SYSTEM = ("/proc", "/sys", "/dev", "/usr/share", "/usr/lib", "/usr/local/lib", "/lib", "/etc/ssl", "/etc/pki")
_SYSTEM_FILES = ("/etc/mime.types", "/etc/os-release", "/etc/hosts", "/etc/resolv.conf", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/shm", "/dev/tty")
_CACHES, _COPIES = ("HF_HOME", "XDG_CACHE_HOME"), "POTLUCK_DATA"
"""Environment variables by which the owner says where data sets are cached, and where copies of them lie."""

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.mkdir": ((0, 2),), "os.remove": ((0, 1),), "os.rmdir": ((0, 1),), "os.truncate": ((0, None),),
    "os.chmod": ((0, 2),), "os.chown": ((0, 3),), "os.utime": ((0, 3),), "os.setxattr": ((0, None),),
    "os.removexattr": ((0, None),), "os.rename": ((0, 2), (1, 3)), "os.link": ((0, 2), (1, 3)),
    "os.symlink": ((1, 2),),
}  # fmt: skip
"""By event of Python's that changes the file system: which of its arguments are paths, and which hold the open folder
from which each starts."""

_PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn")


class Confined(PermissionError):
    """The node's worker does not do this, whoever asks."""


def environment_of(home: NodeConfig) -> dict[str, str]:
    """The environment of a confined worker: what it caches lies in its state folder, unless the owner says where."""
    cache = _cache_of(home)
    return {
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(cache)),
        "HF_HOME": os.environ.get("HF_HOME", str(cache / "huggingface")),
        "TMPDIR": str(cache / "tmp"),
        "MPLCONFIGDIR": str(cache / "matplotlib"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "torch"),
    }


def _cache_of(home: NodeConfig) -> Path:
    return home.state.resolve() / "cache"


def confine(home: NodeConfig) -> None:
    """Confine this process, as long as it lives, to what is installed, its state folder and what its owner named."""
    temporary = _cache_of(home) / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(temporary)  # some library may have asked before, when there was no such folder
    caches, copies = (
        [Path(os.environ[name]).expanduser() for name in names if os.environ.get(name)]
        for names in (_CACHES, [_COPIES])
    )
    written = [home.state, home.audit_log, *caches, *map(Path, _DEVICES)]
    folders = [path.parent if path.suffix == ".py" else path for path in home.named]  # code imports what lies beside it
    lists = [path for path in (home.policy, home.peers) if path is not None]
    read = [*written, *lists, *copies, *folders, *_installed(), *map(Path, (*_SYSTEM, *_SYSTEM_FILES))]
    sys.addaudithook(_wall(_below(read), _below(written)))


def _installed() -> list[Path]:
    """Where Python, its packages and Potluck lie."""
    places = [sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values(), *site.getsitepackages()]
    imported_from = [entry for entry in sys.path if entry]
    return [Path(__file__).parents[2], *map(Path, [*places, *imported_from])]


def _below(places: Iterable[Path]) -> Callable[[str], bool]:
    """Whether a path is among places or below them, as written or as its links lead, which are the owner's."""
    roots = tuple({root for place in places for root in (os.path.abspath(place), os.path.realpath(place))})

    def lies_below(path: str) -> bool:
        found = {os.path.abspath(path), os.path.realpath(path)}
        return any(one == root or one.startswith(f"{root.rstrip(os.sep)}{os.sep}") for one in found for root in roots)

    return lies_below


def _wall(may_read: Callable[[str], bool], may_write: Callable[[str], bool]) -> Callable[[str, tuple[Any, ...]], None]:
    """Python's audit hook: called before each of its events, and stops one by an exception."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            if isinstance(flags, int) and flags & _WRITES:
                _check(path, may_write, "writes to")
            elif mode is not None or not _bare(path):  # a bare name may start from an open folder, which was checked
                _check(path, may_read, "reads")
        elif event in _CHANGES:
            for path, folder in _CHANGES[event]:
                _check(_started_at(arguments[path], folder and arguments[folder]), may_write, "changes")
            if event == "os.symlink":  # a link that leads out of the state folder would be a way out of it
                _check(os.path.join(os.path.dirname(arguments[1]), arguments[0]), may_write, "links to")
        elif event in ("os.listdir", "os.scandir"):
            _check(arguments[0] or ".", may_read, "lists")
        elif event in _PROGRAMS:
            raise Confined(f"a node's worker starts no program; asked for {one_line(str(arguments[0]), 80)}")

    return hook


def _bare(path: Any) -> bool:
    return isinstance(path, str) and os.sep not in path and path not in (os.curdir, os.pardir)


def _started_at(path: Any, folder: int | None) -> Any:
    """A path that starts from an open folder, from the root; any other as it is."""
    return path if folder is None or folder < 0 else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)


def _check(path: Any, allowed: Callable[[str], bool], does: str) -> None:
    if isinstance(path, str | bytes | os.PathLike) and not allowed(os.fsdecode(path)):  # others are open already
        raise Confined(
            f"a node's worker {does} nothing at {one_line(os.fsdecode(path), 80)!r}, which is neither installed, nor in"
            " the node's state folder, nor named by its owner"
        )
