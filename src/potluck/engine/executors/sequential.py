"""One client after another, in this process."""

from collections.abc import Iterable, Iterator, Sequence

from potluck.engine.client.runtime import ClientRuntime, Job, Outcome
from potluck.engine.executors import Inner, Pending


class Sequential(Inner):
    """The reference that other executors are compared with; holds one live model at a time."""

    def run(self, host: ClientRuntime, tasks: Sequence[Pending]) -> Iterator[Outcome]:
        """One outcome a task, in the order of the tasks."""
        return (host.execute(task.make()) for task in tasks)

    def together(self, host: ClientRuntime, jobs: Iterable[Job]) -> list[Outcome]:
        """One outcome a job."""
        return [host.execute(job) for job in jobs]
