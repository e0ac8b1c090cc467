"""Fed-ET: an ensemble of small models of many kinds trains a large one at the server.

Cho, Manoel, Joshi, Sim, Dimitriadis. IJCAI 2022. https://arxiv.org/abs/2204.12703. The equations are reconstructed.

The server has a large model, and a small prototype of each of the clients' architectures. What clients make of their
prototypes labels public data for the large model: the more confident a client is of an example, the more its logits
count in the consensus, whose most likely class is the label; and those who would have chosen another class have a small
part in the target, as a regulariser. Heads, which all models have in one shape, travel: the large model starts a round
with the mean of the clients' heads, and the prototypes end it with the large model's head.

Symbols
    w_u       state.weights[u], the prototype of architecture u
    theta_s   state.common, the server's model
    w_k       weights of a reply
    s_k(x)    logits of client k on a public example
    v_k(x)    confidence, their variance over classes
    alpha_k   shares, v_k over the sum of all clients' v
    s(x)      the mean of s_k(x), weighted by alpha_k
    y(x)      its most likely class
    s_div(x)  the mean of the logits of those whose most likely class is another, weighted by v_k among them
    lambda    diversity
    tau_s     server_training.steps

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    representation="none" equals fedavg sharing.scope="architecture" sharing.weighting="uniform"
    representation="none" sharing.scope="layer" equals fedavg sharing.weighting="uniform"
    server_training.lr=0.0 equals fedavg sharing.weighting="uniform" on architectures=1
    training.lr=0.0 server_training.lr=0.0 stays at rest on architectures=1

Departures from the paper
    1. Of the paper the abstract, the introduction and the captions were at hand, which state the idea; the authors'
       code is not published. Equations and constants are those of an independent implementation, published with
       FedProphet (https://github.com/Yoruko-Tang/FedProphet): the variance of raw logits, labels by argmax, lambda,
       tau_s, the server's SGD.
    2. That implementation adds 1e-6 to every sum of variances, so its shares do not quite sum to one. Here they do;
       where all logits of an example are equal, no client being confident at all, clients count equally.
    3. An example on which all clients agree has no s_div and is left out of the regulariser. In that implementation its
       s_div is zero, which is a uniform target; `unanimous="uniform"` does so.
    4. The layers that travel are the heads, as in that implementation. The paper chooses them by model, which we could
       not read. `representation="none"` leaves them where they are, so that nothing comes back from the server's model.
    5. We recall that the paper draws clients in proportion to their examples, and so weighs them equally in means.
       Here they are drawn uniformly, and weigh equally too; `sharing.weighting="samples"` weighs them by examples.
       The mean of the heads over all architectures is always a plain one.
    6. A prototype of which no client was drawn keeps its weights, and gets the server's head. With
       `sharing.scope="layer"` prototypes share the layers that they have in common, as FedIN's revision runs it.
    7. Means cover BatchNorm's running statistics. Clients' models label in evaluation mode; the server's model is in
       training mode, and learns statistics of the public data.
    8. The global model is the server's. A client is evaluated with its prototype.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck import fl

Unanimous = Literal["skip", "uniform"]


@dataclass(frozen=True)
class State:
    """The small models and the large one.

    Attributes:
        weights: the prototypes.
        common: theta_s, with its buffers.
    """

    weights: fl.GroupWeights
    common: fl.Weights


@dataclass(frozen=True)
class FedET(fl.SharesWeights[State]):
    """Hyper-parameters of Fed-ET.

    Attributes:
        training: a client's local training.
        server_training: of the server's model, on public data.
        public_examples: rows of the public data drawn each round; all of them if there are fewer.
        diversity: lambda, weight of the divergence from those who disagree with the consensus.
        unanimous: whether an example on which all agree is left out of that divergence, or has a uniform target in it.
        representation: which layers travel between clients' models and the server's, the "head" or "none".
        sharing: which prototypes there are, and how clients average in them. Its rule also combines the heads; the
            consensus always goes by confidence.
    """

    family = "public"
    unguarded = "a rule acts among the clients of one architecture, and 'trimmed' drops none of three"

    variants = {
        "no head travels": {"representation": "none"},
        "layer by layer": {"sharing.scope": "layer"},
        "unanimous rows are smoothed": {"unanimous": "uniform", "diversity": 0.5},
        "median": {"sharing.combine.rule": "median"},
        "lasting optimisers": {"training.persist": True},
    }

    training: fl.LocalTraining = fl.LocalTraining()
    server_training: fl.ServerTraining = fl.LocalTraining("sgd", lr=0.005, steps=128, batch_size=64, momentum=0.9)
    public_examples: Annotated[int, fl.at_least(1)] = 5000
    diversity: Annotated[float, fl.at_least(0)] = 0.05
    unanimous: Unanimous = "skip"
    representation: Literal["head", "none"] = "head"
    sharing: fl.Sharing = fl.Sharing("architecture", "uniform")

    def __post_init__(self) -> None:
        fl.require(self.sharing.averages, "sharing.scope", "'architecture', 'layer' or 'model'", self.sharing.scope)
        expected = "'average', since the server predicts with clients' models"
        fl.require(self.sharing.buffers == "average", "sharing.buffers", expected, self.sharing.buffers)

    @property
    def exchanges_more(self) -> bool:
        return True

    def needs(self) -> frozenset[fl.Need]:
        heads = (
            {fl.Need.SPLIT_MODEL, fl.heads.WHOLE_HEAD, fl.heads.COMMON_HEAD, fl.heads.SERVERS_HEAD}
            if self.representation == "head"
            else set[fl.Need]()
        )
        return super().needs() | heads | {fl.Need.PUBLIC_DATA, fl.Need.CLASSES}

    def init(self, server: fl.Server) -> State:
        return State(self.sharing.initial(server), fl.learnt_of(server.build()))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        public = fl.public.public_of(server).take(fl.public.drawn_rows(server, self.public_examples))
        replies = cohort.stream(self.local_update, self.sharing.send(state.weights, cohort, server))
        means = self.sharing.no_means(server.roster, "weights", "buffers")
        heads: list[fl.Weights] = []
        logits: list[Tensor] = []
        for id, reply in self.sharing.combine.arriving(replies):
            means.add(id, reply)
            net = fl.load(
                server.build(server.roster[id].architecture), {**reply["weights"], **reply.get("buffers", {})}
            )
            heads.append(self._travelling(net))
            logits.append(server.predict(fl.Predict(net, public)))
            del reply  # before the next comes
        combined = {n: self.sharing.combine([head[n] for head in heads], [1.0] * len(heads)) for n in heads[0]}
        model = fl.load(server.build(), state.common)
        if combined:
            fl.load(fl.split(model).head, combined, partial=True)
        labels, diverse = consensus(torch.stack(logits), self.unanimous)
        lesson = public.unaugmented().with_columns(labels=labels, diverse=diverse)
        report = server.fit(fl.Fit(model, TransferLoss(self.diversity), lesson, self.server_training))
        server.note(transfer_loss=report.loss)
        pool, back = means.over(state.weights, "weights", "buffers"), self._travelling(model)
        owned = {prefix + n: tensor for prefix in self._head_prefixes(server) for n, tensor in back.items()}
        return State(
            {u: weights | {n: owned[n] for n in weights if n in owned} for u, weights in pool.items()},
            fl.learnt_of(model),
        )

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        yield fl.Fit(client.model, client.objective, client.train, self.training)
        return self.sharing.reply(client)

    def global_model(self, state: State, server: fl.Server) -> nn.Module:
        return fl.load(server.build(), state.common)

    def _travelling(self, net: nn.Module) -> fl.Weights:
        """The layers of a model that travel, by their names in its head."""
        return {} if self.representation == "none" else fl.learnt_of(fl.split(net).head)

    def _head_prefixes(self, server: fl.Server) -> set[str]:
        """What the names of the layers that travel begin with in clients' models."""
        if self.representation == "none":
            return set()
        return {server.about(member.architecture, fl.heads.head_prefix) for member in server.roster.values()}


@dataclass(frozen=True)
class TransferLoss:
    """Cross-entropy to the consensus' class + lambda KL(softmax s_div || net), up to the entropy of softmax s_div.

    Attributes:
        diversity: lambda.
    """

    diversity: float

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch, whose targets are not read; both terms are means over it, rows without s_div included."""
        logits = net(batch.inputs)
        loss = F.cross_entropy(logits, batch.columns["labels"])
        return loss + self.diversity * fl.losses.soft_cross_entropy(logits, batch.columns["diverse"])


def consensus(logits: Tensor, unanimous: Unanimous) -> tuple[Tensor, Tensor]:
    """What the clients' logits (clients, rows, classes) teach.

    Returns:
        y, the class of each row, and softmax s_div (rows, classes); where nobody disagrees that is uniform, or zero if
        such rows are to be skipped.
    """
    confidence = logits.var(2, correction=0)
    labels = torch.einsum("kn,knz->nz", shares(confidence, torch.ones_like(confidence)), logits).argmax(1)
    others = (logits.argmax(2) != labels).to(logits)
    diverse = torch.einsum("kn,knz->nz", shares(confidence, others), logits).softmax(1)
    disputed = others.any(0)[:, None]
    return labels, diverse if unanimous == "uniform" else torch.where(disputed, diverse, 0.0)


def shares(confidence: Tensor, among: Tensor) -> Tensor:
    """Each client's share of a row, by its confidence (clients, rows) among those marked with 1 (clients, rows).

    Shares sum to one, are equal where none of those marked is confident, and zero where nobody is marked.
    """
    weights = confidence * among
    total = weights.sum(0)
    return torch.where(total > 0, weights / total, among / among.sum(0).clamp(min=1))
