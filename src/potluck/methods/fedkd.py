"""FedKD: communication-efficient federated learning via knowledge distillation.

Wu, Wu, Lyu, Huang, Xie. Nature Communications 2022. https://arxiv.org/abs/2108.13323.

Each client has a mentor, its own network of any architecture, and a mentee, its copy of a small common network. They
teach each other by their predictions and hidden features, the more so the better both predict. Only updates of the
mentee travel, each matrix as the product of two thin ones that keep a share of its energy; the share grows from round
to round.

Symbols
    Theta^t   the net "own", client.model, kept by the client: the mentor
    Theta^s   the net "common": the mentee; state.common on the server
    W^h       the net "link", a linear layer kept by the client
    L^t_t, L^t_s  losses by labels of mentor and mentee
    H_t, H_s  what their last layers read
    U, S, V   the decomposition of a matrix of an update; U S is sent as left, V as right
    K         columns of left
    T(t)      energy(server.round)
    T_start, T_end  energy_start, energy_end
    E, B, eta training.epochs, training.batch_size, training.lr

Wire
    down      common at most |theta_g|, update at most |theta_g|, version 1
    up        update at most |theta_g|

Limits
    distillation=0.0 hidden=0.0 equals local
    energy_start=1.0 energy_end=1.0 distillation=0.0 hidden=0.0 equals local
    training.lr=0.0 stays at rest

Departures from the paper
    1. The paper exchanges gradients after each batch. Here an exchange is a round of local training, as in the authors'
       code, and what is sent is by how much the round has changed the mentee.
    2. Whoever took part in the last round is sent its compressed update, as in the paper, and adds it to the mentee
       that it had then; everybody else is sent the whole mentee. A client whose record is gone answers with an empty
       update, and is sent the whole mentee the next time.
    3. A matrix is sent as two factors, of K (P + Q) numbers for one of P x Q; the paper sends K more, or K x K. It goes
       as it is unless that is fewer, as do vectors. Convolutions count as matrices of P = output channels.
    4. T(t) reaches T_end in round `growth` and stays there, since a method does not know how many rounds there will be.
       An energy of 1 compresses nothing. In the authors' code a matrix that needs all its columns is lost altogether.
    5. A loss that is divided by the sum of both losses by labels is divided by 1e-6 at least. As in the authors' code
       this sum is differentiated too.
    6. Each net learns by its own loss, as the paper writes it: the other net's outputs and loss are constants. In the
       authors' code the two losses are one, and each net also follows the other's: `gradients="joint"`.
    7. The divergence is the mean over the batch; the code divides it by the number of classes too, which a
       `distillation` of 1 / classes does. The losses of attention maps belong to transformers and are left out.
    8. HtFLlib's FedKD compresses weights in place of updates, and truncates convolutions kernel by kernel, which makes
       most of them larger. It clips gradients at a norm of 10.
    9. The average of updates covers BatchNorm's running statistics. Both nets learn at one rate.
    10. The mentee begins with weights drawn apart from the mentors', all of which begin alike, so that it is no copy of
       a mentor of its architecture.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck import fl

_SMALLEST = 1e-6


@dataclass(frozen=True)
class State:
    """The mentee and its last change.

    Attributes:
        common: Theta^s, with its buffers.
        update: the last compressed update, which made it what it is; empty at first.
        holders: ids of the clients that trained in the last round, int64; they hold the mentee from before the update.
        version: how many updates there have been.
    """

    common: fl.Weights
    update: fl.lowrank.Factored
    holders: Tensor
    version: int


@dataclass(frozen=True)
class FedKD(fl.Method[State]):
    """Hyper-parameters of FedKD.

    Attributes:
        training: a client's local training, of mentor, mentee and the layer between them.
        distillation: weight of the divergences between predictions.
        hidden: weight of the squared distance between hidden features.
        energy_start: share of a matrix's squared singular values that is kept at first.
        energy_end: and in the end; 1 sends matrices as they are.
        growth: the round from which energy_end applies.
        gradients: "own" has each net learn by its own loss, "joint" both by the sum of the two.
        combine: how the clients' updates become one.
    """

    family = "common"
    aligns_classes = True

    variants = {
        "joint": {"gradients": "joint"},
        "predictions alone": {"hidden": 0.0},
        "uncompressed": {"energy_start": 1.0, "energy_end": 1.0},
    }

    training: fl.LocalTraining = fl.LocalTraining()
    distillation: Annotated[float, fl.at_least(0)] = 1.0
    hidden: Annotated[float, fl.at_least(0)] = 1.0
    energy_start: Annotated[float, fl.at_least(0), fl.at_most(1)] = 0.95
    energy_end: Annotated[float, fl.at_least(0), fl.at_most(1)] = 0.98
    growth: Annotated[int, fl.at_least(1)] = 100
    gradients: Literal["own", "joint"] = "own"
    combine: fl.Aggregate = fl.Aggregate()

    def needs(self) -> frozenset[fl.Need]:
        return frozenset({fl.Need.CLASSES, fl.Need.SPLIT_MODEL} if self.hidden else {fl.Need.CLASSES})

    def init(self, server: fl.Server) -> State:
        return State(
            fl.learnt_of(server.build(draw="common")),
            fl.lowrank.factored({}, 1.0),
            torch.zeros(0, dtype=torch.int64),
            0,
        )

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        replies = cohort.ask(self.local_update, {id: self._message(state, id) for id in cohort.ids})
        updates = {id: fl.lowrank.multiplied(reply["update"], state.common) for id, reply in replies.items()}
        mean = fl.weights.mean_where_present([*updates.values()], [1.0] * len(updates), {}, self.combine)
        update = fl.lowrank.factored(mean, self.energy(server.round))
        holders = torch.tensor([id for id, found in updates.items() if found], dtype=torch.int64)
        return State(changed(state.common, update), update, holders, state.version + 1)

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        return fl.Schema(update=fl.lowrank.factored_like(server.about(None, fl.weights.outline)))

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        before = held(client, message)
        if before is None:
            return fl.Message(update=fl.lowrank.factored({}, 1.0))
        client.state.update(common=before, version=message["version"])
        nets = {"own": client.model, "common": fl.load(client.build(), before)}
        if self.hidden:
            d_t, d_s = (fl.split(net).num_features for net in nets.values())
            nets["link"] = client.module("link", partial(nn.Linear, d_s, d_t, bias=False))
        loss = AdaptiveLosses(client.criterion, self.distillation, self.hidden, self.gradients == "joint")
        yield fl.Fit(nn.ModuleDict(nets), loss, client.train, self.training)
        update = fl.weights.minus(fl.learnt_of(nets["common"]), before)
        return fl.Message(update=fl.lowrank.factored(update, self.energy(client.round)))

    def energy(self, round: int) -> float:
        """T(t): the share of energy that is kept in this round, counted from 1."""
        return self.energy_start + min(1.0, round / self.growth) * (self.energy_end - self.energy_start)

    def global_model(self, state: State, server: fl.Server) -> nn.Module:
        return fl.load(server.build(), state.common)

    def _message(self, state: State, id: fl.ClientId) -> fl.Message:
        """The last update for a client that has what came before it, the whole mentee for any other."""
        if id in state.holders.tolist():
            return fl.Message(update=state.update, version=state.version)
        return fl.Message(common=state.common, version=state.version)


def changed(common: fl.Weights, update: fl.lowrank.Factored) -> fl.Weights:
    """The mentee after an update; what the update lacks stays."""
    return common | {name: common[name] + tensor for name, tensor in fl.lowrank.multiplied(update, common).items()}


def held(client: fl.Client, message: fl.Message) -> fl.Weights | None:
    """The mentee of the version that is stated; None if the client holds another one than the update belongs to."""
    if "update" not in message:
        return message["common"]
    ahead = message["version"] - client.state.get("version", -1)
    if ahead == 0:  # it took part in a round that changed nothing on the server
        return client.state["common"]
    return changed(client.state["common"], message["update"]) if ahead == 1 else None


@dataclass(frozen=True)
class AdaptiveLosses:
    """L_t + L_s, for the mentor with the mentee's outputs as constants, for the mentee the other way round.

    L_t = L^t_t + (distillation KL(mentee || mentor) + hidden MSE(H_t, W^h H_s)) / (L^t_t + L^t_s),
    L_s = L^t_s + (distillation KL(mentor || mentee) + hidden MSE(H_t, W^h H_s)) / (L^t_t + L^t_s).

    Attributes:
        criterion: the loss by labels.
        distillation: weight of the divergence.
        hidden: weight of the distance between features; with 0 there are no features, and no net "link".
        joint: whether nothing is a constant, so that each net follows both losses.
    """

    criterion: fl.Criterion
    distillation: float
    hidden: float
    joint: bool

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch; both nets predict before either steps."""
        (z_t, h_t), (z_s, h_s) = (self._seen(net.get_submodule(name), batch.inputs) for name in ("own", "common"))
        task_t, task_s = (self.criterion(z, batch.targets) for z in (z_t, z_s))
        gap_t = gap_s = z_t.new_zeros(())
        if self.hidden:
            link = net.get_submodule("link")
            gap_t, gap_s = F.mse_loss(h_t, link(self._read(h_s))), F.mse_loss(link(h_s), self._read(h_t))
        return self._loss(z_t, z_s, task_t, task_s, gap_t) + self._loss(z_s, z_t, task_s, task_t, gap_s)

    def _loss(self, logits: Tensor, taught: Tensor, task: Tensor, other: Tensor, gap: Tensor) -> Tensor:
        quality = (task + self._read(other)).clamp(min=_SMALLEST)
        divergence = fl.losses.distillation(logits, taught, teacher_learns=self.joint)
        return task + (self.distillation * divergence + self.hidden * gap) / quality

    def _read(self, other: Tensor) -> Tensor:
        return other if self.joint else other.detach()

    def _seen(self, net: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and, if they are compared, features; the logits again if not."""
        if not self.hidden:
            return (logits := net(inputs)), logits
        _, features, logits = fl.split(net).passed(inputs)
        return logits, features
