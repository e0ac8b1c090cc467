"""The check that a federation offers what a method needs, and what to say if it does so for some clients only."""

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from potluck.core.ground.errors import ConfigError
from potluck.core.method import Method
from potluck.core.needs import Need, Offer


def needs_of(method: Method[Any]) -> frozenset[Need]:
    """What a method needs of a federation: what it says, and all classes unless it aligns clients' own ones."""
    return method.needs() | (frozenset() if method.aligns_classes else frozenset({Need.ALL_CLASSES}))


def check_needs(needs: Iterable[Need], method_name: str, offer: Offer) -> None:
    """Check that the method can run in a federation.

    Raises:
        ConfigError: one line with every need that is not met and what to do about it.
    """
    problems = {need: said for need in sorted(needs, key=attrgetter("text")) if (said := need.problem(offer))}
    covered = {other.text for need in problems for other in need.covers}
    if problems:
        said = (problem for need, problem in problems.items() if need.text not in covered)
        raise ConfigError(f"{method_name} cannot run here: {'; '.join(said)}")


def cautions(needs: Iterable[Need], method_name: str, offer: Offer) -> list[str]:
    """What a user should know of needs that some of the clients do not meet, a line each."""
    found = (need.caution(offer) for need in sorted(needs, key=attrgetter("text")))
    return [f"{method_name}: {caution}" for caution in found if caution]
