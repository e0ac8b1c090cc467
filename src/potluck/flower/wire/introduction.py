"""A node's introduction of its client before a run begins: shapes and counts, and nothing that names code.

The server builds no network that a node names. A node's name for its network is a label, for records; if the label is
that of a network in the server's experiment, the shapes must be that network's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Size, nn

from potluck.core.federation import ClientId, Member
from potluck.core.ground.errors import WireError
from potluck.core.ground.inputs import Form, InputShape
from potluck.core.ground.text import one_line
from potluck.core.nets.classes import OwnHead
from potluck.core.nets.weights import frozen_names, parameters_of, tensors_of
from potluck.flower.wire.classes import MOST_CLASSES, ClassNames
from potluck.flower.wire.schemas import LONGEST_NAME, Header, Name, read
from potluck.flower.wire.software import Software, SoftwareEntries

MOST_TENSORS = 50_000
"""The most tensors of a network; a vision transformer of 632 million parameters has 390."""

MOST_DIMENSIONS = 8
"""The most dimensions of a tensor; three-dimensional convolutions have five."""

MOST_INPUTS = 1_000
"""The most named inputs of a network."""

MOST_ELEMENTS = 2**36
"""The most numbers in a network: 69 thousand million. Its shapes are compared and counted, never allocated."""

MOST_EXAMPLES = 10**9
"""The most examples of one client."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.bool,
)}  # fmt: skip

_Side = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Shape = Annotated[list[_Side], Field(max_length=MOST_DIMENSIONS)]
_Count = Annotated[int, Field(ge=0, le=MOST_EXAMPLES)]


_InputSides = Annotated[list[Annotated[int, Field(ge=1, le=2**31 - 1)]], Field(max_length=MOST_DIMENSIONS)]


_Class = Annotated[int, Field(ge=0, lt=MOST_CLASSES)]


class _NamedInput(Header):
    shape: _InputSides
    dtype: str


class _Introduced(Header):
    architecture: Name
    capacity: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
    shapes: Annotated[dict[Name, _Shape], Field(max_length=MOST_TENSORS)]
    dtypes: Annotated[dict[Name, str], Field(max_length=MOST_TENSORS)]
    parameters: Annotated[list[Name], Field(max_length=MOST_TENSORS)]
    frozen: Annotated[list[Name], Field(max_length=MOST_TENSORS)]
    train: Annotated[int, Field(ge=1, le=MOST_EXAMPLES)]
    validation: _Count
    test: _Count
    input_shape: _InputSides | Annotated[dict[Name, _NamedInput], Field(min_length=1, max_length=MOST_INPUTS)]
    num_classes: Annotated[int, Field(ge=1, le=MOST_CLASSES)]
    classes: ClassNames | None
    outputs: Annotated[list[_Class], Field(min_length=1, max_length=MOST_CLASSES)] | None
    software: SoftwareEntries | None = None
    sums_key: Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")] | None = None


class _Refused(Header):
    refusal: str


class Refusal(WireError):
    """The node states that it cannot take part, and why."""


@dataclass(frozen=True)
class Network:
    """A description of a network that does not require building it.

    Attributes:
        shapes: of every tensor in its state dict.
        dtypes: torch's name of the type of each.
        parameters: which of them are trained.
        frozen: which of them the network's builder has frozen; the rest are buffers.
    """

    shapes: Mapping[str, Size]
    dtypes: Mapping[str, str]
    parameters: frozenset[str]
    frozen: frozenset[str] = frozenset()

    @classmethod
    def of(cls, net: nn.Module) -> "Network":
        """The description of a network."""
        tensors = tensors_of(net)
        return cls(
            {name: tensor.shape for name, tensor in tensors.items()},
            {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()},
            frozenset(parameters_of(net)),
            frozen_names(net),
        )


@dataclass(frozen=True)
class Introduction:
    """A node's description of its client.

    Attributes:
        architecture: a label for its network, with outputs for all classes.
        capacity: share of the full model that it can train.
        train: examples it learns from; `validation` and `test` likewise.
        input_shape: of one prepared input, or of each of the named ones with its type.
        num_classes: the width of an output, which is the federation's.
        classes: the names of those that its data may have; None if these number their classes, empty if the task has no
            classes.
        outputs: the federation's numbers of the classes that its network has outputs for, in their order; None if all.
        software: with which it computes; None if it does not say.
        sums_key: in a run with secure sums, the public key with which it signs its part in them, 64 hex digits.
    """

    architecture: str
    capacity: float
    network: Network
    train: int
    validation: int
    test: int
    input_shape: InputShape
    num_classes: int
    classes: tuple[str, ...] | None
    outputs: tuple[int, ...] | None = None
    software: Software | None = None
    sums_key: str | None = None

    @classmethod
    def read(cls, header: Mapping[str, Any]) -> "Introduction":
        """Read what `header` wrote.

        Raises:
            Refusal: the node says that it cannot take part.
            WireError: the header does not fit the schema.
        """
        if "refusal" in header:
            raise Refusal(one_line(read(_Refused, header, "its refusal").refusal))
        found = read(_Introduced, header, "its introduction")
        _check(found)
        return cls(
            found.architecture,
            float(found.capacity),
            Network(
                {name: Size(shape) for name, shape in found.shapes.items()},
                found.dtypes,
                frozenset(found.parameters),
                frozenset(found.frozen),
            ),
            found.train,
            found.validation,
            found.test,
            _read_shape(found.input_shape),
            found.num_classes,
            None if found.classes is None else tuple(found.classes),
            None if found.outputs is None else tuple(found.outputs),
            None if found.software is None else found.software.read(),
            found.sums_key,
        )

    def header(self) -> dict[str, Any]:
        """The header for the message, also stored in the run's folder."""
        told: dict[str, Any] = {} if self.software is None else {"software": self.software.entries()}
        told |= {} if self.sums_key is None else {"sums_key": self.sums_key}
        return {
            "architecture": self.architecture,
            "capacity": self.capacity,
            "shapes": {name: list(shape) for name, shape in self.network.shapes.items()},
            "dtypes": dict(self.network.dtypes),
            "parameters": sorted(self.network.parameters),
            "frozen": sorted(self.network.frozen),
            "train": self.train,
            "validation": self.validation,
            "test": self.test,
            "input_shape": _told_shape(self.input_shape),
            "num_classes": self.num_classes,
            "classes": None if self.classes is None else list(self.classes),
            "outputs": None if self.outputs is None else list(self.outputs),
            **told,
        }

    def member(self, client: ClientId, architecture: str | None = None, head: OwnHead | None = None) -> Member:
        """The client as the server's half of a method sees it.

        Args:
            client: which it is.
            architecture: the server's name for its network, if it is not the node's.
            head: how its outputs and those of all classes belong together; None if it has outputs for all.
        """
        of = self.network
        name = architecture or self.architecture
        return Member(client, name, self.capacity, of.shapes, of.parameters, self.train, of.frozen, head)


def _told_shape(input_shape: InputShape) -> Any:
    if not isinstance(input_shape, Mapping):
        return list(input_shape)
    return {
        name: {"shape": list(form.shape), "dtype": str(form.dtype).removeprefix("torch.")}
        for name, form in input_shape.items()
    }


def _read_shape(told: list[int] | dict[str, _NamedInput]) -> InputShape:
    if isinstance(told, list):
        return tuple(told)
    return {name: Form(tuple(form.shape), _DTYPES[form.dtype]) for name, form in told.items()}


def _check(found: _Introduced) -> None:
    """Check what a schema of types and ranges cannot express.

    Raises:
        WireError: the parts of the introduction do not fit together.
    """
    label = found.architecture
    if one_line(label, LONGEST_NAME) != label:
        raise WireError(f"its introduction: architecture: expected one printable line, found {label!r}")
    for name in found.shapes:
        if one_line(name, LONGEST_NAME) != name:
            raise WireError(f"its introduction: shapes: expected printable names, found {name!r}")
    for name, form in found.input_shape.items() if isinstance(found.input_shape, dict) else ():
        if one_line(name, LONGEST_NAME) != name or form.dtype not in _DTYPES:
            raise WireError(f"its introduction: input_shape: {one_line(name, 40)!r}: {one_line(form.dtype, 40)!r}")
    if sum(prod(shape) for shape in found.shapes.values()) > MOST_ELEMENTS:
        raise WireError(f"its introduction: shapes: more than {MOST_ELEMENTS} numbers")
    if found.dtypes.keys() != found.shapes.keys():
        raise WireError("its introduction: dtypes: expected the names of shapes")
    if strange := sorted({*found.dtypes.values()} - _DTYPES.keys()):
        raise WireError(f"its introduction: dtypes: {one_line(strange[0], 40)!r}; known: {', '.join(_DTYPES)}")
    for what, names in (("parameters", found.parameters), ("frozen", found.frozen)):
        if strange := sorted({*names} - found.shapes.keys()):
            raise WireError(f"its introduction: {what}: {one_line(strange[0], 80)!r} is not among its shapes")
    numbers = found.outputs or []
    if len(set(numbers)) < len(numbers) or any(number >= found.num_classes for number in numbers):
        raise WireError(f"its introduction: outputs: expected different numbers below {found.num_classes}")
    if found.classes is not None and len(set(found.classes)) < len(found.classes):
        raise WireError("its introduction: classes: expected different names, found one of them twice")
    if both := sorted({*found.parameters} & {*found.frozen}):
        raise WireError(f"its introduction: frozen: {one_line(both[0], 80)!r} is among its trained parameters")
