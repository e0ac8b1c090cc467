import itertools
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from potluck.core.message import Message
from potluck.core.roles import Arriving
from potluck.parts.means import Aggregate, MeanRule
from potluck.parts.submodels import CoverageMean, leading, mean_where_covered, packed, put, select, unpacked, whole

EXACTLY = {"rtol": 0, "atol": 0}
SHAPES = {"w": (4, 3), "b": (4,), "k": (2, 3, 2), "s": ()}
ROBUST = get_args(MeanRule)[1:]


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def places(draw, shape):
    """Where a tensor may lie in one of this shape: slices, index sets in any order, both, or a mask."""
    if draw(st.integers(0, 3)) == 0:
        taken = draw(st.lists(st.booleans(), min_size=torch.Size(shape).numel(), max_size=torch.Size(shape).numel()))
        return torch.tensor(taken, dtype=torch.bool).view(shape)
    found = []
    for size in shape:
        order = draw(st.permutations(range(size)))
        kept = draw(st.integers(0, size))
        leads = draw(st.booleans())
        found.append(slice(0, kept) if leads else torch.tensor(order[:kept], dtype=torch.int64))
    return tuple(found)


@st.composite
def cohorts(draw):
    """Global weights and clients: the sub-model of each, what it sends, its weight, and which rows count."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    keep = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    clients = []
    for _ in range(draw(st.integers(0, 4))):
        names = draw(st.sets(st.sampled_from(sorted(SHAPES))))
        submodel = {name: draw(places(SHAPES[name])) for name in sorted(names)}
        sent = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in select(keep, submodel).items()}
        rows = {}
        for name in draw(st.sets(st.sampled_from(["w", "b", "k"]))) & names:
            masked = isinstance(submodel[name], torch.Tensor)
            rows[name] = torch.rand(SHAPES[name][0] if masked else len(sent[name]), generator=generator) < 0.5
        clients.append((sent, submodel, draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])), rows))
    return keep, clients


def covered(shape, submodel, sent, name, rows):
    """By coordinate of the global tensor, the one value that a client has for it: the definition, by walking."""
    place, count = submodel[name], itertools.count()
    if isinstance(place, torch.Tensor):
        found = {at: sent[name][next(count)] for at in itertools.product(*map(range, shape)) if place[at]}
        return {at: value for at, value in found.items() if name not in rows or rows[name][at[0]]}
    listed = [list(range(i.start, i.stop)) if isinstance(i, slice) else i.tolist() for i in place]
    mine = itertools.product(*(range(len(one)) for one in listed))
    counted = [own for own in mine if name not in rows or rows[name][own[0]]]
    return {tuple(one[i] for one, i in zip(listed, own, strict=True)): sent[name][own] for own in counted}


def by_hand(keep, clients):
    """The weights after a round, one coordinate at a time; and which coordinates nobody covers."""
    result, left = {}, {}
    for name, old in keep.items():
        held = [
            (covered(old.shape, sub, sent, name, rows), share)
            for sent, sub, share, rows in clients
            if share and name in sub
        ]
        result[name], left[name] = old.clone(), torch.ones(old.shape, dtype=torch.bool)
        for at in itertools.product(*map(range, old.shape)):
            found = [(float(values[at]), share) for values, share in held if at in values]
            if found:
                result[name][at] = sum(value * share for value, share in found) / sum(share for _, share in found)
                left[name][at] = False
    return result, left


def averaged(keep, clients, rule="mean"):
    means = CoverageMean(keep, Aggregate(rule))
    for sent, submodel, share, rows in clients:
        means.add(sent, submodel, share, rows)
    return means.weights()


@given(cohorts())
def test_coverage_mean__every_coordinate_is_the_weighted_mean_over_exactly_those_who_cover_it(cohort):
    keep, clients = cohort
    found, (expected, left) = averaged(keep, clients), by_hand(keep, clients)
    assert found.keys() == keep.keys()
    for name, old in keep.items():
        assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(found[name][left[name]], old[left[name]])


@pytest.mark.parametrize("rule", ROBUST)
@settings(max_examples=30)
@given(cohort=cohorts())
def test_coverage_mean__under_a_robust_rule_too_coordinates_that_nobody_covers_keep_their_bits(rule, cohort):
    keep, clients = cohort
    found, (_, left) = averaged(keep, clients, rule), by_hand(keep, clients)
    for name, old in keep.items():
        assert torch.equal(found[name][left[name]], old[left[name]])
        assert found[name].isfinite().all()


@pytest.mark.parametrize("rule", ["mean", "median"])
@settings(max_examples=30)
@given(cohort=cohorts())
def test_coverage_mean__leaves_its_arguments(rule, cohort):
    keep, clients = cohort
    given_ = [keep, *(sent for sent, *_ in clients)]
    before = [{name: tensor.clone() for name, tensor in weights.items()} for weights in given_]
    averaged(keep, clients, rule)
    for weights, old in zip(given_, before, strict=True):
        assert_close(weights, old, **EXACTLY)


@pytest.mark.parametrize("rule", ["mean", "median"])
@settings(max_examples=50)
@given(cohort=cohorts())
def test_coverage_mean__what_was_cut_out_and_comes_back_as_it_was_changes_no_bit(rule, cohort):
    keep, clients = cohort
    sent = [(select(keep, submodel), submodel, share, rows) for _, submodel, share, rows in clients]
    assert_close(averaged(keep, sent, rule), keep, **EXACTLY)


@settings(max_examples=50)
@given(cohorts())
def test_put__is_what_select_takes_and_nothing_else(cohort):
    keep, clients = cohort
    for sent, submodel, _, _ in clients:
        whole = put(sent, submodel, keep)
        assert_close(select(whole, submodel), sent, **EXACTLY)
        zeros = {name: torch.zeros_like(tensor) for name, tensor in sent.items()}
        assert_close(put(zeros, submodel, whole), put(zeros, submodel, keep), **EXACTLY)


def test_coverage_mean__with_only_full_clients_is_the_running_mean_of_all_methods():
    tensors, shares = [drawn(5, 3, seed=seed) for seed in range(4)], [1.0, 2.0, 0.5, 3.0]
    clients = [({"w": t}, leading({"w": t.shape}), share, {}) for t, share in zip(tensors, shares, strict=True)]
    assert_close(averaged({"w": drawn(5, 3, seed=9)}, clients)["w"], Aggregate()(tensors, shares))


@pytest.mark.parametrize("rule", ROBUST)
def test_coverage_mean__a_rule_combines_those_who_cover_a_coordinate(rule):
    full = drawn(4, 3, seed=50)
    slices = [{"w": drawn(rows, 3, seed=rows)} for rows in (1, 2, 3, 3)]
    slices[3]["w"] = drawn(3, 3, seed=77)
    clients = [(one, leading({"w": one["w"].shape}), 1.0, {}) for one in slices]
    found = averaged({"w": full}, clients, rule)["w"]
    assert_close(found[3], full[3], **EXACTLY)
    if rule == "clipped":  # whose norms are over all that a client covers
        assert (found[:3] - torch.stack([one["w"][0] for one in slices]).mean(0)).abs().max() < 5
        return
    for row in range(3):
        mine = [one["w"][row] for one in slices if len(one["w"]) > row]
        assert_close(found[row], Aggregate(rule)(mine, [1.0] * len(mine)))


@pytest.mark.parametrize("masked", [True, False])
def test_coverage_mean__what_a_row_mask_leaves_out_may_be_anything(masked):
    place = torch.tensor([True, True]) if masked else (slice(0, 2),)
    means = CoverageMean({"w": torch.zeros(2)})
    means.add({"w": torch.tensor([1.0, torch.nan])}, {"w": place}, rows={"w": torch.tensor([True, False])})
    means.add({"w": torch.tensor([3.0, 5.0])}, {"w": place}, rows={"w": None})
    assert means.weights()["w"].tolist() == [2.0, 5.0]


def test_coverage_mean__counters_stay_counters_and_clients_without_weight_cover_nothing():
    means = CoverageMean({"n": torch.tensor([9, 9, 9])})
    for count in (3, 8):
        means.add({"n": torch.tensor([count])}, {"n": (slice(0, 1),)})
    means.add({"n": torch.tensor([4, 4])}, {"n": (torch.tensor([1, 2]),)}, share=0.0)
    assert means.weights()["n"].tolist() == [8, 9, 9]
    assert means.weights()["n"].dtype == torch.int64


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        ({"w": torch.zeros(1)}, r"w has shape \(1,\), its place \(2,\)"),
        ({"v": torch.zeros(2)}, "v is none of the sub-model's weights"),
    ],
)
@pytest.mark.parametrize("rule", ["mean", "median"])
def test_coverage_mean__refuses_what_does_not_fit_its_place(sent, complaint, rule):
    with pytest.raises(ValueError, match=complaint):
        CoverageMean({"w": torch.zeros(3)}, Aggregate(rule)).add(sent, {"w": (slice(0, 2),)})


def test_mean_where_covered__takes_replies_one_at_a_time_and_lets_go_of_each():
    alive, most = set(), 0

    class Counted(torch.Tensor):
        def __del__(self):
            alive.discard(id(self))

    def arriving():
        nonlocal most
        for client in range(4):
            tensor = torch.full((2,), float(client)).as_subclass(Counted)
            alive.add(id(tensor))
            most = max(most, len(alive))
            message = Message(weights={"w": tensor})
            del tensor
            yield client, message
            del message

    submodels = {client: {"w": (torch.tensor([2, client % 2]),)} for client in range(4)}
    found = mean_where_covered(Arriving(arriving(), {}), submodels, {"w": torch.zeros(4)})
    assert_close(torch.Tensor(found["w"]), torch.tensor([1.0, 2.0, 1.5, 0.0]))
    assert most <= 2  # the one that is read, and the next


def test_mean_where_covered__averages_the_entries_it_is_told():
    replies = {i: Message(weights={"w": torch.tensor([float(i)])}, also={"v": torch.tensor([2.0 * i])}) for i in (1, 3)}
    keep = {"w": torch.zeros(1), "v": torch.zeros(1)}
    found = mean_where_covered(
        Arriving(iter(replies.items()), {}),
        dict.fromkeys(replies, whole(keep)),
        keep,
        values=lambda reply: {**reply["weights"], **reply["also"]},
    )
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"w": [2.0], "v": [4.0]}


def test_mean_where_covered__weighs_clients_and_counts_rows_by_their_replies():
    replies = {
        i: Message(weights={"w": torch.full((2,), float(i))}, labels=torch.tensor([i > 0, True])) for i in (0, 1)
    }
    found = mean_where_covered(
        Arriving(iter(replies.items()), {}),
        dict.fromkeys(replies, leading({"w": torch.Size([2])})),
        {"w": torch.zeros(3)},
        share=lambda reply: 1.0 + 2 * float(reply["labels"][0]),
        rows=lambda id, reply: {"w": reply["labels"]},
    )
    assert_close(found["w"], torch.tensor([1.0, 0.75, 0.0]))


def test_whole__is_the_sub_model_of_everything():
    weights = {"w": drawn(4, 3), "s": drawn()}
    assert_close(select(weights, whole(weights)), weights, **EXACTLY)


def test_select__takes_index_sets_in_their_order_and_shares_no_memory():
    weights = {"w": torch.arange(12).view(3, 4), "other": torch.zeros(1)}
    found = select(weights, {"w": (torch.tensor([2, 0]), slice(0, 2)), "unknown": (slice(0, 1),)})
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"w": [[8, 9], [0, 1]]}
    found = select(weights, leading({"w": torch.Size([2, 3])}))
    assert found["w"].tolist() == [[0, 1, 2], [4, 5, 6]]
    found["w"].zero_()
    assert weights["w"][0, 1] == 1


@pytest.mark.parametrize("shape", [(), (1,), (8,), (3, 5), (4, 2, 3, 3)])
def test_packed__has_eight_of_a_mask_in_a_byte_and_unpacked_gives_it_back(shape):
    for seed in range(5):
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.4
        bits = packed(mask)
        assert (bits.dtype, len(bits)) == (torch.uint8, -(-mask.numel() // 8))
        assert torch.equal(unpacked(bits, mask.shape), mask)
