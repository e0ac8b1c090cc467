"""What holds for all schemes; their own laws are in the files beside this one."""

from dataclasses import FrozenInstanceError, dataclass, fields, is_dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.core.ground.errors import ConfigError, DataError
from potluck.core.ground.rng import fold_in
from potluck.data.partition import get_partition, list_partitions

KEY = fold_in(0, "test")
TARGETS = torch.randint(10, (1200,), generator=KEY.generator())
every_scheme = pytest.mark.parametrize("name", [one for one in list_partitions() if one != "natural"])  # by owner


def left_out(name: str, examples: int, clients: int) -> int:
    """How many examples each scheme may leave out of data whose classes are all held by somebody."""
    return examples % clients if name == "balanced_dirichlet" else 0


def test_listing() -> None:
    assert list_partitions() == ["balanced_dirichlet", "dirichlet", "iid", "natural", "pathological"]
    assert list_partitions("*dirichlet") == ["balanced_dirichlet", "dirichlet"]


def test_unknown_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown partition 'dirichle'; nearest: dirichlet.*potluck list partitions"):
        get_partition("dirichle")


def test_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Halves:
        pass

    class Point:
        load = staticmethod(lambda: Halves)

    monkeypatch.setattr("potluck.data.partition.plugins", {"potluck.partitions": {"halves": Point}}.__getitem__)
    assert "halves" in list_partitions()
    assert get_partition("halves") is Halves


@every_scheme
def test_is_a_frozen_dataclass_with_defaults(name: str) -> None:
    scheme = get_partition(name)()
    assert is_dataclass(scheme)
    with pytest.raises((FrozenInstanceError, TypeError)):
        scheme.anything = 1  # pyright: ignore[reportAttributeAccessIssue]


@every_scheme
@settings(max_examples=15)
@given(seed=st.integers(0, 1000), clients=st.integers(5, 20))
def test_parts_are_disjoint_covering_and_never_empty(name: str, seed: int, clients: int) -> None:
    parts = get_partition(name)()(TARGETS, clients, fold_in(seed))
    everything = torch.cat(parts)
    assert len(parts) == clients
    assert all(part.dtype == torch.int64 and len(part) for part in parts)
    assert all(torch.equal(part, part.sort().values) for part in parts)
    assert len(everything.unique()) == len(everything)
    assert len(everything) == len(TARGETS) - left_out(name, len(TARGETS), clients)
    assert everything.max() < len(TARGETS)


@every_scheme
def test_one_client_holds_all_that_is_given_out(name: str) -> None:
    (part,) = get_partition(name)()(TARGETS % 2, 1, KEY)
    assert torch.equal(part, torch.arange(len(TARGETS)))


@every_scheme
def test_parts_are_seeded(name: str) -> None:
    scheme = get_partition(name)()
    first, same, other = scheme(TARGETS, 8, KEY), scheme(TARGETS, 8, KEY), scheme(TARGETS, 8, KEY.fold(1))
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@every_scheme
def test_each_class_is_shuffled(name: str) -> None:
    targets = torch.arange(2).repeat_interleave(600)
    for part in get_partition(name)()(targets, 3, KEY):
        for label in range(2):
            held = part[targets[part] == label]
            assert len(held) < 10 or held.max() - held.min() >= len(held), "not a run of the stored order"


@every_scheme
def test_inputs_are_left_alone(name: str) -> None:
    targets, state = TARGETS.clone(), torch.get_rng_state()
    get_partition(name)()(targets, 8, KEY)
    assert torch.equal(targets, TARGETS)
    assert torch.equal(torch.get_rng_state(), state)


@every_scheme
@given(
    seed=st.integers(0, 1000),
    clients=st.integers(1, 1000),
    examples=st.integers(1, 3000),
    classes=st.integers(1, 30),
    exponent=st.floats(-6, 6),
    least=st.integers(1, 4),
)
def test_every_division_ends_in_parts_for_all_or_is_refused(
    name: str, seed: int, clients: int, examples: int, classes: int, exponent: float, least: int
) -> None:
    scheme = get_partition(name)
    known = {"alpha": 10**exponent, "min_examples": least, "classes": least}
    options = {field.name: known[field.name] for field in fields(scheme) if field.name in known}  # type: ignore[arg-type]
    targets = torch.randint(classes, (examples,), generator=fold_in(seed).generator())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("potluck.data.partition.dirichlet.TRIES", 20)
        try:
            parts = scheme(**options)(targets, clients, fold_in(seed))
        except DataError:
            assert name != "dirichlet" or clients * least > examples
            return
    assert len(parts) == clients
    assert min(map(len, parts)) >= (least if name == "dirichlet" else 1)
    everything = torch.cat(parts)
    assert len(everything.unique()) == len(everything)


@every_scheme
def test_more_clients_than_examples(name: str) -> None:
    with pytest.raises(DataError, match="21 clients but only 20 examples"):
        get_partition(name)()(TARGETS[:20], 21, KEY)


@every_scheme
def test_no_clients(name: str) -> None:
    with pytest.raises(ValueError, match="clients: expected at least 1, found 0"):
        get_partition(name)()(TARGETS, 0, KEY)


@pytest.mark.parametrize(
    ("name", "field", "value", "expected"),
    [
        ("dirichlet", "alpha", -1, "above 0, found -1"),
        ("dirichlet", "alpha", float("nan"), "a finite number, found nan"),
        ("dirichlet", "min_examples", 0, "at least 1, found 0"),
        ("balanced_dirichlet", "alpha", 0.0, "above 0, found 0.0"),
        ("balanced_dirichlet", "alpha", float("inf"), "a finite number, found inf"),
        ("pathological", "classes", 0, "at least 1, found 0"),
    ],
)
def test_parameters_out_of_range(name: str, field: str, value: float, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: expected {expected}$"):
        get_partition(name)(**{field: value})
