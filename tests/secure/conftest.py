"""Rounds to try: who has what of which tensors."""

from types import SimpleNamespace

import pytest
import torch

from potluck.secure.agreement import Agreement
from potluck.secure.coverage import Coverage, Summand, piece_shape, rows_piece, whole_piece
from potluck.secure.fixed import FixedPoint
from potluck.secure.together import Addend, new_identities, public_keys


def leading(*sizes):
    return tuple(((0, size),) for size in sizes)


def rolling(start, length, size):
    """Positions of a window that goes around."""
    over = max(start + length - size, 0)
    return ((start, start + length - over), *([(0, over)] if over else []))


@pytest.fixture
def pieces():
    return SimpleNamespace(leading=leading, rolling=rolling, rows=rows_piece, whole=whole_piece)


def mixed(clients):
    """Layers of three depths, leading and rolling slices, and rows of classes."""
    summands = {
        "stem": Summand((6, 3)),
        "deep": Summand((5,), "client"),
        "loss": Summand((), "client"),
        "sliced": Summand((8, 6)),
        "rolled": Summand((7, 4)),
        "classes": Summand((4, 3), "row"),
    }
    pieces = []
    for kind in range(3):
        own = {
            "stem": whole_piece((6, 3)),
            "loss": (),
            "sliced": leading(8 - 2 * kind, 6 - kind),
            "rolled": (rolling(kind + 2, 5 - kind, 7), leading(4)[0]),
            "classes": rows_piece([3, 0, 1][: 3 - kind], (4, 3)),
        }
        pieces.append(own if kind else {**own, "deep": whole_piece((5,))})
    return Coverage(summands, pieces, {client: client % 3 for client in clients})


def agreed(coverage, numbers=None, **more):
    identities = new_identities(coverage.kinds)
    numbers = numbers or FixedPoint(largest=8.0, bits=20, weight=100)
    made = {"run": "tried", "round": 1, "keys": public_keys(identities), "coverage": coverage, "numbers": numbers}
    return Agreement(**{**made, **more}), identities


def drawn_addends(coverage, seed=0, scale=1.0):
    """What each client adds: numbers, and weights from 1 to 9."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for client, kind in coverage.kinds.items():
        pieces = coverage.pieces[kind]
        values = {n: scale * torch.randn(piece_shape(p), generator=generator) for n, p in pieces.items()}
        rows = {
            n: torch.randint(1, 10, piece_shape(p)[:1], generator=generator)
            for n, p in pieces.items()
            if coverage.summands[n].weighing == "row"
        }
        found[client] = Addend(values, int(torch.randint(1, 10, (), generator=generator)), rows)
    return found


@pytest.fixture
def trial():
    """A function that makes (coverage, agreement, identities, addends) of so many clients."""

    def make(clients=10, coverage=None, seed=0, **more):
        coverage = coverage or mixed(range(clients))
        agreement, identities = agreed(coverage, **more)
        return SimpleNamespace(
            coverage=coverage, agreement=agreement, identities=identities, addends=drawn_addends(coverage, seed)
        )

    return make
