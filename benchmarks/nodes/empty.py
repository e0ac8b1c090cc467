"""Empty: exchanges in which nothing is computed, for measuring what a node takes for one.

Each client is asked alone, several times in a row, and then all are asked together, soon after their last answers, as
in a run's rounds. How soon is drawn: node and server look for each other's messages at times of their own, and
exchanges that follow one another at the same intervals would all wait as long for these. The first time is left out.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from potluck.core.federation import ClientId
from potluck.core.message import Message
from potluck.core.method import Method, on_client
from potluck.core.roles import Client, Cohort, Server


@dataclass(frozen=True)
class State:
    """Nothing."""


@dataclass(frozen=True)
class Empty(Method[State]):
    """`times` is how often each client is asked, after a first time; `down` and `up` how many bytes go each way.

    `pause` is how many seconds pass at the most between an answer and the next time that the client is asked.
    """

    times: int = 10
    pause: float = 0.5
    down: tuple[int, ...] = ()
    up: tuple[int, ...] = ()

    keeps_model = False

    def init(self, server: Server) -> State:
        """Nothing."""
        return State()

    def round(self, state: State, cohort: Cohort, server: Server) -> State:
        """Each client's seconds are those alone, and as many more as all together take longer than the slowest."""
        draw = random.Random(0)
        alone = [self._seconds(cohort, [client], draw) for client in cohort.ids]
        more = max(0.0, self._seconds(cohort, cohort.ids, draw) - max(alone))
        server.note(**{f"client{client}": one + more for client, one in zip(cohort.ids, alone, strict=True)})
        return state

    def _seconds(self, cohort: Cohort, clients: Sequence[ClientId], draw: random.Random) -> float:
        """What an exchange with these clients takes in the mean."""
        taken: list[float] = []
        for _ in range(1 + self.times):
            time.sleep(draw.uniform(0, self.pause))
            messages = {one: Message(content=_new(self.down[one]), size=self.up[one]) for one in clients}
            began = time.perf_counter()
            replies = cohort.ask(self.nothing, messages)
            assert len(replies) == len(clients)
            taken.append(time.perf_counter() - began)
        return fmean(taken[1:])

    @on_client
    def nothing(self, client: Client, message: Message) -> Message:
        """As many bytes as it was told."""
        return Message(content=_new(message["size"]))

    def inference_message(self, state: State, client: ClientId, server: Server) -> Message:
        """Nothing."""
        return Message()

    def inference_model(self, client: Client, message: Message) -> Any:
        """The client's own, untrained."""
        return client.model


def _new(size: int) -> Tensor:
    """So many bytes that were never sent before, since Flower sends equal ones once."""
    return torch.frombuffer(bytearray(np.random.default_rng().bytes(size)), dtype=torch.uint8)
