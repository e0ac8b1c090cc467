"""One client after another, in this process."""

from collections.abc import Iterable, Iterator, Sequence

from potluck.engines.executors import Inner, Task
from potluck.engines.host import ClientHost, Job, Outcome


class Sequential(Inner):
    """The reference that other executors are compared with; holds one live model at a time."""

    def run(self, host: ClientHost, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """One outcome a task, in the order of the tasks."""
        return (host.carry_out(task.make()) for task in tasks)

    def together(self, host: ClientHost, jobs: Iterable[Job]) -> list[Outcome]:
        """One outcome a job."""
        return [host.carry_out(job) for job in jobs]
