"""Flower's client app: it passes messages to the node's resident worker, which holds data and modules.

There is a process for every message, so this file imports nothing heavy. Without a resident worker, in a Flower
project of your own, the process does the work itself.

`flwr run` searches this file's text for the app, so it is a plain assignment.
"""

from collections.abc import Mapping

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from potluck.flower import HELLO, JOB, REFUSAL, Envelope
from potluck.flower.node.resident import delegate
from potluck.flower.wire.envelope import unwrap, wrap

client_app = ClientApp()


@client_app.query(HELLO.partition(".")[2])
def _hello(message: Message, context: Context) -> Message:
    return _answer(message, context)


@client_app.query(REFUSAL.partition(".")[2])
def _refusal(message: Message, context: Context) -> Message:
    return _answer(message, context)


@client_app.train(JOB.partition(".")[2])
def _job(message: Message, context: Context) -> Message:
    return _answer(message, context)


def _answer(message: Message, context: Context) -> Message:
    config, envelope = dict(context.node_config), unwrap(message.content)
    answered = delegate(config, message.metadata.message_type, envelope)
    return Message(wrap(*(_alone(config, message, envelope) if answered is None else answered)), reply_to=message)


def _alone(config: Mapping[str, object], message: Message, envelope: Envelope) -> Envelope:
    """The node's answer, computed in this process."""
    from potluck.flower.node.config import NodeConfig
    from potluck.flower.node.service import NodeService

    return NodeService(NodeConfig.of(config)).answer(message.metadata.message_type, envelope)
