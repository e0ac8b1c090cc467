import pytest
import torch
from torch import nn

from potluck.core.requests.fit import LocalTraining
from potluck.core.requests.optimizers import optimizers


@pytest.mark.parametrize("name", optimizers())
def test_optimizers__every_one_steps_towards_the_minimum(name):
    weight = nn.Parameter(torch.full((3, 2), 2.0))
    optimizer = LocalTraining(name, lr=0.1).new_optimizer([weight])
    for _ in range(5):
        optimizer.zero_grad()
        (weight.square().sum() / 2).backward()
        optimizer.step()
    assert type(optimizer).__name__.lower() == name
    assert float(weight.detach().abs().max()) < 2.0


def test_optimizer__is_one_name_however_it_is_capitalised():
    assert LocalTraining("AdamW") == LocalTraining("adamw")
    assert LocalTraining("RMSprop").optimizer == "rmsprop"
    assert {"adam", "adamw", "sgd", "rmsprop", "nadam", "adagrad"} <= optimizers().keys()


def test_new_optimizer__takes_what_the_training_says_and_decays_as_adamw_does():
    weight = nn.Parameter(torch.ones(1))
    optimizer = LocalTraining("adamw", lr=0.5, weight_decay=0.1).new_optimizer([weight])
    weight.grad = torch.zeros(1)
    optimizer.step()
    assert weight.item() == pytest.approx(1 - 0.5 * 0.1)  # decoupled: the decay alone, whatever the moments
    assert LocalTraining("adamw").new_optimizer([weight]).defaults["weight_decay"] == 0  # torch's own would be 0.01
    assert LocalTraining("sgd", momentum=0.9).new_optimizer([weight]).defaults["momentum"] == 0.9
