"""Whatever bytes and words come in, a decoder gives what can be used, or a WireError, at once."""

import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORPUS = sorted((ROOT / "tests" / "flower" / "corpus").iterdir())


@pytest.fixture(scope="module")
def fuzz():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import fuzz

        yield fuzz
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
        del sys.modules["fuzz"]


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_what_decoders_have_stumbled_over_is_refused(fuzz, path):
    assert fuzz.evaluate(path.name.partition("-")[0], path.read_bytes()) == "refused"


def test_what_potluck_writes_is_read(fuzz):
    assert [fuzz.evaluate("tree", data) for data in fuzz.whole_messages()] == ["accepted"] * 5
    for target, written in fuzz.whole_words().items():
        assert fuzz.evaluate(target, fuzz.json.dumps(written[0]).encode()) == "accepted", target


@pytest.mark.slow
@pytest.mark.parametrize("target", ["tree", "message", "job", "outcome", "introduction", "records"])
def test_mutated_inputs_are_read_or_refused_and_nothing_else(fuzz, target):
    assert target in fuzz.TARGETS
    found = Counter(fuzz.evaluate(target, data) for data in fuzz.inputs(target, 1500, seed=1))
    assert set(found) == {"accepted", "refused"}, found
