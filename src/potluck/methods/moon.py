"""MOON: model-contrastive federated learning.

Li, He, Song. CVPR 2021. https://arxiv.org/abs/2103.16257. Algorithm 1.

FedAvg whose clients add a contrastive loss to their own: the representation of an example by the net in training is
drawn towards the global model's, and away from that of the client's model after its last participation.

Symbols
    w^t       state.weights, and the net "global" that a client only reads
    w_i^t     client.model
    w_i^(t-1) client.state["previous"], and the net "previous"
    F_w, R_w  the whole network, and what its last layer reads
    z         of the net in training; z_glob and z_prev of the two others
    tau       temperature
    mu        mu

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    mu=0.0 equals fedavg
    equals fedavg on rounds=1
    averages each layer over its owners
    training.lr=0.0 stays at rest

Departures from the paper
    1. R is the network up to its last layer. The paper puts two further layers, a projection head, between the two.
    2. A client that has never trained has no previous model, and trains without the contrastive loss. Without it the
       first loss would be that of two equal nets, log 2, whose gradient is zero.
    3. Where few clients are drawn the previous model may be many rounds old, as section 3.3 has it; Algorithm 1 draws
       all of them.
    4. The two nets that are read are in evaluation mode, as in the authors' code; the paper does not say. "previous"
       has the BatchNorm statistics of its training, and "global" those that `sharing.buffers` says, see `Sharing`.
    5. Layers owned by some clients only are averaged over those, see `sharing`.
    6. Local training defaults to Adam, like all methods here; the paper has SGD with 0.01, momentum 0.9, weight decay
       1e-5, batches of 64 and 10 epochs. It tunes mu from 0.1 to 10; 1 is the default of its code.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck import fl


@dataclass(frozen=True)
class MOON(fl.Averages):
    """Hyper-parameters of MOON, beside those of `Averages`, whose round is l. 4-7 of Algorithm 1.

    Attributes:
        mu: weight of the contrastive loss.
        temperature: tau.
    """

    aligns_classes = True
    mu: Annotated[float, fl.at_least(0)] = 1.0
    temperature: Annotated[float, fl.above(0)] = 0.5

    def needs(self) -> frozenset[fl.Need]:
        return super().needs() | {fl.Need.SPLIT_MODEL}

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)  # Alg. 1, l. 10
        objective, read = client.objective, dict[str, nn.Module]()
        if self.mu and (previous := client.state.get("previous")):
            objective = ContrastiveLoss(client.criterion, self.mu, self.temperature)
            sent = yield from self.sharing.ready(client, client.copy())
            read = {"global": sent, "previous": fl.load(client.twin(), previous)}
        yield fl.Fit(client.model, objective, client.train, self.training, frozen=read)  # l. 11-19
        if self.mu:
            client.state["previous"] = fl.learnt_of(client.model)  # w_i^(t-1) of its next round
        return self.sharing.reply(client)  # l. 20


@dataclass(frozen=True)
class ContrastiveLoss:
    """Eq. 4: the task's loss + mu times the model-contrastive loss."""

    criterion: fl.Criterion
    mu: float
    temperature: float

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        _, z, outputs = fl.split(net).passed(batch.inputs)  # Alg. 1, l. 14: z = R_w(x)
        with torch.no_grad():
            z_glob, z_prev = (representation(extras[name], batch.inputs) for name in ("global", "previous"))  # l. 15-16
        l_sup = self.criterion(outputs, batch.targets)  # l. 13
        l_con = contrastive(z, z_glob, z_prev, self.temperature)  # l. 17
        return l_sup + self.mu * l_con  # l. 18


def representation(net: nn.Module, inputs: Tensor) -> Tensor:
    """R_w: what the last layer reads, (batch, width)."""
    return fl.split(net).features(inputs)


def contrastive(z: Tensor, z_glob: Tensor, z_prev: Tensor, temperature: float) -> Tensor:
    """Eq. 3: the cross-entropy of choosing z_glob over z_prev by their cosine similarity to z; mean over the batch."""
    similar = torch.stack([F.cosine_similarity(z, other) for other in (z_glob, z_prev)], 1)
    return -F.log_softmax(similar / temperature, 1)[:, 0].mean()
