"""Features that clients exchange: the input s_in and the output s_out of their intermediate layers.

Chan, Jiang, Deng, Ngai. arXiv 2023. https://arxiv.org/abs/2304.00759. Where two equations are given, the second is that
of the authors' revision, https://openreview.net/forum?id=Nh3pX3AnPt.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck.core.federation import Criterion, Member
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.inputs import Inputs
from potluck.core.meeting import meetings
from potluck.core.needs import Need, Offer
from potluck.core.nets.batchnorm import keep_statistics
from potluck.core.nets.splitting import is_planned, plan_of, split_problem
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import Extras, Observed
from potluck.core.roles import Server
from potluck.core.schema import Schema, UpTo, floats
from potluck.models.split import Passed, Split, feature_shapes, split
from potluck.parts.losses import squared_distance

FeaturePlace = Literal["s_in", "s_out"]
"""Where features are taken: before or after the intermediate layers."""

PLACES: tuple[FeaturePlace, FeaturePlace] = ("s_in", "s_out")
"""Both of them."""

SigmaOf = Literal["batch", "channel", "feature"]
"""What numbers of a batch of features have a standard deviation in common."""

PairStore = dict[str, Observed]
"""By signature, pairs s_in (n, ...) and s_out (n, ...) with aligned rows, oldest first."""


def _nothing_fits(offer: Offer, *, layers: bool) -> str | None:
    """That no client has layers, if these are averaged by name, or shapes of features in common with another."""
    met = layers and any(one.weights_met for one in meetings(offer.nets, offer.assigned.values()))
    if len(offer.assigned) < 2 or met:
        return None
    if any(split_problem(net) for net in offer.nets.values()):
        return None  # which is another need
    found = {name: signature(feature_shapes(net, offer.input_shape)) for name, net in offer.nets.items()}
    if max(Counter(found[name] for name in offer.assigned.values()).values()) > 1:
        return None
    shown = ", ".join(f"{name} {shapes}" for name, shapes in found.items())
    what, any_of = ("layers and features", "either") if layers else ("features of one shape", "them")
    return f"it exchanges {what}, and no client has {any_of} in common with another ({shown})"


_ALIKE = (
    "give several clients one model, or models whose extractors and last layers give features of one shape, or use a"
    " method that exchanges something else, such as fedmd or fml"
)
MEETING = Need(
    "layers or features of one shape that clients have in common",
    partial(_nothing_fits, layers=True),
    _ALIKE,
    covers=(Need.NESTED_LAYERS,),
)
"""Of methods that average layers by name, and exchange features which fit only networks with features of that shape."""

FITTING_FEATURES = Need(
    "features of one shape that clients have in common", partial(_nothing_fits, layers=False), _ALIKE
)
"""Of the same, where no layers are averaged across architectures."""


def _other_stem(offer: Offer) -> str | None:
    """Whose features have another shape than those that the server's network reads."""
    server = offer.server_architecture
    nets = {server: offer.nets[server] if server in offer.nets else offer.build(server), **offer.nets}
    if any(split_problem(net) for net in nets.values()):
        return None  # which is another need
    shapes = {name: tuple(feature_shapes(net, offer.input_shape)[0]) for name, net in nets.items()}
    for name, shape in shapes.items():
        if shape != shapes[server]:
            return f"the server's network, {server}, reads features of shape {shapes[server]}, and {name} has {shape}"
    return None


ONE_STEM = Need("features that the server's network reads", _other_stem, "use models with one stem")
"""Of methods whose server's network goes on from what clients' extractors give."""


def _no_middle(offer: Offer) -> str | None:
    """The first network that cannot go on from features that it is given."""
    for name, net in offer.nets.items():
        if split_problem(net) is None and (problem := split(net).middle_problem()):
            return f"{name}: it lets networks go on from features, and {type(net).__name__} {problem}"
    return None


def _every_token(offer: Offer) -> str | None:
    """The first network whose features are those of every token."""
    for name, net in offer.nets.items():
        if is_planned(net) and plan_of(net).reads_every_token:
            return (
                f"{name}: its head reads every token, so that features would be whole texts, whose words can be found"
            )
    return None


MIDDLE = Need(
    "networks that go on from features alone",
    _no_middle,
    "its inputs would have to be sent with the features, so use a method that only reads features, such as fedproto",
)
"""Of methods that feed features into networks behind their extractors."""

ONE_ROW = Need(
    "features that are not a row for each token",
    _every_token,
    "let forward take one token, or a mean over them, before its last layer",
)
"""Of methods that send what heads read."""


def observed(net: nn.Module, inputs: Inputs) -> Observed:
    """The pair of each example, computed by the current network."""
    s_in, s_out, _ = split(net).passed(inputs)
    return {"s_in": s_in, "s_out": s_out}


def signature(shapes: Iterable[torch.Size]) -> str:
    """Shapes of features as text: only clients of one signature can use one another's."""
    return " > ".join("x".join(map(str, shape)) for shape in shapes)


def signatures(server: Server, *places: FeaturePlace) -> dict[str, str]:
    """By architecture of the federation, the signature of its features at these places; at both if none is named."""
    names = sorted({member.architecture for member in server.roster.values()})
    return {name: signature(feature_shape(server, name, place) for place in places or PLACES) for name in names}


def feature_shape(server: Server, architecture: str | None, place: FeaturePlace) -> torch.Size:
    """The shape of one example's features in an architecture, the server's own if None."""
    return server.about(architecture, feature_shapes)[PLACES.index(place)]


def common_width(server: Server) -> int:
    """How wide the features are that all clients' last layers read.

    Raises:
        ConfigError: they differ.
    """
    names = sorted({member.architecture for member in server.roster.values()})
    widths = {name: feature_shape(server, name, "s_out").numel() for name in names}
    if len(set(widths.values())) > 1:
        found = ", ".join(f"{name} {width}" for name, width in widths.items())
        raise ConfigError(f"last layers read features of different widths: {found}; expected one width")
    return next(iter(widths.values()))


def expected_pairs(server: Server, member: Member, most: int) -> Schema:
    """Up to `most` pairs as this client's network makes them."""
    n = UpTo(most)
    return Schema(**{place: floats(n, *feature_shape(server, member.architecture, place)) for place in PLACES})


def drawn(store: PairStore, most: int, rng: torch.Generator) -> PairStore:
    """Up to `most` pairs of each signature, uniformly without replacement."""
    found: PairStore = {}
    for name, pairs in sorted(store.items()):
        rows = torch.randperm(len(pairs["s_in"]), generator=rng)[:most]
        found[name] = {place: features[rows] for place, features in pairs.items()}
    return found


def with_pairs(store: PairStore, pairs: Observed | None, capacity: int) -> PairStore:
    """The store after a client's pairs came in and the oldest of their signature beyond `capacity` went.

    A single pair has no batch statistics and is not stored.
    """
    if not pairs or len(pairs["s_in"]) < 2:
        return store
    name = signature(pairs[place].shape[1:] for place in PLACES)
    old = store.get(name, {place: features[:0] for place, features in pairs.items()})
    return {**store, name: {place: torch.cat([old[place], pairs[place]])[-capacity:] for place in pairs}}


@dataclass(frozen=True)
class ObservingLoss:
    """Eq. 4 / 3: the task's loss + (mu / 2) |w - w_sent|^2; the pair of each example is observed on the way.

    Attributes:
        criterion: the task's loss.
        mu: strength of the pull towards the weights that were sent, which are the extras' "anchor".
        noise: of Gaussian noise on s_in and on s_out, in multiples of sigma, their standard deviation (revision,
            section 4.3); what comes behind them is trained on the noisy features, and these are observed.
        noise_multiplies: sigma, the "deviation", or its square, the "variance".
        noise_sigma: whether there is one sigma for the whole "batch", one a "channel", or one a "feature".
    """

    criterion: Criterion
    mu: float
    noise: float = 0.0
    noise_multiplies: Literal["deviation", "variance"] = "deviation"
    noise_sigma: SigmaOf = "batch"

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> tuple[Tensor, Observed]:
        """Of one batch; without mu and noise the loss is the task's, bit for bit."""
        s_in, s_out, outputs = self._passed(split(net), batch.inputs)
        loss = self.criterion(outputs, batch.targets)
        if self.mu:
            loss = loss + self.mu / 2 * squared_distance(net, extras["anchor"])
        return loss, {"s_in": s_in, "s_out": s_out}

    def _passed(self, parts: Split, inputs: Tensor) -> Passed:
        """What the parts give, each of the noisy features before it."""
        if not self.noise:
            return parts.passed(inputs)
        s_in = self._noisy(parts, parts.extractor(inputs))
        s_out = self._noisy(parts, parts.intermediate(s_in))
        return Passed(s_in, s_out, parts.classifier(s_out))

    def _noisy(self, parts: Split, features: Tensor) -> Tensor:
        multiple = self.noise if self.noise_multiplies == "deviation" else math.sqrt(self.noise)
        channels = 1 + parts.channel_axis(features.dim() - 1)
        return features + multiple * _sigma(features.detach(), self.noise_sigma, channels) * torch.randn_like(features)


@dataclass(frozen=True)
class FeatureLoss:
    """Eq. 8 / 7: how far the intermediate layers are from mapping the received s_in to the received s_out.

    The pairs are the extras' "features". Running statistics are left alone. Where the extras have a "down", the fields
    of a `LinearMap`, it leads from outputs to the features in which s_out is given.

    Attributes:
        batch: pairs that a step takes; where more were received they are drawn anew at every step.
    """

    batch: int

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> Tensor:
        """The mean squared error over pairs and features; the batch of examples has no part in it."""
        pairs: Mapping[str, Tensor] = extras["features"]
        s_in, s_out = pairs["s_in"], pairs["s_out"]
        if len(s_in) > self.batch:
            rows = torch.randperm(len(s_in))[: self.batch]
            s_in, s_out = s_in[rows], s_out[rows]
        with keep_statistics(net):
            found = split(net).intermediate(s_in)
        return F.mse_loss(LinearMap(**extras["down"])(found) if "down" in extras else found, s_out)


@dataclass(frozen=True, eq=False)
class LinearMap:
    """An affine map of features, each example's as a row of numbers.

    Attributes:
        matrix: (p, q).
        origin: what is subtracted before, (p,).
        target: what is added after, (q,).
    """

    matrix: Tensor
    origin: Tensor
    target: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """Of features (n, ...) of p numbers each, q of each: (n, q)."""
        return (features.flatten(1) - self.origin) @ self.matrix + self.target


def _sigma(features: Tensor, of: SigmaOf, channels: int) -> Tensor:
    """Standard deviations of features (batch, ...) with these channels; of a number that is alone, 0."""
    if of == "batch":
        return features.std()
    kept = {channels} if of == "channel" else set(range(1, features.dim()))
    axes = [axis for axis in range(features.dim()) if axis not in kept]
    count = math.prod(features.shape[axis] for axis in axes)
    return features.std(axes, correction=min(1, count - 1), keepdim=True)
