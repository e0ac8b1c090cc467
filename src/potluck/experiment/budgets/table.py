"""Tables of budgets, `budgets.csv`: a row for each client, or for several alike.

    client,device,memory,seconds,bandwidth
    0,pi-4,,60,
    1,,512 MiB,60,20/5 Mbit/s

`client` is a client's number and `clients` how many clients a row is for; rows without either are for one client each,
all in the order of the rows. `device` names a class of `potluck list devices`, whose numbers a row's own replace. What
is left empty and of no device has no limit.
"""

import csv
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from potluck.core.ground.errors import ConfigError, nearest
from potluck.experiment.budgets.quantities import BIT_UNITS, BYTE_UNITS, SPEED_UNITS, TIME_UNITS, quantity
from potluck.experiment.settings.budget import Budget, check_budgets
from potluck.experiment.settings.devices import get_device

_MIB, _MBIT, _GIGA = 2**20, 10**6, 10**9
_KEYS = ("memory_mib", "gflops", "down_mbit", "up_mbit", "disk_mib")
_COLUMNS = ("client", "clients", "device", "memory", "seconds", "bandwidth", "disk", "speed")


def read_budgets(path: Path, clients: int) -> tuple[Budget, ...]:
    """The budgets in a table, one for every client of a federation.

    Args:
        path: of the table, with comma-separated columns and their names in the first line.
        clients: how many the federation has.

    Raises:
        ConfigError: it cannot be read, a cell says nothing, or a client has no budget or two of them.
    """
    found: list[Budget] = []
    for line, cells in _rows(path):
        where = f"{path}, line {line}"
        try:
            found.append(_budget(cells, sum(len(budget.clients) for budget in found), where))
        except ConfigError as error:
            raise error if str(error).startswith(where) else ConfigError(f"{where}: {error}") from error
    check_budgets(found, clients, str(path))
    without = sorted(set(range(clients)) - {client for budget in found for client in budget.clients})
    if without:
        raise ConfigError(
            f"{path}: no budget for client{'s' * (len(without) > 1)} {', '.join(map(str, without[:10]))}"
            f"{', ...' * (len(without) > 10)}; the federation has {clients}: expected a row for each, or `clients`,"
            " how many a row is for"
        )
    return tuple(found)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """The lines that are not empty, with their numbers, by column."""
    try:
        lines = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: cannot be read: {why}; expected a table with comma-separated columns") from error
    names = [name.strip() for name in lines[0]] if lines else []
    if not any(names) or len(lines) < 2:
        raise ConfigError(f"{path}: is empty; expected columns, of {', '.join(_COLUMNS)}, and a row for each client")
    for place, name in enumerate(names):
        if name not in _COLUMNS:
            raise ConfigError(f"{path}: column {name!r}: nearest: {nearest(name, _COLUMNS, 1)[0]}; all: {_all()}")
        if name in names[:place]:
            raise ConfigError(f"{path}: column {name!r} is there twice; expected it once")
    if {"client", "clients"} <= set(names):
        raise ConfigError(f"{path}: found columns `client` and `clients`; expected a number, or how many, not both")
    for number, cells in enumerate(lines[1:], start=2):
        if any(cell.strip() for cell in cells):
            if len(cells) > len(names):
                raise ConfigError(f"{path}, line {number}: {len(cells)} cells for {len(names)} columns")
            yield number, {name: cell.strip() for name, cell in zip(names, cells, strict=False) if cell.strip()}


def _all() -> str:
    return ", ".join(_COLUMNS)


def _budget(cells: Mapping[str, str], before: int, where: str) -> Budget:
    """The budget of one row, before which there are so many clients."""
    device = get_device(cells["device"]) if "device" in cells else None
    known: dict[str, Any] = {key: getattr(device, key) for key in _KEYS} if device else {}
    known |= _stated(cells, where)
    return Budget(clients=_clients(cells, before, where), device=cells.get("device", ""), **known)


def _clients(cells: Mapping[str, str], before: int, where: str) -> tuple[int, ...]:
    """The clients of a row: the one it numbers, or the next ones."""
    if "client" in cells:
        return (_whole(cells["client"], "client", 0, where),)
    count = _whole(cells.get("clients", "1"), "clients", 1, where)
    return tuple(range(before, before + count))


def _whole(text: str, column: str, least: int, where: str) -> int:
    if not text.isdecimal() or not least <= int(text) <= 10**6:
        raise ConfigError(f"{where}: {column}: found {text!r}; expected a whole number of at least {least}")
    return int(text)


def _stated(cells: Mapping[str, str], where: str) -> dict[str, float]:
    """What a row states itself, in the units of a `Budget`."""
    found: dict[str, float] = {}
    for column, key in (("memory", "memory_mib"), ("disk", "disk_mib")):
        if column in cells:
            found[key] = _in(cells[column], column, BYTE_UNITS, "512 MiB", where) / _MIB
    if "seconds" in cells:
        found["seconds"] = _seconds(cells["seconds"], where)
    if "speed" in cells:
        found["gflops"] = _in(cells["speed"], "speed", SPEED_UNITS, "30 GFLOP/s", where) / _GIGA
    if "bandwidth" in cells:
        found["down_mbit"], found["up_mbit"] = _bandwidth(cells["bandwidth"], where)
    return found


def _in(text: str, column: str, units: Mapping[str, int], example: str, where: str) -> float:
    value = quantity(text, units)
    if value is None:
        raise ConfigError(
            f"{where}: {column}: found {text!r}; expected a number and a unit, such as {example} (units:"
            f" {', '.join(units)})"
        )
    return value


def _seconds(text: str, where: str) -> float:
    """Seconds, which may be a bare number, since the column's name says the unit."""
    try:
        value = float(text)
    except ValueError:
        return _in(text, "seconds", TIME_UNITS, "60 or 2 min", where)
    if not 0 < value < math.inf:
        raise ConfigError(f"{where}: seconds: found {text!r}; expected a number above 0")
    return value


def _bandwidth(text: str, where: str) -> tuple[float, float]:
    """Mbit/s down and up: of "20 Mbit/s" both, of "20/5 Mbit/s" one each."""
    down, slash, rest = text.partition("/")
    if slash and down.strip().replace(".", "", 1).isdigit():
        unit = rest.strip().lstrip("0123456789. ")
        parts = f"{down.strip()} {unit}", rest
    else:
        parts = text, text
    first, second = (_in(part, "bandwidth", BIT_UNITS, "20 Mbit/s or 20/5 Mbit/s", where) / _MBIT for part in parts)
    return first, second
