"""Serves an experiment whose clients are nodes, with the same engine, records and checkpoints as in one process."""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from flwr.serverapp import Grid
from torch import nn

from potluck.core.digest import digest
from potluck.core.discovery import named_file
from potluck.core.errors import CheckpointError, ConfigError
from potluck.core.examples import Examples
from potluck.core.federation import Builder, ClientId, Federation, Member, Roster, Site
from potluck.core.rng import Key
from potluck.data.dataset import Description
from potluck.data.datasets import describe
from potluck.engine.executors.choice import Choice
from potluck.engine.files import write_atomically
from potluck.experiment.assemble import Assembly, assemble_server
from potluck.experiment.config import Experiment, resolve
from potluck.experiment.execute import execute, holding, prepare
from potluck.experiment.observers import Observer
from potluck.experiment.result import Result
from potluck.flower.elsewhere import KeptElsewhere
from potluck.flower.server.grid import GridExecutor
from potluck.flower.server.nodes import Nodes, NodesMissing, greet, name_of, tell_refused, wait_for_nodes
from potluck.flower.wire.introduction import Introduction, Network

_OLD_SERVER_ENDS_WITHIN = 90.0  # seconds that Flower's server-app process outlives a SuperLink that was killed
NODES = "nodes.json"
"""The file in a run's folder that says which node is which client."""


def serve(
    grid: Grid,
    tree: Mapping[str, Any],
    folder: Path,
    *,
    timeout: float,
    patience: float,
    observers: Sequence[Observer] = (),
    say: Callable[[str], None] = print,
) -> Result:
    """Run an experiment with the nodes of a grid, from its start or its last checkpoint.

    Args:
        grid: Flower's.
        tree: the experiment's tables.
        folder: the run's folder.
        timeout: seconds until a job that is not answered counts as failed.
        patience: seconds to wait for nodes.
        observers: are told how the run goes.
        say: called with the progress of waiting.

    Raises:
        NodesMissing: too few nodes joined, or one cannot take part.
        ConfigError: the experiment cannot be run with these nodes.
    """
    experiment = resolve(dict(tree), "the experiment")
    folder.mkdir(parents=True, exist_ok=True)
    with holding(folder, _OLD_SERVER_ENDS_WITHIN):
        met = _again(grid, folder / NODES, patience, say) if (folder / NODES).is_file() else None
        name = met.run if met else f"{folder.name}-{secrets.token_hex(4)}"  # unique if the folder is reused
        base = assemble_server(experiment)
        header = {"experiment": _told(experiment, base), "run": name, "code": _code_of(experiment)}
        if met is None:
            met = _Meeting(grid, experiment, base, header, timeout, say).first(patience)
            write_atomically(folder / NODES, met.to_json())
        nodes = Nodes(grid, met.names)
        assembly = remote_assembly(experiment, base, met.introductions)
        choice = Choice(GridExecutor(nodes, header, timeout), "flower", len(met.names), "clients are Flower's nodes")
        run = prepare(experiment, assembly, folder, choice, KeptElsewhere())
        return execute(run, experiment, folder, *observers)[0]


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


@dataclass
class _Meeting:
    """The meeting before a run: nodes introduce themselves, once; one with an invalid introduction takes no part.

    Attributes:
        base: the server's assembly, without clients.
        header: the header for every node.
        refused: nodes that take no part, and the reasons.
    """

    grid: Grid
    experiment: Experiment
    base: Federation
    header: Mapping[str, Any]
    timeout: float
    say: Callable[[str], None]
    refused: dict[str, str] = field(default_factory=dict[str, str])

    def first(self, patience: float) -> _Met:
        """Choose the nodes: refused ones are replaced if others are online; fewer take part if failures are tolerated.

        Raises:
            NodesMissing: too few take part.
        """
        count = self.experiment.federation.clients
        here = wait_for_nodes(self.grid, count, patience, self.say)
        names: dict[ClientId, str] = {}
        introductions: dict[ClientId, Introduction] = {}
        while asked := dict(zip((id for id in range(count) if id not in names), here, strict=False)):
            for client, found in greet(Nodes(self.grid, asked), self.header, self.timeout).items():
                why = self._unfit(found)
                if why is None and isinstance(found, Introduction):
                    names[client], introductions[client] = asked[client], found
                else:
                    self.refused[asked[client]] = str(why)
                    self.say(f"node {asked[client]} takes no part: {why}")
                    tell_refused(self.grid, asked[client], str(self.header["run"]), str(why))
            known = {*names.values(), *self.refused}
            here = sorted({name_of(node) for node in self.grid.get_nodes()} - known)
        if len(names) < count and not (names and self.experiment.run.tolerate_failures):
            reasons = "; ".join(f"node {name}: {why}" for name, why in self.refused.items())
            raise NodesMissing(f"{len(names)} of {count} nodes take part; {reasons}")
        if len(names) < count:
            self.say(f"{len(names)} of {count} nodes take part; continuing without the others")
        return _Met(str(self.header["run"]), dict(sorted(names.items())), introductions)

    def _unfit(self, found: Introduction | str) -> str | None:
        """Why a node can take no part; None if it can."""
        if isinstance(found, str):
            return found
        task = self._task
        what = "classes" if task.task.has_classes else "outputs"
        if (found.input_shape, found.num_classes) != (tuple(task.input_shape), task.num_classes):
            return (
                f"it has inputs of shape {found.input_shape} and {found.num_classes} {what}; expected"
                f" {tuple(task.input_shape)} and {task.num_classes}, as in {task.name}"
            )
        if (ours := self._networks.get(found.architecture)) is not None:
            return _difference(found.architecture, ours, found.network)
        if self.experiment.method.builds_clients_models:
            return (
                f"its network {found.architecture!r} is not in the experiment, and with {self.experiment.method_name}"
                " the server builds every client's network; add it to federation.models, or use a method that does not,"
                " such as fedmd"
            )
        return None

    @cached_property
    def _task(self) -> Description:
        return describe(self.experiment.federation.dataset, self.experiment.task)

    @cached_property
    def _networks(self) -> dict[str, Network]:
        """The experiment's own."""
        return {name: Network.of(self.base.build(name, Key((name,)))) for name in self.base.architectures}


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
    """The experiment's tables for nodes, with the common model by name: a node need not know all models to find it."""
    tree = experiment.tree()
    common = next(spec for spec in experiment.named_models if str(spec) == base.server_architecture)
    tree["federation"]["server_model"] = {**common.options, "name": common.name}
    return tree


def _code_of(experiment: Experiment) -> str | None:
    """A digest of the method's file, which nodes compare with theirs; None for an installed method."""
    found = named_file(experiment.method_name)
    return digest(found[0].read_bytes()) if found else None


def _again(grid: Grid, place: Path, patience: float, say: Callable[[str], None]) -> _Met:
    """Nodes that do not return within `patience` seconds count as failed in each round."""
    met = _Met.read(place)
    wanted = set(met.names.values())
    try:
        wait_for_nodes(grid, wanted, patience, say)
    except NodesMissing as error:
        if not wanted & {name_of(node) for node in grid.get_nodes()}:
            raise
        say(f"{error}; continuing without the others")
    return met


@dataclass(frozen=True)
class RemoteFederation(Federation):
    """A federation whose clients' data and models are on other machines, known by their introductions.

    Attributes:
        members: the clients, by their introductions.
        shape: the shape of one prepared input.
    """

    members: Mapping[ClientId, Member] = field(default_factory=dict[ClientId, Member])
    shape: tuple[int, ...] = ()

    @cached_property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one prepared input."""
        return self.shape

    @cached_property
    def roster(self) -> Roster:
        """The members, by id in ascending order."""
        return dict(sorted(self.members.items()))


def remote_assembly(
    experiment: Experiment, base: Federation, introductions: Mapping[ClientId, Introduction]
) -> Assembly:
    """The federation of clients that introduced themselves.

    Args:
        experiment: the server's.
        base: the server's assembly, without clients.
        introductions: the clients' introductions.
    """
    members = {client: of.member(client) for client, of in introductions.items()}
    architectures: dict[str, Builder] = dict(base.architectures)
    for member in members.values():
        architectures.setdefault(member.architecture, partial(_unknown, member, experiment.method_name))
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
        shape=tuple(describe(experiment.federation.dataset, experiment.task).input_shape),
    )
    told = {str(client): of.header() for client, of in introductions.items()}
    facts = digest(json.dumps(told, sort_keys=True).encode())
    return Assembly(federation, facts, facts)


def _elsewhere(member: Member, of: Introduction) -> Site:
    """A client's site as the server sees it: placeholders for its number of examples."""
    train, validation, test = (
        Examples(torch.empty(count, 0), torch.empty(count, 0)) for count in (of.train, of.validation, of.test)
    )
    return Site(member.id, member.architecture, train, validation, test, member.capacity)


def _unknown(member: Member, method: str, **options: float) -> nn.Module:
    """A builder that refuses a node's own network; methods with `builds_clients_models = False` never call it."""
    raise ConfigError(
        f"{method} builds the network {member.architecture!r} of client {member.id} on the server, which builds only"
        " those of its experiment; add it to federation.models"
    )
