"""Flower's app of a node: it hands messages to the node's resident worker, which has data and modules at hand.

Flower starts a process for every message, so this file imports nothing heavy. Where there is no resident, in Flower's
simulation or in a Flower project of one's own, the process does the work itself.

`flwr run` looks for the app in this file's text, so it is a plain assignment.
"""

from collections.abc import Mapping

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from potluck.flower import HELLO, JOB, Parcel
from potluck.flower.node.resident import hand_over
from potluck.flower.wire.envelope import unwrap, wrap

client_app = ClientApp()


@client_app.query(HELLO.partition(".")[2])
def _hello(message: Message, context: Context) -> Message:
    return _answer(message, context)


@client_app.train(JOB.partition(".")[2])
def _job(message: Message, context: Context) -> Message:
    return _answer(message, context)


def _answer(message: Message, context: Context) -> Message:
    config, parcel = dict(context.node_config), unwrap(message.content)
    at_home = hand_over(config, message.metadata.message_type, parcel)
    return Message(wrap(*(_alone(config, message, parcel) if at_home is None else at_home)), reply_to=message)


def _alone(config: Mapping[str, object], message: Message, parcel: Parcel) -> Parcel:
    """What the node has to say, worked out here and now."""
    from potluck.flower.node.config import NodeConfig
    from potluck.flower.node.service import NodeService

    return NodeService(NodeConfig.of(config, parcel[0])).answer(message.metadata.message_type, parcel)
