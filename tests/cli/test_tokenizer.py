"""`potluck tokenizer`: a file that a federation of texts names, of texts that may be known."""

import re

import pandas as pd
import pytest

from potluck.data.datasets import describe
from potluck.data.tables.columns import Columns

tokenizers = pytest.importorskip("tokenizers", reason="the extra 'text' is not installed")

NOTES = ["the cough is back", "no cough, no fever", "the fever is gone", None, " "]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with a table, in which commands are typed."""
    monkeypatch.chdir(tmp_path)
    pd.DataFrame({"note": NOTES, "more": "and more", "y": [0, 1, 0, 1, 0]}).to_csv("notes.csv", index=False)
    return tmp_path


def test_it_writes_a_file_and_says_what_is_in_it_and_what_it_tells(potluck, home):
    outcome = potluck("tokenizer notes.csv --text note --size 300 --to mine.json")
    said = re.fullmatch(r"Wrote mine.json: (\d+) tokens, of 3 texts; 95 % of these have at most (\d+)\n", outcome.out)
    assert said, outcome.out
    assert outcome.err == "Whoever has it knows frequent words of these texts: take texts that may be known.\n"
    coder = tokenizers.Tokenizer.from_file("mine.json")
    assert coder.get_vocab_size() == int(said[1])
    assert max(len(coder.encode(note).ids) for note in NOTES[:3]) == int(said[2])
    found = describe("notes.csv", columns=Columns(target="y", text=("note",), tokens=9, tokenizer="mine.json"))
    assert found.input_shape["input_ids"].shape == (9,)


def test_it_learns_from_several_columns_of_the_training_part_of_a_folder_and_of_a_function(potluck, home):
    (home / "both").mkdir()
    pd.DataFrame({"a": ["one", "two"], "b": ["three", "four"]}).to_csv("both/train.csv", index=False)
    pd.DataFrame({"a": ["zebra"] * 50, "b": ["zebra"] * 50}).to_csv("both/test.csv", index=False)
    (home / "own.py").write_text("import pandas as pd\ndef both():\n    return pd.read_csv('both/train.csv')\n")
    assert "of 2 texts" in potluck("tokenizer both --text a --text b").out
    content = (home / "tokenizer.json").read_bytes()
    assert b"zeb" not in content
    potluck("tokenizer own.py:both --text a --text b")
    assert (home / "tokenizer.json").read_bytes() == content


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("notes.csv --text nite", "notes.csv: no column 'nite' (nearest: note); found note, more, y"),
        ("digits --text note", "digits: no table; expected a .csv or .parquet file"),
        ("none.csv --text note", "none.csv: no such file or folder"),
        ("notes.csv --text note --size 20", "20 is not in the range x>=258"),
        ("notes.csv --text note --to no/such.json", "cannot write no/such.json"),
        ("empty.csv --text note", "empty.csv: note: found no text; expected at least one row with some"),
    ],
)
def test_what_cannot_be_made_is_one_line(potluck, home, words, why):
    pd.DataFrame({"note": [None, ""], "y": [0, 1]}).to_csv("empty.csv", index=False)
    outcome = potluck(f"tokenizer {words}")
    assert outcome.code == 2
    assert why in outcome.err
    assert outcome.err.count("\n") == 1
