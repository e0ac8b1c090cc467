"""What Python's functions say of arguments that they do not take."""

import pytest

import potluck
from potluck import ConfigError


@pytest.mark.parametrize(
    ("function", "name", "said"),
    [
        (potluck.run, "lr", r"settings are given by key: settings={'method\.training\.lr': \.\.\.}"),
        (potluck.run, "epochs", r"settings={'method\.training\.epochs': \.\.\.}"),
        (potluck.run, "client", "nearest: clients"),
        (potluck.resume, "round", "nearest: rounds"),
        (potluck.compare, "cohort_fraction", r"settings={'run\.cohort_fraction': \.\.\.}"),
        (potluck.report, "targets", "nearest: target"),
    ],
)
def test_an_argument_that_does_not_exist_is_named_with_what_may_be_meant(function, name, said):
    expected = rf"^potluck\.{function.__name__}: {name} is none of its arguments; .*{said}"
    with pytest.raises(ConfigError, match=expected) as refused:
        function("local", **{name: 1})
    assert "\n" not in str(refused.value)
