"""Clients on other machines: Flower carries the messages, everything else works as in one process (extra `flower`)."""

from typing import Any

Envelope = tuple[dict[str, Any], bytes]
"""What is sent: a header of plain values, and a payload of safetensors; nothing that could run code on arrival."""

JOB, HELLO, REFUSAL = "train.job", "query.hello", "query.refusal"
"""Types of messages to nodes, in Flower's format."""

GREETING, FAREWELL, EVALUATION = "hello", "farewell", "evaluation"
"""Groups of messages other than a round's, which Flower's logs call rounds."""

FIRST_WAIT = 0.05
"""Seconds after which a part of a message that is not there yet is first asked for again. Flower announces messages
before their parts have come, and waits a second."""

LARGEST_REPLY = 2**32
"""The most bytes of a node's reply, unless the operator or the method sets another limit: 4 GiB, the weights of a
network of a thousand million parameters."""
