"""The nets of HtFLlib, as its experiments build them, and the nets of torchvision that these are mixed with.

HtFLlib's own are read from a checkout; a smaller vocabulary and shorter features take the place of its settings.
"""

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torchvision
from torch import nn
from trying import Case

CLASSES, WORDS, WIDTH, LENGTH = 10, 99, 16, 16
IMAGES, SMALL, TEXT, MOTION = (3, 32, 32), (1, 28, 28), (LENGTH,), (9, 1, 128)
WORDED = {"vocab_size": WORDS, "num_classes": CLASSES}

OWN: Mapping[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "FedAvgCNN": ({"in_features": 3, "num_classes": CLASSES, "dim": 1600}, IMAGES),
    "FedAvgMLP": ({}, SMALL),
    "CNN": ({"in_features": 3, "num_classes": CLASSES, "height": 32}, IMAGES),
    "LeNet": ({}, SMALL),
    "DNN": ({}, SMALL),
    "Mclr_Logistic": ({}, SMALL),
    "Digit5CNN": ({}, IMAGES),
    "HARCNN": ({"dim_hidden": 1664}, MOTION),
    "HARCNN1": ({"dim_hidden": 1920}, MOTION),
    "HARCNN3": ({"dim_hidden": 1536}, MOTION),
    "AmazonMLP": ({"feature_dim": [500]}, (5000,)),
    "resnet4": ({"num_classes": CLASSES}, IMAGES),
    "resnet6": ({"num_classes": CLASSES}, IMAGES),
    "resnet8": ({"num_classes": CLASSES}, IMAGES),
    "resnet10": ({"num_classes": CLASSES}, IMAGES),
    "mobilenet_v2": ({"pretrained": False, "num_classes": CLASSES}, IMAGES),
    "alexnet": ({"pretrained": False, "num_classes": CLASSES}, (3, 64, 64)),
    "fastText": ({"hidden_dim": WIDTH, **WORDED}, TEXT),
    "TextLogisticRegression": ({"hidden_dim": WIDTH, **WORDED}, TEXT),
    "TextCNN": ({"hidden_dim": WIDTH, "max_len": LENGTH, **WORDED}, TEXT),
    "LSTMNet": ({"hidden_dim": WIDTH, **WORDED}, TEXT),
    "GRUNet": ({"hidden_dim": WIDTH, **WORDED}, TEXT),
    "BiLSTM_TextClassification": (
        {
            "input_size": WORDS,
            "hidden_size": WIDTH,
            "output_size": CLASSES,
            "num_layers": 1,
            "embedding_dropout": 0,
            "lstm_dropout": 0,
            "attention_dropout": 0,
            "embedding_length": WIDTH,
        },
        TEXT,
    ),
    "TransformerModel": (
        {"ntoken": WORDS, "d_model": WIDTH, "nhead": 2, "nlayers": 2, "num_classes": CLASSES, "max_len": LENGTH},
        TEXT,
    ),
}
"""By the name of what builds it: with which settings, and the shape of one example."""

TORCHVISION: Mapping[str, dict[str, Any]] = {
    "resnet18": {},
    "googlenet": {"aux_logits": False, "init_weights": False},
    "vgg11": {},
    "mobilenet_v3_small": {},
    "shufflenet_v2_x0_5": {},
    "squeezenet1_1": {},
    "efficientnet_b0": {},
    "densenet121": {},
    "swin_t": {},
    "vit_b_16": {"image_size": 64},
}


def cases(checkout: Path) -> Iterator[Case]:
    """All of them, and two that HtFLlib has put a head of its own on."""
    sys.path.insert(0, str(checkout / "system"))
    from flcore.trainmodel import models

    for name, (settings, shape) in OWN.items():
        build = partial(getattr(models, name), **settings)
        yield Case("HtFLlib", name, build, shape, WORDS if shape == TEXT else None)
    for name in ("resnet10(num_classes=10)", "FedAvgCNN(in_features=3, num_classes=10, dim=1600)"):
        settings = SimpleNamespace(models=[name], feature_dim=64, num_classes=CLASSES)
        yield Case("HtFLlib", f"BaseHeadSplit of {name.split('(')[0]}", partial(models.BaseHeadSplit, settings), IMAGES)
    for name, settings in TORCHVISION.items():
        yield Case("torchvision", name, partial(_of_torchvision, name, settings), (3, 64, 64))


def _of_torchvision(name: str, settings: Mapping[str, Any]) -> nn.Module:
    return getattr(torchvision.models, name)(weights=None, num_classes=CLASSES, **settings)
