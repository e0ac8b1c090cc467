"""InCoScaffold: SCAFFOLD with internal cross-layer gradients.

Chan, Zhou, Zhao, Jiang, Ngai. ICLR 2024. https://arxiv.org/abs/2308.11464. Algorithm 1.

Clients train as in SCAFFOLD, and the server mixes deep layers' updates with those of shallow ones as in InCoAvg.
Control variates are averaged as in SCAFFOLD and not mixed.

Symbols
    x, c      state.weights, state.control
    c_i       client.state["control"]
    g_k, g_0  the round's updates of a deep layer, and of its shallow one: server_lr times the mean of dy

Wire
    down      weights |w|, buffers |b|, control |w|
    up        dy |w|, dc |w|, buffers |b|, examples 1

Limits
    approaches incoavg on rounds=1 optimizer="sgd"
    inco.cap=0.0 inco.normalise=false inco.clip=100.0 approaches scaffold on optimizer="sgd"
    equals scaffold on architectures=1

Departures from the paper
    1. Those of InCoAvg, and of SCAFFOLD, whose local training it has.
    2. The paper does not say whether control variates are mixed; a client's is the mean of its own steps.
"""

from dataclasses import dataclass

from potluck import fl
from potluck.methods.scaffold import Scaffold, State


@dataclass(frozen=True)
class InCoScaffold(fl.crosslayer.InCo[State], Scaffold):
    """Hyper-parameters of InCoScaffold: those of SCAFFOLD, and `inco`."""

    aligns_classes = True

    variants = {"gradient": {"option": "gradient"}, "by architecture": {"sharing.scope": "architecture"}}
