"""FedOpt: an adaptive optimiser at the server; FedAdagrad, FedAdam, FedYogi, and FedAvgM.

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan. ICLR 2021. https://arxiv.org/abs/2003.00295.
Algorithm 2; and for FedAvgM Hsu, Qi, Brown. 2019. https://arxiv.org/abs/1909.06335, section 4.

The mean of the clients' updates is no longer added to the server's weights but given, as the negative of a gradient, to
an optimiser of the server's.

Symbols
    x_t       state.weights
    m_t, v_t  state.m, state.v
    Delta_t   delta, the mean over clients of x_i - x_t
    eta       server_lr
    beta_1, beta_2, tau       beta1, beta2, tau

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    optimizer="momentum" beta1=0.0 server_lr=1.0 approaches fedavg
    training.lr=0.0 stays at rest
    optimizer="momentum" beta1=0.0 server_lr=1.0 averages each layer over its owners
    sharing.scope="layer" equals fedopt sharing.scope="architecture" on architectures=1

Departures from the paper
    1. Layers owned by some clients only have the Delta_t of those; a layer of which no owner was drawn keeps its x, m
       and v. See `sharing`.
    2. Clients weigh by their examples; Algorithm 2 has equal weights, `sharing.weighting="uniform"`.
    3. "adagrad" is Adagrad itself with `beta1=0`; "momentum" is FedAvgM, m <- beta_1 m + Delta, x <- x + eta m,
       without v.
    4. v starts from tau^2, the least that the paper allows, and there is no correction of the first steps' bias.
    5. BatchNorm's running statistics, which the paper does not have, are averaged like those of FedAvg.
    6. The paper tunes eta and tau for each task.
    7. Local training defaults to Adam, like all methods here; the paper has SGD.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from potluck import fl


@dataclass(frozen=True)
class State:
    """The server's weights, and its optimiser's m and v, by group of clients."""

    weights: fl.GroupWeights
    m: fl.GroupWeights
    v: fl.GroupWeights


@dataclass(frozen=True)
class FedOpt(fl.SharesWeights[State]):
    """Hyper-parameters of FedOpt.

    Attributes:
        training: a client's local training.
        optimizer: the server's.
        server_lr: eta.
        beta1: share of m that stays.
        beta2: share of v that stays, of "adam" and "yogi".
        tau: what is added to the root of v, against division by zero; of all but "momentum".
        sharing: who averages with whom, with which weights.
    """

    aligns_classes = True
    summed_entries = ("weights", "buffers")

    variants = {
        "FedYogi": {"optimizer": "yogi"},
        "FedAdagrad": {"optimizer": "adagrad", "beta1": 0.0},
        "FedAvgM": {"optimizer": "momentum", "server_lr": 1.0},
    }

    training: fl.LocalTraining = fl.LocalTraining()
    optimizer: Literal["adam", "yogi", "adagrad", "momentum"] = "adam"
    server_lr: Annotated[float, fl.at_least(0)] = 0.01
    beta1: Annotated[float, fl.at_least(0), fl.below(1)] = 0.9
    beta2: Annotated[float, fl.at_least(0), fl.below(1)] = 0.99
    tau: Annotated[float, fl.above(0)] = 0.001
    sharing: fl.Averaging = fl.Sharing()

    def init(self, server: fl.Server) -> State:
        x = self.sharing.initial(server)
        m = self.sharing.zeros(x, server.roster)
        return State(x, m, {g: {n: torch.full_like(w, self.tau**2) for n, w in m[g].items()} for g in m})

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        replies = cohort.stream(self.local_update, self.sharing.send(state.weights, cohort, server))
        means = self.sharing.means(replies, server.roster, "weights", "buffers")
        x, m, v = (dict(found) for found in (means.over(state.weights, "buffers"), state.m, state.v))
        for g, mean in means.of("weights").items():
            delta = fl.weights.minus(mean, x[g])
            new = {n: self.stepped(delta[n], m[g][n], v[g][n]) for n in delta}
            m[g] = m[g] | {n: found[0] for n, found in new.items()}
            v[g] = v[g] | {n: found[1] for n, found in new.items()}
            x[g] = fl.weights.plus(x[g], {n: found[2] for n, found in new.items()}, self.server_lr)
        return State(x, m, v)

    def stepped(self, delta: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The next m and v of a layer, and its step before the learning rate (Algorithm 2)."""
        if self.optimizer == "momentum":
            m = self.beta1 * m + delta
            return m, v, m
        m, squared = self.beta1 * m + (1 - self.beta1) * delta, delta.square()
        if self.optimizer == "adagrad":
            v = v + squared
        elif self.optimizer == "yogi":
            v = v - (1 - self.beta2) * squared * (v - squared).sign()
        else:
            v = self.beta2 * v + (1 - self.beta2) * squared
        return m, v, m / (v.sqrt() + self.tau)

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        yield fl.Fit(client.model, client.objective, client.train, self.training)
        return self.sharing.reply(client)
