"""`potluck tokenizer`: a tokenizer of texts that may be known, for all parties of a federation of texts."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import typer

from potluck.core.ground.errors import ConfigError, StorageError
from potluck.data.datasets import rows_in
from potluck.data.tables.reading import texts_in
from potluck.data.tables.tokenizer import LARGEST_TOKENIZER, learned, vocabulary_in

_LONGEST = 100_000  # tokens of a text that are counted


def write_tokenizer(table: str, columns: Sequence[str], size: int, to: Path) -> None:
    """Write the file, and say what is in it.

    Args:
        table: a file or a folder of tables, or FILE.py:FUNCTION; of a training and a test part, the first is read.
        columns: those of text.
        size: the most tokens.
        to: the file.

    Raises:
        ConfigError: it is no table, has no texts, or its tokenizer would be too large to be sent.
        DataError: the table cannot be read, or lacks a column.
        StorageError: the file cannot be written.
    """
    rows = rows_in(table)
    if rows is None:
        raise ConfigError(f"{table}: no table; expected a .csv or .parquet file, a folder of such, or FILE.py:NAME")
    texts = [text for text in texts_in(rows[0] if isinstance(rows, tuple) else rows, columns, table) if text.strip()]
    if not texts:
        raise ConfigError(f"{table}: {', '.join(columns)}: found no text; expected at least one row with some")
    content = learned(texts, size)
    if (long := len(content.encode())) > LARGEST_TOKENIZER:
        raise ConfigError(
            f"--size {size}: found a file of {long:,} bytes; expected at most {LARGEST_TOKENIZER:,}: have fewer"
        )
    try:
        to.write_text(content, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {to}: {error.strerror or error}") from error
    vocabulary = vocabulary_in(content)
    most = int(np.quantile([len(vocabulary.read(text, _LONGEST)) for text in texts], 0.95, method="higher"))
    typer.echo(f"Wrote {to}: {vocabulary.size:,} tokens, of {len(texts):,} texts; 95 % of these have at most {most:,}")
    typer.echo("Whoever has it knows frequent words of these texts: take texts that may be known.", err=True)
