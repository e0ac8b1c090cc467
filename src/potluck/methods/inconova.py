"""InCoNova: FedNova with internal cross-layer gradients.

Chan, Zhou, Zhao, Jiang, Ngai. ICLR 2024. https://arxiv.org/abs/2308.11464. Algorithm 1.

Clients train and send as in FedNova; the server mixes the normalised updates of deep layers with those of shallow ones
as in InCoAvg.

Symbols
    x         state.weights
    tau_eff   of FedNova, the mean number of local steps of each layer's owners
    g_k, g_0  the round's updates of a deep layer, and of its shallow one: -tau_eff times the mean of d

Wire
    down      weights |w|, buffers |b|
    up        d |w|, steps 1, buffers |b|, examples 1

Limits
    training.steps=3 approaches incoavg training.steps=3 on optimizer="sgd"
    inco.cap=0.0 inco.normalise=false inco.clip=100.0 approaches fednova sharing.weighting="uniform" on optimizer="sgd"
    equals fednova sharing.weighting="uniform" on architectures=1

Departures from the paper
    1. Those of InCoAvg, and of FedNova, whose local training it has.
    2. With equal weights p_i is 1 / |S_t|; FedNova's own weights are `sharing.weighting="samples"`.
"""

from dataclasses import dataclass

from potluck import fl
from potluck.methods.fednova import FedNova, State


@dataclass(frozen=True)
class InCoNova(fl.crosslayer.InCo[State], FedNova):
    """Hyper-parameters of InCoNova: those of FedNova, with equal weights as in the paper, and `inco`."""

    aligns_classes = True

    variants = {"by architecture": {"sharing.scope": "architecture"}}

    sharing: fl.Sharing = fl.Sharing(weighting="uniform")
