"""Objectives that step one after the other on each batch."""

import pytest
import torch
from torch import nn

from potluck.core.examples import Examples
from potluck.core.fit import Fit, LocalTraining
from potluck.core.rng import Key
from potluck.engine.client.training import train

DATA = Examples(torch.ones(1, 1), torch.zeros(1))
SGD = LocalTraining(optimizer="sgd", lr=0.5, steps=1)


class Scalar(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(value))


def pair() -> nn.ModuleDict:
    return nn.ModuleDict({"a": Scalar(4.0), "b": Scalar(1.0)})


def a_to_b(nets, batch, extras):
    return (nets["a"].w - nets["b"].w.detach()).square() / 2


def b_to_a(nets, batch, extras):
    return (nets["b"].w - nets["a"].w.detach()).square() / 2


def values(nets):
    return nets["a"].w.item(), nets["b"].w.item()


def test_the_second_objective_sees_what_the_first_has_done():
    nets = pair()
    train(Fit(nets, [a_to_b, b_to_a], DATA, SGD, turns=[("a.",), ("b.",)]), Key((0,)))
    # a: 4 - 0.5 (4 - 1) = 2.5, then b: 1 - 0.5 (1 - 2.5) = 1.75
    assert values(nets) == (2.5, 1.75)


def test_without_turns_both_step_from_the_same_weights():
    nets = pair()
    train(Fit(nets, [a_to_b, b_to_a], DATA, SGD), Key((0,)))
    assert values(nets) == (2.5, 2.5)  # b: 1 - 0.5 (1 - 4)


def test_an_objective_moves_only_the_weights_of_its_turn():
    def both(nets, batch, extras):
        return nets["a"].w * nets["b"].w

    nets = pair()
    train(Fit(nets, [both, b_to_a], DATA, SGD, turns=[("a.",), ("b.",)]), Key((0,)))
    # a: 4 - 0.5 * 1 = 3.5; the gradient 4 that `both` has in b is not b's to take: 1 - 0.5 (1 - 3.5)
    assert values(nets) == (3.5, 2.25)


def test_each_turn_has_an_optimiser_of_its_own():
    nets = pair()
    training = LocalTraining(optimizer="sgd", lr=0.5, steps=2, momentum=0.5)
    train(Fit(nets, [a_to_b, b_to_a], DATA, training, turns=[("a.",), ("b.",)]), Key((0,)))
    # Step 1: a 2.5 (velocity 3), b 1.75 (velocity -1.5). Step 2: a's velocity 1.5 + 0.75 = 2.25, a = 1.375;
    # b's velocity -0.75 + 0.375 = -0.375, b = 1.9375.
    assert values(nets) == (1.375, 1.9375)


def test_every_objective_needs_a_turn():
    with pytest.raises(ValueError, match="turns: expected one for each of 2 objectives, found 1"):
        Fit(pair(), [a_to_b, b_to_a], DATA, SGD, turns=[("a.",)])


def test_a_turn_that_trains_nothing_is_refused():
    with pytest.raises(ValueError, match=r"no parameter's name starts with \('c\.',\)"):
        train(Fit(pair(), [a_to_b, b_to_a], DATA, SGD, turns=[("a.",), ("c.",)]), Key((0,)))
