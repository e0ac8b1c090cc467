"""Objectives that step one after the other on each batch."""

import pytest
import torch
from torch import nn

from potluck.core.ground.rng import Key
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import Fit, LocalTraining
from potluck.core.requests.schedule import Schedule
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


def test_turns_of_the_same_parameters_share_an_optimiser():
    def descends(nets, batch, extras):
        return nets["a"].w

    nets = pair()
    training = LocalTraining(optimizer="sgd", lr=0.5, steps=1, momentum=0.5)
    train(Fit(nets, [descends, descends, b_to_a], DATA, training, turns=[("a.",), ("a.",), ("b.",)]), Key((0,)))
    # a's velocity is 1, then 0.5 + 1: 4 - 0.5 - 0.75 = 2.75. Two optimisers would have had 1 each: 3.
    assert values(nets) == (2.75, 1.875)


def test_a_turn_may_have_an_optimiser_a_rate_and_clipping_of_its_own():
    nets = pair()
    slow, clipped = LocalTraining("adam", lr=0.25), LocalTraining("sgd", lr=1.0, clip_norm=0.5)
    turns = [("a.",), ("b.",)]
    report = train(Fit(nets, [a_to_b, b_to_a], DATA, SGD, turns=turns, trainings=[slow, clipped]), Key((0,)))
    assert report.steps == SGD.steps
    # Adam's first step has the length of its rate: 4 - 0.25. The gradient 1 - 3.75 of b is cut to -0.5.
    assert values(nets) == pytest.approx((3.75, 1.5))


def test_the_rate_of_a_turn_follows_its_schedule_and_its_optimiser_may_last():
    falling = LocalTraining("sgd", lr=1.0, schedule=Schedule("exponential", factor=0.5))
    fit = Fit(pair(), [a_to_b, b_to_a], DATA, SGD, turns=[("a.",), ("b.",)], trainings=[falling, SGD])
    fit.in_round(3)
    assert fit.trainings is not None
    assert [training.lr for training in fit.trainings] == [0.25, 0.5]
    assert not fit.lasts
    lasting = LocalTraining("sgd", persist=True)
    assert Fit(pair(), [a_to_b], DATA, SGD, turns=[("a.",)], trainings=[lasting]).lasts


def test_every_turn_needs_a_training_if_any_has_one():
    with pytest.raises(ValueError, match="trainings: expected one for each of 2 turns, found 1"):
        Fit(pair(), [a_to_b, b_to_a], DATA, SGD, turns=[("a.",), ("b.",)], trainings=[SGD])
    with pytest.raises(ValueError, match="trainings: expected one for each of 0 turns, found 1"):
        Fit(pair(), a_to_b, DATA, SGD, trainings=[SGD])


def test_every_objective_needs_a_turn():
    with pytest.raises(ValueError, match="turns: expected one for each of 2 objectives, found 1"):
        Fit(pair(), [a_to_b, b_to_a], DATA, SGD, turns=[("a.",)])


def test_a_turn_that_trains_nothing_is_refused():
    with pytest.raises(ValueError, match=r"no parameter's name starts with \('c\.',\)"):
        train(Fit(pair(), [a_to_b, b_to_a], DATA, SGD, turns=[("a.",), ("c.",)]), Key((0,)))
