"""Pairs of features: the store, the draws from it, what its names tell apart. Its losses: `test_fedin.py`."""

import pytest
import torch
from torch.testing import assert_close

from potluck.core.schema import Misfit
from potluck.engine.rounds.engine import Engine
from potluck.methods.local import Local
from potluck.parts.features import drawn, expected_pairs, feature_shape, signature, signatures, with_pairs
from potluck.testing.worlds import World, toy_federation


def pairs(first, count, width=1):
    """Pairs whose numbers tell where they came from: s_out is ten times s_in."""
    s_in = torch.arange(first, first + count).float()[:, None].expand(count, width)
    return {"s_in": s_in, "s_out": 10 * s_in}


@pytest.fixture
def server():
    return Engine(Local(), toy_federation(World())).server(1)


def test_with_pairs__keeps_the_newest_of_each_signature_in_order_and_aligned():
    store = with_pairs(with_pairs(with_pairs({}, pairs(0, 3), 4), pairs(50, 2, width=2), 4), pairs(3, 3), 4)
    narrow, wide = store["1 > 1"], store["2 > 2"]
    assert narrow["s_in"].flatten().tolist() == [2, 3, 4, 5]
    assert narrow["s_out"].flatten().tolist() == [20, 30, 40, 50]
    assert wide["s_in"][:, 0].tolist() == [50, 51]


def test_with_pairs__leaves_the_store_it_was_given_as_it_was():
    before = with_pairs({}, pairs(0, 3), 10)
    with_pairs(before, pairs(3, 3), 10)
    assert len(before["1 > 1"]["s_in"]) == 3


@pytest.mark.parametrize("nothing", [None, {}, pairs(0, 1)])
def test_with_pairs__stores_no_pair_that_has_no_batch_statistics(nothing):
    assert with_pairs({}, nothing, 10) == {}


def test_drawn__takes_rows_of_each_signature_without_replacement_and_aligned():
    store = {"1 > 1": pairs(0, 20), "2 > 2": pairs(50, 3, width=2)}
    found = drawn(store, 8, torch.Generator().manual_seed(0))
    rows = found["1 > 1"]["s_in"].flatten().tolist()
    assert len(set(rows)) == len(rows) == 8
    assert_close(found["1 > 1"]["s_out"], 10 * found["1 > 1"]["s_in"])
    assert sorted(found["2 > 2"]["s_in"][:, 0].tolist()) == [50, 51, 52]  # no more than there are


def test_drawn__does_not_depend_on_the_order_of_the_store():
    store = {"a": pairs(0, 20), "b": pairs(50, 20)}
    one, other = (drawn(s, 5, torch.Generator().manual_seed(0)) for s in (store, dict(reversed(store.items()))))
    assert_close(one, {name: other[name] for name in one})


def test_signatures__tell_apart_what_differs_in_shape_at_the_places_that_are_named(server):
    assert signature([torch.Size([64, 8, 8]), torch.Size([512])]) == "64x8x8 > 512"
    assert signatures(server) == {"toy1": "16 > 16", "toy2": "16 > 16"}
    assert signatures(server, "s_out") == {"toy1": "16", "toy2": "16"}


def test_expected_pairs__fit_up_to_as_many_pairs_of_the_clients_shapes(server):
    member = server.roster[0]
    (width,) = feature_shape(server, member.architecture, "s_in")
    declared = expected_pairs(server, member, 4)
    declared.check(pairs(0, 4, width))
    for wrong in (pairs(0, 5, width), pairs(0, 4, width + 1), {**pairs(0, 4, width), "s_out": torch.zeros(3, width)}):
        with pytest.raises(Misfit):
            declared.check(wrong)
