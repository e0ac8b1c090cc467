"""Clients on other machines: Flower carries the messages, everything else works as in one process (extra `flower`)."""

from collections.abc import Mapping
from typing import Any

Envelope = tuple[dict[str, Any], bytes]
"""What is sent: a header of plain values, and a payload of safetensors; nothing that could run code on arrival."""

JOB, HELLO, REFUSAL = "train.job", "query.hello", "query.refusal"
"""Types of messages to nodes, in Flower's format."""

GREETING, FAREWELL, EVALUATION = "hello", "farewell", "evaluation"
"""Groups of messages other than a round's, which Flower's logs call rounds."""

ASKING_AGAIN: Mapping[str, Any] = {"initial_backoff": 0.05, "backoff_cap": 1.0, "max_tries_per_object": None}
"""When a part of a message that is not there yet is asked for again, in Flower's words: after 0.05 seconds, then after
twice as long each time, up to a second, for as long as Flower waits for a message. Flower announces messages before
their parts have come; its own waits go from one second to ten."""

LARGEST_REPLY = 2**32
"""The most bytes of a node's reply, unless the operator or the method sets another limit: 4 GiB, the weights of a
network of a thousand million parameters."""
