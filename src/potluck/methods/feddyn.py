"""FedDyn: federated learning with dynamic regularisation.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama. ICLR 2021. https://arxiv.org/abs/2111.04263. Algorithm 1.

Each client adds to its loss a linear term, which remembers its gradient, and a pull towards the weights it was sent.
The terms change from round to round so that, where clients and server come to rest, they rest at an optimum of all
clients' data, although each client minimises a loss of its own.

Symbols
    theta     state.weights
    theta_k   client.model after local training
    h         state.h, the mean of the clients' g_k
    g_k       client.state["g"], the paper's gradient of L_k at theta_k; kept by the client, also while it is not drawn
    alpha     alpha
    P_t, m    the clients that answered, and all clients; of each layer, those of them that own it

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    alpha=0.0 equals fedavg sharing.weighting="uniform" training.clip_norm=10.0
    alpha=2.0 reaches the optimum
    sharing.scope="layer" equals feddyn sharing.scope="architecture" on architectures=1
    alpha=0.0 sharing.weighting="samples" averages each layer over its owners on batchnorm=true
    training.lr=0.0 stays at rest

Departures from the paper
    1. A client minimises its loss by `training`, an optimiser and a number of epochs, and not exactly; g_k is then no
       gradient of L_k, but the fixed point is the same.
    2. alpha = 0, which the paper excludes, leaves out both terms and h, which is FedAvg. A small alpha is something
       else: theta goes beyond the clients' mean by h / alpha, in the first round by |P_t| / m times the way to it,
       however small alpha is.
    3. A layer that some clients lack has the m and P_t of its owners: its h moves by the share of all its owners that
       answered. A layer of which no owner answered keeps its theta and h.
    4. `sharing.weighting="samples"` weighs clients by their examples, in the mean and in h; the fixed point is then the
       optimum of the pooled data. The authors' code instead divides alpha by a client's share of the data.
    5. The quadratic term is part of the loss and clipped with it. The authors' code has it in the
       optimiser's weight decay, which is not clipped, and which Adam and AdamW take otherwise.
    6. h, g_k and the terms cover parameters only. BatchNorm's running statistics are averaged like those of FedAvg, and
       theta's way beyond the mean leaves them out.
    7. theta is evaluated, as in Algorithm 1; the authors' code also reports the mean of the models of all clients.
    8. Local training defaults to Adam, like all methods here, with gradients clipped at a norm of 10 and alpha = 0.01,
       as in the authors' code, whose optimiser is SGD.
"""

from dataclasses import dataclass
from typing import Annotated

from potluck import fl


@dataclass(frozen=True)
class State:
    """The server's weights theta and their dual variable h, by group of clients."""

    weights: fl.GroupWeights
    h: fl.GroupWeights


@dataclass(frozen=True)
class FedDyn(fl.SharesWeights[State]):
    """Hyper-parameters of FedDyn.

    Attributes:
        training: a client's local training.
        alpha: strength of the regulariser. At the end of each round theta goes beyond the clients' mean by h / alpha,
            however low their learning rate is by then: with a rate that falls much, theta does not come to rest.
        sharing: who averages with whom, with which weights.
    """

    aligns_classes = True

    variants = {
        "by samples": {"sharing.weighting": "samples"},
        "by architecture": {"sharing.scope": "architecture"},
    }

    training: fl.LocalTraining = fl.LocalTraining(clip_norm=10.0)
    alpha: Annotated[float, fl.at_least(0)] = 0.01
    sharing: fl.Averaging = fl.Sharing(weighting="uniform")

    def init(self, server: fl.Server) -> State:
        pool = self.sharing.initial(server)
        return State(pool, self.sharing.zeros(pool, server.roster))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        all_owners = self.sharing.owners(server.roster, weight=self._weight)  # m

        def share(member: fl.Member, reply: fl.Message) -> dict[str, float]:
            """1 / m in each layer, if clients weigh alike."""
            owners = all_owners[self.sharing.group(member)]
            return {name: self._weight(member) / owners[name] for name in member.parameters}

        replies = cohort.stream(self.local_update, self.sharing.send(state.weights, cohort, server))
        means = self.sharing.means(replies, server.roster, "buffers", weights=share)
        mean, answered = means.of("weights"), means.weights("weights")  # of theta_k over P_t, and |P_t| / m
        drift = {
            g: {n: answered[g][n] * gap for n, gap in fl.weights.minus(mean[g], state.weights[g]).items()} for g in mean
        }
        h = {g: fl.weights.plus(old, drift.get(g, {}), -self.alpha) for g, old in state.h.items()}  # h^t of Alg. 1
        if self.alpha:
            mean = {g: fl.weights.plus(x, h[g], -1 / self.alpha) for g, x in mean.items()}  # theta^t of Alg. 1
        server.note(h_norm=fl.sharing.norm(h))
        kept = means.over(state.weights, "buffers")
        return State({g: {**old, **mean.get(g, {})} for g, old in kept.items()}, h)

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        sent = fl.parameters_of(client.model)
        g = client.state.get("g") or fl.weights.zeros_like(sent)
        objective = fl.losses.DynamicLoss(client.objective, self.alpha)
        yield fl.Fit(client.model, objective, client.train, self.training, extras={"sent": sent, "g": g})
        if self.alpha:
            client.state["g"] = fl.weights.plus(g, fl.weights.minus(fl.parameters_of(client.model), sent), -self.alpha)
        return self.sharing.reply(client)

    def _weight(self, member: fl.Member) -> float:
        return 1.0 if self.sharing.weighting == "uniform" else float(member.examples)
