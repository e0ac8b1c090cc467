"""Ways to carry out the calls of one exchange; all give the same answers."""

from collections.abc import Iterable, Iterator
from typing import Protocol

from potluck.core.roles import Failure
from potluck.engines.host import Answer, Call, ClientHost


class Executor(Protocol):
    """Carries out calls that do not depend on one another."""

    def run(self, host: ClientHost, calls: Iterable[Call]) -> Iterator[Answer | Failure]:
        """One outcome a call, in the order of the calls."""
        ...
