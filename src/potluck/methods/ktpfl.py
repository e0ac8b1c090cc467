"""KT-pFL: parameterised knowledge transfer for personalised federated learning.

Zhang, Guo, Ma, Wang, Xu, Wu. NeurIPS 2021. https://arxiv.org/abs/2111.02862.

As in FedMD, clients of any architecture learn from each other's predictions on public data; but each has a mixture of
its own for a teacher. The server learns the weights of these mixtures, the knowledge coefficients.

Symbols
    w_k       client.model, kept by the client
    D_r       the rows of the public data drawn this round
    s_k       reply["predictions"], softmax(logits / T) of client k on D_r
    c         state.coefficients, c_kl the weight of client l in the mixture for client k
    t_k       target, the sum over l of c_kl s_l
    T, rho    temperature, rho
    N         clients that replied

Wire
    down      rows public * integer, target public * |z|
    up        predictions public * |z|

Limits
    distillation.lr=0.0 pretrain=false training.batch_size=1000 approaches local training.batch_size=1000
    training.lr=0.0 distillation.lr=0.0 stays at rest

Departures from the paper
    1. Coefficients are learnt as in the authors' code: for each client one gradient step on
       mean (s_k - t_k)^2 + rho mean (c_k - 1/N)^2, of a size that depends on the gradient's, and then
       c_k = softmax(5 c_k). With ten clients or more this keeps them close to 1/N, and those who predict alike need
       not come first. `update="projected"` has a plain gradient step of `coefficient_lr` on the paper's
       KL(t_k || s_k) + rho |c_k - 1/N|^2 and a projection onto the simplex; we could not read how the paper normalises.
    2. Only the clients that were drawn take part, with the coefficients among them. Each row of these is divided by its
       sum before the step and multiplied by it afterwards, so that the whole row still sums to 1. In the paper all
       clients take part.
    3. The distillation is KL(t_k || softmax(logits / T)), summed over classes and not multiplied by T squared.
       `reduction="mean"` divides by the number of classes too, as the code does.
    4. Public rows are drawn without replacement; the code draws with.
    5. Before its first exchange a client trains as long as in a revisit (`pretrain`); in the code, for one epoch.
    6. A revisit has a fixed length; the code's grows from 1 epoch to 10. Its optimisers are SGD of rate 0.02.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from potluck import fl


@dataclass(frozen=True)
class State:
    """c, (clients, clients) in ascending order of client id; its rows sum to 1."""

    coefficients: Tensor


@dataclass(frozen=True)
class KTpFL(fl.Method[State]):
    """Hyper-parameters of KT-pFL.

    Attributes:
        training: revisiting private data.
        distillation: learning the mixture of predictions.
        public_examples: rows of the public data drawn each round; all of them if there are fewer.
        pretrain: whether a client trains on its own data before it is first asked for predictions.
        temperature: T, of predictions and of the distillation.
        rho: weight of the coefficients' distance to equal ones.
        update: how coefficients are learnt: "softmax" as in the authors' code, "projected" as in the paper.
        coefficient_lr: the step of "projected".
        reduction: the distillation's divergence, summed over classes ("batchmean") or their mean ("mean").
    """

    family = "public"
    unguarded = "the server learns what clients mix, and no mean is taken"

    aligns_classes = True
    variants = {
        "projected": {"update": "projected"},
        "mean": {"reduction": "mean"},
        "without pre-training": {"pretrain": False},
        "lasting optimisers": {"training.persist": True, "distillation.persist": True},
    }

    builds_clients_models = False
    training: fl.LocalTraining = fl.LocalTraining()
    distillation: fl.LocalTraining = fl.LocalTraining(batch_size=256)
    public_examples: Annotated[int, fl.at_least(1)] = 3000
    pretrain: bool = True
    temperature: Annotated[float, fl.above(0)] = 10.0
    rho: Annotated[float, fl.at_least(0)] = 0.7
    update: Literal["softmax", "projected"] = "softmax"
    coefficient_lr: Annotated[float, fl.above(0)] = 0.1
    reduction: Literal["batchmean", "mean"] = "batchmean"

    def needs(self) -> frozenset[fl.Need]:
        return frozenset({fl.Need.PUBLIC_DATA, fl.Need.CLASSES})

    def init(self, server: fl.Server) -> State:
        clients = len(server.roster)
        return State(torch.full((clients, clients), 1 / clients))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        replies = cohort.ask(self.predict_public, fl.Message(rows=fl.public.drawn_rows(server, self.public_examples)))
        s = torch.stack(replies.entries("predictions"))
        places = torch.tensor([sorted(server.roster).index(id) for id in replies])
        among = state.coefficients[places[:, None], places]
        shares = among.sum(1, keepdim=True)
        c = self._learnt(torch.where(shares > 0, among / shares, 1 / len(places)), s)
        targets = torch.einsum("kl,lnz->knz", c, s)
        cohort.ask(self.digest_and_revisit, {id: fl.Message(target=t) for id, t in zip(replies, targets, strict=True)})
        server.note(own_coefficient=float(c.diagonal().mean()))
        coefficients = state.coefficients.clone()
        coefficients[places[:, None], places] = c * shares
        return State(coefficients)

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        if handler == "predict_public":
            return fl.Schema(predictions=fl.schema.Probabilities(len(message["rows"]), server.num_classes))
        return fl.Schema()

    @fl.on_client
    def predict_public(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        pretraining = self.training if self.pretrain else None
        logits = yield from fl.public.predict_rows(client, message["rows"], pretraining)
        return fl.Message(predictions=(logits / self.temperature).softmax(1))

    @fl.on_client
    def digest_and_revisit(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        loss = TemperedLoss(self.temperature, client.num_classes if self.reduction == "mean" else 1)
        yield fl.Fit(
            client.model, loss, fl.public.lesson_of_rows(client, message["target"]), self.distillation, name="digest"
        )
        yield fl.Fit(client.model, client.objective, client.train, self.training, name="train")
        return fl.Message()

    def _learnt(self, c: Tensor, s: Tensor) -> Tensor:
        """The coefficients after learning from predictions s (clients, rows, classes)."""
        if self.update == "softmax":
            gradients = squared_gradients(c, s, self.rho)
            steps = torch.tensor([[step_size(float(g.abs().sum()) / len(c))] for g in gradients])
            return (5 * (c - steps * gradients)).softmax(1)
        return on_simplex(c - self.coefficient_lr * divergence_gradients(c, s, self.rho))


@dataclass(frozen=True)
class TemperedLoss:
    """Cross-entropy of softmax(logits / T) to soft labels, whose gradient is that of KL(labels || net); over `by`."""

    temperature: float
    by: int

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch."""
        return (
            fl.losses.soft_cross_entropy(net(batch.inputs) / self.temperature, batch.columns["soft_labels"]) / self.by
        )


def squared_gradients(c: Tensor, s: Tensor, rho: float) -> Tensor:
    """By c_k, the gradient of mean (s_k - t_k)^2 + rho mean (c_k - 1/N)^2; row by row, (N, N)."""
    flat = s.flatten(1)
    gaps = c @ flat - flat  # t_k - s_k
    return 2 / flat.shape[1] * gaps @ flat.T + 2 * rho / len(c) * (c - 1 / len(c))


def divergence_gradients(c: Tensor, s: Tensor, rho: float) -> Tensor:
    """By c_k, the gradient of the mean over examples of KL(t_k || s_k), plus rho |c_k - 1/N|^2; row by row, (N, N)."""
    targets = torch.einsum("kl,lnz->knz", c, s)
    tiny = torch.finfo(s.dtype).tiny
    logs = (targets.clamp(min=tiny) / s.clamp(min=tiny)).log()
    return torch.einsum("knz,lnz->kl", logs + 1, s) / s.shape[1] + 2 * rho * (c - 1 / len(c))


def step_size(gradient: float) -> float:
    """The authors' step for a mean absolute gradient of this size, from 1.

    Five times over it is divided by 5 if the gradient times it is above 0.01, and then multiplied by 5 if below.
    """
    step = 1.0
    for _ in range(5):
        if gradient > 0.01:
            gradient, step = gradient / 5, step / 5
        if gradient < 0.01:
            gradient, step = gradient * 5, step * 5
    return step


def on_simplex(points: Tensor) -> Tensor:
    """Of each row, the nearest distribution in Euclidean distance (Duchi et al., ICML 2008, fig. 1)."""
    ordered = points.sort(1, descending=True).values
    excess = (ordered.cumsum(1) - 1) / torch.arange(1, points.shape[1] + 1, dtype=points.dtype)
    last = (ordered > excess).sum(1, keepdim=True) - 1
    return (points - excess.gather(1, last)).clamp(min=0)
