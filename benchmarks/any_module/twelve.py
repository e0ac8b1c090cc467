"""Twelve networks of unlike kinds, two of them also without their stages, and unlike ones side by side.

All are small, and trained on drawn numbers: images of 3 x 32 x 32, 12 tokens, 12 tokens and their mask, or 20 columns.
Of those that a person can easily cut by hand there is the same network in stages, with the same first weights. Where a
stage is one that the dataflow finds it has that one's name, by which first weights of exits are drawn.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from own import CLASSES, COLUMNS, TEXT, WORDS, LSTMText, TwoHeads
from torch import Tensor, nn
from torch.nn import functional as F

from potluck.core.federation import Builder
from potluck.core.ground.inputs import Inputs
from potluck.data.dataset import Dataset
from potluck.models.cnn import cnn4
from potluck.models.contract import StagedNet
from potluck.models.preresnet import preresnet18
from potluck.testing.checks.networks import unstaged

IMAGES, EXAMPLES, TESTS = (3, 32, 32), 96, 20

CNN = partial(cnn4, CLASSES, IMAGES, width=8)
PRERESNET = partial(preresnet18, CLASSES, IMAGES, width=4)
VIT = {
    "name": "timm:vit_tiny_patch16_224",
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "bert": {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "vocab_size": WORDS,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 16,
    },
    "resnet": {
        "model_type": "resnet",
        "architectures": ["ResNetForImageClassification"],
        "embedding_size": 8,
        "depths": [1, 1, 1, 1],
        "hidden_sizes": [8, 16, 24, 32],
        "layer_type": "basic",
    },
}
"""Of networks of the Hugging Face library, as a folder with a `config.json` has them."""


@dataclass(frozen=True)
class Column:
    """Two clients' networks.

    Attributes:
        name: in the table.
        about: what they are, in a few words.
        models: as `federation.models` has them; "hf:NAME" stands for the configuration of that name.
        inputs: draws so many.
        settings: further keys of the experiment.
        by_hand: of the builder of the only network, one of the same network in stages; None if there is none.
        same_names: whether the latter's tensors are called as the network's own.
    """

    name: str
    about: str
    models: tuple[Any, ...]
    inputs: Callable[[int], Inputs]
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    by_hand: Callable[[Builder], Builder] | None = None
    same_names: bool = False

    def dataset(self) -> Dataset:
        """Drawn inputs, with drawn labels."""
        torch.manual_seed(0)
        labels = torch.arange(EXAMPLES) % CLASSES, torch.arange(TESTS) % CLASSES
        return Dataset("drawn", self.inputs(EXAMPLES), labels[0], self.inputs(TESTS), labels[1], CLASSES)


def images(count: int) -> Tensor:
    """Of three channels."""
    return torch.randn(count, *IMAGES)


def tokens(count: int) -> Tensor:
    """Whole numbers, of which 0 stands for none."""
    return torch.randint(1, WORDS, (count, *TEXT))


def masked_tokens(count: int) -> dict[str, Tensor]:
    """Texts of several lengths, by the names that transformers have for their inputs."""
    mask = (torch.arange(TEXT[0]) < torch.randint(4, TEXT[0] + 1, (count, 1))).long()
    return {"input_ids": tokens(count) * mask, "attention_mask": mask}


def columns(count: int) -> Tensor:
    """Rows of a table."""
    return torch.randn(count, *COLUMNS)


class Perceptron(nn.Module):
    """Layers with functions between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(20, 24), nn.Linear(24, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Rows (batch, 20) to logits."""
        return self.out(F.gelu(self.second(F.relu(self.first(x)))))


def cnn4_without_stages() -> nn.Module:
    """The layers of cnn4 under the names that they have there."""
    return unstaged(CNN)


def preresnet18_without_stages() -> nn.Module:
    """The layers of preresnet18 under the names that they have there."""
    return unstaged(PRERESNET)


class FunctionalHead(nn.Module):
    """Its last layer is parameters and functions; features and classes are compared by their angle."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(True), nn.Conv2d(6, 8, 3), nn.ReLU())
        self.neck = nn.Linear(8, 8)
        self.angles = nn.ParameterDict({"classes": torch.randn(CLASSES, 8), "scale": torch.tensor(10.0)})

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits."""
        x = self.neck(F.adaptive_avg_pool2d(self.body(x), 1).flatten(1))
        return self.angles["scale"] * F.linear(F.normalize(x), F.normalize(self.angles["classes"]))


class Cosines(nn.Module):
    """The head of a `FunctionalHead`, whose tensors are in the order that they have there."""

    in_features = 8

    def __init__(self, net: FunctionalHead) -> None:
        super().__init__()
        self.neck, self.angles = net.neck, net.angles

    def forward(self, x: Tensor) -> Tensor:
        """Features (batch, 8) to logits."""
        return self.angles["scale"] * F.linear(F.normalize(self.neck(x)), F.normalize(self.angles["classes"]))


class LastStates(nn.Module):
    """The LSTM of an `LSTMText`, and what is read of it."""

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        self.lstm = lstm

    def forward(self, x: Tensor) -> Tensor:
        """Vectors (batch, length, 16) to features (batch, 24)."""
        hidden = self.lstm(x)[1][0]
        return torch.cat([hidden[-2], hidden[-1]], dim=1)


def staged_lstm(net: LSTMText) -> StagedNet:
    """An LSTM and a linear layer."""
    return StagedNet({"embed": net.embed, "lstm": LastStates(net.lstm)}, net.fc)


def staged_head(net: FunctionalHead) -> StagedNet:
    """Two convolutions. The pooling is in a stage, since gradients of several uses are added up behind it in both."""
    rest = nn.Sequential(net.body[3:], nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return StagedNet({"body": net.body[:3], "body-3": rest}, Cosines(net))


def staged_perceptron(net: Perceptron) -> StagedNet:
    """Three layers."""
    stages = {"first": nn.Sequential(net.first, nn.ReLU()), "second": nn.Sequential(net.second, nn.GELU())}
    return StagedNet(stages, net.out)


def staged_resnet(net: Any) -> StagedNet:
    """timm's, whose stem has three convolutions, with a stage for each."""
    stages = {"conv1": net.conv1[:3], "conv1-2": net.conv1[3:6]}
    stages["conv1-6"] = nn.Sequential(net.conv1[6:], net.bn1, net.act1, net.maxpool)
    stages |= {f"layer{number}-0": getattr(net, f"layer{number}")[0] for number in range(1, 5)}
    return StagedNet(stages, net.fc, net.global_pool)


def staged_convnext(net: Any) -> StagedNet:
    """timm's, whose norm comes after the pooling."""
    stages = {f"stage{number}": stage for number, stage in enumerate(net.stages)}
    norm = nn.Sequential(net.norm_pre, net.head.global_pool, net.head.norm, net.head.flatten)
    return StagedNet({"stem": net.stem, **stages, "norm": norm}, net.head.fc)


def write_configs(folder: Path) -> None:
    """Write the configurations of networks of the Hugging Face library."""
    for name, config in CONFIGS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))


def _built(cut: Callable[[Any], StagedNet], build: Builder) -> StagedNet:
    return cut(build())


def _cut(cut: Callable[[Any], StagedNet]) -> Callable[[Builder], Builder]:
    """Of a builder one whose networks are cut by hand."""
    return partial(partial, _built, cut)


def _ours(staged: Builder) -> Callable[[Builder], Builder]:
    """The builder with stages, whatever that without them is."""
    return lambda _: staged


TABLE = (
    Column("cnn4", "ours, in stages: four convolutions of 8 channels", ({"name": "cnn4", "width": 8},), images),
    Column(
        "preresnet18",
        "ours, in stages: pre-activation ResNet, 4 channels",
        ({"name": "preresnet18", "width": 4},),
        images,
    ),
    Column(
        "cnn4 unstaged",
        "the layers of cnn4 in a module of their own, without stages",
        (cnn4_without_stages,),
        images,
        by_hand=_ours(CNN),
        same_names=True,
    ),
    Column(
        "preresnet18 unstaged",
        "the layers of preresnet18, likewise",
        (preresnet18_without_stages,),
        images,
        by_hand=_ours(PRERESNET),
        same_names=True,
    ),
    Column(
        "timm resnet10t",
        "timm's ResNet of four blocks, 8 to 32 channels",
        ({"name": "timm:resnet10t", "channels": [8, 16, 24, 32], "stem_width": 8},),
        images,
        by_hand=_cut(staged_resnet),
    ),
    Column("timm vit", "timm's vision transformer, 2 blocks of width 32", (VIT,), images),
    Column(
        "timm convnext",
        "timm's ConvNeXt of four blocks, 8 to 32 channels",
        ({"name": "timm:convnext_atto", "depths": [1, 1, 1, 1], "dims": [8, 16, 24, 32]},),
        images,
        by_hand=_cut(staged_convnext),
    ),
    Column(
        "timm mobilenetv3",
        "timm's mobilenetv3_small_050",
        ("timm:mobilenetv3_small_050",),
        images,
    ),
    Column("hf bert", "BertForSequenceClassification, 2 layers, tokens and mask by name", ("hf:bert",), masked_tokens),
    Column("hf resnet", "ResNetForImageClassification of four blocks, 8 to 32 channels", ("hf:resnet",), images),
    Column(
        "functional head",
        "as a user writes it: two convolutions, and a head of parameters and functions",
        (FunctionalHead,),
        images,
        by_hand=_cut(staged_head),
    ),
    Column(
        "perceptron",
        "as a user writes it: three linear layers, functions between them, 20 columns",
        (Perceptron,),
        columns,
        by_hand=_cut(staged_perceptron),
    ),
    Column(
        "lstm",
        "as a user writes it: embedding, LSTM both ways, linear layer",
        (LSTMText,),
        tokens,
        by_hand=_cut(staged_lstm),
    ),
    Column("two heads", "as a user writes it: the mean of two heads", (TwoHeads,), images),
    Column("cnn4 + vit", "a client with cnn4 and one with timm's vision transformer", ("cnn4", VIT), images),
    Column(
        "cnn4 + vit, width 16",
        "the same with `federation.feature_width = 16`",
        ("cnn4", VIT),
        images,
        {"federation.feature_width": 16},
    ),
)
