"""Networks as users write them: with functions between layers, in place, in loops; some of which cannot be split.

What they read is one tensor: images of 3 x 16 x 16, sequences of 12 tokens, or 20 columns of a table.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from trying import Case

CLASSES, WORDS = 5, 50
IMAGES, TEXT, COLUMNS = (3, 16, 16), (12,), (20,)


class Tutorial(nn.Module):
    """A LeNet with functions between its layers, and a dropout that asks for the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3)
        self.fc1, self.fc2, self.fc3 = nn.Linear(32, 24), nn.Linear(24, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = x.view(-1, 32)
        x = F.dropout(F.relu(self.fc1(x)), 0.3, self.training)
        return self.fc3(F.relu(self.fc2(x)))


class LogSoftmax(nn.Module):
    """Puts out log-probabilities, behind a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3), nn.Linear(8, CLASSES)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.conv2(torch.relu_(self.conv1(x)))).mean((2, 3))
        return F.log_softmax(self.drop(self.fc(x)), dim=1)


class FunctionalHead(nn.Module):
    """Its last layer is a parameter and a function; features and classes are compared by their angle."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(True), nn.Conv2d(6, 8, 3), nn.ReLU())
        self.neck = nn.Linear(8, 8)
        self.classes, self.scale = nn.Parameter(torch.randn(CLASSES, 8)), nn.Parameter(torch.tensor(10.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.neck(F.adaptive_avg_pool2d(self.body(x), 1).flatten(1))
        return self.scale * F.linear(F.normalize(x), F.normalize(self.classes))


class InPlace(nn.Module):
    """Residual blocks that change in place what they were given, and a stem that is normed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1)) for _ in range(3)
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x.sub(0.5).div_(0.5))), inplace=True)
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        x[:, 0].mul_(2)
        return self.head(F.silu(x, inplace=True).mean((2, 3)))


class SharedBlock(nn.Module):
    """One block and one ReLU are called again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.relu = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.stem(x))
        for _ in range(3):
            x = self.relu(self.norm(self.block(x)) + x)
        return self.head(x.amax((2, 3)))


class SharedLast(nn.Module):
    """Its last layer is called twice, on two scales of which the mean is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(F.relu(self.stem(x))))
        return (self.head(x.mean((2, 3))) + self.head(x.amax((2, 3)))) / 2


class LSTMText(nn.Module):
    """An LSTM both ways, of which the last states of both are read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 12, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)
        self.fc = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(self.embed(x))
        return self.fc(torch.cat([hidden[-2], hidden[-1]], dim=1))


class PackedGRU(nn.Module):
    """Sequences are packed by lengths that are counted from the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(WORDS, 16, padding_idx=0), nn.GRU(16, 12, batch_first=True)
        self.fc = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x != 0).sum(1).clamp(min=1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(x), lengths, batch_first=True, enforce_sorted=False)
        return self.fc(self.gru(packed)[1][-1])


class TimeFirst(nn.Module):
    """A GRU whose sequences have time before the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru, self.fc = nn.Embedding(WORDS, 16), nn.GRU(16, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(self.embed(x.t()))
        return self.fc(states[-1])


class Cells(nn.Module):
    """An LSTM cell in a loop over time, whose states are local variables."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.fc = nn.Embedding(WORDS, 16), nn.LSTMCell(16, 12), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        h, c = x.new_zeros(len(x), 12), x.new_zeros(len(x), 12)
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
        return self.fc(h)


class Encoder(nn.Module):
    """A transformer encoder with a class token and a table of positions."""

    def __init__(self, masked: bool = False) -> None:
        super().__init__()
        self.embed, self.cls = nn.Embedding(WORDS, 16), nn.Parameter(torch.randn(1, 1, 16))
        self.register_buffer("positions", torch.randn(1, TEXT[0] + 1, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder, self.masked = nn.TransformerEncoder(layer, 2), masked
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.cat([self.cls.expand(len(ids), -1, -1), self.embed(ids)], dim=1) + self.positions
        mask = F.pad(ids == 0, (1, 0)) if self.masked else None
        return self.fc(self.encoder(x, src_key_padding_mask=mask)[:, 0])


class Attention(nn.Module):
    """Attention by hand over the patches of an image, the last one's answer pooled with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 16, 4, stride=4), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.gate, self.fc = nn.Linear(16, 1), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for _ in range(2):
            q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0))
        return self.fc((self.gate(x).softmax(1) * x).sum(1))


class TiedLanguageModel(nn.Module):
    """A head for each token that has the embedding's matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(WORDS, 12), nn.LSTM(12, 12, batch_first=True)
        self.mix, self.head = nn.Linear(12, 12), nn.Linear(12, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.lstm(self.embed(x))[0])))


class TwoHeads(nn.Module):
    """The mean of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3)
        self.one, self.other = nn.Linear(8, CLASSES), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(F.relu(self.stem(x)))).mean((2, 3))
        return (self.one(x) + self.other(x)) / 2


class Auxiliary(nn.Module):
    """In training mode it puts out two tensors, and one in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3)
        self.aux, self.head = nn.Linear(6, CLASSES), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Any:
        low = F.relu(self.stem(x))
        outputs = self.head(F.relu(self.conv(low)).mean((2, 3)))
        return (outputs, self.aux(low.mean((2, 3)))) if self.training else outputs


class BatchWritten(nn.Module):
    """The size of its batch is written into a reshape."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mid, self.fc = nn.Conv2d(3, 4, 3, stride=2), nn.Linear(196, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.mid(self.conv(x).reshape(2, -1))))


class Counts(nn.Module):
    """Counts its calls, in Python and in a buffer, and does not use the counts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.fc = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3), nn.Linear(8, CLASSES)
        self.calls = 0
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = F.relu(self.stem(x))
        if self.training:
            self.steps += 1
        return self.fc(F.relu(self.conv(x)).mean((2, 3)))


class CountsAndUses(nn.Module):
    """Warms up: what it puts out depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.fc = nn.Linear(20, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = F.relu(self.stem(x)) * min(1.0, self.calls / 100)
        return self.fc(F.relu(self.mid(x)) * min(1.0, self.calls / 100))


class Noisy(nn.Module):
    """Draws in both modes, so that it puts out something else each time."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mean, self.spread = nn.Linear(20, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.mid, self.fc = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x)) + 0.1 * torch.randn(len(x), 16)
        mean, spread = self.mean(x), self.spread(x)
        return self.fc(F.relu(self.mid(mean + torch.randn_like(spread) * (spread / 2).exp())))


class Nested(nn.Module):
    """Lists of lists of layers, a table of them, and exits that are collected and not used."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(
            nn.ModuleList(nn.Conv2d(3 if i == j == 0 else 6, 6, 3, padding=1) for j in range(2)) for i in range(3)
        )
        self.acts = nn.ModuleDict({"relu": nn.ReLU(), "gelu": nn.GELU()})
        self.exits = nn.ModuleList(nn.Linear(6, CLASSES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        outputs = list[Tensor]()
        for level, (convs, leave) in enumerate(zip(self.levels, self.exits, strict=True)):
            for conv in convs:
                x = self.acts["gelu" if level else "relu"](conv(x))
            outputs.append(leave(x.mean((2, 3))))
            x = F.avg_pool2d(x, 2)
        return outputs[-1]


class Dense(nn.Module):
    """Each layer of a block reads all that came before in it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(6 + 4 * i, 4, 3, padding=1) for i in range(3))
        self.down, self.last = nn.Conv2d(18, 8, 1), nn.Conv2d(8, 8, 3)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.stem(x)]
        for layer in self.layers:
            found.append(layer(F.relu(torch.cat(found, 1))))
        x = self.last(F.avg_pool2d(self.down(torch.cat(found, 1)), 2))
        return self.fc(x.mean((2, 3)))


class SqueezeExcite(nn.Module):
    """Blocks that weigh their channels, with a stem that is skipped into each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.Hardswish(True))
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, groups=4) for _ in range(2))
        self.squeeze = nn.ModuleList(nn.Conv2d(8, 2, 1) for _ in range(2))
        self.excite = nn.ModuleList(nn.Conv2d(2, 8, 1) for _ in range(2))
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv, squeeze, excite in zip(self.convs, self.squeeze, self.excite, strict=True):
            y = conv(x)
            weights = excite(F.relu(squeeze(y.mean((2, 3), keepdim=True)))).sigmoid_()
            x = x + y * weights
        return self.fc(x.mean((2, 3)))


class OneLabelUNet(nn.Module):
    """Down and up again, with skips over what lies below."""

    def __init__(self) -> None:
        super().__init__()
        self.d1, self.d2, self.d3 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, 2, 1), nn.Conv2d(6, 8, 3, 2, 1)
        self.u2, self.u1 = nn.ConvTranspose2d(8, 6, 2, 2), nn.ConvTranspose2d(12, 4, 2, 2)
        self.out, self.fc = nn.Conv2d(8, 8, 3), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        one = F.relu(self.d1(x))
        two = F.relu(self.d2(one))
        x = torch.cat([self.u2(F.relu(self.d3(two))), two], 1)
        x = torch.cat([self.u1(x), one], 1)
        return self.fc(F.relu(self.out(x)).mean((2, 3)))


class LooksAtNumbers(nn.Module):
    """Python decides by what the numbers are."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.small, self.large = nn.Linear(20, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = self.large(x) if x.mean() > 100 else self.small(x)
        return self.fc(F.relu(x))


class Experts(nn.Module):
    """Each example goes to the expert that a layer chooses for it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.router = nn.Linear(20, 16), nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        weights, chosen = self.router(x).softmax(1).max(1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            y[mine] = expert(x[mine]) * weights[mine, None]
        return self.fc(F.relu(y + x))


class MixedColumns(nn.Module):
    """The first columns of a table are categories, each with an embedding, and the others are normed numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embeds = nn.ModuleList(nn.Embedding(4, 3) for _ in range(3))
        self.norm, self.body = nn.BatchNorm1d(17), nn.Sequential(nn.Linear(26, 16), nn.ReLU(), nn.Linear(16, 16))
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        kinds = x[:, :3].long().clamp(0, 3)
        found = [embed(kinds[:, at]) for at, embed in enumerate(self.embeds)]
        return self.out(F.relu(self.body(torch.cat([*found, self.norm(x[:, 3:])], 1))))


class ParametersOnly(nn.Module):
    """Has weights and no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(20, 16) / 5), nn.Parameter(torch.randn(16, 16) / 4)
        self.w3 = nn.Parameter(torch.randn(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.w1).relu() @ self.w2).relu() @ self.w3


class Checkpointed(nn.Module):
    """Computes its blocks a second time for the gradients, so that they need less memory."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(2))
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return self.fc(x.mean((2, 3)))


class Stateful(nn.Module):
    """Keeps its features as an attribute, for a loss that is taken elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.fc = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3), nn.Linear(8, CLASSES)
        self.features: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.features = F.relu(self.conv(F.relu(self.stem(x)))).mean((2, 3))
        return self.fc(self.features)


class FromZero(nn.Module):
    """A branch begins with no weight, so that it only counts once it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Linear(20, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.skip, self.fc = nn.Identity(), nn.Linear(16, CLASSES)
        self.alpha = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = x + self.first(x)
        x = self.skip(x) + self.alpha * F.relu(self.second(x))
        return self.fc(x)


class LayersDropped(nn.Module):
    """Leaves out layers at random in training, by an if."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(20, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.mid, self.fc = nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            if not self.training or torch.rand(1) < 0.5:
                x = F.relu(layer(x))
        return self.fc(F.dropout(F.relu(self.mid(x)), 0.2, self.training))


class Table(nn.Module):
    """Puts out a table with the logits and the features."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fc = nn.Linear(20, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.stem(x))
        return {"features": x, "logits": self.fc(x)}


class Ensemble(nn.Module):
    """The mean of three whole networks."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(Tutorial() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members]).mean(0)


class Normed(nn.Module):
    """Its inputs are normed first, and its outputs divided by a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, 3, 1, 1))
        self.register_buffer("std", torch.ones(1, 3, 1, 1))
        self.body, self.temperature = Tutorial(), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.body((x - self.mean) / self.std) / self.temperature


def _sequential() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(200, 5)
    )


def _perceptron() -> nn.Module:
    layers = (nn.Linear(20, 16), nn.BatchNorm1d(16), nn.ReLU(True), nn.Dropout(0.2), nn.Linear(16, 16), nn.ReLU(True))
    return nn.Sequential(*layers, nn.Linear(16, CLASSES))


def _one_hidden_layer() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def _linear() -> nn.Module:
    return nn.Linear(20, CLASSES)


def _old_weight_norm() -> nn.Module:
    norm: Any = nn.utils.weight_norm
    return nn.Sequential(norm(nn.Linear(20, 16)), nn.ReLU(), norm(nn.Linear(16, 16)), nn.ReLU(), nn.Linear(16, CLASSES))


def _new_weight_norm() -> nn.Module:
    norm = parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(20, 16)), nn.ReLU(), norm(nn.Linear(16, 16)), nn.ReLU(), nn.Linear(16, CLASSES))


def _spectral_norm() -> nn.Module:
    norm = parametrizations.spectral_norm
    layers = (norm(nn.Conv2d(3, 6, 3)), nn.LeakyReLU(0.2, True), norm(nn.Conv2d(6, 8, 3)), nn.LeakyReLU(0.2, True))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), norm(nn.Linear(8, CLASSES)))


def _frozen() -> nn.Module:
    net = Tutorial()
    for weight in (*net.conv1.parameters(), *net.conv2.parameters()):
        weight.requires_grad_(False)
    return net


def _scripted() -> nn.Module:
    return torch.jit.script(Tutorial())


def _double() -> nn.Module:
    return Encoder().double()


NETS = {
    "tutorial's LeNet": (Tutorial, IMAGES),
    "log_softmax at the end": (LogSoftmax, IMAGES),
    "functional head": (FunctionalHead, IMAGES),
    "in place": (InPlace, IMAGES),
    "shared block, shared ReLU": (SharedBlock, IMAGES),
    "last layer called twice": (SharedLast, IMAGES),
    "LSTM both ways": (LSTMText, TEXT),
    "GRU on packed sequences": (PackedGRU, TEXT),
    "GRU, time first": (TimeFirst, TEXT),
    "LSTM cell in a loop": (Cells, TEXT),
    "transformer encoder": (Encoder, TEXT),
    "transformer encoder, masked": (partial(Encoder, masked=True), TEXT),
    "transformer encoder, double precision": (_double, TEXT),
    "attention by hand": (Attention, IMAGES),
    "language model, tied": (TiedLanguageModel, TEXT),
    "two heads": (TwoHeads, IMAGES),
    "two outputs in training": (Auxiliary, IMAGES),
    "batch size in a reshape": (BatchWritten, IMAGES),
    "counts its calls": (Counts, IMAGES),
    "uses the count of its calls": (CountsAndUses, COLUMNS),
    "random outputs": (Noisy, COLUMNS),
    "lists of lists of layers": (Nested, IMAGES),
    "dense concatenations": (Dense, IMAGES),
    "squeeze and excite": (SqueezeExcite, IMAGES),
    "U-Net to one label": (OneLabelUNet, IMAGES),
    "looks at numbers": (LooksAtNumbers, COLUMNS),
    "experts": (Experts, COLUMNS),
    "categories and numbers": (MixedColumns, COLUMNS),
    "parameters without layers": (ParametersOnly, COLUMNS),
    "checkpointed blocks": (Checkpointed, IMAGES),
    "keeps its features": (Stateful, IMAGES),
    "branch that begins at zero": (FromZero, COLUMNS),
    "layers left out at random": (LayersDropped, COLUMNS),
    "puts out a table": (Table, COLUMNS),
    "mean of three nets": (Ensemble, IMAGES),
    "normed inputs, temperature": (Normed, IMAGES),
    "nn.Sequential, images": (_sequential, IMAGES),
    "nn.Sequential, table": (_perceptron, COLUMNS),
    "one hidden layer": (_one_hidden_layer, COLUMNS),
    "linear": (_linear, COLUMNS),
    "weight_norm by hooks": (_old_weight_norm, COLUMNS),
    "weight_norm, parametrised": (_new_weight_norm, COLUMNS),
    "spectral_norm, parametrised": (_spectral_norm, IMAGES),
    "frozen convolutions": (_frozen, IMAGES),
    "torch.jit.script": (_scripted, IMAGES),
}


def cases() -> Iterator[Case]:
    """All of them."""
    for name, (build, shape) in NETS.items():
        yield Case("written as users write", name, build, shape, WORDS if shape == TEXT else None)
