"""FedIN: federated intermediate layers learning.

Chan, Jiang, Deng, Ngai. arXiv 2023. https://arxiv.org/abs/2304.00759. The authors revised the text for TMLR:
https://openreview.net/forum?id=Nh3pX3AnPt. Numbers of equations are those of the arXiv version; where two are given,
the second is the revision's. Comments give the lines of the arXiv version's Algorithm 1.

Besides averaging the layers they share, clients exchange features: the input and output of their intermediate
layers for one batch. Each client also trains its intermediate layers to map another client's inputs to that
client's outputs, and a small quadratic programme reconciles this gradient with the one of its own loss.

Symbols
    w         state.weights
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
    with      translation.s_in=8 translation.s_out=4 translation.anchors=40 also:
              down features feature_batch * feature_batches * 12 * float, common 40 * integer + 480 * float;
              up features feature_batch * 12 * float, common 480 * float

Limits
    feature_training=false mu=0.0 equals fedavg sharing.weighting="uniform"
    feature_training=false equals fedprox sharing.weighting="uniform"
    feature_training=true equals fedin feature_training=false on rounds=1
    multiplier=2.0 equals fedin multiplier=2.0 outside="unit"
    noise=1e-9 approaches fedin on optimizer=sgd
    averages each layer over its owners on batchnorm=true
    training.lr=0.0 stays at rest
    privacy.clip=1.0 privacy.epsilon=1.0 privacy.delta=1e-5 never repeats

Departures from the paper
    1. Uploaded pairs are a uniform sample of the last local epoch, features as they were in the forward pass;
       the paper says that they are collected during training and not which.
    2. Of the variant with noise the revision says "We apply 0.8σ to the IN feature inputs and outputs" (section 4.3), a
       deviation of 0.8 sigma, and "z ∼ N(0, 0.8σ²)" (appendix D), one of 0.894 sigma. The first is the default;
       `noise_multiplies="variance"` is the second. It does not say over what sigma is taken: here over the whole batch
       of features, once for s_in and once for s_out; `noise_sigma` also has one sigma a channel and one a feature.
       None of them is differentially private.
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
    14. BatchNorm's running statistics are sent and averaged like weights, as by default in all methods here that have
        `sharing`, so that comparisons are on equal terms. The revision says that "such information is unnecessary to
        transmit to the server" (section 4.3): `sharing.buffers="local"` leaves them at each client. Beside `privacy`
        that is refused, and "drop" keeps them from the server. The arXiv version does not mention them.
    15. All clients begin with the run's initial weights, which the server sends. In the arXiv version "no data is
        received if it is in the initial training process" (section 4.4): in Algorithm 1 a client's w_k is its own at
        first, and becomes the average (l. 15) only in later trainings. Here a client that is drawn for the first time
        in a later round receives (w, S) like everybody.
    16. The arXiv version has the server send to "all the clients" (section 4.4) and to "the sampled clients" (Algorithm
        1, l. 6); here it is those that are drawn for the round.
    17. Both versions say that lambda = 1 "is set for the optimum point of the primal problem" (section 4.2), but by eq.
        13 / 12 that point has lambda = max(0, -2b / a), where a is |G_local|^2 and b the product with G_IN. With 1, as
        in their experiments and by default, Z opposes G_local where b < -a / 2; `rule="exact"` takes the optimum.
    18. `translation` is not in the papers. For networks whose features differ in shape the revision proposes "utilizing
        linear layers to project the dimension of s_in and s_out to the same size", as future work (Limitations). Here
        these layers are fitted on public examples, see `potluck.parts.translation`, and pairs are taken before the
        training, in evaluation mode. It gained nothing where it was measured (`benchmarks/results/six_models.md`).
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from potluck import fl


@dataclass(frozen=True)
class State:
    """The server's weights, and its feature pairs.

    Attributes:
        features: by signature, the pairs s_in (n, ...) and s_out (n, width), oldest first.
        signatures: by architecture, the signature of its features.
    """

    weights: fl.GroupWeights
    features: fl.features.PairStore
    signatures: dict[str, str]


@dataclass(frozen=True)
class TranslatedState(State):
    """With `translation`; `common` holds the anchors' rows among the public examples, and their common features."""

    common: fl.Observed


@dataclass(frozen=True)
class FedIN(fl.privacy.ReleasesFeatures[State]):
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
        noise: Gaussian noise on s_in and s_out in training, in multiples of sigma, their standard deviation. The
            variant "+Noise" has 0.8.
        noise_multiplies: what `noise` multiplies: sigma, the "deviation", or its square, the "variance".
        noise_sigma: one sigma for the whole "batch", for each "channel", or for each "feature"; where that is a single
            number, as with one example in a batch, it is 0.
        privacy: clipping and calibrated noise on what is uploaded, or None.
        translation: common numbers for the features of unlike networks, or None.
        store_capacity: pairs that the server keeps, the oldest leaving first.
        sharing: who averages with whom.
    """

    aligns_classes = True
    unguarded = "pairs of features go from client to client, and no mean is taken of them"
    summed_entries = ("weights", "buffers")

    variants = {
        "exact": {"rule": "exact"},
        "exact, whole": {"rule": "exact", "granularity": "whole"},
        "sequential": {"optimization": "sequential"},
        "noise": {"noise": 0.8},
        "noise by channel": {"noise": 0.8, "noise_multiplies": "variance", "noise_sigma": "channel"},
        "without features": {"feature_training": False},
        "more batches": {"feature_batches": 4, "outside": "unit"},
        "translated": {"translation.s_in": 8, "translation.s_out": 4, "translation.anchors": 40},
    }

    training: fl.LocalTraining = fl.LocalTraining()
    mu: Annotated[float, fl.at_least(0)] = 0.1
    feature_training: bool = True
    optimization: Literal["joint", "sequential"] = "joint"
    rule: Literal["simplified", "exact"] = "simplified"
    multiplier: Annotated[float, fl.at_least(0)] = 1.0
    granularity: Literal["tensor", "whole", "kernel"] = "tensor"
    outside: Literal["half", "unit"] = "half"
    feature_batch: Annotated[int, fl.at_least(2)] = 16
    feature_batches: Annotated[int, fl.at_least(1)] = 1
    noise: Annotated[float, fl.at_least(0)] = 0.0
    noise_multiplies: Literal["deviation", "variance"] = "deviation"
    noise_sigma: Literal["batch", "channel", "feature"] = "batch"
    privacy: fl.privacy.FeaturePrivacy | None = None
    translation: fl.translation.Translation | None = None
    store_capacity: Annotated[int, fl.at_least(2)] = 5000
    sharing: fl.Sharing = fl.Sharing(weighting="uniform")

    def __post_init__(self) -> None:
        super().__post_init__()
        several = not self.noise or self.training.batch_size > 1
        expected = "'batch' where training.batch_size is 1"
        fl.require(several or self.noise_sigma == "batch", "noise_sigma", expected, self.noise_sigma)
        if self.translation:
            self.translation.check_beside(self)

    def needs(self) -> frozenset[fl.Need]:
        by_name = self.sharing.scope in ("layer", "model")
        meeting = fl.features.MEETING if by_name else fl.features.FITTING_FEATURES
        found = fl.Need.PUBLIC_DATA if self.translation else meeting
        return super().needs() | {fl.Need.SPLIT_MODEL, fl.features.MIDDLE, found}

    def init(self, server: fl.Server) -> State:
        weights, to = self.sharing.initial(server), self.translation
        if to:
            return TranslatedState(weights, {}, to.signatures(server), to.begin(server))
        return State(weights, {}, fl.features.signatures(server))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        features, kinds, said = state.features, state.signatures, list[fl.Observed]()
        common = state.common if isinstance(state, TranslatedState) else None
        S = fl.features.drawn(features, self.feature_batch * self.feature_batches, server.rng)  # Alg. 1, l. 5
        sent = self.sharing.send(
            state.weights, cohort, server, features=lambda m: S.get(kinds[m.architecture]), common=common
        )
        means = self.sharing.no_means(server.roster, "weights", "buffers")
        for id, reply in cohort.stream(self.local_update, sent):  # l. 6
            means.add(id, reply)  # l. 3
            features = fl.features.with_pairs(features, reply.get("features"), self.store_capacity)  # l. 4
            said += [reply["common"]] if "common" in reply else []
            del reply
        state = replace(state, weights=means.over(state.weights, "weights", "buffers"), features=features)
        return replace(state, common=fl.translation.agreed(common, said, self.sharing.combine)) if common else state

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        n = self.feature_batch if self.feature_training else 0
        pairs = fl.translation.expected(self.translation, server, member, message, n)
        return fl.Schema(**self.sharing.expected(member, message), **pairs)

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)  # l. 14-15
        model, anchor = client.model, fl.parameters_of(client.model)
        to = fl.translation.translator(self.translation, client, message)
        S, n = to.received(message), self.feature_batch
        pairs = self.released(client, n, to.observed) if self.privacy else to.collected(client, n)
        inner = fl.split(model).intermediate_names & anchor.keys()
        noise = (self.noise, self.noise_multiplies, self.noise_sigma)
        l_local, l_in = fl.features.ObservingLoss(client.criterion, self.mu, *noise), fl.features.FeatureLoss(n)
        joint = S is not None and self.optimization == "joint"  # l. 9
        report = yield fl.Fit(
            model,
            [l_local, l_in] if joint else l_local,  # l. 16, 18 | l. 10
            client.train,
            self.training,
            extras={"anchor": anchor, "features": S, **to.reading},
            combine=self.rule_on(inner) if joint else None,  # l. 19
            keep=n if self.feature_training and not (self.privacy or self.translation) else 0,  # l. 11, 17
        )
        client.note(**report.combined)
        if S and inner and not joint:  # the ablation "w/o Opt": as many steps on the features alone
            data = fl.Examples(S["s_in"], S["s_out"])
            training = replace(self.training, steps=report.steps, batch_size=n)
            extras = {"features": S, **to.reading}
            yield fl.Fit(model, l_in, data, training, extras, trainable=tuple(sorted(inner)), name="features")
        return self.sharing.reply(client, features=pairs or report.kept or None, common=to.anchors)  # l. 20

    def rule_on(self, inner: frozenset[str]) -> fl.projection.Reconcile:
        """Eq. 13, 14 / 12, 13: what becomes of G_local and G_IN on the intermediate layers, and elsewhere."""
        return fl.projection.Reconcile(inner, self.rule, self.multiplier, self.granularity, self.outside)
