"""FedH2L: federated learning with model and statistical heterogeneity, by mutual learning on shared seeds.

Li, Zhou, Wang, Mi, Hospedales. 2021. https://arxiv.org/abs/2101.11296.

Clients of any architecture share a small labelled set, the seeds. Each trains on its own data and tells the others its
predictions for the seeds; then it learns the seeds' labels and the others' predictions. What it learns from the seeds
must not undo what it has learnt from its own data: where the gradient on seeds would raise the loss on own examples, it
is projected so that, to first order, this stays.

    L_i = CE(p_i, y) + strength * sum over j other than i of KL(p_j || p_i)                  on seeds
    g   = grad L_i,    o = grad CE on own examples,    g <- g - (<g, o> / <o, o>) o    if <g, o> < 0

Symbols
    theta_i   client.model, kept by the client
    p_i       reply["predictions"], its probabilities on the seeds of the round
    y         the labels of these seeds
    peers     the sum of p_j over the other clients of the round

Wire
    down      rows public * integer, peers public * |z|
    up        predictions public * |z|

Limits
    mutual.lr=0.0 training.batch_size=1000 approaches local training.batch_size=1000
    strength=0.0 weighting="mean" equals fedh2l strength=0.0
    training.lr=0.0 mutual.lr=0.0 stays at rest
    weighting="mean" equals fedh2l on clients=2

Departures from the paper
    1. Of the paper only the abstract was at hand; the losses and the projection are as others describe them. The
       projection is that of A-GEM (Chaudhry, Ranzato, Rohrbach, Elhoseiny, 2019), over all weights together.
    2. Its clients are peers without a server, and send each other their predictions. Here the server adds up for each
       client those of the others, of which the loss depends on nothing but the sum.
    3. A round is local training and then a pass over the seeds; whether the paper alternates in shorter turns is not
       known here.
    4. The seeds are the federation's public data, with their labels; whether the paper's come from the clients is not
       known here.
    5. With each batch of seeds goes one of as many of the client's own examples, drawn for the round, in random order
       and over again, without augmentation. They leave BatchNorm's running statistics alone.
    6. `weighting="mean"` divides the sum by the number of the others, so that strength does not depend on how many
       clients a round has, and `conflicts="keep"` projects nothing; neither is in the paper. A client that is alone in
       a round learns the labels only.
    7. Every optimiser is new each round by default, and all constants are those of methods here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from potluck import fl


@dataclass(frozen=True)
class FedH2L(fl.Stateless):
    """Hyper-parameters of FedH2L.

    Attributes:
        training: a client's training on its own data.
        mutual: its training on the seeds.
        public_examples: seeds drawn each round; all of them if there are fewer.
        strength: weight of the divergence from the other clients.
        weighting: whether the divergences add up, or are averaged.
        conflicts: whether a gradient on seeds that opposes that on own examples is projected.
        combine: how the others' predictions become one, of which "sum" takes as many as there are.
    """

    family = "public"
    unguarded = "what clients send are distributions, of which one client of five moves a mean by a fifth"
    aligns_classes = True

    variants = {
        "mean": {"weighting": "mean"},
        "conflicts": {"conflicts": "keep"},
        "lasting optimisers": {"training.persist": True, "mutual.persist": True},
    }

    builds_clients_models = False
    training: fl.LocalTraining = fl.LocalTraining()
    mutual: fl.LocalTraining = fl.LocalTraining(batch_size=64)
    public_examples: Annotated[int, fl.at_least(1)] = 1000
    strength: Annotated[float, fl.at_least(0)] = 1.0
    weighting: Literal["sum", "mean"] = "sum"
    conflicts: Literal["project", "keep"] = "project"
    combine: fl.Aggregate = fl.Aggregate()

    def needs(self) -> frozenset[fl.Need]:
        return frozenset({fl.Need.PUBLIC_DATA, fl.Need.PUBLIC_LABELS, fl.Need.CLASSES})

    def round(self, state: fl.Nothing, cohort: fl.Cohort, server: fl.Server) -> fl.Nothing:
        rows = fl.public.drawn_rows(server, self.public_examples)
        told = cohort.ask(self.learn_and_predict, fl.Message(rows=rows))
        cohort.ask(self.learn_from_peers, {i: fl.Message(peers=self._peers(i, told, server)) for i in told})
        return state

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        if handler == "learn_and_predict":
            return fl.Schema(predictions=fl.schema.Probabilities(len(message["rows"]), server.num_classes))
        return fl.Schema()

    @fl.on_client
    def learn_and_predict(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        yield fl.Fit(client.model, client.objective, client.train, self.training)
        client.state["rows"] = message["rows"]
        logits = yield fl.Predict(client.model, fl.public.public_of(client).take(message["rows"]))
        return fl.Message(predictions=logits.softmax(1))

    @fl.on_client
    def learn_from_peers(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        seeds = fl.public.public_of(client).take(client.state.pop("rows")).unaugmented()
        peers = message.get("peers")
        if peers is None:
            peers = torch.zeros(len(seeds), client.num_classes)
        loss, seeds = SeedLoss(client.criterion, self.strength), seeds.with_columns(peers=peers)
        if not len(seeds := fl.public.of_own_classes(client, seeds)):
            return fl.Message()
        if self.conflicts == "keep":
            yield fl.Fit(client.model, loss, seeds, self.mutual)
            return fl.Message()
        whole = fl.projection.Reconcile(frozenset(fl.parameters_of(client.model)), "exact", granularity="whole")
        losses, data = (OwnLoss(client.criterion), loss), _beside(seeds, client)
        report = yield fl.Fit(client.model, losses, data, self.mutual, combine=whole)
        client.note(**report.combined)
        return fl.Message()

    def _peers(self, id: fl.ClientId, told: fl.Replies, server: fl.Server) -> Tensor | None:
        """What the others predict, (rows, classes): the sum or the mean of their probabilities; None without others."""
        others = {other: reply["predictions"] for other, reply in told.items() if other != id}
        if not others:
            return None
        mean = fl.public.consensus([*others.values()], self.combine, members=server.members(others))
        return mean * (len(others) if self.weighting == "sum" else 1)


@dataclass(frozen=True)
class SeedLoss:
    """CE(p, y) + strength * (the divergences from the others, but for their entropies).

    sum over j of KL(p_j || p) is the cross-entropy to sum p_j, the batch's column "peers", less the entropies of p_j,
    which have no gradient.
    """

    criterion: fl.Criterion
    strength: float

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch of seeds."""
        logits = net(batch.inputs)
        return self.criterion(logits, batch.targets) + self.strength * fl.losses.soft_cross_entropy(
            logits, batch.columns["peers"]
        )


@dataclass(frozen=True)
class OwnLoss:
    """The task's loss on the own examples that go with a batch of seeds."""

    criterion: fl.Criterion

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of the batch's columns "inputs", or "inputs" and a name, and "targets"."""
        named = {key.removeprefix("inputs"): x for key, x in batch.columns.items() if key.startswith("inputs")}
        with fl.batchnorm.keep_statistics(net):
            return self.criterion(net(named.get("", named)), batch.columns["targets"])


def _beside(seeds: fl.Examples, client: fl.Client) -> fl.Examples:
    """The seeds, each with one of the client's examples as columns, all of which occur equally often but for one."""
    order = torch.randperm(len(client.train), generator=client.rng)
    own = client.train.batch(order.repeat(len(seeds) // len(order) + 1)[: len(seeds)])
    inputs = own.inputs if isinstance(own.inputs, Mapping) else {"": own.inputs}
    return seeds.with_columns(targets=own.targets, **{f"inputs{name}": x for name, x in inputs.items()})
