"""Corrupted replies are those that a declaration must refuse, and no others."""

import pytest

from potluck.core.schema import Misfit, Schema, count, number, optional
from potluck.testing.corruptions import corruptions


@pytest.mark.parametrize(
    ("declared", "value"),
    [(number(), -0.5), (number(0), 145.25), (number(0, 1e6), 3), (optional(number(0, 1)), 0.25), (count(50), 12)],
)
def test_what_is_corrupted_in_a_number_is_refused_by_a_declaration_that_fits_it(declared, value):
    schema = Schema(h=declared)
    schema.check({"h": value})
    wrong = list(corruptions({"h": value}, schema))
    assert len(wrong) > 8
    for reply, _ in wrong:
        with pytest.raises(Misfit):
            schema.check(reply)


def test_half_of_a_whole_number_is_an_error_where_whole_numbers_are_declared():
    for declared, wrong in ((count(50), True), (number(0, 50), False)):
        found = [what for _, what in corruptions({"steps": 12}, Schema(steps=declared))]
        assert ("in steps the number 12.5" in found) == wrong
