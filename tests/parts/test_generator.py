"""The generator's loss against sums by hand; that it learns is seen in `test_fedgen.py`."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.rng import fold_in, isolated
from potluck.core.requests.examples import Batch
from potluck.parts.generator import Generator, GeneratorLoss, likeness


@pytest.fixture
def isolated_draws():
    with isolated(fold_in(0, "test of generator")):
        yield


@pytest.mark.usefixtures("isolated_draws")
def test_generator_loss__is_the_cross_entropy_of_the_mean_logits():
    net, heads = Generator(3, 4, 16, 5), nn.ModuleList(nn.Linear(5, 3) for _ in range(2))
    labels = torch.tensor([0, 1, 2, 2, 1, 0])
    with isolated(fold_in(1)):
        found = GeneratorLoss("mean", 0.0)(net, Batch(labels, labels, {}), {"heads": heads})
    with isolated(fold_in(1)):
        z, _ = net.drawn(labels)
    assert_close(found, F.cross_entropy((heads[0](z) + heads[1](z)) / 2, labels))


@pytest.mark.usefixtures("isolated_draws")
def test_generator_loss__by_share_weighs_each_client_by_its_share_of_the_class():
    net, heads = Generator(2, 4, 16, 5), nn.ModuleList(nn.Linear(5, 2) for _ in range(2))
    labels, shares = torch.tensor([0, 1, 1]), torch.tensor([[1.0, 0.25], [0.0, 0.75]])
    with isolated(fold_in(1)):
        found = GeneratorLoss("share", 0.0)(net, Batch(labels, labels, {}), {"heads": heads, "shares": shares})
    with isolated(fold_in(1)):
        z, _ = net.drawn(labels)
    one, two = (F.cross_entropy(head(z), labels, reduction="none") for head in heads)
    assert_close(found, (one[0] + 0.25 * one[1] + 0.75 * two[1] + 0.25 * one[2] + 0.75 * two[2]) / 3)


def test_likeness__is_1_for_equal_features_and_falls_with_their_distance():
    noise = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    assert likeness(torch.ones(2, 3), noise).item() == 1
    z = torch.tensor([[0.0, 0.0], [1.0, 3.0]])
    assert likeness(z, noise).item() == pytest.approx(torch.exp(torch.tensor(-2.0 * 2.0 * 2 / 4)).item())
    assert 0 < likeness(9 * z, noise) < likeness(z, noise)
