"""Attacks on what was heard of a client: its inputs from its features, and who was among its examples."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck.attacks.evidence import extracting_net, outputs_on_public, returned_net
from potluck.attacks.inversion import bounded, invert, to_images
from potluck.attacks.membership import Area, area
from potluck.attacks.overheard import Heard, Overheard
from potluck.attacks.release import FEATURES, claim_of, without_noise
from potluck.core.federation import Federation
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.tree import unpack
from potluck.core.nets.modes import mode
from potluck.core.nets.splitting import split_problem
from potluck.core.nets.weights import load
from potluck.core.requests.examples import Examples
from potluck.core.requests.inference import predict
from potluck.models.split import split

_IMITATION, _RATE = 150, 0.01
_TOGETHER = 128  # examples whose distances to all that was sent are computed at once


@dataclass(frozen=True, eq=False)
class Inverted:
    """What was made of a client's features.

    Attributes:
        client: whose they are.
        source: of the network that they were taken to come from.
        true: the examples that they are of, as inputs (n, ...).
        found: what was made of them, likewise.
        blind: the mean of the client's examples, likewise, for comparison.
        low: of each channel the least number, which is black; `high` the largest, which is white.
    """

    client: int
    source: str
    true: Tensor
    found: Tensor
    blind: Tensor
    low: Tensor
    high: Tensor

    @property
    def images(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """True, found and blind as images in [0, 1]; None if the inputs are no images."""
        if self.true.dim() != 4:
            return None
        true, found, blind = (to_images(one, self.low, self.high) for one in (self.true, self.found, self.blind))
        return true, found, blind


def inverted(heard: Heard, overheard: Overheard, count: int, steps: int, seed: int) -> Inverted:
    """Inputs for the first features of a client's reply.

    Which example a row is of is told by the client's own network, without noise: the one with the nearest features.

    Raises:
        ConfigError: there are no features in it that a network has made of inputs.
    """
    engine = overheard.engine
    train, received = engine.federation.sites[heard.client].train, _rows(heard.reply.get(FEATURES))
    if received is None:
        raise ConfigError("found no features in the reply")
    inputs = train.batch(torch.arange(len(train))).inputs
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        raise ConfigError("found inputs that are no single tensor of real numbers, which no gradient can move")
    net, source = extracting_net(heard, overheard)
    features = _made_by(net, received, inputs)
    claim = claim_of(engine.method)
    clip = claim.clip if claim else None
    clean = _rows(without_noise(engine, heard)) if claim else received
    assert clean is not None
    own = _own_net(heard, overheard) or net
    with mode(own, training=False), torch.no_grad():
        known = bounded(_made_by(own, received, inputs)(inputs), clip)
    owners = torch.cdist(clean[:count].flatten(1), known).argmin(1)
    found = invert(net, features, received[:count], tuple(inputs.shape[1:]), steps=steps, clip=clip, seed=seed)
    axes = [0, *range(2, inputs.dim())]
    low, high = inputs.amin(axes, keepdim=True)[0], inputs.amax(axes, keepdim=True)[0]
    blind = inputs.mean(0, keepdim=True).expand_as(found)
    return Inverted(heard.client, source, inputs[owners], found, blind, low, high)


def _rows(features: object) -> Tensor | None:
    """Of the features in a reply those that are nearest to the inputs."""
    found = features.get("s_in") if isinstance(features, dict) else features
    return found if isinstance(found, Tensor) and len(found) else None


def _made_by(net: nn.Module, received: Tensor, inputs: Tensor) -> Callable[[Tensor], Tensor]:
    """What of a network puts out features of the shape that was received: its extractor, or all before its head.

    Raises:
        ConfigError: it has no such features.
    """
    if (problem := split_problem(net)) is not None:
        raise ConfigError(problem)
    parts = split(net)
    with mode(net, training=False), torch.no_grad():
        for compute in (parts.extractor, parts.features):
            if compute(inputs[:1]).shape[1:] == received.shape[1:]:
                return compute
    raise ConfigError(f"found features of shape {tuple(received.shape[1:])}, which are not the network's own")


def _own_net(heard: Heard, overheard: Overheard) -> nn.Module | None:
    """The network that a client keeps after the round; None if it keeps none."""
    engine = overheard.engine
    record = engine.store.read(heard.client)
    kept = unpack(record).get("model") if record is not None else None
    architecture = engine.federation.sites[heard.client].architecture
    return None if kept is None else load(engine.server(0).build(architecture), kept, partial=True)


@dataclass(frozen=True)
class Told:
    """How well a client's training examples can be told from its test examples.

    Attributes:
        source: of the scores.
        area: under their curve.
    """

    source: str
    area: Area


def membership(heard: Heard, overheard: Overheard) -> Told:
    """Tell a client's training examples from its own test part, which the attacker has all to choose from.

    Raises:
        ConfigError: there is nothing in the reply to tell them by, or the client has too few.
    """
    federation = overheard.engine.federation
    site = federation.sites[heard.client]
    if min(len(site.train), len(site.test)) < 2:
        raise ConfigError("found fewer than two training or test examples")
    source, score = _scoring(heard, overheard)
    return Told(source, area(score(site.train).numpy(), score(site.test).numpy()))


def _scoring(heard: Heard, overheard: Overheard) -> tuple[str, Callable[[Examples], Tensor]]:
    """What scores examples, higher for members, and what it was made from."""
    federation = overheard.engine.federation
    if isinstance(sent := heard.reply.get("inputs"), Tensor):
        return "inputs that were sent", lambda examples: -_distances(examples, sent)
    if (net := returned_net(heard, overheard)) is not None:
        return "loss of the client's weights", lambda examples: -_losses(net, examples, federation)
    if (taught := outputs_on_public(heard, overheard)) is not None:
        imitation = _imitation(heard, overheard, *taught)
        return "loss of a network that imitates its outputs", lambda examples: -_losses(imitation, examples, federation)
    raise ConfigError("found neither a whole network nor outputs in the reply")


def _losses(net: nn.Module, examples: Examples, federation: Federation) -> Tensor:
    """The loss of each example (n,)."""
    outputs, targets = predict(net, examples), examples.labels
    if federation.task.has_classes:
        return F.cross_entropy(outputs, targets, reduction="none")
    pairs = zip(outputs.split(1), targets.split(1), strict=True)
    return torch.stack([federation.criterion(output, target) for output, target in pairs])


def _distances(examples: Examples, sent: Tensor) -> Tensor:
    """Of each example how far the nearest of the inputs that were sent is (n,)."""
    flat = sent.flatten(1).float()
    parts = torch.arange(len(examples)).split(_TOGETHER)
    return torch.cat([torch.cdist(examples.batch(at).inputs.flatten(1).float(), flat).amin(1) for at in parts])


def _imitation(heard: Heard, overheard: Overheard, inputs: Tensor, shares: Tensor) -> nn.Module:
    """A network of the client's architecture, taught to put out what the client did for public examples."""
    net = overheard.engine.server(0).build(overheard.engine.federation.sites[heard.client].architecture)
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=_RATE)
    for _ in range(_IMITATION):
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), shares).backward()
        optimizer.step()
    return net.eval()
