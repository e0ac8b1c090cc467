"""FedRolex: model-heterogeneous federated learning with rolling sub-model extraction.

Alam, Liu, Yan, Zhang. NeurIPS 2022. https://arxiv.org/abs/2212.01548. Algorithm 1.

HeteroFL with another choice of channels: the window that a client trains begins one channel further on in every
round and goes around, so that narrow clients train all channels of the global network, one after the other, and the
global network may be wider than any client's.

Algorithm 1 is HeteroFL's `round`, `local_update` its clientStep: the server sends client m the slice S_m of theta (eq.
4), the client trains it, and each weight becomes the mean over M_k, those who had it (eq. 10).

Symbols
    theta     state.weights
    beta_n    rate, the share of channels that client n trains
    j         server.round - 1
    K_i       the channels of layer i
    S_n       submodel, in layer i the channels from j mod K_i on, going around
    p_m       1, the weight of a client in the mean

Wire
    down      weights |slice| + |w|, rate 1
    up        weights |slice|, labels classes * flag, statistics |b|, batches 1
    with      assignment="dynamic" also: down weights at most |w| + |w|; up weights at most |w|

Limits
    equals heterofl on rounds=1
    equals heterofl on capacity=1.0
    equals fedavg sharing.weighting="uniform" training.clip_norm=1.0 on capacity=1.0
    training.lr=0.0 stays at rest on capacity=1.0

Departures from the paper
    1. Those of HeteroFL, whose local training it has. So the statistics of BatchNorm are measured here; the authors'
       code evaluates with those of the test batches.
    2. Windows roll forward and have as many channels as the narrow net, which rounds up. The authors' code rolls
       backward, and the paper rounds down.
    3. All clients count equally, as in the paper. The authors' code does so in convolutions, and weighs other layers by
       its count of updates so far, earlier clients of the same round included.
    4. In networks whose shortcuts fill up with zeros (`resnet20`, `preresnet20`) a channel keeps its number past the
       shortcut. There the channels beyond the width of the layers before are a window of their own.
    5. A client is evaluated with the window of the last round.
    6. Every channel has its turn, but not every weight: where a layer reads as many channels as it writes, a client
       has no weight between two channels that lie further apart than its window is long.
    7. Optimisers are new in every round, as in the code. One that lasted (`training.persist`) would have the momentum
       of a channel for the next one, since the window moves on; it is refused.
"""

from dataclasses import dataclass

from torch import nn

from potluck import fl
from potluck.methods.heterofl import HeteroFL


@dataclass(frozen=True)
class FedRolex(HeteroFL):
    """Hyper-parameters of FedRolex: those of HeteroFL."""

    def __post_init__(self) -> None:
        super().__post_init__()
        expected, lasts = "False, since the window moves on to other channels than it is of", self.training.persist
        fl.require(not lasts, "training.persist", expected, lasts)

    def submodel(self, server: fl.Server, rate: float) -> fl.submodels.SubModel:
        channels = server.about(None, fl.channels.Narrowing.to(server.build(width=rate)))
        return window(channels, server.round)

    def narrow_net(self, client: fl.Client, message: fl.Message) -> nn.Module:
        net = super().narrow_net(client, message)
        if frozen := fl.weights.frozen_names(net):  # what is frozen is not sent: the client rolls its own
            channels = fl.channels.Narrowing.to(net)(client.twin(), client.train.input_shape)
            rolled = fl.submodels.select(fl.weights.weights_of(client.twin()), window(channels, client.round))
            fl.load(net, {name: rolled[name] for name in frozen}, partial=True)
        return net


def window(channels: fl.slicing.Channels, number: int) -> fl.submodels.SubModel:
    """Eq. 4: S_n in round `number`, from 1, that is j + 1; before the first that of the first."""
    j = max(number - 1, 0)
    return channels.rolling(j)  # j mod K_i, (j + 1) mod K_i, ...
