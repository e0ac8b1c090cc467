"""Modules that come back as they were are used again; changed ones are not."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from potluck.core.nets.weights import learnt_of, weights_of
from potluck.engine.client.modules import ModulePool


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        self.sizes = [2, 3, 2]


class Noting(nn.Linear):
    """Keeps a tensor that no state dict holds."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("seen", torch.zeros(1), persistent=False)


def build(name):
    torch.manual_seed(0)
    return {"net": Net, "noting": Noting, "frozen": part_frozen}[name]()


def part_frozen():
    net = Net()
    net[0].requires_grad_(False)
    net[1].eval()
    return net


def trained(net):
    with torch.no_grad():
        for tensor in net.state_dict().values():
            tensor.add_(1)
    return net


@pytest.fixture
def modules():
    return ModulePool(build)


def test_a_module_comes_back_with_the_initial_weights(modules):
    net = trained(modules.take("net"))
    modules.give_back("net", net)
    again = modules.take("net")
    assert again is net
    assert_close(weights_of(again), weights_of(build("net")), rtol=0, atol=0)
    assert modules.take("net") is not again


def test_what_is_frozen_comes_back_as_it_was_built(modules):
    wanted = learnt_of(trained(build("frozen")))
    for _ in range(2):
        net = modules.take("frozen", wanted)
        assert_close(weights_of(net), {**weights_of(build("frozen")), **wanted}, rtol=0, atol=0)
        modules.give_back("frozen", trained(net))
    assert modules.take("frozen") is net  # it was used again, and not built anew


def test_or_with_those_that_are_asked_for(modules):
    wanted = weights_of(trained(build("net")))
    for _ in range(2):
        net = modules.take("net", wanted)
        assert_close(weights_of(net), wanted, rtol=0, atol=0)
        modules.give_back("net", net)
    assert_close(weights_of(modules.take("net")), weights_of(build("net")), rtol=0, atol=0)


def hooked(net):
    net[0].register_forward_hook(lambda *_: None)


def frozen(net):
    net[0].weight.requires_grad_(False)


def replaced(net):
    net[2] = nn.Linear(3, 5)


def in_another_mode(net):
    net[1].eval()


def set_otherwise(net):
    net[1].momentum = None


def longer(net):
    net.sizes.append(7)


def with_gradients(net):
    net(torch.ones(2, 2)).sum().backward()


def tensor_hooked(net):
    net[0].weight.register_hook(lambda gradient: gradient)


@pytest.mark.parametrize(
    "change",
    [hooked, frozen, replaced, in_another_mode, set_otherwise, longer, with_gradients, tensor_hooked],
)
def test_a_changed_module_is_not_used_again(modules, change):
    net = modules.take("net")
    change(net)
    modules.give_back("net", net)
    assert modules.take("net") is not net


def test_nor_one_with_tensors_that_no_state_dict_holds(modules):
    net = modules.take("noting")
    modules.give_back("noting", net)
    assert modules.take("noting") is not net


def test_a_stranger_is_left_alone(modules):
    net = build("net")
    modules.give_back("net", net)
    assert modules.take("net") is not net
