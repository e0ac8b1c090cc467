"""FedPer: base layers for all, personal layers for each.

Arivazhagan, Aggarwal, Singh, Choudhary. 2019. https://arxiv.org/abs/1912.00818. Algorithms 1 and 2.

Every client trains its whole network; the base layers are averaged, and the last layers stay with the client. So
clients may predict different classes, and their last layers may differ in shape.

Symbols
    W_B       state.weights, the base layers
    W_P_j     the last layers of client.model, kept by the client
    K_P       personal_layers
    gamma_j   len(client.train), as a share of the cohort's
    e, b, eta training.epochs, training.batch_size, training.lr

Wire
    down      weights at most |w|, buffers at most |b|
    up        weights at most |w|, buffers at most |b|, examples 1

Limits
    training.lr=0.0 stays at rest
    personal_layers=9 equals local
    averages each layer over its owners on batchnorm=true

Departures from the paper
    1. A personal layer is the head, and further ones are stages from the end, such as the residual stages of a ResNet.
    2. Layers owned by some clients only are averaged over those, see `sharing`.
    3. Clients that were not drawn keep their personal layers; the paper draws all clients in every round.
    4. BatchNorm's running statistics, which the paper does not mention, go with the layer that they belong to.
    5. Local training defaults to Adam, like all methods here; the paper has SGD.
"""

from dataclasses import dataclass
from typing import Annotated

from torch import nn

from potluck import fl


@dataclass(frozen=True)
class FedPer(fl.personal.KeepsLayers):
    """Hyper-parameters of FedPer, beside those of `Averages`.

    Attributes:
        personal_layers: K_P, how many layers stay: the head, and stages before it.
    """

    aligns_classes = True

    variants = {"two layers": {"personal_layers": 2}, "uniform": {"sharing.weighting": "uniform"}}

    personal_layers: Annotated[int, fl.at_least(1)] = 1

    def needs(self) -> frozenset[fl.Need]:
        return super().needs() | {fl.Need.SPLIT_MODEL}

    def own(self, net: nn.Module) -> frozenset[str]:
        return fl.split(net).last_names(self.personal_layers - 1)

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)  # W_B; W_P is the client's
        yield fl.Fit(client.model, client.objective, client.train, self.training)
        return self.reply(client, message)  # W_B alone
