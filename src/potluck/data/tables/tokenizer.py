"""Tokenizers of Hugging Face's library `tokenizers`: a file `tokenizer.json`, which is read as data and holds no code.

Of it are taken how a text becomes tokens, and the token for padding. How long texts become is the table's to say.
"""

import importlib
import importlib.util
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from potluck.core.ground.discovery import standing_for
from potluck.core.ground.errors import ConfigError, explained
from potluck.data.tables.columns import Columns
from potluck.data.tables.tokens import BYTES, Vocabulary

LARGEST_TOKENIZER = 2**21
"""The most bytes of a file: a server sends it to its nodes with each of its messages."""

MOST_TOKENS = 2**20
"""More are assumed to be a mistake: a network has weights for each number below the largest."""

PADDING = ("[PAD]", "<pad>")
"""What the token for padding is called, if the file does not say which it is."""

_KEY = "federation.columns.tokenizer"
_EXPECTED = (
    f"expected a file of the library tokenizers, at most {LARGEST_TOKENIZER:,} bytes; to make one: potluck tokenizer"
)
_CHANCE = ("dropout", "alpha", "nbest_size")  # of a model that draws tokens at random


def text_of(file: str) -> str:
    """The content of a tokenizer's file.

    Raises:
        ConfigError: it cannot be read, is too large, or this node's owner did not name it.
    """
    place = standing_for(Path(file).resolve())
    try:
        with place.open("rb") as opened:
            content = opened.read(LARGEST_TOKENIZER + 1)
        if len(content) <= LARGEST_TOKENIZER:
            return content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_KEY}: {file}: cannot be read: {explained(error)}; {_EXPECTED}") from error
    raise ConfigError(f"{_KEY}: {file}: found more than {LARGEST_TOKENIZER:,} bytes; {_EXPECTED}")


def told_text(known: Mapping[str, Any]) -> str | None:
    """The content of the tokenizer's file as another machine has told it; None if it has told none.

    Raises:
        ConfigError: it is no text, or too long.
    """
    found = known.get("tokenizer")
    if found is None or (isinstance(found, str) and len(found.encode(errors="replace")) <= LARGEST_TOKENIZER):
        return found
    what = f"{len(found):,} characters" if isinstance(found, str) else type(found).__name__
    raise ConfigError(f"{_KEY}: found {what}; expected the text of {_EXPECTED.removeprefix('expected ')}")


def vocabulary_of(columns: Columns) -> Vocabulary:
    """What the texts of a table are read by.

    Raises:
        ConfigError: the tokenizer cannot be read, or the library is not installed.
    """
    told = told_text(columns.known or {})
    return vocabulary_in(text_of(columns.tokenizer) if columns.tokenizer is not None else told)


def vocabulary_in(content: str | None) -> Vocabulary:
    """What a tokenizer's file holds; bytes without one.

    Raises:
        ConfigError: it is no tokenizer, has no token for padding, or draws tokens at random.
    """
    return BYTES if content is None else _vocabulary(content)


@lru_cache(maxsize=2)  # it is asked for at every table, and once for each model
def _vocabulary(content: str) -> Vocabulary:
    tokenizers = library()
    with _saying("found no tokenizer", _EXPECTED):
        coder = tokenizers.Tokenizer.from_str(content)
        size = 1 + max(coder.get_vocab().values(), default=-1)
    if not 0 < size <= MOST_TOKENS:
        raise ConfigError(f"{_KEY}: found tokens up to {size - 1}; expected numbers from 0 to {MOST_TOKENS - 1}")
    if chance := [name for name in _CHANCE if getattr(coder.model, name, None)]:
        raise ConfigError(f"{_KEY}: found {chance[0]}, by which a text's tokens are drawn at random; expected none")
    padding = _padding(coder, size)
    coder.no_padding()
    return Vocabulary(size, padding, partial(_read, coder, size))


def _read(coder: Any, size: int, text: str, length: int) -> np.ndarray:
    """The first tokens of a text, among them those that the tokenizer itself puts before and behind it."""
    if (own := coder.num_special_tokens_to_add(False)) >= length:
        raise ConfigError(
            f"federation.columns.tokens: found {length}; expected more than the {own} that the tokenizer adds to a text"
        )
    with _saying("cannot read a text", "expected a sound one, with a token for what is unknown"):
        coder.enable_truncation(length)
        found = np.array(coder.encode(text).ids[:length], np.int64)  # one at a time: several would start threads
    if len(found) and found.max() >= size:
        raise ConfigError(
            f"{_KEY}: found the token {found.max()} in a text; expected numbers below {size}, its vocabulary"
        )
    return found


def _padding(coder: Any, size: int) -> int:
    """The number of the token for padding."""
    stated = (coder.padding or {}).get("pad_id")
    numbers = [coder.token_to_id(name) for name in PADDING] if stated is None else [stated]
    found = [number for number in numbers if number is not None and 0 <= number < size]
    if not found:
        what = "none" if stated is None else f"number {stated} of {size}"
        raise ConfigError(
            f"{_KEY}: found {what} as the token for padding; expected a tokenizer that says which, or has one called"
            f" {' or '.join(PADDING)}: add it with its add_special_tokens(['[PAD]']), and save it again"
        )
    return found[0]


def library() -> Any:
    """The library `tokenizers`.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec("tokenizers") is None:
        raise ConfigError(f"{_KEY}: the library tokenizers is not installed: pip install 'potluck[text]'")
    return importlib.import_module("tokenizers")


@contextmanager
def _saying(found: str, expected: str) -> Generator[None]:
    """Tell what goes wrong in the library in one line; it is written in Rust, whose panics are no `Exception`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise ConfigError(f"{_KEY}: {found}: {explained(error)[:200]}; {expected}") from error


def learned(texts: Iterable[str], size: int) -> str:
    """The content of a file: all bytes, so that nothing is unknown, and then what is frequent in texts.

    Args:
        texts: whoever has the file knows their frequent words.
        size: the most tokens, of which 256 are bytes and one, 0, is for padding; there are fewer if texts are few.

    Raises:
        ConfigError: the library is not installed.
    """
    tokenizers = library()
    coder, level = tokenizers.Tokenizer(tokenizers.models.BPE()), tokenizers.pre_tokenizers.ByteLevel
    coder.pre_tokenizer = level(add_prefix_space=False)
    coder.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=[PADDING[0]], initial_alphabet=level.alphabet(), show_progress=False
    )
    coder.train_from_iterator(texts, trainer)
    coder.enable_padding(pad_id=0, pad_token=PADDING[0])
    return coder.to_str()
