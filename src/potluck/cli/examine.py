"""`potluck check`: a method through the conformance suite, or a federation past all methods."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from potluck.experiment.config import Experiment
from potluck.experiment.presets import experiment_for
from potluck.experiment.suitability import federation_of, verdicts
from potluck.methods import get_method
from potluck.testing import checks_of


def examine(target: str) -> bool:
    """Run every check on a method and print the results; return whether all passed."""
    console = Console()
    failed = 0
    checks = checks_of(get_method(target))
    for check in checks:
        try:
            check.run()
        except Exception as error:
            failed += 1
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            console.print(f"[red]failed[/red]  {check.name}\n        {reason}", highlight=False)
        else:
            console.print(f"[green]passed[/green]  {check.name}", highlight=False)
    console.print(f"{len(checks) - failed} of {len(checks)} checks passed", highlight=False)
    return failed == 0


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
