"""InCoMOON: MOON with internal cross-layer gradients.

Chan, Zhou, Zhao, Jiang, Ngai. ICLR 2024. https://arxiv.org/abs/2308.11464. Algorithm 1.

Clients train as in MOON, and the server mixes deep layers' updates with those of shallow ones as in InCoAvg.

Symbols
    w^t       state.weights
    mu, tau   mu and temperature, of MOON
    g_k, g_0  the round's mean updates of a deep layer, and of its shallow one

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    mu=0.0 equals incoavg
    equals incoavg on rounds=1
    inco.cap=0.0 inco.normalise=false inco.clip=100.0 approaches moon sharing.weighting="uniform" on optimizer="sgd"
    equals moon sharing.weighting="uniform" on architectures=1

Departures from the paper
    1. Those of InCoAvg, and of MOON, whose local training it has.
"""

from dataclasses import dataclass

from potluck import fl
from potluck.methods.moon import MOON


@dataclass(frozen=True)
class InCoMOON(fl.crosslayer.InCo[fl.sharing.Averaged], MOON):
    """Hyper-parameters of InCoMOON: those of MOON, with equal weights as in the paper, and `inco`."""

    aligns_classes = True

    variants = {"by architecture": {"sharing.scope": "architecture"}}

    sharing: fl.Sharing = fl.Sharing(weighting="uniform")
