"""The server's side: an experiment whose clients are nodes, played by the same engine, records and checkpoints."""

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from flwr.serverapp import Grid
from torch import Size, nn

from potluck.core.digest import digest
from potluck.core.errors import ConfigError
from potluck.core.examples import Examples
from potluck.core.federation import Builder, ClientId, Federation, Member, Roster, Site
from potluck.engines.executors.choice import Choice
from potluck.engines.files import write_atomically
from potluck.experiment.assemble import Assembly, assemble_server, builder_of
from potluck.experiment.config import Experiment, ModelSpec, resolve
from potluck.experiment.play import holding, play, prepare
from potluck.experiment.run import Result, Watcher
from potluck.flower.elsewhere import KeptElsewhere
from potluck.flower.grid import GridExecutor
from potluck.flower.nodes import Nodes, NodesMissing, greet, name_of, wait_for_nodes

_OLD_SERVER_ENDS_WITHIN = 90.0  # seconds; Flower's program for it outlives a SuperLink that was killed by that much
NODES = "nodes.json"
"""In a run's folder: which node is which client."""


def serve(
    grid: Grid,
    tree: Mapping[str, Any],
    folder: Path,
    *,
    timeout: float,
    patience: float,
    watch: Watcher = lambda record: None,
    say: Callable[[str], None] = print,
    words: Mapping[str, Any] | None = None,
) -> Result:
    """Play an experiment with the nodes of a grid, from its start or its last checkpoint.

    Args:
        grid: Flower's.
        tree: the experiment's tables.
        folder: of the run.
        timeout: seconds until a job that is not answered counts as failed.
        patience: seconds to wait for nodes to come.
        watch: called after each round.
        say: told how the waiting goes.
        words: for the nodes, with every message.

    Raises:
        NodesMissing: too few nodes came, or one cannot take part.
        ConfigError: the experiment cannot be played with these nodes.
    """
    experiment = resolve(dict(tree), "the experiment")
    folder.mkdir(parents=True, exist_ok=True)
    with holding(folder, _OLD_SERVER_ENDS_WITHIN):
        met = _again(grid, folder / NODES, patience, say) if (folder / NODES).is_file() else None
        name = met.run if met else f"{folder.name}-{secrets.token_hex(4)}"  # another run in this folder is another one
        words = {**(words or {}), "experiment": experiment.tree(), "run": name}
        if met is None:
            met = _first(grid, experiment.federation.clients, words, patience, timeout, say)
            write_atomically(folder / NODES, met.to_json())
        nodes = Nodes(grid, met.names)
        assembly = remote_assembly(experiment, met.introductions)
        choice = Choice(GridExecutor(nodes, words, timeout), "flower", len(met.names), "clients are Flower's nodes")
        run = prepare(experiment, assembly, folder, choice, KeptElsewhere())
        return play(run, experiment, folder, watch)[0]


@dataclass(frozen=True)
class _Met:
    """Which nodes a run began with.

    Attributes:
        run: its name at the nodes.
        names: of the nodes, by client.
        introductions: theirs, by client.
    """

    run: str
    names: Mapping[ClientId, str]
    introductions: Mapping[ClientId, Mapping[str, Any]]

    def to_json(self) -> bytes:
        """For the run's folder."""
        clients = {id: {"node": name, "introduction": self.introductions[id]} for id, name in self.names.items()}
        return json.dumps({"run": self.run, "clients": clients}, indent=1).encode()

    @classmethod
    def from_json(cls, content: bytes) -> "_Met":
        """What `to_json` wrote."""
        found = json.loads(content)
        clients = {int(id): client for id, client in found["clients"].items()}
        return cls(
            found["run"],
            {id: client["node"] for id, client in clients.items()},
            {id: client["introduction"] for id, client in clients.items()},
        )


def _first(
    grid: Grid, count: int, words: Mapping[str, Any], patience: float, timeout: float, say: Callable[[str], None]
) -> _Met:
    """The first nodes to come, who introduce themselves once for all."""
    nodes = Nodes(grid, dict(enumerate(wait_for_nodes(grid, count, patience, say))))
    return _Met(str(words["run"]), nodes.names, greet(nodes, words, timeout))


def _again(grid: Grid, place: Path, patience: float, say: Callable[[str], None]) -> _Met:
    """Those that the run began with; who does not come while there is patience will be missed round by round."""
    met = _Met.from_json(place.read_bytes())
    wanted = set(met.names.values())
    try:
        wait_for_nodes(grid, wanted, patience, say)
    except NodesMissing as error:
        if not wanted & {name_of(node) for node in grid.get_nodes()}:
            raise
        say(f"{error}; going on without the others")
    return met


@dataclass(frozen=True)
class RemoteFederation(Federation):
    """A federation whose clients' data and models are elsewhere; of each the server knows its introduction.

    Attributes:
        members: the clients as they introduced themselves.
        shape: of one prepared input.
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


def remote_assembly(experiment: Experiment, introductions: Mapping[ClientId, Mapping[str, Any]]) -> Assembly:
    """The federation of clients who introduced themselves.

    Raises:
        ConfigError: they do not have one task in common.
    """
    shapes = {client: tuple(of["input_shape"]) for client, of in introductions.items()}
    classes = {client: int(of["num_classes"]) for client, of in introductions.items()}
    for what, found in (("inputs of shape", shapes), ("classes", classes)):
        if len(set(found.values())) > 1:
            raise ConfigError(f"nodes disagree on {what}: {found}; expected one task")
    input_shape, num_classes = next(iter(shapes.values())), next(iter(classes.values()))
    base = assemble_server(experiment)
    members = {client: _member(client, of) for client, of in introductions.items()}
    architectures: dict[str, Builder] = dict(base.architectures)
    for client, of in introductions.items():
        architectures.setdefault(members[client].architecture, _builder(of["model"], num_classes, input_shape))
    federation = RemoteFederation(
        sites={client: _elsewhere(members[client], of) for client, of in introductions.items()},
        architectures=architectures,
        server_architecture=base.server_architecture,
        num_classes=num_classes,
        public=base.public,
        test=base.test,
        members=members,
        shape=input_shape,
    )
    facts = digest(json.dumps({str(client): dict(of) for client, of in introductions.items()}, sort_keys=True).encode())
    return Assembly(federation, facts, facts)


def _member(client: ClientId, of: Mapping[str, Any]) -> Member:
    try:
        return Member(
            client,
            str(of["architecture"]),
            float(of["capacity"]),
            {name: Size(shape) for name, shape in of["shapes"].items()},
            frozenset(of["parameters"]),
            int(of["train"]),
        )
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"client {client} introduced itself wrongly: {error!r}") from error


def _elsewhere(member: Member, of: Mapping[str, Any]) -> Site:
    """A client's place as it looks from here: as many examples, nothing in them."""
    train, validation, test = (
        Examples(torch.empty(count, 0), torch.empty(count, 0)) for count in (of["train"], of["validation"], of["test"])
    )
    return Site(member.id, member.architecture, train, validation, test, member.capacity)


def _builder(model: Mapping[str, Any], num_classes: int, input_shape: tuple[int, ...]) -> Builder:
    """Of a node's own model, if this machine has it as well; methods that do not build it do without."""

    def build(**options: float) -> nn.Module:
        try:
            return builder_of(ModelSpec(model["name"], model["options"]), num_classes, input_shape)(**options)
        except ConfigError as error:
            raise ConfigError(f"the method needs a node's model on the server: {error}") from error

    return build
