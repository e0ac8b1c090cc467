"""Velo: Felo with a conditional VAE on the server.

Chan, Ngai. "Exploiting Features and Logits in Heterogeneous Federated Learning", Computer Networks 2025.
https://arxiv.org/abs/2210.15527.

As in Felo clients report mid-level features and logits by class. The server does not average the features: it fits
a variational auto-encoder, conditional on the class, to them, and sends one synthetic feature a class instead.

Features are sent as they are, one vector an example. A class with one example has that example's logits for a mean.

Symbols
    f_k       client.model, kept by the client unless weights are shared
    h, z      mid-level features and logits of one example
    s_in      the extractor's output, which replay takes for h
    g         the layers behind the mid-level features, up to the logits
    H, Z      message["features"], message["logits"]: by class y a synthetic feature H_y, the average logits Z_y
    m, s      mean and logarithm of the variance that the encoder gives the code u
    alpha     alpha

Wire
    down      features classes * (|h| + flag), logits classes * (|z| + flag)
    up        features examples * |h|, labels examples * integer, logits present * |z|
    with      sharing.scope="layer" also: down weights |w|, buffers |b|; up weights |w|, buffers |b|, examples 1
    with      use="replay" also: down features classes * (|s_in| + flag); up features examples * |s_in|

Limits
    alpha=0.0 equals felo alpha=0.0
    alpha=0.0 use="replay" equals felo alpha=0.0
    warmup_rounds=2 equals felo warmup_rounds=2
    training.lr=0.0 stays at rest

Departures from the paper
    1. Only the paper's first pages were at hand, which have no equations. The authors' published code draws features
       towards the synthetic ones (`use="target"`); another version of it, known from bytecode, feeds them to the
       later layers (`use="replay"`), which is as near to the abstract. Which one the paper has is not known.
    2. KL is the mean over batch and u (`kl_reduction="mean"`). The published code has their sum beside a squared error
       that is a mean, which weights the KL term 50 x 1024 times more heavily and causes posterior collapse.
    3. The VAE's layers are as wide as the features, at most `vae_width`, its label's embedding half as wide: the code's
       sizes where features have 1024 numbers. For replay the other version has a convolutional VAE; here it is the
       same one, on flattened features.
    4. The VAE is trained after every `vae_every` rounds from the end of warm-up, in the code 1 % of the rounds.
    5. Replay takes the features where split models are cut first, as a rule behind the stem. Its pass normalises with
       its own batch statistics and leaves the running statistics alone, so that a batch with one such example only
       has no replay. (With running statistics instead, clients learned far less.)
    6. A class that the VAE was not trained on is masked; in replay the task's loss then weighs 1 - alpha times the
       share of the batch that is left.
    7. A VAE goes on from its last weights with a fresh optimiser whenever it is trained; in the code it is one object
       that lives as long as the server.
    8. Departures 3 to 8 of felo are Velo's as well, for 7 read shape instead of width.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor

from potluck import fl


@dataclass(frozen=True)
class State:
    """What clients reported, and what the server learnt from it.

    Attributes:
        features: by signature, features of single examples, oldest first.
        logits: mean logits of one client's class, oldest first.
        vaes: by signature, the weights of the VAE.
        taught: by signature, the classes that the VAE has seen, bool (classes,).
        signatures: by architecture, the signature of its features.
        weights: the server's weights, if weights are shared.
    """

    features: dict[str, fl.prototypes.Rows]
    logits: fl.prototypes.Rows
    vaes: dict[str, fl.Weights]
    taught: dict[str, Tensor]
    signatures: dict[str, str]
    weights: fl.GroupWeights


@dataclass(frozen=True)
class Velo(fl.SharesWeights[State]):
    """Hyper-parameters of Velo.

    Attributes:
        training: a client's local training.
        vae_training: the server's training of the VAE, on all stored features.
        use: of a synthetic feature, as the "target" of the client's features, or for "replay" through the layers
            behind them. Features are what the last layer reads; for replay they are the extractor's output, far larger.
        alpha: weight of the terms that synthetic features and average logits bring; with "replay" the task's loss
            weighs 1 - alpha.
        warmup_rounds: rounds before the clients are first sent something.
        vae_every: rounds from one training of the VAE to the next.
        vae_width: widest layer of the VAE.
        kl_weight: weight of the KL divergence beside the mean squared error.
        kl_reduction: over batch and code, its "mean" or, as in the authors' code, its "sum".
        feature_capacity: of each class, the newest features that the VAE is trained on.
        logit_capacity: of each class, the newest clients' means that an average of logits covers.
        sharing: who averages weights with whom; nobody by default.
        combine: how what was reported of a class becomes one.
    """

    family = "classes"
    aligns_classes = True
    unguarded = "the server's VAE learns from every client's features, and no mean is taken of them"

    variants = {
        "replay": {"use": "replay"},
        "shared weights": {"sharing.scope": "layer"},
        "summed divergence": {"kl_reduction": "sum", "vae_every": 2},
    }

    training: fl.LocalTraining = fl.LocalTraining()
    vae_training: fl.ServerTraining = fl.LocalTraining(epochs=10, batch_size=50)
    use: Literal["target", "replay"] = "target"
    alpha: Annotated[float, fl.at_least(0)] = 0.5
    warmup_rounds: Annotated[int, fl.at_least(0)] = 1
    vae_every: Annotated[int, fl.at_least(1)] = 1
    vae_width: Annotated[int, fl.at_least(2)] = 1024
    kl_weight: Annotated[float, fl.at_least(0)] = 1.0
    kl_reduction: Literal["mean", "sum"] = "mean"
    feature_capacity: Annotated[int, fl.at_least(1)] = 5000
    logit_capacity: Annotated[int, fl.at_least(1)] = 50000
    sharing: fl.Sharing = fl.Sharing(scope="none")
    combine: fl.Aggregate = fl.Aggregate()

    def __post_init__(self) -> None:
        replays, size, vae_size = self.use == "replay", self.training.batch_size, self.vae_training.batch_size
        fl.require(not replays or self.alpha <= 1, "alpha", "at most 1 where use is 'replay'", self.alpha)
        fl.require(not replays or size >= 2, "training.batch_size", "at least 2 where use is 'replay'", size)
        fl.require(vae_size >= 2, "vae_training.batch_size", "at least 2, which have batch statistics", vae_size)

    @property
    def exchanges_more(self) -> bool:
        return True

    def needs(self) -> frozenset[fl.Need]:
        place = fl.features.ONE_ROW if self.use == "target" else fl.features.MIDDLE
        return super().needs() | {fl.Need.SPLIT_MODEL, fl.Need.CLASSES, place}

    @property
    def place(self) -> fl.features.FeaturePlace:
        """Where clients' features are taken."""
        return "s_out" if self.use == "target" else "s_in"

    def init(self, server: fl.Server) -> State:
        return State({}, {}, {}, {}, fl.features.signatures(server, self.place), self.sharing.initial(server))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        ready, kinds = server.round > self.warmup_rounds, state.signatures
        H = {name: self._generated(state, name, server) for name in sorted(state.vaes) if ready}
        Z = fl.prototypes.averages(state.logits, server.num_classes, self.combine) if ready and state.logits else None
        sent = self.sharing.send(
            state.weights, cohort, server, features=lambda m: H.get(kinds[m.architecture]), logits=Z
        )
        replies = cohort.ask(self.local_update, sent)
        features, logits = dict(state.features), state.logits
        for id, reply in replies.items():
            name, new = (
                kinds[server.roster[id].architecture],
                fl.prototypes.one_each(reply["features"], reply["labels"]),
            )
            features[name] = fl.prototypes.stored(features.get(name), new, self.feature_capacity)
            logits = fl.prototypes.stored(
                logits, fl.prototypes.one_each(reply["logits"], reply["labels"].unique()), self.logit_capacity
            )
        vaes, taught = dict(state.vaes), dict(state.taught)
        due = server.round >= self.warmup_rounds and server.round % self.vae_every == 0
        for name, rows in sorted(features.items()) if due else ():
            if len(rows["labels"]) > 1:  # one feature alone has no batch statistics
                vaes[name] = self._fitted(state.vaes.get(name), rows, server)
                taught[name] = rows["labels"].bincount(minlength=server.num_classes) > 0
        return State(features, logits, vaes, taught, kinds, self.sharing.merge(state.weights, replies, server.roster))

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        n, present = fl.schema.UpTo(member.examples), fl.schema.UpTo(server.num_classes)
        return fl.Schema(
            features=fl.schema.floats(n, *fl.features.feature_shape(server, member.architecture, self.place)),
            labels=fl.schema.Labels(n, server.num_classes, present),
            logits=fl.schema.logits(present, server.num_classes, member),
            **self.sharing.expected(member, message),
        )

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        loss = (fl.prototypes.PrototypeLoss if self.use == "target" else fl.prototypes.ReplayLoss)(
            client.criterion, self.alpha
        )
        tables = {"features": message.get("features"), "logits": message.get("logits")}  # H and Z
        report = yield fl.Fit(client.model, loss, client.train, self.training, tables, keep=len(client.train))
        features, logits, labels = (report.kept[name] for name in ("features", "logits", "labels"))
        return self.sharing.reply(
            client, features=features, labels=labels, logits=fl.prototypes.means_by_class(logits, labels)
        )

    def _fitted(self, weights: fl.Weights | None, rows: fl.prototypes.Rows, server: fl.Server) -> fl.Weights:
        """A VAE, new or from these weights, after training on the stored features."""
        values = rows["values"].flatten(1)
        data = fl.Examples(values, rows["labels"])
        vae = fl.cvae.server_vae(server, values.shape[1], self.vae_width, weights)
        server.fit(fl.Fit(vae, fl.cvae.VAELoss(self.kl_weight, self.kl_reduction), data, self.vae_training))
        return fl.weights.weights_of(vae)

    def _generated(self, state: State, name: str, server: fl.Server) -> fl.prototypes.Table:
        """H: for each class that the VAE has seen one draw of the code, decoded."""
        shape, known = state.features[name]["values"].shape[1:], state.taught[name]
        vae = fl.cvae.server_vae(server, shape.numel(), self.vae_width, state.vaes[name])
        synthetic = vae.drawn(server.rng) * known[:, None]
        return {"means": synthetic.view(-1, *shape), "known": known}
