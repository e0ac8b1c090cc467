"""FDMeta: federated distillation with active sampling of public data.

Liu, Zhang, Song, Letaief. ICC 2022. https://arxiv.org/abs/2203.06900. The sampling rule is reconstructed.

Clients of any architecture label public data by their probabilities, and a model of the server's learns from the
average. To save communication the server asks for labels of those public examples of which its model is least certain.
The labels go back to the clients, which learn from them too.

Symbols
    theta_i   client.model, kept by the client
    theta_g   state.common, the server's model, which learns from public data alone
    P_t       the rows of the public data chosen this round
    p_i       reply["predictions"], probabilities of client i on P_t
    p         labels, the mean of p_i

Wire
    down      rows public * integer, labels public * |z|
    up        predictions public * |z|

Limits
    distil_clients=false equals local
    distillation.lr=0.0 equals local
    training.lr=0.0 distillation.lr=0.0 stays at rest

Departures from the paper
    1. Of the paper only the abstract was at hand: a meta-algorithm of federated distillation, and active sampling of
       public data. Everything else is a reconstruction: that examples are chosen by the uncertainty of the server's
       model, in which sense (`sampling`), a share of random ones (`exploration`), plain means and cross-entropies.
    2. In the first round the server's model has learnt nothing, and rows are drawn at random.
    3. `distil_clients=false` leaves the clients to their own data, so that the server alone learns from others.
    4. Only the clients that were drawn label and learn.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from potluck import fl


@dataclass(frozen=True)
class State:
    """The server's model.

    Attributes:
        common: theta_g, with its buffers.
        learnt: whether it has learnt from any labels.
    """

    common: fl.Weights
    learnt: bool


@dataclass(frozen=True)
class FDMeta(fl.Method[State]):
    """Hyper-parameters of FDMeta.

    Attributes:
        training: a client's training on its own data.
        distillation: its training on the round's labels.
        server_training: the same of the server's model.
        public_examples: rows of the public data chosen each round; all of them if there are fewer.
        sampling: how rows are chosen: "random", or those with the largest "entropy" of the server's prediction, the
            least "confidence" (the largest probability) or the least "margin" (between the two largest).
        exploration: share of the rows that is drawn at random all the same.
        distil_clients: whether the labels are sent back to the clients.
        combine: how the clients' predictions become one.
    """

    family = "public"
    unguarded = "what clients send are distributions, of which one client of five moves a mean by a fifth"
    aligns_classes = True

    variants = {
        "random": {"sampling": "random"},
        "confidence": {"sampling": "confidence"},
        "margin": {"sampling": "margin", "public_examples": 20},
        "server alone": {"distil_clients": False},
        "lasting optimisers": {"training.persist": True, "distillation.persist": True},
    }

    builds_clients_models = False
    training: fl.LocalTraining = fl.LocalTraining()
    distillation: fl.LocalTraining = fl.LocalTraining(batch_size=128)
    server_training: fl.ServerTraining = fl.LocalTraining(batch_size=128)
    public_examples: Annotated[int, fl.at_least(1)] = 1000
    sampling: Literal["entropy", "confidence", "margin", "random"] = "entropy"
    exploration: Annotated[float, fl.at_least(0), fl.at_most(1)] = 0.2
    distil_clients: bool = True
    combine: fl.Aggregate = fl.Aggregate()

    def needs(self) -> frozenset[fl.Need]:
        return frozenset({fl.Need.PUBLIC_DATA, fl.Need.CLASSES})

    def init(self, server: fl.Server) -> State:
        return State(fl.learnt_of(server.build()), learnt=False)

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        model = fl.load(server.build(), state.common)
        rows = self._chosen(model if state.learnt else None, server)
        replies = cohort.ask(self.local_update, fl.Message(rows=rows))
        predictions, members = replies.entries("predictions"), server.members(replies)
        labels = fl.public.consensus(predictions, self.combine, members=members)
        lesson = fl.public.soft_lesson(server, {"rows": rows, "labels": labels})
        report = server.fit(fl.Fit(model, fl.public.soft_labels_loss, lesson, self.server_training))
        server.note(distillation_loss=report.loss)
        if self.distil_clients:
            cohort.ask(self.distil, {i: fl.Message(labels=labels) for i in replies})
        return State(fl.learnt_of(model), learnt=True)

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        if handler == "distil":
            return fl.Schema()
        return fl.Schema(predictions=fl.schema.Probabilities(len(message["rows"]), server.num_classes))

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        yield fl.Fit(client.model, client.objective, client.train, self.training)
        if self.distil_clients:
            client.state["rows"] = message["rows"]
        logits = yield fl.Predict(client.model, fl.public.public_of(client).take(message["rows"]))
        return fl.Message(predictions=logits.softmax(1))

    @fl.on_client
    def distil(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        yield fl.Fit(
            client.model,
            fl.public.soft_labels_loss,
            fl.public.lesson_of_rows(client, message["labels"]),
            self.distillation,
        )
        return fl.Message()

    def _chosen(self, model: nn.Module | None, server: fl.Server) -> Tensor:
        """P_t: the rows of which the model is least certain, and some at random; all at random without a model."""
        public = fl.public.public_of(server)
        shuffled = fl.public.drawn_rows(server, len(public))
        count = min(self.public_examples, len(public))
        if model is None or self.sampling == "random":
            return shuffled[:count]
        doubts = UNCERTAINTY[self.sampling](server.predict(fl.Predict(model, public)).softmax(1))
        least_certain = shuffled[doubts[shuffled].argsort(descending=True, stable=True)]  # ties in random order
        certain = round((1 - self.exploration) * count)
        others = shuffled[~torch.isin(shuffled, least_certain[:certain])]
        return torch.cat([least_certain[:certain], others[: count - certain]])

    def global_model(self, state: State, server: fl.Server) -> nn.Module:
        return fl.load(server.build(), state.common)


def entropy(p: Tensor) -> Tensor:
    """Entropy of each row's distribution, in nats."""
    return -torch.xlogy(p, p).sum(1)


def doubt(p: Tensor) -> Tensor:
    """What each row's largest probability lacks to 1."""
    return 1 - p.amax(1)


def closeness(p: Tensor) -> Tensor:
    """What the distance between each row's two largest probabilities lacks to 1."""
    first, second = p.topk(2, dim=1).values.unbind(1)
    return 1 - (first - second)


UNCERTAINTY = {"entropy": entropy, "confidence": doubt, "margin": closeness}
