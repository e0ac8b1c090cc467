"""A table becomes a dataclass: what is made of each value, and how what does not fit is refused."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import date
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.fields import Checked, above, at_least, require
from potluck.experiment.settings.schema import FederationConfig, RunConfig
from potluck.experiment.settings.strict import typed
from potluck.experiment.settings.tables import without_none
from potluck.methods import get_method

Rate = Annotated[float, above(0)]


@dataclass(frozen=True)
class Inner(Checked):
    size: Annotated[int, at_least(1)] = 1
    rate: Rate = 0.5


@dataclass(frozen=True)
class Middle(Checked):
    inner: Inner = Inner(size=4)
    word: Literal["a", "b", "c"] = "a"


@dataclass(frozen=True)
class Outer(Checked):
    name: str
    on: bool = False
    count: int = 1
    number: float = 1.0
    rates: tuple[Rate, ...] | None = None
    either: float | tuple[float, ...] = 1.0
    pair: tuple[int, str] = (1, "x")
    mixed: tuple[str | dict[str, Any], ...] = ()
    middle: Middle = Middle(inner=Inner(rate=2.0), word="b")
    perhaps: Middle | None = None
    made: Inner = field(default_factory=lambda: Inner(size=9))
    several: tuple[Inner, ...] = ()
    named: dict[str, Inner] = field(default_factory=dict[str, Inner])

    def __post_init__(self) -> None:
        require(self.count != 13, "count", "another number", self.count)


@dataclass(frozen=True)
class Stranger:
    """Of a plug-in's author, who does not derive from `Checked`."""

    size: int = 1
    rate: Rate = 0.5
    numbers: list[float] = field(default_factory=list[float])
    row: Sequence[int] = ()
    bare: tuple = ()  # type: ignore[type-arg]
    whole_or_not: float | int = 1
    anything: Any = None

    def __post_init__(self) -> None:
        if self.size > 10:
            raise TypeError("it is too large")
        if self.size > 5:
            raise ValueError("size must be at most 5")
        assert self.size != 5, "five is taken"


@dataclass(frozen=True)
class Holder:
    inside: Stranger = Stranger(rate=3.0)


WHOLE, FINITE = st.integers(-(10**6), 10**6), st.floats(-1e6, 1e6)
RATE = st.floats(1e-6, 1e6) | st.integers(1, 9)


def tables(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Tables with any of these keys."""
    return st.fixed_dictionaries({}, optional=values)


INNER = tables(size=st.integers(1, 99), rate=RATE)
MIDDLE = tables(inner=INNER, word=st.sampled_from("abc"))
OUTER = st.builds(
    lambda name, table: {"name": name, **table},
    st.text(),
    tables(
        on=st.booleans(),
        count=WHOLE.filter(lambda count: count != 13),
        number=WHOLE | FINITE,
        rates=st.lists(RATE),
        either=FINITE | WHOLE | st.lists(FINITE | WHOLE),
        pair=st.tuples(WHOLE, st.text()).map(list),
        mixed=st.lists(st.text() | st.dictionaries(st.text(), WHOLE | st.lists(WHOLE))),
        middle=MIDDLE,
        perhaps=MIDDLE,
        made=INNER,
        several=st.lists(INNER, max_size=3),
        named=st.dictionaries(st.text(), INNER, max_size=3),
    ),
)


def outer(**values: Any) -> Outer:
    return typed(Outer, {"name": "x", **values}, "outer", "file")


@given(OUTER)
def test_typed__what_is_made_of_a_table_that_fits_is_made_of_its_own_table_again(tree):
    made = typed(Outer, tree, "outer", "file")
    assert typed(Outer, without_none(asdict(made)), "outer", "file") == made


@given(OUTER)
def test_typed__lists_are_tuples_and_numbers_floats_where_the_annotation_says_so_and_nothing_else_changes(tree):
    made = typed(Outer, tree, "outer", "file")
    for key in tree.keys() & {"name", "on", "count"}:
        assert getattr(made, key) is tree[key]
    assert type(made.number) is float
    assert made.number == tree.get("number", 1)
    for key in tree.keys() & {"rates", "pair", "mixed"}:
        assert getattr(made, key) == tuple(tree[key])
    assert all(type(rate) is float for rate in made.rates or ())
    assert {type(one) for one in made.mixed} <= {str, dict}
    assert type(made.either) is (tuple if isinstance(tree.get("either"), list) else float)


@given(OUTER)
def test_typed__tables_are_laid_over_the_defaults_of_their_holder(tree):
    made = typed(Outer, tree, "outer", "file")
    inner = tree.get("middle", {}).get("inner", {})
    assert made.middle == Middle(replace(Inner(rate=2.0), **inner), tree.get("middle", {}).get("word", "b"))
    assert made.made == replace(Inner(size=9), **tree.get("made", {}))
    assert made.several == tuple(Inner(**one) for one in tree.get("several", ()))
    assert made.named == {name: Inner(**one) for name, one in tree.get("named", {}).items()}
    if (perhaps := tree.get("perhaps")) is not None:
        assert made.perhaps == Middle(replace(Inner(size=4), **perhaps.get("inner", {})), perhaps.get("word", "a"))


@given(OUTER, st.sampled_from(["middle", "middle.inner", "made", "perhaps"]), st.sampled_from(["sise", "x", "inner."]))
def test_typed__an_unknown_key_is_told_before_anything_else_of_its_table(tree, table, key):
    place: dict[str, Any] = tree
    for name in table.split("."):
        place = place.setdefault(name, {})
    place |= {key: 1, "size": "wrong"}
    with pytest.raises(ConfigError, match=rf"^file: unknown key outer\.{table}\.({key}|size); nearest: \w"):
        typed(Outer, tree, "outer", "file")


WRONG: dict[str, st.SearchStrategy[Any]] = {
    "name": WHOLE | st.booleans() | st.none() | st.lists(st.text()),
    "on": WHOLE | st.text() | st.none(),
    "count": st.booleans() | FINITE | st.text() | st.none() | st.lists(WHOLE),
    "number": st.booleans() | st.text() | st.none() | st.sampled_from([math.nan, math.inf, -math.inf, 10**400]),
    "rates": RATE | st.text() | st.booleans() | st.lists(st.text() | st.booleans() | st.floats(-9, 0), min_size=1),
    "either": st.text() | st.booleans() | st.lists(st.text() | st.booleans(), min_size=1),
    "pair": st.lists(WHOLE) | WHOLE | st.tuples(FINITE, st.text()).map(list) | st.tuples(WHOLE).map(list),
    "mixed": st.text() | st.lists(WHOLE | st.lists(st.text()), min_size=1) | st.dictionaries(st.text(), WHOLE),
    "middle": WHOLE | st.text() | st.lists(MIDDLE) | st.none(),
    "perhaps": WHOLE | st.text() | st.booleans() | st.lists(MIDDLE),
    "several": INNER | WHOLE | st.lists(WHOLE, min_size=1),
    "named": WHOLE | st.lists(INNER) | st.dictionaries(st.text("ab"), WHOLE, min_size=1),
}


@given(st.data(), st.sampled_from(sorted(WRONG)))
def test_typed__a_value_that_does_not_fit_is_refused_on_one_line_by_its_dotted_key(data, key):
    with pytest.raises(ConfigError) as refused:
        outer(**{key: data.draw(WRONG[key])})
    said = str(refused.value)
    assert said.startswith((f"file: outer.{key}: expected ", f"file: outer.{key}."))
    assert ": expected " in said
    assert ", found " in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"count": 1.0}, "count: expected a whole number, found 1.0"),
        ({"count": True}, "count: expected a whole number, found True"),
        ({"count": 13}, "count: expected another number, found 13"),
        ({"on": 1}, "on: expected True or False, found 1"),
        ({"rates": 0.5}, "rates: expected a list, found 0.5; write [0.5]"),
        ({"rates": "a"}, "rates: expected a list, found 'a'; write [\"a\"]"),
        ({"rates": {"a": 1}}, "rates: expected a list, found {'a': 1}"),
        ({"rates": [1, 0]}, "rates.1: expected above 0, found 0.0"),
        ({"either": [1, "a"]}, "either.1: expected a finite number, found 'a'"),
        ({"pair": [1]}, "pair: expected 2 values, found [1]"),
        ({"mixed": ["a", 3]}, "mixed.1: expected text, found 3"),
        ({"middle": 3}, "middle: expected a table, found 3"),
        ({"middle": {"word": "A"}}, "middle.word: expected 'a' or 'b' or 'c', found 'A'; nearest: 'a'"),
        ({"middle": {"inner": {"size": 0}}}, "middle.inner.size: expected at least 1, found 0"),
        ({"perhaps": {"inner": {"rate": math.nan}}}, "perhaps.inner.rate: expected a finite number, found nan"),
        ({"several": [{}, {"size": "a"}]}, "several.1.size: expected a whole number, found 'a'"),
        ({"named": {"k": {"rate": -1}}}, "named.k.rate: expected above 0, found -1.0"),
        ({"named": {"k": date(2026, 1, 1)}}, "named.k: found a date or time, 2026-01-01; expected a number or text"),
    ],
)
def test_typed__says_where_what_was_expected_and_what_was_found(values, said):
    with pytest.raises(ConfigError) as refused:
        outer(**values)
    assert str(refused.value).startswith(f"file: outer.{said}")


def test_typed__a_required_key_that_is_missing_is_named():
    with pytest.raises(ConfigError, match=r"^file: outer\.name: expected a value, found None$"):
        typed(Outer, {"count": 2}, "outer", "file")


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"size": "1"}, "size: expected a whole number, found '1'"),
        ({"rate": 0}, "rate: expected above 0, found 0.0"),
        ({"numbers": [1, "a"]}, "numbers.1: expected a finite number, found 'a'"),
        ({"numbers": 1}, "numbers: expected a list, found 1; write [1]"),
        ({"row": [1.5]}, "row.0: expected a whole number, found 1.5"),
        ({"bare": 1}, "bare: expected a list, found 1; write [1]"),
        ({"whole_or_not": True}, "whole_or_not: expected a finite number, found True"),
        ({"size": 11}, ": it is too large"),
        ({"size": 6}, "size must be at most 5"),
        ({"size": 5}, ": five is taken"),
        ({"sise": 2}, ""),
    ],
)
def test_typed__a_dataclass_that_derives_from_nothing_is_checked_before_its_own_checks_and_after(tree, said):
    full = f"holder.inside{said if said.startswith(':') else f'.{said}'}"
    full = full if said else "unknown key holder.inside.sise; nearest: holder.inside.size"
    with pytest.raises(ConfigError) as refused:
        typed(Holder, {"inside": tree}, "holder", "file")
    assert str(refused.value).startswith(f"file: {full}")


def test_typed__a_dataclass_that_derives_from_nothing_is_made_as_any_other():
    made = typed(Holder, {"inside": {"numbers": [1], "row": [1], "bare": [1], "anything": [1]}}, "holder", "file")
    assert made == Holder(Stranger(rate=3.0, numbers=[1.0], row=[1], bare=(1,), anything=[1]))
    assert type(made.inside.numbers[0]) is float
    assert type(typed(Stranger, {"whole_or_not": 2}, "stranger", "file").whole_or_not) is int


@pytest.mark.parametrize("cls", [RunConfig, FederationConfig, get_method("fedin"), get_method("heterofl")])
@given(st.data())
def test_typed__a_table_is_taken_exactly_if_python_takes_its_values(cls, data):
    name = data.draw(st.sampled_from([spec.name for spec in fields(cls)]))
    value = data.draw(
        st.none() | st.booleans() | st.integers(-2, 99) | st.floats(-2, 2) | st.sampled_from(["a", "all"])
    )
    told: list[str] = []
    for make in (lambda: cls(**{name: value}), lambda: typed(cls, {name: value}, "table", "file")):
        try:
            told.append(f"made with {getattr(make(), name) == value}")
        except ConfigError:
            told.append("refused")
    assert told[0] == told[1]
