"""Every line of the page on security names tests that there are."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text()
CLAIMS = re.findall(r"^- (.*?)(?=^- |^## |\Z)", PAGE, flags=re.DOTALL | re.MULTILINE)
KNOWN = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)\(", path.read_text(), flags=re.MULTILINE)
}


def test_there_are_claims_of_every_kind():
    assert len(CLAIMS) >= 25
    assert len(re.sub(r"`test_\w+`", "", PAGE).split()) < 1550, "one page"
    assert [line for line in PAGE.splitlines() if line.startswith("## ")] == [
        "## A stranger",
        "## A node",
        "## A server",
        "## A local user",
        "## The network",
        "## What is not protected",
    ]


def test_every_adversary_of_the_table_is_played_against_real_programs_by_tests_that_there_are():
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| **")]
    names = [re.search(r"\*\*(.+?)\*\*", cells[0])[1] for cells in rows]
    assert names == ["Stranger", "Node", "Server", "Local user", "Network"]
    for *_, played in rows:
        assert set(re.findall(r"test_\w+", played)) <= KNOWN
        assert "test_" in played


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: " ".join(claim.split())[:40])
def test_a_claim_ends_with_the_tests_that_hold_it(claim):
    named = re.search(r"((?:`test_\w+`\s*)+)\Z", claim.strip())
    assert named, f"no test at the end of: {claim}"
    missing = set(re.findall(r"test_\w+", named[1])) - KNOWN
    assert not missing, f"no such test: {missing}"
