"""FedProx: federated averaging with a proximal term.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. MLSys 2020. https://arxiv.org/abs/1812.06127. Algorithm 2.

FedAvg in which each client is also pulled towards the weights that it was sent, so that clients with different data
drift less far apart.

Symbols
    w^t       state.weights
    h_k       fl.losses.ProximalLoss
    mu        mu
    p_k       len(client.train)
    E, B, eta training.epochs, training.batch_size, training.lr

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    mu=0.0 equals fedavg
    descends the gradient
    counts a twin as twice the data
    averages each layer over its owners
    coupled=false mu=0.0 equals fedavg
    sharing.scope="layer" equals fedprox sharing.scope="architecture" on architectures=1

Departures from the paper
    1. A client minimises h_k by `training`, an optimiser and a number of epochs; the paper asks for a solution that is
       gamma-inexact, and leaves open how it is found. The term is part of the loss, so Adam and momentum see it too.
       With `coupled=false` they do not: each step on F_k is followed by the proximal step of (mu / 2) |w - w^t|^2.
    2. Every client trains for as long; the paper's stragglers, who send partial work, are not simulated.
    3. Clients are drawn uniformly and weighed by their examples, as in the authors' code; the paper draws them by their
       share of the examples and weighs equally.
    4. Layers owned by some clients only, Adam, and BatchNorm's statistics: departures 1, 2 and 4 of FedAvg. The term
       covers parameters only.
    5. `mu` is 0.1 by default, as in the papers on heterogeneous models that use this baseline; the paper tunes it
       among 0.001, 0.01, 0.1 and 1.
"""

from dataclasses import dataclass
from typing import Annotated

from potluck import fl


@dataclass(frozen=True)
class FedProx(fl.Averages):
    """Hyper-parameters of FedProx, beside those of `Averages`.

    Attributes:
        mu: strength of the pull towards the weights that were sent.
        coupled: whether the pull is part of the loss, or a step of its own after each of the optimiser's.
    """

    aligns_classes = True

    variants = {"decoupled": {"coupled": False}}

    mu: Annotated[float, fl.at_least(0)] = 0.1
    coupled: bool = True

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        objective = fl.losses.ProximalLoss(client.criterion, self.mu if self.coupled else 0.0)
        sent, pull = {"sent": fl.parameters_of(client.model)}, None if self.coupled else self.pulled
        yield fl.Fit(client.model, objective, client.train, self.training, extras=sent, after_step=pull)  # l. 4
        return self.sharing.reply(client)  # l. 5

    def pulled(self, weights: fl.Weights, extras: fl.Extras, lr: float) -> fl.Weights:
        """argmin_v |v - w|^2 / (2 eta) + (mu / 2) |v - w^t|^2 = w + eta mu / (1 + eta mu) (w^t - w)."""
        share = lr * self.mu / (1 + lr * self.mu)
        return {name: w.lerp(extras["sent"][name], share) for name, w in weights.items()}
