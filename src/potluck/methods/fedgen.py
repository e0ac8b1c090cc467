"""FedGen: data-free knowledge distillation by a generator of features.

Zhu, Hong, Zhou. ICML 2021. https://arxiv.org/abs/2105.10056. Algorithm 1.

The server trains a small conditional generator of inputs to the clients' last layers, so that these layers together
recognise the class it is conditioned on. Clients train on their own examples and on generated features of all classes
of the federation, so that their last layers learn classes that they lack.

Symbols
    theta     state.weights
    theta^p   head, a client's last layer
    G, w      the generator and state.generator, its weights
    z         a generated feature, what the last layer reads
    p(y)      state.counts, examples of each class at the clients of the last round, divided by their sum
    alpha     generator_training.lr
    T         the steps of training

Wire
    down      weights |w|, buffers |b|, generator |generator|, labels classes * integer
    up        weights |w|, buffers |b|, counts classes * integer, examples 1

Limits
    alpha=0.0 equals fedavg
    equals fedavg on rounds=1
    generator_training.lr=0.0 training.lr=0.0 stays at rest

Departures from the paper
    1. The generator is trained before the weights are averaged, as in the authors' code, on the layers that the clients
       sent.
    2. Clients are first sent a generator in the second round; the first one has learnt nothing.
    3. The paper's ensemble is the clients' plain mean of logits ("mean"). In the code each client's loss weighs by its
       share of the class ("share"); there a broadcast multiplies a client's mean loss by its mean share, both over the
       batch, which is not followed.
    4. p(y) counts the examples that clients of the last round have, so that no class is generated that none of them
       has. The code draws labels uniformly, at clients from all classes of the federation and at the server from those
       that its clients have seen; its counts, of examples seen and from one for each class on, only weigh losses.
    5. The paper's eq. 5 has no weight for the loss on generated features: `alpha` is the code's, 10 there and 1 here.
       `beta` is a term of the code only, also with 10 (on EMNIST 1) and here off: it draws a client's predictions to
       those that its last layer makes of a generated feature of the same class. In the code both fall by 0.98 in each
       round, to no less than 1e-4, and are in a client's first 20 steps only; the generator's rate falls by 0.98 in
       each round too. `diversity` is in the paper, with its experiments' settings.
    6. Noise is normal as in the paper; the code draws it uniformly.
    7. A client generates as many features in each step as its batch has examples. At clients the generator predicts
       with its running statistics.
    8. Where architectures differ, layers are averaged over the clients that own them, see `sharing`; all last layers
       must read features of one width.
    9. Local training defaults to Adam, like all methods here, and a generator starts each round with a new optimiser.
    10. A client's loss on generated features is cross-entropy, whatever the federation's criterion.
    11. Clients weigh by their examples, as in the code; the paper's average, line 13, is plain
       (`sharing.weighting = "uniform"`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck import fl


@dataclass(frozen=True)
class State:
    """theta by group of clients, w, and how many examples of each class the last cohort has; None before the first."""

    weights: fl.GroupWeights
    generator: fl.Weights
    counts: Tensor | None


@dataclass(frozen=True)
class FedGen(fl.SharesWeights[State]):
    """Hyper-parameters of FedGen.

    Attributes:
        training: a client's local training.
        generator_training: of the generator, on `samples` labels a round.
        alpha: weight of the loss of generated features, see departure 5.
        beta: weight of the distance to predictions of generated features, see departure 5.
        ensemble: what the generator is to please, the mean of the clients' logits or each by its share of the class.
        diversity: weight of the generator's term that keeps features of different noise apart.
        samples: labels that are drawn for it in a round; with five epochs in batches of 32 it takes 50 steps, as in the
            code.
        noise: width of the generator's noise.
        hidden: width of its hidden layer.
        sharing: who averages with whom, with which weights.
    """

    unguarded = "the generator learns from every client's head; its weights are protected"

    training: fl.LocalTraining = fl.LocalTraining()
    generator_training: fl.ServerTraining = fl.LocalTraining(lr=3e-4, epochs=5, batch_size=32, weight_decay=0.01)
    alpha: Annotated[float, fl.at_least(0)] = 1.0
    beta: Annotated[float, fl.at_least(0)] = 0.0
    ensemble: Literal["mean", "share"] = "mean"
    diversity: Annotated[float, fl.at_least(0)] = 1.0
    samples: Annotated[int, fl.at_least(2)] = 320
    noise: Annotated[int, fl.at_least(1)] = 64
    hidden: Annotated[int, fl.at_least(1)] = 512
    sharing: fl.Averaging = fl.Sharing()

    def __post_init__(self) -> None:
        size = self.generator_training.batch_size
        fl.require(size >= 2, "generator_training.batch_size", "at least 2, which have batch statistics", size)

    @property
    def exchanges_more(self) -> bool:
        return True

    def needs(self) -> frozenset[fl.Need]:
        return super().needs() | {fl.Need.SPLIT_MODEL, fl.heads.WHOLE_HEAD, fl.heads.COMMON_WIDTH}

    def init(self, server: fl.Server) -> State:
        fl.generator.check_heads(server, self.sharing.buffers)
        generator = server.module("generator", self.generator_of(server.num_classes, fl.features.common_width(server)))
        return State(self.sharing.initial(server), fl.learnt_of(generator), None)

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        guide = {} if state.counts is None else {"generator": state.generator, "labels": state.counts}
        sent = self.sharing.send(state.weights, cohort, server, **guide)
        replies = cohort.ask(self.local_update, sent)  # Alg. 1, l. 4-9
        counts, heads = torch.stack(replies.entries("counts")), fl.generator.sent_heads(replies, server)
        pool = self.sharing.merge(state.weights, replies, server.roster)  # l. 13
        return State(pool, self._taught(state.generator, counts, heads, server), counts.sum(0))

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        counts = fl.schema.ClassCounts(server.num_classes, member.examples)
        return fl.Schema(**self.sharing.expected(member, message), counts=counts)

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        objective, read, extras = client.objective, dict[str, nn.Module](), dict[str, Tensor]()
        if (self.alpha or self.beta) and "generator" in message:
            objective = GuidedLoss(client.criterion, self.alpha, self.beta)
            new = self.generator_of(client.num_classes, fl.split(client.model).num_features)
            read = {"generator": fl.load(client.module("generator", new, keep=False), message["generator"])}
            extras = {"labels": message["labels"].float()}
        yield fl.Fit(client.model, objective, client.train, self.training, extras, frozen=read)
        counts = torch.bincount(client.train.labels, minlength=client.num_classes)
        return self.sharing.reply(client, counts=counts)

    def generator_of(self, classes: int, width: int) -> Callable[[], fl.generator.Generator]:
        """What makes a new G of features of this width."""
        return partial(fl.generator.Generator, classes, self.noise, self.hidden, width)

    def _taught(self, weights: fl.Weights, counts: Tensor, heads: nn.ModuleList, server: fl.Server) -> fl.Weights:
        """Line 14: w after training on the last layers that the clients sent; `counts` are (clients, classes)."""
        net = server.module("generator", self.generator_of(server.num_classes, fl.features.common_width(server)))
        fl.load(net, weights)
        counts = counts.float()
        labels = torch.multinomial(counts.sum(0), self.samples, replacement=True, generator=server.rng)
        objective = fl.generator.GeneratorLoss(self.ensemble, self.diversity)
        shares = {"shares": counts / counts.sum(0).clamp(min=1)}
        data, training = fl.Examples(labels, labels), self.generator_training
        server.fit(fl.Fit(net, objective, data, training, shares, frozen={"heads": heads}))
        return fl.learnt_of(net)


@dataclass(frozen=True)
class GuidedLoss:
    """Eq. 5, weighed: the task's loss + alpha times the last layer's on generated features of classes from p(y)."""

    criterion: fl.Criterion
    alpha: float
    beta: float

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        head, generator, outputs = fl.split(net).classifier, extras["generator"], net(batch.inputs)
        labels = torch.multinomial(extras["labels"], len(batch.targets), replacement=True)
        generated = F.cross_entropy(head(generator.drawn(labels)[0]), labels)
        loss = self.criterion(outputs, batch.targets) + self.alpha * generated
        if not self.beta:
            return loss
        with torch.no_grad():
            expected = head(generator.drawn(batch.targets)[0]).softmax(1)
        return loss + self.beta * fl.losses.soft_cross_entropy(outputs, expected)
