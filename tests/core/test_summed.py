"""What stands for the reply of a client that has given none."""

import torch

from potluck.core.message import Message
from potluck.core.schema import (
    ClassCounts,
    Labels,
    Probabilities,
    Schema,
    UpTo,
    booleans,
    count,
    floats,
    like,
    number,
    optional,
    some_of,
    text,
)
from potluck.core.summed import blank


def test_a_client_without_a_reply_is_known_by_what_it_was_sent():
    present = UpTo(4)
    schema = Schema(
        weights=like({"w": torch.ones(3, 2), "n": torch.tensor(5)}),
        some=some_of({"w": torch.ones(2)}),
        rows=floats(present, 5),
        shares=Probabilities(present, 4),
        counts=ClassCounts(4, 9, present),
        labels=Labels(present, 4),
        known=booleans(4),
        examples=count(7),
        rate=number(0.0, 1.0),
        name=text(9),
        maybe=optional(count(3)),
    )
    found = Message(**blank(schema))
    assert {name: value.tolist() for name, value in found["weights"].items()} == {"w": [[0.0] * 2] * 3, "n": 0}
    assert [tuple(found[name].shape) for name in ("rows", "shares", "counts", "labels", "known")] == [
        (0, 5),
        (0, 4),
        (4,),
        (0,),
        (4,),
    ]
    assert (found["examples"], found["rate"], found["name"], found["some"]) == (7, 1.0, "", {})
    assert "maybe" not in found
