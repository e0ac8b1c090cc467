"""Guesses of classes: what a bias tells is what the gradient of the cross-entropy is made of."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from potluck.attacks.labels import as_probabilities, from_bias, from_outputs, label_score, shares_of


def test_a_step_moves_the_bias_by_the_shares_of_classes_where_the_network_is_unsure():
    counts = torch.tensor([40, 0, 25, 15, 0])
    labels, net = torch.arange(5).repeat_interleave(counts), nn.Linear(6, 5)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    before = net.bias.detach().clone()
    inputs = torch.randn(80, 6, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    F.cross_entropy(net(inputs), labels).backward()
    optimizer.step()
    guess = from_bias((net.bias.detach() - before).numpy())
    assert guess == pytest.approx((counts / 80).numpy(), abs=1e-6)  # equal probabilities cancel
    found = label_score(guess, counts.numpy())
    assert found.f1 == 1.0
    assert found.correlation == pytest.approx(1.0)
    assert found.distance == pytest.approx(0.0, abs=1e-6)


def test_outputs_are_read_as_logits_or_as_probabilities():
    logits = np.array([[2.0, 0.0, -np.inf], [0.0, 1.0, -1.0]])
    shares = torch.tensor(logits).softmax(1).numpy()
    assert as_probabilities(logits) == pytest.approx(shares)
    assert as_probabilities(shares) == pytest.approx(shares)
    assert from_outputs(logits) == pytest.approx(shares.mean(0))


def test_evidence_below_zero_is_taken_from_its_least_and_none_at_all_means_equal_shares():
    assert shares_of([-1.0, 0.0, 1.0]).tolist() == pytest.approx([0, 1 / 3, 2 / 3])
    assert shares_of([0, 0, 0, 0]).tolist() == [0.25] * 4


def test_a_guess_is_scored_by_presence_shares_and_distance():
    guess = np.array([0.5, 0.495, 0.005, 0.0])
    found = label_score(guess, [10, 0, 10, 0])
    assert found.f1 == pytest.approx(2 * 1 / (2 + 2))  # 0.005 is less than a tenth of 1/4
    assert found.distance == pytest.approx(0.495)
    assert label_score(guess, [10, 0, 10, 0], told=True).f1 == pytest.approx(2 * 2 / (2 + 3))
    assert label_score(np.full(4, 0.25), [10, 0, 10, 0]).correlation is None
