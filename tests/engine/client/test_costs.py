"""What requests take, against counts by hand."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from potluck.core.ground.rng import Key
from potluck.core.nets.weights import weights_of
from potluck.core.requests.beside_training import Gradient, NormStatistics, Predict
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import Fit, LocalTraining
from potluck.engine.client.costs import Costs
from potluck.engine.client.training import train
from potluck.engine.numerics.numerics import PLAIN

INPUTS, HIDDEN, CLASSES = 6, 5, 3
FORWARD = 2 * (INPUTS * HIDDEN + HIDDEN * CLASSES)  # of one example
STEP = 2 * FORWARD + 2 * HIDDEN * CLASSES  # nothing is differentiated by the inputs


def dense():
    return nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def examples(count, *shape):
    draws = torch.Generator().manual_seed(1)
    return Examples(torch.randn(count, *shape or (INPUTS,), generator=draws), torch.arange(count) % CLASSES)


def supervised(net, batch, extras):
    return F.cross_entropy(net(batch.inputs), batch.targets)


def fit(net, count=10, batch_size=4, **changes):
    training = LocalTraining(batch_size=batch_size, **changes.pop("training", {}))
    return Fit(net, changes.pop("objectives", supervised), examples(count), training, **changes)


def cost(request):
    return Costs(PLAIN).of(request)


def test_a_step_is_forward_and_backward_of_each_example():
    assert cost(fit(dense())).flops == 10 * STEP
    assert cost(fit(dense(), training={"epochs": 3})).flops == 30 * STEP
    assert cost(fit(dense(), training={"steps": 2})).flops == 8 * STEP


def test_a_frozen_layer_is_passed_and_not_differentiated():
    only_head = fit(dense(), trainable=("2.",))
    assert cost(only_head).flops == 10 * (FORWARD + 2 * HIDDEN * CLASSES)


def test_a_convolution_counts_each_product_and_sum():
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 5 * 5, CLASSES))
    forward = 2 * (25 * 9 * 2 * 4 + 100 * CLASSES)
    requested = Fit(net, supervised, examples(4, 2, 5, 5), LocalTraining(batch_size=4))
    assert cost(Predict(net, examples(7, 2, 5, 5))).flops == 7 * forward
    assert cost(requested).flops == 4 * (2 * forward + 2 * 100 * CLASSES)


def test_attention_on_a_cpu_counts_as_on_a_gpu():
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, CLASSES)

        def forward(self, x):
            return self.head(F.scaled_dot_product_attention(x, x, x).mean((1, 2)))

    scores = 2 * (2 * 16 * 16 * 8) * 2  # queries by keys, then by values, of two heads
    assert cost(Predict(Attending(), examples(3, 2, 16, 8))).flops == 3 * (scores + 2 * 8 * CLASSES)


def test_objectives_together_share_the_forward_pass_of_none():
    def twice(net, batch, extras):
        return supervised(net, batch, extras)

    assert cost(fit(dense(), objectives=[supervised, twice])).flops == 2 * 10 * STEP


def test_a_gradient_and_statistics_are_counted():
    assert cost(Gradient(dense(), supervised, examples(9))).flops == 9 * STEP
    normed = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, CLASSES))
    assert cost(NormStatistics(normed, examples(9))).flops == 9 * FORWARD
    train(fit(normed), Key(("a",)), PLAIN)
    assert cost(NormStatistics(normed, examples(9), layers="unlearnt")).flops == 0


def test_counting_changes_nothing():
    """Neither weights and statistics, nor what Dropout and the order of examples draw."""

    def trained(counted):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Dropout(), nn.Linear(HIDDEN, 3))
        request, before = fit(net), torch.get_rng_state()
        if counted:
            cost(request)
            assert torch.equal(torch.get_rng_state(), before)
        train(request, Key(("same",)), PLAIN)
        return weights_of(net)

    plain, counted = trained(False), trained(True)
    assert plain.keys() == counted.keys()
    assert all(torch.equal(plain[name], counted[name]) for name in plain)


def test_a_shape_is_counted_once(monkeypatch):
    counted = []
    costs, one = Costs(PLAIN), Costs._counted
    monkeypatch.setattr(
        Costs, "_counted", lambda self, request, size: (counted.append(size), one(self, request, size))[1]
    )
    for _ in range(3):
        costs.of(fit(dense()))
    assert counted == [4, 2]
    costs.of(fit(dense(), trainable=("2.",)))
    assert counted == [4, 2, 4, 2]


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_what_an_objective_leaves_out_is_another_shape(weight):
    def pulled(net, batch, extras, weight):
        loss = supervised(net, batch, extras)
        return loss + weight * net(batch.inputs).square().mean() if weight else loss

    costs = Costs(PLAIN)
    once = costs.of(fit(dense(), objectives=partial(pulled, weight=0.0)))
    found = costs.of(fit(dense(), objectives=partial(pulled, weight=weight)))
    assert found.flops == once.flops * (2 if weight else 1)


def test_memory_is_of_all_that_is_there_at_once():
    """Weights, Adam's two moments and gradients, a batch, and what is kept for the backward pass."""
    net = nn.Sequential(nn.Linear(100, 100, bias=False), nn.ReLU(), nn.Linear(100, 100, bias=False))
    weights, batch = 4 * 2 * 100 * 100, 4 * 50 * 100

    def mean(net, batch, extras):
        return net(batch.inputs).mean()

    requested = Fit(net, mean, examples(50, 100), LocalTraining(batch_size=50))
    found = cost(requested).memory
    least = 3 * weights + batch + batch  # moments; the hidden layer is kept
    assert least + weights // 2 <= found <= least + weights + 3 * batch
    plain = Fit(net, mean, examples(50, 100), LocalTraining("sgd", batch_size=50))
    assert found - cost(plain).memory == pytest.approx(2 * weights, rel=0.001)


def test_counting_leaves_frozen_weights_as_they_were_though_an_objective_sets_them():
    """FedMK's does: its model follows the inputs that are trained."""

    def setting(net, batch, extras):
        loss = supervised(net, batch, extras)
        net[0].weight.add_(1.0)
        return loss

    net = dense()
    net[0].requires_grad_(False)
    before = net[0].weight.clone()
    cost(fit(net, objectives=setting))
    assert torch.equal(net[0].weight, before)
