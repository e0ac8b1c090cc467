"""One client after another, in this process."""

from collections.abc import Iterator, Sequence

from potluck.engines.executors import Executor, Task
from potluck.engines.host import ClientHost, Outcome


class Sequential(Executor):
    """The reference that other executors are compared with; holds one live model at a time."""

    def run(self, host: ClientHost, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """One outcome a task, in the order of the tasks."""
        return (host.carry_out(task.make()) for task in tasks)
