"""An executor that hears what passes between server and clients."""

from collections.abc import Iterator, Sequence

from potluck.engine.client.runtime import ClientRuntime, Outcome
from potluck.engine.client.session import Answer, Call
from potluck.engine.executors import Pending
from potluck.engine.executors.sequential import Sequential


class Hearing(Sequential):
    """An executor that remembers calls and their answers."""

    def __init__(self) -> None:
        self.exchanges: list[tuple[Call, Answer]] = []

    def run(self, host: ClientRuntime, tasks: Sequence[Pending]) -> Iterator[Outcome]:
        """Outcomes in the order of the tasks."""
        for job in (task.make() for task in tasks):
            outcome = host.execute(job)
            if isinstance(job, Call) and isinstance(outcome, Answer):
                self.exchanges.append((job, outcome))
            yield outcome
