"""FedKTL: a federated loop that transfers a generator's knowledge.

Zhang, Liu, Hua, Cao. CVPR 2024. https://arxiv.org/abs/2403.15760.

Clients of any architecture learn to turn their outputs into the directions of one simplex, the same for all and with a
direction for each class, and report the mean direction of each class that they hold. The server has a generator of
inputs. It trains a small transformer that maps these prototypes among the latent vectors for which the generator was
made, keeping classes together, and generates an input at the centre of each class. Clients receive the pairs of input
and vector, and learn from them beside their own task: a linear layer behind their features is to tell the vector from
the input.

    own task    -log [ e_y / (e_y + sum over c other than y of exp(s cos theta_c)) ],    e_y = exp(s cos(theta_y + m))
    transfer    mu MSE(h'(f(I)), q),                  of pairs (I, q)
    alignment   MMD(F(P), z) + lambda MSE(F(P), Q_y),    of prototypes P of classes y, z ~ N(0, 1)

A class with one example has the direction of that example's outputs for a mean, and the server sees it.

Symbols
    f, h      a client's layers before its head and its head, kept by the client
    theta_c   the angle between a client's outputs and v_c, the simplex's direction of class c
    P         a row of reply["prototypes"], of length 1
    F, Q      state.alignment: the transformer, and the centre of each class in the latent space
    G         state.generator, from latent vectors to inputs
    I, q      state.pairs: "images", G of q, and "vectors", Q of the classes that anybody has reported
    s, m      scale, margin
    mu        transfer
    lambda    centring

Wire
    down      pairs |pairs|
    up        counts classes * integer, prototypes present * |z|

Limits
    equals fedktl transfer=0.0 on rounds=1
    transfer=0.0 centring=9.0 latent=3 equals fedktl transfer=0.0
    training.lr=0.0 stays at rest

Departures from the paper
    1. The paper's generators are StyleGAN-XL, StyleGAN3 and Stable Diffusion, trained by others on images of their own.
       Here the server trains one, in the first round, on the public data, which need no labels: the decoder of a
       variational auto-encoder with one hidden layer (Kingma, Welling, 2014), whose latent vectors are standard normal.
       It suits inputs of any shape, and is no better than the public data. It does not change afterwards.
    2. The simplex is sqrt(K / (K - 1)) U (1 - 1/K), with U orthogonal; here U is the identity, which is the paper's
       simplex turned. So nobody needs to send it, and a client's outputs predict what its angles do.
    3. A class that nobody has reported has no pair; the code sends one at a random vector. Of a class that nobody
       reports in a round, the centre stays.
    4. Q are set to the class means of F(P) before and after the transformer is trained, as in the paper. The code is to
       do the same, but assigns to copies, so that its centres are vectors that begin at random and are only drawn to
       F(P) by the loss: `centres="learnt"`.
    5. A client goes through all pairs, in a random order and over again, one beside each of its examples in every
       epoch. The code draws them in batches of their own, which are smaller if there are fewer pairs than that.
    6. Generated inputs leave BatchNorm's running statistics alone; in the code they are part of them.
    7. The prototypes' lengths are made 1 once more by the server, so that no client's counts for more.
    8. F is trained on a round's prototypes if there are at least two, which have batch statistics.
    9. h' begins every round with the same weights at all clients, and no client keeps it, as in the code. An optimiser
       that lasted (`training.persist`) would have momentum of another h', and is refused.
    10. Local training defaults to Adam, like all methods here; the code has SGD with 0.01, batches of 10, and gradients
        of a norm of at most 100 each for a client's network and for h'. `training.clip_norm` limits both together. Its
        server limits gradients to 100 as well (`server_training.clip_norm`).
    11. The transformer's first layer has no bias. The code's has one, before BatchNorm, which does nothing in training:
        its gradient is rounding noise, of which Adam makes whole steps, and the means of F(P) would follow it.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck import fl


@dataclass(frozen=True)
class State:
    """What the server has learnt, and the pairs that it made of it.

    Attributes:
        alignment: F and Q.
        known: the classes that anybody has reported.
        generator: G; empty before the first round.
        pairs: "images" (known, ...) and "vectors" (known, latent); empty before the first round.
    """

    alignment: fl.Weights
    known: Tensor
    generator: fl.Weights = field(default_factory=dict[str, Tensor])
    pairs: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


@dataclass(frozen=True)
class FedKTL(fl.Method[State]):
    """Hyper-parameters of FedKTL.

    Attributes:
        training: a client's local training.
        generator_training: of the generator, on the public data, once.
        server_training: of the transformer, on a round's prototypes.
        centres: Q, the "means" of transformed prototypes, or vectors that are only "learnt", see departure 4.
        transfer: mu, weight of what clients learn from pairs.
        centring: lambda, weight of the distance of transformed prototypes to the centre of their class.
        scale: s, by which cosines are multiplied.
        margin: m, the angle in radians that is added to that of an example's class.
        latent: width of the latent vectors.
        hidden: width of the hidden layers of the generator and its encoder.
        kl_weight: weight of the latent vectors' divergence from the standard normal distribution, see
            `AutoencoderLoss`.
    """

    family = "public"
    unguarded = "the server's transformer learns from every client's prototypes, whose lengths it makes 1"
    revises = ()

    variants = {
        "learnt centres": {"centres": "learnt"},
        "no margin": {"margin": 0.0},
    }

    training: fl.LocalTraining = fl.LocalTraining()
    generator_training: fl.ServerTraining = fl.LocalTraining(epochs=20, batch_size=128)
    server_training: fl.ServerTraining = fl.LocalTraining(lr=0.01, epochs=100, batch_size=100)
    centres: Literal["means", "learnt"] = "means"
    transfer: Annotated[float, fl.at_least(0)] = 50.0
    centring: Annotated[float, fl.at_least(0)] = 1.0
    scale: Annotated[float, fl.at_least(0)] = 64.0
    margin: Annotated[float, fl.at_least(0)] = 0.5
    latent: Annotated[int, fl.at_least(1)] = 64
    hidden: Annotated[int, fl.at_least(1)] = 400
    kl_weight: Annotated[float, fl.at_least(0)] = 0.1

    def __post_init__(self) -> None:
        size = self.server_training.batch_size
        fl.require(size >= 2, "server_training.batch_size", "at least 2, which have batch statistics", size)
        lasts = self.training.persist and self.transfer > 0
        fl.require(
            not lasts, "training.persist", "False unless transfer is 0, since h' begins anew in every round", lasts
        )

    def needs(self) -> frozenset[fl.Need]:
        return frozenset({fl.Need.PUBLIC_DATA, fl.Need.CLASSES, fl.Need.SPLIT_MODEL, fl.Need.REAL_INPUTS})

    def init(self, server: fl.Server) -> State:
        return State(fl.learnt_of(self._alignment(server)), torch.zeros(server.num_classes, dtype=torch.bool))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        sent = state.pairs if self.transfer else {}
        rows = fl.prototypes.reported(cohort.ask(self.local_update, fl.Message(pairs=sent or None)))
        alignment, known = self._alignment(server, state.alignment), state.known.clone()
        known[rows["labels"]] = True
        self._align(alignment, rows, server)
        generator = state.generator or self._new_generator(server)
        vectors = alignment.centres.weight.detach()[known]
        images = server.predict(fl.Predict(self._decoder(server, generator), fl.Examples(vectors, vectors)))
        return State(fl.learnt_of(alignment), known, generator, {"images": images, "vectors": vectors})

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        present = fl.schema.UpTo(server.num_classes)
        counts = fl.schema.ClassCounts(server.num_classes, member.examples, present)
        return fl.Schema(counts=counts, prototypes=fl.schema.floats(present, server.num_classes))

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        net, data, pairs = nn.ModuleDict({"model": client.model}), client.train, message.get("pairs")
        if pairs is not None:
            sizes = fl.split(client.model).num_features, pairs["vectors"].shape[1]
            net["projector"] = client.module("projector", partial(nn.Linear, *sizes), keep=False)
            order = torch.randperm(len(pairs["vectors"]), generator=client.rng)
            data = data.with_columns(pair=order.repeat(len(data) // len(order) + 1)[: len(data)])
        loss = TransferLoss(client.criterion, self.scale, self.margin, self.transfer)
        yield fl.Fit(net, loss, data, self.training, {"pairs": pairs})
        outputs = yield fl.Predict(client.model, client.train)
        labels = client.train.labels
        prototypes = F.normalize(fl.prototypes.means_by_class(F.normalize(outputs), labels))
        return fl.Message(counts=labels.bincount(minlength=client.num_classes), prototypes=prototypes)

    @fl.on_client
    def inference_model(self, client: fl.Client, message: fl.Message) -> nn.Module:
        return fl.angles.ByAngle(client.model, self.scale)

    def _align(self, net: "Alignment", rows: fl.prototypes.Rows, server: fl.Server) -> None:
        """Train F and Q on the prototypes of a round."""
        data = fl.Examples(F.normalize(rows["values"]), rows["labels"])
        self._centre(net, data, server)
        if len(data) > 1:
            report = server.fit(fl.Fit(net, AlignmentLoss(self.centring), data, self.server_training))
            server.note(alignment=report.loss)
            self._centre(net, data, server)

    def _centre(self, net: "Alignment", data: fl.Examples, server: fl.Server) -> None:
        """Move Q, of the classes that the prototypes are of, to the means of F(P), unless Q are only learnt."""
        if self.centres == "means":
            table = fl.prototypes.averages(
                fl.prototypes.one_each(server.predict(fl.Predict(net, data)), data.labels), server.num_classes
            )
            with torch.no_grad():
                net.centres.weight[table["known"]] = table["means"][table["known"]]

    def _alignment(self, server: fl.Server, weights: fl.Weights | None = None) -> "Alignment":
        """F and Q with these weights, or new ones."""
        net = server.module("alignment", partial(Alignment, server.num_classes, self.latent))
        assert isinstance(net, Alignment)
        if weights is not None:
            fl.load(net, weights)
        return net

    def _new_generator(self, server: fl.Server) -> fl.Weights:
        """G, trained on the public data."""
        encoder = server.module(
            "encoder",
            partial(fl.cvae.perceptron, math.prod(fl.one_shape(server.input_shape)), self.hidden, 2 * self.latent),
        )
        coder = nn.ModuleDict({"encoder": encoder, "decoder": self._decoder(server)})
        report = server.fit(
            fl.Fit(
                coder,
                fl.cvae.AutoencoderLoss(self.kl_weight),
                fl.public.public_of(server).unaugmented(),
                self.generator_training,
            )
        )
        server.note(generator=report.loss)
        return fl.learnt_of(coder["decoder"])

    def _decoder(self, server: fl.Server, weights: fl.Weights | None = None) -> nn.Module:
        """G with these weights, or a new one."""
        shape = fl.one_shape(server.input_shape)
        net = server.module("generator", partial(fl.cvae.perceptron, self.latent, self.hidden, math.prod(shape), shape))
        return net if weights is None else fl.load(net, weights)


@dataclass(frozen=True)
class TransferLoss:
    """The own task's loss by angles + transfer MSE(h'(f(I)), q), of the extras' "pairs" that the batch names."""

    criterion: fl.Criterion
    scale: float
    margin: float
    transfer: float

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch of examples with classes."""
        model, pairs = net.get_submodule("model"), extras["pairs"]
        cosine = fl.angles.cosines(model(batch.inputs))
        farther = fl.angles.farther(cosine, batch.targets, self.margin)
        loss = self.criterion(self.scale * farther, batch.targets)
        if pairs is None:
            return loss
        images, vectors = (pairs[name][batch.columns["pair"]] for name in ("images", "vectors"))
        with fl.batchnorm.keep_statistics(model):
            features = fl.split(model).features(images)
        return loss + self.transfer * F.mse_loss(net.get_submodule("projector")(features), vectors)


class Alignment(nn.Module):
    """F, from prototypes (batch, classes) to latent vectors (batch, latent), and the classes' centres Q."""

    def __init__(self, classes: int, latent: int) -> None:
        super().__init__()
        self.transformer = nn.Sequential(
            nn.Linear(classes, classes, bias=False), nn.BatchNorm1d(classes), nn.ReLU(), nn.Linear(classes, latent)
        )
        self.centres = nn.Embedding(classes, latent)

    def forward(self, prototypes: Tensor) -> Tensor:
        """F(P)."""
        return self.transformer(prototypes)


@dataclass(frozen=True)
class AlignmentLoss:
    """MMD(F(P), z) + centring MSE(F(P), Q_y), for as many new z as there are prototypes."""

    centring: float

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch of prototypes and their classes."""
        assert isinstance(net, Alignment)
        found = net(batch.inputs)
        return fl.kernels.discrepancy(found, torch.randn_like(found)) + self.centring * F.mse_loss(
            found, net.centres(batch.targets)
        )
