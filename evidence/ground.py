"""What all evidence stands on: a small federation, a run of a method by the engine, and a network computed by hand.

A reference gets what the run began with, the clients' examples and the initial weights, and comes to what the run ends
with by the paper's equations alone. Two things make that possible without a second engine. Everything is computed in
double precision, so that rounding is seen as rounding. And every step takes all of a client's examples, so that no
order of batches is drawn; what a method draws besides is read from its messages and replayed.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from potluck.core.federation import ClientId, Federation
from potluck.core.message import Message
from potluck.core.method import Method
from potluck.core.nets.weights import weights_of
from potluck.core.requests.fit import LocalTraining
from potluck.engine.client.costs import Costs
from potluck.engine.client.runtime import ClientRuntime, Outcome
from potluck.engine.client.session import Answer, Call
from potluck.engine.executors import Executor, Pending
from potluck.engine.numerics.costs import Cost
from potluck.engine.rounds.engine import Engine
from potluck.testing.worlds import World, toy_federation

Weights = dict[str, Tensor]

SGD = LocalTraining("sgd", lr=0.1, epochs=3, batch_size=10**6)
"""Three steps with all of a client's examples."""


@dataclass(frozen=True)
class Data:
    """A client's examples.

    Attributes:
        x: inputs (n, 10).
        y: classes (n,).
        architecture: the name of the client's network.
    """

    x: Tensor
    y: Tensor
    architecture: str

    @property
    def n(self) -> int:
        """How many there are."""
        return len(self.y)


@dataclass
class Run:
    """A method that was played by the engine.

    Attributes:
        federation: with its sites, public data and architectures.
        clients: their training data, by client.
        start: the initial weights, by architecture.
        states: the method's states, the first one before the first round.
        sent: by handler, one dict of messages by client for each exchange.
        replied: likewise, the answers.
        models: after each round, every client's model for inference, as weights.
    """

    federation: Federation
    clients: dict[ClientId, Data]
    start: dict[str, Weights]
    states: list[Any] = field(default_factory=list[Any])
    sent: dict[str, list[dict[ClientId, Message]]] = field(default_factory=dict[str, list[dict[ClientId, Message]]])
    replied: dict[str, list[dict[ClientId, Message]]] = field(default_factory=dict[str, list[dict[ClientId, Message]]])
    models: list[dict[ClientId, Weights]] = field(default_factory=list[dict[ClientId, Weights]])


class _Listening(Executor):
    """Runs clients one after another and keeps their messages in a run."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def run(self, host: ClientRuntime, tasks: Sequence[Pending]) -> Iterator[Outcome]:
        """Carry the tasks out in order."""
        jobs = [task.make() for task in tasks]
        calls = [job for job in jobs if isinstance(job, Call)]
        for handler in dict.fromkeys(call.handler for call in calls):
            mine = {call.client: Message.decode(call.payload) for call in calls if call.handler == handler}
            self._run.sent.setdefault(handler, []).append(mine)
            self._run.replied.setdefault(handler, []).append({})
        for job in jobs:
            outcome = host.execute(job)
            if isinstance(job, Call) and isinstance(outcome, Answer):
                self._run.replied[job.handler][-1][job.client] = Message.decode(outcome.payload)
            yield outcome


@contextmanager
def double_precision() -> Iterator[None]:
    """Inside the block, new tensors are in double precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def played(
    method: Method[Any],
    rounds: int = 3,
    world: World = World(clients=3),
    cohorts: Sequence[Sequence[ClientId]] = (),
    federation: Federation | None = None,
) -> Run:
    """Some rounds of a method; to be called inside `double_precision`.

    Args:
        method: with whole batches, such as `SGD`.
        rounds: how many.
        world: the federation's shape; two depths of multi-layer perceptrons by default, which share their layers.
        cohorts: the clients of each round; all of them in rounds that are not named.
        federation: in place of one of this shape.
    """
    federation = federation or toy_federation(world)
    clients: dict[ClientId, Data] = {}
    for id, site in federation.sites.items():
        whole = site.train.batch(torch.arange(len(site.train)))
        clients[id] = Data(whole.inputs.double(), whole.targets, site.architecture)
    run = Run(federation, clients, {})
    engine = Engine(method, federation, executor=_Listening(run))
    run.states.append(engine.start())
    run.start = {name: weights_of(engine.server(0).build(name)) for name in federation.architectures}
    for number in range(1, rounds + 1):
        ids = cohorts[number - 1] if number <= len(cohorts) else sorted(federation.sites)
        state, _ = engine.round(number, run.states[-1], ids)
        run.states.append(state)
        run.models.append({id: weights_of(engine.inference_model(state, id)) for id in federation.sites})
    return run


@contextmanager
def recorded(loss: type[Any]) -> Iterator[list[Tensor]]:
    """Inside the block, the inputs of each batch that a loss of this type is called with are kept.

    Costs are not counted there, since counting calls the loss once more.
    """
    plain, seen = loss.__call__, list[Tensor]()

    def listening(self: Any, net: Any, batch: Any, extras: Any) -> Any:
        seen.append(batch.inputs.detach().clone())
        return plain(self, net, batch, extras)

    with patch.object(loss, "__call__", listening), patch.object(Costs, "of", return_value=Cost()):
        yield seen


def public_data(run: Run) -> tuple[Tensor, Tensor]:
    """The inputs and classes of all public examples."""
    assert run.federation.public is not None
    whole = run.federation.public.batch(torch.arange(len(run.federation.public)))
    return whole.inputs.double(), whole.targets


# A network by hand


def features(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """What a toy network's last layer reads: its stages in order, each ReLU(x W^T + b)."""
    stages = [name.removesuffix(".0.weight") for name in w if name.startswith("stages.") and name.endswith(".0.weight")]
    for stage in stages:
        x = (x @ w[f"{stage}.0.weight"].T + w[f"{stage}.0.bias"]).clamp(min=0)
    return x


def logits(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The network's outputs (n, classes)."""
    return features(w, x) @ w["head.weight"].T + w["head.bias"]


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """The mean of -log softmax at the classes."""
    return -F.log_softmax(outputs, 1)[torch.arange(len(y)), y].mean()


def gradient(loss: Any, w: Mapping[str, Tensor]) -> Weights:
    """The gradient of loss(w) in all tensors of w; zero in those that it does not read."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in w.items()}
    found = torch.autograd.grad(loss(leaves), list(leaves.values()), allow_unused=True)
    return {n: torch.zeros_like(w[n]) if g is None else g for n, g in zip(leaves, found, strict=True)}


def descended(loss: Any, w: Mapping[str, Tensor], steps: int = 3, lr: float = 0.1) -> Weights:
    """Steps of gradient descent from w, w <- w - lr grad loss(w); those of `SGD` by default."""
    for _ in range(steps):
        g = gradient(loss, w)
        w = {name: w[name] - lr * g[name] for name in w}
    return dict(w)


def owned(pool: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Weights:
    """The tensors that a client with these layers owns, in its order."""
    return {name: pool[name] for name in like}


def mean_by_layer(
    parts: Sequence[Mapping[str, Tensor]], shares: Sequence[float], keep: Mapping[str, Tensor]
) -> Weights:
    """Layer by layer, the mean over those who own it, by their shares; layers of nobody as in `keep`."""
    found = dict(keep)
    for name in dict.fromkeys(name for part in parts for name in part):
        holders = [(part[name], share) for part, share in zip(parts, shares, strict=True) if name in part]
        found[name] = sum((share * tensor for tensor, share in holders), torch.zeros(())) / sum(s for _, s in holders)
    return found


# Comparison


def gap(ours: Any, theirs: Any) -> float:
    """The largest difference of a number, relative to numbers above 1; infinite if shapes or names differ."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        if {str(key) for key in ours} != {str(key) for key in theirs}:
            return math.inf
        others = {str(key): value for key, value in theirs.items()}
        return max((gap(value, others[str(key)]) for key, value in ours.items()), default=0.0)
    if isinstance(ours, Sequence) and isinstance(theirs, Sequence):
        pairs = zip(ours, theirs, strict=False)
        return math.inf if len(ours) != len(theirs) else max((gap(a, b) for a, b in pairs), default=0.0)
    a, b = torch.as_tensor(ours).double(), torch.as_tensor(theirs).double()
    if a.shape != b.shape:
        return math.inf
    return float(((a - b).abs() / b.abs().clamp(min=1.0)).max()) if a.numel() else 0.0
