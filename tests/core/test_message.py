import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.ground.errors import EntryError, WireError
from potluck.core.ground.tree import pack
from potluck.core.message import Message, Traffic

SMALL = Message(weights={"a": torch.ones(2), "b": {"c": torch.tensor(3), "d": None}}, rate=0.5, name="é", on=True, n=7)

plain = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4))
numbers = st.lists(st.floats(width=32, allow_nan=False), max_size=4).map(torch.tensor)
entries = st.recursive(
    st.one_of(plain, numbers),
    lambda children: st.dictionaries(st.text(max_size=4), st.one_of(st.none(), children), max_size=3),
    max_leaves=6,
)
messages = st.dictionaries(st.text(max_size=4), st.one_of(st.none(), entries), max_size=3)


def listed(value):
    """Tensors as lists, so that trees can be compared."""
    if isinstance(value, dict):
        return {key: listed(child) for key, child in value.items()}
    return (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value


@given(messages)
def test_a_message_comes_back(given_entries):
    message = Message(**given_entries)
    back = Message.decode(message.encode())
    assert listed(dict(back)) == listed(dict(message))
    assert back.sizes() == message.sizes()


@given(messages)
def test_equal_messages_are_equal_bytes(given_entries):
    assert Message(**given_entries).encode() == Message(**given_entries).encode()


def test_an_absent_entry_is_refused_with_the_nearest_names():
    message = Message(weights=0, buffers=1, examples=2, gone=None)
    with pytest.raises(KeyError) as refused:
        message["wieghts"]
    assert isinstance(refused.value, EntryError)
    assert str(refused.value).startswith("message has no entry 'wieghts'; nearest: 'weights'")
    with pytest.raises(EntryError, match="no entry 'gone'"):
        message["gone"]
    with pytest.raises(EntryError, match="nearest: none, the message is empty"):
        Message()["weights"]


def test_an_entry_that_is_none_is_absent():
    message = Message(here=0, gone=None)
    assert "gone" not in message
    assert "here" in message
    assert list(message) == ["here"]
    assert len(message) == 1


def test_the_default_is_given_for_an_absent_entry():
    assert Message(rate=0.5).get("rate", 1.0) == 0.5
    assert Message().get("rate", 1.0) == 1.0
    assert Message().get("rate") is None


def test_an_entry_may_have_any_name():
    assert Message(**{"self": 1, "": 2})["self"] == 1


def test_sizes_are_payload_bytes():
    message = Message(
        weights={
            "half": torch.zeros(3, 2, dtype=torch.bfloat16),
            "deep": {"count": torch.tensor(5), "none": None},
            "view": torch.zeros(100)[::50],
            "empty": torch.zeros(0, 7),
            "expanded": torch.zeros(1).expand(6),
        },
        mask=torch.zeros(5, dtype=torch.bool),
        rate=0.5,
        on=True,
        n=3,
        name="né",
        absent=None,
        nothing={},
    )
    assert message.sizes() == {
        "weights": 3 * 2 * 2 + 8 + 2 * 4 + 0 + 6 * 4,
        "mask": 5,
        "rate": 8,
        "on": 8,
        "n": 8,
        "name": 3,
        "nothing": 0,
    }
    assert message.nbytes == 52 + 5 + 24 + 3


def test_a_message_shows_names_and_sizes():
    assert repr(Message(w=torch.zeros(2), n=1)) == "Message(w: 8 B, n: 8 B)"


def test_decoding_shares_no_memory():
    tensor = torch.zeros(2)
    message = Message(w=tensor, nested={"w": tensor})
    back = Message.decode(message.encode())
    back["w"].add_(1)
    assert tensor.tolist() == [0, 0]
    assert back["nested"]["w"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ([torch.zeros(1)], "message entry x is a list; expected tensors, numbers or text"),
        ((1, 2), "message entry x is a tuple; expected"),
        ({"a": {"b": object()}}, r"message entry x\.a\.b is a object; expected"),
        ({"a": {3: torch.zeros(1)}}, r"message entry x\.a has the key 3; expected text"),
        (1j, "message entry x is a complex; expected"),
        (torch.nn.Linear(1, 1), "message entry x is a Linear; expected"),
    ],
)
def test_what_cannot_cross_is_refused_when_the_message_is_made(value, complaint):
    with pytest.raises(WireError, match=f"^{complaint}"):
        Message(x=value)


@pytest.mark.parametrize("tree", [[1], 3, None, torch.zeros(1), {1: 2}, {"a": 1, 2: 3}, {"a": [1]}])
def test_trees_that_are_no_messages_are_refused(tree):
    with pytest.raises(WireError, match="message"):
        Message.decode(pack(tree))


@pytest.mark.parametrize("mask", [1, 2, 4, 8, 16, 32, 64, 128, 255])
def test_a_flipped_byte_never_escapes_as_another_error(mask):
    data = SMALL.encode()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= mask
        try:
            assert isinstance(Message.decode(bytes(damaged)), Message)
        except WireError:
            continue


def test_a_truncated_message_is_a_wire_error():
    data = SMALL.encode()
    for length in range(len(data)):
        with pytest.raises(WireError, match="not a Potluck message"):
            Message.decode(data[:length])


def test_an_entry_renamed_on_the_way_is_no_other_error():
    damaged = Message(selg=1).encode().replace(b"selg", b"self")
    assert Message.decode(damaged)["self"] == 1


@given(st.binary(max_size=60), st.integers(0, 400))
def test_a_scribbled_message_never_escapes_as_another_error(scribble, start):
    data = SMALL.encode()
    try:
        assert isinstance(Message.decode(data[:start] + scribble + data[start + len(scribble) :]), Message)
    except WireError:
        return


def test_traffic_adds_up():
    traffic = Traffic()
    traffic.down.update({"w": 8, "n": 8})
    traffic.down.update({"w": 8})
    traffic.up.update({"w": 4})
    assert (traffic.bytes_down, traffic.bytes_up) == (24, 4)
    assert Traffic().down == {}
