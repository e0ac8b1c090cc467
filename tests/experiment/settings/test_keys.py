"""Keys explained: every key of every table has a meaning, from the one place where it is written."""

from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

from potluck.core.ground.fields import Checked, above, at_most
from potluck.core.tasks.named import TASKS
from potluck.data.partition import get_partition, list_partitions
from potluck.experiment.settings.keys import options_of, settings_of
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import TABLES
from potluck.methods import get_method, list_methods
from potluck.models import get_model, list_models

SETTINGS = [
    *((table, one) for table, cls in TABLES.items() for one in settings_of(cls)),
    *((f"partition {name}", one) for name in list_partitions() for one in settings_of(get_partition(name))),
    *((f"task {name}", one) for name, task in TASKS.items() for one in settings_of(type(task))),
    *((f"model {name}", one) for name in list_models() for one in options_of(get_model(name), ("scale",))),
]


def unexplained(settings):
    return [one.key for one in settings if not one.meaning or one.kind in ("", "any value")]


@pytest.mark.parametrize("name", list_methods())
def test_settings_of__explains_every_key_of_a_method(name):
    found = settings_of(get_method(name))
    assert not unexplained(found)
    assert len({one.key for one in found}) == len(found)


def test_settings_of__explains_every_other_key():
    assert len(SETTINGS) > 100
    assert not [(owner, one.key) for owner, one in SETTINGS if unexplained([one])]


def test_settings_of__notices_what_nobody_explains():
    @dataclass(frozen=True)
    class Silent:
        """Half of it.

        Attributes:
            said: explained.
        """

        said: int = 1
        silent: int = 2

    assert unexplained(settings_of(Silent)) == ["silent"]


def test_settings_of__opens_nested_tables_with_the_defaults_of_their_holder():
    found = {one.key: one for one in settings_of(get_method("fedin"))}
    assert found["training.lr"].default == 0.001
    assert found["sharing.weighting"].default == "uniform"  # a table's own default is "samples"
    assert found["sharing.weighting"].allowed == "samples, uniform"
    assert "eq. 19" in found["sharing.weighting"].meaning
    assert found["sharing.combine.trim"].allowed == "at least 0 and below 0.5"
    assert found["privacy"].default is None
    assert "privacy.epsilon" in found


def test_settings_of__has_every_key_that_a_configuration_has():
    """A resolved configuration, flattened, has no key that is not explained."""

    def flat(tree, prefix=""):
        for key, value in tree.items():
            yield from flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]

    tree = resolve({"method": {"name": "fedin"}}).settings()
    explained = {f"{table}.{one.key}" for table, cls in TABLES.items() for one in settings_of(cls)}
    explained |= {f"method.{one.key}" for one in settings_of(get_method("fedin"))} | {"method.name"}
    explained |= {f"federation.partition.{one.key}" for one in settings_of(get_partition("dirichlet"))}
    missing = set(flat(tree)) - explained - {"federation.partition.name"}
    assert not missing


@dataclass(frozen=True)
class Everything(Checked):
    """One of each.

    Attributes:
        share: above nothing,
            and at most all.
        word: a word.
        several: some.
        other: a table or text.
    """

    share: Annotated[float, above(0), at_most(1)]
    word: Literal["a", "b"] = "a"
    several: tuple[Annotated[int, above(0)], ...] | None = None
    other: str | dict[str, int] = "x"


def test_settings_of__puts_types_and_ranges_in_words():
    share, word, several, other = settings_of(Everything)
    assert (share.kind, share.allowed) == ("number", "above 0 and at most 1")
    assert share.meaning == "above nothing, and at most all."
    assert (word.kind, word.allowed, word.default) == ("one of", "a, b", "a")
    assert (several.kind, several.allowed) == ("list of whole numbers", "each above 0")
    assert other.kind == "text or table"
