"""FedGKD: federated learning with global knowledge distillation from past global models.

Yao, Pan, Dai, Wan, Ding, Jin, Xu, Sun. 2021. https://arxiv.org/abs/2107.00051. FedGKD, and not its variant FedGKD-VOTE.

FedAvg in which clients also learn from the predictions of a teacher, the average of the last few global models, so that
they forget less of what others have learnt.

Symbols
    w^t       state.weights
    M         buffer
    w-bar^t   message["teacher"], and the net "teacher" that a client only reads: the mean of w^t, ..., w^(t-M+1)
    z, z-bar  logits of the net in training, and of "teacher"
    gamma     gamma
    T         temperature

Wire
    down      weights |w|, buffers |b|, teacher |w| + |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    gamma=0.0 equals fedavg
    equals fedavg on rounds=1
    buffer=1 training.steps=1 approaches fedavg training.steps=1 on optimizer="sgd"
    averages each layer over its owners
    training.lr=0.0 stays at rest

Departures from the paper
    1. gamma multiplies the divergence as the authors' code has it, with 0.1 as in its script.
    2. As in that code there is no teacher in the first round, and the initial weights never become part of one.
    3. With `buffer=1` the teacher is the model that the client was sent, which costs no further bytes; in the code
       it is then the first round's model for ever.
    4. The teacher is in evaluation mode. It has BatchNorm statistics averaged like its weights; where these stay at
       clients (`sharing.buffers`), it has the client's own; where it has none, or they are dropped, they are measured.
    5. Where architectures differ, a client's teacher has the layers that it owns. Layers owned by some clients only are
       averaged over those, see `sharing`.
    6. FedGKD-VOTE weighs several teachers by their losses on data that the server holds out, and in the authors' code
       its term has no gradient; it is not offered.
    7. Local training defaults to Adam, like all methods here; the code has SGD with 0.05, momentum 0.9, weight decay
       1e-5, batches of 64 and 20 epochs, and averages clients equally (`sharing.weighting = "uniform"`).
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck import fl

Divergence = Literal["kl", "mse"]


@dataclass(frozen=True)
class State:
    """The server's weights, and those of the last rounds.

    Attributes:
        weights: w^t, by group of clients.
        history: the last M, by the number of the round that made them.
    """

    weights: fl.GroupWeights
    history: dict[str, fl.GroupWeights]


@dataclass(frozen=True)
class FedGKD(fl.SharesWeights[State]):
    """Hyper-parameters of FedGKD.

    Attributes:
        training: a client's local training.
        gamma: weight of the distillation.
        temperature: T, by which both nets' logits are divided; 1 with "mse".
        buffer: M, how many global models the teacher is the mean of.
        divergence: "kl" of the softened predictions, times T squared, or the "mse" of the logits.
        sharing: who averages with whom, with which weights.
    """

    aligns_classes = True

    variants = {
        "the last model teaches": {"buffer": 1},
        "distance of logits": {"divergence": "mse"},
        "three models teach": {"buffer": 3, "temperature": 2.0},
    }

    training: fl.LocalTraining = fl.LocalTraining()
    gamma: Annotated[float, fl.at_least(0)] = 0.1
    temperature: Annotated[float, fl.above(0)] = 1.0
    buffer: Annotated[int, fl.at_least(1)] = 5
    divergence: Divergence = "kl"
    sharing: fl.Sharing = fl.Sharing()

    def __post_init__(self) -> None:
        softens = self.divergence == "kl" or self.temperature == 1
        fl.require(softens, "temperature", "1 where divergence is 'mse', which compares plain logits", self.temperature)

    def needs(self) -> frozenset[fl.Need]:
        return super().needs() | {fl.Need.CLASSES}

    def init(self, server: fl.Server) -> State:
        return State(self.sharing.initial(server), {})

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        teacher = mean_of(state.history) if self.buffer > 1 and self.gamma else {}
        sent = self.sharing.send(state.weights, cohort, server, teacher=lambda member: self._owned(teacher, member))
        pool = self.sharing.merge(state.weights, cohort.stream(self.local_update, sent), server.roster)
        history = {**state.history, str(server.round): pool}
        return State(pool, {number: history[number] for number in sorted(history, key=int)[-self.buffer :]})

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        taught = message.get("teacher", {} if self.buffer == 1 and client.round > 1 else None)
        objective, read = client.objective, dict[str, nn.Module]()
        if self.gamma and taught is not None:
            objective = TaughtLoss(client.criterion, self.gamma, self.temperature, self.divergence)
            teacher = fl.load(client.copy(), taught, partial=True)
            read = {"teacher": (yield from self.sharing.ready(client, teacher))}
        yield fl.Fit(client.model, objective, client.train, self.training, frozen=read)
        return self.sharing.reply(client)

    def _owned(self, teacher: fl.GroupWeights, member: fl.Member) -> fl.Weights | None:
        """Of the teacher, the layers that a client owns; its buffers only if they are averaged."""
        if not teacher:
            return None
        owned = self.sharing.owned(teacher, member)
        shared = self.sharing.buffers == "average"
        return {name: tensor for name, tensor in owned.items() if shared or name in member.parameters}


def mean_of(history: dict[str, fl.GroupWeights]) -> fl.GroupWeights:
    """w-bar^t: by group and layer, the plain mean of all models that are held; nothing if there are none."""
    pools, shares = [history[number] for number in sorted(history, key=int)], [1.0] * len(history)
    first = pools[0] if pools else {}
    return {g: {n: fl.weights.mean([pool[g][n] for pool in pools], shares) for n in first[g]} for g in first}


@dataclass(frozen=True)
class TaughtLoss:
    """The task's loss + gamma T^2 KL(z-bar || z), softened by T; or + gamma MSE(z, z-bar)."""

    criterion: fl.Criterion
    gamma: float
    temperature: float
    divergence: Divergence

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch of examples with classes."""
        logits = net(batch.inputs)
        with torch.no_grad():
            taught = extras["teacher"](batch.inputs)
        gap = (
            fl.losses.difference(logits, taught, F.mse_loss)
            if self.divergence == "mse"
            else fl.losses.distillation(logits, taught, self.temperature)
        )
        return self.criterion(logits, batch.targets) + self.gamma * gap
