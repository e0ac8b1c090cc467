"""What a node says that it computed: it is believed within bounds, and need not be said."""

import pytest

from potluck.core.ground.errors import WireError
from potluck.engine.client.session import Answer
from potluck.engine.numerics.costs import Cost
from potluck.flower.wire.schemas import MOST_FLOPS, MOST_MEMORY, from_outcome, to_outcome


@pytest.mark.parametrize("cost", [Cost(0, 0), Cost(7, 5), Cost(MOST_FLOPS, MOST_MEMORY), None])
def test_a_cost_arrives_as_it_was_sent(cost):
    answer = Answer(0, b"", None, (0.5,), cost=cost)
    header, payload = from_outcome(answer)
    assert ("cost" in header["answer"]) == (cost is not None)
    assert to_outcome((header, payload)) == answer


@pytest.mark.parametrize("wrong", [-1, 2**80, 1.0, True, "3", None, [1], float("nan"), float("inf")])
@pytest.mark.parametrize("word", ["flops", "memory"])
def test_a_cost_that_is_none_is_refused_in_one_line(word, wrong):
    header, payload = from_outcome(Answer(0, b"", None, (), cost=Cost(1, 2)))
    header["answer"]["cost"][word] = wrong
    with pytest.raises(WireError, match=rf"\Anot an outcome of Potluck's: answer\.cost\.{word}: .*found .*\Z"):
        to_outcome((header, payload))


@pytest.mark.parametrize("wrong", [{}, {"flops": 1}, {"flops": 1, "memory": 1, "seconds": 1}, 3, "much"])
def test_a_cost_of_another_form_is_refused(wrong):
    header, payload = from_outcome(Answer(0, b"", None, ()))
    header["answer"]["cost"] = wrong
    with pytest.raises(WireError, match=r"answer\.cost"):
        to_outcome((header, payload))
