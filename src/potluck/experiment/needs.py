"""The check that a federation offers what a method needs; all problems are reported together."""

from collections.abc import Iterable
from operator import attrgetter

from potluck.core.errors import ConfigError
from potluck.core.needs import Need, Offer


def check_needs(needs: Iterable[Need], method_name: str, offer: Offer) -> None:
    """Check that the method can run in a federation.

    Raises:
        ConfigError: one line with every need that is not met and what to do about it.
    """
    problems = [problem for need in sorted(needs, key=attrgetter("text")) if (problem := need.problem(offer))]
    if problems:
        raise ConfigError(f"{method_name} cannot run here: {'; '.join(problems)}")
