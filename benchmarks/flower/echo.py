"""Echo: sends a tensor to every client and gets it back; there is nothing to learn.

For measuring what it takes to reach clients on other machines.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from potluck.core.federation import ClientId
from potluck.core.message import Message
from potluck.core.method import Method, on_client
from potluck.core.roles import Client, Cohort, Server


@dataclass(frozen=True)
class State:
    """What is sent."""

    payload: Tensor


@dataclass(frozen=True)
class Echo(Method[State]):
    """`numbers` is how many float32 go each way."""

    numbers: int = 1

    keeps_model = False

    def init(self, server: Server) -> State:
        """Zeros."""
        return State(torch.zeros(self.numbers))

    def round(self, state: State, cohort: Cohort, server: Server) -> State:
        """There and back."""
        replies = cohort.ask(self.echo, Message(payload=state.payload))
        assert len(replies) == len(cohort.ids)
        return state

    @on_client
    def echo(self, client: Client, message: Message) -> Message:
        """The same again."""
        return Message(payload=message["payload"])

    def inference_message(self, state: State, client: ClientId, server: Server) -> Message:
        """Nothing."""
        return Message()

    def inference_model(self, client: Client, message: Message) -> Any:
        """The client's own, untrained."""
        return client.model
