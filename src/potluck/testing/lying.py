"""A client that lies in some rounds, with numbers that are finite and within the bound."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from potluck.core.federation import ClientId
from potluck.core.ground.tree import pack
from potluck.core.message import Message
from potluck.engine.client.runtime import ClientRuntime, Job, Outcome
from potluck.engine.client.session import Answer
from potluck.engine.executors import Pending
from potluck.engine.executors.sequential import Sequential

LIAR = 1
POISON = 9e8


def spoilt(node: Any, value: float = POISON) -> Any:
    """The entries of a reply with every float in every tensor replaced."""
    if isinstance(node, dict):
        return {name: spoilt(child, value) for name, child in node.items()}
    return torch.full_like(node, value) if isinstance(node, torch.Tensor) and node.is_floating_point() else node


class Lying(Sequential):
    """An executor under which one client's replies of some rounds are lies.

    Args:
        rounds: in which it lies.

    Attributes:
        asked: rounds and clients of all calls.
    """

    def __init__(self, *rounds: int) -> None:
        self.asked: set[tuple[int, ClientId]] = set()
        self._rounds = rounds

    def run(self, host: ClientRuntime, tasks: Sequence[Pending]) -> Iterator[Outcome]:
        """Outcomes in the order of the tasks."""
        jobs: list[Job] = []
        noted = [replace(task, make=partial(_noting, task.make, jobs)) for task in tasks]
        for outcome in super().run(host, noted):
            job = jobs[-1]
            self.asked.add((job.round, job.client))
            if isinstance(outcome, Answer) and job.client == LIAR and job.round in self._rounds:
                outcome = replace(outcome, payload=pack(spoilt(dict(Message.decode(outcome.payload)))))
            yield outcome


def _noting(make: Callable[[], Job], jobs: list[Job]) -> Job:
    jobs.append(make())
    return jobs[-1]
