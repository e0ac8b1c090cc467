"""Documentation that was broken for source files, as terminals of some widths show it."""

import inspect

import pytest

from potluck.cli.prose import reflowed
from potluck.methods import get_method, list_methods

SOURCE = """\
Moon: a first line
that goes on.

Symbols
    w         state.weights
    mu        strength, of which there is
              more to say

Departures
    1. One sentence that is
       broken in two.
    10. Another one, whose number is wider, on one line.

       With a paragraph
       of its own:

    code = as_it_is()
        indented()
"""
NARROW = """\
Moon: a first line that goes
on.

Symbols
    w         state.weights
    mu        strength, of which
              there is more to say

Departures
    1. One sentence that is
       broken in two.
    10. Another one, whose
        number is wider, on
        one line.

       With a paragraph of
       its own:

    code = as_it_is()
        indented()"""


def test_reflowed__fills_paragraphs_and_keeps_lists_and_blocks_of_code():
    assert reflowed(SOURCE, 28) == NARROW
    assert reflowed(NARROW, 200) == reflowed(SOURCE, 200)
    assert "\nMoon: a first line that goes on.\n" in f"\n{reflowed(SOURCE, 200)}\n"
    assert "    mu        strength, of which there is more to say\n" in reflowed(SOURCE, 200)


@pytest.mark.parametrize("name", list_methods())
@pytest.mark.parametrize("width", [60, 80, 200])
def test_reflowed__loses_no_word_of_a_methods_documentation(name, width):
    text = inspect.getmodule(get_method(name)).__doc__
    shown = reflowed(text, width)
    assert shown.split() == text.split()
    longest = max(len(word) for word in text.split())
    broken = [line for line in shown.splitlines() if line not in text.splitlines()]  # the others are formulas too
    assert max(map(len, broken), default=0) <= max(width, 14 + longest)
    assert reflowed(shown, width) == shown
