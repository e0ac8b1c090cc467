import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.ground.errors import ConfigError
from potluck.secure.fixed import FixedPoint, to_units, to_words


def test_numbers_are_rounded_to_the_nearest_unit_and_clipped_to_the_largest():
    units, clipped = FixedPoint(largest=2.0, bits=2).units(torch.tensor([[0.3, -0.4], [1.9, -7.0]]))
    assert units.tolist() == [1, -2, 8, -8]
    assert clipped == 1
    assert FixedPoint().units(torch.empty(0, 3))[0].shape == (0,)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(wrong):
    with pytest.raises(ValueError, match="not finite"):
        FixedPoint().units(torch.tensor([0.0, wrong]))


@pytest.mark.parametrize("word", [32, 64])
@given(st.data())
def test_sums_that_fit_come_back_whatever_is_added_and_taken_off_on_the_way(word, data):
    most = 2 ** (word - 1) - 1
    units = np.array(data.draw(st.lists(st.integers(-most // 4, most // 4), min_size=1, max_size=4)), np.int64)
    masks = np.array(data.draw(st.lists(st.integers(0, 2**word - 1), min_size=4, max_size=4)), f"<u{word // 8}")
    masked = to_words(units, word) + masks[: len(units)]
    assert to_units(masked - masks[: len(units)]).tolist() == units.tolist()
    assert to_units(masked.sum(dtype=masked.dtype, keepdims=True) - masks[: len(units)].sum(dtype=masked.dtype)) == [
        units.sum()
    ]


def test_the_word_is_the_least_in_which_the_largest_sum_fits():
    numbers = FixedPoint(largest=2.0, bits=10, weight=4)  # 8,192 a client
    most = 2**31 // 8192
    assert numbers.word(most - 1) == 32
    assert numbers.word(most) == 64


def test_sums_that_could_overflow_are_refused_in_one_line_before_anything_is_summed():
    with pytest.raises(
        ConfigError, match=r"1000 clients .* 60,000, .* need 66 bits; expected at most 64: lower"
    ) as told:
        FixedPoint(largest=4096.0, bits=27, weight=60_000).word(1000)
    assert "\n" not in str(told.value)
    assert FixedPoint(largest=1024.0, bits=27, weight=60_000).word(1000) == 64  # 63 bits and the sign


def test_numbers_that_a_double_does_not_tell_apart_are_refused():
    with pytest.raises(ConfigError, match=r"largest: expected at most 32 with 48 bits"):
        FixedPoint(largest=33.0, bits=48)
