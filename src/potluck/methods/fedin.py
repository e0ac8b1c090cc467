"""FedIN: federated intermediate layers learning.

Chan, Ngai. arXiv 2023, https://arxiv.org/abs/2304.00759; equation numbers below are this text's (S0), those of
its revision with noise and privacy stand behind the stroke.

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
    down      weights |w|, buffers |b|, features batch * (|s_in| + |s_out|)
    up        weights |w|, buffers |b|, features batch * (|s_in| + |s_out|), examples 1

Limits
    feature_training=false mu=0.0 equals fedavg sharing.weighting="uniform"
    feature_training=true equals fedin feature_training=false on rounds=1
    noise=0.0 feature_batches=1 equals fedin
    training.lr=0.0 stays at rest

Departures from the paper
    1. Uploaded pairs are a uniform sample of the last local epoch, features as they were in the forward pass;
       the paper says that they are collected during training and not which.
    2. The variant with noise (revision, section 4.3) measures the standard deviation over the whole batch of
       features, once for s_in and once for s_out; the paper does not say over what. It is not differentially private.
    3. Clients whose features differ in shape keep separate stores, one a signature; the paper assumes one.
    4. The pass over S normalises with its own batch statistics and leaves the running statistics alone.
    5. Outside the intermediate layers G_IN is zero, so eq. 14 gives (lambda / 2) G_local there (`outside="half"`);
       the revision defines the rule for the intermediate layers only (`outside="unit"`). Adam makes them equal.
    6. In the ablation "w/o Opt" the phase on features has a fresh optimiser and, like the joint rule, one S.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck.core.batchnorm import keep_statistics
from potluck.core.examples import Batch, Examples
from potluck.core.federation import ClientId, Criterion, Member
from potluck.core.fit import Extras, Fit, LocalTraining, Observed
from potluck.core.message import Message
from potluck.core.method import ClientWork, Need, on_client
from potluck.core.roles import Client, Cohort, Replies, Server
from potluck.core.schema import Schema, UpTo, floats
from potluck.core.sharing import Pool, SharesWeights, Sharing
from potluck.core.weights import Weights, parameters_of, without_conflict
from potluck.losses import squared_distance
from potluck.models.contract import feature_shapes, intermediate_names, split
from potluck.privacy import FeaturePrivacy


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

    training: LocalTraining = LocalTraining()
    mu: float = 0.1
    feature_training: bool = True
    optimization: Literal["joint", "sequential"] = "joint"
    rule: Literal["simplified", "exact"] = "simplified"
    multiplier: float = 1.0
    granularity: Literal["tensor", "whole", "kernel"] = "tensor"
    outside: Literal["half", "unit"] = "half"
    feature_batch: int = 16
    feature_batches: int = 1
    noise: float = 0.0
    privacy: FeaturePrivacy | None = None
    store_capacity: int = 5000
    sharing: Sharing = Sharing(weighting="uniform")

    def __post_init__(self) -> None:
        at_least = {"mu": 0, "multiplier": 0, "feature_batch": 2, "feature_batches": 1, "noise": 0, "store_capacity": 2}
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, found {getattr(self, name)}")

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
        model, received = client.model, message["features"]
        joint = received is not None and self.optimization == "joint"
        inner, feature_loss = intermediate_names(model), FeatureLoss(self.feature_batch)
        report = yield Fit(
            model,
            [LocalLoss(client.criterion, self.mu, self.noise), *([feature_loss] if joint else [])],
            client.train,
            self.training,
            extras={"anchor": parameters_of(model), "features": received},
            combine=Reconcile(inner, self) if joint else None,
            keep=self.feature_batch if self.feature_training else 0,
        )
        if received is not None and not joint:
            yield Fit(
                model,
                feature_loss,
                Examples(received["s_in"], received["s_out"]),
                replace(self.training, steps=report.steps, batch_size=self.feature_batch),
                extras={"features": received},
                trainable=tuple(sorted(inner)),
            )
        pairs = self.privacy.protect(report.kept, client.rng) if self.privacy else report.kept
        return Message(**self.sharing.reply(client), features=pairs or None)

    def privacy_statement(self, releases: Mapping[ClientId, int]) -> str | None:
        if self.privacy is None:
            reason = "noise on the scale of the features themselves is no private mechanism"
            return f"No epsilon can be stated: {reason}." if self.noise else None
        most = max(releases.values(), default=0)
        epsilon = self.privacy.spent(most) if most else 0.0
        return (
            f"Features: epsilon {epsilon:.3g} at delta {self.privacy.delta:g} for the client drawn most often, {most}"
            " times. Weights are sent as they are, so no epsilon can be stated for the run as a whole."
        )

    def _draw(self, pairs: Observed, rng: torch.Generator) -> Observed:
        """S, uniformly without replacement."""
        rows = torch.randperm(len(pairs["s_in"]), generator=rng)[: self.feature_batch * self.feature_batches]
        return {name: tensor[rows] for name, tensor in pairs.items()}

    def _stored(self, store: dict[str, Observed], replies: Replies) -> dict[str, Observed]:
        """The store after the replies' pairs came in and the oldest went."""
        store = dict(store)
        for pairs in replies.entries("features"):
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
    """Z from G_local and G_IN on the intermediate layers, and the gradient of the other layers."""

    inner: frozenset[str]
    method: FedIN

    def __call__(self, gradients: list[Weights], extras: Extras) -> Weights:
        local, feature = gradients
        half = self.method.multiplier / 2
        outer = half if self.method.outside == "half" and self.method.rule == "simplified" else 1.0
        z = {name: outer * g for name, g in local.items() if name not in self.inner}
        local, feature = ({n: g for n, g in found.items() if n in self.inner} for found in (local, feature))
        if self.method.rule == "exact":
            return {**z, **without_conflict(feature, local, self.method.granularity)}  # eq. 13 / 12
        return {**z, **{n: feature[n] + half * local[n] for n in local}}  # eq. 14 / 13


def signature(shapes: Iterable[torch.Size]) -> str:
    """The shapes of s_in and s_out, as text: only clients of one signature can use one another's features."""
    return " > ".join("x".join(map(str, shape)) for shape in shapes)
