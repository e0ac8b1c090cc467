"""FedMD: heterogeneous federated learning by model distillation.

Li, Wang. NeurIPS workshop 2019. https://arxiv.org/abs/1910.03581. Algorithm 1.

Clients of any architecture publish their logits on public data; each is trained towards the mean of all logits (digest)
and then on its own data again (revisit). No weights are sent.

Symbols
    f_k       client.model, kept by the client
    D_0       the rows of the public data drawn this round
    z         logits of one example
    F         consensus, the mean of the clients' logits on D_0

Wire
    down      rows public * integer, consensus public * |z|
    up        logits public * |z|

Limits
    digest_loss="mse" digestion.optimizer="sgd" approaches fedmd digestion.lr=0.0 on clients=1
    training.lr=0.0 digestion.lr=0.0 stays at rest

Departures from the paper
    1. Before its first exchange a client trains on its own data (`pretrain`), as long as one revisit; the paper first
       trains on the public data's labels, and then longer on its own. Public data often have other classes than the
       task, or no labels; with `public_labels` clients learn from them first, as in the paper.
    2. The digest loss is the mean absolute difference of logits, as in the authors' code; the paper only says
       "approach the consensus". `digest_loss="mse"` is what ports use.
    3. Public rows are drawn uniformly; the authors' code draws as many of each public label. A digest batch has 128
       examples, the code's 256.
    4. Every digest and every revisit starts a fresh optimiser by default; the authors' code keeps one per client. With
       `training.persist` and `digestion.persist` each of the two keeps one of its own, and `pretrain` begins that of
       the revisits.
    5. Only the clients that were drawn score, digest and revisit, and the consensus is theirs; in the paper all clients
       take part in every round.
    6. A revisit is one epoch in batches of 16 by default; the code's is 2 or 4 epochs in batches of 5.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from potluck import fl


@dataclass(frozen=True)
class FedMD(fl.Stateless):
    """Hyper-parameters of FedMD.

    Attributes:
        training: revisiting private data.
        digestion: approaching the consensus.
        public_examples: rows of the public data drawn each round; all of them if there are fewer.
        digest_loss: distance to the consensus logits, "l1" or "mse".
        pretrain: whether a client trains on its own data before it is first asked for logits.
        public_labels: whether it trains on the labelled public data before that, by `public_training`.
        public_training: learning the public data's labels, once, with an optimiser that does not last.
        combine: how the clients' logits become the consensus.
    """

    family = "public"
    aligns_classes = True

    variants = {
        "squared": {"digest_loss": "mse"},
        "without pre-training": {"pretrain": False},
        "public labels": {"public_labels": True},
        "lasting optimisers": {"training.persist": True, "digestion.persist": True},
    }

    builds_clients_models = False
    needs_networks = False
    training: fl.LocalTraining = fl.LocalTraining()
    digestion: fl.LocalTraining = fl.LocalTraining(batch_size=128)
    public_examples: Annotated[int, fl.at_least(1)] = 5000
    digest_loss: Literal["l1", "mse"] = "l1"
    pretrain: bool = True
    public_labels: bool = False
    public_training: fl.LocalTraining = fl.LocalTraining(epochs=20, batch_size=128)
    combine: fl.Aggregate = fl.Aggregate()

    def needs(self) -> frozenset[fl.Need]:
        labels = {fl.Need.PUBLIC_LABELS} if self.public_labels else set[fl.Need]()
        return frozenset({fl.Need.PUBLIC_DATA, fl.Need.ONE_OUTPUT} | labels)

    def round(self, state: fl.Nothing, cohort: fl.Cohort, server: fl.Server) -> fl.Nothing:
        rows = fl.public.drawn_rows(server, self.public_examples)
        scored = cohort.ask(self.score_public, fl.Message(rows=rows))
        consensus = fl.classes.averaged(self.combine, scored.entries("logits"), [1.0] * len(scored))
        cohort.ask(self.digest_and_revisit, {i: fl.Message(consensus=consensus) for i in scored})
        return state

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        if handler == "score_public":
            return fl.Schema(logits=fl.schema.logits(len(message["rows"]), server.num_classes, member))
        return fl.Schema()

    @fl.on_client
    def score_public(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        if self.public_labels and not client.state.get("taught"):
            once = replace(self.public_training, persist=False)  # no later fit would read its optimiser
            if len(examples := fl.public.of_own_classes(client, fl.public.public_of(client))):
                yield fl.Fit(client.model, client.objective, examples, once, name="public")
            client.state["taught"] = True
        pretraining = self.training if self.pretrain else None
        logits = yield from fl.public.predict_rows(client, message["rows"], pretraining)
        return fl.Message(logits=logits)

    @fl.on_client
    def digest_and_revisit(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        rows = fl.public.public_of(client).take(client.state.pop("rows")).unaugmented()
        lesson = rows.with_columns(consensus=message["consensus"])
        yield fl.Fit(client.model, DIGEST[self.digest_loss], lesson, self.digestion, name="digest")
        yield fl.Fit(client.model, client.objective, client.train, self.training, name="train")
        return fl.Message()


def digest_l1(net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
    """Mean absolute difference to the consensus logits."""
    return fl.losses.difference(net(batch.inputs), batch.columns["consensus"], F.l1_loss)


def digest_mse(net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
    """Mean squared difference to the consensus logits."""
    return fl.losses.difference(net(batch.inputs), batch.columns["consensus"], F.mse_loss)


DIGEST = {"l1": digest_l1, "mse": digest_mse}
