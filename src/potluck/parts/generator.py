"""A generator of features by class, and its loss: what FedGen's server learns from clients' last layers.

Zhu, Hong, Zhou. ICML 2021. https://arxiv.org/abs/2105.10056.
"""

import copy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck.core.ground.errors import ConfigError
from potluck.core.nets.weights import buffers_of, load
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import Extras
from potluck.core.roles import Replies, Server
from potluck.models.split import split


class Generator(nn.Module):
    """G: labels (batch,) and noise (batch, noise) to features (batch, width)."""

    def __init__(self, classes: int, noise: int, hidden: int, width: int) -> None:
        super().__init__()
        self.classes = classes
        self.noise = noise
        self.layers = nn.Sequential(
            nn.Linear(noise + classes, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, width)
        )

    def forward(self, labels: Tensor, noise: Tensor) -> Tensor:
        """Generated features (batch, width)."""
        return self.layers(torch.cat([noise, F.one_hot(labels, self.classes).to(noise)], 1))

    def drawn(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Features for fresh noise, and the noise."""
        noise = torch.randn(len(labels), self.noise, device=labels.device)
        return self(labels, noise), noise


@dataclass(frozen=True)
class GeneratorLoss:
    """Eq. 4: how badly the clients' last layers recognise what is generated, and how little it depends on noise.

    The layers are the extras' "heads".

    Attributes:
        ensemble: the loss of the layers' "mean" logits, or the sum of each layer's own by its "share" of the class,
            which are the extras' "shares" (clients, classes).
        diversity: weight of `likeness`.
    """

    ensemble: Literal["mean", "share"]
    diversity: float

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> Tensor:
        """Of one batch of labels."""
        assert isinstance(net, Generator)
        labels = batch.targets
        z, noise = net.drawn(labels)
        logits = torch.stack([head(z) for head in extras["heads"]])
        if self.ensemble == "mean":
            loss = F.cross_entropy(logits.mean(0), labels)
        else:
            each = torch.stack([F.cross_entropy(one, labels, reduction="none") for one in logits])
            loss = (extras["shares"][:, labels] * each).sum(0).mean()
        return loss + self.diversity * likeness(z, noise)


def likeness(z: Tensor, noise: Tensor) -> Tensor:
    """Between 0 and 1, and 1 if all features are equal: exp(-m), m the mean over pairs of distance times distance.

    The distances are the mean absolute difference of the features and the mean square difference of their noise.
    """
    features = (z[:, None] - z[None]).abs().mean(2)
    return torch.exp(-(features * (noise[:, None] - noise[None]).square().mean(2)).mean())


def check_heads(server: Server, buffers: str) -> None:
    """Refuse heads that the server cannot put together from what it is sent.

    Raises:
        ConfigError: a head keeps statistics, and buffers are not sent.
    """
    for name in sorted({member.architecture for member in server.roster.values()} if buffers != "average" else ()):
        if buffers_of(split(server.build(name)).head):
            raise ConfigError(
                f"the head of {name} keeps statistics, and sharing.buffers={buffers!r} does not send them to the"
                " server, which teaches its generator with the head; expected 'average'"
            )


def sent_heads(replies: Replies, server: Server) -> nn.ModuleList:
    """The heads that clients sent, in order of client id, with the weights and buffers of their replies."""
    nets = {name: server.build(name) for name in sorted({server.roster[i].architecture for i in replies})}
    heads = nn.ModuleList()
    for i, reply in replies.items():
        net = nets[server.roster[i].architecture]
        sent = {**reply["weights"], **reply.get("buffers", {})}
        own = {name: tensor for name, tensor in sent.items() if name.startswith(split(net).head_prefix)}
        heads.append(copy.deepcopy(split(load(net, own, partial=True)).head))
    return heads
