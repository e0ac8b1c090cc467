"""Fields of hyper-parameters and settings, checked when an object is made, whether from a file, a command or Python.

A field's annotation says what it may hold, and a dataclass that derives from `Checked` refuses everything else:

    rule: Literal["simplified", "exact"] = "simplified"
    mu: Annotated[float, at_least(0)] = 0.1
    steps: Annotated[int, at_least(1)] | None = None

Numbers must be finite, and True is not one. What an annotation cannot express, such as a relation between two fields,
`__post_init__` checks with `require`.
"""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, wraps
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from potluck.core.ground.errors import ConfigError, nearest

T = TypeVar("T")
SERIES = (tuple, list, Sequence)
"""What an annotation may call values in a row."""


@dataclass(frozen=True)
class Bound:
    """A bound, as part of an annotation."""

    words: str
    limit: float
    holds: Callable[[Any, Any], bool]

    def __str__(self) -> str:
        return f"{self.words} {self.limit:,}" if isinstance(self.limit, int) else f"{self.words} {self.limit:g}"


def at_least(limit: float) -> Bound:
    """This number or more."""
    return Bound("at least", limit, operator.ge)


def above(limit: float) -> Bound:
    """More than this number."""
    return Bound("above", limit, operator.gt)


def at_most(limit: float) -> Bound:
    """This number or less."""
    return Bound("at most", limit, operator.le)


def below(limit: float) -> Bound:
    """Less than this number."""
    return Bound("below", limit, operator.lt)


@dataclass(frozen=True)
class Only:
    """The one value that a field of a nested dataclass may have where it is nested, as part of an annotation."""

    field: str
    value: Any
    reason: str = ""

    def check(self, name: str, holder: Any) -> None:
        """Compare the field of a dataclass that is called `name`."""
        found, expected = getattr(holder, self.field), ", ".join(filter(None, (repr(self.value), self.reason)))
        require(found == self.value, f"{name}.{self.field}", expected, found)


@dataclass(frozen=True)
class Never:
    """A value that a field of a nested dataclass may not have where it is nested, as part of an annotation."""

    field: str
    value: Any
    expected: str

    def check(self, name: str, holder: Any) -> None:
        """Compare the field of a dataclass that is called `name`."""
        found = getattr(holder, self.field)
        require(found != self.value, f"{name}.{self.field}", self.expected, found)


class Checked:
    """A base of dataclasses whose fields are checked against their annotations when one is made.

    The check comes before the class's own `__post_init__`, which need not call this one.
    """

    def __post_init__(self) -> None:
        check_fields(self)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__post_init__ = _after_check(cls.__post_init__)  # type: ignore[method-assign]


def check_fields(value: Any) -> None:
    """Compare every field of a dataclass with its annotation.

    Raises:
        ConfigError: one does not fit; the message begins with the field's name.
    """
    for name, hint in hints_of(type(value)).items():
        check_value(name, getattr(value, name), hint)


def require(holds: bool, name: str, expected: str, found: object) -> None:
    """Check a condition on a value.

    Raises:
        ConfigError: "name: expected ..., found ...".
    """
    if not holds:
        raise ConfigError(f"{name}: expected {expected}, found {found!r}")


def _after_check(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    """A `__post_init__` that first checks the fields."""
    if post_init is Checked.__post_init__ or hasattr(post_init, "checks_fields"):
        return post_init

    @wraps(post_init)
    def checked(self: Any) -> None:
        check_fields(self)
        post_init(self)

    checked.checks_fields = True  # type: ignore[attr-defined]
    return checked


@cache
def hints_of(cls: type[Any]) -> dict[str, Any]:
    """The annotation of every field of a dataclass."""
    hints = get_type_hints(cls, include_extras=True)
    return {spec.name: hints[spec.name] for spec in fields(cls)}


def check_value(name: str, value: Any, hint: Any) -> None:
    """Compare a value with an annotation.

    Checked are numbers, text, booleans, None, `Literal` values, dataclasses, and dicts, tuples, lists and unions of
    them, and the bounds, `Only` and `Never`, in `Annotated`; other annotations are ignored.

    Raises:
        ConfigError: it does not fit; the message begins with the name, and with the key or number of what is inside.
    """
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin is Annotated:
        bounds = [bound for bound in arguments[1:] if isinstance(bound, Bound)]
        check_value(name, value, arguments[0])
        require(all(bound.holds(value, bound.limit) for bound in bounds), name, " and ".join(map(str, bounds)), value)
        for rule in arguments[1:]:
            if isinstance(rule, Only | Never):
                rule.check(name, value)
    elif origin is Literal:
        _check_word(name, value, arguments)
    elif origin in (Union, UnionType):
        first_fitting(name, arguments, lambda kind: check_value(name, value, kind))
    elif origin in SERIES:
        fits = isinstance(value, origin) and not isinstance(value, str)
        require(fits, name, f"a {origin.__name__.lower()}", value)
        for index, (element, kind) in enumerate(zip(value, kinds_inside(name, value, hint), strict=True)):
            check_value(f"{name}.{index}", element, kind)
    elif origin is dict:
        require(isinstance(value, dict), name, "a dict", value)
        for key, inner in value.items():
            check_value(f"{name}.{key}", inner, arguments[1] if arguments else Any)
    elif hint in _KINDS:
        expected, fits = _KINDS[hint]
        require(fits(value), name, expected, value)
    elif isinstance(hint, type) and is_dataclass(hint):
        require(isinstance(value, hint), name, hint.__name__, value)


def _check_word(name: str, value: Any, words: tuple[Any, ...]) -> None:
    if any(type(value) is type(word) and value == word for word in words):
        return
    likely = nearest(value, map(str, words), 1) if isinstance(value, str) and len(words) > 2 else []
    hint = f"; nearest: {likely[0]!r}" if likely else ""
    raise ConfigError(f"{name}: expected {' or '.join(map(repr, words))}, found {value!r}{hint}")


def first_fitting(name: str, kinds: Iterable[Any], attempt: Callable[[Any], T]) -> T:
    """What the first kind of a union gives that does not refuse the value called `name`.

    Raises:
        ConfigError: all refuse it; told is what is wrong inside the value, if one of the kinds looked there.
    """
    refusals: list[ConfigError] = []
    for kind in kinds:
        try:
            return attempt(kind)
        except ConfigError as error:
            if kind is not NoneType:
                refusals.append(error)
    raise next((error for error in refusals if not str(error).startswith(f"{name}: ")), refusals[0])


def kinds_inside(name: str, value: Sequence[Any], hint: Any) -> tuple[Any, ...]:
    """The annotation of every element of a tuple, list or other sequence.

    Raises:
        ConfigError: the annotation says how many elements there are, and there are not.
    """
    kinds = get_args(hint) or (Any, ...)
    if get_origin(hint) in (list, Sequence) or kinds[1:] == (...,):
        return kinds[:1] * len(value)
    require(len(value) == len(kinds), name, f"{len(kinds)} values", value)
    return kinds


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    float: ("a finite number", _is_finite),
    int: ("a whole number", _is_whole),
    bool: ("True or False", lambda value: isinstance(value, bool)),
    str: ("text", lambda value: isinstance(value, str)),
    NoneType: ("None", lambda value: value is None),
}
