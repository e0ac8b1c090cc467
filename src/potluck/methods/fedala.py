"""FedALA: adaptive local aggregation.

Zhang, Hua, Wang, Song, Xue, Ma, Guan. AAAI 2023. https://arxiv.org/abs/2212.01197. Algorithm 1.

Where other clients overwrite their model with the global one, a client of FedALA takes as much of it as helps its data:
each weight of its last layers moves a share of the way, and the shares are learnt before local training begins.

Symbols
    Theta     state.weights
    Theta_i   client.model, kept by the client
    W^p       client.state["shares"], from 0 to 1, of the layers that adapt
    p         adaptive_layers
    s         sampled, the share of the client's data that W^p learns from
    eta       share_lr

Wire
    down      weights |w|, buffers |b|
    up        weights |w|, buffers |b|, examples 1

Limits
    share_lr=0.0 equals fedavg
    equals fedavg on rounds=1 architectures=1
    training.lr=0.0 stays at rest on architectures=1

Departures from the paper
    1. The layers that adapt are the head, and further ones stages before it.
    2. W^p learns until the standard deviation of its last ten passes' losses is below `settled`, for at most `most`
       passes, the first time; later for one pass, as in the authors' code. The time that a client first takes part it
       has no model of its own, and takes the global one.
    3. While W^p learns, BatchNorm is in training mode and its running statistics do not change. Buffers are the
       global ones.
    4. A client is evaluated with its model of its last training, moved towards the newest global one by the shares that
       it learnt last. In the code it first learns shares anew.
    5. Layers owned by some clients only are averaged over those, see `sharing`.
    6. Local training defaults to Adam, like all methods here; the paper has SGD with 0.005.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import nn

from potluck import fl

_LAST = 10  # passes whose losses are compared


@dataclass(frozen=True)
class FedALA(fl.Averages):
    """Hyper-parameters of FedALA, beside those of `Averages`.

    Attributes:
        adaptive_layers: p, how many layers adapt: the head, and stages before it.
        sampled: s, the share of the client's examples that shares learn from.
        share_lr: eta, learning rate of the shares.
        settled: at which deviation of the loss they have learnt enough, the first time.
        most: passes, the first time.
    """

    aligns_classes = True

    variants = {"two layers": {"adaptive_layers": 2}, "by architecture": {"sharing.scope": "architecture"}}

    adaptive_layers: Annotated[int, fl.at_least(1)] = 1
    sampled: Annotated[float, fl.above(0), fl.at_most(1)] = 0.8
    share_lr: Annotated[float, fl.at_least(0)] = 1.0
    settled: Annotated[float, fl.at_least(0)] = 0.1
    most: Annotated[int, fl.at_least(1)] = 50
    sharing: fl.Averaging = fl.Sharing()

    @property
    def keeps_model(self) -> bool:
        return True

    def needs(self) -> frozenset[fl.Need]:
        return super().needs() | {fl.Need.SPLIT_MODEL}

    @fl.on_client
    def local_update(self, client: fl.Client, message: fl.Message) -> fl.ClientWork:
        own = self._own(client)
        self.sharing.receive(client, message)
        if own:
            shares = yield from self._learnt(client, own)
            client.state["shares"] = shares
            fl.load(client.model, towards(own, fl.parameters_of(client.model), shares), partial=True)
        yield fl.Fit(client.model, client.objective, client.train, self.training)
        client.state["started"] = True
        return self.sharing.reply(client)

    @fl.on_client
    def inference_model(self, client: fl.Client, message: fl.Message) -> nn.Module:
        own, shares = self._own(client), client.state.get("shares", {})
        net = self.sharing.deploy(client, message)
        return fl.load(net, towards(own, fl.parameters_of(net), shares), partial=True) if shares else net

    def global_model(self, state: fl.sharing.Averaged, server: fl.Server) -> None:
        """None: every client has a model of its own."""

    def _own(self, client: fl.Client) -> fl.Weights:
        """Theta_i of the layers that adapt; nothing before the client's first training."""
        names = fl.split(client.model).last_names(self.adaptive_layers - 1)
        return {n: w for n, w in fl.parameters_of(client.model).items() if n in names and "started" in client.state}

    def _learnt(self, client: fl.Client, own: fl.Weights) -> Generator[fl.Request, Any, fl.Weights]:
        """W^p, learnt on some of the client's examples; `client.model` is the global model, and not changed."""
        theirs, net = fl.parameters_of(client.model), client.copy()
        size = max(1, round(self.sampled * len(client.train)))
        some = client.train.take(torch.randperm(len(client.train), generator=client.rng)[:size])
        first, losses = "shares" not in client.state, list[float]()
        shares: fl.Weights = client.state.get("shares") or {name: torch.ones_like(w) for name, w in own.items()}
        for _ in range(self.most if first else 1):
            for piece in some.pieces(self.training.batch_size, client.rng):
                fl.load(net, towards(own, theirs, shares), partial=True)
                found = yield fl.Gradient(net, client.objective, piece, batch_size=len(piece))
                steps = {n: found[n] * (theirs[n] - w) for n, w in own.items()}  # the slope, by the chain rule
                shares = {n: (w - self.share_lr * steps[n]).clamp(0, 1) for n, w in shares.items()}
            if first:
                outputs = yield fl.Predict(fl.load(net, towards(own, theirs, shares), partial=True), some)
                losses.append(float(client.criterion(outputs, some.labels)))
            if len(losses) >= _LAST and torch.tensor(losses[-_LAST:]).std() < self.settled:
                break
        return shares


def towards(own: fl.Weights, theirs: fl.Weights, shares: fl.Weights) -> fl.Weights:
    """Theta_i + (Theta - Theta_i) W, of the layers that adapt; exactly Theta where a share is 1."""
    return {name: w.lerp(theirs[name], shares[name]) for name, w in own.items()}
