"""FCCL: federated cross-correlation and continual learning.

Huang, Ye, Du. "Learn from Others and Be Yourself in Heterogeneous Federated Learning", CVPR 2022.

Clients of any architecture publish their logits on public data. Each learns from the mean of all logits by correlation
and not by distance: over a batch, a class of its own should correlate with the same class of the mean, and with no
other. Then it learns from its own data again, and from two models of its own, so as not to forget: the one that it had
before it ever met the others ("intra-domain"), and the one with which it began the round ("inter-domain").

Symbols
    theta_i   client.model, kept by the client
    D_0       the rows of the public data drawn this round
    Z_i       logits of client i on a batch of D_0
    Z-bar     consensus, the mean of the clients' logits
    M         c, the correlations of the columns of Z_i with those of Z-bar, (classes, classes)
    lambda    off_diagonal
    theta_i*  client.state["intra"], and the net "intra" that a client only reads
    theta^t-1 the net "inter", likewise: the client's model at the beginning of the round

Wire
    down      rows public * integer, consensus public * |z|
    up        logits public * |z|

Limits
    correlation.lr=0.0 intra=0.0 inter=0.0 pretrain=0 training.batch_size=1000 approaches local training.batch_size=1000
    training.lr=0.0 correlation.lr=0.0 stays at rest

Departures from the paper
    1. Of the paper's text only the abstract was at hand; equations are those of the authors' code, of which there are
       two releases, of 2022 and of 2023; where they differ, it is said whose.
    2. The clients' logits are exchanged once a round, so that the mean does not follow what they learn meanwhile. The
       code exchanges them anew for every batch, from which a client makes one step: `exchanges` divides the rows into
       as many parts, one after the other.
    3. Columns are standardised by their population's deviation, so that the correlation of a class with itself is 1.
       `deviation="sample"` is the code's, where it is (B - 1) / B in a batch of B. A class whose logits are the same
       for a whole batch correlates with nothing.
    4. The clients' logits and those of the two teachers are taken in evaluation mode. The codes take the former in
       training mode, so that public data enter the statistics of BatchNorm; here they do so where a client learns. The
       teachers are in evaluation mode in the code of 2022, and in training mode in that of 2023.
    5. The code of 2022 replaces the client's own part of the mean by the logits of its model of the round's beginning,
       that of 2023 does not; with one exchange both are the same.
    6. Before its first exchange a client trains on its own data for as long as in `pretrain` rounds; the code of
       2023 does for 50 epochs with a falling learning rate. With 0 the client's first model is its intra-domain teacher
       as it is, with BatchNorm statistics measured on the client's data.
    7. Only the clients that were drawn take part; in the paper all do in every round.
    8. Public batches have 512 examples in the code of 2022; in that of 2023 256, and 128 in one scenario. In the latter
       local training has a weight decay of 1e-5, both rates fall linearly, to a tenth, and where all clients have one
       architecture their weights are averaged as well.
    9. Public inputs are never augmented; the codes crop, flip and rotate them.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from potluck import fl

Deviation = Literal["population", "sample"]


@dataclass(frozen=True)
class FCCL(fl.Stateless):
    """Hyper-parameters of FCCL.

    Attributes:
        training: a client's training on its own data.
        correlation: its training on public data.
        public_examples: rows of the public data drawn each round; all of them if there are fewer.
        exchanges: parts of these rows, on each of which logits are exchanged and learnt from before the next.
        off_diagonal: lambda, the weight of the correlations of different classes.
        deviation: what divides logits, the deviation of the "population" that a batch is, or of a "sample".
        intra: weight of the divergence from the model that the client had before its first exchange.
        inter: weight of the divergence from the model that it had at the beginning of the round.
        pretrain: for how many rounds' length a client trains on its own data before its first exchange.
        combine: how the clients' logits become their mean.
    """

    family = "public"

    aligns_classes = True
    variants = {
        "an exchange for every batch": {"exchanges": 3, "deviation": "sample"},
        "without pre-training": {"pretrain": 0},
        "without intra-domain teacher": {"intra": 0.0},
        "lasting optimisers": {"training.persist": True, "correlation.persist": True},
    }

    builds_clients_models = False
    training: fl.LocalTraining = fl.LocalTraining()
    correlation: fl.LocalTraining = fl.LocalTraining(batch_size=256)
    public_examples: Annotated[int, fl.at_least(1)] = 5000
    exchanges: Annotated[int, fl.at_least(1)] = 1
    off_diagonal: Annotated[float, fl.at_least(0)] = 0.0051
    deviation: Deviation = "population"
    intra: Annotated[float, fl.at_least(0)] = 1.0
    inter: Annotated[float, fl.at_least(0)] = 1.0
    pretrain: Annotated[int, fl.at_least(0)] = 1
    combine: fl.Aggregate = fl.Aggregate()

    def needs(self) -> frozenset[fl.Need]:
        return frozenset({fl.Need.PUBLIC_DATA, fl.Need.CLASSES})

    def round(self, state: fl.Nothing, cohort: fl.Cohort, server: fl.Server) -> fl.Nothing:
        present = list(cohort.ids)
        drawn = fl.public.drawn_rows(server, self.public_examples)
        for rows in drawn.tensor_split(min(self.exchanges, len(drawn))):
            scored = cohort.ask(self.score_public, {i: fl.Message(rows=rows) for i in present})
            consensus = fl.classes.averaged(self.combine, scored.entries("logits"), [1.0] * len(scored))
            present = list(cohort.ask(self.learn_from_others, {i: fl.Message(consensus=consensus) for i in scored}))
        cohort.ask(self.local_update, {i: fl.Message() for i in present})
        return state

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        if handler == "score_public":
            return fl.Schema(logits=fl.schema.logits(len(message["rows"]), server.num_classes, member))
        return fl.Schema()

    @fl.on_client
    def score_public(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        if "intra" not in client.state:
            for _ in range(self.pretrain):
                yield fl.Fit(client.model, client.objective, client.train, self.training, name="train")
            client.state["intra"] = fl.learnt_of(client.model)
        if client.state.get("begun") != client.round:
            client.state |= {"begun": client.round, "inter": fl.learnt_of(client.model)}
        logits = yield from fl.public.predict_rows(client, message["rows"])
        return fl.Message(logits=logits)

    @fl.on_client
    def learn_from_others(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        rows = fl.public.public_of(client).take(client.state.pop("rows")).unaugmented()
        lesson = rows.with_columns(consensus=message["consensus"])
        yield fl.Fit(client.model, CorrelationLoss(self.off_diagonal, self.deviation), lesson, self.correlation)
        return fl.Message()

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        past = {"intra": client.state["intra"], "inter": client.state.pop("inter")}
        del client.state["begun"]
        weights = {name: weight for name, weight in (("intra", self.intra), ("inter", self.inter)) if weight}
        teachers = {name: fl.load(client.twin(), past[name]) for name in weights}
        for teacher in teachers.values():
            yield fl.NormStatistics(teacher, client.train, layers="unlearnt")
        objective = DualDomainLoss(client.criterion, **weights)
        yield fl.Fit(client.model, objective, client.train, self.training, frozen=teachers, name="train")
        return fl.Message()


@dataclass(frozen=True)
class CorrelationLoss:
    """The sum over u of (1 - M_uu)^2, plus lambda times the sum over u and v != u of (1 + M_uv)^2.

    M is of the net's logits and the batch's column "consensus"; no gradient flows into the latter. Classes count that
    both have.
    """

    off_diagonal: float
    deviation: Deviation

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch."""
        consensus = batch.columns["consensus"]
        logits = net(batch.inputs).to(consensus.dtype)
        lacking = (logits.detach() + consensus)[0] == -torch.inf
        logits, consensus = (numbers.masked_fill(lacking, 0.0) for numbers in (logits, consensus))
        with fl.precision.unmixed(logits.device):  # a product in bf16 would be a percent off the mark
            c = standardised(logits, self.deviation).T @ standardised(consensus, self.deviation) / len(logits)
        same, nothing = torch.eye(len(c), dtype=c.dtype, device=c.device), lacking[:, None] | lacking
        equal, other = (gaps.square().masked_fill(nothing, 0.0) for gaps in (1 - c, 1 + c))
        return (equal * same).sum() + self.off_diagonal * (other * (1 - same)).sum()


def standardised(logits: Tensor, deviation: Deviation) -> Tensor:
    """Logits less their mean over the batch, divided by their deviation, class by class, (batch, classes).

    A class that deviates by less than 1e-5 of its size is constant: it is not divided, and what is left of it is tiny.
    """
    gaps = logits - logits.mean(0)
    degrees = len(logits) if deviation == "population" else max(len(logits) - 1, 1)
    variance = gaps.square().sum(0) / degrees
    varies = variance > 1e-10 * logits.square().mean(0)
    return gaps / torch.where(varies, variance, 1).sqrt()


@dataclass(frozen=True)
class DualDomainLoss:
    """The task's loss, + intra * KL("intra" || net) + inter * KL("inter" || net); the extras have the teachers."""

    criterion: fl.Criterion
    intra: float = 0.0
    inter: float = 0.0

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch of examples with classes."""
        logits = net(batch.inputs)
        loss = self.criterion(logits, batch.targets)
        for name, weight in (("intra", self.intra), ("inter", self.inter)):
            if weight:
                with torch.no_grad():
                    taught = extras[name](batch.inputs)
                loss = loss + weight * fl.losses.distillation(logits, taught)
        return loss
