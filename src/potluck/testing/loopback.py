"""A Flower grid without sockets: messages become bytes, are read again, and are answered when they are pulled."""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

Answerer = Callable[[Message], Message]


@dataclass
class LoopbackNode:
    """A grid's description of a node."""

    node_id: int
    name: str
    last_activated_at: str = "2026-01-01T00:00:00+00:00"


class Loopback(Grid):
    """Nodes in this process.

    Args:
        nodes: by name, a node's function of a message. Their numbers count down, so that they do not follow the names.
    """

    def __init__(self, nodes: Mapping[str, Answerer]) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # where Flower's messages look
        numbers = range(len(nodes), 0, -1)
        self.nodes = {number: LoopbackNode(number, name) for number, name in zip(numbers, nodes, strict=True)}
        self.silent: set[str] = set()
        self.sent: list[Message] = []
        self._answers = {number: nodes[node.name] for number, node in self.nodes.items()}
        self._waiting: dict[str, Message] = {}
        self._one_at_a_time = threading.Lock()  # the nodes share this process's generators

    def set_run(self, run: Any) -> None:
        """Nothing to set."""

    @property
    def run(self) -> Any:
        """None."""
        return None

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """As Flower's constructor."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """The numbers of the nodes online."""
        return list(self.nodes)

    def get_nodes(self) -> Iterable[Any]:
        """The nodes online."""
        return list(self.nodes.values())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Accept messages; they are answered when replies are pulled."""
        numbers: list[str] = []
        for message in messages:
            number = f"message-{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = number
            message.content = _through_the_wire(message.content)
            self.sent.append(message)
            self._waiting[number] = message
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Have all nodes but the silent ones answer."""
        with self._one_at_a_time:
            due = [self._waiting[number] for number in message_ids if number in self._waiting]
            return [self._answer(message) for message in due if self._name(message) not in self.silent]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Push and pull."""
        return self.pull_messages(self.push_messages(messages))

    def _name(self, message: Message) -> str | None:
        node = self.nodes.get(message.metadata.dst_node_id)
        return node.name if node else None

    def _answer(self, message: Message) -> Message:
        del self._waiting[message.metadata.message_id]
        try:
            reply = self._answers[message.metadata.dst_node_id](message)
            if reply.has_content():
                reply.content = _through_the_wire(reply.content)
        except Exception as error:
            return Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)
        return reply


def through(app: ClientApp, config: Mapping[str, Any]) -> Answerer:
    """A node with this configuration that runs an app."""
    context = Context(1, 1, dict(config), RecordDict(), {})
    return lambda message: app(message, context)


def _through_the_wire(content: RecordDict) -> RecordDict:
    return recorddict_from_proto(recorddict_to_proto(content))
