import math

import pytest
import torch

from potluck.core.ground.errors import DivergenceError
from potluck.core.ground.notes import MOST_NOTES, Notes


def test_add__keeps_numbers_as_floats_and_the_last_of_a_name():
    notes = Notes()
    notes.add({"b<0".replace("<", "-"): 1, "loss": 0.5})
    notes.add({"loss": 0.25})
    assert notes == {"b-0": 1.0, "loss": 0.25}
    assert all(type(value) is float for value in notes.values())


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("", 1.0, "note '': expected a name of 1 to 64 letters"),
        ("x" * 65, 1.0, "expected a name of 1 to 64 letters"),
        ("a/b", 1.0, "note 'a/b': expected a name"),
        ("a|b", 1.0, "note 'a|b'".replace("|", r"\|")),
        ("a\n", 1.0, "expected a name"),
        ("ä", 1.0, "expected a name"),
        ("loss", torch.tensor(1.0), r"note 'loss': expected a number, found a Tensor; write float\(...\)"),
        ("loss", "1.0", "expected a number, found a str"),
        ("loss", True, "expected a number, found a bool"),
        ("loss", None, "expected a number, found a NoneType"),
    ],
)
def test_add__refuses_what_is_no_note(name, value, complaint):
    with pytest.raises(ValueError, match=complaint):
        Notes().add({name: value})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400])
def test_add__refuses_what_is_not_finite_as_divergence(value):
    with pytest.raises(DivergenceError, match="note 'loss': expected a finite number"):
        Notes().add({"loss": value})


def test_add__takes_no_more_than_can_be_looked_at():
    notes = Notes()
    notes.add({f"n{number}": number for number in range(MOST_NOTES)})
    notes.add({"n0": 7.0})
    with pytest.raises(ValueError, match="at most 32 notes a round"):
        notes.add({"more": 1.0})
