"""Text as numbers: the bytes of its UTF-8, so that a vocabulary tells nothing of anybody's texts."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

VOCABULARY = 257
"""How many tokens there are: 256 bytes, from 1 on, and 0 behind the end of a text."""


def tokens_of(texts: Iterable[str], length: int) -> dict[str, Tensor]:
    """The first bytes of each text, by the names that Hugging Face's transformers have for them.

    Returns:
        `input_ids`, a byte's value plus 1, and 0 behind the end, int64 (n, length); `attention_mask`, 1 for tokens and
        0 behind them, int64 (n, length). An empty text has one token, 0, so that a mean over tokens is defined.
    """
    cut = [text.encode()[:length] for text in texts]
    ids = np.zeros((len(cut), length), np.int64)
    for row, found in zip(ids, cut, strict=True):
        row[: len(found)] = np.frombuffer(found, np.uint8).astype(np.int64) + 1
    lengths = np.array([max(len(found), 1) for found in cut])
    mask = (np.arange(length) < lengths[:, None]).astype(np.int64)
    return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
