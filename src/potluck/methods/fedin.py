"""FedIN: federated intermediate layers learning.

Chan, Jiang, Deng, Ngai. arXiv 2023. https://arxiv.org/abs/2304.00759. The authors revised the text for TMLR:
https://openreview.net/forum?id=Nh3pX3AnPt. Numbers of equations are those of the arXiv version; where two are given,
the second is the revision's.

Besides averaging the layers they share, clients exchange features: the input and output of their intermediate
layers for one batch. Each client also trains its intermediate layers to map another client's inputs to that
client's outputs, and a small quadratic programme reconciles this gradient with the one of its own loss.

Symbols
    w         state.pool
    s_in      features["s_in"]      output of the extractor = input of the intermediate layers
    s_out     features["s_out"]     output of the intermediate layers = input of the classifier
    S         message["features"]   one batch of pairs, the same for all clients and for all steps of the round
    G_local   gradient of the local loss, cross-entropy + (mu / 2) |w - w_sent|^2      (eq. 4 / 3)
    G_IN      gradient of |f(s_in; w_in) - s_out|^2, mean over batch and features      (eq. 8 / 7)
    Z         what the optimiser takes
    lambda    multiplier

Wire
    down      weights |w|, buffers |b|, features feature_batch * feature_batches * (|s_in| + |s_out|)
    up        weights |w|, buffers |b|, features feature_batch * (|s_in| + |s_out|), examples 1

Limits
    feature_training=false mu=0.0 equals fedavg sharing.weighting="uniform"
    feature_training=true equals fedin feature_training=false on rounds=1
    multiplier=2.0 equals fedin multiplier=2.0 outside="unit"
    noise=1e-9 approaches fedin on optimizer=sgd
    training.lr=0.0 stays at rest
    privacy.clip=1.0 privacy.epsilon=1.0 privacy.delta=1e-5 never repeats

Departures from the paper
    1. Uploaded pairs are a uniform sample of the last local epoch, features as they were in the forward pass;
       the paper says that they are collected during training and not which.
    2. The variant with noise (revision, section 4.3) measures the standard deviation over the whole batch of
       features, once for s_in and once for s_out; the paper does not say over what. It is not differentially private.
    3. Clients whose features differ in shape keep separate stores, one a signature; the paper assumes one.
    4. The pass over S normalises with its own batch statistics and leaves the running statistics alone.
    5. Outside the intermediate layers G_IN is zero, so eq. 14 gives (lambda / 2) G_local there (`outside="half"`);
       the revision defines the rule for the intermediate layers only (`outside="unit"`). Adam takes the same steps with
       both, up to its epsilon, as long as lambda is above 0 and there is neither weight decay nor clipping.
    6. In the ablation "w/o Opt" the phase on features has a fresh optimiser, one S, and as many steps as the local
       phase before it; the paper gives no number.
    7. The server keeps the newest 5,000 pairs of each signature (`store_capacity`), first in, first out; the paper
       saves pairs and gives neither a size nor an order of leaving.
    8. In the proximal term, w^(t-1) is read as the weights that the client was sent, as in FedProx.
    9. A reply with one pair alone is not stored: one pair has no batch statistics.
    10. The paper sends one batch S. `feature_batches` sends more and draws one at every step; the default is one.
    11. The exact rule (eq. 13 / 12) projects each tensor by itself, and leaves G_local whole outside the intermediate
        layers. The paper speaks of matrices; `granularity` also offers single kernels and all layers as one vector.
    12. With `privacy`, pairs are not collected in training: before it, the network as it was sent computes them in
        evaluation mode, example by example; they are clipped, and noise of fixed size is added to what is uploaded and
        nowhere else. The revision (appendix D) assumes the bound that clipping enforces, takes the features of weights
        in training, and scales its noise by the features. `noise`, if set, then concerns the training alone.
    13. A client trains for one epoch by default (`training.epochs`); the papers train for five.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck.core.batchnorm import keep_statistics
from potluck.core.errors import ConfigError
from potluck.core.examples import Batch, Examples
from potluck.core.federation import ClientId, Criterion, Member
from potluck.core.fields import at_least
from potluck.core.fit import Extras, Fit, LocalTraining, Observed
from potluck.core.message import Message
from potluck.core.method import ClientWork, Need, Releases, on_client
from potluck.core.roles import Client, Cohort, Replies, Server
from potluck.core.schema import Schema, UpTo, floats
from potluck.core.weights import Weights, parameters_of, without_conflict
from potluck.models.contract import feature_shapes, intermediate_names, split
from potluck.parts.losses import squared_distance
from potluck.parts.privacy import FeaturePrivacy
from potluck.parts.sharing import Pool, SharesWeights, Sharing


@dataclass(frozen=True)
class State:
    """The server's weights, and its feature pairs.

    Attributes:
        features: by signature, the pairs s_in (n, ...) and s_out (n, width), oldest first.
        signatures: by architecture, the signature of its features.
    """

    pool: Pool
    features: dict[str, Observed]
    signatures: dict[str, str]


@dataclass(frozen=True)
class FedIN(SharesWeights[State]):
    """Hyper-parameters of FedIN.

    Attributes:
        training: a client's local training.
        mu: strength of the proximal term; the papers give mu / 2 = 0.05. 0 is the ablation "w/o Prox".
        feature_training: False is the ablation "w/o IN": no features are sent, which leaves FedProx.
        optimization: "joint" reconciles the gradients at every step; "sequential" is the ablation "w/o Opt":
            the whole local phase, then as many steps on the features alone.
        rule: "simplified" Z = G_IN + (lambda / 2) G_local (eq. 14 / 13), as in all the papers' experiments;
            "exact" projects G_IN so that it does not oppose G_local (eq. 13 / 12).
        multiplier: lambda of the simplified rule.
        granularity: what the exact rule projects: each "tensor", the "whole" of the layers, or each "kernel".
        outside: gradient of extractor and classifier, "half" for (lambda / 2) G_local or "unit" for G_local.
        feature_batch: pairs that a client sends and receives.
        feature_batches: how many batches of pairs a client receives; each step draws one batch from them.
        noise: Gaussian noise on s_in and s_out in training, in multiples of their standard deviation. The variant
            "+Noise" has 0.8.
        privacy: clipping and calibrated noise on what is uploaded, or None.
        store_capacity: pairs that the server keeps, the oldest leaving first.
        sharing: who averages with whom.
    """

    variants = {
        "exact": {"rule": "exact"},
        "exact, whole": {"rule": "exact", "granularity": "whole"},
        "sequential": {"optimization": "sequential"},
        "noise": {"noise": 0.8},
        "without features": {"feature_training": False},
        "more batches": {"feature_batches": 4, "outside": "unit"},
    }

    training: LocalTraining = LocalTraining()
    mu: Annotated[float, at_least(0)] = 0.1
    feature_training: bool = True
    optimization: Literal["joint", "sequential"] = "joint"
    rule: Literal["simplified", "exact"] = "simplified"
    multiplier: Annotated[float, at_least(0)] = 1.0
    granularity: Literal["tensor", "whole", "kernel"] = "tensor"
    outside: Literal["half", "unit"] = "half"
    feature_batch: Annotated[int, at_least(2)] = 16
    feature_batches: Annotated[int, at_least(1)] = 1
    noise: Annotated[float, at_least(0)] = 0.0
    privacy: FeaturePrivacy | None = None
    store_capacity: Annotated[int, at_least(2)] = 5000
    sharing: Sharing = Sharing(weighting="uniform")

    def __post_init__(self) -> None:
        if self.privacy and self.sharing.buffers == "local":
            raise ConfigError(
                "sharing.buffers: found 'local' beside privacy; a client's own statistics would shape the features that"
                " are released, and nothing bounds how; expected 'average' or 'drop'"
            )

    @property
    def releases_privately(self) -> bool:
        """Whether features leave clients, clipped and with noise."""
        return self.privacy is not None and self.feature_training

    def needs(self) -> frozenset[Need]:
        return super().needs() | {Need.SPLIT_MODEL}

    def init(self, server: Server) -> State:
        architectures = sorted({member.architecture for member in server.roster.values()})
        return State(
            pool=self.sharing.initial(server),
            features={},
            signatures={
                name: signature(feature_shapes(server.build(name), server.input_shape)) for name in architectures
            },
        )

    def round(self, state: State, cohort: Cohort, server: Server) -> State:
        drawn = {name: self._draw(pairs, server.rng) for name, pairs in sorted(state.features.items())}
        messages: dict[ClientId, Message] = {}
        for i in cohort.ids:
            member = server.roster[i]
            features = drawn.get(state.signatures[member.architecture])
            messages[i] = Message(**self.sharing.share(state.pool, member), features=features)
        replies = cohort.ask(self.local_update, messages)
        return State(
            pool=self.sharing.merge(state.pool, replies, server.roster),
            features=self._stored(state.features, replies),
            signatures=state.signatures,
        )

    def replies(self, handler: str, member: Member, message: Message, server: Server) -> Schema:
        n, (s_in, s_out) = UpTo(self.feature_batch), server.about(member.architecture, feature_shapes)
        pairs = Schema(s_in=floats(n, *s_in), s_out=floats(n, *s_out)) if self.feature_training else None
        return Schema(**self.sharing.expected(member, message), features=pairs)

    @on_client
    def local_update(self, client: Client, message: Message) -> ClientWork:
        self.sharing.receive(client, message)
        model, received = client.model, message.get("features")
        joint = received is not None and self.optimization == "joint"
        anchor, feature_loss = parameters_of(model), FeatureLoss(self.feature_batch)
        inner = intermediate_names(model) & anchor.keys()
        keep, pairs = self.feature_batch if self.feature_training else 0, None
        if self.privacy and keep:
            keep, pairs = 0, self.privacy.release(client, partial(observed, model), keep)
        report = yield Fit(
            model,
            [LocalLoss(client.criterion, self.mu, self.noise), *([feature_loss] if joint else [])],
            client.train,
            self.training,
            extras={"anchor": anchor, "features": received},
            combine=Reconcile(inner, self) if joint else None,
            keep=keep,
        )
        client.note(**report.combined)
        if received is not None and inner and not joint:
            yield Fit(
                model,
                feature_loss,
                Examples(received["s_in"], received["s_out"]),
                replace(self.training, steps=report.steps, batch_size=self.feature_batch),
                extras={"features": received},
                trainable=tuple(sorted(inner)),
            )
        return Message(**self.sharing.reply(client), features=pairs or report.kept or None)

    def privacy_statement(self, releases: Mapping[ClientId, Releases]) -> str | None:
        if self.privacy is None:
            reason = "noise on the scale of the features themselves is no private mechanism"
            return f"No epsilon can be stated: {reason}." if self.noise else None
        return self.privacy.statement(releases)

    def _draw(self, pairs: Observed, rng: torch.Generator) -> Observed:
        """S, uniformly without replacement."""
        rows = torch.randperm(len(pairs["s_in"]), generator=rng)[: self.feature_batch * self.feature_batches]
        return {name: tensor[rows] for name, tensor in pairs.items()}

    def _stored(self, store: dict[str, Observed], replies: Replies) -> dict[str, Observed]:
        """The store after the replies' pairs came in and the oldest went."""
        store = dict(store)
        for reply in replies.values():
            pairs = reply.get("features")
            if pairs and len(pairs["s_in"]) > 1:  # one pair alone has no batch statistics
                name = signature(pairs[key].shape[1:] for key in ("s_in", "s_out"))
                old = store.get(name, {key: tensor[:0] for key, tensor in pairs.items()})
                store[name] = {k: torch.cat([old[k], pairs[k]])[-self.store_capacity :] for k in pairs}
        return store


@dataclass(frozen=True)
class LocalLoss:
    """Eq. 4 / 3: the task's loss, and the pull towards the weights that were sent."""

    criterion: Criterion
    mu: float
    noise: float = 0.0

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> tuple[Tensor, Observed]:
        inputs, targets = batch
        parts = split(net)
        s_in = self._noisy(parts.extractor(inputs))
        s_out = self._noisy(parts.intermediate(s_in))
        loss = self.criterion(parts.classifier(s_out), targets)
        if self.mu:
            loss = loss + self.mu / 2 * squared_distance(net, extras["anchor"])
        return loss, {"s_in": s_in, "s_out": s_out}

    def _noisy(self, features: Tensor) -> Tensor:
        """Revision, section 4.3: features + noise * z, z as spread as they are; what follows is trained on them."""
        if not self.noise:
            return features
        return features + self.noise * features.detach().std() * torch.randn_like(features)


@dataclass(frozen=True)
class FeatureLoss:
    """Eq. 8 / 7: how far the intermediate layers are from mapping the received s_in to the received s_out."""

    batch: int

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> Tensor:
        s_in, s_out = extras["features"]["s_in"], extras["features"]["s_out"]
        if len(s_in) > self.batch:
            rows = torch.randperm(len(s_in))[: self.batch]
            s_in, s_out = s_in[rows], s_out[rows]
        with keep_statistics(net):
            return F.mse_loss(split(net).intermediate(s_in), s_out)


@dataclass(frozen=True)
class Reconcile:
    """Z from G_local and G_IN on the intermediate layers, and the gradient of the other layers.

    Noted is the share of tensors in which the two oppose each other, b = <G_IN, G_local> < 0 (eq. 13 / 12).
    """

    inner: frozenset[str]
    method: FedIN

    def __call__(self, gradients: list[Weights], extras: Extras) -> tuple[Weights, Observed]:
        local, feature = gradients
        ours = {n: g for n, g in {**local, **feature}.items() if n in self.inner}
        half = self.method.multiplier / 2
        outer = half if self.method.outside == "half" and self.method.rule == "simplified" else 1.0
        z = {name: outer * g for name, g in local.items() if name not in self.inner}
        # A loss that does not depend on a weight has a gradient of zero there.
        local, feature = ({n: g.get(n, torch.zeros_like(like)) for n, like in ours.items()} for g in (local, feature))
        opposed = [feature[n].flatten() @ local[n].flatten() < 0 for n in local]
        seen = {"conflict": torch.stack(opposed).float().mean()} if opposed else {}
        if self.method.rule == "exact":
            return {**z, **without_conflict(feature, local, self.method.granularity)}, seen  # eq. 13 / 12
        return {**z, **{n: feature[n] + half * local[n] for n in local}}, seen  # eq. 14 / 13


def observed(net: nn.Module, inputs: Tensor) -> Observed:
    """The pair of each example, of the network as it is."""
    parts = split(net)
    s_in = parts.extractor(inputs)
    return {"s_in": s_in, "s_out": parts.intermediate(s_in)}


def signature(shapes: Iterable[torch.Size]) -> str:
    """The shapes of s_in and s_out, as text: only clients of one signature can use one another's features."""
    return " > ".join("x".join(map(str, shape)) for shape in shapes)
