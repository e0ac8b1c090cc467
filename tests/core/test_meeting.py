"""Which tensors of clients' networks meet, by architecture."""

from collections import OrderedDict

from torch import Size, nn
from torch.nn.utils import parametrizations

from potluck.core.meeting import meetings


def net(**layers):
    return nn.Sequential(OrderedDict(layers))


UNLIKE = {"conv": net(one=nn.Conv1d(1, 2, 3)), "deep": net(two=nn.Linear(4, 3)), "flat": net(three=nn.Linear(4, 3))}


def test_tensors_that_nobody_else_has_meet_nobody():
    found = meetings(UNLIKE, ["conv", "deep", "flat"])
    assert [(one.architecture, one.clients, one.weights_met) for one in found] == [
        ("conv", 1, 0),
        ("deep", 1, 0),
        ("flat", 1, 0),
    ]
    assert [one.weights for one in found] == [8, 15, 15]


def test_clients_of_one_architecture_meet_in_all_tensors_however_many_there_are():
    for count in (2, 100_000):
        conv, deep = meetings(UNLIKE, ["conv"] * count + ["deep"])
        assert (conv.clients, conv.weights_met, deep.weights_met) == (count, 8, 0)
        assert set(conv.partners.values()) == {("conv",)}


def test_tensors_meet_across_architectures_if_name_and_shape_agree():
    nets = {
        "small": net(stem=nn.Linear(4, 3), head=nn.Linear(3, 2)),
        "large": net(stem=nn.Linear(4, 3), more=nn.Linear(3, 3), head=nn.Linear(3, 2)),
        "wide": net(stem=nn.Linear(4, 9)),
    }
    large, small, wide = meetings(nets, ["small", "large", "wide"])
    assert small.weights_met == small.weights == 15 + 8
    assert (large.weights_met, large.weights) == (15 + 8, 15 + 12 + 8)
    assert large.partners["stem.weight", Size([3, 4])] == ("small",)
    assert wide.weights_met == 0  # its stem has the name, and another shape
    assert [one.weights_met for one in meetings(nets, ["small", "large", "wide"], across=False)] == [0, 0, 0]


def test_what_is_frozen_does_not_count():
    nets = {"a": net(base=nn.Linear(2, 2).requires_grad_(False), a=nn.Linear(2, 2)), "b": UNLIKE["deep"]}
    nets["c"] = net(base=nn.Linear(2, 2).requires_grad_(False), c=nn.Linear(2, 2))
    assert [one.weights_met for one in meetings(nets, ["a", "b", "c"])] == [0, 0, 0]


def test_a_bias_alone_is_no_layer_in_common():
    nets = {"narrow": net(body=nn.Linear(4, 3), head=nn.Linear(3, 2)), "wide": net(head=nn.Linear(9, 2))}
    assert [one.weights_met for one in meetings(nets, ["narrow", "wide"])] == [0, 0]
    nets["wide"].head = parametrizations.weight_norm(nn.Linear(3, 2))  # whose weight has other names
    assert [one.weights_met for one in meetings(nets, ["narrow", "wide"])] == [0, 0]


def test_a_layer_is_in_common_that_has_more_in_another_network():
    nets = {"plain": net(head=nn.Linear(3, 2, bias=False)), "biased": net(head=nn.Linear(3, 2))}
    assert [one.weights_met for one in meetings(nets, ["plain", "biased"])] == [6, 6]
    nets = {"one": net(rows=nn.GRU(3, 2)), "two": net(rows=nn.GRU(3, 2, num_layers=2))}
    one, two = meetings(nets, ["one", "two"])
    assert (one.weights_met, two.weights_met) == (one.weights, one.weights)


def test_what_stays_at_clients_does_not_count():
    nets = {"a": net(stem=nn.Linear(4, 3), head=nn.Linear(3, 2)), "b": net(stem=nn.Linear(4, 3), head=nn.Linear(3, 5))}
    found = meetings(nets, ["a", "b"], staying=lambda net: {"stem.weight", "stem.bias"})
    assert [(one.weights, one.weights_met) for one in found] == [(8, 0), (20, 0)]
