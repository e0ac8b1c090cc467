"""Corrupted replies are those that a declaration must refuse, and no others."""

import pytest

from potluck.core.schema import Misfit, Schema, count, number, optional
from potluck.testing.corruptions import corruptions


@pytest.mark.parametrize(
    ("declared", "value"),
    [(number(), -0.5), (number(0), 145.25), (number(0, 1e6), 3.0), (optional(number(0, 1)), 0.25), (count(50), 12)],
)
def test_what_is_corrupted_in_a_number_is_refused_by_a_declaration_that_fits_it(declared, value):
    schema = Schema(h=declared)
    schema.check({"h": value})
    wrong = list(corruptions({"h": value}, schema))
    assert len(wrong) > 8
    for reply, _ in wrong:
        with pytest.raises(Misfit):
            schema.check(reply)


@pytest.mark.parametrize(("declared", "value", "wrong"), [(count(50), 12, True), (number(0, 50), 12.0, False)])
def test_half_of_a_whole_number_is_an_error_where_whole_numbers_are_declared(declared, value, wrong):
    found = [what for _, what in corruptions({"steps": value}, Schema(steps=declared))]
    assert ("in steps the number 12.5" in found) == wrong


def test_half_of_a_count_is_an_error_whatever_is_declared_so_that_it_is_declared_as_one():
    found = [what for _, what in corruptions({"examples": 12}, Schema(examples=number(0, 50)))]
    assert "in examples the number 12.5" in found
