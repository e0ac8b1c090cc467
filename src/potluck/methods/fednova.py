"""FedNova: normalised averaging.

Wang, Liu, Liang, Joshi, Poor. NeurIPS 2020. https://arxiv.org/abs/2007.07481. Algorithm 1.

Clients take different numbers of local steps. The server averages their updates per step, and takes as many steps in
this direction as they took on average; otherwise clients with many steps would dominate the result.

Symbols
    x         state.weights
    tau_i     report.steps
    |a_i|_1   steps, the effective number of local steps
    d_i       d, the update of client i divided by |a_i|_1
    p_i       len(client.train) / examples of all
    tau_eff   the mean of |a_i|_1, weighted by p_i
    eta       training.lr

Wire
    down      weights |w|, buffers |b|
    up        d |w|, steps 1, buffers |b|, examples 1

Limits
    training.steps=3 approaches fedavg training.steps=3
    descends the gradient
    counts a twin as twice the data
    training.lr=0.0 stays at rest

Departures from the paper
    1. Where architectures differ, p_i and tau_eff are those of each layer's owners; with one they are the paper's.
    2. Under Adam and AdamW |a_i|_1 is tau_i: for a preconditioner that does not change, the coefficients of each
       bias-corrected step sum to 1, also where the means last from round to round (`training.persist`). The paper
       covers rules that are linear in the gradients, which these are not. Other optimisers than these and SGD are
       refused, and momentum that lasts: its steps grow from round to round, while |a_i|_1 counts them from zero, as
       in the authors' code, whose momentum begins at zero in every round.
    3. Weight decay has no part in |a_i|_1, whether it is in the gradient or, as in AdamW, beside it; nor has clipping.
    4. p_i is taken over the clients that were drawn and answered, so that it sums to 1.
    5. BatchNorm's running statistics are averaged like those of FedAvg and not normalised: going beyond the clients'
       mean could make a variance negative.
    6. The authors' code offers two things that are not here: momentum of the server, and a proximal term mu (w - x) in
       local training, which is added after momentum. With it |a_i|_1 is not that of plain steps: without momentum it
       is (1 - (1 - eta mu)^tau_i) / (eta mu), and tau_eff is the weighted mean of tau_i, no longer of |a_i|_1.
    7. Local training defaults to Adam, as in the papers that use this baseline; the paper has SGD with momentum.
"""

from dataclasses import dataclass

from potluck import fl


@dataclass(frozen=True)
class State:
    """The server's weights, by group of clients."""

    weights: fl.GroupWeights


@dataclass(frozen=True)
class FedNova(fl.SharesWeights[State]):
    """Hyper-parameters of FedNova.

    Attributes:
        training: a client's local training, by "sgd", "adam" or "adamw".
        sharing: who averages with whom, with which weights p_i.
    """

    aligns_classes = True
    summed_entries = ("d", "buffers")
    training: fl.LocalTraining = fl.LocalTraining()
    sharing: fl.Averaging = fl.Sharing()

    def __post_init__(self) -> None:
        optimizer = self.training.optimizer
        known = "'sgd', 'adam' or 'adamw', whose |a_i| is known"
        fl.require(optimizer in ("sgd", "adam", "adamw"), "training.optimizer", known, optimizer)
        lasts = self.training.persist and self.training.momentum > 0
        fl.require(
            not lasts, "training.persist", "False with momentum, which |a_i| counts from zero in every round", lasts
        )

    def init(self, server: fl.Server) -> State:
        return State(self.sharing.initial(server))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        replies = cohort.stream(self.local_update, self.sharing.send(state.weights, cohort, server))
        means = self.sharing.means(replies, server.roster, "d", "steps", "buffers")
        d, tau = means.of("d"), means.of("steps")  # sum p_i d_i and tau_eff, by layer
        step = {group: {name: tau[group][name] * d[group][name] for name in d[group]} for group in d}
        moved = {
            g: fl.weights.plus(x, step.get(g, {}), -1.0) for g, x in state.weights.items()
        }  # x - tau_eff sum p_i d_i
        return State(means.over(moved, "buffers"))

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        sent, d = self.sharing.expected(member, message), fl.schema.like(message["weights"])
        most, momentum = self.training.steps or self.training.epochs * member.examples, self.training.momentum
        steps = fl.schema.number(0.5, most / (1 - momentum)) if momentum else fl.schema.count(most)
        return fl.Schema(**{**sent, "weights": None, "d": d, "steps": steps})

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        x = fl.parameters_of(client.model)
        report = yield fl.Fit(client.model, client.objective, client.train, self.training)
        a = fl.normalised.effective_steps(report.steps, self.training.momentum)
        d = {name: gap / a for name, gap in fl.weights.minus(x, fl.parameters_of(client.model)).items()}
        return self.sharing.reply(client, weights=None, d=d, steps=a)
