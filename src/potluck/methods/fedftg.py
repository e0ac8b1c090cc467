"""FedFTG: fine-tuning the global model by data-free distillation on hard generated samples.

Zhang, Shen, Ding, Tao, Duan. CVPR 2022. https://arxiv.org/abs/2203.09249.

Clients train and the server averages, as in FedAvg. Then the server fine-tunes the average without data: a conditional
generator of inputs learns to find samples that clients recognise and on which the average still disagrees with them,
and the average learns from the clients' predictions on these. Clients count by what they hold of a sample's class.

Symbols
    w_p       state.weights[p], the student of architecture p
    w_k       weights of a reply
    G         the generator; its weights are state.generator
    z, y      noise and labels
    n_k^y     counts, examples of class y at client k
    alpha     shares, n_k^y divided by the sum over clients
    p(y)      the sum of n_k^y over clients, divided by the number of all examples

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, counts classes * integer, examples 1

Limits
    server_training.lr=0.0 equals fedavg sharing.scope="architecture" on batchnorm=true
    training.lr=0.0 approaches fedavg training.lr=0.0 on architectures=1
    training.lr=0.0 server_training.lr=0.0 stays at rest

Departures from the paper
    1. What is here follows the authors' published code, since of the paper only the first pages were at hand.
    2. Each sample's cross-entropy in the generator's loss weighs by the client's share of its class. In the code the
       shares cancel: they multiply a loss that is already the mean over the batch (`class_weights="batch"`).
    3. The student's loss is a mean over the batch; the code's is also a mean over the classes and so smaller by their
       number (`reduction="mean"`). The rate is therefore 0.01 in place of 0.1, which is the same step for
       ten classes.
    4. Labels are drawn by p(y); the code has of each class as many as p(y) says, in random order.
    5. The student normalises samples by their batch's statistics and keeps the running statistics of the average, which
       generated inputs would spoil. The authors' networks have no BatchNorm.
    6. With several architectures there is one student for each, as in FedDF: the average of its clients, fine-tuned by
       the clients of all architectures. Samples are hard if the students disagree with a client on average. A student
       of which no client was drawn stays as it is.
    7. Inputs that are no images come from one hidden layer, see `InputGenerator`.
    8. Local training defaults to Adam, like all methods here. The code has SGD with a rate of 0.1 and gradients clipped
       at 10; weight decay of 0.001 on both sides; and rates that fall by 0.998 in each round, on both sides.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck import fl


@dataclass(frozen=True)
class State:
    """The students, by architecture, and the weights of G."""

    weights: fl.GroupWeights
    generator: fl.Weights


@dataclass(frozen=True)
class FedFTG(fl.SharesWeights[State]):
    """Hyper-parameters of FedFTG.

    Attributes:
        training: a client's local training.
        server_training: the students' fine-tuning; its steps are batches of noise and labels.
        generator_training: optimiser and rate of G, which trains on the same batches; nothing else can be set.
        student_steps: steps of the students on each batch, after one step of G for each client.
        hardness: weight of the disagreement between students and a client, which G increases.
        recognition: weight of the cross-entropy of a client's predictions to the labels, which G decreases.
        diversity: weight of the term that keeps samples of different noise apart.
        class_weights: whether a client's share of the class weighs "each" sample's cross-entropy, or its mean share the
            mean of the "batch", see departure 2.
        reduction: the students' loss, summed over classes ("batchmean") or their mean ("mean"), see departure 3.
        noise: width of the noise; 256 in the code where there are 100 classes.
        width: of the generator's layers.
        sharing: with which weights clients average within each architecture.
    """

    unguarded = "the generator and the students learn from every client's model; their averages are protected"

    variants = {
        "released code": {"class_weights": "batch", "reduction": "mean", "server_training.lr": 0.1},
        "without hard samples": {"hardness": 0.0},
        "uniform": {"sharing.weighting": "uniform"},
        "lasting optimisers": {"training.persist": True},
    }

    mixes_layers = True
    training: fl.LocalTraining = fl.LocalTraining()
    server_training: fl.ServerTraining = fl.LocalTraining("sgd", lr=0.01, steps=10, batch_size=50)
    generator_training: fl.ServerTraining = fl.LocalTraining(lr=0.01)
    student_steps: Annotated[int, fl.at_least(1)] = 5
    hardness: Annotated[float, fl.at_least(0)] = 1.0
    recognition: Annotated[float, fl.at_least(0)] = 1.0
    diversity: Annotated[float, fl.at_least(0)] = 1.0
    class_weights: Literal["each", "batch"] = "each"
    reduction: Literal["batchmean", "mean"] = "batchmean"
    noise: Annotated[int, fl.at_least(1)] = 100
    width: Annotated[int, fl.at_least(1)] = 64
    sharing: fl.sharing.WholeModels = fl.Sharing("architecture")

    def __post_init__(self) -> None:
        size = self.server_training.batch_size
        fl.require(size >= 2, "server_training.batch_size", "at least 2, which have batch statistics", size)
        steps, epochs = self.server_training.steps, self.server_training.epochs
        fl.require(steps is not None, "server_training.steps", "a number of steps, each with samples of its own", steps)
        fl.require(epochs == 1, "server_training.epochs", "1, since server_training.steps says how long it is", epochs)
        for name in ("steps", "epochs", "batch_size"):
            found, unset = getattr(self.generator_training, name), getattr(fl.LocalTraining(), name)
            expected = f"{unset}, since G trains on the batches of server_training"
            fl.require(found == unset, f"generator_training.{name}", expected, found)

    @property
    def exchanges_more(self) -> bool:
        return True

    def needs(self) -> frozenset[fl.Need]:
        return super().needs() | {fl.Need.CLASSES, fl.Need.REAL_INPUTS}

    def init(self, server: fl.Server) -> State:
        return State(self.sharing.initial(server), fl.learnt_of(self._generator(server)))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        replies = cohort.ask(self.local_update, self.sharing.send(state.weights, cohort, server))
        pool = self.sharing.merge(state.weights, replies, server.roster)  # as FedAvg
        counts = torch.stack(replies.entries("counts")).float()
        drawn = sorted({server.roster[id].architecture for id in replies})
        students = nn.ModuleList(fl.load(server.build(p), pool[p]) for p in drawn)
        generator = fl.load(self._generator(server), state.generator)
        self._fine_tune(students, generator, counts, replies, server)
        return State({**pool, **dict(zip(drawn, map(fl.learnt_of, students), strict=True))}, fl.learnt_of(generator))

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        counts = fl.schema.ClassCounts(server.num_classes, member.examples)
        return fl.Schema(**self.sharing.expected(member, message), counts=counts)

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        yield fl.Fit(client.model, client.objective, client.train, self.training)
        counts = torch.bincount(client.train.labels, minlength=client.num_classes)
        return self.sharing.reply(client, counts=counts)

    def _fine_tune(
        self, students: nn.ModuleList, generator: nn.Module, counts: Tensor, replies: fl.Replies, server: fl.Server
    ) -> None:
        """Train the students and G in turns; `counts` are (clients, classes)."""
        assert self.server_training.steps is not None
        number, size = len(replies), self.server_training.steps * self.server_training.batch_size
        z = torch.randn(size, self.noise, generator=server.rng)
        y = torch.multinomial(counts.sum(0), size, replacement=True, generator=server.rng)  # p(y)
        nets = nn.ModuleDict({"generator": generator, "students": students})
        teachers = nn.ModuleList(trained(server, id, reply) for id, reply in replies.items())
        steps = [(HardSamples(k, self, number), "generator.", self.generator_training) for k in range(number)]
        steps += [(FineTuning(self.reduction), "students.", self.server_training)] * self.student_steps
        fit = fl.Fit(
            nets,
            [loss for loss, _, _ in steps],
            fl.Examples(z, y),
            self.server_training,
            {"shares": counts / counts.sum(0).clamp(min=1)},  # alpha
            turns=[(learner,) for _, learner, _ in steps],
            trainings=[training for _, _, training in steps],
            keep=size,
            frozen={"teachers": teachers},
        )
        server.note(distillation_loss=float(server.fit(fit).kept["loss"].mean()))

    def _generator(self, server: fl.Server) -> nn.Module:
        shape, classes = fl.one_shape(server.input_shape), server.num_classes
        return server.module("generator", lambda: fl.inputs.InputGenerator(classes, self.noise, shape, self.width))


def trained(server: fl.Server, id: int, reply: fl.Message) -> nn.Module:
    """A client's model, as it was sent."""
    net = server.build(server.roster[id].architecture)
    return fl.load(net, {**reply["weights"], **reply.get("buffers", {})})


@dataclass(frozen=True)
class HardSamples:
    """The generator's loss by one client: recognised by it, hard for the students, and diverse.

    Attributes:
        client: its place among the extras' "teachers" and "shares".
        method: for the weights of the three terms.
        clients: their number, among which the term for diversity is divided.
    """

    client: int
    method: FedFTG
    clients: int

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of a batch of noise and labels."""
        z, y, _ = batch
        students, method = net.get_submodule("students"), self.method
        x = net.get_submodule("generator")(y, z)
        logits, share = extras["teachers"][self.client](x), extras["shares"][self.client][y]
        with fl.mode(students, training=False):
            found = torch.stack([student(x) for student in students.children()])
        gap = (found - logits.detach()).abs().mean((0, 2))
        missed = F.cross_entropy(logits, y, reduction="none")
        missed = (share * missed).mean() if method.class_weights == "each" else share.mean() * missed.mean()
        alike = fl.generator.likeness(x.flatten(1), z) / self.clients
        return method.recognition * missed + method.diversity * alike - method.hardness * (share * gap).mean()


@dataclass(frozen=True)
class FineTuning:
    """The students' loss: cross-entropy to the clients' predictions, each client's by its share of the class."""

    reduction: Literal["batchmean", "mean"]

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> tuple[Tensor, fl.Observed]:
        """Of a batch of noise and labels."""
        generator, students = net.get_submodule("generator"), net.get_submodule("students")
        with torch.no_grad(), fl.mode(generator, training=False):
            x = generator(batch.targets, batch.inputs)
            shares = extras["shares"][:, batch.targets, None]
            predicted = torch.stack([teacher(x).softmax(1) for teacher in extras["teachers"]])
        taught = (shares * predicted).sum(0)
        with fl.batchnorm.keep_statistics(students):
            loss = torch.stack(
                [fl.losses.soft_cross_entropy(student(x), taught) for student in students.children()]
            ).sum()
        loss = loss if self.reduction == "batchmean" else loss / taught.shape[1]
        return loss, {"loss": loss.detach().expand(len(x))}
