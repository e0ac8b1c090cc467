"""What a method needs of a federation: each need checks whether it is met, and advises what to do if it is not."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar

from torch import nn

from potluck.core.federation import Builder, ClientId, Federation
from potluck.core.ground.inputs import InputShape, shown
from potluck.core.ground.rng import Key, isolated
from potluck.core.meeting import meetings
from potluck.core.nets.modes import to_training
from potluck.core.nets.scale import FULL, Cuts, Scale, built, takes_scale
from potluck.core.nets.slicing import NoSlices, cut_by, incoherent
from potluck.core.nets.splitting import Splits, split_problem
from potluck.core.nets.weights import learnt_of, tensors_of
from potluck.core.tasks.named import CLASSIFICATION
from potluck.core.tasks.task import Task

Problem = str | tuple[str, str]
"""What is wrong with a federation; with what to do about it, where that is something else than a need's advice."""

_NAMED = 5  # clients named in an error before the rest are only counted


@dataclass(frozen=True)
class Offer:
    """What a federation offers, as far as it is known without its data.

    Attributes:
        architectures: builders by name.
        assigned: the architecture of each client.
        server_architecture: of the common or global model.
        public: whether there are public examples, at least one.
        public_labels: whether their labels are known.
        real_inputs: whether prepared inputs are real numbers, and not whole ones such as tokens; None before anybody
            has read them.
        unvalidated: clients without a validation part.
        task: what outputs mean.
        input_shape: of one prepared input, or of each of the named ones.
        own_classes: whether clients have outputs for classes of their own alone.
    """

    architectures: Mapping[str, Builder]
    assigned: Mapping[ClientId, str]
    server_architecture: str
    public: bool
    unvalidated: tuple[ClientId, ...]
    task: Task = CLASSIFICATION
    input_shape: InputShape = ()
    public_labels: bool = False
    real_inputs: bool | None = True
    own_classes: bool = False

    @classmethod
    def of(cls, federation: Federation) -> "Offer":
        """What an assembled federation offers."""
        return cls(
            architectures=federation.architectures,
            assigned={id: federation.base_of(federation.outline(id).architecture) for id in federation.sites},
            server_architecture=federation.server_architecture,
            public=federation.public is not None and len(federation.public) > 0,
            unvalidated=tuple(id for id in sorted(federation.sites) if not federation.outline(id).validation),
            task=federation.task,
            input_shape=federation.input_shape,
            public_labels=federation.public_labels,
            real_inputs=federation.real_inputs,
            own_classes=any(federation.classes_of(id) is not None for id in federation.sites),
        )

    @cached_property
    def cuts(self) -> Cuts:
        """How nets are made narrower whose builders take no `scale`."""
        return Cuts(self.input_shape)

    @cached_property
    def splits(self) -> Splits:
        """How nets are split that do not say so themselves."""
        return Splits(self.input_shape, self.real_inputs)

    @cached_property
    def nets(self) -> dict[str, nn.Module]:
        """One network of each architecture that a client has."""
        return {name: self.build(name) for name in sorted(set(self.assigned.values()))}

    def build(self, architecture: str, scale: Scale = FULL) -> nn.Module:
        """A network to inspect, built without drawing from the global generator."""
        with isolated(Key((architecture,))):
            return to_training(built(self.architectures[architecture], scale, architecture, self.cuts, self.splits))


@dataclass(frozen=True)
class Need:
    """A requirement of a method, checked against the federation before a run starts.

    A method's file may define its own:

        EVEN = Need("an even number of clients", odd_one_out, "change federation.clients by one")

    Attributes:
        text: the requirement, in a few words.
        check: returns what is wrong with a federation, naming what was found, or None if the need is met. An exception
            counts as a bug in the check.
        advice: what the user can do about it.
        caution: returns what a user should know of a federation that meets the need for some clients and not for
            others, or None.
        covers: needs of which nothing is said where this one is not met, since it says more.
    """

    text: str
    check: Callable[[Offer], Problem | None]
    advice: str
    caution: Callable[[Offer], str | None] = lambda offer: None
    covers: tuple["Need", ...] = ()

    ONE_ARCHITECTURE: ClassVar["Need"]
    NESTED_LAYERS: ClassVar["Need"]
    SHARED_LAYERS: ClassVar["Need"]
    SHARED_ARCHITECTURES: ClassVar["Need"]
    SPLIT_MODEL: ClassVar["Need"]
    WIDTH_SLICES: ClassVar["Need"]
    DEPTH_PREFIXES: ClassVar["Need"]
    PUBLIC_DATA: ClassVar["Need"]
    PUBLIC_LABELS: ClassVar["Need"]
    VALIDATION: ClassVar["Need"]
    CLASSES: ClassVar["Need"]
    ONE_OUTPUT: ClassVar["Need"]
    REAL_INPUTS: ClassVar["Need"]
    ONE_INPUT: ClassVar["Need"]
    ALL_CLASSES: ClassVar["Need"]

    def __str__(self) -> str:
        return self.text

    def problem(self, offer: Offer) -> str | None:
        """What is wrong with a federation and what to do about it, in one line; None if the need is met."""
        found = self.check(offer)
        parts = found if isinstance(found, tuple) else (found, self.advice)
        return None if found is None else "; ".join(filter(None, parts))


def _one_architecture(offer: Offer) -> str | None:
    first, name = next(iter(offer.assigned.items()))
    for client, other in offer.assigned.items():
        if other != name:
            return f"it needs one architecture, but client {first} has {name} and client {client} has {other}"
    if offer.server_architecture != name:
        return f"it needs one architecture, but client {first} has {name} and the server {offer.server_architecture}"
    return None


def _nested_layers(offer: Offer) -> str | None:
    unlike = _unlike_shapes(offer)
    return unlike and f"it averages layers by name, but {unlike}"


def _unlike_shapes(offer: Offer) -> str | None:
    """Which tensor has another shape in another architecture."""
    seen: dict[str, tuple[str, tuple[int, ...]]] = {}
    for architecture, net in offer.nets.items():
        for name, tensor in learnt_of(net).items():
            owner, shape = seen.setdefault(name, (architecture, tuple(tensor.shape)))
            if shape != tuple(tensor.shape):
                return f"{name} has shape {shape} in {owner} and {tuple(tensor.shape)} in {architecture}"
    return None


def _nobody_meets(offer: Offer, *, across: bool) -> str | None:
    """That no client has a trained layer in common with another; one client alone is no federation to speak of."""
    found = meetings(offer.nets, offer.assigned.values(), across=across)
    if len(offer.assigned) < 2 or any(one.weights_met for one in found):
        return None
    named = ", ".join(one.architecture for one in found[:_NAMED])
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    how = "layers by name" if across else "layers among clients of one architecture"
    unlike = across and _unlike_shapes(offer)
    why = f"one client each; {unlike}" if unlike else "one client each"
    return (
        f"it averages {how}, and no client has a layer in common with another ({named}{more}, {why}), so each would"
        " train alone"
    )


def _some_meet_nobody(offer: Offer, *, across: bool) -> str | None:
    found = meetings(offer.nets, offer.assigned.values(), across=across)
    alone = {one.architecture for one in found if not one.weights_met}
    if not alone or len(offer.assigned) < 2:
        return None
    clients = [f"{id} ({name})" for id, name in sorted(offer.assigned.items()) if name in alone]
    named = ", ".join(clients[:_NAMED])
    more = f" and {len(clients) - _NAMED} more" if len(clients) > _NAMED else ""
    return (
        f"client{'s' * (len(clients) > 1)} {named}{more} share no layer with any other: what they send is averaged with"
        " nothing, and they train alone; to see what meets: potluck inspect federation"
    )


def _split_model(offer: Offer) -> str | None:
    problems = ((name, split_problem(net)) for name, net in offer.nets.items())
    return next((f"{architecture}: {problem}" for architecture, problem in problems if problem), None)


def _width_slices(offer: Offer) -> str | None:
    name = offer.server_architecture
    try:
        full, narrow = offer.build(name), offer.build(name, Scale(width=0.5))
    except (TypeError, ValueError) as error:
        why = (error.__cause__ if isinstance(error, NoSlices) else None) or error
        return f"it cuts the width of {name}, which has no slices: {why}"
    if not _fits(narrow, full):
        return f"{name} at width 0.5 is no slice of itself"
    layer = None if cut_by(narrow) else incoherent(full, narrow, offer.input_shape)
    return layer and (
        f"{name} at width 0.5 is no slice of itself: {layer} has the shape of a leading slice, and other channels, as"
        " where a convolution has as many groups as in the full net, or layers are concatenated"
    )


def _fits(narrow: nn.Module, full: nn.Module) -> bool:
    whole = tensors_of(full)
    return all(
        name in whole and all(small <= large for small, large in zip(tensor.shape, whole[name].shape, strict=True))
        for name, tensor in tensors_of(narrow).items()
    )


def _depth_prefixes(offer: Offer) -> Problem | None:
    name = offer.server_architecture
    if split_problem(offer.build(name)) is None and not takes_scale(offer.architectures[name]):
        return None  # any of its stages can be left out
    try:
        full, shallow = offer.build(name), offer.build(name, Scale(depth=1))
    except NoSlices as problem:
        return f"it cuts the depth of {name}: {problem}", ""
    except (TypeError, ValueError):
        return f"it cuts the depth of {name}, which has no blocks to leave out"
    whole = {tensor: found.shape for tensor, found in tensors_of(full).items()}
    own = {tensor: found.shape for tensor, found in tensors_of(shallow).items() if not tensor.startswith("exits.")}
    return None if own.items() <= whole.items() else f"{name} at depth 1 is no part of itself"


def _public_data(offer: Offer) -> str | None:
    return None if offer.public else "it needs public data, and the federation has none"


def _public_labels(offer: Offer) -> str | None:
    return None if offer.public and offer.public_labels else "it learns from labelled public data, and there are none"


def _validation(offer: Offer) -> str | None:
    if not offer.unvalidated:
        return None
    named = ", ".join(map(str, offer.unvalidated[:_NAMED]))
    more = f" and {len(offer.unvalidated) - _NAMED} more" if len(offer.unvalidated) > _NAMED else ""
    return f"it needs validation data at every client, and there are none at {named}{more}"


def _classes(offer: Offer) -> str | None:
    if offer.task.has_classes:
        return None
    return f"it works class by class, and {offer.task.name} has no single class for each example"


def _one_output(offer: Offer) -> str | None:
    if not offer.task.by_position:
        return None
    return f"it exchanges one output for each example, and {offer.task.name} has one for each position"


def _real_inputs(offer: Offer) -> str | None:
    reckons = "it works on inputs themselves, as one tensor of real numbers"
    if isinstance(offer.input_shape, Mapping):
        return f"{reckons}, and those here have names: {shown(offer.input_shape)}"
    return None if offer.real_inputs is not False else f"{reckons}, and those here are whole numbers"


def _one_input(offer: Offer) -> str | None:
    if not isinstance(offer.input_shape, Mapping):
        return None
    return f"it reckons with inputs of one tensor, and those here have names: {shown(offer.input_shape)}"


def _all_classes(offer: Offer) -> str | None:
    if not offer.own_classes:
        return None
    return "it reckons with outputs for all classes at all clients, and here they have some for their own classes alone"


_ANY_TASK = "use a method that takes any task, such as fedavg, scaffold or fedin"
Need.ONE_ARCHITECTURE = Need(
    "one architecture for all clients",
    _one_architecture,
    "give federation.models one name, and federation.server_model no other, or use a method for several architectures,"
    " such as fml; or, where method.sharing.scope is 'model', another scope",
)
Need.NESTED_LAYERS = Need(
    "layers of one name have one shape at all clients",
    _nested_layers,
    "use one nested family of models, or several clients with one model and method.sharing.scope = 'architecture'",
)
Need.SHARED_LAYERS = Need(
    "layers that clients have in common",
    partial(_nobody_meets, across=True),
    "use one nested family of models, several clients with one model, or a method that exchanges something else, such"
    " as fedmd or fml",
    partial(_some_meet_nobody, across=True),
    covers=(Need.NESTED_LAYERS,),
)
Need.SHARED_ARCHITECTURES = Need(
    "several clients with one architecture",
    partial(_nobody_meets, across=False),
    "give several clients one model, or use method.sharing.scope = 'layer' or a method that exchanges something else,"
    " such as fedmd or fml",
    partial(_some_meet_nobody, across=False),
)
Need.SPLIT_MODEL = Need(
    "models that split into extractor, intermediate layers and classifier",
    _split_model,
    "give its parts to potluck.models.contract.StagedNet; to see how a network is cut: potluck inspect FILE.py:NAME",
)
Need.WIDTH_SLICES = Need(
    "a model whose width can be cut", _width_slices, "choose another model, or give its builder a `scale`"
)
Need.DEPTH_PREFIXES = Need("a model whose depth can be cut", _depth_prefixes, "choose another model")
Need.PUBLIC_DATA = Need("public data", _public_data, "set federation.public to 'holdout' or a data set's name")
Need.PUBLIC_LABELS = Need(
    "public data with labels of the task",
    _public_labels,
    "set federation.public_labels, with federation.public = 'holdout' or a data set of the same classes",
)
Need.VALIDATION = Need(
    "a validation part for every client",
    _validation,
    "raise federation.validation_fraction, or deal these clients more examples",
)
Need.CLASSES = Need("a task with one class for each example", _classes, _ANY_TASK)
Need.ONE_OUTPUT = Need("a task with one output for each example, not one for each position", _one_output, _ANY_TASK)
Need.REAL_INPUTS = Need(
    "inputs of one tensor of real numbers",
    _real_inputs,
    "use a method that leaves inputs to the networks, such as fedavg or fedgen",
)
Need.ONE_INPUT = Need("inputs of one tensor", _one_input, "use a method that takes any inputs, such as fedavg or fedin")
Need.ALL_CLASSES = Need(
    "outputs for all classes at all clients",
    _all_classes,
    "leave out federation.classes, or use a method that aligns classes, such as fedavg, fedproto, fedmd or fml",
)
