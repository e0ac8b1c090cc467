"""FedDF: ensemble distillation for robust model fusion.

Lin, Kong, Stich, Jaggi. NeurIPS 2020. https://arxiv.org/abs/2006.07242. Algorithms 1 and 3.

The server keeps one prototype of each architecture. Clients train copies of theirs; the server averages what comes back
within each architecture, as FedAvg does, and then distils every average on unlabelled public data: its teacher is the
ensemble of all the clients' models of the round, whatever their architecture.

Symbols
    x_p       state.weights[p], the prototype of architecture p
    x_k, n_k  weights and examples of a reply
    d         the public data
    f(x, d)   logits of a model on them
    S_t       the clients that replied

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    server_training.lr=0.0 equals fedavg sharing.scope="architecture"
    server_training.lr=0.0 equals fedavg on architectures=1
    training.lr=0.0 server_training.lr=0.0 stays at rest

Departures from the paper
    1. A prototype of which no client was drawn is distilled like the others, from where it was; the paper's average
       over no clients is undefined.
    2. Every distillation has a fixed length and its last weights count. The paper keeps the best on validation data of
       the server's and stops early, after at most 10 000 steps, with a cosine schedule within the round; the server
       here has no labelled data, and `server_training.schedule` falls from round to round.
    3. Not offered: leaving out teachers that are worse than chance on the server's validation data, and distilling on
       noise or on a generator's images.
    4. Averages cover BatchNorm's running statistics; those of the authors' code are its last client's. Teachers predict
       in evaluation mode; students are in training mode, and learn statistics of the public data.
    5. With `ensemble="probabilities"` the target is the mean of the teachers' probabilities. The gradient is then that
       of the mean of the losses towards single teachers, which the authors' code has by default.
    6. Clients count by examples in an average and equally in the ensemble, as in the paper; in the code equally in both
       (`sharing.weighting="uniform"`).
    7. Clients' optimiser and schedule are those of all methods here; the paper's are SGD of rate 0.1, 20 to 40 epochs.
    8. With several architectures the global model is the ensemble of the prototypes, the mean of their logits. The
       paper evaluates each prototype, as is done here for each client.
"""

from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor, nn

from potluck import fl


@dataclass(frozen=True)
class State:
    """The prototypes, by architecture."""

    weights: fl.GroupWeights


@dataclass(frozen=True)
class FedDF(fl.SharesWeights[State]):
    """Hyper-parameters of FedDF.

    Attributes:
        training: a client's local training.
        server_training: the distillation of each prototype.
        ensemble: the target of the distillation: the softmax of the teachers' mean "logits", or the mean of their
            "probabilities".
        sharing: with which weights clients average within each architecture; its rule combines predictions, too.
    """

    family = "public"
    unguarded = "a rule acts among the clients of one architecture, and 'trimmed' drops none of three"
    aligns_classes = True

    variants = {
        "probabilities": {"ensemble": "probabilities"},
        "uniform": {"sharing.weighting": "uniform"},
        "median": {"sharing.combine.rule": "median"},
        "lasting optimisers": {"training.persist": True},
    }

    server_trains = True
    training: fl.LocalTraining = fl.LocalTraining()
    server_training: fl.ServerTraining = fl.LocalTraining(epochs=5, batch_size=128, clip_norm=5.0)
    ensemble: Literal["logits", "probabilities"] = "logits"
    sharing: fl.sharing.WholeModels = fl.Sharing("architecture")

    @property
    def exchanges_more(self) -> bool:
        return True

    def needs(self) -> frozenset[fl.Need]:
        return super().needs() | {fl.Need.PUBLIC_DATA, fl.Need.CLASSES}

    def init(self, server: fl.Server) -> State:
        return State(self.sharing.initial(server))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        replies = cohort.stream(self.local_update, self.sharing.send(state.weights, cohort, server))
        means = self.sharing.no_means(server.roster, "weights", "buffers")
        taught = fl.classes.running(self.sharing.combine, server.roster)
        for id, reply in self.sharing.combine.arriving(replies):
            means.add(id, reply)
            taught.add(self._predictions(id, reply, server))
            del reply  # before the next comes
        pool = means.over(state.weights, "weights", "buffers")  # FedAvg among clients of one architecture
        labels = taught.value().softmax(1) if self.ensemble == "logits" else fl.public.as_distributions(taught.value())
        students = {p: fl.load(server.build(p), pool[p]) for p in pool}
        lesson = fl.public.public_of(server).unaugmented().with_columns(soft_labels=labels)
        fits = [
            fl.Fit(student, fl.public.soft_labels_loss, lesson, self.server_training) for student in students.values()
        ]
        server.note(distillation_loss=fmean(server.fit(fit).loss for fit in fits))
        return State({p: fl.learnt_of(student) for p, student in students.items()})

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        yield fl.Fit(client.model, client.objective, client.train, self.training)
        return self.sharing.reply(client)

    def _predictions(self, id: fl.ClientId, reply: fl.Message, server: fl.Server) -> Tensor:
        """What a client's model predicts for the public data, as the ensemble combines it."""
        net = fl.load(server.build(server.roster[id].architecture), {**reply["weights"], **reply.get("buffers", {})})
        logits = server.predict(fl.Predict(net, fl.public.public_of(server)))
        return logits if self.ensemble == "logits" else fl.classes.only_own(logits.softmax(1), server.roster[id])

    def global_model(self, state: State, server: fl.Server) -> nn.Module:
        prototypes = [fl.load(server.build(p), state.weights[p]) for p in sorted(state.weights)]
        return prototypes[0] if len(prototypes) == 1 else Ensemble(prototypes)


class Ensemble(nn.Module):
    """The mean of several nets' logits."""

    def __init__(self, nets: list[nn.Module]) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, classes)."""
        return torch.stack([net(x) for net in self.nets]).mean(0)
