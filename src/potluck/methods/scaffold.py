"""SCAFFOLD: stochastic controlled averaging.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. ICML 2020. https://arxiv.org/abs/1910.06378. Algorithm 1.

Each client estimates its own mean gradient by a control variate and corrects every local step by the
difference to the server's, so that clients with different data do not drift apart.

Symbols
    x, c      state.weights, state.control
    c_i       client.state["control"]         kept by the client, also while it is not drawn
    y_i       client.model after local training
    K         report.steps                    steps really taken
    eta_l     training.lr, in the round that it is
    eta_g     server_lr

Wire
    down      weights |w|, buffers |b|, control |w|
    up        dy |w|, dc |w|, buffers |b|, examples 1

Limits
    reaches the optimum
    option="gradient" reaches the optimum
    training.momentum=0.5 reaches the optimum
    averages each layer over its owners on batchnorm=true
    approaches fedavg sharing.weighting="uniform" on rounds=1 optimizer="sgd"

Departures from the paper
    1. Under Adam and all optimisers but SGD, with option "path", the correction is applied after the optimiser's step,
       y <- y - eta_l (c - c_i), so that c_i, the mean step of the round, and the correction have one unit. Adding
       it to the gradient before Adam would mix units: Adam's steps are of the order of eta_l whatever the gradient.
    2. A layer that some clients lack is averaged over those that own it, and its control variate divided by the
       number of all clients that own it; with one architecture both are the paper's.
    3. With SGD momentum rho, K is replaced by the effective number of steps (K - rho (1 - rho^K) / (1 - rho)) /
       (1 - rho), without which c_i would be up to 1 / (1 - rho) times too large. Momentum that lasts from round to
       round, of which this number knows nothing, is refused with option "path".
    4. BatchNorm's running statistics are averaged and never corrected; the variates cover parameters only.
    5. Weight decay and clipping act after the correction, or before it where steps are corrected; with option
       "path" they enter c_i.
    6. Option "gradient" takes the gradient in training mode, with batch statistics in batches of 256 and Dropout on,
       and leaves the running statistics alone; the paper's networks have neither.
    7. Option "gradient" is the less stable one: on two quadratics of curvatures 1 and 4, one client a round and 5
       steps, it diverges from eta_l = 0.11 on if the two are drawn in turn; if they are drawn at random, in none of
       200 orders at 0.11 and in 15 at 0.15. "path" converges in all of these.
    8. Local training defaults to Adam, as in the papers that use this baseline; the paper has plain SGD.
    9. K is each client's own number of steps, which differs with its amount of data; the paper's is the same for all.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from potluck import fl


@dataclass(frozen=True)
class State:
    """The server's weights x and control variate c, by group of clients."""

    weights: fl.GroupWeights
    control: fl.GroupWeights


@dataclass(frozen=True)
class Scaffold(fl.SharesWeights[State]):
    """Hyper-parameters of Scaffold.

    Attributes:
        training: a client's local training.
        option: "path" computes c_i from the net local update (the paper's option II, and its choice), "gradient" from
            the full-batch gradient at x (option I) and corrects gradients before the optimiser.
        server_lr: eta_g.
        control_weighting: "uniform" as in the paper, whose fixed point is the optimum of the clients' plain
            mean; "samples" weighs clients by their data, for the optimum of the pooled data.
        sharing: who averages with whom.
    """

    aligns_classes = True
    summed_entries = ("dy", "dc", "buffers")

    variants = {
        "gradient": {"option": "gradient"},
        "by samples": {"control_weighting": "samples"},
        "gradient, falling rate": {
            "option": "gradient",
            "training.schedule.rule": "exponential",
            "training.schedule.factor": 0.5,
        },
    }

    training: fl.LocalTraining = fl.LocalTraining()
    option: Literal["path", "gradient"] = "path"
    server_lr: Annotated[float, fl.at_least(0)] = 1.0
    control_weighting: Literal["uniform", "samples"] = "uniform"
    sharing: fl.Averaging = fl.Sharing(weighting="uniform")

    def __post_init__(self) -> None:
        divides, lr = self.option == "path", self.training.lr
        fl.require(not divides or lr > 0, "training.lr", "above 0, since option 'path' divides by it", lr)
        lasts = divides and self.training.persist and self.training.momentum > 0
        expected = "False with momentum, which option 'path' counts from zero in every round"
        fl.require(not lasts, "training.persist", expected, lasts)

    @property
    def corrects_steps(self) -> bool:
        """Whether the correction is made in the space of steps (departure 1) or of gradients."""
        return self.training.optimizer != "sgd" and self.option == "path"

    def init(self, server: fl.Server) -> State:
        pool = self.sharing.initial(server)
        return State(pool, self.sharing.zeros(pool, server.roster))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        sharing, roster = self.sharing, server.roster
        sent = sharing.send(state.weights, cohort, server, control=lambda member: self._control_of(state, member))
        replies = cohort.stream(self.local_update, sent)
        means = sharing.means(replies, roster, "dy", "buffers", dc=lambda member, reply: self._control_share(member))
        step, dc, drawn = means.of("dy"), means.of("dc"), means.weights("dc")
        moved = {
            g: fl.weights.plus(w, step.get(g, {}), self.server_lr) for g, w in state.weights.items()
        }  # Alg. 1, l. 16-17
        whole = sharing.owners(roster, weight=self._control_share)  # N counts all clients, drawn or not
        control = {
            g: {n: w + drawn[g][n] / whole[g][n] * dc[g][n] if n in dc.get(g, {}) else w for n, w in c.items()}
            for g, c in state.control.items()
        }
        server.note(control_norm=fl.sharing.norm(control))
        return State(means.over(moved, "buffers"), control)

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        w = fl.schema.like(message["control"])
        return fl.Schema(**{**self.sharing.expected(member, message), "weights": None, "dy": w, "dc": w})

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        x, c = fl.parameters_of(client.model), message["control"]
        c_i = client.state.get("control") or fl.weights.zeros_like(c)
        new_c_i = None
        if self.option == "gradient":  # Alg. 1, l. 12, option I
            new_c_i = yield fl.Gradient(client.model, client.objective, client.train)
        report = yield fl.Fit(
            client.model,
            client.objective,
            client.train,
            self.training,
            extras={"c": c, "c_i": c_i},
            combine=None if self.corrects_steps else corrected_gradient,
            after_step=corrected_step if self.corrects_steps else None,
        )
        y = fl.parameters_of(client.model)
        if new_c_i is None:  # Alg. 1, l. 12, option II
            steps = fl.normalised.effective_steps(report.steps, self.training.momentum)
            new_c_i = fl.weights.plus(
                fl.weights.minus(c_i, c), fl.weights.minus(x, y), 1 / (steps * self.training.at(client.round).lr)
            )
        client.state["control"] = new_c_i
        return self.sharing.reply(client, weights=None, dy=fl.weights.minus(y, x), dc=fl.weights.minus(new_c_i, c_i))

    def weighing_of(self, entry: str) -> fl.summing.Weighing:
        if entry == "dc":
            return "one" if self.control_weighting == "uniform" else "client"
        return super().weighing_of(entry)

    def _control_of(self, state: State, member: fl.Member) -> fl.Weights:
        control = self.sharing.owned(state.control, member)
        return {name: control[name] for name in sorted(member.parameters)}

    def _control_share(self, member: fl.Member) -> float:
        return 1.0 if self.control_weighting == "uniform" else float(member.examples)


def corrected_step(y: fl.Weights, extras: fl.Extras, lr: float) -> fl.Weights:
    """Alg. 1, l. 10, applied after the optimiser's step: y - eta_l (c - c_i)."""
    return fl.weights.plus(y, fl.weights.minus(extras["c"], extras["c_i"]), -lr)


def corrected_gradient(gradients: list[fl.Weights], extras: fl.Extras) -> fl.Weights:
    """Alg. 1, l. 10, before the optimiser: g - c_i + c, where g is 0 for a parameter that the loss does not reach."""
    (gradient,) = gradients
    correction = fl.weights.minus(extras["c"], extras["c_i"])
    unreached = {name: tensor for name, tensor in correction.items() if name not in gradient}
    return {**fl.weights.plus(gradient, correction), **unreached}
