"""Each client gets the largest candidate that keeps within its budgets, and it is said which budget larger ones break.

The largest has the highest capacity, and of equals the most parameters. Of several clients with one budget the one with
the most training examples is measured, and all get what it gets.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from potluck.core.federation import ClientId
from potluck.core.ground.errors import ConfigError
from potluck.experiment.budgets.candidates import Candidate, with_candidates
from potluck.experiment.budgets.limits import Allowance, Taken, clients_of, limits
from potluck.experiment.budgets.measure import Bench
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.settings.budget import Budget
from potluck.experiment.settings.schema import Experiment


@dataclass(frozen=True)
class Tried:
    """A candidate at a client: what its round takes, or why the client cannot train it."""

    candidate: Candidate
    taken: Taken | str
    budget: Budget

    @property
    def broken(self) -> list[Allowance]:
        """The budgets that do not suffice."""
        found = [] if isinstance(self.taken, str) else limits(self.budget, self.taken)
        return [one for one in found if not one.is_kept]

    @property
    def fits(self) -> bool:
        """Whether it keeps within every budget."""
        return not isinstance(self.taken, str) and not self.broken

    @property
    def why_not(self) -> str:
        """Why it does not fit, in words."""
        return self.taken if isinstance(self.taken, str) else "; ".join(one.excess for one in self.broken)

    @property
    def distance(self) -> float:
        """How many times the tightest budget would have to be as large."""
        return max((one.needs / one.has for one in self.broken), default=float("inf"))


@dataclass(frozen=True)
class Assigned:
    """What the clients of one budget train.

    Attributes:
        budget: theirs.
        client: the one that was measured.
        chosen: what fits.
        larger: what was tried before and did not fit, the largest first.
    """

    budget: Budget
    client: ClientId
    chosen: Tried
    larger: tuple[Tried, ...]

    @property
    def why(self) -> str:
        """Why it is this candidate and no larger one, in words."""
        if not self.larger:
            return "the largest"
        return f"{self.larger[-1].candidate}: {self.larger[-1].why_not}"


def assign(bench: Bench, budgets: Sequence[Budget], say: Callable[[str], object] = lambda line: None) -> list[Assigned]:
    """The largest candidate that fits, for each budget.

    Args:
        bench: which measures.
        budgets: the clients'.
        say: told what is measured next.

    Raises:
        ConfigError: no candidate fits some of them; names these, and what the nearest candidate would need.
    """
    found: list[Assigned] = []
    lacking: list[str] = []
    for budget in budgets:
        client = max(budget.clients, key=lambda id: len(bench.federation.sites[id].train))
        tried: list[Tried] = []
        for candidate in bench.candidates:
            say(f"measuring {candidate} at client {client}")
            tried.append(Tried(candidate, bench.take(candidate, client), budget))
            if tried[-1].fits:
                found.append(Assigned(budget, client, tried[-1], tuple(tried[:-1])))
                break
        else:
            nearest = min(tried, key=lambda one: one.distance)
            lacking.append(f"{clients_of(budget)}: nearest is {nearest.candidate}: {nearest.why_not}")
    if lacking:
        raise ConfigError(
            f"budgets: no candidate fits {'; '.join(lacking)}. Add a smaller model to federation.models or a smaller"
            " level, or raise the budget"
        )
    return found


def assigned_experiment(bench: Bench, found: Sequence[Assigned]) -> Experiment:
    """The experiment with what was assigned, and with the budgets, so that its runs say when one is exceeded.

    Raises:
        ConfigError: the method cannot run with what was assigned.
    """
    chosen = {client: one.chosen.candidate for one in found for client in one.budget.clients}
    made = with_candidates(bench.experiment, bench.federation, [chosen[client] for client in sorted(chosen)])
    assemble(made)
    return replace(made, run=replace(made.run, budgets=tuple(one.budget for one in found)))
