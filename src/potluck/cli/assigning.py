"""`potluck plan FEDERATION --budgets FILE.csv`: which model each client's device can train, measured, and why."""

import sys
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from potluck.cli import stages
from potluck.cli.terminal import console_on
from potluck.core.ground.errors import ConfigError
from potluck.engine.disk.files import write_atomically
from potluck.experiment.budgets.assign import Assigned, assign, assigned_experiment
from potluck.experiment.budgets.limits import clients_of, download, limits
from potluck.experiment.budgets.measure import Bench
from potluck.experiment.budgets.table import read_budgets
from potluck.experiment.settings.presets import experiment_for

_MIB = 2**20
_WIDE = 1000


def print_assignment(target: str | None, assignments: Sequence[str], table: Path, to: Path | None, rounds: int) -> None:
    """Measure, assign, and print a table; write the federation with what was assigned, if asked for.

    Args:
        target: of the experiment, as for a run.
        assignments: overrides by dotted key.
        table: of budgets.
        to: a TOML file.
        rounds: how many are run for each measurement.

    Raises:
        ConfigError: experiment or table cannot be read, or no candidate fits a client.
    """
    if to is not None and (to.suffix != ".toml" or not to.absolute().parent.is_dir()):
        raise ConfigError(f"--to {to}: expected a name that ends in .toml, in a folder that is there")
    experiment = experiment_for(target, assignments)
    budgets = read_budgets(table, experiment.federation.clients)
    bench = Bench(experiment, rounds)
    try:
        found = assign(bench, budgets, stages.show_stages)
    finally:
        bench.close()
        stages.clear()
    console = console_on(sys.stdout)
    if not console.is_terminal:  # in a file or a pipe, lines are as long as they are
        console.width = _WIDE
    console.print(_table(found))
    console.print(_caption(found, rounds), markup=False, highlight=False)
    if to is not None:
        write_atomically(to, assigned_experiment(bench, found).toml().encode())
        typer.echo(f"potluck run {to}")


def _table(found: Sequence[Assigned]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("clients", "train", "memory", "seconds", "download", "disk", "why no larger one"):
        table.add_column(name, justify="left" if name in ("clients", "train", "why no larger one") else "right")
    for one in found:
        table.add_row(*(escape(cell) for cell in _cells(one)))
    return table


def _cells(one: Assigned) -> tuple[str, ...]:
    """What is taken of what there is, in the units of the heads."""
    taken = one.chosen.taken
    assert not isinstance(taken, str)
    has = {limit.name: limit for limit in limits(one.budget, taken)}

    def of(name: str, unit: str, needs: float) -> str:
        limit = f" of {has[name].has:.4g}" if name in has else ""
        return f"{needs:.4g}{limit} {unit}"

    seconds = of("seconds", "s", has["seconds"].needs if "seconds" in has else taken.seconds)
    wait = f", {download(one.budget, taken):.3g} s" if one.budget.down_mbit else ""
    return (
        clients_of(one.budget),
        str(one.chosen.candidate),
        of("memory", "MiB", taken.memory / _MIB),
        seconds,
        f"{taken.down / _MIB:.3g} MiB{wait}",
        of("disk", "MiB", taken.disk / _MIB),
        one.why,
    )


def _caption(found: Sequence[Assigned], rounds: int) -> str:
    """How it was measured, and what is an estimate."""
    taken = [one.chosen.taken for one in found if not isinstance(one.chosen.taken, str)]
    floor, gflops = max(one.floor for one in taken), sorted(one.gflops for one in taken)
    return (
        f"memory: the most that a process of the client's own held in {rounds} of the method's rounds, beyond the"
        f" {floor / _MIB:.0f} MiB of Python, torch and Potluck. seconds: of this machine's processor, at"
        f" {gflops[0]:.3g} to {gflops[-1]:.3g} GFLOP/s in training, converted by the device's speed where it is stated,"
        " and what messages take at its bandwidth: an estimate. disk: its examples, the largest message, its state."
    )
