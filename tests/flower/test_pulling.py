"""What one node sends can neither delay nor spoil another's reply, nor fill the server's memory."""

import threading
import time

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from potluck.core.errors import WireError
from potluck.flower.server.pulling import Pulling


class Reply:
    """As much of Flower's message as pulling looks at."""

    def __init__(self, content="content"):
        self.content = content

    def has_content(self):
        return self.content is not None

    def has_error(self):
        return False


class Grid:
    """Each message is answered as its own function has it."""

    def __init__(self, **answers):
        self.answers = answers
        self.asked = []

    def pull_messages(self, numbers):
        (number,) = numbers
        self.asked.append(number)
        return self.answers[number]()


def pulled(grid, seconds=20.0, longest=10**6):
    with Pulling(grid, dict.fromkeys(grid.answers, longest), poll=0.01) as pulling:
        return dict(pulling.until(time.monotonic() + seconds))


def raising():
    raise RecursionError("too deep")


def test_pulling_a_reply_that_cannot_be_read_costs_that_reply():
    found = pulled(Grid(bad=raising, good=lambda: [Reply("yes")], hollow=lambda: [Reply(None)]))
    assert found["good"].content == "yes"
    assert "cannot be read: RecursionError('too deep')" in str(found["bad"])
    assert str(found["hollow"]) == "its reply is empty"


def test_pulling_waits_no_longer_than_its_deadline_for_a_reply_that_trickles():
    never = threading.Event()
    grid = Grid(slow=lambda: never.wait(60) and [], good=lambda: [Reply("yes")])
    with Pulling(grid, dict.fromkeys(grid.answers, 1), poll=0.01) as pulling:
        replies = pulling.until(time.monotonic() + 5.0)
        assert next(replies)[0] == "good"
        assert list(pulling.until(time.monotonic())) == []
    never.set()


def test_pulling_asks_until_a_reply_is_there_and_no_more():
    answers = iter([[], [], [Reply("yes")]])
    grid = Grid(late=lambda: next(answers))
    assert pulled(grid)["late"].content == "yes"
    assert grid.asked == ["late"] * 3


def test_pulling_gives_up_what_is_forgotten():
    grid = Grid(gone=list)
    with Pulling(grid, {"gone": 1}, poll=0.01) as pulling:
        pulling.forget("gone")
        assert list(pulling.until(time.monotonic() + 60)) == []


def as_sent(array, repeated):
    """What Flower sends of a message with an array, whose one part is named so many times."""
    records = RecordDict({"potluck": ConfigRecord({"version": 2}), "payload": ArrayRecord({"packed": array})})
    contents = {number: part.deflate() for number, part in get_all_nested_objects(records).items()}
    (number,) = [number for number, content in contents.items() if content.startswith(b"Array ")]
    body = b'"arraychunk_ids": [' + b", ".join([b"0"] * repeated) + b"]"
    head, _, rest = contents[number].partition(b"\0")
    rest = rest.replace(b'"arraychunk_ids": [0]', body)
    name, parts, _ = head.split(b" ")
    contents[number] = b" ".join([name, parts, str(len(rest)).encode()]) + b"\0" + rest
    return records.object_id, contents


@pytest.mark.parametrize(("repeated", "read"), [(1, True), (10, True), (11, False), (10_000, False)])
def test_pulling_puts_together_no_more_bytes_than_the_reply_may_have(repeated, read):
    """One part of 100 kB that is named ten thousand times takes 200 bytes to send and would take 1 GB to read."""
    number, contents = as_sent(Array("uint8", (100_000,), "potluck.packed", b"x" * 100_000), repeated)
    found = pulled(Grid(reply=lambda: [Reply(inflate_object_from_contents(number, dict(contents)))]))["reply"]
    assert isinstance(found, WireError) != read
    if not read:
        assert f"{repeated * 100_000} bytes long; expected at most 1000000" in str(found)
