"""FedMLB: multi-level branched regularization.

Kim, Kim, Han. ICML 2022. https://proceedings.mlr.press/v162/kim22a.html.

FedAvg in which clients also train hybrid paths: behind each stage of a client's net, what it has computed so far goes
on through the rest of the global model, which is frozen. The hybrid paths learn the labels too, and teach the client's
own path. So its features remain of use to the global model at every level.

Symbols
    theta     state.weights, and the net "global" that a client only reads
    M         the stages of a client's net; hybrid path m follows its first m stages, and the global model from there
    q_L, q_H  softmax of the own path, and of a hybrid one
    lambda1   lambda1, of the own path's loss
    lambda2   lambda2, of the hybrid paths' mean loss
    lambda3   lambda3, of the mean of KL(q_H || q_L)
    tau       temperature

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    lambda2=0.0 lambda3=0.0 equals fedavg
    lambda2=0.0 training.steps=1 approaches fedavg training.steps=1 on optimizer="sgd"
    averages each layer over its owners
    training.lr=0.0 stays at rest

Departures from the paper
    1. Hybrid paths begin behind every stage of the client's net, the last one included, whose path is the global head
       on the client's features. In the authors' ResNet there are five: behind the stem and each of four groups of
       blocks.
    2. The gradient of KL flows into both of its sides, as in the authors' code: through a hybrid path, the teacher,
       into the client's stages before the branch. `teacher_learns=false` treats the teacher as constant.
    3. KL is not multiplied by tau squared, as in the authors' code; the paper's tau is 1, where it does not matter.
    4. The frozen part of a path is in evaluation mode, with BatchNorm statistics as `sharing.buffers` says, see
       `Sharing`. The authors' networks have GroupNorm, so that it does not matter there.
    5. Where architectures differ, the global model is the net of the client's own architecture, filled from the layers
       that it was sent. Layers owned by some clients only are averaged over those, see `sharing`.
    6. Local training defaults to Adam, like all methods here; the authors' code has SGD with 0.1, weight decay 1e-3,
       gradients limited to a norm of 10, batches of 50 and 5 epochs, and multiplies the rate by 0.998 from round to
       round.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from potluck import fl


@dataclass(frozen=True)
class FedMLB(fl.Averages):
    """Hyper-parameters of FedMLB, beside those of `Averages`.

    Attributes:
        lambda1: weight of the own path's loss.
        lambda2: weight of the hybrid paths' mean loss.
        lambda3: weight of the distillation from the hybrid paths.
        temperature: tau, by which the logits of both are divided in the distillation.
        teacher_learns: whether the distillation has a gradient in the hybrid paths too, see departure 2.
    """

    aligns_classes = True

    variants = {"constant teacher": {"teacher_learns": False}}

    lambda1: Annotated[float, fl.at_least(0)] = 1.0
    lambda2: Annotated[float, fl.at_least(0)] = 1.0
    lambda3: Annotated[float, fl.at_least(0)] = 1.0
    temperature: Annotated[float, fl.above(0)] = 1.0
    teacher_learns: bool = True

    def needs(self) -> frozenset[fl.Need]:
        return super().needs() | {fl.Need.SPLIT_MODEL, fl.features.MIDDLE, fl.Need.CLASSES}

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        read = dict[str, nn.Module]()
        if self.lambda2 or self.lambda3:
            read = {"global": (yield from self.sharing.ready(client, client.copy()))}
        objective = BranchedLoss(
            client.criterion, self.lambda1, self.lambda2, self.lambda3, self.temperature, self.teacher_learns
        )
        yield fl.Fit(client.model, objective, client.train, self.training, frozen=read)
        return self.sharing.reply(client)


@dataclass(frozen=True)
class BranchedLoss:
    """lambda1 the loss of the own path + lambda2 that of the hybrid paths + lambda3 the distillation; means over paths.

    The extras have the frozen net as "global"; it is not read if the last two weights are zero.
    """

    criterion: fl.Criterion
    lambda1: float
    lambda2: float
    lambda3: float
    temperature: float
    teacher_learns: bool

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch of examples with classes."""
        features, logits = fl.split(net).levels(batch.inputs)
        loss = self.lambda1 * self.criterion(logits, batch.targets)
        if not (self.lambda2 or self.lambda3):
            return loss
        hybrids = hybrid_paths(extras["global"], features)
        errors = [self.criterion(hybrid, batch.targets) for hybrid in hybrids]
        taught = [online_distillation(logits, hybrid, self.temperature, self.teacher_learns) for hybrid in hybrids]
        return loss + self.lambda2 * torch.stack(errors).mean() + self.lambda3 * torch.stack(taught).mean()


def hybrid_paths(common: nn.Module, features: list[Tensor]) -> list[Tensor]:
    """By level, the logits (batch, classes) of its features after the remaining stages and the head of `common`."""
    return [fl.split(common).resumed(h, m) for m, h in enumerate(features, start=1)]


def online_distillation(logits: Tensor, hybrid: Tensor, temperature: float, teacher_learns: bool) -> Tensor:
    """KL(q_H || q_L) of softened predictions, without a temperature's square; the mean over the batch."""
    return fl.losses.distillation(logits, hybrid, temperature, teacher_learns=teacher_learns) / temperature**2
