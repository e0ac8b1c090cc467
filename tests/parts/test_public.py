import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.requests.examples import Batch
from potluck.parts.means import Aggregate
from potluck.parts.public import consensus, soft_labels_loss

ONE = torch.tensor([[0.7, 0.2, 0.1], [0.0, 0.5, 0.5]])
TWO = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.5, 0.0]])


def test_consensus_is_the_mean_of_the_distributions():
    assert_close(consensus([ONE, TWO], Aggregate()), torch.tensor([[0.4, 0.2, 0.4], [0.25, 0.5, 0.25]]))


def test_consensus_weighs_clients_by_their_shares():
    assert_close(consensus([ONE, TWO], Aggregate(), [3.0, 1.0]), (3 * ONE + TWO) / 4)


@pytest.mark.parametrize("rule", ["median", "trimmed", "clipped"])
def test_consensus_of_a_robust_rule_is_a_distribution_too(rule):
    clients = [torch.rand(20, 4, generator=torch.Generator().manual_seed(i)).mul(5).softmax(1) for i in range(5)]
    found = consensus(clients, Aggregate(rule))
    assert (found >= 0).all()
    assert_close(found.sum(1), torch.ones(20))


def test_consensus_of_clients_who_are_certain_of_different_classes_is_uniform_under_the_median():
    assert_close(consensus(list(torch.eye(3)[:, None]), Aggregate("median")), torch.full((1, 3), 1 / 3))


def test_soft_labels_loss_has_the_gradient_of_the_divergence_from_the_labels():
    """By finite differences: KL(labels || net), summed over classes, mean over the batch."""
    net = nn.Linear(4, 3).double()
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = torch.rand(5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64).softmax(1)
    nn.init.constant_(net.bias, 0.1)
    net.weight.data = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)

    def divergence():
        return sum((p * (p / q).log()).sum() for p, q in zip(labels, F.softmax(net(inputs), 1), strict=True)) / 5

    soft_labels_loss(net, Batch(inputs, torch.zeros(5), {"soft_labels": labels}), {}).backward()
    for place in [(0, 0), (1, 2), (2, 3)]:
        ends = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                net.weight[place] += step
                ends.append(divergence())
                net.weight[place] -= step
        assert_close(net.weight.grad[place], ((ends[0] - ends[1]) / 2e-6).detach(), rtol=1e-6, atol=1e-8)
