"""DS-FL: distillation-based semi-supervised federated learning.

Itahara, Nishio, Koda, Morikura, Yamamoto. IEEE TMC 2023. https://arxiv.org/abs/2008.06180.

Its steps are update, prediction, upload, aggregation, broadcast and distillation, marked below by these names. Clients
of any architecture label public data by their probabilities. The server averages these and sharpens the
average (entropy reduction aggregation, ERA), since averages over clients with different data are too flat. A model of
the server's own learns from the sharpened labels, and so do the clients, each before its next local training.

Symbols
    w_k       client.model, kept by the client
    w_g       state.common, the server's model, which learns from public data alone
    o_r       the rows of the public data drawn this round
    t_k       reply["predictions"], probabilities of client k on o_r
    t_g       state.lesson["labels"], the sharpened average on o_r
    T         temperature

Wire
    down      rows public * integer, lesson public * (integer + |z|)
    up        predictions public * |z|

Limits
    equals local on rounds=1
    distillation.lr=0.0 training.batch_size=1000 approaches local training.batch_size=1000
    training.lr=0.0 distillation.lr=0.0 stays at rest

Departures from the paper
    1. A client learns from a round's labels when it is next drawn, before its own data, as in the code of a co-author's
       group, "the code" below; the authors' own is not public. In the paper all do at the end of the round. After
       rounds without it, a client receives the latest labels and no others. So a client is evaluated before it has
       learnt from the round's own labels, and the server's model after.
    2. Only the clients that were drawn label, and the average is theirs; in the paper all clients take part.
    3. `average="logits"` averages logits and takes their softmax, as others describe the method; the paper averages
       probabilities.
    4. With many classes the softmax of probabilities over T flattens labels: with 100 classes and a top probability of
       0.3 the entropy rises from 3.8 to 4.3 nats. This is the paper's rule; `aggregation="sa"` leaves labels as they
       are.
    5. Optimisers are new in every round by default (`training.persist`, `distillation.persist`), and their constants
       are those of all methods here. The code keeps optimisers, and has SGD of rate 0.1, 5 epochs and batches of 50 for
       all three trainings.
    6. Public rows are shuffled before clients and server learn from them; the code takes them in ascending order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from torch import Tensor, nn

from potluck import fl


@dataclass(frozen=True)
class State:
    """The server's model, and the last round's lesson.

    Attributes:
        common: w_g, with its buffers.
        lesson: "rows" and "labels"; empty before the first round.
    """

    common: fl.Weights
    lesson: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


@dataclass(frozen=True)
class DSFL(fl.Method[State]):
    """Hyper-parameters of DS-FL.

    Attributes:
        training: a client's training on its own data.
        distillation: a client's training on the last round's labels.
        server_training: the same of the server's model.
        public_examples: rows of the public data drawn each round; all of them if there are fewer.
        aggregation: "era" sharpens the average by a softmax of it over `temperature`; "sa" (simple) does not.
        temperature: T of "era"; sharper the lower it is.
        average: what is averaged, "probabilities" or "logits".
        combine: how the clients' predictions become one.
    """

    family = "public"
    unguarded = "what clients send are distributions, of which one client of five moves a mean by a fifth"
    aligns_classes = True

    variants = {
        "simple aggregation": {"aggregation": "sa"},
        "logits": {"average": "logits"},
        "lasting optimisers": {"training.persist": True, "distillation.persist": True},
    }

    builds_clients_models = False
    needs_networks = False
    training: fl.LocalTraining = fl.LocalTraining()
    distillation: fl.LocalTraining = fl.LocalTraining(batch_size=128)
    server_training: fl.ServerTraining = fl.LocalTraining(batch_size=128)
    public_examples: Annotated[int, fl.at_least(1)] = 1000
    aggregation: Literal["era", "sa"] = "era"
    temperature: Annotated[float, fl.above(0)] = 0.1
    average: Literal["probabilities", "logits"] = "probabilities"
    combine: fl.Aggregate = fl.Aggregate()

    def needs(self) -> frozenset[fl.Need]:
        return frozenset({fl.Need.PUBLIC_DATA, fl.Need.CLASSES})

    def init(self, server: fl.Server) -> State:
        return State(fl.learnt_of(server.build()))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        rows = fl.public.drawn_rows(server, self.public_examples)
        replies = cohort.ask(self.local_update, fl.Message(rows=rows, lesson=state.lesson or None))
        lesson = {"rows": rows, "labels": self._labels(replies, server.members(replies))}  # aggregation
        model = fl.load(server.build(), state.common)
        data = fl.public.soft_lesson(server, lesson)
        report = server.fit(fl.Fit(model, fl.public.soft_labels_loss, data, self.server_training))  # distillation, w_g
        server.note(distillation_loss=report.loss)
        return State(fl.learnt_of(model), lesson)

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        form = (len(message["rows"]), server.num_classes)
        as_logits = self.average == "logits"
        return fl.Schema(predictions=fl.schema.logits(*form, member) if as_logits else fl.schema.Probabilities(*form))

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        lesson = message.get("lesson")  # broadcast, of the round before
        if lesson is not None:  # distillation, w_k
            data = fl.public.soft_lesson(client, lesson)
            yield fl.Fit(client.model, fl.public.soft_labels_loss, data, self.distillation, name="distil")
        yield fl.Fit(client.model, client.objective, client.train, self.training)  # update
        logits = yield fl.Predict(client.model, fl.public.public_of(client).take(message["rows"]))  # prediction
        return fl.Message(predictions=logits if self.average == "logits" else logits.softmax(1))  # upload

    def _labels(self, replies: fl.Replies, members: Sequence[fl.Member] = ()) -> Tensor:
        """t_g, a distribution over classes for each row: by ERA, softmax(mean of t_k / T); by SA, the mean."""
        predictions = replies.entries("predictions")
        if self.average == "logits":
            mean = fl.classes.averaged(self.combine, predictions, [1.0] * len(replies)).softmax(1)
        else:
            mean = fl.public.consensus(predictions, self.combine, members=members)
        return mean if self.aggregation == "sa" else (mean / self.temperature).softmax(1)

    def global_model(self, state: State, server: fl.Server) -> nn.Module:
        return fl.load(server.build(), state.common)
