"""Clients on other machines: Flower carries the messages, everything else is as in process (extra `flower`)."""

from typing import Any

Parcel = tuple[dict[str, Any], bytes]
"""What goes over the wire: plain words, and a payload of safetensors; nothing that could run code on arrival."""

JOB, HELLO = "train.job", "query.hello"
"""Kinds of messages to nodes, in Flower's manner."""

GREETING, EVALUATION = "hello", "evaluation"
"""Groups of messages, beside a round's number: what Flower's logs call a round."""
