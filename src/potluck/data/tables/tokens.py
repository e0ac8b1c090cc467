"""Text as numbers: the bytes of its UTF-8, so that a vocabulary tells nothing of anybody's texts, or other tokens."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Vocabulary:
    """What texts are read by.

    Attributes:
        size: how many tokens there are; each is a number below it.
        padding: the token behind the end of a text.
        read: the first tokens of a text, at most so many, int64.
    """

    size: int
    padding: int
    read: Callable[[str, int], np.ndarray]


def _bytes(text: str, length: int) -> np.ndarray:
    return np.frombuffer(text.encode()[:length], np.uint8).astype(np.int64) + 1


BYTES = Vocabulary(257, 0, _bytes)
"""The bytes of UTF-8, from 1 on."""


def tokens_of(texts: Iterable[str], length: int, vocabulary: Vocabulary = BYTES) -> dict[str, Tensor]:
    """The first tokens of each text, by the names that Hugging Face's transformers have for them.

    Returns:
        `input_ids`, tokens, and padding behind the end, int64 (n, length); `attention_mask`, 1 for tokens and 0 behind
        them, int64 (n, length). An empty text has one token, padding, so that a mean over tokens is defined.
    """
    cut = [vocabulary.read(text, length) for text in texts]
    ids = np.full((len(cut), length), vocabulary.padding, np.int64)
    for row, found in zip(ids, cut, strict=True):
        row[: len(found)] = found
    lengths = np.array([max(len(found), 1) for found in cut])
    mask = (np.arange(length) < lengths[:, None]).astype(np.int64)
    return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
