"""FML: federated mutual learning.

Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu. 2020. https://arxiv.org/abs/2006.16765.

Beside its own model, which may have any architecture, each client trains a copy of one common model, the "meme". Both
learn the labels and each other's predictions. The server averages the copies, and nothing else is ever sent.

Symbols
    theta_g   state.common
    own       the net "own", client.model, kept by the client
    meme      the net "common", the client's copy of theta_g
    p_own     softmax of the logits of "own"; p_meme of those of "common"
    alpha     alpha, the share of the labels in the loss of "own"
    beta      beta, their share in the loss of "common"
    E, B, eta training.epochs, training.batch_size, training.lr

Wire
    down      common |theta_g|
    up        common |theta_g|, examples 1

Limits
    alpha=1.0 beta=1.0 equals local
    alpha=1.0 equals local
    weighting="samples" equals fml on clients=1
    training.lr=0.0 stays at rest

Departures from the paper
    1. The average covers BatchNorm's running statistics; the paper speaks of parameters.
    2. In the published code the two calls that hand the common model out and average its copies are commented out, and
       the optimisers live on. Here both happen, and every round's optimisers are new (`training.persist`).
    3. Copies count equally, as in the code's average; `weighting="samples"` weighs them by examples.
    4. The code trains with SGD of 0.01, which falls to a tenth after each third of the rounds, momentum 0.9, weight
       decay 5e-4, batches of 128 and 5 epochs. Local training defaults to Adam, like all methods here;
       `training.clip_norm` would limit the norm of both nets' gradients together.
    5. HtFLlib's FML differs: each net's gradient also flows into the other, the divergence is divided by the number of
       classes, gradients are clipped at a norm of 10, and its default shares are 1, which leave no divergence.
    6. The common network begins with weights drawn apart from the clients', all of which begin alike, so that it is no
       copy of an own one of its architecture. HtFLlib's clients of one architecture begin alike too.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor, nn

from potluck import fl


@dataclass(frozen=True)
class FML(fl.CommonModel):
    """Hyper-parameters of FML, beside those of `CommonModel`.

    Attributes:
        alpha: share of the labels in the loss of a client's own model; the common model's predictions have the rest.
        beta: share of the labels in the loss of the copy of the common model.
        weighting: how the copies are weighed in the average.
        combine: how the copies become one.
    """

    aligns_classes = True

    variants = {
        "by samples": {"weighting": "samples"},
        "lasting optimisers": {"training.persist": True},
    }

    builds_clients_models = False
    alpha: Annotated[float, fl.at_least(0), fl.at_most(1)] = 0.5
    beta: Annotated[float, fl.at_least(0), fl.at_most(1)] = 0.5
    weighting: Literal["uniform", "samples"] = "uniform"
    combine: fl.Aggregate = fl.Aggregate()

    def needs(self) -> frozenset[fl.Need]:
        return frozenset({fl.Need.CLASSES})

    def merged(self, common: fl.Weights, replies: fl.Replies, server: fl.Server) -> fl.Weights:
        return fl.means.mean_of(replies, "common", self.weighting, self.combine)

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        common = fl.load(client.build(), message["common"])
        pair = nn.ModuleDict({"own": client.model, "common": common})
        yield fl.Fit(pair, MutualLosses(client.criterion, self.alpha, self.beta), client.train, self.training)
        return fl.Message(common=fl.learnt_of(common), examples=len(client.train))


@dataclass(frozen=True)
class MutualLosses:
    """L_own + L_meme, whose gradients are apart: neither loss has one in the other net.

    L_own  = alpha CE(p_own, y) + (1 - alpha) KL(p_meme || p_own),
    L_meme = beta CE(p_meme, y) + (1 - beta) KL(p_own || p_meme).
    """

    criterion: fl.Criterion
    alpha: float
    beta: float

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch; both nets predict before either steps."""
        z_own, z_meme = (net.get_submodule(name)(batch.inputs) for name in ("own", "common"))
        own = self._loss(z_own, z_meme, batch.targets, self.alpha)
        return own + self._loss(z_meme, z_own, batch.targets, self.beta)

    def _loss(self, logits: Tensor, taught: Tensor, targets: Tensor, share: float) -> Tensor:
        return share * self.criterion(logits, targets) + (1 - share) * fl.losses.distillation(logits, taught)
