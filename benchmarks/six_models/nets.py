"""Two of the six networks, as a user would bring them: a CNN that computes much by functions, and pictures as words."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

LEVELS = 8  # of each colour of a word
PATCH = 2  # pixels on a side of the piece of the picture that becomes a word
CHANNELS = 3
REACH = 2.0  # standard deviations: normalised colours beyond it count as it


def functional_cnn(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    """Three convolutions; norms apart, everything between the layers is a function."""
    return FunctionalCNN(num_classes, input_shape[0])


class FunctionalCNN(nn.Module):
    """Pools, drops and flattens in `forward`, where no module has a name for it."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 64, 3, padding=1)
        self.third = nn.Conv2d(64, 96, 3, padding=1)
        self.out = nn.Linear(96 * 4, classes)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of images (batch, channels, 16, 16)."""
        h = F.max_pool2d(F.relu(self.first(x)), 2)
        h = F.max_pool2d(F.relu(self.second(h)), 2)
        h = F.max_pool2d(F.relu(self.third(h)), 2)
        return self.out(F.dropout(torch.flatten(h, 1), 0.2, self.training))


def picture_bert(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    """A BERT of one layer that reads pictures as words, see `PictureBert`."""
    return PictureBert(num_classes, (input_shape[1] // PATCH) * (input_shape[2] // PATCH))


class PictureBert(nn.Module):
    """A text classifier of Hugging Face's transformers on pictures: each patch of 2 x 2 pixels is a word.

    The word is the patch's mean colour, in eight levels of red, green and blue: one of 512.
    """

    def __init__(self, classes: int, words: int) -> None:
        super().__init__()
        sizes: dict[str, Any] = {
            "vocab_size": LEVELS**CHANNELS,
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "max_position_embeddings": words,
            "num_labels": classes,
        }
        self.net = BertForSequenceClassification(BertConfig(**sizes))

    def forward(self, x: Tensor) -> Tensor:
        """The logits of normalised images (batch, 3, height, width)."""
        return self.net(input_ids=words(x)).logits


def words(x: Tensor) -> Tensor:
    """The words of normalised images, (batch, patches)."""
    colours = F.avg_pool2d(x, PATCH).flatten(2)
    levels = ((colours + REACH) / (2 * REACH) * LEVELS).long().clamp(0, LEVELS - 1)
    red, green, blue = levels.unbind(1)
    return (red * LEVELS + green) * LEVELS + blue
