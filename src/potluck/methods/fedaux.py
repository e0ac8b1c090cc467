"""FedAUX: ensemble distillation in which each client counts where it is certain.

Sattler, Korjakow, Rischke, Samek. IEEE TNNLS 2023. https://arxiv.org/abs/2102.02514. Code: github.com/fedl-repo/fedaux.

As in FedDF the server averages what comes back within each architecture, and distils every average on public data from
the ensemble of all clients' models. But the ensemble is weighted example by example: before its first training a client
learns to tell its own data from public data, by a logistic regression on features of the initial net, and a public
example counts for it as much as it looks like the client's own.

Symbols
    theta_p   state.weights[p], the prototype of architecture p
    h_0       features of the initial net of the client's architecture
    D_minus   state.negatives, public examples of which no client is certain
    D_distill the other public examples, on which is distilled
    s_i(x)    state.scores[i] + 1e-8, the probability that x is of client i's data and not of D_minus
    f_i(x)    logits of client i's model
    lambda    penalty

Wire
    down      weights |w|, buffers |b|, negatives |negatives|
    up        weights |w|, buffers |b|, examples 1, scores at most 4 * public

Limits
    server_training.lr=0.0 equals fedavg sharing.scope="architecture" sharing.weighting="uniform"
    certainty="equal" server_training.epochs=2 server_training.clip_norm=5.0 sharing.weighting="samples" approaches feddf server_training.epochs=2 on optimizer="sgd"
    training.lr=0.0 server_training.lr=0.0 stays at rest

Departures from the paper
    1. Of the paper the abstract was at hand; everything else follows the released code.
    2. There is no pre-training: h_0 is what the nets' builders make, pre-trained if they load such weights. The code
       loads weights that were pre-trained elsewhere on the public data, by SimCLR. With untrained features scores say
       less, and the paper's gains are not to be expected.
    3. The regression is the code's: the sum of the losses + lambda / 2 |w|^2, with an intercept that is not penalised,
       on features divided by the largest norm among those it learns from. `regression="mean"` has the mean of the
       losses and no intercept, and shortens features to the longest of D_minus.
    4. The code adds noise to the regression's coefficients, for a sensitivity of 2 / (n lambda) with n examples. That
       is the sensitivity of "mean"; with the code's sum, beside which lambda weighs an n-th as much, it is n times
       larger, and the noise too small for the privacy that it states. Noise is not offered; scores are not private.
    5. D_minus is drawn once. Scores come with a client's first reply, also if it is first drawn in a later round; in
       the code all clients send theirs before the first round.
    6. Models predict, and are evaluated, in evaluation mode, and averages cover BatchNorm's running statistics. The
       code has training mode throughout and averages parameters alone.
    7. Optimisers are new in every round by default (`training.persist`), the server's always; the code keeps both.
       Its clients train for one epoch of Adam with rate 0.001 in batches of 32.
    8. A prototype of which no client was drawn is distilled like the others, as in the code. A robust rule of `sharing`
       makes the averages; predictions always count by certainty.
    9. `certainty="equal"` lets all clients count equally and distils on all public data: FedDF with these averages.
   10. With several architectures the global model is the ensemble of the prototypes, as in the code.
"""  # noqa: E501 - a limit is one line

from collections.abc import Generator
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from potluck import fl
from potluck.methods.feddf import Ensemble


@dataclass(frozen=True)
class State:
    """The prototypes, and who is certain of what.

    Attributes:
        weights: the prototypes, by architecture.
        negatives: D_minus, rows of the public data; none if clients count equally.
        scores: of each client that has sent them, for each row of D_distill.
    """

    weights: fl.GroupWeights
    negatives: Tensor
    scores: dict[fl.ClientId, Tensor]


@dataclass(frozen=True)
class FedAUX(fl.SharesWeights[State]):
    """Hyper-parameters of FedAUX.

    Attributes:
        training: a client's local training.
        server_training: the distillation of each prototype.
        certainty: what a client counts in the ensemble, by its "logistic" regression, or "equal" to the others.
        negative_share: share of the public data that is D_minus.
        penalty: lambda, of the regression's squared weights.
        regression: whether the penalty stands beside the "sum" of the losses or their "mean", see departure 3.
        sharing: with which weights clients average within each architecture.
    """

    family = "public"
    unguarded = "a rule acts among the clients of one architecture, and 'trimmed' drops none of three"
    aligns_classes = True

    variants = {
        "equal": {"certainty": "equal"},
        "mean of losses": {"regression": "mean"},
        "samples": {"sharing.weighting": "samples"},
        "median": {"sharing.combine.rule": "median"},
        "lasting optimisers": {"training.persist": True},
    }

    server_trains = True  # prototypes of which no client was drawn, too
    training: fl.LocalTraining = fl.LocalTraining()
    server_training: fl.ServerTraining = fl.LocalTraining(lr=5e-5, batch_size=128)
    certainty: Literal["logistic", "equal"] = "logistic"
    negative_share: Annotated[float, fl.above(0), fl.below(1)] = 0.2
    penalty: Annotated[float, fl.above(0)] = 0.01
    regression: fl.certainty.LossesCount = "sum"
    sharing: fl.sharing.WholeModels = fl.Sharing("architecture", "uniform")

    @property
    def exchanges_more(self) -> bool:
        return True

    def needs(self) -> frozenset[fl.Need]:
        features = {fl.Need.SPLIT_MODEL} if self.certainty == "logistic" else set[fl.Need]()
        return super().needs() | features | {fl.Need.PUBLIC_DATA, fl.Need.CLASSES}

    def init(self, server: fl.Server) -> State:
        examples, negatives = len(fl.public.public_of(server)), torch.empty(0, dtype=torch.int64)
        pool = self.sharing.initial(server)
        if self.certainty == "logistic":
            fl.require(examples > 1, "federation.public", "at least two examples, one to learn from", examples)
            count = min(max(round(self.negative_share * examples), 1), examples - 1)
            negatives = fl.public.drawn_rows(server, count)
        normed = [
            p
            for p in pool
            if any(isinstance(m, fl.batchnorm.BATCH_NORMS) and m.training for m in server.build(p).modules())
        ]
        expected = f"at least two examples to distil on, beside {len(negatives)} negatives: a batch for BatchNorm"
        fl.require(not normed or examples - len(negatives) > 1, "federation.public", expected, examples)
        return State(pool, negatives, {})

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        public = fl.public.public_of(server).take(others(len(fl.public.public_of(server)), state.negatives))
        asked = set(cohort.ids) - state.scores.keys() if self.certainty == "logistic" else set[fl.ClientId]()
        sent = self.sharing.send(
            state.weights, cohort, server, negatives=lambda member: state.negatives if member.id in asked else None
        )
        replies = cohort.stream(self.local_update, sent)
        means = self.sharing.no_means(server.roster, "weights", "buffers")
        scores, taught = dict(state.scores), Weighted()
        for id, reply in self.sharing.combine.arriving(replies):
            means.add(id, reply)
            if "scores" in reply:
                scores[id] = reply["scores"]
            net = fl.load(
                server.build(server.roster[id].architecture), {**reply["weights"], **reply.get("buffers", {})}
            )
            taught.add(server.predict(fl.Predict(net, public)), scores.get(id))
            del reply  # before the next comes
        pool = means.over(state.weights, "weights", "buffers")
        students = {p: fl.load(server.build(p), pool[p]) for p in pool}
        lesson = public.unaugmented().with_columns(soft_labels=taught.mean().softmax(1))
        fits = [
            fl.Fit(student, fl.public.soft_labels_loss, lesson, self.server_training) for student in students.values()
        ]
        server.note(distillation_loss=fmean(server.fit(fit).loss for fit in fits))
        return State({p: fl.learnt_of(student) for p, student in students.items()}, state.negatives, scores)

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        negatives = message.get("negatives")
        rows = 0 if negatives is None else len(fl.public.public_of(server)) - len(negatives)
        scores = fl.schema.floats(rows, least=0, most=1) if rows else None
        return fl.Schema(**self.sharing.expected(member, message), scores=scores)

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        scores = (yield from self._scores(client, message["negatives"])) if "negatives" in message else None
        self.sharing.receive(client, message)
        yield fl.Fit(client.model, client.objective, client.train, self.training)
        return self.sharing.reply(client, scores=scores)

    def _scores(self, client: fl.Client, negatives: Tensor) -> Generator[fl.Request, Any, Tensor]:
        """The client's certainty of each row of D_distill."""
        net = client.twin()
        own = yield fl.Predict(net, client.train, parts="features")
        public = yield fl.Predict(net, fl.public.public_of(client), parts="features")
        asked = public[others(len(public), negatives)]
        return fl.certainty.certainty(own, public[negatives], asked, self.penalty, self.regression)

    def global_model(self, state: State, server: fl.Server) -> nn.Module:
        prototypes = [fl.load(server.build(p), state.weights[p]) for p in sorted(state.weights)]
        return prototypes[0] if len(prototypes) == 1 else Ensemble(prototypes)


class Weighted:
    """The mean of clients' logits (rows, classes), each row weighted by the client's score; holds no client's own."""

    def __init__(self) -> None:
        self._sum: Tensor | float = 0.0
        self._weight: Tensor | float = 0.0

    def add(self, logits: Tensor, scores: Tensor | None) -> None:
        """Add a client's logits; without scores (rows,) every row counts 1."""
        has = logits != -torch.inf  # a client says nothing of classes that it has no outputs for
        weight = (torch.ones(len(logits)) if scores is None else scores + 1e-8)[:, None] * has
        self._sum, self._weight = self._sum + weight * logits.masked_fill(~has, 0.0), self._weight + weight

    def mean(self) -> Tensor:
        """The sum of s_i f_i over the sum of s_i."""
        weight = torch.as_tensor(self._weight)
        return (self._sum / weight).masked_fill(weight == 0, -torch.inf)


def others(examples: int, rows: Tensor) -> Tensor:
    """The positions from 0 to `examples` - 1 that are not among `rows`, ascending."""
    rest = torch.ones(examples, dtype=torch.bool)
    rest[rows] = False
    return rest.nonzero().flatten()
