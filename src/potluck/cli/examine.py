"""`potluck check`: a method through the conformance suite, another part tried, or a federation past all methods."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from potluck.cli.trials import trials_of
from potluck.core.ground.discovery import named_file
from potluck.core.ground.errors import explained
from potluck.experiment.federation.parts import part_of
from potluck.experiment.federation.suitability import federation_of, verdicts
from potluck.experiment.settings.presets import experiment_for
from potluck.experiment.settings.schema import Experiment
from potluck.methods import get_method
from potluck.testing import Check, checks_of


def examine(target: str) -> bool:
    """Run every check on a method, or on another part of a file, print the results; return whether all passed.

    What went wrong is printed once, also if several checks fail for it.
    """
    console, seen = Console(highlight=False), dict[str, str]()
    checks, failed = _checks(target), 0
    for check in checks:
        try:
            check.run()
        except Exception as error:
            failed += 1
            reason = _reason(error)
            first = seen.setdefault(reason, check.name)
            shown = reason if first == check.name else f"as in {first}"
            console.print(f"[red]failed[/red]  {escape(check.name)}\n        {escape(shown)}", soft_wrap=True)
        else:
            console.print(f"[green]passed[/green]  {escape(check.name)}", soft_wrap=True)
    console.print(f"{len(checks) - failed} of {len(checks)} checks passed")
    return failed == 0


def _checks(target: str) -> list[Check]:
    """The conformance suite for a method; for other parts what they must do."""
    if not named_file(target) or target.endswith(".py"):
        return checks_of(get_method(target))
    part, kind = part_of(target)
    return checks_of(part) if kind == "method" else trials_of(target, kind)


def _reason(error: Exception) -> str:
    """Type and text of an error on one line, with the file and line in the user's code, once."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if ".py, line " in text else explained(error)


def examine_federation(target: str | None, assignments: Sequence[str]) -> None:
    """Print which methods can run on a federation, and why the others cannot.

    Raises:
        ConfigError: the configuration cannot be resolved, or a model cannot be trained on its data.
        DataError: the data are missing, or cannot be divided as configured.
    """
    console = Console()
    experiment = experiment_for(target, assignments)
    console.print(_summed_up(experiment), highlight=False, soft_wrap=True)
    found = list(verdicts(federation_of(experiment), experiment.run.seed))
    for verdict in sorted(found, key=lambda verdict: verdict.problem is not None):
        word = "[green]can run[/green]   " if verdict.problem is None else "[red]cannot run[/red]"
        console.print(f"{word}  {verdict.method}", highlight=False)
        for line in filter(None, (verdict.problem, *verdict.notes)):
            console.print(f"            {escape(line)}", highlight=False, soft_wrap=True)
    able = sum(verdict.problem is None for verdict in found)
    console.print(f"{able} of {len(found)} methods can run here, with their default hyper-parameters", highlight=False)


def _summed_up(experiment: Experiment) -> str:
    models = ", ".join(map(str, experiment.models))
    return escape(f"{experiment.federation.clients} clients, {experiment.federation.dataset}, models {models}")
