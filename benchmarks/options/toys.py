"""Tiny runs of a method: with the engine's training or the second reading of it, and what they come to."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, partial
from typing import Any

import torch
from reference import Reference, interpreting
from torch import Tensor, nn

from potluck.core.federation import Federation, Site
from potluck.core.ground.errors import ConfigError, DataError, PotluckWarning
from potluck.core.ground.rng import Key
from potluck.core.ground.tree import unpack
from potluck.core.method import Method
from potluck.core.needs import Offer
from potluck.core.nets.weights import weights_of
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import Fit, LocalTraining
from potluck.engine.client.runtime import ClientRuntime
from potluck.engine.disk.store import ClientStore
from potluck.engine.numerics.numerics import PLAIN, Numerics
from potluck.engine.rounds.engine import Engine
from potluck.experiment.federation.needs import check_needs
from potluck.experiment.settings.strict import typed
from potluck.experiment.settings.tables import merged, override, without_none
from potluck.models.cnn import cnn4, cnn5
from potluck.testing.worlds import CLASSES, World, packed_state, quick, toy_federation

CLIENTS = 3
CAPACITIES = 1.0, 0.5, 0.25
OF_DEPTHWISE = 1.0, 0.8, 0.7
"""Where a capacity is a budget of memory, of which a toy network's last block takes a larger part than a real one's."""

EXAMPLES = 12, 16, 20
PUBLIC = 16

OF_IMAGES = "depthfl", "fedin", "fedorion", "flanc", "incoavg"
"""Methods with options of convolutions or of images, which toy networks of linear layers do not have."""

SIDE = 4

SMALL: dict[str, Any] = {
    "public_examples": 12,
    "feature_capacity": 12,
    "logit_capacity": 4,
    "store_capacity": 12,
    "samples": 24,
    "memory": 2,
    "buffer": 2,
    "peers": 1,
    "grow_every": 1,
    "ramp": 4,
    "growth": 4,
    "fedtgp.threshold": 0.01,
    "fedin.feature_batch": 4,
    "study": 4,
    "quiz": 4,
    "noise_batches": 1,
    "width": 8,
    "vae_width": 8,
    "hidden": 8,
    "noise": 4,
    "latent": 4,
    "per_class": 2,
}
"""Values of methods' fields in place of defaults that are meant for more data, rounds or clients than here."""


@dataclass(frozen=True)
class Ground:
    """A toy federation; the defaults make as many options matter as can.

    Attributes:
        batchnorm: whether networks have BatchNorm.
        architectures: how many there are, unless the method wants one.
        alike: whether clients have equally many examples.
        twins: whether they have the same ones, and everything.
        images: whether inputs are images, and networks have convolutions, and BatchNorm.
    """

    batchnorm: bool = True
    architectures: int = 2
    alike: bool = False
    twins: bool = False
    images: bool = False

    def world(self, method: Method[Any]) -> World:
        """The toy world that it is made of."""
        labels = 4 if self.twins else 3
        depth = 3 - min(self.architectures, 2)  # the deepest has two stages of one shape
        world = World(CLIENTS, self.architectures, depth, labels=labels, batchnorm=self.batchnorm)
        return world.fit_for(method)


@cache
def federation_of(
    ground: Ground, world: World, capacities: tuple[float, ...], kind: torch.dtype
) -> tuple[Federation, Offer]:
    """Three clients, with data of this type."""
    whole = toy_federation(world)
    assert whole.public is not None
    sites = {
        id: replace(
            site,
            train=site.train.take(torch.arange(EXAMPLES[1 if ground.alike or ground.twins else id])),
            capacity=1.0 if ground.twins else capacities[id],
        )
        for id, site in whole.sites.items()
    }
    if ground.twins:
        sites = {id: replace(sites[0], id=id) for id in sites}
    if ground.images:
        nets = (partial(net, CLASSES, (1, SIDE, SIDE), width=8) for net in (cnn4, cnn5))
        whole = replace(whole, architectures=dict(zip(whole.architectures, nets, strict=False)))
        whole = replace(whole, public=replace(whole.public, preprocess=as_images), test=None)
        sites = {id: replace(site, **imaged(site)) for id, site in sites.items()}
    federation = replace(whole, sites=sites, public=whole.public.take(torch.arange(PUBLIC)))
    return federation, Offer.of(federation)


def as_images(inputs: Tensor, rng: Any) -> Tensor:
    """Features as small images, filled up with zeros."""
    return nn.functional.pad(inputs, (0, SIDE**2 - inputs.shape[1])).view(-1, 1, SIDE, SIDE)


def imaged(site: Site) -> dict[str, Examples]:
    """A client's examples as images."""
    parts = {"train": site.train, "validation": site.validation, "test": site.test}
    return {name: replace(examples, preprocess=as_images) for name, examples in parts.items()}


@dataclass
class Played:
    """What a run came to.

    Attributes:
        end: "ran"; "refused" in one line before anything was trained; or "failed".
        why: what ended it.
        found: by name, all tensors of clients' models and of the global one.
        state: likewise, all tensors and numbers of the method's last state.
    """

    end: str = "ran"
    why: str = ""
    found: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    state: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def same(self, other: "Played") -> bool:
        """Whether clients' models and the global one are the same bit for bit."""
        return self.found.keys() == other.found.keys() and all(
            torch.equal(tensor, other.found[name]) for name, tensor in self.found.items()
        )

    def way(self, other: "Played") -> float:
        """The L2 distance of the models from the other's."""
        floating = {name: tensor for name, tensor in self.found.items() if tensor.is_floating_point()}
        return float(
            torch.stack([(tensor - other.found.get(name, 0.0)).norm() for name, tensor in floating.items()]).norm()
        )

    def gap(self, other: "Played") -> float:
        """The largest difference of a number from the other's, relative to those above 1."""
        mine, theirs = {**self.found, **self.state}, {**other.found, **other.state}
        if mine.keys() != theirs.keys() or any(mine[name].shape != theirs[name].shape for name in mine):
            return math.inf
        pairs = [(mine[name].double(), theirs[name].double()) for name in mine if mine[name].numel()]
        return max((float(((a - b).abs() / b.abs().clamp(min=1.0)).max()) for a, b in pairs), default=0.0)


def method_of(cls: type[Method[Any]], assignments: tuple[str, ...], clips: bool = True, **training: Any) -> Method[Any]:
    """A method for a toy world, with these `key=value` words last; without clipping unless it `clips` by default.

    Raises:
        ConfigError: it refuses them.
    """
    known = {
        f"{place}{spec.name}": getattr(cls(), spec.name) for spec in fields(cls) for place in ("", f"{place_of(cls)}.")
    }
    small = {key.split(".")[-1]: value for key, value in SMALL.items() if type(known.get(key)) is type(value)}
    words = [f"{name}={value}" for name, value in small.items()]
    method = quick(cls)
    for name in trainings_of(cls):
        method = trained_by(method, name, {"epochs": 1, "steps": None, "batch_size": 8, **training})
    tree = merged(without_none(asdict(method)), override({}, (*words, *assignments)))
    method = typed(cls, tree, "method", cls.__name__)
    plain = [] if clips else [field for field in trainings_of(cls) if f"{field}.clip_norm" not in "".join(assignments)]
    return replace(method, **{field: replace(getattr(method, field), clip_norm=None) for field in plain})


def trained_by(method: Method[Any], field: str, changes: dict[str, Any]) -> Method[Any]:
    """The method with these settings of one training, but for lengths that it refuses: another one decides them."""
    others = {name: value for name, value in changes.items() if name not in ("steps", "epochs", "batch_size")}
    try:
        return replace(method, **{field: replace(getattr(method, field), **changes)})
    except ConfigError:
        return replace(method, **{field: replace(getattr(method, field), **others)})


def place_of(cls: type[Method[Any]]) -> str:
    """The name by which users call a method: its file's."""
    return cls.__module__.rpartition(".")[2]


def trainings_of(cls: type[Method[Any]]) -> list[str]:
    """The names of a method's fields that are local trainings."""
    return [spec.name for spec in fields(cls) if isinstance(getattr(cls(), spec.name), LocalTraining)]


def play(
    make: Callable[[int], Method[Any]],
    ground: Ground = Ground(),
    *,
    rounds: int = 2,
    second: bool = False,
    computing: Numerics = PLAIN,
) -> Played:
    """A run with all clients in every round.

    Args:
        make: the method of a round, counted from 1; of a round later than the first it must keep the same state.
        ground: the federation.
        rounds: how many.
        second: whether fits are carried out by the second reading.
        computing: the numerics.
    """
    counts: list[Fit] = []
    try:
        with warnings.catch_warnings(), interpreting() if second else nullcontext():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", PotluckWarning)  # for users, such as of a capacity below all levels
            method = make(1)
            capacities = OF_DEPTHWISE if place_of(type(method)).endswith("fedepth") else CAPACITIES
            federation, offer = federation_of(ground, ground.world(method), capacities, torch.get_default_dtype())
            check_needs(method.needs(), type(method).__name__, offer)
            store = ClientStore()
            host = (Reference if second else ClientRuntime)(method, federation, 0, computing)
            watch(host, counts)
            for number in range(rounds + 1):
                engine = Engine(make(max(number, 1)), federation, store=store, computing=computing)
                engine._host, host._method = host, engine.method
                if number == 0:
                    state = engine.start()
                else:
                    state, _ = engine.round(number, state, sorted(federation.sites))
            return result(engine, state)
    except (ConfigError, DataError) as error:
        late = "after training began" if counts else "with more than one line" if "\n" in str(error) else ""
        return Played("failed" if late else "refused", f"{late}: {error}" if late else str(error))
    except Exception as error:
        return Played("failed", " ".join(f"{type(error).__name__}: {error}".split()))


def watch(host: ClientRuntime, counts: list[Fit]) -> None:
    """Have the host note fits."""
    plain = type(host).carry_out

    def carry_out(request: Any, key: Key) -> Any:
        if isinstance(request, Fit):
            counts.append(request)
        return plain(host, request, key)

    host.carry_out = carry_out  # type: ignore[method-assign]


def result(engine: Engine, state: Any) -> Played:
    """What is left after the last round."""
    models: dict[str, Any] = {f"client {id}": engine.inference_model(state, id) for id in engine.federation.sites}
    models["global"] = engine.global_model(state)
    played = Played(state=dict(leaves(unpack(packed_state(state)), "state")))
    for whose, model in models.items():
        played.found |= {f"{whose}: {name}": t for name, t in (weights_of(model) if model else {}).items()}
    for name, tensor in {**played.found, **played.state}.items():
        if not tensor.isfinite().all():
            return Played("failed", f"{name} is not finite")
    return played


def leaves(tree: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """All tensors and numbers in a tree, by their places."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, f"{name}.{key}")
    elif isinstance(tree, list | tuple):
        for place, value in enumerate(tree):
            yield from leaves(value, f"{name}.{place}")
    elif isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, bool | int | float):
        yield name, torch.tensor(tree, dtype=torch.float64)


@contextmanager
def double() -> Iterator[None]:
    """Inside the block, everything is computed in double precision."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
