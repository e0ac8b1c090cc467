"""The Wire section of a method's docstring, for comparison with what the engine counted.

Lines of the Wire section, entries with the size of one client's:

    down      NAME FORMULA, NAME FORMULA
    up        nothing
    with      OVERRIDES also: down NAME FORMULA; up NAME FORMULA      further entries under other hyper-parameters

A formula has +, * and brackets, and begins with "at most" if it is a bound. Sizes of tensors stand in bars and are
bytes, as are `flag`, `integer` and `float`, a number of that kind in a tensor; other symbols are counts. An integer
alone counts plain numbers, of eight bytes each. The symbols are those of `SYMBOLS`; a hyper-parameter has its value,
and `|x|` is the bytes of the entry x of the method's state.
"""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Size, Tensor, get_default_dtype

from potluck.core.federation import Site
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.inputs import one_shape
from potluck.core.message import Message
from potluck.core.method import Method
from potluck.core.nets.weights import buffers_of, learnt_of, parameters_of
from potluck.engine.rounds.engine import Engine
from potluck.models.split import feature_shapes
from potluck.parts.width import level_within
from potluck.testing.limits import section
from potluck.testing.worlds import quick

_NUMBER_BYTES = 8
_BOUND = "at most "
_SYMBOL = re.compile(r"\|[^|]+\||[A-Za-z_][\w.]*")
_ENTRY = re.compile(r"(\S+) +(.+)")


@dataclass(frozen=True)
class Documented:
    """The entries of a method's messages with these hyper-parameters: by direction, a formula by name."""

    overrides: tuple[str, ...] = ()
    down: dict[str, str] = field(default_factory=dict[str, str])
    up: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class WirePlace:
    """The context of a formula: one client of a run, with the method's state after the last round."""

    engine: Engine
    state: Any
    site: Site

    def net(self, architecture: str | None = None, width: float = 1.0) -> Any:
        """A net of this architecture, the server's if None."""
        return self.engine.server(0).build(architecture, width=width)

    @property
    def own(self) -> Any:
        """A net of the client's architecture."""
        return self.net(self.site.architecture)

    @property
    def features(self) -> tuple[Size, Size]:
        """Shapes of one example's features before and after the intermediate layers."""
        return feature_shapes(self.own, self.engine.federation.input_shape)

    @property
    def level(self) -> float:
        """The share of the channels that the client trains."""
        return level_within(self.engine.method.levels, self.site.capacity)  # type: ignore[attr-defined]

    @property
    def rows(self) -> int:
        """Public examples that are drawn in a round."""
        public = self.engine.federation.public
        return min(len(public or ()), getattr(self.engine.method, "public_examples", len(public or ())))


SYMBOLS: dict[str, Callable[[WirePlace], int]] = {
    "|w|": lambda at: _bytes(parameters_of(at.own).values()),  # trained weights of the client's model
    "|b|": lambda at: _bytes(buffers_of(at.own).values()),  # its buffers
    "|bits|": lambda at: sum(
        -(-tensor.numel() // 8) for tensor in parameters_of(at.own).values()
    ),  # one for each of |w|
    "|theta_i|": lambda at: _bytes(learnt_of(at.own).values()),  # both
    "|theta_g|": lambda at: _bytes(learnt_of(at.net()).values()),  # both of the server's model
    "|slice|": lambda at: _bytes(parameters_of(at.net(width=at.level)).values()),  # of the slice that the client trains
    "|s_in|": lambda at: _floats(at.features[0]),  # one example's features, before the intermediate layers
    "|s_out|": lambda at: _floats(at.features[1]),  # and after them
    "|h|": lambda at: _floats(at.features[1]),  # what the last layer reads
    "|x|": lambda at: _floats(one_shape(at.engine.federation.input_shape)),  # one prepared input
    "|z|": lambda at: _floats((at.engine.federation.num_classes,)),  # one example's logits
    "flag": lambda at: 1,
    "integer": lambda at: 8,
    "float": lambda at: _floats((1,)),
    "classes": lambda at: at.engine.federation.num_classes,
    "present": lambda at: len(at.site.train.labels.unique()),  # classes that the client holds
    "examples": lambda at: len(at.site.train),
    "public": lambda at: at.rows,  # examples drawn in a round
    "differs": lambda at: int(at.site.architecture != at.engine.federation.server_architecture),  # 1 or 0
}


def documented(method: type[Method[Any]]) -> list[Documented]:
    """The content of the Wire section: of the defaults first, then of each line that begins with "with".

    Raises:
        AssertionError: a line cannot be read, or a direction has none.
    """
    lines = [line.partition(" ") for line in section(method, "Wire")]
    plain = _directions([f"{head} {rest.strip()}" for head, _, rest in lines if head != "with"])
    assert {"down", "up"} == set(plain), "the Wire section should have one line that starts with 'down', one with 'up'"
    found = [Documented((), **plain)]
    for overrides, colon, rest in (rest.partition(" also:") for head, _, rest in lines if head == "with"):
        assert colon, f"Wire: with {overrides.strip()!r}: expected 'OVERRIDES also: down ...; up ...'"
        more = _directions([part.strip() for part in rest.split(";")])
        laid = {way: plain[way] | more.get(way, {}) for way in plain}
        found.append(Documented(tuple(shlex.split(overrides, posix=False)), **laid))
    return found


def applying(method: type[Method[Any]], overrides: Sequence[str]) -> Documented:
    """The entries documented for these hyper-parameters: of the defaults, and of each "with" whose overrides they have.

    Raises:
        AssertionError: as `documented`.
    """
    plain, *others = documented(method)
    subject, found = quick(method, overrides), {"down": dict(plain.down), "up": dict(plain.up)}
    for other in others:
        if _changes_nothing(method, subject, (*overrides, *other.overrides)):
            found["down"] |= {name: size for name, size in other.down.items() if plain.down.get(name) != size}
            found["up"] |= {name: size for name, size in other.up.items() if plain.up.get(name) != size}
    return Documented(tuple(overrides), **found)


def _changes_nothing(method: type[Method[Any]], subject: Method[Any], overrides: Sequence[str]) -> bool:
    """Whether these overrides make the same method; mutually exclusive options do not."""
    try:
        return quick(method, overrides) == subject
    except ConfigError:
        return False


def check_size(formula: str, sent: int, places: Iterable[WirePlace]) -> str | None:
    """What is wrong with the number of bytes sent by all clients together; None if nothing.

    Raises:
        AssertionError: the formula cannot be evaluated.
    """
    bound = formula.startswith(_BOUND)
    expected = sum(evaluated(formula.removeprefix(_BOUND), place) for place in places)
    fits = sent <= expected if bound else sent == expected
    return None if fits else f"{sent} bytes, documented {formula}, that is {expected}"


def evaluated(formula: str, place: WirePlace) -> int:
    """The bytes of one client's entry.

    Raises:
        AssertionError: the formula has an unknown symbol, or cannot be parsed.
    """
    if formula.isdigit():
        return _NUMBER_BYTES * int(formula)
    text = _SYMBOL.sub(lambda found: str(_value(found[0], formula, place)), formula)
    try:
        return _folded(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, KeyError) as error:
        raise AssertionError(
            f"Wire: {formula!r} is not a formula; expected symbols, numbers, +, * and brackets"
        ) from error


def _directions(lines: Iterable[str]) -> dict[str, dict[str, str]]:
    """By direction, the formula of each entry."""
    found: dict[str, dict[str, str]] = {}
    for line in lines:
        way, _, rest = line.partition(" ")
        assert way in ("down", "up"), f"Wire: found {line!r}; expected a line that starts with 'down', 'up' or 'with'"
        found[way] = {}
        for entry in (entry.strip() for entry in rest.split(",")):
            parts = _ENTRY.fullmatch(entry)
            assert parts or entry == "nothing", f"Wire: {way}: found {entry!r}; expected 'NAME FORMULA' or 'nothing'"
            found[way] |= {parts[1]: parts[2]} if parts else {}
    return found


def _value(symbol: str, formula: str, place: WirePlace) -> int:
    if symbol in SYMBOLS:
        return SYMBOLS[symbol](place)
    state = getattr(place.state, symbol.strip("|"), None) if symbol.startswith("|") else None
    if state is not None:
        return Message(held=state).nbytes
    value: Any = place.engine.method
    for name in symbol.split("."):
        value = getattr(value, name, None)
    known = ", ".join(SYMBOLS)
    assert isinstance(value, int), (
        f"Wire: {formula!r} has {symbol!r}, which is not a symbol; known: {known}, hyper-parameters,"
        " and |NAME| for the entry NAME of the method's state"
    )
    return int(value)


def _folded(node: ast.expr) -> int:
    if isinstance(node, ast.Constant):
        return int(str(node.value))
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_folded(node.left), _folded(node.right))
    raise SyntaxError(ast.unparse(node))


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {ast.Add: operator.add, ast.Mult: operator.mul}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _floats(shape: Iterable[int]) -> int:
    return Size(shape).numel() * get_default_dtype().itemsize
