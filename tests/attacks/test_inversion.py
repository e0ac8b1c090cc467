"""Inversion of features whose inverse is known, and of those that hide it."""

import pytest
import torch
from torch import nn

from potluck.attacks.inversion import bounded, invert, to_images


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())


def inputs(count=4):
    return torch.randn(count, 1, 6, 6, generator=torch.Generator().manual_seed(3))


def test_inputs_are_found_again_and_the_network_is_left_as_it_was(net):
    net.train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    net.eval()
    received = net(inputs()).detach()
    net.train()
    found = invert(net, net, received, (1, 6, 6), steps=600)
    assert float((found - inputs()).square().mean()) < 1e-3
    assert net.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_noise_hides_them_and_more_noise_hides_them_better(net):
    net.eval()
    clean = net(inputs()).detach()
    draws = torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))
    errors = [
        float((invert(net, net, clean + scale * clean.std() * draws, (1, 6, 6), steps=300) - inputs()).square().mean())
        for scale in (0.0, 0.8, 4.0)
    ]
    assert errors[0] < 0.1 * errors[1] < 0.1 * errors[2]


def test_features_that_were_clipped_are_compared_with_clipped_ones(net):
    net.eval()
    rows = bounded(net(inputs()).detach(), 1.0)
    assert rows.norm(dim=1).tolist() == pytest.approx([1.0] * 4)
    found = invert(net, net, rows.view(4, 8, 6, 6), (1, 6, 6), steps=600, clip=1.0)
    assert float((bounded(net(found).detach(), 1.0) - rows).norm(dim=1).max()) < 0.05


def test_black_and_white_are_the_least_and_the_largest_number_of_a_channel():
    low, high = torch.tensor([-1.0, 0.0])[:, None, None], torch.tensor([1.0, 4.0])[:, None, None]
    found = to_images(torch.tensor([-1.0, 2.0]).view(1, 2, 1, 1), low, high)
    assert found.flatten().tolist() == [0.0, 0.5]
    assert to_images(torch.tensor([9.0, -9.0]).view(1, 2, 1, 1), low, high).flatten().tolist() == [1.0, 0.0]
