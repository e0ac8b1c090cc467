"""A client's update as it leaves: no longer than was agreed, whatever the numbers, and otherwise as it was."""

import math

import pytest
import torch
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError, DivergenceError
from potluck.core.message import Message
from potluck.core.summed import Summed, ToSum, tensor_at, with_tensors
from potluck.engine.client.clipping import Clipping, clipped_update

EXACTLY = {"rtol": 0, "atol": 0}


def trained(size=1.0, start=1.0, dtype=torch.float32, seed=0):
    """A reply with weights that were sent, a difference, a counter and numbers, and what is summed of it."""
    generator = torch.Generator().manual_seed(seed)
    sent = start * torch.randn(50, 20, generator=generator, dtype=torch.float64).to(dtype)
    step = size * torch.randn(50, 20, generator=generator, dtype=torch.float64)
    dc = size * torch.randn(7, generator=generator, dtype=torch.float64).to(dtype)
    reply = Message(
        weights={"w": (sent.double() + step).to(dtype), "count": torch.tensor(9)}, dc={"w": dc}, examples=40, loss=0.5
    )
    of = {
        ("weights", "w"): Summed("weights/w", (50, 20), (slice(0, 50), slice(0, 20)), sent),
        ("dc", "w"): Summed("dc/w", (7,), (slice(0, 7),), torch.zeros(7, dtype=dtype)),
    }
    return reply, ToSum(of)


def update(reply, of):
    return {path: tensor_at(reply, path).double() - one.keep.double() for path, one in of.tensors.items()}


def length(reply, of):
    return math.sqrt(sum(float(gap.square().sum()) for gap in update(reply, of).values()))


@pytest.mark.parametrize("most", [1e-9, 1e-6, 1e-3, 1.0, 10.0])
@pytest.mark.parametrize("start", [0.0, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_no_update_is_longer_than_agreed_to_the_last_bit(most, start, dtype):
    for seed in range(5):
        reply, of = trained(start=start, dtype=dtype, seed=seed)
        clipped, scale = clipped_update(reply, of, most)
        assert length(clipped, of) <= most
        assert 0 <= scale <= 1
        assert (scale < 1) == (length(reply, of) > most)
        assert {tensor_at(clipped, path).dtype for path in of.tensors} == {dtype}


def test_all_tensors_together_are_made_shorter_in_one_direction():
    reply, of = trained(size=3.0, dtype=torch.float64)
    clipped, scale = clipped_update(reply, of, 2.0)
    assert length(clipped, of) == pytest.approx(2.0)
    assert scale == pytest.approx(2.0 / length(reply, of))
    for path, gap in update(clipped, of).items():
        assert_close(gap, scale * update(reply, of)[path])


def test_a_short_update_and_all_that_is_in_no_sum_stay_as_they_are():
    reply, of = trained(size=1e-3)
    clipped, scale = clipped_update(reply, of, 1.0)
    assert clipped is reply
    assert scale == 1.0
    clipped, _ = clipped_update(reply, of, 1e-3)
    assert clipped["weights"]["count"] is reply["weights"]["count"]
    assert (clipped["examples"], clipped["loss"]) == (40, 0.5)
    assert reply["weights"]["w"].sub(of.tensors["weights", "w"].keep).norm() > 1e-3  # the client's own stays


def test_what_rounding_cannot_move_so_little_is_not_moved():
    sent = torch.full((50,), 1e6)
    of = ToSum({("w",): Summed("w", (50,), (slice(0, 50),), sent)})
    clipped, scale = clipped_update(Message(w=sent + 1.0), of, 1e-3)
    assert_close(clipped["w"], sent, **EXACTLY)
    assert 0 <= scale < 1e-3


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_an_update_that_is_not_finite_does_not_leave(wrong):
    reply, of = trained()
    reply["weights"]["w"][3, 3] = wrong
    with pytest.raises(DivergenceError, match="its update is NaN or infinite"):
        clipped_update(reply, of, 1.0)


def test_what_is_measured_is_no_update():
    rows = torch.full((3, 4), 100.0)
    of = {("means",): Summed("means", (5, 4), (torch.arange(3), slice(0, 4)), lambda means, summed: {})}
    clipped, scale = clipped_update(Message(means=rows), ToSum(of), 1.0)
    assert clipped["means"] is rows
    assert scale == 1.0


@pytest.mark.parametrize(
    ("clipping", "noted"),
    [
        (Clipping(1.0), {"update_scale"}),
        (Clipping(1.0, summed=True), {"update_clipped"}),
        (Clipping(1.0, summed=True, private=True), set()),
    ],
)
def test_what_a_client_notes_tells_no_norm_where_the_server_has_sums_and_nothing_where_they_are_private(
    clipping, noted
):
    for size in (1.0, 1e-6):
        reply, of = trained(size=size)
        left, notes = clipping.applied(reply, of)
        assert set(notes) == noted
        assert length(left, of) <= 1.0
        if clipping.summed:
            assert set(notes.values()) <= {0.0, 1.0}
            assert not noted or notes["update_clipped"] == float(size == 1.0)
        else:
            assert notes["update_scale"] == pytest.approx(min(1.0, 1.0 / length(reply, of)))


def test_a_reply_of_which_nothing_is_summed_leaves_as_it_is_without_a_note():
    reply = Message(batches=3)
    assert Clipping(1.0).applied(reply, ToSum()) == (reply, {})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weighing": "client"}, "found weights/w weighed by examples"),
        ({"weighing": "row"}, "found weights/w weighed by examples"),
        ({"keep": lambda means, summed: {}}, "found weights/w, which is measured and no update"),
        ({"name": "all/buffers/norm.running_var"}, "found all/buffers/norm.running_var, a variance"),
    ],
)
def test_what_noise_would_not_make_private_does_not_leave(change, said):
    reply, of = trained()
    tensors = dict(of.tensors)
    tensors["weights", "w"] = Summed(**{**vars(tensors["weights", "w"]), **change})
    with pytest.raises(ConfigError, match=f"^run.private_weights: {said}") as caught:
        Clipping(1.0, summed=True, private=True).applied(reply, ToSum(tensors))
    assert "\n" not in str(caught.value)
    Clipping(1.0, summed=True).applied(reply, ToSum(tensors))


@pytest.mark.parametrize("more", [{"features": torch.zeros(3)}, {"pairs": {"s_in": {"deep": torch.zeros(2)}}}])
def test_a_tensor_in_the_clear_does_not_leave_beside_private_sums(more):
    reply, of = trained()
    with pytest.raises(ConfigError, match=r"found (features|pairs\.s_in\.deep), which is sent and in no sum"):
        Clipping(1.0, summed=True, private=True).applied(Message(**reply, **more), of)
    kinds = {"labels": torch.ones(4, dtype=torch.bool), "counts": torch.ones(4, dtype=torch.int64)}
    Clipping(1.0, summed=True, private=True).applied(Message(**reply, **kinds), of)


def test_tensors_are_put_where_names_lead_and_what_they_are_put_into_is_a_copy():
    inner = {"w": torch.zeros(2), "v": torch.zeros(1)}
    reply = Message(weights={"deep": inner}, other=3)
    found = with_tensors(reply, {("weights", "deep", "w"): torch.ones(2), ("weights", "deep", "v"): torch.ones(1)})
    assert found["weights"]["deep"]["w"].tolist() == [1.0, 1.0]
    assert found["weights"]["deep"]["v"].tolist() == [1.0]
    assert found["other"] == 3
    assert inner["w"].tolist() == [0.0, 0.0]
    assert tensor_at(reply, ("weights", "deep", "w")) is inner["w"]


def test_what_a_client_has_measured_in_a_later_exchange_leaves_the_note_of_its_update_as_it_is():
    of = ToSum({("means",): Summed("means", (5, 4), (torch.arange(3), slice(0, 4)), lambda means, summed: {})})
    assert Clipping(1.0).applied(Message(means=torch.ones(3, 4)), of)[1] == {}
