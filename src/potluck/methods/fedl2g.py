"""FedL2G: guidance of local training that is learnt from what it does for the clients.

Zhang, Liu, Hua, Cao, Yang. 2024. https://arxiv.org/abs/2410.06490.

The server keeps a guiding vector for each class, and clients of any architecture draw the logits of their examples
towards that of their class. The vectors are no averages of what clients have learnt, as prototypes are, but parameters
of the guidance: each client holds out a few examples, the quiz, tries one step of guided training, and reports the
gradient of its loss on the quiz in the vectors. The server steps against the mean of these gradients, so that the
vectors become those that help clients with their own tasks.

    theta' = theta - eta grad_theta [ L(study, theta) + lambda MSE(z(study, theta), v_y) ]
    pi     = grad_v L(quiz, theta'),        v <- v - eta_S mean of pi over clients

Symbols
    theta     client.model, kept by the client
    v         state.guide, a vector for each class
    z         what is guided, logits (FedL2G-l) or features (FedL2G-f), see `guided`
    pi        reply["gradients"], its rows of the classes that the study has
    eta       study_rate, of the step that is tried
    eta_S     server_rate
    lambda    strength

Wire
    down      guide |guide|
    up        studied at most present * integer, gradients at most present * |z|
    with      guided="features" also: up gradients at most present * |h|

Limits
    warm_up=2 stays at rest
    training.lr=0.0 stays at rest
    strength=0.0 server_rate=0.0 equals fedl2g strength=0.0
    server_rate=0.0 equals fedl2g on rounds=1

Departures from the paper
    1. In its first 50 rounds clients do not train, and only the vectors learn (`warm_up`); these rounds are not counted
       in its results. Here they would be, so by default there are none.
    2. The step that is tried has the learning rate of local training, which in the paper is SGD with 0.01. Here it has
       its own, since local training defaults to Adam, like all methods here.
    3. The quiz is a random 16 of a client's examples, the same in every round, and at most half of them; in the
       authors' code it is the client's first batch of 10. A client with fewer than four examples has no quiz: it
       trains with all, and reports nothing.
    4. Study and quiz are one batch each, drawn without augmentation; the study is drawn anew in every round.
    5. The mean over clients of a class's gradients covers those whose study has the class, as in the authors' code.
    6. The code limits the norm of every gradient to 100; here `training.clip_norm` limits the clients', and nothing the
       server's.
    7. lambda is not in the paper, where it is 1.
    8. server_rate is 0.1, the authors' for logits; for features they have 100, see `variants`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck import fl

Guided = Literal["logits", "features"]


@dataclass(frozen=True)
class State:
    """v, (classes, width)."""

    guide: Tensor


@dataclass(frozen=True)
class FedL2G(fl.Method[State]):
    """Hyper-parameters of FedL2G.

    Attributes:
        training: a client's local training.
        guided: what the vectors guide, a client's logits or the features that its head reads.
        strength: lambda, weight of the distance to the vectors.
        server_rate: eta_S, learning rate of the vectors.
        study_rate: eta, learning rate of the step of guided training that clients try.
        study: examples of that step.
        quiz: examples that a client holds out to evaluate it with.
        warm_up: rounds in which only the vectors learn.
        combine: how the clients' gradients of a vector become one.
    """

    family = "classes"
    aligns_classes = True
    revises = ()

    variants = {
        "features": {"guided": "features", "server_rate": 100.0},
        "warm-up": {"warm_up": 1},
    }

    training: fl.LocalTraining = fl.LocalTraining()
    guided: Guided = "logits"
    strength: Annotated[float, fl.at_least(0)] = 1.0
    server_rate: Annotated[float, fl.at_least(0)] = 0.1
    study_rate: Annotated[float, fl.above(0)] = 0.01
    study: Annotated[int, fl.at_least(2)] = 16
    quiz: Annotated[int, fl.at_least(2)] = 16
    warm_up: Annotated[int, fl.at_least(0)] = 0
    combine: fl.Aggregate = fl.Aggregate()

    def needs(self) -> frozenset[fl.Need]:
        compared = {fl.Need.SPLIT_MODEL, fl.features.ONE_ROW, fl.heads.COMMON_WIDTH}
        features = compared if self.guided == "features" else set[fl.Need]()
        return frozenset({fl.Need.CLASSES, fl.derivatives.TWICE, *features})

    def init(self, server: fl.Server) -> State:
        width = fl.features.common_width(server) if self.guided == "features" else server.num_classes
        vectors = server.module("guide", partial(nn.Embedding, server.num_classes, width))
        return State(vectors.get_parameter("weight").detach())

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        replies = cohort.ask(self.local_update, fl.Message(guide=state.guide))
        rows = fl.prototypes.one_each(torch.cat(replies.entries("gradients")), torch.cat(replies.entries("studied")))
        mean = fl.prototypes.averages(rows, server.num_classes, self.combine)["means"]
        return State(state.guide - self.server_rate * mean.masked_fill(mean == -torch.inf, 0.0))

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        rows = fl.schema.UpTo(server.num_classes, least=0)
        width = message["guide"].shape[1]
        of_features = self.guided == "features"
        gradients = fl.schema.floats(rows, width) if of_features else fl.schema.logits(rows, width, member)
        return fl.Schema(studied=fl.schema.Labels(rows, server.num_classes, present=rows), gradients=gradients)

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        guide, loss = message["guide"], GuidedLoss(client.criterion, self.guided, self.strength)
        own, quiz = self._divided(client)
        if client.round > self.warm_up:
            yield fl.Fit(client.model, loss, own, self.training, {"guide": guide})
        if not len(quiz):
            return fl.Message(studied=torch.empty(0, dtype=torch.int64), gradients=guide[:0])
        study = own.take(torch.randperm(len(own), generator=client.rng)[: self.study])
        pair = nn.ModuleDict({"model": client.model, "guide": nn.Embedding.from_pretrained(guide, freeze=False)})
        asked = {"quiz": quiz.batch(torch.arange(len(quiz)))}
        found = yield fl.Gradient(pair, QuizLoss(loss, self.study_rate), study, asked, batch_size=self.study)
        studied = study.labels.unique()
        gradients = found["guide.weight"][studied]
        if client.classes is not None and self.guided == "logits":
            gradients = client.classes.only(gradients)  # it says nothing of the others
        return fl.Message(studied=studied, gradients=gradients)

    def _divided(self, client: fl.Client) -> tuple[fl.Examples, fl.Examples]:
        """The examples that the client trains with, and the quiz, which may be empty."""
        whole = len(client.train)
        size = min(self.quiz, whole // 2)
        if "quiz" not in client.state:
            drawn = torch.randperm(whole, generator=client.rng)[: size if size > 1 else 0]
            client.state["quiz"] = drawn
        chosen = torch.zeros(whole, dtype=torch.bool)
        chosen[client.state["quiz"]] = True
        own, quiz = (client.train.take(rows.nonzero().flatten()) for rows in (~chosen, chosen))
        return own, quiz


@dataclass(frozen=True)
class GuidedLoss:
    """The task's loss + strength MSE(z, v_y), the mean over batch and width; v are the extras' "guide"."""

    criterion: fl.Criterion
    guided: Guided
    strength: float

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch of examples with classes."""
        if self.guided == "logits":
            logits = guided = net(batch.inputs)
        else:
            _, guided, logits = fl.split(net).passed(batch.inputs)
        gap = fl.losses.difference(guided, extras["guide"][batch.targets], F.mse_loss)
        return self.criterion(logits, batch.targets) + self.strength * gap


@dataclass(frozen=True)
class QuizLoss:
    """The task's loss on the extras' "quiz", after a step on the batch by `lesson`; it depends on the net's "guide"."""

    lesson: GuidedLoss
    rate: float

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch to study; the net's "model" has no gradient and stays as it is."""
        model, guide = Taught(net.get_submodule("model"), self.lesson), net.get_parameter("guide.weight")
        weights = {name: w.detach().requires_grad_() for name, w in model.named_parameters() if w.requires_grad}
        with fl.derivatives.twice():
            loss = fl.call_with(model, weights, batch, {"guide": guide})
            wanted = list(weights.values())
            gradients = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True, materialize_grads=True)
            steps = zip(weights.items(), gradients, strict=True)
            after = {name: weight.detach() - self.rate * gradient for (name, weight), gradient in steps}
            quiz: fl.Batch = extras["quiz"]
            outputs = fl.call_with(model, after, quiz, None)
        return self.lesson.criterion(outputs, quiz.targets)


class Taught(nn.Module):
    """A net together with an objective, so that both can be called with other weights."""

    def __init__(self, net: nn.Module, objective: GuidedLoss) -> None:
        super().__init__()
        self.net, self.objective = net, objective

    def forward(self, batch: fl.Batch, extras: fl.Extras | None) -> Tensor:
        """The objective's loss, or the net's outputs if there are no extras."""
        return self.net(batch.inputs) if extras is None else self.objective(self.net, batch, extras)
