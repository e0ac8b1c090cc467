"""FedTGP: trainable global prototypes.

Zhang, Liu, Hua, Cao. AAAI 2024. https://arxiv.org/abs/2401.03230.

FedProto whose server does not average prototypes, but trains one for each class, so that it is nearer to the clients'
prototypes of its class than to those of others, by a margin. The margin follows the clients' own prototypes: as they
come to lie farther apart, more is asked of the global ones. With P_c the global prototype of class c, and phi the L2
distance, the prototype P_i_c that client i has of class c costs

    -log [ exp(-phi(P_i_c, P_c) - delta) /
           (exp(-phi(P_i_c, P_c) - delta) + sum over c' other than c of exp(-phi(P_i_c, P_c'))) ]

    delta = min(max over c and c' other than c of phi(Q_c, Q_c'), tau),    Q_c the mean of this round's P_i_c over i.

Clients add lambda times the mean squared difference of features to P_y, y an example's class, to the task's loss.

A class with one example has that example's features for a prototype, and the server sees them.

Symbols
    f_i       a client's layers before its head, kept by the client like the head itself
    P_i_c     a row of reply["prototypes"], the mean of f_i over client i's examples of class c
    P_c       a row of state.prototypes, the paper's with a hat: F of a learnt vector, its P_c with a caron
    theta_F   state.network, the vectors and F, two linear layers with a ReLU between them
    delta     the margin of this round
    tau       threshold
    lambda    strength

Wire
    down      prototypes classes * (|h| + flag)
    up        counts classes * integer, prototypes present * |h|

Limits
    strength=0.0 prediction="head" equals local
    prediction="head" equals local on rounds=1
    prediction="head" strength=0.0 equals fedproto prediction="head" strength=0.0
    training.lr=0.0 prediction="head" stays at rest

Departures from the paper
    1. The paper's margin is the largest distance between any two classes, `margin="farthest"`. By default it is that of
       the authors' code, also HtFLlib's: of each class's distance to its nearest other class, the largest,
       `margin="nearest"`. `margin="none"` has no margin.
    2. Where fewer than two classes were reported in a round, there is no distance and no margin; the code's is tau.
    3. A class that nobody has ever reported is not sent and never predicted; the code sends and predicts all. It has a
       trained prototype nevertheless, which those of others are kept away from.
    4. Distances are computed from differences; the code expands the square, and takes the root of a number that
       rounding can make negative. The loss is the mean over a batch of prototypes, as there.
    5. In the authors' code the server has its clients' learning rate and batches; here it has `server_training`, SGD
       with 0.01 and batches of 10. Its 100 epochs are their script's; the default of their code is 1,000.
    6. Before the first prototypes, a client predicts with its head. `prediction="head"` is not in the paper.
    7. lambda is 10, as in the authors' script; the default of their code is 1, and the paper's text has 0.1.
    8. Local training defaults to Adam, like all methods here; the paper has SGD with 0.01 and batches of 10.
    9. A client reports prototypes of the model that its training has left. In the authors' released code, which is
       HtFLlib's, it reports those of the model from before its training: after three rounds of small clients weights
       differ by 0.03.
   10. The paper's regulariser is lambda times the mean of phi(P_i_c, P_c) over a client's classes; the squared
       difference of each example's features is the code's, see FedProto.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck import fl

Margin = Literal["nearest", "farthest", "none"]


@dataclass(frozen=True)
class State:
    """theta_F, and the prototypes P that it makes; "known" are the classes that anybody has reported."""

    network: fl.Weights
    prototypes: fl.prototypes.Table


@dataclass(frozen=True)
class FedTGP(fl.prototypes.PredictsByPrototypes[State]):
    """Hyper-parameters of FedTGP.

    Attributes:
        training: a client's local training.
        server_training: of the global prototypes, on the clients' prototypes of one round.
        strength: lambda, weight of the distance to the global prototypes.
        margin: which distance of the clients' prototypes it is, see departure 1.
        threshold: tau, the largest margin.
        prediction: by the nearest global prototype, or by the client's own head.
    """

    unguarded = "the server's prototypes learn from every client's"
    aligns_classes = True

    variants = {
        "farthest": {"margin": "farthest"},
        "no margin": {"margin": "none"},
        "head": {"prediction": "head"},
    }

    training: fl.LocalTraining = fl.LocalTraining()
    server_training: fl.ServerTraining = fl.LocalTraining("sgd", lr=0.01, epochs=100, batch_size=10)
    strength: Annotated[float, fl.at_least(0)] = 10.0
    margin: Margin = "nearest"
    threshold: Annotated[float, fl.above(0)] = 100.0
    prediction: Literal["nearest", "head"] = "nearest"

    def init(self, server: fl.Server) -> State:
        network = server.module("prototypes", _network(server))
        known = torch.zeros(server.num_classes, dtype=torch.bool)
        return State(fl.learnt_of(network), _table(network, known))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        rows = fl.prototypes.reported(cohort.ask(self.local_update, self.known(state)))  # all P_i_c
        delta = min(margin_of(rows, server.num_classes, self.margin), self.threshold)
        server.note(margin=delta)
        network = server.module("prototypes", _network(server))
        fl.load(network, state.network)
        data = fl.Examples(rows["values"], rows["labels"])
        server.fit(fl.Fit(network, MarginLoss(delta), data, self.server_training))  # trains theta_F
        known = state.prototypes["known"].clone()
        known[rows["labels"]] = True
        return State(fl.learnt_of(network), _table(network, known))

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        loss = fl.prototypes.PrototypeLoss(client.criterion, self.strength)
        tables = {"features": message.get("prototypes") if self.strength else None, "logits": None}
        yield fl.Fit(client.model, loss, client.train, self.training, tables)
        return fl.Message(**(yield from fl.prototypes.measured(client)))


class Prototypes(nn.Module):
    """theta_F: a learnt vector for each class, and F, which makes them prototypes (classes, width)."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(classes, width)
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self) -> Tensor:
        """P, (classes, width)."""
        return self.layers(self.vectors.weight)


@dataclass(frozen=True)
class MarginLoss:
    """The loss above, mean over a batch of the clients' prototypes, whose targets are their classes.

    Attributes:
        delta: the margin.
    """

    delta: float

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch."""
        prototypes = net()
        phi = torch.linalg.vector_norm(batch.inputs[:, None] - prototypes, dim=2)
        own = F.one_hot(batch.targets, len(prototypes)).to(phi)
        return F.cross_entropy(-(phi + self.delta * own), batch.targets)


def margin_of(rows: fl.prototypes.Rows, classes: int, margin: Margin) -> float:
    """Delta before tau limits it, the distance that the clients' prototypes ask for; 0 if of fewer than two classes."""
    centres = fl.prototypes.averages(fl.prototypes.one_each(rows["values"], rows["labels"]), classes)
    q = centres["means"][centres["known"]]
    if margin == "none" or len(q) < 2:
        return 0.0
    phi = torch.cdist(q, q, compute_mode="donot_use_mm_for_euclid_dist")
    if margin == "farthest":
        return float(phi.max())
    return float(phi.fill_diagonal_(torch.inf).min(1).values.max())


def _network(server: fl.Server) -> Callable[[], Prototypes]:
    """What makes a new theta_F."""
    return partial(Prototypes, server.num_classes, fl.features.common_width(server))


def _table(network: nn.Module, known: Tensor) -> fl.prototypes.Table:
    """P, zero for classes that are not known."""
    with torch.no_grad():
        return {"means": network() * known[:, None], "known": known}
