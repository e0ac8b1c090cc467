"""One client after another, in this process."""

from collections.abc import Iterable, Iterator

from potluck.core.roles import Failure
from potluck.engines.host import Answer, Call, ClientHost


class Sequential:
    """The reference that other executors are compared with; holds one live model at a time."""

    def run(self, host: ClientHost, calls: Iterable[Call]) -> Iterator[Answer | Failure]:
        """One outcome a call, in the order of the calls."""
        return (host.run(call) for call in calls)
