"""`potluck check`: a method through the conformance suite."""

from rich.console import Console

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
