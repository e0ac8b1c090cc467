"""Second derivatives: of attention they are taken, and a network without them is refused before anything trains."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from potluck import ConfigError, Examples, Federation, Run, RunConfig, Site, get_method
from potluck.testing.worlds import quick

TAKES_THEM = {"fedmk": (), "fedl2g": (), "perfedavg": ('rule="exact"',)}


class Attending(nn.Module):
    """Torch's attention, by whichever kernel it chooses."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x):
        query, key, value = self.words(x).chunk(3, dim=-1)
        return self.out(F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None]).mean((1, 2)))


def gated():
    """Hardsigmoid, whose gradient torch cannot differentiate."""
    return nn.Sequential(nn.Flatten(), nn.Linear(24, 8), nn.Hardsigmoid(), nn.Linear(8, 3))


def run_of(build, name, assignments=()):
    def examples(count):
        return Examples(torch.randn(count, 6, 4), torch.arange(count) % 3)

    torch.manual_seed(0)
    sites = {i: Site(i, "own", examples(12), examples(6), examples(6)) for i in range(2)}
    federation = Federation(sites, {"own": build}, "own", num_classes=3)
    return Run(quick(get_method(name), assignments), federation, RunConfig(rounds=1, executor="sequential"))


@pytest.mark.parametrize("name", TAKES_THEM)
def test_attention_is_differentiated_twice(name):
    (record,) = run_of(Attending, name, TAKES_THEM[name]).run().rounds
    assert not record.failed
    assert math.isfinite(record.loss_local)


@pytest.mark.parametrize("name", TAKES_THEM)
def test_a_network_without_second_derivatives_is_refused_before_anything_trains(name):
    with pytest.raises(ConfigError, match=r"own has none: RuntimeError: derivative for aten::hardsigmoid_backward"):
        run_of(gated, name, TAKES_THEM[name]).load()


@pytest.mark.parametrize("rule", ["first-order", "hessian-free"])
def test_the_rules_that_perfedavg_advises_train_such_a_network(rule):
    with pytest.raises(ConfigError, match=r"choose another model, or method\.rule = 'first-order' or 'hessian-free'"):
        run_of(gated, "perfedavg", TAKES_THEM["perfedavg"]).load()
    (record,) = run_of(gated, "perfedavg", (f'rule="{rule}"',)).run().rounds
    assert not record.failed
