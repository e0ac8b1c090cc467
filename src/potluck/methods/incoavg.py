"""InCoAvg: FedAvg with internal cross-layer gradients.

Chan, Zhou, Zhao, Jiang, Ngai. ICLR 2024. https://arxiv.org/abs/2308.11464. Algorithm 1.

FedAvg layer by layer, after which the server mixes the update of each deep layer with that of a shallow layer of its
shape, so that deep layers, which few clients own and on which clients differ most, follow what all have learnt. Clients
train and send as in FedAvg. `incoprox`, `incoscaffold`, `incomoon` and `inconova` do the same over other methods.

Symbols
    w         state.weights
    g_k, g_0  the round's mean updates of a deep layer, and of its shallow one
    alpha     <g_0, g_0>
    beta      <g_0, g_k>
    theta     how much of g_0's direction is added, by `inco.rule`
    E, B, eta training.epochs, training.batch_size, training.lr

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    inco.cap=0.0 inco.normalise=false inco.clip=100.0 approaches fedavg sharing.weighting="uniform"
    equals fedavg sharing.weighting="uniform" on architectures=1
    training.lr=0.0 stays at rest

Departures from the paper
    1. theta is +|beta| / alpha, at most 5, and entries of a mixed update are limited to 0.1, as in the authors' code.
       Algorithm 1 has -beta / alpha and no limits, `inco.rule="paper"`; eq. 2 changes only updates that oppose g_0,
       without norms, `inco.rule="theorem" inco.normalise=false`. Where beta is positive, which the paper finds in three
       of four cases, paper and code go in opposite directions along g_0.
    2. Norms and products are those of single kernels of convolutions, as in the code (`inco.granularity`). The paper
       does not say. As in the code 1 x 1 convolutions are not mixed: their kernels have no direction but a sign.
       `inco.granularity="tensor"` mixes them too.
    3. The paper has the first layer of a shape in a stage as the shallow one. As in the code it is the last such layer
       of the first block that has one, and its block is left as it is; blocks are found by their layers' types and
       shapes, so that other nets than ResNets have pairs too. In transformers the code mixes nothing but the second
       norm of each block with the first; `inco.pairs="inside"` does so, and here blocks mix with the first block.
    4. BatchNorm with its statistics, biases and the head are averaged and not mixed. A mean of variances is never
       below 0, so the code's limit there is not needed.
    5. The code divides transformers' updates by the number of local epochs; here no update is.
    6. A layer that no client of the cohort has, or whose shallow layer has not moved, is not mixed.
"""

from dataclasses import dataclass

from potluck import fl
from potluck.methods.fedavg import FedAvg, State


@dataclass(frozen=True)
class InCoAvg(fl.crosslayer.InCo[State], FedAvg):
    """Hyper-parameters of InCoAvg: those of FedAvg, with equal weights as in the paper, and `inco`."""

    aligns_classes = True

    variants = {
        "paper": {"inco.rule": "paper", "inco.granularity": "tensor"},
        "theorem": {"inco.rule": "theorem", "inco.normalise": False},
        "without normalisation": {"inco.normalise": False},
        "without optimisation": {"inco.rule": "sum"},
        "without both": {"inco.rule": "sum", "inco.normalise": False},
        "by architecture": {"sharing.scope": "architecture"},
    }

    sharing: fl.Sharing = fl.Sharing(weighting="uniform")
