"""Classifiers of the Hugging Face library from configurations made here: width 32, two layers, weights drawn.

Each is wrapped as a user would for a task whose inputs are one tensor: it is given by its name, and the logits are
taken out of what comes back.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from trying import Case

CLASSES, WORDS, LENGTH, SIDE = 5, 99, 12, 32
PAD, END = 0, 2


class Logits(nn.Module):
    """From one tensor to the logits."""

    def __init__(self, net: nn.Module, reads: str, gives: str = "logits") -> None:
        super().__init__()
        self.net, self.reads, self.gives = net, reads, gives

    def forward(self, x: Tensor) -> Tensor:
        """The logits of inputs (batch, ...)."""
        return self.net(**{self.reads: x})[self.gives]


class Ended(Logits):
    """Puts a mark behind each text, at which the net looks for its features; the text itself has none."""

    def forward(self, x: Tensor) -> Tensor:
        """The logits of words (batch, length)."""
        return super().forward(torch.cat([x.clamp(min=END + 1), x.new_full((len(x), 1), END)], dim=1))


class MeanOfTokens(nn.Module):
    """A classifier by hand upon a net that only encodes, of which the mean over the tokens is read."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.drop, self.head = net, nn.Dropout(0.1), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of words (batch, length)."""
        return self.head(self.drop(self.net(input_ids=x).last_hidden_state.mean(1)))


@dataclass(frozen=True)
class Model:
    """An architecture.

    Attributes:
        config: the class of its configuration.
        net: the class of the net.
        sizes: what is configured beside what its kind has in common; None where that is not asked.
        kind: what it reads.
        wrapper: makes of it a net from one tensor to logits.
        note: what tells it from another of the class.
    """

    config: str
    net: str
    sizes: Mapping[str, Any]
    kind: str = "text"
    wrapper: Any = None
    note: str = ""

    def build(self) -> nn.Module:
        """The net, wrapped."""
        common = COMMON if self.kind == "text" else {}
        sizes = {**common, "num_labels": CLASSES, **self.sizes}
        config = getattr(transformers, self.config)(**{name: size for name, size in sizes.items() if size is not None})
        net = getattr(transformers, self.net)(config)
        return self.wrapper(net) if self.wrapper else Logits(net, READS[self.kind][0])


COMMON: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
}
READS: dict[str, tuple[str, tuple[int, ...]]] = {
    "text": ("input_ids", (LENGTH,)),
    "image": ("pixel_values", (3, SIDE, SIDE)),
    "sound": ("input_values", (3200,)),
    "spectrogram": ("input_values", (64, 16)),
    "mel": ("input_features", (16, 120)),
    "series": ("past_values", (64, 2)),
}
"""The name and shape of what each kind reads; all but text are real numbers."""

HEADS = {"num_key_value_heads": 2}
XLNET = {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64, "max_position_embeddings": None}
FUNNEL = {"block_sizes": [1, 1], "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64, "num_hidden_layers": None}
SPANS = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
PATCHES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": SIDE,
    "patch_size": 8,
}
WAVES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 4, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 32,
    "mask_time_prob": 0.0,  # masks are drawn by numpy
    "num_feat_extract_layers": 3,
}
MASKED = {"mask_time_prob": 0.3, "mask_time_length": 2}
DEEP = {"num_hidden_layers": 12}  # each left out at random in one of ten steps
SERIES = {
    "num_input_channels": 2,
    "num_targets": CLASSES,
    "context_length": 64,
    "patch_length": 8,
    "patch_stride": 8,
    "d_model": 32,
}
STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32]}

MODELS = [
    Model("BertConfig", "BertForSequenceClassification", {}),
    Model(
        "DistilBertConfig",
        "DistilBertForSequenceClassification",
        {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
    ),
    Model("RobertaConfig", "RobertaForSequenceClassification", {}),
    Model("AlbertConfig", "AlbertForSequenceClassification", {"embedding_size": 16}),
    Model("ElectraConfig", "ElectraForSequenceClassification", {"embedding_size": 16}),
    Model(
        "DebertaV2Config", "DebertaV2ForSequenceClassification", {"relative_attention": True, "pos_att_type": ["p2c"]}
    ),
    Model("XLNetConfig", "XLNetForSequenceClassification", XLNET),
    Model("FunnelConfig", "FunnelForSequenceClassification", FUNNEL),
    Model("FNetConfig", "FNetForSequenceClassification", {}),
    Model("ModernBertConfig", "ModernBertForSequenceClassification", {"cls_token_id": 1, "sep_token_id": 2}),
    Model("BertConfig", "BertForTokenClassification", {}),
    Model("GPT2Config", "GPT2ForSequenceClassification", {"n_embd": 32, "n_layer": 2, "n_head": 2}),
    Model("LlamaConfig", "LlamaForSequenceClassification", HEADS),
    Model("MixtralConfig", "MixtralForSequenceClassification", {**HEADS, "num_local_experts": 3}),
    Model("BartConfig", "BartForSequenceClassification", SPANS, wrapper=partial(Ended, reads="input_ids")),
    Model("T5Config", "T5EncoderModel", {"d_model": 32, "d_kv": 16, "d_ff": 64}, wrapper=MeanOfTokens),
    Model("MambaConfig", "MambaModel", {"state_size": 8}, wrapper=MeanOfTokens),
    Model("ViTConfig", "ViTForImageClassification", PATCHES, "image"),
    Model("DeiTConfig", "DeiTForImageClassificationWithTeacher", PATCHES, "image"),
    Model("BeitConfig", "BeitForImageClassification", PATCHES, "image"),
    Model("Dinov2Config", "Dinov2ForImageClassification", PATCHES, "image"),
    Model("ResNetConfig", "ResNetForImageClassification", {**STAGES, "embedding_size": 8}, "image"),
    Model("RegNetConfig", "RegNetForImageClassification", {**STAGES, "embedding_size": 8, "groups_width": 4}, "image"),
    Model("ConvNextConfig", "ConvNextForImageClassification", STAGES, "image"),
    Model(
        "SwinConfig",
        "SwinForImageClassification",
        {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "image_size": SIDE, "patch_size": 2, "window_size": 4},
        "image",
    ),
    Model("MobileNetV2Config", "MobileNetV2ForImageClassification", {"depth_multiplier": 0.35}, "image"),
    Model(
        "SegformerConfig",
        "SegformerForImageClassification",
        {"depths": [1] * 4, "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 2, 2]},
        "image",
    ),
    Model("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", WAVES, "sound"),
    Model("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", {**WAVES, **MASKED}, "sound", note="masked in time"),
    Model("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", {**WAVES, **DEEP}, "sound", note="12 layers"),
    Model("HubertConfig", "HubertForSequenceClassification", WAVES, "sound"),
    Model(
        "ASTConfig",
        "ASTForAudioClassification",
        {**PATCHES, "max_length": 64, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8},
        "spectrogram",
    ),
    Model(
        "WhisperConfig",
        "WhisperForAudioClassification",
        {**SPANS, "num_mel_bins": 16, "max_source_positions": 60, "classifier_proj_size": 32},
        "mel",
    ),
    Model(
        "PatchTSTConfig",
        "PatchTSTForClassification",
        {
            **SERIES,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 64,
            "use_cls_token": True,
        },
        "series",
        partial(Logits, reads="past_values", gives="prediction_logits"),
    ),
    Model(
        "PatchTSMixerConfig",
        "PatchTSMixerForTimeSeriesClassification",
        {
            **SERIES,
            "num_layers": 2,
        },
        "series",
        partial(Logits, reads="past_values", gives="prediction_outputs"),
    ),
]


def cases() -> Iterator[Case]:
    """All of them."""
    transformers.logging.set_verbosity_error()
    for model in MODELS:
        name = f"{model.net}, {model.note}" if model.note else model.net
        yield Case("Hugging Face", name, model.build, READS[model.kind][1], WORDS if model.kind == "text" else None)
