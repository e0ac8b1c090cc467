import itertools
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.message import Message
from potluck.core.nets.weights import mean, mean_where_present
from potluck.core.roles import Arriving, Replies
from potluck.parts.means import Aggregate, MeanRule, mean_of

ROBUST = get_args(MeanRule)[1:]
EXACTLY = {"rtol": 0, "atol": 0}
number = st.floats(-1e3, 1e3, width=32)
several = st.lists(st.lists(number, min_size=4, max_size=4).map(torch.tensor), min_size=1, max_size=7)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rule", ["mean", *ROBUST])
def test_arriving__takes_replies_one_at_a_time_under_the_plain_mean_alone(rule):
    taken = []

    def pairs():
        for id in range(3):
            taken.append(id)
            yield id, Message()

    first, _ = next(iter(Aggregate(rule).arriving(Arriving(pairs(), {}))))
    assert (first, taken) == (0, [0] if rule == "mean" else [0, 1, 2])


def test_rule__a_wrong_word_and_a_wrong_share_are_refused():
    with pytest.raises(ConfigError, match="rule: "):
        Aggregate("Median")  # pyright: ignore[reportArgumentType]
    for trim in (-0.1, 0.5, float("nan")):
        with pytest.raises(ConfigError, match="trim: "):
            Aggregate("trimmed", trim)


@given(several)
def test_mean__is_the_weighted_mean_bit_for_bit(tensors):
    shares = [1.0 + index for index in range(len(tensors))]
    assert_close(Aggregate()(tensors, shares), mean(tensors, shares), **EXACTLY)


@given(several)
def test_median__is_the_middle_of_every_coordinate(tensors):
    expected = torch.stack(tensors).double().quantile(0.5, dim=0).float()
    assert_close(Aggregate("median")(tensors, [1.0] * len(tensors)), expected)


@given(several)
def test_trimmed__drops_as_many_of_the_largest_as_of_the_smallest(tensors):
    kept = [sorted(column)[int(0.3 * len(tensors)) :] for column in torch.stack(tensors).T.tolist()]
    kept = [column[: len(column) - int(0.3 * len(tensors))] for column in kept]
    expected = torch.tensor([sum(column) / len(column) for column in kept])
    assert_close(Aggregate("trimmed", 0.3)(tensors, [1.0] * len(tensors)), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("rule", ["mean", *ROBUST])
def test_equal_tensors_and_a_single_one_come_back(rule):
    one = drawn(3, 2)
    assert_close(Aggregate(rule)([one], [7.0]), one)
    assert_close(Aggregate(rule)([one, one, one], [1.0, 2.0, 3.0]), one)


@pytest.mark.parametrize("rule", ROBUST)
def test_single_numbers_are_combined_like_tensors(rule):
    found = Aggregate(rule)([torch.tensor(value) for value in (1.0, 2.0, 3.0)], [1.0] * 3)
    assert_close(found, torch.tensor(2.0))


@pytest.mark.parametrize("rule", ROBUST)
def test_the_order_of_clients_does_not_matter(rule):
    tensors = [drawn(5, seed=seed) for seed in range(4)]
    results = [Aggregate(rule)(list(order), [1.0] * 4) for order in itertools.permutations(tensors)]
    for result in results[1:]:
        assert_close(result, results[0])


REACH = {
    "clipped": 2.0,  # in norm, from a median among the honest, by at most the median distance, five times a fifth
    "geometric_median": 8 / 3,  # from any point by 2 (n - f) / (n - 2 f) times that of the furthest honest one
    "krum": 2**0.5,  # a liar is taken whose score is at most that of an honest one, two squares of their distances
    "multi_krum": 2**0.5,
}
"""How much further than the honest are apart."""


@pytest.mark.slow
@pytest.mark.parametrize("rule", ROBUST)
@given(lie=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=4, max_size=4), place=st.integers(0, 4))
def test_one_liar_of_five_moves_the_result_no_further_than_the_honest_are_apart(rule, lie, place):
    honest = [drawn(4, seed=seed) for seed in range(4)]
    result = Aggregate(rule)([*honest[:place], torch.tensor(lie), *honest[place:]], [1.0] * 5)
    low, high = torch.stack(honest).amin(0), torch.stack(honest).amax(0)
    reach = REACH.get(rule, 0.0) * (high - low).norm()
    low, high = low - reach, high + reach
    assert (result >= low - 1e-5).all()
    assert (result <= high + 1e-5).all()


def test_clipped__far_clients_count_as_if_they_were_as_far_as_the_median_one():
    tensors = [torch.tensor([value]) for value in (0.0, 1.0, 2.0, 3.0, 1e6)]
    # The median is 2, the distances 2, 1, 0, 1, 1e6; their median is 1.
    assert_close(Aggregate("clipped")(tensors, [1.0] * 5), torch.tensor([(1.0 + 1.0 + 2.0 + 3.0 + 3.0) / 5]))


def test_clipped__takes_single_numbers_too():
    found = Aggregate("clipped")([torch.tensor(x) for x in (1.0, 2.0, 3.0, 100.0)], [1.0] * 4)
    # The median is 2.5, the distances 1.5, 0.5, 0.5 and 97.5, their median 1: 1.5 below, 0.5 below, 0.5 above, 1 above.
    assert found == pytest.approx(2.5 + (-1.0 - 0.5 + 0.5 + 1.0) / 4)


@pytest.mark.parametrize("rule", ROBUST)
def test_counters_have_their_middle(rule):
    assert Aggregate(rule)([torch.tensor(3), torch.tensor(2**60), torch.tensor(5)], [1.0] * 3) == 5


@pytest.mark.parametrize("rule", ROBUST)
def test_layers_are_combined_over_their_owners_and_others_keep_their_value(rule):
    owned = [{"a": drawn(2, seed=i), **({"b": drawn(3, seed=9 + i)} if i else {})} for i in range(4)]
    merged = mean_where_present(owned, [1.0] * 4, {"c": drawn(1)}, Aggregate(rule))
    assert_close(merged["a"], Aggregate(rule)([one["a"] for one in owned], [1.0] * 4))
    assert_close(merged["b"], Aggregate(rule)([one["b"] for one in owned[1:]], [1.0] * 3))
    assert_close(merged["c"], drawn(1), **EXACTLY)


def test_mean_of__weighs_by_examples_or_equally_and_follows_the_rule():
    found = {7: (3, 1.0, 10), 2: (1, 5.0, 12), 4: (1, 6.0, 11)}  # examples, a weight, a counter
    replies = Replies(
        {
            id: Message(examples=n, net={"w": torch.full((2,), w), "steps": torch.tensor(steps)})
            for id, (n, w, steps) in found.items()
        },
        {},
    )
    by_examples, equally = (mean_of(replies, "net", kind, Aggregate()) for kind in ("samples", "uniform"))
    assert_close(by_examples, {"w": torch.full((2,), 2.8), "steps": torch.tensor(12)})
    assert_close(equally, {"w": torch.full((2,), 4.0), "steps": torch.tensor(12)})
    assert_close(mean_of(replies, "net", "samples", Aggregate("median"))["w"], torch.full((2,), 5.0))


def test_mean_of__equal_weights_need_no_examples():
    replies = Replies({0: Message(net={"w": torch.ones(1)}), 1: Message(net={"w": torch.zeros(1)})}, {})
    assert_close(mean_of(replies, "net", "uniform", Aggregate()), {"w": torch.tensor([0.5])})


def test_a_share_that_the_rule_does_not_trim_is_refused():
    assert Aggregate("trimmed", 0.3).trim == 0.3
    assert Aggregate("krum", 0.3).trim == Aggregate("multi_krum", 0.3).trim == 0.3
    for rule in ("mean", "median", "clipped", "geometric_median"):
        with pytest.raises(ConfigError, match=r"^trim: expected 0\.2, as it was, since it belongs to .*, found 0\.3$"):
            Aggregate(rule, 0.3)


def test_geometric_median__has_the_smallest_sum_of_distances():
    points = drawn(7, 3, seed=5).double()
    found = Aggregate("geometric_median")(list(points), [1.0] * 7)
    sought = minimize(lambda x: np.linalg.norm(points.numpy() - x, axis=1).sum(), points.mean(0).numpy(), tol=1e-12)
    assert_close(found, torch.from_numpy(sought.x), rtol=0, atol=1e-4)


def test_geometric_median__of_a_triangle_sees_every_side_under_120_degrees():
    corners = torch.tensor([[0.0, 0.0], [4.0, 0.0], [1.0, 3.0]], dtype=torch.float64)
    to = corners - Aggregate("geometric_median")(list(corners), [1.0] * 3)
    to = to / to.norm(dim=1, keepdim=True)
    assert_close(to @ to.T, torch.full((3, 3), -0.5).double() + 1.5 * torch.eye(3).double(), rtol=0, atol=1e-5)


def test_krum__takes_the_client_whose_nearest_are_nearest():
    """Of five f = 1 may lie, so the two nearest others count: 1 + 4, 1 + 1, 1 + 4, 25 + 36 and 10000 + more."""
    tensors = [torch.tensor([value, 0.0]) for value in (0.0, 1.0, 2.0, 7.0, 100.0)]
    assert Aggregate("krum")(tensors, [1.0] * 5).tolist() == [1.0, 0.0]
    assert Aggregate("multi_krum")(tensors, [9.0] * 5).tolist() == [2.5, 0.0]


@pytest.mark.parametrize("clients", range(5, 9))
def test_krum__is_the_papers_definition_walked_through(clients):
    points = [drawn(3, seed=seed).double() for seed in range(clients)]
    liars = int(0.3 * clients)
    scores = []
    for here in points:
        squares = sorted(
            sum((a - b) ** 2 for a, b in zip(here.tolist(), there.tolist(), strict=True)) for there in points
        )
        scores.append(sum(squares[1 : clients - liars - 1]))  # without itself, n - f - 2 others
    order = sorted(range(clients), key=scores.__getitem__)
    assert_close(Aggregate("krum", 0.3)(points, [1.0] * clients), points[order[0]])
    kept = torch.stack([points[place] for place in order[: clients - liars]])
    assert_close(Aggregate("multi_krum", 0.3)(points, [1.0] * clients), kept.mean(0))


def test_krum__clients_that_are_equally_near_count_alike():
    tensors = [torch.tensor([value]) for value in (0.0, 1.0, 9.0)]
    assert Aggregate("krum")(tensors, [1.0] * 3).tolist() == [0.5]


@pytest.mark.parametrize("rule", ["geometric_median", "krum", "multi_krum"])
def test_each_block_of_coordinates_is_combined_over_those_who_cover_it(rule):
    """Three clients have four numbers, two more the first two of them, another none but the last."""
    wide, narrow = drawn(3, 4), drawn(3, 4, seed=1)
    narrow[:2, 2:], narrow[2, :3] = torch.nan, torch.nan
    found = Aggregate(rule).of_covered(torch.cat([wide, narrow]))
    combined = Aggregate(rule)
    assert_close(found[:2], combined([*wide[:, :2], *narrow[:2, :2]], [1.0] * 5))
    assert_close(found[2:3], combined(list(wide[:, 2:3]), [1.0] * 3))
    assert_close(found[3:], combined([*wide[:, 3:], narrow[2, 3:]], [1.0] * 4))


@pytest.mark.parametrize("rule", ROBUST)
def test_where_nobody_covers_a_coordinate_there_is_no_number(rule):
    found = Aggregate(rule).of_covered(torch.tensor([[1.0, torch.nan], [1.0, torch.nan]]))
    assert found.isnan().tolist() == [False, True]
    assert found[0] == 1.0
