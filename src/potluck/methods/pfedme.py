"""pFedMe: personal models by Moreau envelopes.

Dinh, Tran, Nguyen. NeurIPS 2020. https://arxiv.org/abs/2006.08848. Algorithm 1.

A client's loss of global weights w is that of the best personal weights near them, its Moreau envelope. To descend it,
a client finds its personal weights for some examples, and moves its w towards them.

Symbols
    w^t       state.weights
    w_i,r     w
    theta_i   client.model, kept by the client
    lambda    lam
    beta      beta
    eta       outer_lr
    R         local rounds, one for each batch of training.epochs passes over the data, or training.steps
    K         solver_steps
    |D|       training.batch_size

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    training.lr=0.0 stays at rest on architectures=1
    beta=0.0 evaluated="global" stays at rest
    sharing.scope="layer" equals pfedme sharing.scope="architecture" on architectures=1

Departures from the paper
    1. Clients that were not drawn rest; in the paper all clients train in every round and some send.
    2. Local rounds go through the client's data, as every method's local training does; the paper draws R = 20 batches
       anew.
    3. The solver that finds theta is the optimiser of `training`, K steps from the theta of the last local round, as in
       the authors' code; in the first local round from w^t.
    4. Layers owned by some clients only are averaged over those, see `sharing`; beta moves layers whose owners were
       drawn.
    5. BatchNorm's running statistics are theta's; they are averaged like those of FedAvg.
    6. The solver defaults to Adam, like local training of all methods here, and eta to 0.05; the paper has gradient
       descent, and 0.005 with its 20 local rounds. eta lambda is how far w goes to theta, so at most 1.
    7. Evaluated is theta_i, which the client found last, the paper's "PM"; "global" evaluates w, its "GM".
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from typing import Annotated, Literal

from torch import nn

from potluck import fl


@dataclass(frozen=True)
class PFedMe(fl.Averages):
    """Hyper-parameters of pFedMe.

    Attributes:
        training: the optimiser that finds personal weights for a batch, and how many batches there are.
        solver_steps: K, its steps for a batch.
        lam: lambda, how strongly these are drawn to its w.
        outer_lr: eta, the learning rate of w.
        beta: how far the server's weights go to the mean of the clients' w, and beyond it above 1.
        evaluated: whether a client is evaluated with its "personal" model, or with the "global" one.
        sharing: who averages with whom, with which weights.
    """

    aligns_classes = True

    variants = {"global model": {"evaluated": "global"}, "beyond": {"beta": 2.0}}

    training: fl.LocalTraining = fl.LocalTraining()
    solver_steps: Annotated[int, fl.at_least(1)] = 5
    lam: Annotated[float, fl.at_least(0)] = 15.0
    outer_lr: Annotated[float, fl.at_least(0)] = 0.05
    beta: Annotated[float, fl.at_least(0)] = 1.0
    evaluated: Literal["personal", "global"] = "personal"
    sharing: fl.Averaging = fl.Sharing(weighting="uniform")

    def __post_init__(self) -> None:
        fl.require(self.outer_lr * self.lam <= 1, "outer_lr", "at most 1 / lam, which takes w to theta", self.outer_lr)

    @property
    def keeps_model(self) -> bool:
        return True

    def round(self, state: fl.sharing.Averaged, cohort: fl.Cohort, server: fl.Server) -> fl.sharing.Averaged:
        replies = cohort.stream(self.local_update, self.sharing.send(state.weights, cohort, server))
        means = self.sharing.means(replies, server.roster, "weights", "buffers")
        w = means.over(state.weights, "buffers")
        for g, mean in means.of("weights").items():
            w[g] = fl.weights.plus(w[g], fl.weights.minus(mean, state.weights[g]), self.beta)
        return fl.sharing.Averaged(w)

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        w, solver = fl.parameters_of(client.model), replace(self.training, steps=self.solver_steps)
        objective = fl.losses.ProximalLoss(client.criterion, self.lam)
        for few in self._batches(client):
            yield fl.Fit(client.model, objective, few, solver, extras={"sent": w}, name="personal")  # theta
            theta = fl.parameters_of(client.model)
            w = fl.weights.plus(w, fl.weights.minus(w, theta), -self.outer_lr * self.lam)
        return self.sharing.reply(client, weights=w)

    def _batches(self, client: fl.Client) -> Iterator[fl.Examples]:
        """The examples of each local round."""
        epochs = count() if self.training.steps else range(self.training.epochs)
        pieces = (client.train.pieces(self.training.batch_size, client.rng) for _ in epochs)
        return islice(chain.from_iterable(pieces), self.training.steps)

    @fl.on_client
    def inference_model(self, client: fl.Client, message: fl.Message) -> nn.Module:
        return client.model if self.evaluated == "personal" else self.sharing.deploy(client, message)

    def global_model(self, state: fl.sharing.Averaged, server: fl.Server) -> nn.Module | None:
        return super().global_model(state, server) if self.evaluated == "global" else None
