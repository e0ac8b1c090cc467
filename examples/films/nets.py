"""Three small networks that read text byte by byte, none of which has a layer in common with another."""

import torch
from torch import Tensor, nn

VOCABULARY = 257  # bytes, and 0 behind the end of a text


class Bag(nn.Module):
    """The mean over bytes, pairs of bytes and triples."""

    def __init__(self, num_classes: int, width: int = 48, buckets: int = 4096) -> None:
        super().__init__()
        self.buckets = buckets
        self.table = nn.Embedding(buckets, width)
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, num_classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Bytes (batch, length) and 1 for those of the text to logits (batch, classes)."""
        triples = input_ids + 257 * input_ids.roll(1, 1) + 257**2 * input_ids.roll(2, 1)
        mask = attention_mask.unsqueeze(-1)
        mean = (self.table(triples % self.buckets) * mask).sum(1) / mask.sum(1)
        return self.out(self.hidden(mean).relu())


class Convolutions(nn.Module):
    """Convolutions over five bytes, and the largest value of each channel."""

    def __init__(self, num_classes: int, width: int = 48) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.first = nn.Conv1d(width, width, 5, padding=2)
        self.second = nn.Linear(width, 48)
        self.head = nn.Linear(48, num_classes)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Bytes (batch, length) to logits (batch, classes)."""
        found = self.first(self.bytes(input_ids).transpose(1, 2)).relu().amax(2)
        return self.head(self.second(found).relu())


class Attention(nn.Module):
    """One layer of attention, and the mean over bytes."""

    def __init__(self, num_classes: int, width: int = 48, length: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(length, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 96, batch_first=True)
        self.mix = nn.Linear(width, 48)
        self.classifier = nn.Linear(48, num_classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Bytes (batch, length) and 1 for those of the text to logits (batch, classes)."""
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        x = self.layer(x, src_key_padding_mask=attention_mask == 0)
        mask = attention_mask.unsqueeze(-1)
        return self.classifier(self.mix((x * mask).sum(1) / mask.sum(1)).relu())
