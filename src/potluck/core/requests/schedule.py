"""Learning rates by round: the share of the configured rate that applies in each round."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from potluck.core.ground.fields import Checked, above, at_least, at_most, require

Rule = Literal["constant", "exponential", "steps", "cosine"]
_BELONGS: dict[str, tuple[Rule, ...]] = {
    "factor": ("exponential", "steps"),
    "milestones": ("steps",),
    "rounds": ("cosine",),
}


@dataclass(frozen=True)
class Schedule(Checked):
    """A schedule of the learning rate over rounds. Within a round the rate is constant.

    Attributes:
        rule: "constant"; "exponential", times `factor` after every round; "steps", times `factor` after each of the
            rounds in `milestones`; "cosine", along half a cosine from the full rate in round 1 towards 0 after
            `rounds`, and from then on as in the last of these rounds.
        factor: multiplies the rate.
        milestones: numbers of rounds, ascending.
        rounds: the length of the cosine.
    """

    rule: Rule = "constant"
    factor: Annotated[float, above(0), at_most(1)] | None = None
    milestones: tuple[Annotated[int, at_least(1)], ...] = ()
    rounds: Annotated[int, at_least(1)] | None = None

    def __post_init__(self) -> None:
        for name, rules in _BELONGS.items():
            value, belongs = getattr(self, name), self.rule in rules
            if belongs:
                require(value not in (None, ()), name, f"a value, which the rule {self.rule!r} needs", value)
            else:
                belonging = " or ".join(map(repr, rules))
                require(value in (None, ()), name, f"nothing, as it belongs to the rule {belonging}", value)
        ascending = sorted(set(self.milestones))
        require(list(self.milestones) == ascending, "milestones", "different rounds, ascending", self.milestones)

    def share(self, number: int) -> float:
        """The share of the configured rate in a round, counted from 1; before the first, that of the first."""
        behind = max(number, 1) - 1  # completed rounds
        if self.rule == "exponential":
            return (self.factor or 1.0) ** behind
        if self.rule == "steps":
            return (self.factor or 1.0) ** sum(milestone <= behind for milestone in self.milestones)
        if self.rule == "cosine":
            length = self.rounds or 1
            return (1 + math.cos(math.pi * min(behind, length - 1) / length)) / 2
        return 1.0
