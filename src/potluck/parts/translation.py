"""Features of unlike networks in common numbers, by linear maps that are fitted on public examples.

Channels of unlike networks mean different things, and nothing that a client knows of its own features tells what
another's mean: a map that keeps them well is as good as any rotation of it, and means by class agree on no more
directions than there are classes. So there are anchors, public examples that all have, and of each its common features,
a row of T. A client's map down is the ridge regression of T on its own features of the anchors, its map up that of its
own s_in on T: both follow from its weights, from T and from public data alone. The server moves T to the whitened
matrix that is nearest to the mean of what the clients' maps make of the anchors: in each round a step of orthogonal
iteration to the generalised canonical correlation analysis of largest variance (Kettenring. Biometrika 1971).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from potluck.core.federation import Member
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.fields import Checked, above, at_least, require
from potluck.core.ground.inputs import Inputs
from potluck.core.message import Message
from potluck.core.nets.modes import mode
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import Observed
from potluck.core.roles import Client, Server
from potluck.core.schema import Schema, UpTo, floats
from potluck.models.split import feature_shapes
from potluck.parts.features import PLACES, LinearMap, expected_pairs, observed, signature, signatures
from potluck.parts.means import Aggregate
from potluck.parts.privacy import ReleasesFeatures
from potluck.parts.public import drawn_rows, public_of

_TOGETHER = 64  # anchors in a pass


@dataclass(frozen=True)
class Translation(Checked):
    """How clients bring their features into common numbers.

    Attributes:
        s_in: how many of them stand for an example's s_in.
        s_out: and for its s_out.
        anchors: public examples on which the maps are fitted; all of them if there are fewer.
        ridge: what a map's squared weights cost, in multiples of the mean squared length of what it reads.
    """

    s_in: Annotated[int, at_least(1)] = 64
    s_out: Annotated[int, at_least(1)] = 16
    anchors: Annotated[int, at_least(2)] = 400
    ridge: Annotated[float, above(0)] = 1.0

    def __post_init__(self) -> None:
        most = max(self.widths.values())
        require(most < self.anchors, "anchors", f"more than the {most} common features of an example", self.anchors)

    def check_beside(self, method: ReleasesFeatures[Any]) -> None:
        """Check that a method's other options mean something beside it.

        Raises:
            ConfigError: they do not.
        """
        known = method.sharing.buffers == "average" or not method.sharing.averages
        require(known, "sharing.buffers", "'average' with translation", method.sharing.buffers)
        require(method.feature_training, "feature_training", "true with translation", method.feature_training)
        quiet = not method.noise or method.privacy is not None
        require(quiet, "noise", "0 with translation, or privacy", method.noise)

    @property
    def widths(self) -> dict[str, int]:
        """By place, how many common features an example has."""
        return {"s_in": self.s_in, "s_out": self.s_out}

    def signatures(self, server: Server) -> dict[str, str]:
        """By architecture, the signature of its common features, which is that of all."""
        common = signature(torch.Size([width]) for width in self.widths.values())
        return dict.fromkeys(signatures(server), common)

    def begin(self, server: Server) -> Observed:
        """The anchors' "rows" and their T at first: the principal components of what the server's network sees.

        Raises:
            ConfigError: there are too few public examples, or features, for so many common ones.
        """
        rows = drawn_rows(server, self.anchors)
        for (place, width), shape in zip(self.widths.items(), server.about(None, feature_shapes), strict=True):
            if width > min(len(rows) - 1, shape.numel()):
                raise ConfigError(
                    f"translation.{place}: found {width}; expected at most {min(len(rows) - 1, shape.numel())}, since"
                    f" there are {len(rows)} anchors and {shape.numel()} features of the server's network"
                )
        seen = _seen(server.build(), public_of(server).take(rows))
        return {"rows": rows, **{place: _components(seen[place], width) for place, width in self.widths.items()}}


class OwnFeatures:
    """A network's features as they are: nothing is translated.

    Attributes:
        anchors: no word on anchors.
        reading: no extras.
    """

    anchors: Observed | None = None
    reading: Mapping[str, Any] = {}

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def observed(self, inputs: Inputs) -> Observed:
        """The pair of each example."""
        return observed(self.net, inputs)

    def collected(self, client: Client, count: int) -> Observed | None:
        """None, since pairs are collected in training."""
        return None

    def received(self, message: Message) -> Observed | None:
        """The pairs that were sent, if any."""
        return message.get("features")


class CommonFeatures(OwnFeatures):
    """The maps between a network's features and common ones, of its weights as they are now.

    Attributes:
        anchors: what the maps down make of the anchors.
        reading: extras by which a `FeatureLoss` reads the network's outputs in common features.
    """

    def __init__(self, to: Translation, client: Client, common: Observed) -> None:
        super().__init__(client.model)
        seen = _seen(client.model, public_of(client).take(common["rows"]))
        self._down = {place: _regression(common[place], seen[place], to.ridge) for place in PLACES}
        self._up = _regression(seen["s_in"], common["s_in"], to.ridge)
        self._shape = feature_shapes(client.model, client.train.input_shape)[0]
        self.anchors = {place: self._down[place](seen[place]) for place in PLACES}
        self.reading = {"down": vars(self._down["s_out"])}

    def observed(self, inputs: Inputs) -> Observed:
        """The pair of each example in common features."""
        return {place: self._down[place](features) for place, features in super().observed(inputs).items()}

    def collected(self, client: Client, count: int) -> Observed:
        """Common pairs of so many of the client's examples, or of as many as it has, in evaluation mode."""
        rows = torch.randperm(len(client.train), generator=client.rng)[:count]
        with mode(self.net, training=False), torch.no_grad():
            return self.observed(client.train.batch(rows).inputs)

    def received(self, message: Message) -> Observed | None:
        """Common pairs with s_in in the shape that the network's intermediate layers read; s_out stays common."""
        pairs = super().received(message)
        return pairs and {**pairs, "s_in": self._up(pairs["s_in"]).unflatten(1, self._shape)}


def translator(to: Translation | None, client: Client, message: Message) -> OwnFeatures:
    """How a client's features are exchanged: as they are, or in common ones that the server sent."""
    return OwnFeatures(client.model) if to is None else CommonFeatures(to, client, message["common"])


def agreed(common: Observed, said: Sequence[Observed], combine: Aggregate) -> Observed:
    """The anchors' rows and the next T, after clients have said what their maps make of the anchors."""
    means = {place: combine([one[place] for one in said], [1.0] * len(said)) for place in PLACES if said}
    return {**common, **{place: _whitened(mean) for place, mean in means.items()}}


def expected(to: Translation | None, server: Server, member: Member, message: Message, most: int) -> dict[str, Schema]:
    """The schema of up to `most` pairs, and of what the client's maps make of the anchors."""
    if to is None:
        return {"features": expected_pairs(server, member, most)} if most else {}
    n, common = UpTo(most), message["common"]
    return {
        "features": Schema(**{place: floats(n, width) for place, width in to.widths.items()}),
        "common": Schema(**{place: floats(*common[place].shape) for place in PLACES}),
    }


def _seen(net: nn.Module, examples: Examples) -> Observed:
    """The features of each example by a network in evaluation mode, each as a row of numbers."""
    with mode(net, training=False), torch.no_grad():
        seen = [observed(net, batch.inputs) for batch in examples.batches(_TOGETHER)]
    return {place: torch.cat([one[place].flatten(1) for one in seen]) for place in PLACES}


def _regression(of: Tensor, on: Tensor, ridge: float) -> LinearMap:
    """The ridge regression of some numbers (n, p) on others (n, q), solved among the n rows."""
    x, y = on - on.mean(0), of - of.mean(0)
    products = x @ x.T
    penalty = ridge * products.diagonal().mean().clamp(min=torch.finfo(x.dtype).tiny)
    weights = torch.linalg.solve(products + penalty * torch.eye(len(x), dtype=x.dtype), y)
    return LinearMap(x.T @ weights, on.mean(0), of.mean(0))


def _components(features: Tensor, width: int) -> Tensor:
    """The first principal components of features (n, p), of mean 0 and variance 1: (n, width)."""
    return _whitened(torch.linalg.svd(features - features.mean(0), full_matrices=False)[0][:, :width])


def _whitened(x: Tensor) -> Tensor:
    """Of all numbers (n, width) that have mean 0, variance 1 and no correlation, those nearest to these."""
    left, _, right = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    return left @ right * len(x) ** 0.5
