"""FedMRL: federated Matryoshka representation learning.

Yi, Yu, Ren, Wang, Liu, Li. NeurIPS 2024. https://arxiv.org/abs/2406.00488.

Each client joins the representation of its own network, of any architecture, with that of a small common one, and a
projector of its own mixes both. Of the result the leading part, as wide as the small network's, goes to the common
network's head, and the whole to the client's: one representation inside another, like Russian dolls. The server
averages the common network; all else stays where it is.

Symbols
    theta     state.common: extractor G^ex and head G^hd
    omega_k   net.own: extractor F_k^ex and head F_k^hd, kept by the client as client.model
    phi_k     net.projector, kept by the client as well
    R^G, R^F  the two representations, d1 and d2 numbers
    R~_c, R~_f  what the heads read: the first d1 numbers of the projection, and all d2 of it
    m^G, m^F  common_weight, own_weight
    n_k       len(client.train)
    E, B, eta training.epochs, training.batch_size, training.lr

Wire
    down      common |theta_g|
    up        common |theta_g|, examples 1

Limits
    training.lr=0.0 stays at rest
    weighting="uniform" equals fedmrl on clients=1
    own_weight=2.0 common_weight=2.0 training.lr=0.05 equals fedmrl training.lr=0.1 on optimizer="sgd"

Departures from the paper
    1. The average covers BatchNorm's running statistics; the paper speaks of parameters.
    2. The common network is the federation's server model, whose features must be no wider than any client's; the paper
       cuts them to a width that is tuned (`federation.server_model`). In its code both are 500 wide.
    3. The paper trains all three parts with one rate, and its code clips the gradient of each at a norm of 50; here
       `training.clip_norm` limits the norm of all together.
    4. Copies are weighed by the examples that clients train on; in the code also by those that they are tested on.
       `weighting="uniform"` is HtFLlib's. What the code averages are references to one network, so that its average is
       the copy of the client that trained last.
    5. A client is evaluated with the average of the last round; in the code with its own copy, before the average.
    6. The code trains with SGD of 0.01, momentum 0.9, weight decay 0.001, batches of 512 and 10 epochs; local training
       defaults to Adam, like all methods here. Optimisers are new in every round; in the code only that of the own
       network is.
    7. The common network begins with weights drawn apart from the clients', all of which begin alike, so that it is no
       copy of one of its architecture.
    8. A client keeps its projector, as in the authors' code; HtFLlib's client never saves it, so that every round
       begins with the initial one.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from potluck import fl


@dataclass(frozen=True)
class FedMRL(fl.CommonModel):
    """Hyper-parameters of FedMRL, beside those of `CommonModel`; its `training` covers the projector.

    Attributes:
        common_weight: m^G, weight of the loss of the common head.
        own_weight: m^F, weight of the loss of a client's own head.
        weighting: how the copies of the common network are weighed in the average.
        combine: how the copies become one.
    """

    aligns_classes = True

    variants = {
        "uniform": {"weighting": "uniform"},
        "own head alone": {"common_weight": 0.0},
        "lasting optimisers": {"training.persist": True},
    }

    common_weight: Annotated[float, fl.at_least(0)] = 1.0
    own_weight: Annotated[float, fl.at_least(0)] = 1.0
    weighting: Literal["samples", "uniform"] = "samples"
    combine: fl.Aggregate = fl.Aggregate()

    def needs(self) -> frozenset[fl.Need]:
        return frozenset({fl.Need.SPLIT_MODEL})

    def init(self, server: fl.Server) -> fl.common.Common:
        read = fl.features.feature_shape(server, None, "s_out")[-1]
        for id, member in server.roster.items():
            found = fl.features.feature_shape(server, member.architecture, "s_out")[-1]
            expected = f"at least {read}, the width of the server's; name a narrower federation.server_model"
            fl.require(found >= read, f"features of client {id}, {member.architecture}", expected, found)
        return super().init(server)

    def merged(self, common: fl.Weights, replies: fl.Replies, server: fl.Server) -> fl.Weights:
        return fl.means.mean_of(replies, "common", self.weighting, self.combine)

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        net = joined(client, message["common"])
        loss = MatryoshkaLoss(client.criterion, self.common_weight, self.own_weight)
        yield fl.Fit(net, loss, client.train, self.training)
        return fl.Message(common=fl.learnt_of(net.common), examples=len(client.train))

    def inference_message(self, state: fl.common.Common, client_id: fl.ClientId, server: fl.Server) -> fl.Message:
        return fl.Message(common=state.common)

    @fl.on_client
    def inference_model(self, client: fl.Client, message: fl.Message) -> nn.Module:
        return joined(client, message["common"])

    def global_model(self, state: fl.common.Common, server: fl.Server) -> None:
        """None: a client's head reads what its own projector mixes."""


class Matryoshka(nn.Module):
    """A client's network and the common one, whose representations a projector mixes.

    Args:
        common: the common network.
        own: the client's.
        projector: from both representations side by side, the common one first, to one as wide as the client's.
    """

    def __init__(self, common: nn.Module, own: nn.Module, projector: nn.Module) -> None:
        super().__init__()
        self.common, self.own, self.projector = common, own, projector

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits of the client's head, (batch, classes)."""
        return both_heads(self, inputs)[1]


def both_heads(net: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Of a `Matryoshka`, logits of the common head, from the leading part of what is mixed, and of the client's."""
    common, own = (fl.split(net.get_submodule(name)) for name in ("common", "own"))
    seen = [parts.features(inputs) for parts in (common, own)]
    mixed = net.get_submodule("projector")(torch.cat(seen, -1))
    return common.classifier(mixed[..., : seen[0].shape[-1]]), own.classifier(mixed)


def joined(client: fl.Client, common: fl.Weights) -> Matryoshka:
    """The client's network and projector, and the common network with these weights."""
    small = fl.load(client.build(), common)
    d1, d2 = (fl.split(net).num_features for net in (small, client.model))
    return Matryoshka(small, client.model, client.module("projector", partial(nn.Linear, d1 + d2, d2)))


@dataclass(frozen=True)
class MatryoshkaLoss:
    """m^G times the common head's loss by labels + m^F times that of the client's own."""

    criterion: fl.Criterion
    common_weight: float
    own_weight: float

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch."""
        common, own = (self.criterion(logits, batch.targets) for logits in both_heads(net, batch.inputs))
        return self.common_weight * common + self.own_weight * own
