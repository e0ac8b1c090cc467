"""Per-FedAvg: the gradient of the loss after a step, by each rule, and the step that a client takes."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import LocalTraining
from potluck.methods.perfedavg import MetaLoss, PerFedAvg
from potluck.parts.sharing import Sharing

STEP = LocalTraining("sgd", lr=0.1, batch_size=64)


def half_square(outputs, targets):
    return (outputs - targets).square().mean() / 2


def slope_at(rule, examples, alpha=0.3, w=1.0):
    """The gradient that a rule gives one weight with curvature 4 and optimum 1/2; all examples are equal."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, w)
    batch = Batch(torch.full((examples, 1), 2.0), torch.full((examples, 1), 1.0), {})
    loss = MetaLoss(half_square, alpha, rule, 1e-3)(net, batch, {})
    (found,) = torch.autograd.grad(loss, [net.weight])
    return float(loss.detach()), float(found)


@pytest.mark.parametrize(
    ("rule", "share"), [("first-order", 1.0), ("hessian-free", 1 - 0.3 * 4), ("exact", 1 - 0.3 * 4)]
)
@pytest.mark.parametrize("examples", [1, 5, 6, 7])
def test_the_gradient_on_a_quadratic_is_known(rule, share, examples):
    """F(w) = f(w - alpha 4 (w - 1/2)), so F' = (1 - 4 alpha) f'(w~); first order leaves out the factor."""
    after = 1.0 - 0.3 * 4 * (1.0 - 0.5)
    loss, found = slope_at(rule, examples)
    assert loss == pytest.approx((2 * after - 1) ** 2 / 2)
    assert found == pytest.approx(share * 4 * (after - 0.5), rel=1e-3)


def test_without_a_step_all_rules_give_the_plain_gradient():
    for rule in ("first-order", "hessian-free", "exact"):
        assert slope_at(rule, 6, alpha=0.0)[1] == pytest.approx(4 * 0.5)


def test_its_examples_are_the_thirds_of_a_batch():
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    inputs, targets = torch.ones(6, 1), torch.tensor([[1.0], [2.0], [9.0], [1.0], [2.0], [9.0]])
    loss = MetaLoss(half_square, 0.5, "first-order", 1e-3)(net, Batch(inputs, targets, {}), {})
    assert loss.item() == pytest.approx((0.5 * 1 - 2) ** 2 / 2), "a step by the first third, the loss of the second"


def test_a_client_is_evaluated_after_one_step_of_its_own(play, lines):
    run = play(PerFedAvg(LocalTraining("sgd", lr=0.0), alpha=0.25), lines((1, 2, 3), (2, -2, 1)), rounds=0)
    assert float(run.model(0).weight.detach()) == 0, "before the first round all methods begin alike"
    run.round()
    assert [float(run.model(id).weight.detach()) for id in (0, 1)] == pytest.approx([0.25 * 2, 0.25 * -4])
    assert_close(run.state.weights, run.states[0].weights, rtol=0, atol=0)


def test_clients_weigh_alike_whatever_their_data(play, lines):
    run = play(PerFedAvg(STEP, alpha=0.0), lines((1, 2, 9), (1, -4, 1)))
    assert float(run.state.weights["all"]["weight"]) == pytest.approx(0.1 * (2 - 4) / 2)


def test_refuses_to_average_nothing():
    with pytest.raises(ConfigError, match=r"sharing\.scope: expected one that averages"):
        PerFedAvg(sharing=Sharing("none"))
