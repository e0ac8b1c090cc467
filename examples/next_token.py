"""A small language: the next character of written sums, by a convolution, a transformer and a perceptron.

The text is sums of two numbers below 50, such as `7+35=42;`. Six clients with three architectures average the layers
that they have in common, embedding and output (FedAvg, layer by layer). What a sum's first digits are cannot be known,
its result can, so perplexity falls to some 4 rather than 1. Writes the data, a run's folder and its report, all below
the current folder:

    python examples/next_token.py
"""

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck.analysis.report import write_report
from potluck.cli.run import start_run

DATA, RUNS = Path("sums.npz"), Path("runs-next-token")
CHARACTERS, LENGTH, WIDTH, WINDOW = "0123456789+=;", 32, 32, 8
SETTINGS = (
    f"federation.dataset={DATA}",
    "federation.task=next_token",
    "federation.clients=6",
    f"federation.models=['{__file__}:convolution', '{__file__}:transformer', '{__file__}:perceptron']",
    "method.training.epochs=2",
    "method.training.lr=0.003",
    "run.rounds=6",
    "run.workers=1",
)


class Reader(nn.Module):
    """Tokens (n, t) to logits (n, t, width): embedding, a body that sees only what came before, output."""

    def __init__(self, width: int, **body: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(width, WIDTH)
        (self.kind,) = body
        self.add_module(self.kind, body[self.kind])  # under a distinct name: only equal bodies are averaged
        self.output = nn.Linear(WIDTH, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits for the token after each position."""
        return self.output(self.get_submodule(self.kind)(self.embedding(tokens)))


class CausalConvolution(nn.Conv1d):
    """A convolution (n, t, width) over the last tokens, this one included."""

    def forward(self, input: Tensor) -> Tensor:
        """As many positions as came in."""
        return super().forward(F.pad(input.transpose(1, 2), (self.kernel_size[0] - 1, 0))).transpose(1, 2)


class Attention(nn.Module):
    """One block of a transformer with a single head and learnt positions."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.mixing, self.leaving = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Each position attends to itself and to those before it."""
        x = x + self.positions[: x.shape[1]]
        query, key, value = self.mixing(self.before(x)).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / math.sqrt(WIDTH)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.leaving(scores.masked_fill(later, -math.inf).softmax(-1) @ value)
        return x + self.inner(self.between(x))


class Window(nn.Module):
    """The last tokens, this one included, side by side."""

    def forward(self, x: Tensor) -> Tensor:
        """Embeddings (n, t, width) to (n, t, WINDOW * width)."""
        padded = F.pad(x, (0, 0, WINDOW - 1, 0))
        return padded.unfold(1, WINDOW, 1).flatten(2)


def convolution(num_classes: int, input_shape: tuple[int, ...], *, rate: float = 1.0) -> nn.Module:
    """Two causal convolutions."""
    layers = [CausalConvolution(WIDTH, WIDTH, 5), nn.ReLU(), CausalConvolution(WIDTH, WIDTH, 5), nn.ReLU()]
    return Reader(num_classes, convolutions=nn.Sequential(*layers))


def transformer(num_classes: int, input_shape: tuple[int, ...], *, rate: float = 1.0) -> nn.Module:
    """A transformer of one block."""
    return Reader(num_classes, attention=Attention())


def perceptron(num_classes: int, input_shape: tuple[int, ...], *, rate: float = 1.0) -> nn.Module:
    """A perceptron over a window of tokens."""
    layers = [Window(), nn.Linear(WINDOW * WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH)]
    return Reader(num_classes, window=nn.Sequential(*layers))


def write_data() -> None:
    """Pieces of a text of 8,000 sums; the target of a character is the one after it."""
    terms = np.random.default_rng(0).integers(0, 50, (8000, 2))
    text = "".join(f"{a}+{b}={a + b};" for a, b in terms)
    tokens = np.array([CHARACTERS.index(character) for character in text])
    count = (len(tokens) - 1) // LENGTH
    inputs = tokens[: count * LENGTH].reshape(count, LENGTH)
    targets = tokens[1 : count * LENGTH + 1].reshape(count, LENGTH)
    test = np.arange(count) % 5 == 0
    np.savez(DATA, x_train=inputs[~test], y_train=targets[~test], x_test=inputs[test], y_test=targets[test])


def main() -> None:
    """Run, print the table, write the report."""
    write_data()
    start_run("fedavg", SETTINGS, RUNS)
    for name in (DATA, write_report([RUNS], Path("report-next-token"))):
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
