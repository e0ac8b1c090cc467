"""Schemas of replies: a small vocabulary in which a method declares what a reply may hold, and the check against it.

    Schema(weights=like(message["weights"]), logits=floats(rows, classes), examples=count(member.examples))

A declaration follows from what the server sent and knows, never from the reply. Every number must be finite and at most
`LARGEST` in size, every shape and type as declared, and no undeclared entry may be present.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from potluck.core.federation import Member
from potluck.core.nets.classes import OwnClasses

LARGEST = 1e9
"""The largest number in a reply, by default. Squares of such numbers, summed over any model, are still far from
float32's limit (3.4e38), so that means, norms and squared errors of accepted replies are finite; trained weights,
features and logits are smaller by orders of magnitude unless training diverges.
"""

UNDECLARED_TIMES, UNDECLARED_LEAST = 16, 2**26
"""The size limit of an undeclared reply: this many of the client's models, or this many bytes if that is more."""

_DEEPEST = 8
_OFF_ONE = 1e-3  # what rounding may make of a sum of probabilities; that of thousands in float32 is off by 1e-6


class Misfit(ValueError):
    """A reply does not fit its schema; the message says on one line what was found, where, and what was expected."""


class NotFinite(Misfit):
    """A number in a reply is NaN, infinite, or larger than training that converges could produce."""


@dataclass(frozen=True, eq=False)
class UpTo:
    """A dimension chosen by the client. The same object in several shapes means the same size."""

    most: int
    least: int = 1


Dimension = int | UpTo
Path = tuple[str, ...]


@dataclass
class Look:
    """The state of one check: the largest number allowed, and the sizes found so far."""

    largest: float = LARGEST
    sizes: dict[UpTo, int] = field(default_factory=dict[UpTo, int])

    def tie(self, rows: UpTo, found: int, where: str) -> None:
        """Check that a size is in range, and the same wherever this dimension occurs."""
        if not rows.least <= found <= rows.most:
            raise Misfit(f"{where}: found {found} rows, expected {rows.least} to {rows.most}")
        if self.sizes.setdefault(rows, found) != found:
            raise Misfit(f"{where}: found {found} rows, expected {self.sizes[rows]} as in the other entries")


class Kind(ABC):
    """The type of one entry."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The most payload bytes of such an entry."""

    @abstractmethod
    def check(self, value: Any, where: str, look: Look) -> None:
        """Check that a value fits.

        Raises:
            Misfit: it does not; `NotFinite` if only the size of a number is wrong.
        """

    def unbounded(self, value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
        """The tensors of a value that fits whose numbers have no bound but the largest number allowed; here none.

        Args:
            value: what has passed `check`.
            path: the names that lead to it.
        """
        return iter(())


class Schema(Kind):
    """Exactly these entries, each with its type. An entry set to None is absent, as in a `Message`.

    Attributes:
        entries: the types by name; `Schema(**other.entries, more=...)` declares those of another schema and one more.
    """

    def __init__(self, /, **entries: Kind | None) -> None:
        self.entries = {name: kind for name, kind in entries.items() if kind is not None}

    @property
    def nbytes(self) -> int:
        """The sum over all entries."""
        return self._nbytes

    @cached_property
    def _nbytes(self) -> int:
        return sum(kind.nbytes for kind in self.entries.values())

    def may_lack(self, name: str) -> bool:
        """Whether the entry with this name may be absent."""
        return isinstance(self.entries[name], Optional)

    def check(self, value: Any, where: str = "", look: Look | None = None) -> None:
        """Check that a value holds exactly these entries."""
        look = look or Look()
        if not isinstance(value, Mapping):
            raise Misfit(f"{where or 'the reply'} is {described(value)}; expected named entries")
        entries: Mapping[Any, Any] = value
        inside = f"{where}." if where else ""
        for name in self.entries:
            if name not in entries and not self.may_lack(name):
                raise Misfit(f"{inside}{name} is missing")
        for name, entry in entries.items():
            if name not in self.entries:
                expected = ", ".join(list(self.entries)[:6]) + (" ..." if len(self.entries) > 6 else "")
                raise Misfit(f"{inside}{name} is not expected; expected are {expected or 'no entries'}")
            self.entries[name].check(entry, f"{inside}{name}", look)

    def unbounded(self, value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
        """Those of every entry that is there."""
        for name, entry in value.items():
            yield from self.entries[name].unbounded(entry, (*path, name))


class Layers(Schema):
    """Tensors by name, such as weights, checked all at once, and one by one only if something is wrong.

    Args:
        weights: tensors of the same names, shapes and types.
        partly: whether tensors may be absent.
    """

    def __init__(self, weights: Mapping[str, Tensor], partly: bool = False) -> None:
        self._form = {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}
        self._least = {name: _least(tensor) for name, tensor in weights.items() if not tensor.is_floating_point()}
        self._partly = partly

    @cached_property
    def entries(self) -> dict[str, Kind]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The type of each tensor."""
        return {
            name: Tensors(dtype, tuple(shape), self._least.get(name, -math.inf))
            for name, (shape, dtype) in self._form.items()
        }

    @cached_property
    def _nbytes(self) -> int:
        return sum(shape.numel() * dtype.itemsize for shape, dtype in self._form.values())

    def may_lack(self, name: str) -> bool:
        """Any, or none."""
        return self._partly

    def check(self, value: Any, where: str = "", look: Look | None = None) -> None:
        """Check that a value holds these tensors; names the wrong one if it does not."""
        look = look or Look()
        if not (isinstance(value, dict) and self._fits(value, look.largest)):  # pyright: ignore[reportUnknownArgumentType]
            super().check(value, where, look)

    def _fits(self, tensors: dict[str, Any], largest: float) -> bool:
        if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            return False
        found = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        if found != self._form:
            return False
        for name, tensor in tensors.items():
            low, high = extremes(tensor)
            if not (self._least.get(name, -largest) <= low and high <= largest):  # False if one is NaN
                return False
        return True


@dataclass(frozen=True)
class Optional(Kind):
    """An entry that may be absent."""

    kind: Kind

    @property
    def nbytes(self) -> int:
        """The size if present."""
        return self.kind.nbytes

    def check(self, value: Any, where: str, look: Look) -> None:
        """Check an entry that is present."""
        self.kind.check(value, where, look)

    def unbounded(self, value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
        """Those of an entry that is present."""
        return self.kind.unbounded(value, path)


@dataclass(slots=True)
class Tensors(Kind):
    """A tensor of one type and shape, its values within bounds."""

    dtype: torch.dtype
    shape: tuple[Dimension, ...]
    least: float = -math.inf
    most: float = math.inf

    @property
    def nbytes(self) -> int:
        """The size with the most rows allowed."""
        return math.prod(n.most if isinstance(n, UpTo) else n for n in self.shape) * self.dtype.itemsize

    def check(self, value: Any, where: str, look: Look) -> None:
        """Check type, shape and values."""
        if not isinstance(value, Tensor):
            raise Misfit(f"{where} is {described(value)}; expected {self}")
        if value.shape != self.shape or value.dtype != self.dtype:
            self._check_form(value, where, look)
        check_numbers(value, where, look.largest, self.least, self.most)

    def unbounded(self, value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
        """The tensor itself, unless its type or the declaration limits its numbers."""
        if self.most == math.inf and self.dtype != torch.bool:
            yield path, value

    def _check_form(self, value: Tensor, where: str, look: Look) -> None:
        fixed = [n for n in self.shape if not isinstance(n, UpTo)]
        found = [n for n, wanted in zip(value.shape, self.shape, strict=False) if not isinstance(wanted, UpTo)]
        if value.dtype != self.dtype or value.dim() != len(self.shape) or found != fixed:
            raise Misfit(f"{where} is {described(value)}; expected {self}")
        for wanted, size in zip(self.shape, value.shape, strict=True):
            if isinstance(wanted, UpTo):
                look.tie(wanted, size, where)

    def __str__(self) -> str:
        sizes = [f"up to {n.most}" if isinstance(n, UpTo) else str(n) for n in self.shape]
        return f"a tensor ({', '.join(sizes)}) of {_short(self.dtype)}"


@dataclass(frozen=True)
class ClassCounts(Kind):
    """The number of examples of each class, int64 (classes,); `present` is the dimension of classes that have any."""

    classes: int
    most: int
    present: UpTo | None = None

    @property
    def nbytes(self) -> int:
        """Eight bytes for each class."""
        return 8 * self.classes

    def check(self, value: Any, where: str, look: Look) -> None:
        """Check that no count is negative, and that there are no more examples than the client has."""
        Tensors(torch.int64, (self.classes,), 0, self.most).check(value, where, look)
        if not 1 <= (whole := int(value.sum())) <= self.most:
            raise Misfit(f"{where} counts {whole} examples; expected 1 to {self.most}")
        if self.present is not None:
            look.tie(self.present, int(value.count_nonzero()), where)


@dataclass(frozen=True)
class Labels(Kind):
    """A class for each row, int64 (rows,); `present` is the dimension of classes that occur."""

    rows: UpTo
    classes: int
    present: UpTo | None = None

    @property
    def nbytes(self) -> int:
        """Eight bytes for each row."""
        return 8 * self.rows.most

    def check(self, value: Any, where: str, look: Look) -> None:
        """Check that every number is a class."""
        Tensors(torch.int64, (self.rows,), 0, self.classes - 1).check(value, where, look)
        if self.present is not None:
            look.tie(self.present, len(value.unique()), where)


@dataclass(frozen=True)
class Probabilities(Kind):
    """A distribution over classes for each row, (rows, classes), of the default floating type."""

    rows: Dimension
    classes: int

    @property
    def nbytes(self) -> int:
        """The size of the tensor."""
        return floats(self.rows, self.classes).nbytes

    def check(self, value: Any, where: str, look: Look) -> None:
        """Check that no number is negative, and that every row sums to one."""
        Tensors(torch.get_default_dtype(), (self.rows, self.classes), 0).check(value, where, look)
        low, high = extremes(value.sum(1))
        for total in (low, high) if len(value) else ():
            if abs(total - 1) > _OFF_ONE:
                raise Misfit(f"{where} has a row whose sum is {total:.6g}; expected probabilities, whose sum is 1")


@dataclass(frozen=True)
class OwnLogits(Kind):
    """Logits (rows, classes) of a client with outputs for some classes: minus infinity for all others, and for no own.

    Attributes:
        rows: how many.
        own: the classes that the client has outputs for.
    """

    rows: Dimension
    own: OwnClasses

    @property
    def nbytes(self) -> int:
        """The size of the tensor."""
        return floats(self.rows, self.own.width).nbytes

    def check(self, value: Any, where: str, look: Look) -> None:
        """Check the form, that own classes' numbers are finite, and that there are no others."""
        form = Tensors(torch.get_default_dtype(), (self.rows, self.own.width))
        if not isinstance(value, Tensor):
            raise Misfit(f"{where} is {described(value)}; expected {form}")
        if value.shape != form.shape or value.dtype != form.dtype:
            form._check_form(value, where, look)
        check_numbers(self.own.rows_of(value, 1), where, look.largest)
        if not bool((value[:, self.own.lacking] == -math.inf).all()):
            raise Misfit(f"{where} has numbers for classes that the client lacks; expected minus infinity")

    def unbounded(self, value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
        """The numbers of its own classes."""
        yield path, self.own.rows_of(value, 1)


@dataclass(frozen=True)
class Plain(Kind):
    """A number within bounds, an integer if `kind` is int."""

    kind: type[int] | type[float]
    least: float
    most: float

    @property
    def nbytes(self) -> int:
        """Eight."""
        return 8

    def check(self, value: Any, where: str, look: Look) -> None:
        """Check that a value is such a number; True is not one."""
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or (self.kind is int and not isinstance(value, int)):
            raise Misfit(f"{where} is {described(value)}; expected a {'whole ' * (self.kind is int)}number")
        bound = math.inf if self.kind is int else look.largest
        least, most = max(self.least, -bound), min(self.most, bound)
        if not least <= value <= most:
            wrong = Misfit if self.kind is int else NotFinite
            raise wrong(f"{where} is {described(value)}; expected {least:g} to {most:g}")


@dataclass(frozen=True)
class Text(Kind):
    """Text of limited length."""

    most: int

    @property
    def nbytes(self) -> int:
        """Four bytes for each character."""
        return 4 * self.most

    def check(self, value: Any, where: str, look: Look) -> None:
        """Check that a value is text and not too long."""
        if not isinstance(value, str) or len(value) > self.most:
            raise Misfit(f"{where} is {described(value)}; expected text of at most {self.most} characters")


@dataclass(frozen=True)
class Undeclared(Kind):
    """The default if a method declares nothing: entries of any names and shapes.

    Numbers must be finite and not too large; tensors named like a parameter of the client's model must have a floating
    type; `examples` must be an integer from 1 to the client's number of examples; the reply may be no larger than a few
    models.
    """

    member: Member

    @property
    def nbytes(self) -> int:
        """See `UNDECLARED_TIMES`."""
        model = sum(shape.numel() for shape in self.member.shapes.values()) * torch.get_default_dtype().itemsize
        return max(UNDECLARED_TIMES * model, UNDECLARED_LEAST)

    def check(self, value: Any, where: str, look: Look) -> None:
        """Check for values that no method could use."""
        for name, entry in value.items():
            if name == "examples":
                count(self.member.examples).check(entry, name, look)
            self._check(entry, name, name, look, _DEEPEST)

    def unbounded(self, value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
        """All tensors of numbers."""
        for name, entry in value.items():
            if isinstance(entry, Mapping):
                yield from self.unbounded(entry, (*path, name))
            elif isinstance(entry, Tensor) and entry.dtype != torch.bool:
                yield (*path, name), entry

    def _check(self, value: Any, name: str, where: str, look: Look, deepest: int) -> None:
        if isinstance(value, Mapping):
            if not deepest:
                raise Misfit(f"{where} is nested more than {_DEEPEST} deep")
            entries: Mapping[str, Any] = value
            for inner, child in entries.items():
                self._check(child, inner, f"{where}.{inner}", look, deepest - 1)
        elif isinstance(value, Tensor):
            if name in self.member.parameters and not value.is_floating_point():
                raise Misfit(f"{where} is {described(value)}; expected a floating type")
            check_numbers(value, where, look.largest)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            number(-look.largest, look.largest).check(value, where, look)


def like(weights: Mapping[str, Tensor]) -> Schema:
    """Tensors of these names, shapes and types, whole numbers (counters) from 0; values may be on the "meta" device."""
    return Layers(weights)


def some_of(weights: Mapping[str, Tensor]) -> Schema:
    """As `like`, where any may be absent."""
    return Layers(weights, partly=True)


def floats(*shape: Dimension, least: float = -math.inf, most: float = math.inf) -> Kind:
    """A tensor of this shape, of the default floating type, its values from `least` to `most`."""
    return Tensors(torch.get_default_dtype(), shape, least, most)


def logits(rows: Dimension, classes: int, member: Member) -> Kind:
    """What a client's network puts out (rows, classes), minus infinity for classes that it has no output for."""
    return floats(rows, classes) if member.head is None else OwnLogits(rows, member.head.classes)


def integers(*shape: Dimension, least: int, most: int) -> Kind:
    """An int64 tensor of this shape, its values from `least` to `most`."""
    return Tensors(torch.int64, shape, least, most)


def booleans(*shape: Dimension) -> Kind:
    """A bool tensor of this shape."""
    return Tensors(torch.bool, shape)


def text(most: int) -> Kind:
    """Text of at most `most` characters."""
    return Text(most)


def count(most: int, least: int = 1) -> Kind:
    """A whole number from `least` to `most`."""
    return Plain(int, least, most)


def number(least: float = -math.inf, most: float = math.inf) -> Kind:
    """A finite number from `least` to `most`, as far as such numbers may be sent."""
    return Plain(float, least, most)


def optional(kind: Kind) -> Kind:
    """An entry that may be absent."""
    return Optional(kind)


def described(value: Any) -> str:
    """A value's type and shape, in a few words."""
    if isinstance(value, Tensor):
        return f"a tensor ({', '.join(map(str, value.shape))}) of {_short(value.dtype)}"
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "named entries"
    if isinstance(value, int):  # an integer may have more digits than Python prints
        return str(value) if value.bit_length() < 64 else "a huge number"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "text" if isinstance(value, str) else f"a {type(value).__name__}"


def check_numbers(tensor: Tensor, where: str, largest: float, least: float = -math.inf, most: float = math.inf) -> None:
    """Check for NaN, infinities and values out of bounds, in one pass over the tensor.

    Raises:
        NotFinite: a number is not finite, or larger than `largest`.
        Misfit: a value is below `least` or above `most`, or a whole number above `largest`.
    """
    if tensor.numel() == 0 or tensor.dtype == torch.bool:
        return
    low, high = extremes(tensor)
    if max(least, -largest) <= low and high <= min(most, largest):  # neither holds if one is NaN
        return
    for end in (low, high):
        if not math.isfinite(end):
            raise NotFinite(f"{where} holds {end}")
        if not least <= end <= most:
            raise Misfit(f"{where} holds {end:.6g}; expected {least:g} to {most:g}")
        if abs(end) > largest:
            wrong = NotFinite if tensor.is_floating_point() else Misfit
            raise wrong(f"{where} holds {end:.3g}; expected at most {largest:g} in size")


def extremes(tensor: Tensor) -> tuple[float, float]:
    """The least and the largest value, both NaN if one value is; zeros if there are none."""
    if tensor.numel() == 0:
        return 0.0, 0.0
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype not in _ORDERED:
        tensor = tensor.double()
    low, high = torch.aminmax(tensor)
    return low.item(), high.item()


_ORDERED = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}


def _least(tensor: Tensor) -> float:
    """The lower bound: 0 for counters, which integers that are already negative are not."""
    return 0 if tensor.is_meta or tensor.numel() == 0 or extremes(tensor)[0] >= 0 else -math.inf


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
