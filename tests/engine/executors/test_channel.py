"""Channels: jobs and outcomes arrive as they were, equal payloads once."""

import os
import threading

import pytest

from potluck.core.ground.rng import Key
from potluck.core.roles import Failure
from potluck.engine.client.runtime import EvalRequest, EvalResult
from potluck.engine.client.session import Answer, Call
from potluck.engine.executors.channel import Channel

LONG = os.urandom(600_000)
ITEMS = [
    Call("local_update", 0, LONG, None, Key((1, "client", 0))),
    Call("local_update", 1, LONG, b"kept", Key((1, "client", 1))),
    EvalRequest(2, b"", LONG, ("own", "common")),
    Answer(3, os.urandom(10), LONG, (0.5, 0.25)),
    EvalResult(4, "model", LONG),
    Failure(5, "Method.handler", "reason", "trace"),
]


def passed(items):
    """What arrives on the other side."""
    here, there = Channel.pair()
    sender = threading.Thread(target=here.send, args=(items,))
    sender.start()
    found = there.receive()
    sender.join()
    return found


def test_jobs_and_outcomes_arrive_as_they_were():
    assert passed(ITEMS) == ITEMS


def test_a_message_to_several_clients_is_sent_once():
    first, second = passed(ITEMS[:2])
    assert first.payload is second.payload


def test_an_error_arrives_with_what_it_carries():
    error = ValueError("why")
    error.payload = b"not a job's"
    (found,) = passed([error])
    assert isinstance(found, ValueError)
    assert (found.args, found.payload) == (("why",), b"not a job's")


def test_an_end_that_is_forgotten_is_closed():
    here, there = Channel.pair()
    del here
    with pytest.raises(EOFError):
        there.receive()
