"""Weights that stay in training, whatever the optimiser does to them."""

import pytest
import torch
from torch.nn import functional as F

from potluck.core.ground.rng import fold_in
from potluck.core.nets.weights import parameters_of
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import Fit, LocalTraining
from potluck.core.roles import Supervised
from potluck.engine.client.training import train
from potluck.engine.stacking.nets import train_stacked
from potluck.parts.moving import put_back


def test_put_back__holds_what_does_not_move():
    extras = {"moving": {"w": torch.tensor([True, False])}, "start": {"w": torch.tensor([5.0, 6.0])}}
    assert put_back({"w": torch.tensor([1.0, 2.0])}, extras)["w"].tolist() == [1.0, 6.0]


def fit(number, training):
    draws = fold_in(number, "moving").generator()
    net = torch.nn.Linear(4, 3)
    torch.nn.init.normal_(net.weight, generator=draws)
    torch.nn.init.zeros_(net.bias)
    moving = {"weight": torch.rand(3, 4, generator=draws) < 0.5, "bias": torch.tensor([False, True, False])}
    data = Examples(torch.randn(12, 4, generator=draws), torch.arange(12) % 3)
    extras = {"moving": moving, "start": parameters_of(net)}
    return Fit(net, Supervised(F.cross_entropy), data, training, extras, after_step=put_back)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    "training",
    [LocalTraining("sgd", lr=0.1, momentum=0.9, weight_decay=0.1, epochs=3), LocalTraining("adam", lr=0.1, epochs=3)],
    ids=["sgd", "adam"],
)
def test_put_back__keeps_the_bits_of_what_stays_and_lets_all_else_learn(training, stacked):
    fits = [fit(number, training) for number in (0, 1)]
    if stacked:
        train_stacked(fits, [fold_in(0, number) for number in (0, 1)])
    else:
        for one in fits:
            train(one, fold_in(0))
    for one in fits:
        for name, now in parameters_of(one.net).items():
            same = now == one.extras["start"][name]
            assert torch.equal(same, ~one.extras["moving"][name])
