"""InCoProx: FedProx with internal cross-layer gradients.

Chan, Zhou, Zhao, Jiang, Ngai. ICLR 2024. https://arxiv.org/abs/2308.11464. Algorithm 1.

Clients train as in FedProx, and the server mixes deep layers' updates with those of shallow ones as in InCoAvg.

Symbols
    w         state.weights
    mu        mu, of FedProx
    g_k, g_0  the round's mean updates of a deep layer, and of its shallow one

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    mu=0.0 equals incoavg
    inco.cap=0.0 inco.normalise=false inco.clip=100.0 approaches fedprox sharing.weighting="uniform"
    equals fedprox sharing.weighting="uniform" on architectures=1

Departures from the paper
    1. Those of InCoAvg, and of FedProx, whose local training it has.
"""

from dataclasses import dataclass

from potluck import fl
from potluck.methods.fedprox import FedProx


@dataclass(frozen=True)
class InCoProx(fl.crosslayer.InCo[fl.sharing.Averaged], FedProx):
    """Hyper-parameters of InCoProx: those of FedProx, with equal weights as in the paper, and `inco`."""

    aligns_classes = True

    variants = {"by architecture": {"sharing.scope": "architecture"}}

    sharing: fl.Sharing = fl.Sharing(weighting="uniform")
