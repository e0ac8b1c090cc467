"""What a node may ask follows from what the SuperLink has told it."""

import pytest
from flwr.proto.error_pb2 import Error
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    Message,
    Metadata,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.node_pb2 import Node
from flwr.proto.recorddict_pb2 import RecordDict
from flwr.proto.run_pb2 import GetRunRequest

from potluck.flower.deploy.requests import LONGEST_PART, Conversation, Inadmissible, requests_of_nodes
from potluck.flower.wire.envelope import MOST_BESIDE_PARTS, PART

KEY, NUMBER, RUN, LARGEST = b"its key", 11, 5, 3 * PART
ITSELF = Node(node_id=NUMBER)
FORGED = "\n\x1b[2JINFO :      [Fleet.ActivateNode] Activated node_id=666"
REQUESTS = requests_of_nodes(registered=True)


def name(number):
    """The name of a part, a digest."""
    return f"{number:064x}"


TREE = ObjectTree(object_id=name(1), children=[ObjectTree(object_id=name(2))])
ASKED = Metadata(
    run_id=RUN, message_id=name(1), src_node_id=1, dst_node_id=NUMBER, group_id="3", ttl=60.0, message_type="train.job"
)
REPLY = Metadata(
    run_id=RUN,
    message_id=name(10),
    src_node_id=NUMBER,
    dst_node_id=1,
    reply_to_message_id=name(1),
    group_id="3",
    ttl=50.0,
    message_type="train.job",
    created_at=2e9,
)


def say(conversation, path, request, answer=None):
    """One request, which passes, and its answer; returns what was answered before, if that is said again."""
    kind = REQUESTS[f"/v1/fleet/{path}"]
    asked = kind.read(request.SerializeToString())
    kind.check(conversation, asked)
    if (again := kind.again(conversation, asked)) is not None:
        return again
    if answer is not None:
        kind.hear(conversation, asked, answer.SerializeToString())
    return None


@pytest.fixture
def node():
    """A node that has one message to answer."""
    conversation = Conversation(KEY, LARGEST)
    say(conversation, "activate-node", ActivateNodeRequest(public_key=KEY, heartbeat_interval=30.0), NAMED)
    say(conversation, "pull-messages", PullMessagesRequest(node=ITSELF), GIVEN)
    return conversation


GIVEN = PullMessagesResponse(messages_list=[Message(metadata=ASKED)], message_object_trees=[TREE])
NAMED = ActivateNodeResponse(node_id=NUMBER)


def reply(parts=1, tree=None, error=None, content=None, more=None, **metadata):
    """The announcement of a reply of so many parts."""
    said = Metadata()
    said.CopyFrom(REPLY)
    said.MergeFrom(Metadata(**metadata))
    message = Message(metadata=said, error=error, content=content)
    leaves = [ObjectTree(object_id=name(20 + part)) for part in range(parts)]
    trees = [tree or ObjectTree(object_id=said.message_id, children=leaves), *(more or [])]
    return PushMessagesRequest(
        node=ITSELF, messages_list=[message], message_object_trees=trees, clientapp_runtime_list=[1.0]
    )


def part(number, length=1, session="s", **more):
    return PushObjectRequest(
        node=ITSELF, run_id=RUN, object_id=name(number), object_content=b"x" * length, session_id=session, **more
    )


def test_an_honest_node_does_its_work(node):
    say(node, "send-node-heartbeat", SendNodeHeartbeatRequest(node=ITSELF, heartbeat_interval=30.0))
    say(node, "get-run", GetRunRequest(node=ITSELF, run_id=RUN))
    say(node, "get-fab", GetFabRequest(node=ITSELF, run_id=RUN, hash_str=name(99)))
    for of in (name(1), name(2)):
        say(node, "pull-object", PullObjectRequest(node=ITSELF, run_id=RUN, object_id=of))
    say(node, "confirm-message-received", RECEIVED)
    asked_for = PushMessagesResponse(objects_to_push=[name(10), name(20)], session_id="s")
    for _ in range(2):  # an answer may be lost on its way
        say(node, "push-messages", reply(), asked_for)
        say(node, "push-object", part(20, PART))
        say(node, "push-object", part(10))
    say(node, "deactivate-node", DeactivateNodeRequest(node_id=NUMBER))


RECEIVED = ConfirmMessageReceivedRequest(node=ITSELF, run_id=RUN, message_object_id=name(1))
READ = {
    "asks for its run": ("get-run", GetRunRequest(node=ITSELF, run_id=RUN)),
    "fetches a part": ("pull-object", PullObjectRequest(node=ITSELF, run_id=RUN, object_id=name(2))),
    "has it": ("confirm-message-received", RECEIVED),
    "replies": ("push-messages", reply()),
    "comes anew": ("activate-node", ActivateNodeRequest(public_key=KEY, heartbeat_interval=30.0)),
}


@pytest.mark.parametrize(("path", "request_"), READ.values(), ids=READ)
def test_a_message_is_given_again_until_the_node_shows_that_it_has_read_it(node, path, request_):
    for _ in range(3):
        say(node, "send-node-heartbeat", SendNodeHeartbeatRequest(node=ITSELF, heartbeat_interval=30.0))
        assert say(node, "pull-messages", PullMessagesRequest(node=ITSELF)) == GIVEN.SerializeToString()
    say(node, path, request_, NAMED if path == "activate-node" else None)
    assert say(node, "pull-messages", PullMessagesRequest(node=ITSELF), PullMessagesResponse()) is None
    assert say(node, "pull-messages", PullMessagesRequest(node=ITSELF)) is None


def test_a_part_of_another_message_does_not_show_that_this_one_was_read(node):
    """Two requests may be under way at once, when the first one's connection has broken."""
    other = Metadata()
    other.CopyFrom(ASKED)
    other.message_id = name(5)
    tree = ObjectTree(object_id=name(5), children=[ObjectTree(object_id=name(6))])
    given = PullMessagesResponse(messages_list=[Message(metadata=other)], message_object_trees=[tree])
    REQUESTS["/v1/fleet/pull-messages"].hear(node, PullMessagesRequest(node=ITSELF), given.SerializeToString())
    say(node, "pull-object", PullObjectRequest(node=ITSELF, run_id=RUN, object_id=name(6)))
    assert say(node, "pull-messages", PullMessagesRequest(node=ITSELF)) == GIVEN.SerializeToString()


def test_a_reply_and_its_parts_that_the_superlink_has_taken_are_not_given_to_it_again(node):
    """It would take none of them a second time, and Flower's program would drop the reply."""
    asked_for = PushMessagesResponse(objects_to_push=[name(10), name(20)], session_id="s")
    assert say(node, "push-messages", reply(), asked_for) is None
    assert say(node, "push-messages", reply()) == asked_for.SerializeToString()
    taken, not_taken = PushObjectResponse(stored=True), PushObjectResponse(stored=False)
    assert say(node, "push-object", part(20), not_taken) is None
    assert say(node, "push-object", part(20), taken) is None
    assert say(node, "push-object", part(20)) == taken.SerializeToString()
    assert say(node, "push-object", part(10)) is None
    with pytest.raises(Inadmissible, match="a part that nobody asked for"):
        say(node, "push-object", part(20, session="another"))


def test_an_error_is_a_reply_too(node):
    say(node, "push-messages", reply(0, error=Error(code=2, reason="ValueError")))


def test_it_is_known_what_a_node_is_at_work_on_until_its_whole_reply_has_come(node):
    assert node.at_work[0] == "3"
    assert node.answered is None
    say(node, "push-messages", reply(), PushMessagesResponse(objects_to_push=[name(10), name(20)], session_id="s"))
    say(node, "push-object", part(20, PART))
    assert node.at_work[0] == "3"
    say(node, "push-object", part(10))
    assert (node.at_work, node.answered) == (None, "3")
    assert not node.left
    say(node, "deactivate-node", DeactivateNodeRequest(node_id=NUMBER))
    assert node.left


def test_a_node_that_comes_anew_has_forgotten_its_work(node):
    say(node, "activate-node", ActivateNodeRequest(public_key=KEY, heartbeat_interval=30.0), NAMED)
    assert (node.at_work, node.answered, node.left) == (None, None, False)


def test_hearing_why_nothing_is_asked_is_no_work():
    conversation = Conversation(KEY, LARGEST)
    say(conversation, "activate-node", ActivateNodeRequest(public_key=KEY, heartbeat_interval=30.0), NAMED)
    told = Metadata()
    told.CopyFrom(ASKED)
    told.group_id = "farewell"
    given = PullMessagesResponse(messages_list=[Message(metadata=told)], message_object_trees=[TREE])
    say(conversation, "pull-messages", PullMessagesRequest(node=ITSELF), given)
    assert conversation.at_work is None
    say(conversation, "push-messages", reply(group_id="farewell"), PushMessagesResponse(session_id="s"))
    assert conversation.answered is None


CHAIN = ObjectTree(object_id=name(10))
for _ in range(20):
    CHAIN = ObjectTree(object_id=name(10), children=[CHAIN])

REFUSED = {
    "a forged line as an app's digest": ("get-fab", GetFabRequest(node=ITSELF, run_id=RUN, hash_str=FORGED)),
    "the digest of an app, and a line": ("get-fab", GetFabRequest(node=ITSELF, run_id=RUN, hash_str=name(9) + "\n")),
    "an app of another run": ("get-fab", GetFabRequest(node=ITSELF, run_id=RUN + 1, hash_str=name(99))),
    "another run": ("get-run", GetRunRequest(node=ITSELF, run_id=RUN + 1)),
    "another node's run": ("get-run", GetRunRequest(node=Node(node_id=12), run_id=RUN)),
    "another's part": ("pull-object", PullObjectRequest(node=ITSELF, run_id=RUN, object_id=name(3))),
    "a forged line as a part's name": ("pull-object", PullObjectRequest(node=ITSELF, run_id=RUN, object_id=FORGED)),
    "another's message as received": (
        "confirm-message-received",
        ConfirmMessageReceivedRequest(node=ITSELF, run_id=RUN, message_object_id=name(3)),
    ),
    "another's sign of life": (
        "send-node-heartbeat",
        SendNodeHeartbeatRequest(node=Node(node_id=12), heartbeat_interval=30.0),
    ),
    "a sign of life for half an hour": (
        "send-node-heartbeat",
        SendNodeHeartbeatRequest(node=ITSELF, heartbeat_interval=1800.0),
    ),
    "no number as time": (
        "send-node-heartbeat",
        SendNodeHeartbeatRequest(node=ITSELF, heartbeat_interval=float("nan")),
    ),
    "another's leave": ("deactivate-node", DeactivateNodeRequest(node_id=12)),
    "another's key": ("activate-node", ActivateNodeRequest(public_key=b"another's", heartbeat_interval=30.0)),
    "messages by name": ("pull-messages", PullMessagesRequest(node=ITSELF, message_ids=[name(1)])),
    "another's messages": ("pull-messages", PullMessagesRequest(node=Node(node_id=12))),
    "an order in the SuperLink's name": ("push-messages", reply(src_node_id=1, dst_node_id=12)),
    "an order in its own name": ("push-messages", reply(dst_node_id=12)),
    "a reply in another's name": ("push-messages", reply(src_node_id=12)),
    "a reply to nothing that it was asked": ("push-messages", reply(reply_to_message_id=name(3))),
    "a reply of another kind": ("push-messages", reply(message_type="query.hello")),
    "a forged line as a reply's round": ("push-messages", reply(group_id=FORGED)),
    "a forged line as a reply's name": ("push-messages", reply(message_id=FORGED)),
    "a reply of another run": ("push-messages", reply(run_id=RUN + 1)),
    "a reply to another task": ("push-messages", reply(dst_task_id=3)),
    "no number as a reply's time": ("push-messages", reply(created_at=float("inf"))),
    "records outside the parts": ("push-messages", reply(content=RecordDict(items=[RecordDict.Item(key="more")]))),
    "another name than the parts'": ("push-messages", reply(tree=TREE)),
    "two trees": ("push-messages", reply(more=[TREE])),
    "parts within parts without end": ("push-messages", reply(tree=CHAIN)),
    "no reply": ("push-messages", PushMessagesRequest(node=ITSELF)),
    "a part that nobody asked for": ("push-object", part(20)),
}


@pytest.mark.parametrize(("path", "request_"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_follow_from_what_it_was_told_is_refused(node, path, request_):
    with pytest.raises(Inadmissible) as refusal:
        say(node, path, request_)
    assert refusal.value.why.isprintable()


def test_a_node_without_a_number_asks_for_nothing():
    with pytest.raises(Inadmissible, match="its number is not its key's"):
        say(Conversation(KEY, LARGEST), "pull-messages", PullMessagesRequest())


def test_the_parts_of_a_reply_are_so_many(node):
    most = LARGEST // PART + MOST_BESIDE_PARTS - 1  # its message is one
    with pytest.raises(Inadmissible, match=f"its reply has {most + 2} parts; expected at most {LARGEST} bytes"):
        say(node, "push-messages", reply(most + 1))
    repeated = ObjectTree(object_id=name(10), children=[ObjectTree(object_id=name(20))] * (most + 1))
    with pytest.raises(Inadmissible, match="parts; expected"):
        say(node, "push-messages", reply(tree=repeated))
    say(node, "push-messages", reply(most))


def test_the_parts_of_a_reply_are_together_so_large_however_often_they_are_announced(node):
    """A part may be larger than Flower's own, so that to count them is not enough."""
    names = [name(20 + number) for number in range(10)]
    asked_for = PushMessagesResponse(objects_to_push=names, session_id="s")
    say(node, "push-messages", reply(10), asked_for)
    say(node, "push-object", part(20, LONGEST_PART - 500))
    say(node, "push-messages", reply(10), asked_for)
    say(node, "push-object", part(21, LONGEST_PART - 500))
    with pytest.raises(Inadmissible, match=f"bytes; expected at most {LARGEST} bytes"):
        say(node, "push-object", part(22, LONGEST_PART - 500))


def test_a_message_has_one_reply(node):
    """Parts that are announced later are kept for ever: nothing belongs to them."""
    asked_for = PushMessagesResponse(objects_to_push=[name(10), name(20)], session_id="s")
    say(node, "push-messages", reply(1), asked_for)
    with pytest.raises(Inadmissible, match="it announced another reply to the same message before"):
        say(node, "push-messages", reply(2))


def test_a_part_belongs_to_its_session(node):
    say(node, "push-messages", reply(1), PushMessagesResponse(objects_to_push=[name(20)], session_id="s"))
    with pytest.raises(Inadmissible, match="a part that nobody asked for"):
        say(node, "push-object", part(20, session=FORGED))


def test_messages_that_were_never_answered_are_forgotten(node):
    last = 1
    for number in range(100, 200):
        asked = Metadata()
        asked.CopyFrom(ASKED)
        asked.message_id = name(number)
        given = PullMessagesResponse(
            messages_list=[Message(metadata=asked)], message_object_trees=[ObjectTree(object_id=name(number))]
        )
        say(node, "pull-object", PullObjectRequest(node=ITSELF, run_id=RUN, object_id=name(last)))
        last = number
        say(node, "pull-messages", PullMessagesRequest(node=ITSELF), given)
    say(node, "push-messages", reply(reply_to_message_id=name(199)))
    with pytest.raises(Inadmissible, match="answers none that it was given"):
        say(node, "push-messages", reply(reply_to_message_id=name(100)))


def test_without_keys_nodes_register_themselves():
    assert requests_of_nodes(registered=False).keys() - REQUESTS.keys() == {
        "/v1/fleet/register-node",
        "/v1/fleet/unregister-node",
    }
