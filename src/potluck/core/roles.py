"""The parties of a round as a method sees them: the server, the cohort, a client."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import nn

from potluck.core.federation import ClientId, Criterion, Member, Roster
from potluck.core.ground.errors import ConfigError, DivergenceError, EntryError, PotluckError
from potluck.core.ground.inputs import InputShape
from potluck.core.ground.notes import Notes
from potluck.core.ground.rng import Key
from potluck.core.ground.text import last_lines, one_line
from potluck.core.message import Message
from potluck.core.nets.classes import OwnClasses
from potluck.core.nets.scale import Scale
from potluck.core.nets.weights import Weights, learnt_of, load
from potluck.core.requests.beside_training import Gradient, NormStatistics, Predict
from potluck.core.requests.examples import Batch, Examples
from potluck.core.requests.fit import Extras, Fit, FitReport, Moments, Request

T = TypeVar("T")
FailureKind = Literal["error", "misfit", "divergence", "absence"]


@dataclass(frozen=True)
class Failure:
    """Why a client did not answer, or why its answer does not count. Its text is clean whoever wrote it.

    Attributes:
        reason: type and text of the error, one line.
        trace: the client's traceback, for the log.
        unheard: whether it may have answered nevertheless, too late or damaged in transit.
        kind: "error" in its work or in transit; "misfit" if its answer does not fit the schema; "divergence" if a loss
            or a reply is not finite; "absence" if its machine could not be reached, or was gone before the end.
        late: whether its answer came, or would have come, after the exchange had closed; or it was not asked, since it
            was still at work on what had come too late.
    """

    client: ClientId
    handler: str
    reason: str
    trace: str = ""
    unheard: bool = False
    kind: FailureKind = "error"
    late: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "handler", one_line(self.handler, 100))
        object.__setattr__(self, "reason", one_line(self.reason))
        object.__setattr__(self, "trace", last_lines(self.trace))

    def __str__(self) -> str:
        return f"client {self.client} failed in {self.handler}: {self.reason}"


class ClientFailure(PotluckError):
    """A client failed and the run does not tolerate failures."""


class Replies(Mapping[ClientId, Message]):
    """The replies of one exchange in ascending order of client id; failed clients are only in `failures`."""

    def __init__(self, answers: Mapping[ClientId, Message], failures: Mapping[ClientId, Failure]) -> None:
        self._answers = {id: answers[id] for id in sorted(answers)}
        self.failures = dict(failures)

    def __getitem__(self, client: ClientId) -> Message:
        if isinstance(client, str):  # a slip that a plain KeyError would not explain
            raise EntryError(f"replies are indexed by client id; found {client!r}: write .entries({client!r})")
        return self._answers[client]

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._answers)

    def __len__(self) -> int:
        return len(self._answers)

    def entries(self, name: str) -> list[Any]:
        """One entry of every reply, in order of client id.

        Raises:
            EntryError: an answer lacks it.
        """
        return [answer[name] for answer in self._answers.values()]


class Arriving:
    """The replies of one exchange as they arrive: pairs of client id and reply, in ascending order, each read once.

    A caller that drops each reply before it takes the next has one in memory at a time.

    Args:
        pairs: the replies.
        failures: by client; grows while replies arrive.
        together: called before the first reply is awaited if all of them will be held in memory.
    """

    def __init__(
        self,
        pairs: Iterator[tuple[ClientId, Message]],
        failures: dict[ClientId, Failure],
        together: Callable[[], None] = lambda: None,
    ) -> None:
        self.failures = failures
        self._pairs = pairs
        self._together = together

    def __iter__(self) -> Iterator[tuple[ClientId, Message]]:
        return self._pairs

    def all(self) -> Replies:
        """All remaining replies, in memory together."""
        self._together()
        return Replies(dict(self._pairs), self.failures)


class Cohort(Protocol):
    """The clients drawn for this round, and the only way to reach them."""

    @property
    def ids(self) -> Sequence[ClientId]:
        """The clients drawn for this round, ascending."""
        ...

    def ask(self, handler: Callable[..., Any], messages: Message | Mapping[ClientId, Message]) -> Replies:
        """Run an `@on_client` handler on each client that has a message, and wait for the replies.

        Args:
            handler: a bound method of the running Method, marked `@on_client`.
            messages: one for the whole cohort, or one for each client asked, who must be in the cohort.
        """
        ...

    def stream(self, handler: Callable[..., Any], messages: Message | Mapping[ClientId, Message]) -> Arriving:
        """As `ask`, but with the replies one at a time, in ascending order of client id, so that not all are in memory.

        It must be read to its end before the cohort is asked again.
        """
        ...


@dataclass(eq=False)
class Server:
    """What the server's half of a method may use.

    Attributes:
        round: number of the round, from 1; 0 before the first. Outside of rounds, that of the last one.
        roster: every client of the federation, whether drawn this round or not.
        rng: generator for this round's draws on the server.
        public: the public examples, if the federation has any; unlabelled unless `Need.PUBLIC_LABELS` is met.
        num_classes: the width of an output: of a classification, its classes.
        input_shape: shape of one prepared input, or of each of the named ones; see `fl.one_shape`.
        criterion: the task's loss.
        notes: numbers reported in this round.
    """

    roster: Roster
    rng: torch.Generator
    public: Examples | None
    num_classes: int
    input_shape: InputShape
    criterion: Criterion
    _build: Callable[..., nn.Module]
    _carry_out: Callable[[Request, Key], Any]
    _key: Key
    _module: Callable[[str, Callable[[], nn.Module]], nn.Module]
    round: int = 0
    _known: dict[Hashable, Any] = field(default_factory=dict[Hashable, Any])
    _asked: Counter[str] = field(default_factory=Counter[str], init=False)
    notes: Notes = field(default_factory=Notes, init=False)

    def members(self, ids: Iterable[ClientId]) -> list[Member]:
        """What is known of these clients, such as those of replies, in their order."""
        return [self.roster[id] for id in ids]

    def note(self, **numbers: float) -> None:
        """Report numbers under these names, for the records and the report of this round.

        Raises:
            ValueError: a name is too long or has other characters than letters, digits, `_`, `.` and `-`; a value is no
                number; or there are more than 32.
            DivergenceError: a number is NaN or infinite.
        """
        try:
            self.notes.add(numbers)
        except DivergenceError as error:
            raise DivergenceError(f"round {self.round}: the server's {error}; train more gently") from error

    def build(
        self, architecture: str | None = None, *, width: float = 1.0, depth: int | None = None, draw: str = ""
    ) -> nn.Module:
        """A new module with the run's initial weights, the same at every call and with every method.

        Args:
            architecture: None for the server's own.
            width: share of the full net's channels.
            depth: number of its blocks, counted from the input, behind the last of which the net ends in an exit; None
                for all, and the net's own head.
            draw: the name of another draw of weights. A net that learns beside a client's own one, and may be of the
                same architecture, needs one, or the two would be copies of each other.

        Raises:
            ConfigError: the architecture has no net of this width, see `Need.WIDTH_SLICES`, or its builder makes none
                of this depth; `fl.exits.leading_share` makes one of any network in stages.
        """
        return self._build(architecture, Scale(width, depth), draw)

    @property
    def objective(self) -> "Supervised":
        """The task's loss as an objective for `Fit`."""
        return Supervised(self.criterion)

    def about(self, architecture: str | None, question: Callable[[nn.Module, InputShape], T]) -> T:
        """The result of a named function of an architecture's net and its input shape; computed once in a run."""
        if (architecture, question) not in self._known:
            self._known[architecture, question] = question(self.build(architecture), self.input_shape)
        return self._known[architecture, question]

    def fit(self, fit: Fit) -> FitReport:
        """Train on the server, with the learning rate of this round, and return the report.

        Raises:
            ConfigError: the optimiser is to persist; the server keeps the method's state and nothing else. A method
                whose field is a `ServerTraining` is refused before the run.
        """
        if fit.lasts:
            raise ConfigError("persist: expected False in the server's training, whose optimisers are new every round")
        fit.in_round(self.round)
        return self._answer(fit)

    def predict(self, request: Predict) -> Any:
        """A net's outputs on examples: a tensor, or a tuple of them, see `Predict`."""
        return self._answer(request)

    def gradient(self, request: Gradient) -> Weights:
        """The mean gradient of an objective by parameter name, see `Gradient`."""
        return self._answer(request)

    def measure(self, request: NormStatistics) -> int:
        """Measure BatchNorm's statistics in place, and return the number of batches, see `NormStatistics`."""
        return self._answer(request)

    def module(self, name: str, build: Callable[[], nn.Module]) -> nn.Module:
        """A module of the method's own: new at every call, with initial weights drawn from the run's seed and the name.

        The initial weights are the same in every round and at every client; load learnt weights over them. `build` may
        draw from torch's global generator, as layers do; other draws are not affected.
        """
        return self._module(name, build)

    def _answer(self, request: Request) -> Any:
        self._asked[request.kind] += 1
        return self._carry_out(request, self._key.fold(request.kind, self._asked[request.kind]))


@dataclass(frozen=True)
class Supervised:
    """The task's own objective: the criterion on the net's outputs."""

    criterion: Criterion

    def __call__(self, net: nn.Module, batch: Batch, extras: Extras) -> torch.Tensor:
        """Scalar loss of one batch."""
        return self.criterion(net(batch.inputs), batch.targets)


@dataclass(eq=False)
class Client:
    """What the client's half of a method may use.

    Attributes:
        id: the client's stable number.
        round: number of the round, from 1; outside of rounds, that of the last one, 0 before the first.
        model: the client's network, private to this call. At first it has the weights of `build(architecture)`, as
            every client of its architecture. With `keeps_model` its weights persist between calls; otherwise every call
            starts from those.
        state: the client's state, kept between rounds: a dict of tensors, numbers, text, nested dicts.
        train: examples to train on.
        validation: examples for model selection; may be empty.
        capacity: share of the full model it can train.
        rng: generator for this call's draws.
        public: the public examples, if the federation has any; unlabelled unless `Need.PUBLIC_LABELS` is met.
        criterion: the task's loss.
        num_classes: the width of an output: of a classification, its classes.
        architecture: name of its network in the federation.
        keeps_model: whether `model` is kept for the next call; a handler may set it to False.
        classes: those that `model` has outputs for, while a logit of minus infinity stands for each other one; None if
            it has outputs for all.
        releases: private releases made in this call, which the privacy mechanism adds here; one at most.
        notes: numbers reported in this call.
    """

    id: ClientId
    model: nn.Module
    state: dict[str, Any]
    train: Examples
    validation: Examples
    capacity: float
    rng: torch.Generator
    public: Examples | None
    criterion: Criterion
    num_classes: int
    architecture: str
    _build: Callable[..., nn.Module]
    _module: Callable[[str, Callable[[], nn.Module]], nn.Module]
    round: int = 0
    keeps_model: bool = True
    classes: OwnClasses | None = None
    releases: int = field(default=0, init=False)
    notes: Notes = field(default_factory=Notes, init=False)
    _stored: Mapping[str, Weights] = field(default_factory=dict[str, Weights])
    _modules: dict[str, nn.Module] = field(default_factory=dict[str, nn.Module], init=False)
    _kept: set[str] = field(default_factory=set[str], init=False)
    _moments: dict[str, list[Moments]] = field(default_factory=dict[str, list[Moments]])

    def note(self, **numbers: float) -> None:
        """Report numbers as `Server.note` does; the records show their mean over clients.

        They leave the client unprotected: no privacy mechanism covers what they reveal of its data.
        """
        self.notes.add(numbers)

    @property
    def objective(self) -> Supervised:
        """The task's loss as an objective for `Fit`."""
        return Supervised(self.criterion)

    def build(
        self, architecture: str | None = None, *, width: float = 1.0, depth: int | None = None, draw: str = ""
    ) -> nn.Module:
        """A new module with the same initial weights as `server.build` gives."""
        return self._build(architecture, Scale(width, depth), draw)

    def twin(self, *, width: float = 1.0, draw: str = "") -> nn.Module:
        """A new module of this client's own architecture, see `build`."""
        return self.build(self.architecture, width=width, draw=draw)

    def copy(self) -> nn.Module:
        """A module like `model`, with the weights and statistics that it has now."""
        return load(self.twin(), learnt_of(self.model))

    def module(self, name: str, build: Callable[[], nn.Module], *, keep: bool = True) -> nn.Module:
        """A module of the method's own, see `Server.module`; the same object at every call in this handler.

        Args:
            name: unique among the method's modules.
            build: builds the module.
            keep: whether the client keeps its weights for its next call.
        """
        if name not in self._modules:
            module = self._module(name, build)
            self._modules[name] = load(module, self._stored[name]) if keep and name in self._stored else module
        if keep:
            self._kept.add(name)
        return self._modules[name]

    @property
    def kept_modules(self) -> dict[str, Weights]:
        """By name, the weights of the modules that the client keeps, used in this call or not."""
        return {**self._stored, **{name: learnt_of(self._modules[name]) for name in sorted(self._kept)}}
