"""What liars send, worked out by hand."""

from statistics import NormalDist

import pytest
import torch

from potluck.attackers.replies import alie, alie_z, changed, free_rider, noise, scaled, sign_flip
from potluck.attackers.settings import Attackers
from potluck.core.ground.errors import ConfigError
from potluck.core.message import Message

SENT = Message(weights={"a": torch.tensor([1.0, 2.0])}, round=3)
REPLY = Message(
    weights={"a": torch.tensor([2.0, 0.0])}, means={"0": torch.tensor([4.0])}, examples=7, n=torch.tensor([5])
)


@pytest.mark.parametrize(
    ("change", "weights", "means"),
    [
        (sign_flip(1.0), [0.0, 4.0], [-4.0]),
        (sign_flip(0.5), [0.5, 3.0], [-2.0]),
        (scaled(10.0), [11.0, -18.0], [40.0]),
        (free_rider, [1.0, 2.0], [0.0]),
    ],
)
def test_floats_are_changed_from_what_was_sent_and_numbers_are_told_as_they_are(change, weights, means):
    found = changed(REPLY, SENT, change)
    assert found["weights"]["a"].tolist() == weights
    assert found["means"]["0"].tolist() == means
    assert (found["examples"], found["n"].tolist()) == (7, [5])


def test_noise_is_as_large_as_what_was_changed():
    reply = Message(w=torch.full((10_000,), 3.0))
    found = changed(reply, Message(w=torch.ones(10_000)), noise(5.0, torch.Generator().manual_seed(0)))
    assert float((found["w"] - 3.0).square().mean().sqrt()) == pytest.approx(10.0, rel=0.03)


def test_a_little_lies_z_deviations_below_the_mean_of_the_liars():
    replies = [Message(w=torch.tensor([1.0, 5.0]), n=1), Message(w=torch.tensor([3.0, 5.0]), n=2)]
    assert alie(replies, 0.5)["w"].tolist() == [1.5, 5.0]


def test_z_hides_among_enough_honest_clients():
    """The example of the paper's algorithm: of 50 clients 24 lie, so 2 of 26 must be further away."""
    assert alie_z(50, 24) == pytest.approx(NormalDist().inv_cdf(24 / 26))
    assert alie_z(10, 2) == pytest.approx(NormalDist().inv_cdf(4 / 8))


def test_an_option_of_another_attack_is_refused():
    with pytest.raises(ConfigError, match="strength: expected none of 'free_rider', found 2"):
        Attackers("free_rider", strength=2.0)
    with pytest.raises(ConfigError, match="target: expected 0 of 'noise', found 3"):
        Attackers("noise", target=3)
    with pytest.raises(ConfigError, match="share: expected none beside clients"):
        Attackers(share=0.1, clients=(1,))


def test_the_liars_are_the_same_for_every_method_and_one_at_least():
    found = Attackers(share=0.3).among(range(10), 0)
    assert len(found) == 3
    assert found == Attackers("noise", share=0.3).among(range(10), 0) != Attackers(share=0.3).among(range(10), 1)
    assert len(Attackers(share=0.01).among(range(5), 0)) == 1
    assert Attackers(clients=(4, 2)).among(range(10), 0) == (2, 4)


def test_a_liar_that_is_not_there_and_a_federation_of_liars_are_refused():
    with pytest.raises(ConfigError, match=r"^run.attackers.clients: expected some of 0 to 4, found \[2, 7\]$"):
        Attackers(clients=(7, 2)).among(range(5), 0)
    with pytest.raises(ConfigError, match=r"^run.attackers.clients: expected not all of them, found \[0, 1\]$"):
        Attackers(clients=(0, 1)).among(range(2), 0)
    with pytest.raises(ConfigError, match=r"^run.attackers: expected clients that are honest"):
        Attackers().among(range(1), 0)
