"""Who lies in a run, and how."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from potluck.core.federation import ClientId
from potluck.core.ground.fields import Checked, above, at_least, below, require
from potluck.core.ground.rng import fold_in

AttackKind = Literal["sign_flip", "noise", "label_flip", "free_rider", "scaled", "backdoor", "alie"]
_STRENGTHS: dict[AttackKind, float] = {"sign_flip": 1.0, "noise": 10.0, "scaled": 10.0, "backdoor": 1.0}
OF_DATA: tuple[AttackKind, ...] = ("label_flip", "backdoor")
"""Attacks that change what the attackers learn from."""


@dataclass(frozen=True)
class Attackers(Checked):
    """Clients that lie, for trying how well a method and its rule bear it.

    With r a float tensor of the reply that an honest client would send, and s what it was sent under that name in that
    shape, or zero:

    - "sign_flip": s - strength (r - s).
    - "scaled": s + strength (r - s).
    - "noise": r plus normal noise, with `strength` times the root mean square of r - s.
    - "free_rider": s; the client does not learn.
    - "alie": mean - z deviation of the attackers' own replies, coordinate by coordinate, where z is as large as can be
      while enough honest clients lie further from the mean: A Little Is Enough, Baruch, Baruch, Goldberg, NeurIPS 2019,
      https://arxiv.org/abs/1902.06156, Algorithm 3. `strength`, if set, is z.
    - "label_flip": trains with class C - 1 - y instead of y, of C classes (Tolpegin et al., ESORICS 2020,
      https://arxiv.org/abs/2007.08432, flip one class; here all are).
    - "backdoor": half of its training images have a bright square in a corner, and the class `target`; what it learns
      of them is scaled by `strength` (Bagdasaryan et al., AISTATS 2020, https://arxiv.org/abs/1807.00459).

    Numbers, such as those of examples, are told as they are.

    Attributes:
        kind: the attack.
        share: of the clients, at least one, drawn by the run's seed.
        clients: who they are, instead.
        strength: of the attack; 1 of "sign_flip" and "backdoor", 10 of "noise" and "scaled" by default.
        target: the class of "backdoor".
    """

    kind: AttackKind = "sign_flip"
    share: Annotated[float, above(0), below(1)] | None = None
    clients: tuple[Annotated[int, at_least(0)], ...] | None = None
    strength: Annotated[float, above(0)] | None = None
    target: Annotated[int, at_least(0)] = 0

    def __post_init__(self) -> None:
        both = self.share is not None and self.clients is not None
        require(not both, "share", "none beside clients, who are named", self.share)
        if self.share is None and self.clients is None:
            object.__setattr__(self, "share", 0.2)  # so that the configuration says what was done
        if self.strength is None and self.kind in _STRENGTHS:
            object.__setattr__(self, "strength", _STRENGTHS[self.kind])
        takes = self.kind in _STRENGTHS or self.kind == "alie"
        require(takes or self.strength is None, "strength", f"none of {self.kind!r}", self.strength)
        require(self.kind == "backdoor" or not self.target, "target", f"0 of {self.kind!r}", self.target)

    def among(self, ids: Sequence[ClientId], seed: int) -> tuple[ClientId, ...]:
        """The clients that lie, ascending: the same for every method under one seed.

        Raises:
            ConfigError: one that is named is not there, or nobody is honest.
        """
        if self.clients is not None:
            liars = sorted(set(self.clients))
            require(set(liars) <= set(ids), "run.attackers.clients", f"some of {min(ids)} to {max(ids)}", liars)
            require(len(liars) < len(ids), "run.attackers.clients", "not all of them", liars)
            return tuple(liars)
        count = max(1, math.floor((self.share or 0.0) * len(ids) + 1e-9))
        require(count < len(ids), "run.attackers", "clients that are honest", f"{count} of {len(ids)} who lie")
        order = torch.randperm(len(ids), generator=fold_in(seed, "attackers").generator())
        return tuple(sorted(ids[place] for place in order[:count].tolist()))

    def told(self, ids: Sequence[ClientId], seed: int) -> str:
        """Who lies and how, for readers."""
        liars = self.among(ids, seed)
        names = ", ".join(map(str, liars))
        return f"{len(liars)} of {len(ids)} clients lie ({self.kind}): {names}; all scores are of the others"
