"""FedMK: clients send condensed examples, their meta knowledge, and the server learns from these.

Liu, Yu, Zhou. "Meta Knowledge Condensation for Federated Learning", ICLR 2023. https://arxiv.org/abs/2209.14851.

No weights are uploaded. Each client condenses its data into a few synthetic inputs of each class that it holds: a model
that has trained on them shall fit the client's own examples. A client begins with what another one has condensed
before. The server trains its models on everything that came in, and on what a conditional generator makes beside it.

Symbols
    w_p       state.weights[p], the server's model of architecture p
    D         client.train, with examples x, y
    D'        inputs and labels of a reply, the meta knowledge
    G         the generator; its weights are state.generator
    l         cross-entropy
    w         the client's copy of its model, which learns from D' while that is condensed
    tau       smoothing

Wire
    down      weights |theta_i|, inputs at most per_class * classes * |x|, labels at most per_class * classes * integer
    up        inputs per_class * present * |x|, labels per_class * present * integer

Limits
    server_training.lr=0.0 stays at rest
    pseudo=0.0 equals fedmk on rounds=1
    pseudo=0.0 generator_training.lr=0.0 equals fedmk pseudo=0.0

Departures from the paper
    This is a reconstruction. Of the paper only the first pages were at hand, which describe the parts and not their
    equations, and no code is published. From them are: condensing as two nested minimisations, weights of examples that
    fall with the model's loss on them, starting from others' knowledge, training on all uploads, and pseudo meta
    knowledge of a conditional generator. Ours are:
    1. The two minimisations alternate: w, at first the weights that the client was sent, makes `inner_steps` steps of
       gradient descent on l of D', and D' one of Adam along the gradient of l of D at w, through these steps. w goes on
       from where it is: if it returned to where it began each time, D' would suit only the first steps of the server's
       training.
    2. An example of D weighs 2 / (1 + exp(tau l)), with l at w and without a gradient: 1 where it is fitted.
    3. Of each class a client begins with what another client, drawn at random, has last sent of it, or with its own if
       no other has, or with N(0, 1) if nobody has (`initial="noise"`: always; then no rows are sent down). Labels are
       fixed, `per_class` of each class that the client holds. With one class only, it condenses hardly anything: a step
       on any input fits it.
    4. G learns to be recognised by the server's models, at labels in the frequency of the uploads, as in FedGen, with
       its term for diversity, without which each class has one input. It is trained after the models, and used from the
       next round on; before that it has learnt nothing.
    5. A model's loss is the mean of l over a batch of uploads, and `pseudo` times that over as many inputs that G makes
       of the same labels. What clients sent in earlier rounds only serves for others to begin with.
    6. The server has a model of each architecture, which it trains on the same data; a client condenses with, and is
       evaluated with, that of its own architecture.
    7. BatchNorm normalises D' and D each by its own batch while D' is condensed, and a client measures its statistics
       on its own examples before it is evaluated: condensed inputs are distributed in another way than examples.
    8. No privacy is claimed: condensed inputs may resemble the examples that they were made from.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck import fl


@dataclass(frozen=True)
class State:
    """The server's models by architecture, the weights of G, and by client id what each client has last sent."""

    weights: fl.GroupWeights
    generator: fl.Weights
    knowledge: dict[str, fl.Weights]


@dataclass(frozen=True)
class FedMK(fl.Method[State]):
    """Hyper-parameters of FedMK.

    Attributes:
        training: of a client's meta knowledge on its own examples; its rate is `speed` times `training.lr`, and its
            optimiser cannot last, since a round begins with others' meta knowledge.
        speed: see there; inputs are of size 1, as weights are not.
        server_training: of the server's models.
        generator_training: of G; its batches are labels.
        per_class: synthetic inputs of each class that a client holds.
        inner_steps: steps of the model on the meta knowledge, through which that is differentiated.
        inner_lr: their rate.
        smoothing: tau; 0 for equal weights.
        initial: what a client begins with, others' meta knowledge ("shared") or "noise".
        pseudo: weight of generated inputs in the models' loss.
        diversity: weight of the generator's term that keeps inputs of different noise apart.
        noise: width of the generator's noise.
        width: of its layers.
    """

    family = "classes"
    unguarded = "the server's models learn from every client's condensed examples"
    revises = ()

    variants = {
        "noise": {"initial": "noise"},
        "equal weights": {"smoothing": 0.0},
        "without a generator": {"pseudo": 0.0},
        "several inner steps": {"inner_steps": 3},
    }

    training: fl.LocalTraining = fl.LocalTraining(lr=0.01, steps=50, batch_size=64)
    server_training: fl.ServerTraining = fl.LocalTraining(steps=100, batch_size=32)
    generator_training: fl.ServerTraining = fl.LocalTraining(steps=20, batch_size=32)
    speed: Annotated[float, fl.above(0)] = 10.0
    per_class: Annotated[int, fl.at_least(2)] = 10
    inner_steps: Annotated[int, fl.at_least(1)] = 1
    inner_lr: Annotated[float, fl.above(0)] = 0.1
    smoothing: Annotated[float, fl.at_least(0)] = 1.0
    initial: Literal["shared", "noise"] = "shared"
    pseudo: Annotated[float, fl.at_least(0)] = 1.0
    diversity: Annotated[float, fl.at_least(0)] = 1.0
    noise: Annotated[int, fl.at_least(1)] = 100
    width: Annotated[int, fl.at_least(1)] = 64

    def __post_init__(self) -> None:
        for name in ("server_training", "generator_training"):
            size = getattr(self, name).batch_size
            fl.require(size >= 2, f"{name}.batch_size", "at least 2, which have batch statistics", size)
        lasts = self.training.persist
        fl.require(not lasts, "training.persist", "False, since every round trains other inputs than it is of", lasts)

    @property
    def keeps_model(self) -> bool:
        return False

    def needs(self) -> frozenset[fl.Need]:
        return frozenset({fl.Need.CLASSES, fl.Need.REAL_INPUTS, fl.derivatives.TWICE})

    def init(self, server: fl.Server) -> State:
        names = sorted({member.architecture for member in server.roster.values()})
        pool = {name: fl.learnt_of(server.build(name)) for name in names}
        return State(pool, fl.learnt_of(self._generator(server)), {})

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        replies = cohort.ask(self.condense, {id: self._sent(state, id, server) for id in cohort.ids})
        data = fl.Examples(torch.cat(replies.entries("inputs")), torch.cat(replies.entries("labels")))
        generator = fl.load(self._generator(server), state.generator)
        models = {p: fl.load(server.build(p), weights) for p, weights in sorted(state.weights.items())}
        objective = KnowledgeLoss(self.pseudo if state.knowledge else 0.0)  # in the first round G has learnt nothing
        for model in models.values():
            server.fit(fl.Fit(model, objective, data, self.server_training, frozen={"generator": generator}))
        frozen, labels = {"models": nn.ModuleList(models.values())}, fl.Examples(data.targets, data.targets)
        server.fit(fl.Fit(generator, RecognitionLoss(self.diversity), labels, self.generator_training, frozen=frozen))
        knowledge = {**state.knowledge, **received(replies)}
        return State({p: fl.learnt_of(net) for p, net in models.items()}, fl.learnt_of(generator), knowledge)

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        n = fl.schema.UpTo(self.per_class * server.num_classes)
        x = fl.schema.floats(n, *fl.one_shape(server.input_shape))
        return fl.Schema(inputs=x, labels=fl.schema.Labels(n, server.num_classes))

    @fl.on_client
    def condense(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        labels = client.train.labels.unique().repeat_interleave(self.per_class)
        inputs = torch.randn(len(labels), *fl.one_shape(client.train.input_shape), generator=client.rng)
        for label in labels.unique():
            if (found := message["inputs"][message["labels"] == label]).numel():
                inputs[labels == label] = found
        knowledge = Knowledge(inputs, labels, fl.load(client.model, message["weights"]))
        objective = CondensationLoss(self.inner_steps, self.inner_lr, self.smoothing)
        training = replace(self.training, lr=self.speed * self.training.lr)
        yield fl.Fit(knowledge, objective, client.train, training)
        return fl.Message(inputs=knowledge.inputs.detach(), labels=labels)

    def inference_message(self, state: State, client_id: fl.ClientId, server: fl.Server) -> fl.Message:
        return fl.Message(weights=state.weights[server.roster[client_id].architecture])

    @fl.on_client
    def inference_model(self, client: fl.Client, message: fl.Message) -> nn.Module:
        net = fl.load(client.model, message["weights"])
        fl.batchnorm.measure_statistics(net, (batch.inputs for batch in client.train.batches(64, client.rng)))
        return net

    def global_model(self, state: State, server: fl.Server) -> nn.Module | None:
        names = list(state.weights)
        return fl.load(server.build(names[0]), state.weights[names[0]]) if len(names) == 1 else None

    def _sent(self, state: State, id: fl.ClientId, server: fl.Server) -> fl.Message:
        """The client's model, and of each class what another client has sent of it, or else it itself."""
        weights = state.weights[server.roster[id].architecture]
        others = [state.knowledge[i] for i in sorted(state.knowledge, key=int) if i != str(id)]
        own = [state.knowledge[str(id)]] if str(id) in state.knowledge else []
        inputs, labels = [torch.empty(0, *fl.one_shape(server.input_shape))], [torch.empty(0, dtype=torch.int64)]
        for label in range(server.num_classes if self.initial == "shared" else 0):
            if holders := holding(label, others) or holding(label, own):
                drawn = holders[int(torch.randint(len(holders), (1,), generator=server.rng))]
                inputs.append(drawn["inputs"][drawn["labels"] == label])
                labels.append(drawn["labels"][drawn["labels"] == label])
        return fl.Message(weights=weights, inputs=torch.cat(inputs), labels=torch.cat(labels))

    def _generator(self, server: fl.Server) -> nn.Module:
        shape, classes = fl.one_shape(server.input_shape), server.num_classes
        return server.module("generator", lambda: fl.inputs.InputGenerator(classes, self.noise, shape, self.width))


def holding(label: int, knowledge: list[fl.Weights]) -> list[fl.Weights]:
    """What has inputs of this class."""
    return [one for one in knowledge if (one["labels"] == label).any()]


def received(replies: fl.Replies) -> dict[str, fl.Weights]:
    """What clients sent, by id as text."""
    return {str(id): {"inputs": reply["inputs"], "labels": reply["labels"]} for id, reply in replies.items()}


class Knowledge(nn.Module):
    """D': inputs (n, ...), which are trained, their labels (n,), and the model w, which follows them."""

    def __init__(self, inputs: Tensor, labels: Tensor, model: nn.Module) -> None:
        super().__init__()
        self.inputs = nn.Parameter(inputs)
        self.labels: Tensor
        self.register_buffer("labels", labels)
        self.model = model.requires_grad_(False)


@dataclass(frozen=True)
class CondensationLoss:
    """The loss of the client's examples after the model's gradient steps on the meta knowledge, which it keeps."""

    steps: int
    lr: float
    smoothing: float

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch of the client's examples."""
        assert isinstance(net, Knowledge)
        weights = {name: weight.detach().clone().requires_grad_() for name, weight in net.model.named_parameters()}
        for _ in range(self.steps):
            with fl.derivatives.twice():
                fitted = F.cross_entropy(fl.call_with(net.model, weights, net.inputs), net.labels)
            gradients = torch.autograd.grad(fitted, list(weights.values()), create_graph=True)
            weights = {name: w - self.lr * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        losses = F.cross_entropy(fl.call_with(net.model, weights, batch.inputs), batch.targets, reduction="none")
        for name, weight in net.model.named_parameters():
            weight.copy_(weights[name].detach())
        shares = 2 * torch.sigmoid(-self.smoothing * losses.detach())
        return (shares * losses).mean()


@dataclass(frozen=True)
class KnowledgeLoss:
    """A model's loss on uploads, and `pseudo` times that on what the extras' "generator" makes of the same labels."""

    pseudo: float

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch of uploads."""
        inputs, labels, _ = batch
        if not self.pseudo:
            return F.cross_entropy(net(inputs), labels)
        with torch.no_grad():
            made, _ = extras["generator"].drawn(labels)
        uploads, generated = net(torch.cat([inputs, made])).chunk(2)
        return F.cross_entropy(uploads, labels) + self.pseudo * F.cross_entropy(generated, labels)


@dataclass(frozen=True)
class RecognitionLoss:
    """The generator's loss: of the extras' "models" on what it makes, and how little that depends on noise."""

    diversity: float

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch of labels."""
        assert isinstance(net, fl.inputs.InputGenerator)
        x, noise = net.drawn(batch.targets)
        missed = torch.stack([F.cross_entropy(model(x), batch.targets) for model in extras["models"]])
        return missed.mean() + self.diversity * fl.generator.likeness(x.flatten(1), noise)
