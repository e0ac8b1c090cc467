"""FedDPA: dynamic personalisation by Fisher information, with an adaptive constraint.

Yang, Huang, Ye. NeurIPS 2023. https://openreview.net/forum?id=RteNLuc8D9.

Every client keeps the weights of its model that have the most Fisher information, and takes the others from the global
model. It then trains its own weights, pulled towards the global ones, and after that the shared ones, which keep the
size of the update close to a given bound. So clipping updates to this bound, for privacy, costs little.

Symbols
    theta_g   state.weights
    theta_i   client.model, kept by the client
    F         fisher, the diagonal of the Fisher information, scaled to [0, 1] in every tensor
    tau       threshold; a weight with F above it is the client's own
    lambda_1  lambda1, of the distance of the own weights from the global ones
    lambda_2  lambda2, of the gap between that distance of the shared ones and C
    C         bound
    sigma     noise_multiplier
    E, B, eta training.epochs, training.batch_size, training.lr

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    threshold=1.0 lambda2=0.0 evaluated="global" equals fedavg
    threshold=1.0 lambda2=0.0 evaluated="global" sharing.weighting="uniform" equals fedavg sharing.weighting="uniform"
    training.lr=0.0 stays at rest

Departures from the paper
    1. Clipping and noise, which are the method's privacy, are off; `clipped` and `noise_multiplier` turn them on. The
       noise has a standard deviation of C sigma / sqrt(N) for each client, where N counts all clients, as in the
       authors' code. No guarantee is claimed: the server adds the noise and draws it from the run's seed. The code
       computes sigma from a number of batches; here it is given.
    2. Both kinds of weights are sent, as in the code. Averages are over all that clients send.
    3. F is that of the labels that the examples have, in evaluation mode, as in the code, and always computed in
       float32. Training is in training mode; the code stays in evaluation mode.
    4. A tensor whose Fisher information is the same everywhere has F = 0. In the code it is no number, and the tensor
       becomes 0.
    5. Which weights are a client's own is decided once a round. The code takes for them those that are not 0 in a copy
       of its own weights, made once a round, so that a bias which starts at 0 never learns.
    6. The weights that a part does not train are put back after each of its steps, so that neither momentum nor decay
       moves them. The distance covers all weights, as in the code, and is the sum of the tensors' norms, without those
       below 1e-6: the gradient of a norm has length 1 however short it is, so that a tensor which only rounding has
       moved, such as a bias before BatchNorm, would go a whole step in a random direction.
    7. A client is evaluated with its own model as its last training left it, as in the code, and with the global one
       before its first, which it also starts from. `evaluated="global"` takes the latter for all.
    8. BatchNorm's running statistics are averaged, and layers owned by some clients only are averaged over those, see
       `sharing`; where `sharing.buffers` drops them, they are measured for F and for a client's own model too. The norm
       that is clipped is that of what a client has.
    9. Local training defaults to Adam, as in the code, which has batches of 16 and two epochs of each part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from potluck import fl

_ROOM = 2**25  # numbers that the gradients of single examples may have in memory together
_MOVED = 1e-6  # distance from which a tensor counts as moved


@dataclass(frozen=True)
class State:
    """The server's weights, by group of clients."""

    weights: fl.GroupWeights


@dataclass(frozen=True)
class FedDPA(fl.SharesWeights[State]):
    """Hyper-parameters of FedDPA.

    Attributes:
        training: a client's local training, of each of the two parts.
        threshold: tau; from 1 nothing is a client's own, below 0 everything.
        lambda1: weight of the distance of a client's own weights from the global ones.
        lambda2: weight of the gap between the size of its update and the bound.
        bound: C.
        clipped: whether updates are clipped to a norm of C.
        noise_multiplier: sigma, of the noise that is added to updates; it needs `clipped`.
        evaluated: whether clients are evaluated with their "own" models or with the "global" one.
        sharing: who averages with whom, with which weights.
    """

    aligns_classes = True

    variants = {
        "clipped": {"clipped": True},
        "noisy": {"clipped": True, "noise_multiplier": 0.1},
        "global model": {"evaluated": "global"},
    }

    training: fl.LocalTraining = fl.LocalTraining()
    threshold: Annotated[float, fl.above(-1), fl.at_most(1)] = 0.4
    lambda1: Annotated[float, fl.at_least(0)] = 0.1
    lambda2: Annotated[float, fl.at_least(0)] = 0.05
    bound: Annotated[float, fl.above(0)] = 0.5
    clipped: bool = False
    noise_multiplier: Annotated[float, fl.at_least(0)] = 0.0
    evaluated: Literal["own", "global"] = "own"
    sharing: fl.Averaging = fl.Sharing()

    def __post_init__(self) -> None:
        bounded = self.clipped or not self.noise_multiplier
        fl.require(bounded, "noise_multiplier", "0 unless clipped=true", self.noise_multiplier)

    @property
    def keeps_model(self) -> bool:
        return True

    def needs(self) -> frozenset[fl.Need]:
        return super().needs() | {fl.Need.CLASSES}

    def init(self, server: fl.Server) -> State:
        return State(self.sharing.initial(server))

    def round(self, state: State, cohort: fl.Cohort, server: fl.Server) -> State:
        replies = cohort.stream(self.local_update, self.sharing.send(state.weights, cohort, server))
        if not self.clipped:
            return State(self.sharing.merge(state.weights, replies, server.roster))
        means = self.sharing.no_means(server.roster, "weights", "buffers")
        key, clients = fl.fold_in(int(torch.randint(2**62, (), generator=server.rng))), len(server.roster)
        for i, reply in self.sharing.combine.arriving(replies):
            sent = state.weights[self.sharing.group(server.roster[i])]
            clipped = self.clip(sent, reply["weights"], clients, key.fold(i).generator(), server.roster[i].head)
            means.add(i, fl.Message(**{**reply, "weights": clipped}))
            del reply  # before the next comes
        return State(means.over(state.weights, "weights", "buffers"))

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        kept = fl.parameters_of(client.model)
        self.sharing.receive(client, message)
        sent = fl.parameters_of(client.model)
        own = kept if client.state.get("started") else sent
        fl.load(client.model, own, partial=True)
        yield from self.sharing.ready(client, client.model)
        at_once = max(1, min(64, _ROOM // sum(tensor.numel() for tensor in own.values())))
        fisher = yield fl.Gradient(client.model, FisherLoss(client.criterion), client.train, batch_size=at_once)
        masks = {name: scaled(found) > self.threshold for name, found in fisher.items()}
        fl.load(client.model, {n: torch.where(mask, own[n], sent[n]) for n, mask in masks.items()}, partial=True)
        shared = {name: ~mask for name, mask in masks.items()}
        drawn = PullLoss(client.criterion, self.lambda1)
        bounded = PullLoss(client.criterion, self.lambda2, self.bound)
        for name, moving, loss in (("own", masks, drawn), ("shared", shared, bounded)):
            if any(bool(mask.any()) for mask in moving.values()):
                extras = {"sent": sent, "moving": moving, "start": fl.parameters_of(client.model)}
                yield fl.Fit(
                    client.model, loss, client.train, self.training, extras, after_step=fl.moving.put_back, name=name
                )
        client.state["started"] = True
        return self.sharing.reply(client)

    @fl.on_client
    def inference_model(self, client: fl.Client, message: fl.Message) -> nn.Module:
        own = self.evaluated == "own" and client.state.get("started", False)
        return client.model if own else self.sharing.deploy(client, message)

    def clip(
        self,
        pool: fl.Weights,
        trained: fl.Weights,
        clients: int,
        rng: torch.Generator,
        head: fl.classes.OwnHead | None = None,
    ) -> fl.Weights:
        """A client's weights with its update clipped to a norm of C, and noise of its own, whoever else was drawn.

        A client with classes of its own has a part of the pool, and of the noise.
        """
        whole = {name: pool[name] for name in trained}
        sent = whole if head is None else head.part_of(whole)
        update = fl.weights.minus(trained, sent)
        length = float(torch.stack([torch.linalg.vector_norm(tensor) for tensor in update.values()]).norm())
        noise = self.bound * self.noise_multiplier / clients**0.5
        found = fl.weights.plus(sent, update, 1 / max(1.0, length / self.bound))
        if not noise:
            return found
        drawn = {n: noise * torch.randn(w.shape, generator=rng, dtype=w.dtype) for n, w in whole.items()}
        return fl.weights.plus(found, drawn if head is None else head.part_of(drawn))


@dataclass(frozen=True)
class FisherLoss:
    """A loss whose gradient is the diagonal of the Fisher information, the mean of examples' squared gradients."""

    criterion: fl.Criterion

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch of examples with classes."""
        named = {name: weight for name, weight in net.named_parameters() if weight.requires_grad}

        def of_one(weights: fl.Weights, inputs: fl.Inputs, target: Tensor) -> Tensor:
            return self.criterion(fl.call_with(net, weights, fl.rows_of(inputs, None)), target[None])

        # In float32 whatever the run's precision, see departure 3; under autocast vmap mixes types at a BatchNorm.
        with fl.mode(net, training=False), fl.precision.unmixed(batch.targets.device):
            weights = {name: weight.detach() for name, weight in named.items()}
            fisher = mean_squares(grad(of_one), weights, batch)
        return torch.stack([(weight * fisher[name]).sum() for name, weight in named.items()]).sum()


def mean_squares(slope: Callable[..., fl.Weights], weights: fl.Weights, batch: fl.Batch) -> fl.Weights:
    """The mean over examples of their squared gradients, where a net allows it computed side by side."""
    try:
        each = vmap(slope, (None, 0, 0))(weights, batch.inputs, batch.targets)
        return {name: gradients.detach().square().mean(0) for name, gradients in each.items()}
    except RuntimeError:  # the net looks at numbers, which several examples do not have in common
        total = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        for row in torch.arange(len(batch.targets)):
            for name, gradient in slope(weights, fl.rows_of(batch.inputs, row), batch.targets[row]).items():
                total[name] += gradient.detach().square()
        return {name: squares / len(batch.targets) for name, squares in total.items()}


@dataclass(frozen=True)
class PullLoss:
    """The task's loss + (weight / 2) times the distance from the weights that were sent, or its gap to a bound.

    The distance is the sum of the tensors' Euclidean norms, not squared; the extras have what was sent as "sent".
    """

    criterion: fl.Criterion
    weight: float
    bound: float | None = None

    def __call__(self, net: nn.Module, batch: fl.Batch, extras: fl.Extras) -> Tensor:
        """Of one batch."""
        loss = self.criterion(net(batch.inputs), batch.targets)
        if not self.weight:
            return loss
        sent = extras["sent"]
        gaps = [weight - sent[name] for name, weight in net.named_parameters() if name in sent]
        norms = torch.stack([torch.linalg.vector_norm(gap) for gap in gaps])
        distance = norms.where(norms > _MOVED, 0.0).sum()
        return loss + self.weight / 2 * (distance if self.bound is None else (distance - self.bound).abs())


def scaled(fisher: Tensor) -> Tensor:
    """Between 0, the smallest of the tensor, and 1, the largest; 0 if all are the same."""
    least, most = fisher.min(), fisher.max()
    return ((fisher - least) / (most - least)).nan_to_num(0.0)
