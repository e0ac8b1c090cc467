import math
import re
from dataclasses import replace

import pytest
import torch
from torch import Size

from potluck.core.federation import Member
from potluck.core.message import Message
from potluck.core.nets.classes import OwnClasses, OwnHead
from potluck.core.schema import (
    UNDECLARED_LEAST,
    UNDECLARED_TIMES,
    ClassCounts,
    Labels,
    Look,
    Misfit,
    NotFinite,
    Probabilities,
    Schema,
    Undeclared,
    UpTo,
    booleans,
    count,
    floats,
    integers,
    like,
    logits,
    number,
    optional,
    some_of,
    text,
)

WEIGHTS = {"a.weight": torch.ones(2, 3), "a.batches": torch.tensor(4)}
MEMBER = Member(3, "net", 1.0, {"a.weight": Size((2, 3))}, frozenset({"a.weight"}), examples=10)
NAN, INF = math.nan, math.inf


def complaint(kind, value):
    """Why a value is refused; fails if it is not."""
    with pytest.raises(Misfit) as found:
        kind.check(value, "it", Look())
    assert str(found.value).isprintable()
    return str(found.value)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (floats(2, 3), torch.zeros(2, 3)),
        (floats(UpTo(4), 3), torch.zeros(4, 3)),
        (floats(), torch.tensor(1.0)),
        (floats(2, least=0, most=1), torch.tensor([0.0, 1.0])),
        (integers(2, least=-1, most=5), torch.tensor([-1, 5])),
        (booleans(2), torch.tensor([True, False])),
        (count(10), 10),
        (count(10, least=0), 0),
        (number(0, 1), 0.5),
        (number(0, 1), 1),
        (text(3), "abc"),
        (like(WEIGHTS), {"a.batches": torch.tensor(9), "a.weight": torch.zeros(2, 3)}),
        (like({name: tensor.to("meta") for name, tensor in WEIGHTS.items()}), WEIGHTS),
        (like({"offsets": torch.tensor([-3, 2])}), {"offsets": torch.tensor([-3, 2])}),
        (some_of(WEIGHTS), {"a.batches": torch.tensor(9)}),
        (some_of(WEIGHTS), {}),
        (Schema(a=optional(count(1))), {}),
        (Schema(a=None), {}),
        (ClassCounts(3, most=5), torch.tensor([0, 2, 3])),
        (Labels(UpTo(4), 3), torch.tensor([0, 2, 2])),
        (Probabilities(2, 3), torch.tensor([[0.2, 0.3, 0.5], [0.0, 1.0, 0.0]])),
        (Probabilities(3, 5000), torch.linspace(-9, 9, 15000).view(3, 5000).softmax(1)),
        (Probabilities(0, 3), torch.empty(0, 3)),
        (Probabilities(UpTo(4), 3), torch.tensor([[0.2, 0.3, 0.5]])),
        (Probabilities(UpTo(4, least=0), 3), torch.empty(0, 3)),
    ],
)
def test_what_fits_is_accepted(kind, value):
    kind.check(value, "it", Look())


@pytest.mark.parametrize(
    ("kind", "value", "why"),
    [
        (floats(2, 3), torch.zeros(3, 2), r"a tensor \(3, 2\) of float32; expected a tensor \(2, 3\) of float32"),
        (floats(2, least=0, most=1), torch.tensor([0.5, 1.5]), r"holds 1\.5; expected 0 to 1"),
        (floats(2, least=0, most=1), torch.tensor([-0.5, 0.5]), r"holds -0\.5; expected 0 to 1"),
        (floats(2), torch.zeros(2, dtype=torch.int64), r"of int64; expected"),
        (floats(2), torch.zeros(2, dtype=torch.float64), r"of float64; expected"),
        (floats(UpTo(4), 3), torch.zeros(5, 3), r"found 5 rows, expected 1 to 4"),
        (floats(UpTo(4), 3), torch.zeros(0, 3), r"found 0 rows"),
        (floats(2), [1.0, 2.0], r"is a list"),
        (floats(2), {"x": torch.zeros(2)}, r"is named entries"),
        (floats(2), None, r"is nothing"),
        (integers(2, least=0, most=5), torch.tensor([0, 6]), r"holds 6; expected 0 to 5"),
        (booleans(2), torch.tensor([0, 1]), r"of int64"),
        (count(10), 0, r"is 0; expected 1 to 10"),
        (count(10), 11, r"is 11"),
        (count(10), 1e18, r"is 1e\+18; expected a whole number"),
        (count(10), 10**400, r"is a huge number"),
        (count(10), True, r"is True; expected a whole number"),
        (count(10), "many", r"is text; expected a whole number"),
        (count(10), torch.tensor(3), r"is a tensor"),
        (text(3), "abcd", r"text of at most 3"),
        (text(3), 3, r"is 3; expected text"),
        (like(WEIGHTS), {"a.weight": torch.zeros(2, 3)}, r"it\.a\.batches is missing"),
        (like(WEIGHTS), {**WEIGHTS, "b": torch.zeros(1)}, r"it\.b is not expected; expected are a\.weight, a\.batches"),
        (like(WEIGHTS), {**WEIGHTS, "a.batches": torch.tensor(-1)}, r"it\.a\.batches holds -1"),
        (like(WEIGHTS), {**WEIGHTS, "a.weight": {}}, r"it\.a\.weight is named entries"),
        (some_of(WEIGHTS), {"a.weight": torch.zeros(3)}, r"it\.a\.weight is a tensor \(3\)"),
        (some_of(WEIGHTS), {"x": torch.zeros(3)}, r"it\.x is not expected"),
        (Schema(), {"x": 1}, r"it\.x is not expected; expected are no entries"),
        (Schema(a=optional(count(1))), {"a": 2}, r"it\.a is 2"),
        (ClassCounts(3, most=5), torch.tensor([0, 3, 3]), r"counts 6 examples; expected 1 to 5"),
        (ClassCounts(3, most=5), torch.tensor([0, 0, 0]), r"counts 0"),
        (ClassCounts(3, most=5), torch.tensor([6, -1, 0]), r"holds -1"),
        (Labels(UpTo(4), 3), torch.tensor([0, 3]), r"holds 3; expected 0 to 2"),
        (Probabilities(1, 3), torch.tensor([[0.5, 0.75, -0.25]]), r"holds -0\.25; expected 0 to inf"),
        (
            Probabilities(2, 2),
            torch.tensor([[0.5, 0.5], [0.5, 0.6]]),
            r"a row whose sum is 1\.1; expected probabilities",
        ),
        (Probabilities(2, 2), torch.tensor([[0.0, 0.0], [0.5, 0.5]]), r"a row whose sum is 0; expected prob"),
        (Probabilities(2, 2), torch.full((2, 2), torch.nan), r"holds nan"),
        (Probabilities(2, 2), torch.full((1, 2), 0.5), r"expected a tensor \(2, 2\) of float32"),
        (Probabilities(UpTo(4), 2), torch.tensor([[0.5, 0.5], [0.5, 0.6]]), r"a row whose sum is 1\.1"),
        (Probabilities(UpTo(4), 2), torch.full((5, 2), 0.5), r"found 5 rows, expected 1 to 4"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_and_where_and_why(kind, value, why):
    said = complaint(kind, value)
    assert said.startswith("it")
    assert re.search(why, said), said


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e30, -1e30])
@pytest.mark.parametrize("make", [lambda v: (floats(2), torch.tensor([0.0, v])), lambda v: (number(0, 1), v)])
def test_numbers_that_training_should_not_come_to_are_told_apart(make, value):
    kind, bad = make(value)
    with pytest.raises(NotFinite):
        kind.check(bad, "it", Look())


@pytest.mark.parametrize("value", [NAN, INF, 1e30, -1e30])
def test_a_number_without_bounds_is_one_that_may_be_sent(value):
    number().check(-1e6, "it", Look())
    with pytest.raises(NotFinite):
        number().check(value, "it", Look())
    with pytest.raises(NotFinite):
        number(0).check(150.0, "it", Look(largest=100))


@pytest.mark.parametrize("value", [NAN, INF, 1e30])
def test_like_names_the_tensor_whose_numbers_are_not_finite(value):
    bad = {**WEIGHTS, "a.weight": torch.full((2, 3), value)}
    with pytest.raises(NotFinite, match=r"^it\.a\.weight holds"):
        like(WEIGHTS).check(bad, "it")


def test_the_largest_number_can_be_chosen():
    floats(1).check(torch.tensor([1e30]), "it", Look(largest=1e31))
    with pytest.raises(NotFinite, match=r"at most 0\.5 in size"):
        floats(1).check(torch.tensor([1.0]), "it", Look(largest=0.5))


def test_one_dimension_has_one_size_in_all_entries():
    n = UpTo(5)
    schema = Schema(features=floats(n, 2), labels=Labels(n, 3))
    schema.check({"features": torch.zeros(4, 2), "labels": torch.zeros(4, dtype=torch.int64)})
    with pytest.raises(Misfit, match="labels: found 3 rows, expected 4 as in the other entries"):
        schema.check({"features": torch.zeros(4, 2), "labels": torch.zeros(3, dtype=torch.int64)})


@pytest.mark.parametrize(
    "classes",
    [lambda p: ClassCounts(4, 9, p), lambda p: Labels(UpTo(9), 4, p)],
)
def test_rows_by_class_are_as_many_as_the_classes_that_are_present(classes):
    present = UpTo(4)
    schema = Schema(classes=classes(present), means=floats(present, 2))
    two = torch.tensor([0, 2, 0, 1])  # counts of two classes; or labels of three
    rows = 2 if isinstance(schema.entries["classes"], ClassCounts) else 3
    schema.check({"classes": two, "means": torch.zeros(rows, 2)})
    with pytest.raises(Misfit, match="rows"):
        schema.check({"classes": two, "means": torch.zeros(4, 2)})


def test_sizes_are_those_of_the_largest_reply_that_fits():
    present = UpTo(3)
    schema = Schema(w=like(WEIGHTS), f=floats(present, 2), n=count(5), c=ClassCounts(3, 9, present))
    largest = Message(w=WEIGHTS, f=torch.zeros(3, 2), n=5, c=torch.tensor([1, 1, 1]))
    schema.check(largest)
    assert schema.nbytes == largest.nbytes


def test_a_method_that_declares_nothing_may_receive_what_it_likes():
    Undeclared(MEMBER).check(
        Message(
            weights={"a.weight": torch.zeros(9)}, deep={"a": {"b": torch.zeros(1)}}, word="x", ok=True, examples=10
        ),
        "",
        Look(),
    )


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({"examples": "many"}, "examples is text"),
        ({"examples": 11}, "examples is 11"),
        ({"examples": 3.0}, "whole number"),
        ({"weights": {"a.weight": torch.zeros(2, 3, dtype=torch.int64)}}, r"weights\.a\.weight is .* floating type"),
        ({"any": torch.tensor([NAN])}, "any holds nan"),
        ({"any": {"b": torch.tensor([1e30])}}, r"any\.b holds 1e\+30"),
        ({"any": torch.tensor([complex(0, INF)])}, "any holds inf"),
        ({"any": INF}, "any is inf"),
        ({"any": {"a": {"b": {"c": {"d": {"e": {"f": {"g": {"h": {"i": 1}}}}}}}}}}, "nested more than 8 deep"),
    ],
)
def test_a_method_that_declares_nothing_does_not_receive_what_nobody_could_use(entries, why):
    with pytest.raises(Misfit, match=why):
        Undeclared(MEMBER).check(Message(**entries), "", Look())


def test_a_reply_that_nobody_declared_is_no_larger_than_some_models():
    large = Member(0, "net", 1.0, {"w": Size((2**24,))}, frozenset({"w"}), examples=1)
    assert Undeclared(MEMBER).nbytes == UNDECLARED_LEAST
    assert Undeclared(large).nbytes == UNDECLARED_TIMES * 4 * 2**24


@pytest.mark.parametrize("shapes", [MEMBER.shapes, {}])
def test_logits_are_of_the_clients_own_classes_alone_whether_or_not_it_has_a_network(shapes):
    head = OwnHead(torch.nn.Identity, "net", OwnClasses((2, 0), 4), {})
    kind = logits(2, 4, replace(MEMBER, head=head, shapes=shapes))
    own = torch.tensor([[1.0, -INF, 2.0, -INF], [0.0, -INF, -3.0, -INF]])
    kind.check(own, "it", Look())
    assert kind.nbytes == logits(2, 4, MEMBER).nbytes
    [(path, numbers)] = kind.unbounded(own)
    assert path == ()
    assert torch.equal(numbers, torch.tensor([[2.0, 1.0], [-3.0, 0.0]]))
    assert "for classes that the client lacks; expected minus infinity" in complaint(kind, own.nan_to_num(neginf=0.0))
    assert "expected" in complaint(kind, own[:1])
    for bad in (NAN, INF, -INF):
        with pytest.raises(NotFinite):
            kind.check(own.index_fill(1, torch.tensor([2]), bad), "it", Look())
    with pytest.raises(NotFinite):
        logits(2, 4, MEMBER).check(own, "it", Look())
