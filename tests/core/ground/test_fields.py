"""What a field may hold, asked of small dataclasses here and of everything that a user makes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from types import NoneType
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import pytest

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.fields import (
    Checked,
    Never,
    Only,
    above,
    at_least,
    at_most,
    below,
    check_fields,
    check_value,
    require,
)
from potluck.core.method import Method
from potluck.core.requests.fit import LocalTraining
from potluck.data.partition import get_partition, list_partitions
from potluck.data.transforms import Cutout, Normalise, RandomCrop, Resize
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import FederationConfig, RunConfig
from potluck.methods import get_method, list_methods
from potluck.methods.fedin import FedIN
from potluck.methods.scaffold import Scaffold
from potluck.parts.privacy import FeaturePrivacy, SumPrivacy
from potluck.parts.sharing import Sharing

NAN, INF = math.nan, math.inf
T = TypeVar("T")


@dataclass(frozen=True)
class Inner(Checked):
    share: Annotated[float, above(0), at_most(1)] = 1.0


@dataclass(frozen=True)
class Settings(Checked):
    word: Literal["mean", "median", "trimmed"] = "mean"
    number: float = 1.0
    count: Annotated[int, at_least(2)] = 2
    part: Annotated[float, at_least(0), below(1)] = 0.0
    limit: Annotated[float, above(0)] | None = None
    rates: tuple[Annotated[float, above(0)], ...] = (1.0,)
    pair: tuple[int, str] = (1, "a")
    models: tuple[str | dict[str, Any], ...] = ()
    on: bool = True
    name: str = ""
    inner: Inner = Inner()
    table: dict[str, Any] | None = None


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("word", "Mean", "expected 'mean' or 'median' or 'trimmed', found 'Mean'; nearest: 'mean'"),
        ("word", None, "expected 'mean' or 'median' or 'trimmed', found None"),
        ("number", NAN, "expected a finite number, found nan"),
        ("number", INF, "expected a finite number, found inf"),
        ("number", -INF, "expected a finite number, found -inf"),
        ("number", np.float64("nan"), "expected a finite number, found"),
        ("number", 10**400, "expected a finite number, found 1000"),
        ("number", True, "expected a finite number, found True"),
        ("number", "1.0", "expected a finite number, found '1.0'"),
        ("number", None, "expected a finite number, found None"),
        ("count", 1, "expected at least 2, found 1"),
        ("count", 2.0, "expected a whole number, found 2.0"),
        ("count", True, "expected a whole number, found True"),
        ("part", 1, "expected at least 0 and below 1, found 1"),
        ("part", -0.1, "expected at least 0 and below 1, found -0.1"),
        ("limit", 0.0, "expected above 0, found 0.0"),
        ("limit", NAN, "expected a finite number, found nan"),
        ("rates", 0.5, "expected a tuple, found 0.5"),
        ("pair", (1,), "expected 2 values, found (1,)"),
        ("on", 1, "expected True or False, found 1"),
        ("name", 3, "expected text, found 3"),
        ("inner", None, "expected Inner, found None"),
        ("inner", {"share": 1.0}, "expected Inner, found {'share': 1.0}"),
    ],
)
def test_what_an_annotation_does_not_allow_is_refused_by_name(field, value, complaint):
    with pytest.raises(ConfigError) as refused:
        Settings(**{field: value})
    assert str(refused.value).startswith(f"{field}: {complaint}")


@pytest.mark.parametrize(
    ("hint", "value", "complaint"),
    [
        (tuple[Annotated[float, above(0)], ...], (0.5, 0.0), "it.1: expected above 0, found 0.0"),
        (tuple[float, ...], (NAN,), "it.0: expected a finite number, found nan"),
        (tuple[int, str], ("a", 1), "it.0: expected a whole number, found 'a'"),
        (tuple[str | dict[str, Any], ...], ("a", 3), "it.1: expected text, found 3"),
        (dict[str, Inner], {"a": Inner(), "b": 1}, "it.b: expected Inner, found 1"),
        (dict[str, tuple[int, ...]], {"a": (1, 2.0)}, "it.a.1: expected a whole number, found 2.0"),
        (list[int], [1, "2"], "it.1: expected a whole number, found '2'"),
        (list[int], (1, 2), "it: expected a list, found (1, 2)"),
        (Sequence[str], "ab", "it: expected a sequence, found 'ab'"),
        (Sequence[bool], (True, 1), "it.1: expected True or False, found 1"),
        (str | tuple[str, ...], ("a", 3), "it.1: expected text, found 3"),
        (str | tuple[str, ...], 3, "it: expected text, found 3"),
        (None | int, "a", "it: expected a whole number, found 'a'"),
    ],
)
def test_what_is_wrong_inside_a_value_is_named_by_its_place(hint, value, complaint):
    with pytest.raises(ConfigError) as refused:
        check_value("it", value, hint)
    assert str(refused.value) == complaint


@pytest.mark.parametrize("hint", [tuple, tuple[int, ...], Sequence[int], str | tuple[Any, ...], Any, object])
def test_what_has_the_annotations_kinds_all_through_fits(hint):
    check_value("it", (1, 2), hint)


def test_what_an_annotation_allows_is_taken_as_it_is():
    given = Settings(
        word="trimmed", number=3, count=np.int64(5), part=0, limit=1e-9, rates=(1, 0.5), pair=(0, ""), on=False,
        models=("cnn2", {"name": "cnn3"}), name="x", inner=Inner(0.5), table={"a": object()},
    )  # fmt: skip
    assert given.number == 3
    assert given.limit == 1e-9
    assert replace(given, limit=None).limit is None


def test_two_words_need_no_nearest():
    @dataclass(frozen=True)
    class Switch(Checked):
        option: Literal["path", "gradient"] = "path"

    with pytest.raises(ConfigError, match=r"^option: expected 'path' or 'gradient', found 'II'$"):
        Switch(option="II")  # pyright: ignore[reportArgumentType]


def test_require_names_what_was_expected_and_found():
    require(True, "a", "never said", 1)
    with pytest.raises(ConfigError, match=r"^a: expected at least b, found 1$"):
        require(False, "a", "at least b", 1)


# Who is checked


def test_checked_comes_before_a_post_init_of_ones_own_that_calls_nobody():
    seen = []

    @dataclass(frozen=True)
    class Own(Checked):
        lr: float = 0.1

        def __post_init__(self) -> None:
            seen.append(self.lr)

    with pytest.raises(ConfigError, match="lr: expected a finite number"):
        Own(lr=NAN)
    assert not seen
    Own()
    assert seen == [0.1]


def test_checked_covers_fields_that_a_derived_class_adds():
    @dataclass(frozen=True)
    class More(Settings):
        extra: float = 0.0

    with pytest.raises(ConfigError, match="extra: expected a finite number"):
        More(extra=NAN)
    with pytest.raises(ConfigError, match="count: expected at least 2"):
        More(count=0)


def test_checked_covers_a_stranger_who_comes_first_with_a_post_init():
    class Stranger:
        def __post_init__(self) -> None:
            pass

    @dataclass(frozen=True)
    class Both(Stranger, Checked, Generic[T]):
        number: float = 1.0

    with pytest.raises(ConfigError, match="number: expected"):
        Both(number=NAN)


def test_a_new_method_is_checked_without_doing_anything():
    @dataclass(frozen=True)
    class New(Method[None]):
        temperature: Annotated[float, above(0)] = 1.0
        rule: Literal["hard", "soft"] = "soft"

        def __post_init__(self) -> None:
            pass

    for wrong in ({"temperature": NAN}, {"temperature": 0.0}, {"rule": "Soft"}):
        with pytest.raises(ConfigError, match=f"^{next(iter(wrong))}: expected"):
            New(**wrong)


# Everything that a user makes

MADE = {
    FeaturePrivacy: FeaturePrivacy(clip=1.0, epsilon=1.0, delta=0.1),
    SumPrivacy: SumPrivacy(noise_multiplier=1.0, delta=0.1),
    Resize: Resize(4),
    RandomCrop: RandomCrop(1),
    Cutout: Cutout(2),
    Normalise: Normalise(),
}


def reached(cls: type[Any], found: dict[type[Any], None]) -> None:
    """The class and all dataclasses in its fields."""
    found.setdefault(cls)
    for name, hint in get_type_hints(cls).items():
        for kind in (hint, *get_args(hint)):
            if name in {spec.name for spec in fields(cls)} and isinstance(kind, type) and is_dataclass(kind):
                reached(kind, found)


def users_classes() -> list[type[Any]]:
    found: dict[type[Any], None] = {}
    roots = [get_method(name) for name in list_methods()] + [get_partition(name) for name in list_partitions()]
    for cls in [*roots, FederationConfig, RunConfig, *MADE]:
        reached(cls, found)
    return list(found)


def wrong_values(hint: Any, *, negative: bool) -> list[Any]:
    """Values that a field with this annotation must not take."""
    least = [-1] if negative else []
    if hint is float:
        return [NAN, INF, -INF, True, "0.1", *least]
    if hint is int:
        return [NAN, 0.5, True, "1", *least]
    if hint is bool:
        return [1, "yes", None]
    if hint is str:
        return [3]
    if get_origin(hint) is Literal:
        return ["Exact", *(word.upper() for word in get_args(hint)), None, 1]
    if get_origin(hint) is tuple:
        return [(value,) for value in wrong_values(get_args(hint)[0], negative=negative)]
    if NoneType in get_args(hint):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        found = wrong_values(kinds[0], negative=negative) if len(kinds) == 1 else []
        return [value for value in found if value is not None]
    return [3] if isinstance(hint, type) and is_dataclass(hint) else []


CASES = [
    pytest.param(cls, spec.name, values, id=f"{cls.__name__}.{spec.name}")
    for cls in users_classes()
    for spec in fields(cls)
    if (values := wrong_values(get_type_hints(cls)[spec.name], negative=cls is not Normalise))
]


@pytest.mark.parametrize(("cls", "field", "values"), CASES)
def test_every_field_that_a_user_sets_refuses_what_it_cannot_mean(cls, field, values):
    made = MADE[cls] if cls in MADE else cls()
    for value in values:
        with pytest.raises(ConfigError, match=rf"^{field}(\.0)?: expected"):
            replace(made, **{field: value})


def test_the_cases_cover_what_was_once_taken_without_a_word():
    tried = {(case.id, str(value)) for case in CASES for value in case.values[2]}
    assert {
        ("FedIN.rule", "Exact"), ("Sharing.weighting", "SAMPLES"), ("Scaffold.server_lr", "nan"), ("FedIN.mu", "nan"),
        ("FedIN.noise", "inf"), ("FedIN.multiplier", "nan"), ("LocalTraining.lr", "inf"), ("FeDepth.link", "AVERAGE"),
        ("FeaturePrivacy.epsilon", "inf"), ("RunConfig.memory_gib", "inf"), ("Numerics.precision", "FP32"),
        ("Dirichlet.alpha", "nan"), ("HeteroFL.levels", "(nan,)"),
    } <= tried  # fmt: skip


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: FedIN(rule="Exact"), "rule: expected 'simplified' or 'exact', found 'Exact'"),
        (lambda: Sharing(weighting="sample"), "weighting: expected 'samples' or 'uniform', found 'sample'"),
        (lambda: Scaffold(option="II"), "option: expected 'path' or 'gradient', found 'II'"),
        (lambda: Scaffold(server_lr=NAN), "server_lr: expected a finite number, found nan"),
        (lambda: LocalTraining(optimizer="adamm"), ".*optimizer: .*'adamm'.*"),
    ],
)
def test_a_wrong_word_is_no_other_algorithm(make, complaint):
    with pytest.raises(ConfigError, match=f"^{complaint}$"):
        make()


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ({"method": {"name": "fedin", "mu": NAN}}, r"method\.mu: .*finite number, found nan"),
        ({"method": {"name": "fedin", "training": {"lr": INF}}}, r"method\.training\.lr: .*finite number, found inf"),
        ({"method": {"name": "scaffold", "server_lr": -1.0}}, r"method\.server_lr: expected at least 0, found -1\.0"),
        ({"method": {"name": "fedin", "sharing": {"weighting": "sample"}}}, r"method\.sharing\.weighting: "),
        (
            {"method": {"name": "fedgh", "server_training": {"persist": True}}},
            r"method\.server_training\.persist: expected False, since the server's optimisers are new every round,"
            r" found True$",
        ),
        ({"federation": {"partition": {"alpha": NAN}}}, r"federation\.partition\.alpha: .*finite number, found nan"),
        ({"run": {"memory_gib": INF}}, r"run\.memory_gib: .*finite number, found inf"),
    ],
)
def test_a_configurations_error_still_names_the_dotted_key(table, complaint):
    with pytest.raises(ConfigError, match=f"^here: {complaint}"):
        resolve(table, "here")


def test_check_fields_serves_a_dataclass_that_derives_from_nothing():
    @dataclass(frozen=True)
    class Plain:
        number: float = NAN

    with pytest.raises(ConfigError, match=r"^number: expected a finite number"):
        check_fields(Plain())


def test_only_one_value_of_a_nested_field_is_accepted_where_the_annotation_says_so():
    @dataclass(frozen=True)
    class Inner(Checked):
        colour: str = "red"
        size: int = 1

    @dataclass(frozen=True)
    class Outer(Checked):
        free: Inner = Inner()
        bound: Annotated[Inner, Only("colour", "red", "as paint is out")] = Inner()
        bare: Annotated[Inner, Only("size", 1)] = Inner()

    assert Outer(Inner("blue"), Inner(size=2)).bound.size == 2
    with pytest.raises(ConfigError, match=r"^bound\.colour: expected 'red', as paint is out, found 'blue'$"):
        Outer(bound=Inner("blue"))
    with pytest.raises(ConfigError, match=r"^bare\.size: expected 1, found 2$"):
        Outer(bare=Inner(size=2))
    with pytest.raises(ConfigError, match=r"^bound: expected Inner, found 3$"):
        Outer(bound=3)


def test_a_value_of_a_nested_field_is_refused_where_the_annotation_says_so():
    @dataclass(frozen=True)
    class Inner(Checked):
        colour: str = "red"

    @dataclass(frozen=True)
    class Outer(Checked):
        inner: Annotated[Inner, Never("colour", "none", "one that is seen")] = Inner()

    assert Outer(Inner("blue")).inner.colour == "blue"
    with pytest.raises(ConfigError, match=r"^inner\.colour: expected one that is seen, found 'none'$"):
        Outer(Inner("none"))
