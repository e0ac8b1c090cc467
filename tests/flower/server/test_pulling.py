"""What one node sends can neither delay nor spoil another's reply, nor fill the server's memory."""

import threading
import time
from os import urandom

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import make_message
from flwr.app.metadata import Metadata
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.superlink.grid.http_grid import HttpGrid

from potluck.core.ground.errors import WireError
from potluck.flower.server.pulling import Pulling
from potluck.flower.wire.envelope import LONGEST_ENVELOPE_HEADER, VERSION, packed_payload, unwrap, wrap


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
    records = RecordDict({"potluck": ConfigRecord({"version": VERSION}), "payload": ArrayRecord({"packed": array})})
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


class SuperLink:
    """Stands for Flower's: has one reply, all of it or all but some parts, and counts what is fetched of it."""

    def __init__(self, content):
        self.missing = set()
        metadata = Metadata(1, "", 2, 1, "asked", "1", time.time(), 60.0, "train.job")
        message = make_message(metadata=metadata, content=content)
        metadata.__dict__["_message_id"] = message.object_id
        self.parts = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
        empty = message_to_proto(make_message(metadata=metadata, content=RecordDict()))
        trees = [get_object_tree(message)]
        self.reply = PullAppMessagesResponse(messages_list=[empty], message_object_trees=trees)
        self.fetched, self.received = 0, []

    def PullMessages(self, request):
        return self.reply

    def PullObject(self, request):
        if request.object_id in self.missing:
            return PullObjectResponse(object_found=True, object_available=False)
        part = self.parts[request.object_id]
        self.fetched += len(part)
        return PullObjectResponse(object_found=True, object_available=True, object_content=part)

    def ConfirmMessageReceived(self, request):
        self.received.append(request.message_object_id)


def flowers(link):
    """Flower's grid, at this SuperLink."""

    class Run:
        run_id = 1

    grid = HttpGrid(token="secret")
    grid._client, grid._run = link, Run()
    return grid


def through_flower(content, longest):
    """What becomes of a reply with this content, and the SuperLink that it comes from."""

    link = SuperLink(content)
    grid = flowers(link)
    with Pulling(grid, {"asked": longest}, poll=0.01) as pulling:
        return dict(pulling.until(time.monotonic() + 20.0))["asked"], link


def bulky():
    """A proper reply, and as much again as may be beside it, and again, and again."""
    more = {f"more{number}": ConfigRecord({"x": f"{number:02d}" * 1_700_000}) for number in range(6)}
    return RecordDict({**wrap({}, b"x"), **more})


@pytest.mark.parametrize(
    "content", [lambda: wrap({}, urandom(30_000_000)), bulky], ids=["payload", "records beside it"]
)
def test_pulling_fetches_no_more_bytes_than_the_reply_may_have(content):
    """The rest is thrown away at the SuperLink, too."""
    longest, largest_part = 10**6, 5_300_000
    reply, link = through_flower(content(), longest)
    assert isinstance(reply, WireError)
    assert f"bytes long; expected at most {longest}" in str(reply)
    assert link.fetched <= longest + LONGEST_ENVELOPE_HEADER + 2**20 + 2 * largest_part  # two at a time
    assert len(link.received) == 1


def test_pulling_fetches_no_more_parts_than_the_reply_may_have():
    """Each would cost a call, and a thread's time."""
    more = {f"more{number}": ConfigRecord({"x": number}) for number in range(100)}
    reply, link = through_flower(RecordDict({**wrap({}, b"x"), **more}), 10**6)
    assert "its reply cannot be read: 106 parts" in str(reply)
    assert (link.fetched, len(link.received)) == (0, 1)


@pytest.fixture
def half_there():
    """A SuperLink that has parts of a reply alone."""
    link = SuperLink(wrap({}, urandom(12_000_000)))
    link.missing |= set(sorted(link.parts)[1:])
    return link


def test_pulling_says_for_how_long_nothing_has_come_of_a_reply_that_is_not_whole(half_there):
    with Pulling(flowers(half_there), {"asked": 10**8}, poll=0.01) as pulling:
        assert list(pulling.until(time.monotonic() + 0.5)) == []
        assert 0.2 < pulling.stalled_s("asked") < 5.0
        half_there.missing.clear()
        assert [number for number, _ in pulling.until(time.monotonic() + 20.0)] == ["asked"]
        assert pulling.stalled_s("asked") < 0.5


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_pulling_asks_for_no_part_of_a_reply_that_nobody_waits_for(half_there, is_forgotten):
    """Threads that did would keep the server's process from ending; none is left, says the fixture of all tests."""
    with Pulling(flowers(half_there), {"asked": 10**8}, poll=0.01) as pulling:
        assert list(pulling.until(time.monotonic() + 0.3)) == []
        if is_forgotten:
            pulling.forget("asked")
            assert until(lambda: half_there.received)
    assert until(lambda: half_there.received)  # what has come of it is thrown away at the SuperLink


def until(holds, within=10.0):
    deadline = time.monotonic() + within
    while not (found := holds()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_pulling_takes_no_reply_for_stalled_that_is_not_announced():
    with Pulling(Grid(later=list), {"later": 1}, poll=0.01) as pulling:
        assert list(pulling.until(time.monotonic() + 0.1)) == []
        assert pulling.stalled_s("later") == 0.0


def test_pulling_reads_what_the_reply_may_have():
    payload = urandom(12_000_000)
    reply, link = through_flower(wrap({"a": 1}, payload), len(payload))
    assert isinstance(reply, Message)
    assert unwrap(reply.content) == ({"a": 1}, payload)
    assert len(link.received) == 1


@pytest.mark.parametrize(
    "more",
    [
        {"more": ConfigRecord({"x": 1})},
        {"potluck": ConfigRecord({"version": VERSION, "words": "{}", "more": 1})},
        {"payload": ArrayRecord({**packed_payload(b"x"), "more": Array("uint8", (1,), "potluck.packed", b"x")})},
        {"more": ArrayRecord()},
    ],
    ids=["a record", "a word", "an array", "an empty record"],
)
def test_an_envelope_holds_nothing_else(more):
    with pytest.raises(WireError, match=r"it holds '.*' beside its envelope"):
        unwrap(RecordDict({**wrap({}, b"x"), **more}))
