"""Ditto: a personal model beside the global one, not too far from it.

Li, Hu, Beirami, Smith. ICML 2021. https://arxiv.org/abs/2012.04221. Algorithm 1.

Clients train a global model together, by FedAvg or any other way. Beside it each trains a model of its own, on its own
data, which is pulled towards the global one: fair where clients differ, and robust where some of them lie.

Symbols
    w^t       state.weights
    v_k       the module "personal", kept by the client
    lambda    lam
    h_k       fl.losses.ProximalLoss, F_k(v) + (lambda / 2) |v - w^t|^2
    s, eta    personal.steps or personal.epochs, personal.lr

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    lam=0.0 personal.batch_size=1000 approaches local training.batch_size=1000
    training.lr=0.0 personal.lr=0.0 stays at rest
    counts a twin as twice the data on rounds=1

Departures from the paper
    1. The global model's objective is FedAvg's, with equal weights as in Algorithm 1; other solvers, and robust rules
       as `sharing.combine` has them, leave v_k's training as it is.
    2. Layers owned by some clients only are averaged over those, see `sharing`. v_k is a network of the client's own
       architecture, and w^t its layers of the average.
    3. v_k has BatchNorm statistics of its own.
    4. `lam` is fixed; the authors' code can choose it among 0.1, 1 and 2 by the loss on validation data.
    5. Local training defaults to Adam, like all methods here; the paper has SGD.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated, Any

from torch import nn

from potluck import fl


@dataclass(frozen=True)
class Ditto(fl.Averages):
    """Hyper-parameters of Ditto, beside those of `Averages`.

    Attributes:
        personal: a client's training of its personal model.
        lam: lambda, strength of the pull towards the global model.
        sharing: who averages with whom, with which weights.
    """

    aligns_classes = True

    variants = {"by samples": {"sharing.weighting": "samples"}, "lasting optimisers": {"personal.persist": True}}

    personal: fl.LocalTraining = fl.LocalTraining()
    lam: Annotated[float, fl.at_least(0)] = 0.1
    sharing: fl.Averaging = fl.Sharing(weighting="uniform")

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        self.sharing.receive(client, message)
        sent, v = fl.parameters_of(client.model), client.module("personal", client.twin)
        objective = fl.losses.ProximalLoss(client.criterion, self.lam)
        yield fl.Fit(v, objective, client.train, self.personal, extras={"sent": sent}, name="personal")
        yield fl.Fit(client.model, client.objective, client.train, self.training, name="global")
        return self.sharing.reply(client)

    def inference_message(self, state: fl.sharing.Averaged, client_id: fl.ClientId, server: fl.Server) -> fl.Message:
        return fl.Message()

    @fl.on_client
    def inference_model(self, client: fl.Client, message: fl.Message) -> Generator[fl.Request, Any, nn.Module]:
        v = client.module("personal", client.twin)
        yield fl.NormStatistics(v, client.train, layers="unlearnt")
        return v
