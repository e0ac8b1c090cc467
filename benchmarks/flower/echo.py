"""Echo: sends a tensor to every client and gets another one back; there is nothing to learn.

For measuring what it takes to reach clients on other machines. The numbers are drawn anew for every message, as trained
weights would be new: Flower sends equal pieces only once.
"""

import random
import time
from dataclasses import dataclass
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
class Echo(Method[State]):
    """`size` is how many bytes go each way."""

    size: int = 1

    keeps_model = False

    def init(self, server: Server) -> State:
        """Nothing."""
        return State()

    def round(self, state: State, cohort: Cohort, server: Server) -> State:
        """There and back, beginning at any moment: nodes look for messages every three seconds."""
        time.sleep(random.uniform(0, 3))
        replies = cohort.ask(self.echo, Message(payload=_new(self.size)))
        assert len(replies) == len(cohort.ids)
        return state

    @on_client
    def echo(self, client: Client, message: Message) -> Message:
        """As much again."""
        return Message(payload=_new(len(message["payload"])))

    def inference_message(self, state: State, client: ClientId, server: Server) -> Message:
        """Nothing."""
        return Message()

    def inference_model(self, client: Client, message: Message) -> Any:
        """The client's own, untrained."""
        return client.model


def _new(size: int) -> Tensor:
    """So many bytes."""
    return torch.frombuffer(bytearray(np.random.default_rng().bytes(size)), dtype=torch.uint8)
