import pytest

from potluck.core.ground.text import LINE, LINES, last_lines, one_line, quoted

FORGED = "no\n2026-01-01 00:00:00 WARNING potluck: all is well"


@pytest.mark.parametrize(
    "text", [FORGED, "\x1b[31mred\x1b[0m", "bell\a", "back\b\rspace", "\u202eright", "\ud800 alone"]
)
def test_one_line_holds_printable_characters_only(text):
    found = one_line(text)
    assert found.isprintable()
    assert found.encode()


def test_one_line_keeps_what_is_readable():
    assert one_line("ValueError: expected\n   3, found \t 4 µm") == "ValueError: expected 3, found 4 µm"


@pytest.mark.parametrize("text", ["x" * (LINE + 1), "x" * 10**7, "x " * 10**6])
def test_one_line_is_cut_and_says_so(text):
    assert len(one_line(text)) <= LINE
    assert one_line(text).endswith("...")


def test_last_lines_keeps_the_end_of_a_long_traceback():
    found = last_lines("\n".join(f"line {number}" for number in range(10**5)))
    assert found.splitlines()[-1] == "line 99999"
    assert len(found.splitlines()) == LINES


def test_last_lines_cuts_and_cleans_every_line():
    found = last_lines("a\x1b[2Jb\n" + "y" * 10**6 + "\nend").splitlines()
    assert all(line.isprintable() and len(line) <= LINE for line in found)
    assert found[-1] == "end"


def test_quoted_lines_cannot_pass_for_lines_of_a_log():
    assert quoted(FORGED) == "\n  | no\n  | 2026-01-01 00:00:00 WARNING potluck: all is well"
    assert quoted("") == ""
