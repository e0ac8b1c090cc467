import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.ground.errors import ConfigError
from potluck.parts.submodels import select
from potluck.secure.coverage import (
    Coverage,
    Summand,
    piece_at,
    piece_shape,
    rows_piece,
    weights_that_follow,
    whole_piece,
)

SHAPES = {"w": (4, 3), "b": (4,), "s": (), "k": (2, 3, 2)}


@st.composite
def index_sets(draw, shape):
    """Index sets as sub-models have them: slices, and positions in any order."""
    found = []
    for size in shape:
        kept, order = draw(st.integers(0, size)), draw(st.permutations(range(size)))
        found.append(slice(0, kept) if draw(st.booleans()) else torch.tensor(order[:kept], dtype=torch.int64))
    return tuple(found)


@st.composite
def coverings(draw):
    """A coverage, and the sub-models of its kinds of clients."""
    kinds = []
    for _ in range(draw(st.integers(1, 4))):
        names = draw(st.sets(st.sampled_from(sorted(SHAPES))))
        kinds.append({name: draw(index_sets(SHAPES[name])) for name in sorted(names)})
    clients = {3 * i: draw(st.integers(0, len(kinds) - 1)) for i in range(draw(st.integers(1, 6)))}
    pieces = [{name: piece_at(place, SHAPES[name]) for name, place in kind.items()} for kind in kinds]
    return Coverage({name: Summand(shape) for name, shape in SHAPES.items()}, pieces, clients), kinds


@pytest.mark.slow
@given(coverings())
def test_a_block_has_exactly_the_coordinates_that_the_same_clients_cover(given_):
    coverage, kinds = given_
    numbered = {
        name: torch.arange(torch.Size(shape).numel()).view(shape) + coverage.starts[name]
        for name, shape in SHAPES.items()
    }
    held = {client: select(numbered, kinds[kind]) for client, kind in coverage.kinds.items()}
    expected = {}
    for at in range(coverage.size):
        owners = tuple(client for client in held if any((part == at).any() for part in held[client].values()))
        expected.setdefault(owners, []).append(at)
    expected.pop((), None)
    assert {block.clients: block.positions.tolist() for block in coverage.blocks} == expected
    for client, own in held.items():
        flat = np.concatenate([np.empty(0), *(own[name].numpy().reshape(-1) for name in sorted(own))])
        places = coverage.places(client)
        assert sorted(places) == [number for number, block in enumerate(coverage.blocks) if client in block.clients]
        for number, place in places.items():
            assert flat[place].tolist() == coverage.blocks[number].positions.tolist()


@pytest.mark.slow
@given(coverings())
def test_a_piece_has_the_shape_of_what_a_sub_model_selects(given_):
    coverage, kinds = given_
    for pieces, kind in zip(coverage.pieces, kinds, strict=True):
        zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        assert {name: piece_shape(piece) for name, piece in pieces.items()} == {
            name: tuple(part.shape) for name, part in select(zeros, kind).items()
        }


def test_rows_that_are_weighed_have_their_weights_in_their_own_block():
    summands = {"c": Summand((3, 2), "row")}
    kinds = [{"c": rows_piece(rows, (3, 2))} for rows in ([0, 2], [2])]
    coverage = Coverage(summands, kinds, {0: 0, 1: 1, 2: 1})
    assert {block.clients: block.positions.tolist() for block in coverage.blocks} == {
        (0,): [0, 1, 6],
        (0, 1, 2): [4, 5, 8],
    }


def test_a_block_knows_whether_its_clients_weights_are_summed_with_it():
    summands = {"a": Summand((2,)), "b": Summand((2,), "client")}
    kinds = [{"a": whole_piece((2,))}, {"a": whole_piece((2,)), "b": whole_piece((2,))}]
    blocks = Coverage(summands, kinds, {0: 0, 1: 1}).blocks
    assert {(block.clients, block.weighed, block.words) for block in blocks} == {((0, 1), False, 2), ((1,), True, 3)}


@pytest.mark.parametrize(
    ("summand", "piece", "told"),
    [
        pytest.param(Summand((4,)), (((0, 5),),), "expected each once, below 4", id="beyond its end"),
        pytest.param(Summand((4,)), (((-1, 2),),), "expected each once, below 4", id="before its beginning"),
        pytest.param(Summand((4,)), (((2, 2),),), "expected each once", id="an empty span"),
        pytest.param(Summand((4,)), (((2, 4), (0, 3)),), "expected each once", id="a position twice"),
        pytest.param(Summand((4,)), (), "0 dimensions of 1", id="too few dimensions"),
        pytest.param(Summand((4, 2), "row"), (((0, 4),), ((0, 1),)), "whole ones where rows", id="parts of rows"),
        pytest.param(Summand((), "row"), (), "the weighing 'row'", id="no rows"),
        pytest.param(Summand((4,), "twice"), (((0, 4),),), "the weighing 'twice'", id="no such weighing"),
        pytest.param(Summand((-4,)), (((0, 4),),), "no negative size", id="a negative size"),
        pytest.param(Summand((2**20, 2**20)), (), "coordinates; expected at most", id="too many coordinates"),
    ],
)
def test_pieces_that_are_none_are_refused_in_one_line(summand, piece, told):
    with pytest.raises(ConfigError, match=told) as refused:
        Coverage({"w": summand}, [{"w": piece}], {0: 0})
    assert "\n" not in str(refused.value)


def test_pieces_of_other_tensors_and_clients_without_pieces_are_refused():
    with pytest.raises(ConfigError, match="a piece of 'v'"):
        Coverage({"w": Summand((1,))}, [{"v": whole_piece((1,))}], {0: 0})
    with pytest.raises(ConfigError, match="a kind without pieces"):
        Coverage({"w": Summand((1,))}, [{}], {0: 1})


@pytest.mark.parametrize(
    ("covering", "told"),
    [
        ([{1, 2, 3, 4}], set()),
        ([{1, 2, 3, 4}, {1, 2, 3}], {4}),
        ([{1, 2, 3, 4}, {3, 4, 5, 6}], set()),
        ([{1, 2, 3}, {3, 4, 5}, {1, 2, 4, 5}], {3}),
        ([], set()),
    ],
)
def test_weights_that_follow_from_sums_are_named(covering, told):
    assert weights_that_follow([frozenset(one) for one in covering]) == told
