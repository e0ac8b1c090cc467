"""One option of one method: whether it changes the result, and is computed as the second reading computes it."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from toys import OF_IMAGES, Ground, Played, double, method_of, play

from potluck.core.method import Method
from potluck.methods import get_method

Outcome = Literal["changed", "same", "refused", "holds", "differs", "failed"]

BASES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.05, "momentum": 0.0, "clips": False},
    "adam": {"optimizer": "adam", "lr": 0.01, "momentum": 0.0, "clips": False},
    "single": {"optimizer": "sgd", "lr": 0.05, "momentum": 0.0, "clips": False},
    "own": {"lr": 0.01},
}
"""The settings of all local trainings; of the first two runs in double precision."""

PLAIN = Ground()
LARGEST_GAP = 1e-7
"""From the second reading, in double precision."""


@dataclass
class Tried:
    """What became of an option.

    Attributes:
        option: in words, or as `key=value`.
        outcome: "changed" the result or left it the "same"; was "refused" before training, or "failed" after; of a
            property, "holds", or what must be equal "differs".
        text: what was said, or by how much it differs.
        gap: the largest difference from the second reading, if it was compared.
    """

    option: str
    outcome: Outcome
    text: str = ""
    gap: float | None = None


@dataclass
class Trials:
    """The trials of one method. Runs are played once, however often they are compared."""

    name: str
    tried: list[Tried] = field(default_factory=list[Tried])
    _played: dict[Any, Played] = field(default_factory=dict[Any, Played])

    @property
    def method(self) -> type[Method[Any]]:
        """The method."""
        return get_method(self.name)

    @property
    def ground(self) -> Ground:
        """Where its options are tried."""
        return Ground(images=self.name in OF_IMAGES)

    def run(self, words: str, base: str, ground: Ground = PLAIN, **more: Any) -> Played:
        """A run with these `key=value` words over a base."""
        key = words, base, ground, tuple(sorted(more.items()))
        if key not in self._played:
            make = cache(lambda number: self.made(words, base))
            self._played[key] = self.play(make, base, ground, **more)
        return self._played[key]

    def play(self, make: Any, base: str, ground: Ground = PLAIN, **more: Any) -> Played:
        """A run with a method for each round."""
        if base in ("own", "single"):
            return play(make, ground, **more)
        with double():
            return play(make, ground, **more)

    def made(self, words: str, base: str) -> Method[Any]:
        """The method with these words."""
        return method_of(self.method, tuple(words.split()), **BASES[base])

    def option(self, words: str, base: str, beside: str = "", *, second: bool = False, ground: Ground = PLAIN) -> Tried:
        """Try an option beside others: compare its run over a base with that without it.

        Args:
            words: the option.
            base: a key of `BASES`.
            beside: other options.
            second: whether it is compared with the second reading, too.
            ground: the federation.
        """
        whole, name = f"{beside} {words}".strip(), f"{words} beside {beside}" if beside else words
        long = second or base == "own" or "schedule" in words  # what a server learns last reaches nobody
        more: dict[str, Any] = {"base": base, "ground": ground, "rounds": 3 if long else 2}
        without, found, gap = self.run(beside, **more), self.run(whole, **more), None
        if without.end != "ran":
            return self.note(name, "failed", f"without the option: {without.why}")
        if found.end != "ran":
            return self.note(name, found.end, found.why)
        if second and not self.made(whole, base).releases_privately:  # whose noise never repeats
            other = self.run(whole, **more, second=True)
            gap = found.gap(other)
            if not gap <= LARGEST_GAP:
                return self.note(name, "differs", f"from the reference by {gap:.1e} {other.why}".strip())
        return self.note(name, "same" if found.same(without) else "changed", gap=gap)

    def equal(self, name: str, one: Played, other: Played, closeness: float = 0.0) -> Tried:
        """Two runs that must come to the same, bit for bit or up to rounding."""
        for played in (one, other):
            if played.end != "ran":
                return self.note(name, played.end, played.why)
        if one.same(other) or one.gap(other) <= closeness:
            return self.note(name, "holds")
        return self.note(name, "differs", f"by {one.gap(other):.1e}")

    def note(self, option: str, outcome: Any, text: str = "", gap: float | None = None) -> Tried:
        """Add a trial."""
        self.tried.append(Tried(option, outcome, text, gap))
        return self.tried[-1]
