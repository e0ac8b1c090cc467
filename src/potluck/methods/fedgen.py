"""FedGen: data-free knowledge distillation by a generator of features.

Zhu, Hong, Zhou. ICML 2021. https://arxiv.org/abs/2105.10056. Algorithm 1.

The server learns a small conditional generator of what the clients' last layers read, so that these layers together
recognise the class that it was asked for. Clients train on their own examples and on what it generates for all classes
of the federation, so that their last layers learn from classes that they lack.

Symbols
    theta     state.pool
    theta^p   head, a client's last layer
    G, w      the generator and state.generator, its weights
    z         a generated feature, what the last layer reads
    p(y)      state.counts, examples of each class at the clients of the last round, divided by their sum
    alpha     alpha
    T         the steps of generator_training

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
       share of the class ("share"); there a broadcast makes the shares cancel, which is not followed.
    4. p(y) counts the examples that clients of the last round have, so that no class is generated that none of them
       has. The code counts examples seen, and starts from one for each class.
    5. `beta` and `diversity` are terms of the code only; beta draws a client's predictions to those that its last layer
       makes of a generated feature of the same class. The code also scales both terms down by 0.98 in each round and
       has them in a client's first 20 steps only.
    6. Noise is normal as in the paper; the code draws it uniformly.
    7. A client generates as many features in each step as its batch has examples. At clients the generator predicts
       with its running statistics.
    8. Where architectures differ, layers are averaged over the clients that own them, see `sharing`; all last layers
       must read features of one width.
    9. Local training defaults to Adam, like all methods here, and a generator starts each round with a new optimiser.
    10. A client's loss on generated features is cross-entropy, whatever the federation's criterion.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck import (
    Batch,
    ClassCounts,
    Client,
    ClientWork,
    Cohort,
    ConfigError,
    Criterion,
    Examples,
    Extras,
    Fit,
    GroupWeights,
    LocalTraining,
    Member,
    Message,
    Need,
    Replies,
    Schema,
    Server,
    SharesWeights,
    Sharing,
    Weights,
    at_least,
    buffers_of,
    feature_shapes,
    learnt_of,
    load,
    on_client,
    require,
    soft_cross_entropy,
    staged,
)


@dataclass(frozen=True)
class State:
    """theta by group of clients, w, and how many examples of each class the last cohort has; None before the first."""

    pool: GroupWeights
    generator: Weights
    counts: Tensor | None


@dataclass(frozen=True)
class FedGen(SharesWeights[State]):
    """Hyper-parameters of FedGen.

    Attributes:
        training: a client's local training.
        generator_training: of the generator, on `samples` labels a round.
        alpha: weight of the loss of generated features.
        beta: weight of the distance to predictions of generated features, see departure 5.
        ensemble: what the generator is to please, the mean of the clients' logits or each by its share of the class.
        diversity: weight of the generator's term that keeps features of different noise apart.
        samples: labels that are drawn for it in a round; with five epochs in batches of 32 it takes 50 steps, as in the
            code.
        noise: width of the generator's noise.
        hidden: width of its hidden layer.
        sharing: who averages with whom, with which weights.
    """

    training: LocalTraining = LocalTraining()
    generator_training: LocalTraining = LocalTraining(lr=3e-4, epochs=5, batch_size=32, weight_decay=0.01)
    alpha: Annotated[float, at_least(0)] = 1.0
    beta: Annotated[float, at_least(0)] = 0.0
    ensemble: Literal["mean", "share"] = "mean"
    diversity: Annotated[float, at_least(0)] = 1.0
    samples: Annotated[int, at_least(2)] = 320
    noise: Annotated[int, at_least(1)] = 64
    hidden: Annotated[int, at_least(1)] = 512
    sharing: Sharing = Sharing()

    def __post_init__(self) -> None:
        size = self.generator_training.batch_size
        require(size >= 2, "generator_training.batch_size", "at least 2, which have batch statistics", size)

    def needs(self) -> frozenset[Need]:
        return super().needs() | {Need.SPLIT_MODEL}

    def init(self, server: Server) -> State:
        check_heads(server, self.sharing.buffers)
        generator = server.module("generator", partial(self.generator, feature_width(server), server.num_classes))
        return State(self.sharing.initial(server), learnt_of(generator), None)

    def round(self, state: State, cohort: Cohort, server: Server) -> State:
        guide = {} if state.counts is None else {"generator": state.generator, "labels": state.counts}
        replies = cohort.ask(
            self.local_update, self.sharing.send(state.pool, cohort, server, **guide)
        )  # Alg. 1, l. 4-9
        return State(
            pool=self.sharing.merge(state.pool, replies, server.roster),  # l. 10
            generator=self._taught(state.generator, replies, server),  # l. 11-14
            counts=torch.stack(replies.entries("counts")).sum(0),
        )

    def replies(self, handler: str, member: Member, message: Message, server: Server) -> Schema:
        counts = ClassCounts(server.num_classes, member.examples)
        return Schema(**self.sharing.expected(member, message), counts=counts)

    @on_client
    def local_update(self, client: Client, message: Message) -> ClientWork:
        self.sharing.receive(client, message)
        objective, read, extras = client.objective, dict[str, nn.Module](), dict[str, Tensor]()
        if (self.alpha or self.beta) and "generator" in message:
            build = partial(self.generator, staged(client.model).num_features, client.num_classes)
            read = {"generator": load(client.module("generator", build, keep=False), message["generator"])}
            objective = GuidedLoss(client.criterion, self.alpha, self.beta)
            extras = {"labels": message["labels"].float()}
        yield Fit(client.model, objective, client.train, self.training, extras, frozen=read)
        counts = torch.bincount(client.train.labels, minlength=client.num_classes)
        return self.sharing.reply(client, counts=counts)

    def generator(self, width: int, classes: int) -> "Generator":
        """A new generator of features of this width."""
        return Generator(classes, self.noise, self.hidden, width)

    def _taught(self, weights: Weights, replies: Replies, server: Server) -> Weights:
        """W after training on the last layers that the clients sent."""
        build = partial(self.generator, feature_width(server), server.num_classes)
        net, counts = load(server.module("generator", build), weights), torch.stack(replies.entries("counts")).float()
        labels = torch.multinomial(counts.sum(0), self.samples, replacement=True, generator=server.rng)
        server.fit(
            Fit(
                net,
                GeneratorLoss(self.ensemble, self.diversity),
                Examples(labels, labels),
                self.generator_training,
                extras={"shares": counts / counts.sum(0).clamp(min=1)},
                frozen={"heads": nn.ModuleList(sent_heads(replies, server))},
            )
        )
        return learnt_of(net)


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
class GuidedLoss:
    """Eq. 5: the task's loss + alpha times that of the last layer on generated features of classes drawn by p(y)."""

    criterion: Criterion
    alpha: float
    beta: float

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> Tensor:
        head, generator, outputs = staged(net).head, extras["generator"], net(batch.inputs)
        labels = torch.multinomial(extras["labels"], len(batch.targets), replacement=True)
        loss = self.criterion(outputs, batch.targets) + self.alpha * F.cross_entropy(
            head(generator.drawn(labels)[0]), labels
        )
        if not self.beta:
            return loss
        with torch.no_grad():
            expected = head(generator.drawn(batch.targets)[0]).softmax(1)
        return loss + self.beta * soft_cross_entropy(outputs, expected)


@dataclass(frozen=True)
class GeneratorLoss:
    """Eq. 4: how badly the clients' last layers recognise what is generated, and how little it depends on noise."""

    ensemble: Literal["mean", "share"]
    diversity: float

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> Tensor:
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


def sent_heads(replies: Replies, server: Server) -> Sequence[nn.Module]:
    """The last layers that clients sent."""
    nets = {name: server.build(name) for name in sorted({server.roster[i].architecture for i in replies})}
    heads: list[nn.Module] = []
    for i, reply in replies.items():
        net = staged(nets[server.roster[i].architecture])
        sent = {**reply["weights"], **reply.get("buffers", {})}
        own = {n: w for n, w in sent.items() if n.startswith(f"{net.head_name}.")}
        heads.append(copy.deepcopy(staged(load(net, own, partial=True)).head))
    return heads


def check_heads(server: Server, buffers: str) -> None:
    """Refuse heads that the server cannot put together from what it is sent.

    Raises:
        ConfigError: there are some.
    """
    for name in sorted({member.architecture for member in server.roster.values()} if buffers != "average" else ()):
        if buffers_of(staged(server.build(name)).head):
            raise ConfigError(
                f"fedgen: the head of {name} keeps statistics, and sharing.buffers={buffers!r} does not send them to"
                " the server, which teaches its generator with the head; expected 'average'"
            )


def feature_width(server: Server) -> int:
    """How wide the features are that all clients' last layers read.

    Raises:
        ConfigError: they differ.
    """
    architectures = sorted({member.architecture for member in server.roster.values()})
    widths = {name: server.about(name, feature_shapes)[1].numel() for name in architectures}
    if len(set(widths.values())) > 1:
        found = ", ".join(f"{name} {width}" for name, width in widths.items())
        raise ConfigError(f"fedgen: last layers read features of different widths: {found}; expected one width")
    return next(iter(widths.values()))
