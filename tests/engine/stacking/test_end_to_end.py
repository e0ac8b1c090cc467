"""Nets of linear layers on several clients' batches at once, and what is no such net."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.testing import assert_close

from potluck.engine.stacking.end_to_end import goes_end_to_end, only_linear, outputs_end_to_end


class Whole(nn.Module):
    """A forward function of one's own over two linear layers."""

    def __init__(self, between=torch.relu):
        super().__init__()
        self.first, self.second = nn.Linear(6, 4, bias=False), nn.Linear(4, 3)
        self.between = between

    def forward(self, x):
        return self.second(self.between(self.first(x.reshape(len(x), -1))))


def centred(x):
    return x - x.mean(0)


def reused(net):
    net.first.weight = net.second.weight
    return net


PLAIN = [
    Whole,
    lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 4), nn.Linear(4, 3)),
    lambda: nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4, elementwise_affine=False), nn.Linear(4, 3)),  # (n, 3, 2)
]


def stacked(net, clients=3):
    draws = torch.Generator().manual_seed(0)
    weights = {n: torch.randn(clients, *p.shape, generator=draws, dtype=p.dtype) for n, p in net.named_parameters()}
    return weights, torch.randn(clients, 5, 3, 2, generator=draws, dtype=next(net.parameters()).dtype)


@pytest.mark.parametrize("build", PLAIN)
def test_every_client_gets_its_own_outputs_and_gradients(build):
    net = build().double()  # processors differ in how they round
    assert only_linear(net)
    weights, inputs = stacked(net)
    assert goes_end_to_end(net, weights, inputs)
    tracked = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    outputs = outputs_end_to_end(net, tracked, inputs)
    found = torch.autograd.grad(outputs.square().sum(), list(tracked.values()))
    for client in range(3):
        own = {name: weight[client].clone().requires_grad_() for name, weight in weights.items()}
        expected = functional_call(net, own, (inputs[client],))
        assert_close(outputs[client], expected)
        assert_close([g[client] for g in found], [*torch.autograd.grad(expected.square().sum(), list(own.values()))])


def test_the_net_is_as_before():
    net = Whole()
    before = net(torch.ones(1, 6))
    outputs_end_to_end(net, *stacked(net))
    assert_close(net(torch.ones(1, 6)), before, rtol=0, atol=0)
    assert "forward" not in vars(net.first)


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4)),
        nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, affine=False)),
        reused(nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})),
        nn.Sequential(nn.Conv1d(3, 2, 2)),
        nn.Bilinear(2, 2, 2),
    ],
)
def test_weights_elsewhere_are_noticed(net):
    assert not only_linear(net)


@pytest.mark.parametrize("between", [centred, nn.Dropout(0.5), nn.Softmax(0)])
def test_rows_that_meet_and_draws_are_noticed(between):
    net = Whole(between)
    assert only_linear(net)
    assert not goes_end_to_end(net, *stacked(net))


def test_a_weight_that_is_read_past_its_layer_is_noticed():
    net = Whole()
    net.between = lambda x: x + net.second.weight[0]
    assert not goes_end_to_end(net, *stacked(net))
