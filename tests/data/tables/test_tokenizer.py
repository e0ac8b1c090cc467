"""Texts by a tokenizer of Hugging Face's library: its own tokens, and what is no such file refused in one line."""

import json

import pandas as pd
import pytest

from potluck.core.ground.access import only
from potluck.core.ground.errors import ConfigError
from potluck.data.datasets import common_reading, load
from potluck.data.tables.columns import Columns
from potluck.data.tables.tokenizer import LARGEST_TOKENIZER, learned, vocabulary_in, vocabulary_of
from potluck.data.tables.tokens import BYTES
from potluck.experiment.settings.resolve import resolve

tokenizers = pytest.importorskip("tokenizers", reason="the extra 'text' is not installed")

TEXTS = ["the cough is back", "no cough, no fever", "the fever is gone"]
WORDS = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "[PAD]": 3, "the": 4, "cough": 5, "fever": 6, "##s": 7}


def word_piece(**changes):
    """A tokenizer as those of BERT are, as its file has it: a token before a text and one behind it."""
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(WORDS, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    ends = [(name, WORDS[name]) for name in ("[CLS]", "[SEP]")]
    made.post_processor = tokenizers.processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return json.dumps({**json.loads(made.to_str()), **changes})


@pytest.fixture
def file(tmp_path):
    """Writes a tokenizer's file; gives its path."""

    def write(content):
        place = tmp_path / "tokenizer.json"
        place.write_text(content)
        return str(place)

    return write


@pytest.fixture
def read(tmp_path, file):
    """The inputs that rows of text become, by a tokenizer."""

    def inputs(rows, content, tokens):
        (tmp_path / "rows").mkdir()
        for part in ("train", "test"):
            pd.DataFrame({"note": rows, "y": 0}).to_parquet(tmp_path / "rows" / f"{part}.parquet")
        columns = Columns(target="y", text=("note",), tokens=tokens, tokenizer=file(content))
        found = load(tmp_path / "rows", columns=columns).train_inputs
        return {name: rows.tolist() for name, rows in found.items()}

    return inputs


def test_tokens_are_those_of_the_file_cut_between_its_own_ends_and_padded_with_its_padding(read):
    found = read(["the coughs", "fever the fever the", "", None], word_piece(), 5)
    assert found["input_ids"] == [[1, 4, 5, 7, 2], [1, 6, 4, 6, 2], [1, 2, 3, 3, 3], [1, 2, 3, 3, 3]]
    assert found["attention_mask"] == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 0, 0, 0]]


def test_what_a_file_says_of_lengths_changes_nothing(read):
    fixed = {"strategy": {"Fixed": 4_000_000_000}, "direction": "Left", "pad_to_multiple_of": 8, "pad_id": 0}
    padding = {**fixed, "pad_type_id": 0, "pad_token": "[UNK]"}
    truncation = {"direction": "Left", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    found = read(["the", "fever"], word_piece(padding=padding, truncation=truncation), 4)
    assert found["input_ids"] == [[1, 4, 2, 0], [1, 6, 2, 0]], "0 is the padding that the file names"


def test_a_learned_one_reads_every_text_back_and_an_empty_one_as_one_token():
    content = learned(TEXTS, 300)
    assert content == learned(TEXTS, 300)
    found, coder = vocabulary_in(content), tokenizers.Tokenizer.from_str(content)
    assert 257 < found.size <= 300
    for text in (*TEXTS, "naïve 日本 😀 \x00\n", "a" * 50):
        assert coder.decode(found.read(text, 1_000).tolist()) == text
    assert len(found.read("the cough", 100)) < len("the cough")
    assert found.padding == 0
    assert found.read("", 10).tolist() == []


def test_of_a_learned_one_an_empty_text_is_one_padding_and_bytes_stay_as_they_were(read):
    found = read(["the cough", ""], learned(TEXTS, 300), 3)
    assert found["attention_mask"] == [[1, 1, 0], [1, 0, 0]]
    assert found["input_ids"][1] == [0, 0, 0]
    assert BYTES.read("aé", 3).tolist() == [98, 196, 170]
    assert BYTES.size == 257


def test_what_another_machine_is_told_reads_as_the_file_does(tmp_path, file, read):
    content = word_piece()
    pd.DataFrame({"note": TEXTS, "y": [0, 1, 0]}).to_csv(tmp_path / "rows.csv", index=False)
    own = Columns(target="y", text=("note",), tokens=6, tokenizer=file(content))
    known = common_reading(tmp_path / "rows.csv", None, own).table()
    assert known["tokenizer"] == content
    told = Columns(target="y", text=("note",), tokens=6, known=known)
    assert load(tmp_path / "rows.csv", columns=told).checksum == load(tmp_path / "rows.csv", columns=own).checksum
    assert vocabulary_of(told).size == vocabulary_of(own).size == 8


def test_a_file_that_is_written_again_is_read_again(tmp_path, file):
    pd.DataFrame({"note": TEXTS, "y": [0, 1, 0]}).to_csv(tmp_path / "rows.csv", index=False)
    columns = Columns(target="y", text=("note",), tokens=6, tokenizer=file(word_piece()))
    before = load(tmp_path / "rows.csv", columns=columns).checksum
    file(learned(TEXTS, 300))
    assert load(tmp_path / "rows.csv", columns=columns).checksum != before


NO_PADDING = word_piece().replace('"[PAD]"', '"[pad]"')


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "found no tokenizer: .*EOF.*; expected a file of the library tokenizers, at most 2,097,152 bytes"),
        ("[" * 100_000, "found no tokenizer"),
        ('{"input_ids": [1, 2]}', "found no tokenizer"),
        ('{"model": {"type": "BPE", "vocab": "/etc/passwd", "merges": "/etc/passwd"}}', "found no tokenizer"),
        ('{"model": {"type": "BPE", "vocab": {"a": 4000000000}, "merges": []}}', "found tokens up to 4000000000"),
        ('{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "found tokens up to -1"),
        (NO_PADDING, r"found none as the token for padding; .* called \[PAD\] or <pad>: add it with its add_special"),
        (word_piece(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "found no tokenizer: Panic"),
        (word_piece(padding={"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 99,
                             "pad_type_id": 0, "pad_token": "[PAD]"}), "found number 99 of 8 as the token for padding"),
        ('{"model": {"type": "BPE", "dropout": 0.5, "vocab": {"[PAD]": 0}, "merges": []}}', "found dropout, by which"),
        (" " * (LARGEST_TOKENIZER + 1), "found more than 2,097,152 bytes"),
    ],
)  # fmt: skip
def test_what_is_no_tokenizer_is_refused_in_one_line(file, content, expected):
    with pytest.raises(ConfigError, match=f"federation.columns.tokenizer: .*{expected}") as found:
        vocabulary_of(Columns(text=("note",), tokenizer=file(content)))
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 600


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer.json: cannot be read: .*; expected a file of the library"):
        vocabulary_of(Columns(text=("note",), tokenizer=str(tmp_path / "tokenizer.json")))


def test_ends_that_leave_no_room_for_a_text_are_one_line(read):
    with pytest.raises(ConfigError, match=r"federation.columns.tokens: found 2; expected more than the 2 that the"):
        read(["the", "the"], word_piece(), 2)


def test_a_text_that_a_tokenizer_cannot_read_is_one_line(read):
    nothing = word_piece().replace('"[UNK]"', '"[PAD]"', 1)
    words = {"type": "WordLevel", "vocab": {"[PAD]": 0, "the": 1}, "unk_token": "none"}
    with pytest.raises(
        ConfigError, match=r"cannot read a text: .*; expected a sound one, with a token for what is unknown"
    ):
        read(["the", "fever"], json.dumps({**json.loads(nothing), "model": words, "post_processor": None}), 4)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (
            {"[CLS]": {"id": "[CLS]", "ids": [4_000_000_000], "tokens": ["[CLS]"]}},
            "found the token 4000000000 in a text",
        ),
        ({}, "cannot read a text: PanicException"),
    ],
)
def test_tokens_that_are_none_of_the_vocabulary_and_panics_of_the_library_are_one_line(read, ends, expected):
    whole = json.loads(word_piece())["post_processor"]
    single = [piece for piece in whole["single"] if "[SEP]" not in str(piece)]
    content = word_piece(post_processor={**whole, "single": single, "special_tokens": ends})
    with pytest.raises(ConfigError, match=f"federation.columns.tokenizer: {expected}") as found:
        read(["the", "fever"], content, 4)
    assert "\n" not in str(found.value)


def test_what_is_not_protected_a_tokenizer_shows_the_words_it_was_made_of():
    content = learned(["Mrs Featherstonehaugh coughs"] * 20 + TEXTS, 300)
    assert "Featherstonehaugh" in content


def test_without_the_library_it_is_said_how_to_install_it(file, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"tokenizers is not installed: pip install 'potluck\[text\]'"):
        vocabulary_of(Columns(text=("note",), tokenizer=file(word_piece() + " ")))


def test_access_is_asked_before_a_tokenizer_is_read(tmp_path, file):
    with only([tmp_path / "other.json"]), pytest.raises(ConfigError, match="owner named"):
        vocabulary_of(Columns(text=("note",), tokenizer=file(word_piece())))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"tokenizer": "t.json"}, "federation.columns.tokenizer: expected none without columns of text"),
        ({"tokenizer": "t.json", "text": ["note"], "known": {}}, "tokenizer: expected none beside `known`"),
        ({"text": ["note"], "known": {"tokenizer": 3}}, "tokenizer: found int; expected the text of a file"),
        ({"text": ["note"], "known": {"tokenizer": "x" * (LARGEST_TOKENIZER + 1)}}, "found 2,097,153 characters"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, said, expected):
    federation = {"dataset": "rows.csv", "models": ["mlp2"], "columns": {"target": "y", **said}}
    with pytest.raises(ConfigError, match=expected):
        resolve({"federation": federation, "method": {"name": "local"}})


NETS = """
def asks(num_classes, vocab_size, pad_token_id):
    pass


def has_its_own(num_classes, vocab_size=300):
    pass


def asks_nothing(num_classes):
    pass
"""


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (True, [{"vocab_size": 8, "pad_token_id": 3}, {"vocab_size": 8}, {}, {"vocab_size": 50, "pad_token_id": 3}]),
        (False, [{"vocab_size": 257, "pad_token_id": 0}, {}, {}, {"vocab_size": 50, "pad_token_id": 0}]),
    ],
)
def test_a_model_is_told_how_many_tokens_there_are_if_it_asks(tmp_path, file, tokenizer, expected):
    (tmp_path / "nets.py").write_text(NETS)
    names = [f"{tmp_path / 'nets.py'}:{name}" for name in ("asks", "has_its_own", "asks_nothing")]
    columns = {"target": "y", "text": ["note"], **({"tokenizer": file(word_piece())} if tokenizer else {})}
    models = [*names, {"name": names[0], "vocab_size": 50}]
    made = resolve({"federation": {"dataset": "rows.csv", "columns": columns, "models": models}})
    assert [dict(spec.options) for spec in made.models] == expected
