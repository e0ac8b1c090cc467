"""A toy world for methods: labelled clouds, lines of one weight, and an ear at the wire."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from potluck.core.federation import ClientId, Federation, Site
from potluck.core.ground.rng import fold_in
from potluck.core.ground.tree import unpack
from potluck.core.message import Message
from potluck.core.method import Method
from potluck.core.nets.batchnorm import forget_statistics
from potluck.core.nets.scale import FULL, Scale
from potluck.core.requests.examples import Examples
from potluck.engine.client.costs import Costs
from potluck.engine.client.runtime import ClientRuntime, Outcome
from potluck.engine.client.session import Answer, Call
from potluck.engine.disk.store import ClientStore
from potluck.engine.executors import Executor, Pending
from potluck.engine.numerics.costs import Cost
from potluck.engine.rounds.engine import Engine
from potluck.engine.rounds.report import RoundReport
from potluck.models.contract import StagedNet
from potluck.models.mlp import mlp2, mlp3

CLASSES = 3
FEATURES = 6
WIDTH = 8


class Wire(Executor):
    """Runs clients one after another and keeps what was said: by handler, one dict an exchange."""

    def __init__(self) -> None:
        self.sent: dict[str, list[dict[ClientId, Message]]] = defaultdict(list)
        self.replied: dict[str, list[dict[ClientId, Message]]] = defaultdict(list)

    def run(self, host: ClientRuntime, tasks: Sequence[Pending]) -> Iterator[Outcome]:
        jobs = [task.make() for task in tasks]
        calls = [job for job in jobs if isinstance(job, Call)]
        for handler in {call.handler for call in calls}:
            self.sent[handler].append({call.client: Message.decode(call.payload) for call in calls})
            self.replied[handler].append({})
        for job in jobs:
            outcome = host.execute(job)
            if isinstance(job, Call) and isinstance(outcome, Answer):
                self.replied[job.handler][-1][job.client] = Message.decode(outcome.payload)
            yield outcome


class Run:
    """A method on its way: the states from the first on, the reports, and what crossed the wire."""

    def __init__(self, method: Method[Any], federation: Federation, **options: Any) -> None:
        self.wire = Wire()
        self.engine = Engine(method, federation, executor=self.wire, **options)
        self.states = [self.engine.start()]
        self.reports: list[RoundReport] = []

    def round(self, *ids: ClientId) -> Any:
        """Play one round with these clients, or with all; the new state."""
        drawn = ids or tuple(self.engine.federation.sites)
        state, report = self.engine.round(len(self.states), self.state, drawn)
        self.states.append(state)
        self.reports.append(report)
        return state

    @property
    def state(self) -> Any:
        return self.states[-1]

    def kept(self, client: ClientId) -> dict[str, Any]:
        """What a client has stored: its state, and its model if it keeps one."""
        record = self.engine.store.read(client)
        return {"state": {}} if record is None else unpack(record)

    def model(self, client: ClientId) -> nn.Module:
        """The model that a client would use now."""
        return self.engine.inference_model(self.state, client)

    def new_model(self, client: ClientId) -> nn.Module:
        """The client's own model before its first round; to be evaluated, its statistics would be measured."""
        net = self.model(client)
        forget_statistics(net)
        return net


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., Run]:
    """Start a method and play some rounds with all clients."""

    def start(method: Method[Any], federation: Federation, rounds: int = 1, **options: Any) -> Run:
        run = Run(method, federation, store=ClientStore(tmp_path), **options)
        for _ in range(rounds):
            run.round()
        return run

    return start


@pytest.fixture
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are not counted, for who listens to an objective: counting calls it once more for each shape of a batch."""
    monkeypatch.setattr(Costs, "of", lambda self, request: Cost())


@pytest.fixture
def in_double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def normed(hidden: int, scale: Scale = FULL) -> StagedNet:
    """Fully connected stages with BatchNorm; the deeper net appends stages."""
    width = scale.of(WIDTH)
    inputs = [FEATURES, *[width] * hidden]
    stages = {
        f"stage{i}": nn.Sequential(nn.Linear(inputs[i], width), nn.BatchNorm1d(width), nn.ReLU())
        for i in range(hidden + 1)
    }
    return StagedNet(stages, nn.Linear(width, CLASSES))


ARCHITECTURES = {
    "mlp2": partial(mlp2, CLASSES, (FEATURES,), width=WIDTH),
    "mlp3": partial(mlp3, CLASSES, (FEATURES,), width=WIDTH),
    "wide2": partial(mlp2, CLASSES, (FEATURES,), width=2 * WIDTH),
    "norm2": partial(normed, 1),
    "norm3": partial(normed, 2),
}


@pytest.fixture
def clouds() -> Callable[..., Federation]:
    """Classification: one client for each architecture named, with a cloud of points a class."""

    def make(
        *architectures: str,
        sizes: Sequence[int] = (12, 20, 9, 16),
        capacities: Sequence[float] = (1.0, 1.0, 1.0, 1.0),
        labels: Sequence[Sequence[int]] = ((0, 1, 2),) * 4,
        public: int = 0,
        first_id: int = 0,
        seed: int = 0,
    ) -> Federation:
        sites: dict[ClientId, Site] = {}
        for place, architecture in enumerate(architectures):
            id = first_id + place
            train = cloud(sizes[place], labels[place], seed, id)
            sites[id] = Site(id, architecture, train, train, train, capacities[place])
        names = sorted(set(architectures))
        return Federation(
            sites,
            {name: ARCHITECTURES[name] for name in names},
            server_architecture=architectures[0],
            num_classes=CLASSES,
            public=cloud(public, (0,), seed, "public") if public else None,
        )

    return make


def cloud(size: int, labels: Sequence[int], seed: int, name: int | str) -> Examples:
    targets = torch.tensor(labels)[torch.arange(size) % len(labels)]
    noise = torch.randn(size, FEATURES, generator=fold_in(seed, "cloud", name).generator())
    return Examples(noise + nn.functional.one_hot(targets, FEATURES), targets)


def line() -> nn.Module:
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    return net


def half_squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean() / 2


@pytest.fixture
def lines() -> Callable[..., Federation]:
    """Regression with one weight w from 0: the loss of client (x, y, n) is (x w - y)^2 / 2.

    Its curvature is x^2 and its optimum y / x. All n examples are equal, so batches do not matter.
    """

    def make(*clients: tuple[float, float, int], architecture: Callable[..., nn.Module] = line) -> Federation:
        examples = [Examples(torch.full((n, 1), float(x)), torch.full((n, 1), float(y))) for x, y, n in clients]
        sites = {id: Site(id, "line", data, data, data) for id, data in enumerate(examples)}
        return Federation(sites, {"line": architecture}, "line", num_classes=1, criterion=half_squared_error)

    return make
