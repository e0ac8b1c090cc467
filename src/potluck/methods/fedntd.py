"""FedNTD: federated not-true distillation.

Lee, Jeong, Shin, Bae, Yun. NeurIPS 2022. https://arxiv.org/abs/2106.03097. Section 4.

FedAvg whose clients also distil the global model they were sent, but only in what it says of the classes that an
example does not have. Local training thus learns the true class freely, and forgets less of the classes that the client
has no examples of.

Symbols
    w         state.weights, and the net "global" that a client only reads
    z_l, z_g  logits of the net in training, and of "global"
    q_l, q_g  softmax of both over the not-true classes, those other than the label
    L_NTD     not_true_distillation
    tau       temperature
    beta      beta

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    beta=0.0 equals fedavg
    training.steps=1 approaches fedavg training.steps=1 on optimizer="sgd"
    averages each layer over its owners
    training.lr=0.0 stays at rest

Departures from the paper
    1. The net that is read is in evaluation mode, with BatchNorm statistics as `sharing.buffers` says, see `Sharing`.
       The authors' code leaves it in the mode in which it was copied; their network has neither BatchNorm nor Dropout,
       so it does not matter there.
    2. `temperature` and `beta` are 1 by default, as in the authors' configuration; the class of their code that holds
       the loss has a temperature of 3.
    3. Where architectures differ, a client distils the net of its own architecture, filled from the layers that it was
       sent. Layers owned by some clients only are averaged over those, see `sharing`.
    4. With two classes only one is not true, so the distillation is zero, and this is FedAvg.
    5. Local training defaults to Adam, like all methods here; the authors' code has SGD with 0.01, momentum 0.9, weight
       decay 1e-5, batches of 50 and 5 epochs, and multiplies the rate by 0.99 from round to round.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from potluck import fl


@dataclass(frozen=True)
class FedNTD(fl.Averages):
    """Hyper-parameters of FedNTD, beside those of `Averages`.

    Attributes:
        beta: weight of the distillation.
        temperature: tau, by which both nets' logits are divided.
    """

    aligns_classes = True

    variants = {"temperature of the code's class": {"temperature": 3.0}}

    beta: Annotated[float, fl.at_least(0)] = 1.0
    temperature: Annotated[float, fl.above(0)] = 1.0

    def needs(self) -> frozenset[fl.Need]:
        return super().needs() | {fl.Need.CLASSES}

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        objective, read = client.objective, dict[str, nn.Module]()
        if self.beta:
            objective = NotTrueLoss(client.criterion, self.beta, self.temperature)
            read = {"global": (yield from self.sharing.ready(client, client.copy()))}
        yield fl.Fit(client.model, objective, client.train, self.training, frozen=read)
        return self.sharing.reply(client)


@dataclass(frozen=True)
class NotTrueLoss:
    """The task's loss + beta L_NTD."""

    criterion: fl.Criterion
    beta: float
    temperature: float

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch of examples with classes."""
        logits = net(batch.inputs)
        with torch.no_grad():
            taught = extras["global"](batch.inputs)
        loss = self.criterion(logits, batch.targets)
        return loss + self.beta * not_true_distillation(logits, taught, batch.targets, self.temperature)


def not_true_distillation(logits: Tensor, taught: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """L_NTD: tau^2 KL(q_g || q_l), the mean over the batch.

    Args:
        logits: of the net in training, (batch, classes).
        taught: of the global net, (batch, classes); no gradient flows into them.
        labels: the true classes, int64 (batch,).
        temperature: tau.
    """
    return fl.losses.distillation(not_true(logits, labels), not_true(taught, labels), temperature)


def not_true(logits: Tensor, labels: Tensor) -> Tensor:
    """The logits without that of the label, in order: (batch, classes) to (batch, classes - 1)."""
    places = torch.arange(logits.shape[1] - 1, device=logits.device)
    return logits.gather(1, places + (places >= labels[:, None]))
