"""FedBN: federated averaging of everything but BatchNorm.

Li, Jiang, Zhang, Kamp, Dou. ICLR 2021. https://arxiv.org/abs/2102.07623. Algorithm 1.

Where clients' inputs differ, as images of several scanners do, the statistics of their features differ. So each client
keeps its BatchNorm layers, scales, shifts and running statistics, and averages all other layers.

Symbols
    w^(l)     state.weights, the layers that are averaged
    w_k^(l)   of a BatchNorm layer, in client.model, kept by the client
    K         the clients of the round
    E         training.steps, or training.epochs

Wire
    down      weights at most |w|
    up        weights at most |w|, examples 1

Limits
    training.lr=0.0 stays at rest
    sharing.weighting="samples" equals fedavg
    averages each layer over its owners

Departures from the paper
    1. Layers owned by some clients only are averaged over those, see `sharing`.
    2. Other layers that normalise, such as GroupNorm, are averaged: they have no statistics.
    3. A client that has never trained has new BatchNorm layers; their statistics are measured on its training data.
    4. Local training defaults to Adam, like all methods here; the paper has SGD with 0.01.
"""

from dataclasses import dataclass

from torch import nn

from potluck import fl


def nobody_normalises(offer: fl.Offer) -> str | None:
    """What a user should know of networks without BatchNorm."""
    plain = [name for name, net in offer.nets.items() if not fl.batchnorm.batch_norms(net)]
    return (
        f"{', '.join(plain)} has no BatchNorm, so its clients average all their layers, as with FedAvg"
        if plain
        else None
    )


BATCHNORM = fl.Need("BatchNorm, to have something of one's own", lambda offer: None, "", nobody_normalises)


@dataclass(frozen=True)
class FedBN(fl.personal.KeepsLayers):
    """Hyper-parameters of FedBN: those of `Averages`, with equal weights as in the paper."""

    aligns_classes = True

    variants = {"by samples": {"sharing.weighting": "samples"}}

    sharing: fl.Sharing = fl.Sharing(weighting="uniform")

    def needs(self) -> frozenset[fl.Need]:
        return super().needs() | {BATCHNORM}

    def own(self, net: nn.Module) -> frozenset[str]:
        norms = fl.batchnorm.batch_norms(net)
        return frozenset(f"{name}.{tensor}" for name, norm in norms.items() for tensor in norm.state_dict())

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        yield fl.Fit(client.model, client.objective, client.train, self.training)
        return self.reply(client, message)
