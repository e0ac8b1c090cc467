import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from potluck.core.nets.weights import (
    buffers_of,
    frozen_names,
    frozen_of,
    layout,
    learnt_of,
    load,
    mean,
    mean_where_present,
    minus,
    outline,
    parameters_of,
    pick,
    plus,
    tensors_of,
    weights_of,
    zeros_like,
)
from potluck.parts.projection import without_conflict

finite = st.floats(-1e3, 1e3, width=32)
shares = st.floats(0.125, 1e4)
owners = st.lists(st.tuples(st.lists(finite, min_size=3, max_size=3).map(torch.tensor), shares), min_size=1, max_size=6)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def net():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def tied():
    """Two layers, one weight."""
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    return nn.Sequential(first, nn.BatchNorm1d(2, affine=False), second)


def part_frozen():
    """One bias without a gradient, and a BatchNorm in evaluation mode."""
    frozen = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    frozen[0].bias.requires_grad_(False)
    frozen[1].eval()
    return frozen


FROZEN = {"0.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_frozen_names_are_parameters_without_gradients_and_buffers_of_layers_in_evaluation_mode():
    assert frozen_names(part_frozen()) == FROZEN
    assert frozen_names(net()) == frozenset()


def test_tensors_of_several_names_go_by_the_first():
    both = tied()
    both.register_module("again", both[1])
    assert [*tensors_of(both)] == [*weights_of(both)] == [*outline(both)] == [*layout(both)] == [*learnt_of(both)]
    assert [*weights_of(both)] == ["0.weight", "1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert [*parameters_of(both)] == ["0.weight"]
    assert [*buffers_of(both)] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    both[1].eval()
    assert frozen_names(both) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


@pytest.mark.parametrize("names", [("0.weight",), ("2.weight",), ("0.weight", "2.weight")])
def test_a_tensor_of_several_names_loads_under_any_of_them(names):
    both, value = tied(), torch.randn(2, 2)
    load(both, {**buffers_of(both), **{name: value.clone() for name in names}})
    assert both[2].weight is both[0].weight
    assert torch.equal(both[0].weight, value)


def test_two_values_of_one_tensor_are_refused():
    both = tied()
    twice = {**weights_of(both), "2.weight": torch.full((2, 2), torch.nan)}
    with pytest.raises(ValueError, match=r"2\.weight has another value than a name of the same tensor$"):
        load(both, twice)
    load(both, {**twice, "0.weight": twice["2.weight"].clone()})
    assert both[2].weight.isnan().all()


def test_frozen_names_tie_as_parameters_do():
    both = tied()
    both[0].weight.requires_grad_(False)
    assert frozen_names(both) == {"0.weight"}


def test_frozen_names_leave_out_what_no_state_dict_holds():
    layer = nn.Linear(1, 1)
    layer.register_buffer("seen", torch.zeros(1), persistent=False)
    whole = nn.Sequential(layer)
    layer.eval()
    assert frozen_names(whole) == frozenset()


def test_a_net_in_evaluation_mode_as_a_whole_has_no_frozen_buffers():
    assert frozen_names(net().eval()) == frozenset()
    assert buffers_of(net().eval()).keys() == buffers_of(net()).keys() != set()


def test_every_tensor_is_a_parameter_a_buffer_or_frozen():
    whole = part_frozen()
    parts = [parameters_of(whole), buffers_of(whole), frozen_of(whole)]
    assert [set(part) for part in parts] == [{"0.weight", "1.weight", "1.bias", "2.weight", "2.bias"}, set(), FROZEN]
    assert learnt_of(whole).keys() == parts[0].keys() | parts[1].keys()
    assert [*learnt_of(net())] == [*weights_of(net())]


def test_load_needs_no_frozen_tensors_and_takes_them_if_they_come():
    whole, other = part_frozen(), part_frozen()
    kept = frozen_of(whole)
    load(whole, learnt_of(other))
    assert all(torch.equal(tensor, frozen_of(whole)[name]) for name, tensor in kept.items())
    load(whole, weights_of(other))
    assert torch.equal(whole[0].bias, other[0].bias)
    with pytest.raises(ValueError, match=r"weights do not fit Sequential: 2\.bias is missing$"):
        load(whole, {name: tensor for name, tensor in learnt_of(other).items() if name != "2.bias"})


@given(st.lists(shares, min_size=1, max_size=8))
def test_shares_of_a_mean_sum_to_one(given_shares):
    ones = [torch.ones(2, dtype=torch.float64) for _ in given_shares]
    assert torch.allclose(mean(ones, given_shares), torch.ones(2, dtype=torch.float64), rtol=1e-12)


@given(st.lists(st.floats(width=32), min_size=1, max_size=5).map(torch.tensor), shares)
def test_the_mean_of_one_is_that_one_bit_for_bit(tensor, share):
    result = mean([tensor], [share])
    assert torch.equal(bits(result), bits(tensor))
    assert result.data_ptr() != tensor.data_ptr()


@given(owners, st.randoms())
def test_the_order_of_owners_hardly_matters(given_owners, random):
    tensors, given_shares = zip(*given_owners, strict=True)
    shuffled = random.sample(given_owners, len(given_owners))
    again = mean(*zip(*shuffled, strict=True))
    assert torch.allclose(mean(tensors, given_shares), again, rtol=1e-4, atol=1e-3)


@given(owners)
def test_a_mean_lies_between_the_least_and_the_greatest(given_owners):
    tensors, given_shares = zip(*given_owners, strict=True)
    result, stack = mean(tensors, given_shares), torch.stack(tensors)
    slack = 1e-5 * stack.abs().amax(0)
    assert bool((stack.amin(0) - slack <= result).all())
    assert bool((result <= stack.amax(0) + slack).all())


@given(owners, st.sampled_from([0.5, 2.0, 1024.0]))
def test_only_the_ratio_of_shares_counts(given_owners, factor):
    tensors, given_shares = zip(*given_owners, strict=True)
    scaled = [factor * share for share in given_shares]
    assert torch.equal(mean(tensors, scaled), mean(tensors, given_shares))


@given(owners)
def test_a_mean_leaves_its_arguments(given_owners):
    tensors, given_shares = zip(*given_owners, strict=True)
    before = [tensor.clone() for tensor in tensors]
    mean(tensors, given_shares)
    assert all(map(torch.equal, tensors, before))


def test_a_mean_weighs_by_shares():
    # Owners' values 1, 2, 6: with 10, 20 and 30 examples (10 + 40 + 180) / 60, with equal shares 3.
    values = [torch.tensor([v]) for v in (1.0, 2.0, 6.0)]
    assert mean(values, [10, 20, 30]).tolist() == pytest.approx([230 / 60])
    assert mean(values, [1, 1, 1]).tolist() == [3.0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_counters_give_their_maximum(dtype):
    counters = [torch.tensor([1, 9], dtype=dtype), torch.tensor([5, 2], dtype=dtype)]
    result = mean(counters, [1.0, 99.0])
    assert result.tolist() == [5, 9]
    assert result.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_mean_keeps_its_type(dtype):
    assert mean([torch.ones(1, dtype=dtype), torch.zeros(1, dtype=dtype)], [1, 1]).dtype == dtype


def test_a_mean_needs_a_share_for_every_tensor():
    with pytest.raises(ValueError, match="shorter"):
        mean([torch.ones(1), torch.ones(1)], [1.0])


def test_layers_are_averaged_over_those_who_own_them():
    owned = [
        {"both": torch.tensor([0.0]), "first": torch.tensor([1.0])},
        {"both": torch.tensor([4.0]), "second": torch.tensor([2.0])},
    ]
    merged = mean_where_present(owned, [3, 1], keep={"nobody": torch.tensor([7.0]), "both": torch.tensor([9.0])})
    assert {name: tensor.item() for name, tensor in merged.items()} == {
        "nobody": 7.0,
        "both": 1.0,
        "first": 1.0,
        "second": 2.0,
    }


def test_an_owner_brings_its_own_share():
    owned = [{}, {"w": torch.tensor([0.0])}, {"w": torch.tensor([4.0])}]
    assert mean_where_present(owned, [5, 3, 1], keep={})["w"].tolist() == [1.0]


@given(owners)
def test_layers_of_all_are_averaged_as_tensors_are(given_owners):
    tensors, given_shares = zip(*given_owners, strict=True)
    merged = mean_where_present([{"w": tensor} for tensor in tensors], given_shares, {})
    assert torch.equal(merged["w"], mean(tensors, given_shares))


@given(owners.filter(lambda found: len(found) > 1), st.integers(0, 5))
def test_doubling_a_client_doubles_its_share(given_owners, index):
    index %= len(given_owners)
    tensors, given_shares = zip(*given_owners, strict=True)
    doubled = [share * (1 + (i == index)) for i, share in enumerate(given_shares)]
    twice = mean([*tensors, tensors[index]], [*given_shares, given_shares[index]])
    assert torch.allclose(mean(tensors, doubled), twice, rtol=1e-4, atol=1e-3)


def test_nobody_leaves_everything():
    keep = {"w": torch.ones(2)}
    assert torch.equal(mean_where_present([], [], keep)["w"], keep["w"])
    assert torch.equal(mean_where_present([{}, {}], [1, 1], keep)["w"], keep["w"])


def test_merging_leaves_its_arguments():
    keep, owned = {"w": torch.ones(2)}, [{"w": torch.zeros(2)}, {"w": torch.zeros(2)}]
    mean_where_present(owned, [1, 1], keep)
    assert keep["w"].tolist() == [1, 1]
    assert owned[0]["w"].tolist() == [0, 0]


def test_one_name_with_two_shapes_is_refused():
    message = (
        r"^layer w has the shapes \(2, 3\) and \(2,\) at different clients; layers are averaged by name, so"
        r" use models of one nested family, or average within architectures: sharing\.scope = 'architecture'$"
    )
    two, six = {"w": torch.zeros(2)}, {"w": torch.zeros(2, 3)}
    for owned, keep in (([two, six], {}), ([six], two), ([two, two], six)):
        with pytest.raises(ValueError, match=message):
            mean_where_present(owned, [1] * len(owned), keep)


def test_pick_matches_by_name_and_shape():
    weights = {"same": torch.zeros(2), "wider": torch.zeros(3), "unknown": torch.zeros(2)}
    shapes = {"same": torch.Size([2]), "wider": torch.Size([2]), "missing": torch.Size([1])}
    assert list(pick(weights, shapes)) == ["same"]


def test_pick_refuses_tensors_as_shapes_which_would_match_nothing():
    weights = {"same": torch.zeros(2)}
    with pytest.raises(TypeError, match="found a tensor as the shape of 'same'"):
        pick(weights, weights)


PAIRS = st.tuples(finite, finite).map(torch.tensor)


def test_a_gradient_in_conflict_is_projected():
    # g = (-3, 1), o = (1, 0): <o, g> = -3 and <o, o> = 1, so g + 3 o = (0, 1). g = (2, 1) does not oppose o.
    other = {"w": torch.tensor([1.0, 0.0])}
    assert without_conflict({"w": torch.tensor([-3.0, 1.0])}, other)["w"].tolist() == [0.0, 1.0]
    assert without_conflict({"w": torch.tensor([2.0, 1.0])}, other)["w"].tolist() == [2.0, 1.0]


@given(PAIRS, PAIRS)
def test_a_projected_gradient_opposes_nothing_and_moves_along_the_other_alone(gradient, other):
    projected = without_conflict({"w": gradient}, {"w": other})["w"]
    scale = float(gradient.norm() * other.norm()) + 1e-6
    assert float(projected @ other) >= -1e-4 * scale
    moved = projected - gradient
    assert abs(float(moved[0] * other[1] - moved[1] * other[0])) <= 1e-4 * scale
    if float(gradient @ other) >= 0:
        assert torch.equal(projected, gradient)


def test_nothing_is_opposed_where_the_other_vanishes():
    gradient = {"w": torch.tensor([1.0, -2.0])}
    assert torch.equal(without_conflict(gradient, {"w": torch.zeros(2)})["w"], gradient["w"])


@pytest.mark.parametrize(
    ("granularity", "expected"),
    [
        # Two kernels (-1, 0) and (1, 0) in one tensor, and a tensor (-3, 0), against ones: inner products -1, 1, -3.
        ("kernel", ([-0.5, 0.5], [1.0, 0.0], [-1.5, 1.5])),
        ("tensor", ([-1.0, 0.0], [1.0, 0.0], [-1.5, 1.5])),
        ("whole", ([-0.5, 0.5], [1.5, 0.5], [-2.5, 0.5])),
    ],
)
def test_conflicts_are_looked_for_at_the_granularity_asked_for(granularity, expected):
    gradients = {"k": torch.tensor([-1.0, 0.0, 1.0, 0.0]).view(2, 1, 2, 1), "w": torch.tensor([[-3.0], [0.0]])}
    others = {name: torch.ones_like(tensor) for name, tensor in gradients.items()}
    found = without_conflict(gradients, others, granularity)
    assert [*found["k"].view(2, 2).tolist(), found["w"].flatten().tolist()] == [pytest.approx(e) for e in expected]


def test_sums_and_differences_go_by_name():
    a = {"x": torch.tensor([1.0]), "y": torch.tensor([2.0])}
    b = {"y": torch.tensor([10.0]), "x": torch.tensor([100.0])}
    assert {n: t.item() for n, t in minus(a, b).items()} == {"x": -99.0, "y": -8.0}
    assert {n: t.item() for n, t in plus(a, b).items()} == {"x": 101.0, "y": 12.0}
    assert {n: t.item() for n, t in plus(a, b, -0.5).items()} == {"x": -49.0, "y": -3.0}
    assert {n: t.item() for n, t in plus(a, {"y": b["y"]}).items()} == {"x": 1.0, "y": 12.0}


def test_a_sum_shares_no_memory_with_its_terms():
    a = {"x": torch.ones(1), "y": torch.ones(1)}
    for tensor in plus(a, {"x": torch.ones(1)}).values():
        tensor.zero_()
    assert (a["x"].item(), a["y"].item()) == (1.0, 1.0)


def test_zeros_have_the_same_shapes_and_types():
    zeros = zeros_like({"a": torch.ones(2, 1, dtype=torch.bfloat16), "n": torch.tensor(3)})
    assert [(z.shape, z.dtype, z.sum().item()) for z in zeros.values()] == [
        ((2, 1), torch.bfloat16, 0),
        ((), torch.int64, 0),
    ]


def test_weights_are_parameters_and_buffers():
    model = net()
    assert list(parameters_of(model)) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(buffers_of(model)) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert weights_of(model).keys() == parameters_of(model).keys() | buffers_of(model).keys()


@pytest.mark.parametrize("read", [weights_of, parameters_of, buffers_of])
def test_weights_read_from_a_net_are_copies(read):
    model = net()
    before = copy.deepcopy(model.state_dict())
    for tensor in read(model).values():
        assert not tensor.requires_grad
        tensor.add_(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_tied_parameter_is_no_buffer():
    assert list(buffers_of(tied())) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]


def test_loading_copies_every_tensor():
    model = net()
    source = {name: torch.full_like(tensor, 3) for name, tensor in weights_of(model).items()}
    assert load(model, source) is model
    assert all(bool((tensor == 3).all()) for tensor in weights_of(model).values())
    source["0.weight"].zero_()
    assert bool((model[0].weight == 3).all())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_loading_a_part_leaves_the_rest():
    model = net()
    before = weights_of(model)
    load(model, {"0.bias": torch.full((3,), 2.0)}, partial=True)
    after = weights_of(model)
    assert after.pop("0.bias").tolist() == [2, 2, 2]
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


@pytest.mark.parametrize(
    ("change", "partial", "complaint"),
    [
        ({"2.weight": torch.zeros(1)}, False, r"2\.weight is not in the model$"),
        ({"2.weight": torch.zeros(1)}, True, r"2\.weight is not in the model$"),
        ({"0.bias": None}, False, r"0\.bias is missing$"),
        ({"0.bias": torch.zeros(1)}, False, r"0\.bias has shape \(1,\), the model \(3,\)$"),
        ({"0.bias": torch.zeros(1)}, True, r"0\.bias has shape \(1,\), the model \(3,\)$"),
        (
            dict.fromkeys(["0.weight", "0.bias", "1.weight", "1.bias"]),
            False,
            "missing; .* is missing and 1 more$",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_is_loaded(change, partial, complaint):
    model = net()
    before = weights_of(model)
    changed = {name: torch.full_like(tensor, 9) for name, tensor in before.items()} | change
    given_weights = {name: tensor for name, tensor in changed.items() if tensor is not None}
    with pytest.raises(ValueError, match=f"^weights do not fit Sequential: .*{complaint}"):
        load(model, given_weights, partial=partial)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(model).items())


def test_layout__tells_nets_apart_by_shapes_and_by_what_is_frozen():
    plain, frozen = net(), net()
    assert layout(plain) == layout(net())
    frozen[0].bias.requires_grad_(False)
    assert layout(frozen) != layout(plain)
    assert {name for name, (_, fixed) in layout(frozen).items() if fixed} == {"0.bias"}
    assert layout(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))) != layout(plain)
    assert layout(plain)["0.weight"] == (torch.Size([3, 2]), False)
