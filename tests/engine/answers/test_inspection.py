from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from potluck.core.ground.errors import DataError
from potluck.core.requests.examples import Examples
from potluck.core.tasks.regression import Regression
from potluck.engine.answers.inspection import check_inputs, check_targets, not_finite
from potluck.engine.rounds.engine import Engine
from potluck.methods import get_method
from potluck.testing.worlds import CLASSES, World, quadratics, quick, toy_federation


def changed(client, part, **changes):
    """A toy federation with other examples at one client."""
    federation = toy_federation(World())
    site = federation.sites[client]
    examples = replace(alone(getattr(site, part)), **changes)
    return replace(federation, sites={**federation.sites, client: replace(site, **{part: examples})})


def alone(examples):
    """The same examples in tensors of their own."""
    return Examples(examples.inputs[examples.rows], examples.labels)


def spoiled(value):
    inputs = alone(toy_federation(World()).sites[2].train).inputs
    inputs[[5, 7], 3] = value
    return inputs


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_inputs_that_are_not_finite_are_refused_with_client_and_place(value):
    federation = changed(2, "train", inputs=spoiled(value))
    message = r"^client 2: its training examples hold NaN or infinity in 2 of 56 inputs, first in number 5; expected"
    with pytest.raises(DataError, match=message):
        check_inputs(federation)
    with pytest.raises(DataError, match=message):
        Engine(quick(get_method("local")), federation).start()


def shared(rows, **changes):
    """Two clients that see rows of one tensor of which row 3 is spoiled."""
    inputs = torch.zeros(6, 10)
    inputs[3] = float("nan")
    federation = toy_federation(World(clients=2))
    examples = Examples(inputs, torch.zeros(6, dtype=torch.int64))
    sites = {i: replace(federation.sites[i], train=examples.take(torch.tensor(mine))) for i, mine in enumerate(rows)}
    return replace(federation, sites=sites, **changes)


def test_of_a_shared_tensor_only_the_client_that_sees_the_spoiled_row_is_named():
    with pytest.raises(DataError, match=r"^client 1: its training examples hold NaN or infinity in 1 of 3"):
        check_inputs(shared([[0, 1], [2, 3, 4]]))
    check_inputs(shared([[0, 1], [2, 4, 5]]))


def test_inputs_stored_as_bytes_are_fine():
    check_inputs(changed(0, "test", inputs=torch.zeros(32, 10, dtype=torch.uint8)))


@pytest.mark.parametrize(
    ("targets", "why"),
    [
        (torch.zeros(56), r"are float32 of shape \(56,\); classification expects one class number from 0 to 3"),
        (torch.zeros(56, 4, dtype=torch.int64), r"are int64 of shape \(56, 4\)"),
        (torch.zeros(56, dtype=torch.int32), r"are int32"),
        (torch.full((56,), CLASSES), r"go from 4 to 4"),
        (torch.full((56,), -1), r"go from -1 to -1"),
        (torch.full((56,), 10**9), r"go from 1000000000"),
    ],
)
def test_targets_that_are_no_classes_are_refused(targets, why):
    with pytest.raises(DataError, match=rf"^client 2: the targets of its training part {why}"):
        check_targets(changed(2, "train", targets=targets))


def test_targets_are_checked_as_the_task_has_them():
    check_targets(toy_federation(World()))
    line = quadratics()
    with pytest.raises(DataError, match=r"are float32 of shape \(1, 1\); classification expects"):
        check_targets(line)
    check_targets(replace(line, task=Regression()))


@dataclass(frozen=True)
class State:
    nested: Any
    number: float = 0.0


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("before", "after", "where"),
    [
        (State({"a": [torch.zeros(2)]}), State({"a": [torch.tensor([1.0, NAN])]}), "nested.a[0] holds nan"),
        (State({}), State({"new": torch.tensor([INF])}), "nested.new holds inf"),
        (State(None), State(None, -INF), "number holds -inf"),
        (State(None, INF), State(None, INF), None),
        (State(torch.tensor([INF])), State(torch.tensor([INF, 1.0])), None),
        (State({"a": torch.tensor(1), "b": "text", 3: (None, True)}), State(torch.zeros(0)), None),
        (State({3: (torch.zeros(1),)}), State({3: (torch.tensor([NAN]),)}), "nested.3[0] holds nan"),
    ],
)
def test_not_finite_tells_where_a_state_began_to_hold_what_is_not_finite(before, after, where):
    assert not_finite(after, before) == where
