"""RHFL: robust federated learning with noisy and heterogeneous clients.

Fang, Ye. "Robust Federated Learning with Noisy and Heterogeneous Clients", CVPR 2022.

For clients of any architecture whose labels are partly wrong, some clients' more than others'. A client learns from its
own data by a loss that wrong labels disturb less, and from the others' predictions on public data; there each of them
weighs the more the faster its loss on its own data falls, and the lower it is.

Symbols
    theta_k   client.model, kept by the client
    D_0       the rows of the public data drawn this round
    R_k       reply["predictions"], probabilities of client k on D_0
    L_k       client.state["loss"], the symmetric loss on all its own data, after its last training
    F_k       state.qualities, (L_k before - L_k) / L_k
    W_k       its confidence, a share of exp(1 / (N - 1) + eta F_k / sum F)
    eta       confidence
    lambda    forward
    N         clients that replied

Wire
    down      rows public * integer, target public * |z|
    up        predictions public * |z|, quality float

Limits
    distillation.lr=0 forward=1 reverse=0 pretrain=0 training.batch_size=1000 approaches local training.batch_size=1000
    training.lr=0.0 distillation.lr=0.0 stays at rest

Departures from the paper
    1. Of the paper's text only the abstract was at hand; equations are those of the authors' code.
    2. Clients are sent one target each, the sum over the others of W_l R_l, and not all predictions: its cross-entropy
       has the gradient of the sum of W_l KL(R_l || R_k). The W_l of the others sum to less than 1, and so does the
       target, except while no quality is known: then each is 1 / (N - 1).
    3. Predictions are exchanged once a round. The code exchanges them anew for every batch, from which a client makes
       one step: `exchanges` divides the rows into as many parts, one after the other.
    4. Qualities are divided by the sum of their absolute values, as in the authors' later code; while no client's loss
       rises that is the paper's sum. `scale="sum"` is that sum, which may be near 0, so that one client has all
       confidence, or negative, so that those who got worse have more. Where it is 0 all confidences are equal.
    5. A client measures its loss in evaluation mode when its training ends, so that its quality is known when it is
       next drawn; the code measures it in training mode when a round begins. Losses count as at least 1e-6.
    6. Only the clients that were drawn take part. Beside others whose quality is known, one whose is not counts as if
       its loss had not changed.
    7. The code limits probabilities in the reverse cross-entropy to at least 1e-7, which changes it by less than 1e-6
       a class.
    8. Before its first exchange a client trains on its own data for as long as in `pretrain` rounds; the code does for
       40 epochs. Its batches are of 256 examples.
    9. `combine` is not in the paper: the rule by which the others' predictions become one.
    10. What clients predict on public data, for others to learn from, they predict in evaluation mode; the code does
       in training mode, which differs where there is BatchNorm. Public inputs are never augmented; the code crops,
       flips and rotates them.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from potluck import fl

Scale = Literal["absolute", "sum"]
LOWEST_LOSS = 1e-6


@dataclass(frozen=True)
class State:
    """F, by client, of the last time that each trained."""

    qualities: dict[fl.ClientId, float] = field(default_factory=dict[fl.ClientId, float])


@dataclass(frozen=True)
class RHFL(fl.Method[State]):
    """Hyper-parameters of RHFL.

    Attributes:
        training: a client's training on its own data.
        distillation: its training on the others' predictions.
        public_examples: rows of the public data drawn each round; all of them if there are fewer.
        exchanges: parts of these rows, on each of which predictions are exchanged and learnt from before the next.
        forward: lambda, the weight of the task's own loss.
        reverse: weight of the reverse cross-entropy.
        floor: what stands for a label's probability of 0 in the reverse cross-entropy.
        confidence: eta, how much qualities change the weights of clients; 0 for equal weights.
        scale: what divides qualities, the sum of their "absolute" values or their "sum".
        pretrain: for how many rounds' length a client trains on its own data before its first exchange.
        combine: how the others' predictions become one, with their confidences as weights.
    """

    family = "public"
    unguarded = "what clients send are distributions, of which one client of five moves a mean by a fifth"
    aligns_classes = True

    variants = {
        "an exchange for every batch": {"exchanges": 3},
        "the paper's sum": {"scale": "sum"},
        "without pre-training": {"pretrain": 0},
        "lasting optimisers": {"training.persist": True, "distillation.persist": True},
    }

    builds_clients_models = False
    training: fl.LocalTraining = fl.LocalTraining()
    distillation: fl.LocalTraining = fl.LocalTraining(batch_size=256)
    public_examples: Annotated[int, fl.at_least(1)] = 5000
    exchanges: Annotated[int, fl.at_least(1)] = 1
    forward: Annotated[float, fl.at_least(0)] = 0.1
    reverse: Annotated[float, fl.at_least(0)] = 1.0
    floor: Annotated[float, fl.above(0), fl.below(1)] = 1e-4
    confidence: Annotated[float, fl.at_least(0)] = 0.5
    scale: Scale = "absolute"
    pretrain: Annotated[int, fl.at_least(0)] = 1
    combine: fl.Aggregate = fl.Aggregate()

    def needs(self) -> frozenset[fl.Need]:
        return frozenset({fl.Need.PUBLIC_DATA, fl.Need.CLASSES})

    def init(self, server: fl.Server) -> State:
        return State()

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        present = list(cohort.ids)
        drawn = fl.public.drawn_rows(server, self.public_examples)
        for rows in drawn.tensor_split(min(self.exchanges, len(drawn))):
            predicted = cohort.ask(self.predict_public, {i: fl.Message(rows=rows) for i in present})
            weights = confidences([state.qualities.get(i) for i in predicted], self.confidence, self.scale)
            targets = self._targets(predicted, dict(zip(predicted, weights, strict=True)), server)
            server.note(highest_confidence=max(weights), lowest_confidence=min(weights))
            present = list(cohort.ask(self.learn_from_others, {i: fl.Message(target=t) for i, t in targets.items()}))
        trained = cohort.ask(self.local_update, {i: fl.Message() for i in present})
        return State(state.qualities | {i: float(reply["quality"]) for i, reply in trained.items()})

    def replies(self, handler: str, member: fl.Member, message: fl.Message, server: fl.Server) -> fl.Schema:
        if handler == "predict_public":
            return fl.Schema(predictions=fl.schema.Probabilities(len(message["rows"]), server.num_classes))
        return fl.Schema(quality=fl.schema.floats(1)) if handler == "local_update" else fl.Schema()

    @fl.on_client
    def predict_public(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        if "loss" not in client.state:
            for _ in range(self.pretrain):
                yield fl.Fit(client.model, self._objective(client), client.train, self.training, name="train")
            client.state["loss"] = yield from self._own_loss(client)
        logits = yield from fl.public.predict_rows(client, message["rows"])
        return fl.Message(predictions=logits.softmax(1))

    @fl.on_client
    def learn_from_others(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        yield fl.Fit(
            client.model,
            fl.public.soft_labels_loss,
            fl.public.lesson_of_rows(client, message["target"]),
            self.distillation,
        )
        return fl.Message()

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        yield fl.Fit(client.model, self._objective(client), client.train, self.training, name="train")
        before, after = client.state["loss"], (yield from self._own_loss(client))
        client.state["loss"] = after
        return fl.Message(quality=torch.tensor([before / after - 1]))

    def _objective(self, client: fl.Client) -> "SymmetricLoss":
        return SymmetricLoss(client.criterion, self.forward, self.reverse, self.floor)

    def _own_loss(self, client: fl.Client) -> Generator[fl.Predict, Tensor, float]:
        """L, of the client's model on all its own data."""
        logits = yield fl.Predict(client.model, client.train)
        return max(float(self._objective(client).of(logits, client.train.labels)), LOWEST_LOSS)

    def _targets(
        self, predicted: fl.Replies, weights: Mapping[fl.ClientId, float], server: fl.Server
    ) -> dict[fl.ClientId, Tensor]:
        """For every client the sum of the others' predictions by weight (rows, classes); zeros if it is alone."""
        targets: dict[fl.ClientId, Tensor] = {}
        for i, own in predicted.items():
            theirs = {j: reply["predictions"] for j, reply in predicted.items() if j != i}
            shares, members = [weights[j] for j in theirs], server.members(theirs)
            targets[i] = sum(shares) * (
                fl.public.consensus([*theirs.values()], self.combine, shares, members) if theirs else own["predictions"]
            )
        return targets


@dataclass(frozen=True)
class SymmetricLoss:
    """lambda times the task's loss, plus the reverse cross-entropy (Wang et al., ICCV 2019, arXiv 1908.06112).

    The latter is the cross-entropy of the label, as a distribution whose zeros are `floor`, to the net's probabilities:
    -log(floor) (1 - p_y).
    """

    criterion: fl.Criterion
    forward: float
    reverse: float
    floor: float

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch of examples with classes."""
        return self.of(net(batch.inputs), batch.targets)

    def of(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Of logits (batch, classes) and labels (batch,)."""
        missing = 1 - logits.softmax(1).gather(1, targets[:, None])
        return self.forward * self.criterion(logits, targets) - self.reverse * log(self.floor) * missing.mean()


def confidences(qualities: Sequence[float | None], eta: float, scale: Scale) -> list[float]:
    """W, each client's weight in what the others learn.

    Args:
        qualities: F; None where unknown.
        eta: as in the paper.
        scale: what divides qualities, the sum of their "absolute" values or their "sum".

    Returns:
        The softmax of 1 / (N - 1) + eta F / sum F; 1 / (N - 1) each if no quality is known.
    """
    equal = 1 / max(len(qualities) - 1, 1)
    known = [quality for quality in qualities if quality is not None]
    if not known:
        return [equal] * len(qualities)
    total = sum(map(abs, known)) if scale == "absolute" else sum(known)
    shares = torch.tensor([(quality or 0.0) / total if total else 0.0 for quality in qualities], dtype=torch.float64)
    return (equal + eta * shares).softmax(0).tolist()
