"""Serves an experiment whose clients are nodes, with the same engine, records and checkpoints as in one process."""

import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from flwr.serverapp import Grid
from torch import nn

from potluck import methods
from potluck.core.federation import Builder, ClientId, Federation, Member, Roster, Site
from potluck.core.ground.digest import digest
from potluck.core.ground.discovery import module_names, named_file
from potluck.core.ground.errors import CheckpointError, ConfigError
from potluck.core.ground.inputs import InputShape, shown
from potluck.core.ground.rng import Key
from potluck.core.nets.classes import OwnClasses, OwnHead
from potluck.core.requests.examples import Examples
from potluck.data.datasets import common_reading
from potluck.data.federate import MatchedClasses
from potluck.engine.disk.files import write_atomically
from potluck.engine.executors.choice import ChosenExecutor
from potluck.experiment.federation.assemble import (
    Assembly,
    assemble_server,
    common_classes,
    own_heads,
    public_digest,
)
from potluck.experiment.federation.own_classes import architecture_with
from potluck.experiment.results.result import Result
from potluck.experiment.running.asynchrony import check_asynchronous_nodes
from potluck.experiment.running.execute import execute, holding, prepare
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import Experiment, ModelSpec, RunConfig
from potluck.experiment.watching.observers import Observer
from potluck.flower import LARGEST_REPLY
from potluck.flower.server.elsewhere import KeptElsewhere
from potluck.flower.server.grid import GridExecutor
from potluck.flower.server.nodes import (
    Nodes,
    NodesMissing,
    Silent,
    greet,
    registered_name,
    wait_for_nodes,
)
from potluck.flower.server.sums import AddingOverNodes
from potluck.flower.server.telling import Telling, tell_nodes
from potluck.flower.wire.classes import told
from potluck.flower.wire.introduction import Introduction, Network
from potluck.flower.wire.software import Software, unknown_software
from potluck.models.initial import file_digest
from potluck.records import CHECKPOINT, LAST

_OLD_SERVER_ENDS_WITHIN = 30.0  # seconds; the app of a server that was killed ends a moment after it
NODES = "nodes.json"
"""The file in a run's folder that says which node is which client."""


def serve(
    grid: Grid,
    tree: Mapping[str, Any],
    folder: Path,
    *,
    observers: Sequence[Observer] = (),
    say: Callable[[str], None] = print,
    refuse: Callable[[str, str], None] = lambda name, why: None,
    largest: int = LARGEST_REPLY,
    allow_versions: bool = False,
) -> Result:
    """Run an experiment with the nodes of a grid, from its start or its last checkpoint.

    Args:
        grid: Flower's.
        tree: the experiment's tables.
        folder: the run's folder.
        observers: are told how the run goes.
        say: called with what the run waits for, and other lines that an operator should see.
        refuse: called with the name of a node that takes no part in the run, and why.
        largest: the most bytes of a node's reply, where the method sets no limit.
        allow_versions: whether nodes with another version of Potluck or another copy of the method may take part.

    Raises:
        NodesMissing: too few nodes joined in time, or so many cannot take part that too few are left.
        ClientFailure: the run ended early; the last checkpoint stands.
        CheckpointError: the folder cannot be gone on with.
        ConfigError: the experiment cannot be run with these nodes, or its rounds cannot be asynchronous.
        DataError: the server's data cannot be read, or the names of their classes cannot be told.
    """
    experiment = resolve(dict(tree), "the experiment")
    matched = common_classes(experiment)
    folder.mkdir(parents=True, exist_ok=True)
    with holding(folder, _OLD_SERVER_ENDS_WITHIN), _saying(say):
        refused: dict[str, str] = {}
        _check_whole(folder)
        met = _again(grid, folder / NODES, experiment.run, say) if (folder / NODES).is_file() else None
        name = met.run if met else f"{folder.name}-{secrets.token_hex(4)}"  # unique if the folder is reused
        base = assemble_server(experiment, matched)
        if met is None and experiment.run.rounds_close.asynchronous:
            check_asynchronous_nodes(experiment, base)
        software = {**Software.with_method(experiment.method).entries(), "others": allow_versions}
        setting = {"experiment": _told(experiment, base), "run": name, "code": _code_of(experiment)}
        common = {"task": matched.common.task.name, "public": public_digest(base.public), "software": software}
        header = {**setting, "classes": told(matched), **common}
        if met is None:
            meeting = _Meeting(
                grid, experiment, base, matched, header, say, refused, refuse=refuse, allow_versions=allow_versions
            )
            met = meeting.first()
            write_atomically(folder / NODES, met.to_json())
        nodes = Nodes(grid, met.names)
        assembly = replace(remote_assembly(experiment, base, matched, met.introductions), names=met.spoken_names)
        executor = GridExecutor(nodes, header, experiment.run.rounds_close, largest=largest)
        adding = None if experiment.run.secure_sums is None else met.adding(executor, folder)
        choice = ChosenExecutor(executor, "flower", len(met.names), "clients are Flower's nodes")
        run = prepare(experiment, assembly, folder, choice, KeptElsewhere(), adding)
        rule = experiment.run.rounds_close.set_aside
        telling = Telling(grid, met.names, name, rule.words if rule else "", refused)
        return execute(run, experiment, folder, telling, *observers)[0]


def _check_whole(folder: Path) -> None:
    """Check that a run which has begun says which node is which client.

    Raises:
        CheckpointError: it does not, so that its nodes would be met again, in another order perhaps.
    """
    if (folder / CHECKPOINT / LAST).is_file() and not (folder / NODES).is_file():
        raise CheckpointError(
            f"{folder / NODES} is missing, which says which node is which client; put it back, or copy the folder again"
        )


@dataclass(frozen=True)
class _Met:
    """The nodes that a run began with.

    Attributes:
        run: the run's name at the nodes.
        names: by client, the node's name.
        introductions: by client, the node's introduction.
    """

    run: str
    names: Mapping[ClientId, str]
    introductions: Mapping[ClientId, Introduction]

    @property
    def spoken_names(self) -> tuple[str, ...]:
        """The names in the order of clients; none if nodes have only numbers, as those without keys."""
        names = tuple(name for _, name in sorted(self.names.items()))
        return () if all(name.isdecimal() for name in names) else names

    def adding(self, executor: GridExecutor, folder: Path) -> AddingOverNodes:
        """What carries out secure sums with these nodes."""
        keys = {client: bytes.fromhex(of.sums_key) for client, of in self.introductions.items() if of.sums_key}
        return AddingOverNodes(executor, self.run, keys, folder)

    def to_json(self) -> bytes:
        """The JSON for the run's folder."""
        clients = {
            id: {"node": name, "introduction": self.introductions[id].header()} for id, name in self.names.items()
        }
        return json.dumps({"run": self.run, "clients": clients}, indent=1).encode()

    @classmethod
    def read(cls, place: Path) -> "_Met":
        """Read what `to_json` wrote.

        Raises:
            CheckpointError: the file is damaged, or of another version.
        """
        try:
            found = json.loads(place.read_bytes())
            clients = {int(id): client for id, client in found["clients"].items()}
            return cls(
                str(found["run"]),
                {id: str(client["node"]) for id, client in clients.items()},
                {id: Introduction.read(client["introduction"]) for id, client in clients.items()},
            )
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{place} cannot be read: {error}; restore it, or start a new run") from error


def names_in(folder: Path) -> Mapping[ClientId, str]:
    """By client the name of its node, of a run in this folder whose nodes have met; empty before.

    Raises:
        CheckpointError: the file that says so is damaged, or of another version.
    """
    place = folder / NODES
    return _Met.read(place).names if place.is_file() else {}


@dataclass
class _Meeting:
    """The meeting before a run: nodes introduce themselves; one with an invalid introduction takes no part.

    Attributes:
        base: the server's assembly, without clients.
        matched: the federation's classes.
        header: the header for every node.
        refused: nodes that take no part, and the reasons.
        met: by client, the nodes that take part, and their introductions.
        places: by node, which client it was asked to be.
        refuse: called with each node that takes no part, and the reason.
        allow_versions: whether nodes with other software may take part.
    """

    grid: Grid
    experiment: Experiment
    base: Federation
    matched: MatchedClasses
    header: Mapping[str, Any]
    say: Callable[[str], None]
    refused: dict[str, str] = field(default_factory=dict[str, str])
    met: dict[ClientId, tuple[str, Introduction]] = field(default_factory=dict[ClientId, tuple[str, Introduction]])
    places: dict[str, ClientId] = field(default_factory=dict[str, ClientId])
    refuse: Callable[[str, str], None] = lambda name, why: None
    allow_versions: bool = False

    def first(self) -> _Met:
        """Choose the nodes: others online replace refused ones; a quorum is enough if failures are tolerated.

        Raises:
            NodesMissing: too few take part.
        """
        run, count = self.experiment.run, self.experiment.federation.clients
        needed, until = run.needed(count), time.monotonic() + (run.rounds_close.patience_s or math.inf)
        while len(self.met) < needed:
            silent = self._meet(wait_for_nodes(self.grid, count, needed, run.rounds_close, self.say), count, needed)
            if len(self.met) < needed and (not silent or time.monotonic() >= until):
                reasons = "; ".join(f"node {name}: {why}" for name, why in {**self.refused, **silent}.items())
                raise NodesMissing(f"{len(self.met)} of {count} nodes take part, and {needed} are needed; {reasons}")
        if len(self.met) < count:
            self.say(f"{len(self.met)} of {count} nodes take part; continuing without the others")
        self._tell_of_numbers()
        names = {client: name for client, (name, _) in sorted(self.met.items())}
        return _Met(str(self.header["run"]), names, {client: self.met[client][1] for client in names})

    def _tell_of_numbers(self) -> None:
        """Say at which nodes classes are matched by number, since no names can show that they mean the same."""
        nodes = [name for _, (name, found) in sorted(self.met.items()) if found.classes is None]
        common, first = self.matched.common, next(iter(self.matched.classes), "")
        if nodes:
            self.say(
                f"classes are matched by number at {', '.join(nodes)}, whose data do not name them: 0 there is 0 in"
                f" {common.name}{'' if common.classes is None else f', {first}'}, and so on"
            )

    def _meet(self, here: list[str], count: int, needed: int) -> dict[str, str]:
        """Ask nodes until there are enough or none is left; return why some said nothing, who may be asked again."""
        silent: dict[str, str] = {}
        while asked := self._places({*here} - self.refused.keys() - silent.keys(), count):
            close, least = self.experiment.run.rounds_close, needed - len(self.met)
            for client, found in greet(Nodes(self.grid, asked), self.header, least, close).items():
                name, why = asked[client], self._unfit(found)
                if why is None and isinstance(found, Introduction):
                    self.met[client] = name, found
                    if (other := self._other_software(found)) is not None:
                        self.say(f"node {name} takes part all the same: {other}")
                    continue
                aside = silent if isinstance(found, Silent) else self.refused
                aside[name] = str(why)
                self.say(f"node {name} takes no part: {why}")
                if aside is self.refused:
                    self.refuse(name, str(why))
                    tell_nodes(self.grid, {name: str(why)}, str(self.header["run"]))
            here = [registered_name(node) for node in self.grid.get_nodes()]
        return silent

    def _places(self, here: set[str], count: int) -> dict[ClientId, str]:
        """Which client each node is to be; a node stays what it was asked to be, since it remembers that."""
        new = sorted(here - {name for name, _ in self.met.values()})
        free = [client for client in range(count) if client not in self.met]
        places = {self.places[name]: name for name in new if self.places.get(name) in free}
        left = [client for client in free if client not in places]
        places |= dict(zip(left, [name for name in new if name not in self.places], strict=False))
        self.places |= {name: client for client, name in places.items()}
        return dict(sorted(places.items()))

    def _unfit(self, found: Introduction | str) -> str | None:
        """Why a node can take no part; None if it can."""
        if isinstance(found, str):
            return found
        if not self.allow_versions and (other := self._other_software(found)) is not None:
            return other
        common, width = self.matched.common, self.matched.width
        what = "classes" if common.task.has_classes else "outputs"
        if (found.input_shape, found.num_classes) != (common.input_shape, width):
            return (
                f"it has inputs of shape {shown(found.input_shape)} and {found.num_classes} {what}; expected"
                f" {shown(common.input_shape)} and {width}, as in {common.name}"
            )
        if self.experiment.run.secure_sums is not None and (why := self._unfit_key(found)) is not None:
            return why
        if strange := sorted({*(found.classes or ())} - {*self.matched.classes}):
            return self.matched.lacks(strange[0], "its data")
        if found.outputs is not None and self.experiment.federation.classes != "own":
            return "its network has outputs for classes of its own; expected all, or federation.classes = 'own'"
        return self._unfit_model(found)

    def _unfit_key(self, found: Introduction) -> str | None:
        """Why a node's key for secure sums is none; None if it is one."""
        if found.sums_key is None:
            return "it has no key for secure sums: its Potluck has none, or it is a program of its own"
        if any(other.sums_key == found.sums_key for _, other in self.met.values()):
            return "its key for secure sums is another node's: each needs a folder --state of its own"
        return None

    def _other_software(self, found: Introduction) -> str | None:
        """How a node's software differs; None if it does not, or is its owner's, as where there is no network."""
        ours = Software.with_method(self.experiment.method)
        if found.software is None:
            return unknown_software(ours) if found.network.shapes else None
        return found.software.difference(ours)

    def _unfit_model(self, found: Introduction) -> str | None:
        """Why a client with such a model can take no part; None if it can."""
        method, name = self.experiment.method, self.experiment.method_name
        if method.needs_networks and not found.network.shapes:
            return (
                f"its model {found.architecture!r} is no network of PyTorch's, and clients of {name} need one; nodes"
                f" with other models take part in {', '.join(_taking_any_model())}"
            )
        if found.architecture in self.base.architectures:
            known = self._networks.named(found)
            return _difference(known, self._networks.network(known), found.network)
        if method.builds_clients_models:
            return (
                f"its network {found.architecture!r} is not in the experiment, and with {name} the server builds every"
                " client's network; add it to federation.models, or use a method that does not, such as fedmd"
            )
        return None

    @cached_property
    def _networks(self) -> "_Networks":
        return _Networks(self.experiment, self.base, self.matched)


class _Networks:
    """The experiment's networks, and those of nodes with outputs for classes of their own.

    Args:
        experiment: the server's.
        base: the server's assembly, without clients.
        matched: the federation's classes.
    """

    def __init__(self, experiment: Experiment, base: Federation, matched: MatchedClasses) -> None:
        self._base = base
        self._method = experiment.method_name
        self._specs = {spec.architecture: spec for spec in experiment.named_models}
        self._heads = own_heads(experiment, matched.width, matched.common.input_shape)
        self._known = dict[str, Network]()

    def named(self, found: Introduction) -> str:
        """The name of a node's network, whose builder is among `builders` from now on."""
        if found.outputs is None:
            return found.architecture
        if (spec := self._specs.get(found.architecture)) is not None:
            return self._heads.named(spec, found.outputs)
        own = OwnClasses(found.outputs, self._base.num_classes)
        name = architecture_with(found.architecture, own)
        unknown = partial(_unknown, found.architecture, self._method)
        self._heads.builders.setdefault(name, OwnHead(unknown, found.architecture, own, {}))
        return name

    def network(self, name: str) -> Network:
        """The description of a network of the experiment's; each is built once."""
        if name not in self._known:
            ours = replace(self._base, architectures=self.builders)
            self._known[name] = Network.of(ours.build(name, Key((name,))))
        return self._known[name]

    @property
    def builders(self) -> dict[str, Builder]:
        """By name, those of the experiment, and of networks that have been named."""
        return {**self._base.architectures, **self._heads.builders}


def _taking_any_model() -> list[str]:
    """Potluck's own methods whose clients may have models that are no networks."""
    return [name for name in module_names(methods.__name__) if not methods.get_method(name).needs_networks]


def _difference(name: str, ours: Network, theirs: Network) -> str | None:
    """How a network differs from the experiment's of the same name; None if it does not."""
    for what in ("shapes", "dtypes"):
        expected, found = getattr(ours, what), getattr(theirs, what)
        for tensor in sorted(expected.keys() | found.keys()):
            if expected.get(tensor) != found.get(tensor):
                here, there = (str(side.get(tensor, "nothing")) for side in (expected, found))
                return f"its {name} is not the experiment's: {tensor} is {there}; expected {here}"
    if ours.parameters != theirs.parameters:
        return f"its {name} is not the experiment's: it trains other tensors"
    return None


def _told(experiment: Experiment, base: Federation) -> dict[str, Any]:
    """The experiment's tables for nodes.

    The common model is there by name, since a node need not know all models to find it; how tables are read, since a
    node has not the common data; and files of initial weights by their digests, by which a node finds its owner's copy.
    Clients' budgets are not there: what a device can do is no other's business.
    """
    tree, config = experiment.tree(), experiment.federation
    tree["run"].pop("budgets", None)
    if experiment.initial_weights():
        tree["federation"]["models"] = [_by_digest(spec) for spec in experiment.models]
    common = next(spec for spec in experiment.named_models if spec.architecture == base.server_architecture)
    tree["federation"]["server_model"] = _by_digest(common)
    if config.columns and (reading := common_reading(config.dataset, experiment.task, config.columns)):
        here_alone = ("by", "tokenizer")  # whose rows these are, and a file, whose content is told
        of_any = {key: value for key, value in tree["federation"]["columns"].items() if key not in here_alone}
        tree["federation"]["columns"] = {**of_any, "known": reading.table()}
    return tree


def _by_digest(spec: ModelSpec) -> dict[str, Any]:
    """A model's table that names no file of initial weights."""
    return {**spec.table(), **({} if spec.weights is None else {"weights": file_digest(spec.weights)})}


def _code_of(experiment: Experiment) -> str | None:
    """A digest of the method's file, which nodes compare with theirs; None for an installed method."""
    found = named_file(experiment.method_name)
    return digest(found[0].read_bytes()) if found else None


def _again(grid: Grid, place: Path, run: RunConfig, say: Callable[[str], None]) -> _Met:
    """Those that a run began with; of them a quorum is there."""
    met = _Met.read(place)
    wanted = set(met.names.values())
    here = wait_for_nodes(grid, wanted, run.needed(len(wanted)), run.rounds_close, say)
    if away := sorted(wanted - set(here)):
        say(f"continuing without {', '.join(away)}, which may come later")
    return met


class _Saying(logging.Handler):
    """Passes on the log's lines that are meant for the terminal, which is another process's."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        if getattr(record, "on_screen", False):
            self._say(record.getMessage())


@contextmanager
def _saying(say: Callable[[str], None]) -> Generator[None]:
    handler = _Saying(say)
    logging.getLogger("potluck").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("potluck").removeHandler(handler)


@dataclass(frozen=True)
class RemoteFederation(Federation):
    """A federation whose clients' data and models are on other machines, known by their introductions.

    Attributes:
        members: the clients, by their introductions.
        shape: the shape of one prepared input.
    """

    members: Mapping[ClientId, Member] = field(default_factory=dict[ClientId, Member])
    shape: InputShape = ()

    @cached_property
    def input_shape(self) -> InputShape:
        """Shape of one prepared input, or of each of the named ones."""
        return self.shape

    @cached_property
    def roster(self) -> Roster:
        """The members, by id in ascending order."""
        return dict(sorted(self.members.items()))


def remote_assembly(
    experiment: Experiment, base: Federation, matched: MatchedClasses, introductions: Mapping[ClientId, Introduction]
) -> Assembly:
    """The federation of clients that introduced themselves.

    Args:
        experiment: the server's.
        base: the server's assembly, without clients.
        matched: the federation's classes.
        introductions: the clients' introductions.
    """
    networks = _Networks(experiment, base, matched)
    names = {client: networks.named(of) for client, of in introductions.items()}
    architectures = networks.builders
    for name in names.values():
        architectures.setdefault(name, partial(_unknown, name, experiment.method_name))
    heads = {name: builder for name, builder in architectures.items() if isinstance(builder, OwnHead)}
    members = {id: of.member(id, names[id], heads.get(names[id])) for id, of in introductions.items()}
    federation = RemoteFederation(
        sites={client: _elsewhere(members[client], of) for client, of in introductions.items()},
        architectures=architectures,
        server_architecture=base.server_architecture,
        num_classes=base.num_classes,
        public=base.public,
        public_labels=base.public_labels,
        test=base.test,
        task=base.task,
        members=members,
        shape=matched.common.input_shape,
    )
    said = {str(client): of.header() for client, of in introductions.items()}
    facts = digest(json.dumps(said, sort_keys=True).encode())
    weights = experiment.initial_weights()
    return Assembly(federation, facts, facts, matched.classes, here=False, initial_weights=weights)


def _elsewhere(member: Member, of: Introduction) -> Site:
    """A client's site as the server sees it: placeholders for its number of examples."""
    train, validation, test = (
        Examples(torch.empty(count, 0), torch.empty(count, 0)) for count in (of.train, of.validation, of.test)
    )
    return Site(member.id, member.architecture, train, validation, test, member.capacity)


def _unknown(architecture: str, method: str, **options: float) -> nn.Module:
    """A builder that refuses a node's own network; methods with `builds_clients_models = False` never call it."""
    raise ConfigError(
        f"{method} builds a client's network {architecture!r} on the server, which builds only those of its experiment;"
        " add it to federation.models"
    )
