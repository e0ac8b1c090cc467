"""When asynchronous rounds close, and what becomes of replies that are stale then."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from torch import Tensor

from potluck.core.ground.fields import Checked, above, at_least, at_most, require
from potluck.core.message import Message

AsyncRule = Literal["fedbuff", "fedasync", "fedat"]
_DEFAULTS: Mapping[AsyncRule, Mapping[str, float]] = {
    "fedbuff": {"buffer": 10, "staleness": 0.5},
    "fedasync": {"buffer": 1, "staleness": 0.5, "mixing": 0.6},
    "fedat": {"tiers": 5},
}
_OPTIONS = ("buffer", "staleness", "mixing", "tiers")


@dataclass(frozen=True)
class Asynchrony(Checked):
    """Rounds that close as soon as some replies have come; whoever is slower goes on, and counts in a later round.

    A reply is t rounds stale if so many have closed since its client was sent something. Its revised entries, such as
    weights, are moved before the method sees them, from r to r'; x is what the client would be sent now, and x_0 what
    it was sent. All other entries, such as numbers of examples, stay as they are.

    Attributes:
        rule: "fedbuff", r' = x + s(t) (r - x_0), see Nguyen et al., AISTATS 2022, https://arxiv.org/abs/2106.06639;
            "fedasync", r' = (1 - m s(t)) x + m s(t) r, see Xie et al., 2019, https://arxiv.org/abs/1903.03934;
            "fedat", rounds within tiers of clients that are about as fast, the mean over tiers weighed by the updates
            of the tier at the other end of their order, see Chai et al., SC 2021, https://arxiv.org/abs/2010.05958.
        buffer: how many replies close a round; 10 of "fedbuff" and 1 of "fedasync" by default.
        staleness: a in s(t) = (1 + t)^-a, 0.5 by default; with 0 a stale reply counts like any other.
        mixing: m of "fedasync", 0.6 by default.
        tiers: of "fedat", 5 by default.
    """

    rule: AsyncRule = "fedbuff"
    buffer: Annotated[int, at_least(1)] | None = None
    staleness: Annotated[float, at_least(0)] | None = None
    mixing: Annotated[float, above(0), at_most(1)] | None = None
    tiers: Annotated[int, at_least(1)] | None = None

    def __post_init__(self) -> None:
        defaults = _DEFAULTS[self.rule]
        for name in _OPTIONS:
            found = getattr(self, name)
            require(found is None or name in defaults, name, f"none with the rule {self.rule!r}", found)
            if found is None and name in defaults:
                object.__setattr__(self, name, defaults[name])  # so that the configuration says what was done

    @property
    def moves(self) -> bool:
        """Whether replies are moved at all, for which they must have revised entries."""
        return self.rule != "fedbuff" or bool(self.staleness)

    def among(self, clients: int) -> "Asynchrony":
        """The rule where there are so many clients: a buffer holds no more replies, and there are no more tiers."""
        few = {name: clients for name in ("buffer", "tiers") if (getattr(self, name) or 0) > clients}
        return replace(self, **few) if few else self

    def still_counts(self, late: int) -> float:
        """s(t) of a reply that is so many rounds stale."""
        return (1.0 + late) ** -(self.staleness or 0.0)

    def moved(self, reply: Message, sent: Message, now: Message, late: int) -> Message:
        """The reply of a client as the method sees it, under "fedbuff" and "fedasync".

        Args:
            reply: as it came.
            sent: the revised entries, as they were sent to the client.
            now: what it would be sent now.
            late: how many rounds it is stale.
        """
        share = self.still_counts(late)
        if self.rule == "fedasync":
            share *= self.mixing or 0.0
            return revised(reply, {name: blend(((1 - share, now[name]), (share, reply[name]))) for name in sent})
        if not late:
            return reply  # to the last bit
        return revised(
            reply, {name: blend(((1.0, now[name]), (-share, sent[name]), (share, reply[name]))) for name in sent}
        )


def revised(reply: Message, entries: Mapping[str, Any]) -> Message:
    """The reply with these entries instead of its own."""
    return Message(**{**reply, **entries})


def blend(parts: Sequence[tuple[float, Any]]) -> Any:
    """The weighted sum of tensors, or of trees of tensors of the same names; of whole numbers the last.

    Raises:
        KeyError: the trees have other names.
        RuntimeError: tensors differ in shape.
    """
    _, last = parts[-1]
    if isinstance(last, Mapping):
        return {name: blend([(share, tree[name]) for share, tree in parts]) for name in last}
    if isinstance(last, Tensor):
        if not last.is_floating_point():
            return last
        (share, first), *others = parts
        found = first * share
        for share, tensor in others:
            found = found.add(tensor, alpha=share)
        return found
    return sum(share * value for share, value in parts) if isinstance(last, float) else last
