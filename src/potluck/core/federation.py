"""The federation: every client's data, model and capacity, and the server's."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Size, nn

from potluck.core.ground.errors import ConfigError, DataError, nearest
from potluck.core.ground.inputs import InputShape
from potluck.core.ground.rng import Key, isolated
from potluck.core.nets.classes import OwnClasses, OwnHead
from potluck.core.nets.modes import to_training
from potluck.core.nets.scale import FULL, Cuts, Scale, built
from potluck.core.nets.splitting import Splits
from potluck.core.nets.weights import frozen_names, parameters_of, tensors_of
from potluck.core.requests.examples import Examples
from potluck.core.tasks.named import CLASSIFICATION
from potluck.core.tasks.task import Criterion, Task

ClientId = int
Builder = Callable[..., nn.Module]


@dataclass(frozen=True)
class Site:
    """One client's data, model and capacity, which never leave it.

    Attributes:
        id: the client's stable number.
        architecture: name of its model in the federation's `architectures`.
        train: examples it trains on.
        validation: examples for model selection; may be empty.
        test: examples its model is evaluated on; may be empty.
        capacity: share of the full model it can train, above 0 and at most 1.
    """

    id: ClientId
    architecture: str
    train: Examples
    validation: Examples
    test: Examples
    capacity: float = 1.0

    def __post_init__(self) -> None:
        if self.id < 0:
            raise ValueError(f"id of a client: expected at least 0, found {self.id}")
        if not 0 < self.capacity <= 1:
            raise ValueError(f"capacity of client {self.id}: expected above 0 and at most 1, found {self.capacity}")


@dataclass(frozen=True, slots=True)
class Outline:
    """What is known of a client's site without its data.

    Attributes:
        architecture: name of its model.
        train: the number of examples that it trains on.
        validation: of those for model selection.
        test: of those that its model is evaluated on.
        capacity: share of the full model that it can train.
    """

    architecture: str
    train: int
    validation: int = 0
    test: int = 0
    capacity: float = 1.0

    @classmethod
    def of(cls, site: Site) -> "Outline":
        """That of a site whose data are there."""
        return cls(site.architecture, len(site.train), len(site.validation), len(site.test), site.capacity)


class SitesOnDemand(Mapping[ClientId, Site]):
    """Sites that are made each time they are asked for, and not kept: for more clients than memory has room for.

    Before a run one client of each architecture is looked at; the others' data are checked when they are made. What is
    known of clients without their data is one value for all, or a function of a client's number, which is asked often.

    Args:
        clients: how many there are; they are numbered from 0.
        make: a client's site, by its number alone, the same each time.
        architecture: name of a client's model.
        train: the number of examples that it trains on.
        validation: of those for model selection.
        test: of those that its model is evaluated on.
        capacity: share of the full model that it can train.
    """

    def __init__(
        self,
        clients: int,
        make: Callable[[ClientId], Site],
        *,
        architecture: str | Callable[[ClientId], str],
        train: int | Callable[[ClientId], int],
        validation: int | Callable[[ClientId], int] = 0,
        test: int | Callable[[ClientId], int] = 0,
        capacity: float | Callable[[ClientId], float] = 1.0,
    ) -> None:
        self._clients, self._make = range(clients), make
        self._known = architecture, train, validation, test, capacity

    def outline(self, client: ClientId) -> Outline:
        """What is known of a client without its data."""
        return Outline(*(known(client) if callable(known) else known for known in self._known))  # pyright: ignore[reportArgumentType]

    def __getitem__(self, client: ClientId) -> Site:
        """The client's site, made anew.

        Raises:
            KeyError: there is no such client.
            DataError: it is not what its outline says.
        """
        if client not in self._clients:
            raise KeyError(client)
        site, known = self._make(client), self.outline(client)
        if site.id != client or Outline.of(site) != known:
            found = f"found client {site.id} with {Outline.of(site)}; expected {known}"
            raise DataError(f"client {client}: its site is not what its outline says: {found}")
        return site

    def __iter__(self) -> Iterator[ClientId]:
        """All clients, in ascending order."""
        return iter(self._clients)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._clients)

    def __contains__(self, client: object) -> bool:
        """Whether there is such a client; its site is not made."""
        return client in self._clients


@dataclass(frozen=True, slots=True)
class Member:
    """What the server knows of a client without asking: its model's shapes, its capacity, its number of examples.

    Attributes:
        shapes: shape of every tensor in the model's state dict.
        parameters: which of those names are trained.
        examples: number of training examples.
        frozen: which of those names the model's builder has frozen; they are never sent. The rest are buffers.
        head: how its outputs and those of all classes belong together; None if it has outputs for all.
    """

    id: ClientId
    architecture: str
    capacity: float
    shapes: Mapping[str, Size]
    parameters: frozenset[str]
    examples: int
    frozen: frozenset[str] = frozenset()
    head: OwnHead | None = None

    @property
    def base(self) -> str:
        """The name of its architecture with outputs for all classes."""
        return self.architecture if self.head is None else self.head.base

    @property
    def buffers(self) -> frozenset[str]:
        """Names of the tensors that are sent but not trained."""
        return frozenset(self.shapes) - self.parameters - self.frozen


Roster = Mapping[ClientId, Member]


_THE_TASKS_OWN = cast(Criterion, None)  # of a federation whose criterion was not given


@dataclass(frozen=True)
class Federation:
    """The clients, their models, and what the server has.

    Attributes:
        sites: the clients by id; of very many, `SitesOnDemand`.
        architectures: named builders; each call makes a new module. A builder that takes `scale` makes
            narrower nets, whose tensors are leading slices of the full net's, or shallower ones; narrower nets of
            other builders are cut out of the full one, see `potluck.core.nets.slicing`. Parameters that a
            builder leaves without `requires_grad` are frozen, and so are layers that it leaves in evaluation mode
            inside a net in training mode: BatchNorm keeps its statistics, Dropout stays off.
        server_architecture: what `server.build()` makes: the common or global model.
        task: the meaning of outputs and targets, the loss and the metrics.
        criterion: (outputs, targets) to a scalar, which training minimises; the task's own unless another is given.
        public: examples that all clients and the server have; unlabelled unless `public_labels`.
        public_labels: whether the targets of the public examples are the task's; otherwise nothing reads them.
        test: the common test set.
        num_classes: the width of an output: of a classification its classes, of other tasks labels, numbers, tokens.

    Raises:
        ConfigError: a client or the server has an architecture that is not there, or `num_classes` is no number.
    """

    sites: Mapping[ClientId, Site]
    architectures: Mapping[str, Builder]
    server_architecture: str
    num_classes: int
    criterion: Criterion = _THE_TASKS_OWN
    public: Examples | None = None
    test: Examples | None = None
    task: Task = CLASSIFICATION
    public_labels: bool = False

    def __post_init__(self) -> None:
        if self.criterion is _THE_TASKS_OWN:
            object.__setattr__(self, "criterion", self.task.criterion)
        if isinstance(self.num_classes, bool) or not isinstance(self.num_classes, int) or self.num_classes < 1:
            raise ConfigError(f"num_classes: expected a whole number of at least 1, found {self.num_classes!r}")
        for key, site in self.looked_at.items():
            if key != site.id:
                raise ConfigError(f"sites: found a site with the id {site.id} under {key!r}; expected its id")
            self._check_named(site.architecture, f"client {key}: architecture")
        self._check_named(self.server_architecture, "server_architecture")
        for name, builder in self.architectures.items():
            if isinstance(builder, nn.Module) or not callable(builder):
                raise ConfigError(
                    f"architectures: {name}: found {type(builder).__name__}; expected a class or function that builds a"
                    " network, since every client has its own"
                )

    def _check_named(self, architecture: str, where: str) -> None:
        """Check that an architecture is there.

        Raises:
            ConfigError: it is not.
        """
        if architecture not in self.architectures:
            names = ", ".join(nearest(str(architecture), map(str, self.architectures))) or "none"
            raise ConfigError(
                f"{where}: found {architecture!r}; expected one of the federation's architectures: {names}"
            )

    @cached_property
    def looked_at(self) -> Mapping[ClientId, Site]:
        """The sites whose data are looked at before a run: all; of those made on demand one of each architecture."""
        if not isinstance(self.sites, SitesOnDemand):
            return self.sites
        first: dict[str, ClientId] = {}
        for client in self.sites:
            first.setdefault(self.sites.outline(client).architecture, client)
        return {client: self.sites[client] for client in first.values()}

    def outline(self, client: ClientId) -> Outline:
        """What is known of a client without its data.

        Raises:
            KeyError: there is no such client.
        """
        if not isinstance(self.sites, SitesOnDemand):
            return Outline.of(self.sites[client])
        if client not in self.sites:
            raise KeyError(client)
        return self.sites.outline(client)

    def build(self, architecture: str | None, key: Key, scale: Scale = FULL) -> nn.Module:
        """A new module, initialised by draws from `key` alone; None for the server's architecture.

        Raises:
            ConfigError: the architecture has no net of this scale.
        """
        name = architecture or self.server_architecture
        with isolated(key):
            return to_training(built(self.architectures[name], scale, name, self.cuts, self.splits))

    def head_of(self, architecture: str) -> OwnHead | None:
        """How an architecture's outputs and those of all classes belong together; None if it has outputs for all."""
        builder = self.architectures[architecture]
        return builder if isinstance(builder, OwnHead) else None

    def base_of(self, architecture: str) -> str:
        """The name of an architecture with outputs for all classes."""
        head = self.head_of(architecture)
        return architecture if head is None else head.base

    def classes_of(self, client: ClientId) -> OwnClasses | None:
        """The classes of a client's outputs; None if it has all."""
        head = self.head_of(self.outline(client).architecture)
        return None if head is None else head.classes

    def common_test(self, client: ClientId) -> Examples | None:
        """The examples of the common test set that a client could know: those of the classes of its outputs."""
        if self.test is None or (own := self.classes_of(client)) is None:
            return self.test
        if own.numbers not in self._tests:
            known = torch.isin(self.test.labels, torch.tensor(own.numbers))
            self._tests[own.numbers] = self.test.take(known.nonzero().flatten())
        return self._tests[own.numbers]

    @cached_property
    def _tests(self) -> dict[tuple[int, ...], Examples]:
        """Parts of the common test set, by the classes that they hold."""
        return {}

    @cached_property
    def input_shape(self) -> InputShape:
        """Shape of one prepared input, or of each of the named ones; empty where no client's data are known."""
        return next((site.train.input_shape for site in self.sites.values()), ())

    @cached_property
    def real_inputs(self) -> bool:
        """Whether prepared inputs are real numbers, the public ones too, as far as they are here."""
        return all(examples.has_real_inputs for examples in self._known_inputs(self.public))

    @cached_property
    def cuts(self) -> Cuts:
        """How nets are made narrower whose builders take no `scale`."""
        return Cuts(self.input_shape)

    @cached_property
    def splits(self) -> Splits:
        """How nets are split that do not say so themselves."""
        known = self._known_inputs(self.public, self.test)
        return Splits(self.input_shape, self.real_inputs if known else None)

    def _known_inputs(self, *common: Examples | None) -> list[Examples]:
        """The first client's examples and these, as far as they are on this machine."""
        first = [site.train for site in self.looked_at.values()][:1]
        return [*first, *(examples for examples in common if examples is not None)]

    @cached_property
    def roster(self) -> Roster:
        """The members that the server sees, by id in ascending order."""
        plans: dict[str, Callable[[ClientId, Outline], Member]] = {}
        members: dict[ClientId, Member] = {}
        for client in sorted(self.sites):
            outline = self.outline(client)
            if outline.architecture not in plans:
                plans[outline.architecture] = self._plan(outline.architecture)
            members[client] = plans[outline.architecture](client, outline)
        return members

    def _plan(self, architecture: str) -> Callable[[ClientId, Outline], Member]:
        """What makes members with this architecture."""
        net = self.build(architecture, Key((architecture,)))
        shapes = {name: tensor.shape for name, tensor in tensors_of(net).items()}
        trained, frozen, head = frozenset(parameters_of(net)), frozen_names(net), self.head_of(architecture)
        return lambda client, known: Member(
            client, architecture, known.capacity, shapes, trained, known.train, frozen, head
        )


def empty_like(examples: Examples) -> Examples:
    """No examples, with the same shapes and types."""
    return examples.take(torch.empty(0, dtype=torch.int64))
