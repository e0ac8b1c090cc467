"""Toy federations: small enough for a round in milliseconds, varied enough to catch mistakes."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

from potluck.core.federation import ClientId, Federation, Site, empty_like
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import fold_in
from potluck.core.ground.tree import pack
from potluck.core.method import Method
from potluck.core.needs import Need
from potluck.core.nets.batchnorm import batch_norms
from potluck.core.nets.scale import FULL, Scale
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import LocalTraining, ServerTraining
from potluck.engine.rounds.engine import Engine
from potluck.experiment.settings.strict import typed
from potluck.experiment.settings.tables import merged, override, without_none
from potluck.models.contract import StagedNet, of_depth

CLASSES = 4
_FEATURES, _WIDTH = 10, 16
_DEPTH_TO_CUT = 3
_LR = 0.01


@dataclass(frozen=True)
class World:
    """The shape of a toy federation; a method's Limits section sets these by name after `on`.

    Attributes:
        clients: the number of clients.
        architectures: the number of different depths.
        depth: hidden stages after the first of the shallowest architecture.
        capacity: of every client; None for a mixture.
        labels: the number of classes that each client holds.
        width: units of every hidden layer, which are also the features before the head.
        batchnorm: whether the nets have BatchNorm.
        frozen: whether the nets' builders freeze layers, see `toy_net`.
        rounds: the number of rounds.
        optimizer: the optimiser of all local training; None for the method's own.
    """

    clients: int = 4
    architectures: int = 2
    depth: int = 1
    capacity: float | None = None
    labels: int = CLASSES
    width: int = _WIDTH
    batchnorm: bool = False
    frozen: bool = False
    rounds: int = 2
    optimizer: str | None = None

    def fit_for(self, method: Method[Any]) -> "World":
        """This world with one architecture if the method requires it, and with depths to choose if it cuts some."""
        needs = method.needs()
        depth = max(self.depth, _DEPTH_TO_CUT) if Need.DEPTH_PREFIXES in needs else self.depth
        return replace(self, depth=depth, architectures=1 if Need.ONE_ARCHITECTURE in needs else self.architectures)


def toy_net(
    depth: int,
    batchnorm: bool,
    frozen: bool = False,
    scale: Scale = FULL,
    *,
    width: int = _WIDTH,
    classes: int = CLASSES,
) -> StagedNet:
    """A staged net on ten features with `depth` hidden stages of `width` units after the first.

    With `frozen` the first stage is frozen, as if it were pre-trained, with its BatchNorm in evaluation mode, and so is
    one bias behind it.
    """
    units = scale.of(width)
    stages = {"stem": _stage(_FEATURES, units, batchnorm)}
    stages |= {f"hidden{i}": _stage(units, units, batchnorm) for i in range(1, depth + 1)}
    net = StagedNet(stages, nn.Linear(units, classes))
    if frozen:
        stages["stem"].requires_grad_(False).eval()
        for norm in batch_norms(stages["stem"]).values():
            assert norm.running_mean is not None
            nn.init.normal_(norm.running_mean)
        net.get_parameter("stages.hidden1.0.bias").requires_grad_(False)
    return of_depth(net, scale.depth, classes, (_FEATURES,))


def _stage(inputs: int, outputs: int, batchnorm: bool) -> nn.Module:
    norm = [nn.BatchNorm1d(outputs)] if batchnorm else []
    return nn.Sequential(nn.Linear(inputs, outputs), *norm, nn.ReLU())


def toy_federation(world: World, seed: int = 0) -> Federation:
    """Clients with unequal amounts of data from a linear four-class problem, public inputs, a common test set."""
    generator = fold_in(seed, "toy world").generator()
    boundary = torch.randn(_FEATURES, CLASSES, generator=generator)
    draw = partial(_draw, boundary, generator)
    architectures = {
        f"toy{d}": partial(toy_net, world.depth + d - 1, world.batchnorm, world.frozen, width=world.width)
        for d in range(1, world.architectures + 1)
    }
    sites = {
        i: Site(
            id=i,
            architecture=f"toy{i % world.architectures + 1}",
            train=draw(40 + 8 * i, [(i + j) % CLASSES for j in range(world.labels)]),
            validation=draw(16, range(CLASSES)),
            test=draw(32, range(CLASSES)),
            capacity=world.capacity or (1.0, 0.5)[i % 2],
        )
        for i in range(world.clients)
    }
    return Federation(
        sites=sites,
        architectures=architectures,
        server_architecture="toy1",
        num_classes=CLASSES,
        public=draw(64, range(CLASSES)),
        public_labels=True,
        test=draw(400, range(CLASSES)),
    )


def _draw(boundary: Tensor, generator: torch.Generator, count: int, classes: Sequence[int]) -> Examples:
    """Examples of the given classes only: some rows of shared tensors, as in a run."""
    inputs = torch.randn(20 * count, _FEATURES, generator=generator)
    targets = (inputs @ boundary).argmax(1)
    wanted = torch.isin(targets, torch.tensor(list(classes))).nonzero().flatten()[:count]
    return Examples(inputs, targets).take(wanted)


def quadratics() -> Federation:
    """Two clients with losses a/2 (w - b)^2, (a, b) = (1, 1) and (4, -1): least squares in one weight.

    The optimum of their mean is (1 * 1 - 4 * 1) / (1 + 4) = -0.6. Local training drifts away from it, since each client
    moves to its own optimum at its own rate.
    """
    sites: dict[ClientId, Site] = {}
    for i, (a, b) in enumerate([(1.0, 1.0), (4.0, -1.0)]):
        x = torch.tensor([[a**0.5]])
        train = Examples(x, x * b)
        sites[i] = Site(i, "line", train, empty_like(train), empty_like(train))
    return Federation(
        sites=sites,
        architectures={"line": partial(nn.Linear, 1, 1, bias=False)},
        server_architecture="line",
        num_classes=1,
        criterion=half_squared_error,
    )


QUADRATIC_OPTIMUM = -0.6


def half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Half the mean squared error."""
    return (outputs - targets).square().mean() / 2


def quick(
    cls: type[Method[Any]], assignments: Sequence[str] = (), epochs: int = 1, plain_lr: float = _LR, **training: Any
) -> Method[Any]:
    """A method whose trainings suit a toy world: short, of so many epochs, with `key=value` overrides applied last.

    Args:
        cls: the method.
        assignments: the overrides.
        epochs: the most that a training has.
        plain_lr: the rate of clients' trainings by "sgd", whose steps are short where Adam's are not.
        training: further settings of every training.
    """
    method = cls()
    hints = get_type_hints(cls, include_extras=True)
    changes = {
        spec.name: replace(found, **{**_short(found, hints[spec.name], epochs, plain_lr), **training})
        for spec in fields(method)
        if isinstance(found := getattr(method, spec.name), LocalTraining)
    }
    method = replace(method, **changes)
    if not assignments:
        return method
    tree = override({}, assignments)
    return typed(cls, merged(without_none(asdict(method)), tree), "method", cls.__name__)


def _short(training: LocalTraining, hint: Any, epochs: int, plain_lr: float) -> dict[str, Any]:
    """Settings by which a training lasts a moment: few epochs of a client's, of the server's no more than it has."""
    server = hint == ServerTraining
    epochs = min(training.epochs, epochs) if server else epochs
    length = {"epochs": epochs} if training.steps is None else {"steps": min(training.steps, 4)}
    return {"lr": plain_lr if training.optimizer == "sgd" and not server else _LR, **length}


def assigned(variant: Mapping[str, Any]) -> tuple[str, ...]:
    """A variant of a method as `key=value` overrides."""
    return tuple(f"{key}={json.dumps(value)}" for key, value in variant.items())


def federation_table(method: Method[Any]) -> dict[str, Any]:
    """What a federation of images must have for a method, as keys of `[federation]`; empty if it can do with anything.

    One small network whose width and depth can be cut, if the method requires one architecture.
    """
    needs = method.needs()
    one = {"models": [{"name": "preresnet18", "width": 4}]} if Need.ONE_ARCHITECTURE in needs else {}
    public = {"public": "holdout"} if Need.PUBLIC_DATA in needs else {}
    return one | public | ({"public_labels": True} if Need.PUBLIC_LABELS in needs else {})


def run_rounds(engine: Engine, rounds: int, cohorts: Iterator[list[ClientId]] | None = None) -> Any:
    """Run rounds with all clients, or with the given cohorts; return the last state."""
    state = engine.start()
    for number in range(1, rounds + 1):
        ids = sorted(engine.federation.sites) if cohorts is None else next(cohorts)
        state, _ = engine.round(number, state, ids)
    return state


def packed_state(state: Any) -> bytes:
    """A method's state as bytes."""
    return pack({spec.name: getattr(state, spec.name) for spec in fields(state)})


def world_from(assignments: Sequence[str]) -> World:
    """A world from `key=value` words.

    Raises:
        ConfigError: a key is no attribute of a world, or its value of another type.
    """
    known = {spec.name for spec in fields(World)}
    tree = override({}, assignments)
    if unknown := sorted(set(tree) - known):
        raise ConfigError(f"a toy world has no {unknown[0]!r}; expected {', '.join(sorted(known))}")
    return typed(World, tree, "world", "Limits")
