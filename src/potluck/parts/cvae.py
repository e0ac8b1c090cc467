"""A variational auto-encoder of features, conditional on their class; for servers that generate what they may not see.

Sohn, Lee, Yan. "Learning Structured Output Representation using Deep Conditional Generative Models", NIPS 2015.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck.core.nets.weights import Weights, load
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import Extras
from potluck.core.roles import Server


class ConditionalVAE(nn.Module):
    """Features (batch, n) of a class to a code (batch, width) and back; the decoder is linear."""

    def __init__(self, features: int, classes: int, width: int) -> None:
        super().__init__()
        self.width = width
        label = width // 2
        self.label = nn.Embedding(classes, label)
        self.encoder = nn.Sequential(
            nn.Linear(features + label, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2 * width)
        )
        self.decoder = nn.Sequential(nn.Linear(width + label, width), nn.Linear(width, features))

    def encode(self, h: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The mean m and the logarithm of the variance s, (batch, width) each."""
        m, s = self.encoder(torch.cat([h, self.label(labels)], 1)).chunk(2, 1)
        return m, s

    def decode(self, code: Tensor, labels: Tensor) -> Tensor:
        """Features (batch, n)."""
        return self.decoder(torch.cat([code, self.label(labels)], 1))

    def drawn(self, rng: torch.Generator) -> Tensor:
        """One synthetic feature of each class, (classes, n), without a gradient."""
        classes = self.label.num_embeddings
        codes = torch.randn(classes, self.width, generator=rng)
        with torch.no_grad():
            return self.decode(codes, torch.arange(classes))


def server_vae(server: Server, features: int, widest: int, weights: Weights | None = None) -> ConditionalVAE:
    """A server's auto-encoder of features (batch, n), as wide as they are and at most `widest`.

    Args:
        server: whose module it is.
        features: n.
        widest: of its layers.
        weights: what it has learnt; None for a new one.
    """
    width = max(2, min(features, widest))
    vae = server.module("vae", lambda: ConditionalVAE(features, server.num_classes, width))
    assert isinstance(vae, ConditionalVAE)
    if weights is not None:
        load(vae, weights)
    return vae


@dataclass(frozen=True)
class VAELoss:
    """MSE(h, decoded u) + kl_weight KL(N(m, e^s) || N(0, 1)), with u = m + e^(s / 2) noise."""

    kl_weight: float
    kl_reduction: Literal["mean", "sum"]

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> Tensor:
        """The loss of features (batch, n) and their classes."""
        assert isinstance(net, ConditionalVAE)
        h, labels, _ = batch
        m, s = net.encode(h, labels)
        u = m + (s / 2).exp() * torch.randn_like(s)
        kl = kl_to_standard(m, s)
        reduced = kl.mean() if self.kl_reduction == "mean" else kl.sum()
        return F.mse_loss(net.decode(u, labels), h) + self.kl_weight * reduced


def kl_to_standard(m: Tensor, s: Tensor) -> Tensor:
    """KL of the normal distribution with mean m and variance e^s to the standard one, element by element."""
    return -(1 + s - m.square() - s.exp()) / 2


@dataclass(frozen=True)
class AutoencoderLoss:
    """|x - G(u)|^2 / 2 + kl_weight KL(N(m, e^s) || N(0, 1)), u ~ N(m, e^s): sums over entries, mean over the batch.

    It is least where the evidence lower bound is largest, for inputs with a variance of kl_weight about what is
    generated.
    """

    kl_weight: float

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> Tensor:
        """Of one batch of inputs, whose targets are not read."""
        encoder, decoder = (net.get_submodule(name) for name in ("encoder", "decoder"))
        m, s = encoder(batch.inputs).chunk(2, 1)
        gaps = batch.inputs - decoder(m + (s / 2).exp() * torch.randn_like(s))
        return (gaps.flatten(1).square().sum(1) / 2 + self.kl_weight * kl_to_standard(m, s).sum(1)).mean()


def perceptron(inputs: int, hidden: int, outputs: int, shape: Sequence[int] = (-1,)) -> nn.Module:
    """One hidden layer, from flattened inputs to outputs of this shape."""
    layers = nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    return nn.Sequential(nn.Flatten(), *layers, nn.Unflatten(1, tuple(shape)))
