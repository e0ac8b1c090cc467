"""Calling nets with other tensors: shared weights, layers of two names, buffers."""

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.testing import assert_close

from potluck.core.nets.calling import call_with
from potluck.core.nets.weights import tensors_of

EXACTLY = {"rtol": 0, "atol": 0}


class Woven(nn.Module):
    """A layer of two names, a layer that shares its weight, a norm of two names, and a buffer that is put anew."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first
        self.third = nn.Linear(3, 3)
        self.third.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.same_norm = self.norm
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.third(self.same_norm(self.again(self.norm(self.first(x)).relu())))


def tensors(net):
    return {name: tensor.detach().clone() for name, tensor in (*net.named_parameters(), *net.named_buffers())}


@pytest.mark.parametrize("first", ["first", "again"])
def test_a_call_computes_with_the_given_tensors_and_leaves_the_net_as_it_was(first):
    net, other, x = Woven(), Woven(), torch.randn(4, 3)
    held = [(name, id(tensor)) for name, tensor in net.state_dict(keep_vars=True).items()]
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    given = tensors(other)
    renamed = {name.replace("first", first): tensor for name, tensor in given.items()}
    assert_close(call_with(net, renamed, x), other(x), **EXACTLY)
    assert [(name, id(tensor)) for name, tensor in net.state_dict(keep_vars=True).items()] == held
    assert_close(dict(net.state_dict()), before, **EXACTLY)
    assert_close({name: given[name] for name, _ in other.named_buffers()}, dict(other.named_buffers()), **EXACTLY)


def test_tensors_that_are_not_given_are_the_nets_own():
    net, x = Woven().eval(), torch.randn(4, 3)
    bias = torch.randn(3)
    found = call_with(net, {"third.bias": bias}, x)
    with torch.no_grad():
        net.third.bias.copy_(bias)
    assert_close(found, net(x), **EXACTLY)


def test_gradients_of_a_weight_come_from_all_its_places():
    net, x = Woven().eval(), torch.randn(4, 3)
    given = {name: tensor.requires_grad_() for name, tensor in tensors(net).items() if name.startswith(("fir", "thi"))}
    found = torch.autograd.grad(call_with(net, given, x).square().sum(), list(given.values()))
    net(x).square().sum().backward()
    assert_close(dict(zip(given, found, strict=True)), {n: p.grad for n, p in net.named_parameters() if n in given})


def test_a_net_that_fails_has_its_own_tensors_again():
    net = Woven()
    held = [id(tensor) for tensor in tensors_of(net).values()]
    with pytest.raises(RuntimeError):
        call_with(net, tensors(net), torch.randn(4, 5))
    assert [id(tensor) for tensor in tensors_of(net).values()] == held


def test_many_nets_at_once_compute_what_each_does_and_change_their_own_buffers():
    nets, x = [Woven() for _ in range(3)], torch.randn(3, 4, 3)
    stacked = {name: torch.stack([tensors(net)[name] for net in nets]) for name in tensors(nets[0])}
    found = vmap(lambda given, inputs: call_with(nets[0], given, inputs))(stacked, x)
    for place, net in enumerate(nets):
        assert_close(found[place], net(x[place]))
        assert_close({name: stacked[name][place] for name, _ in net.named_buffers()}, dict(net.named_buffers()))


def test_a_name_that_the_net_lacks_is_refused():
    with pytest.raises(ValueError, match=r"^second\.bias is not in Woven; expected names of its parameters and bu"):
        call_with(Woven(), {"second.bias": torch.zeros(3)}, torch.zeros(4, 3))
