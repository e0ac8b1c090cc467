from functools import partial

import pytest
from torch import nn

from potluck.core.needs import Need, Offer
from potluck.models.contract import StagedNet
from potluck.models.split import split
from potluck.parts.heads import COMMON_HEAD, COMMON_WIDTH, PLAIN_HEAD, SERVERS_HEAD, TRAINED_HEAD


def net(width=4, hidden=8, head=None):
    stages = {"stem": nn.Linear(6, hidden), "deep": nn.Sequential(nn.ReLU(), nn.Linear(hidden, width))}
    return StagedNet(stages, nn.Linear(width, 3) if head is None else head())


def normed_head():
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))


def offer(**architectures):
    return Offer(architectures, dict(enumerate(architectures)), next(iter(architectures)), False, (), input_shape=(6,))


def test_head__names_its_tensors_alike_whatever_stands_before_it():
    assert {*split(net()).head.state_dict()} == {*split(net(hidden=5)).head.state_dict()} == {"weight", "bias"}


def test_common_width_and_common_head__only_the_heads_count():
    assert all(need.problem(offer(a=net, b=partial(net, hidden=5))) is None for need in (COMMON_WIDTH, COMMON_HEAD))
    assert Need.NESTED_LAYERS.problem(offer(a=net, b=partial(net, hidden=5)))


def test_common_width__different_widths_are_named():
    problem = COMMON_WIDTH.problem(offer(a=net, b=partial(net, width=5), c=net))
    assert "widths differ: a 4, b 5, c 4; choose models whose heads read features of one width" in str(problem)


def test_common_head__heads_of_the_same_width_and_other_layers_are_refused():
    deep = partial(
        StagedNet,
        {"stem": nn.Linear(6, 4), "deep": nn.ReLU()},
        nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 3)),
        num_features=4,
    )
    assert COMMON_WIDTH.problem(offer(a=net, b=deep)) is None
    assert "that of a has {'weight': (3, 4), 'bias': (3,)} and that of b" in str(
        COMMON_HEAD.problem(offer(a=net, b=deep))
    )


def served(server, **architectures):
    """Clients with all architectures but the server's."""
    assigned = dict(enumerate(name for name in architectures if name != "server"))
    return Offer({**architectures, "server": server}, assigned, "server", False, (), input_shape=(6,))


def test_servers_head__the_servers_own_model_is_compared_with_the_clients():
    assert SERVERS_HEAD.problem(served(partial(net, hidden=30), a=net, b=partial(net, hidden=5))) is None
    problem = str(SERVERS_HEAD.problem(served(partial(net, width=5), a=net)))
    assert "that of server has {'weight': (3, 5), 'bias': (3,)} and that of a {'weight': (3, 4)" in problem
    assert "choose a federation.server_model whose head" in problem


def test_servers_head__a_servers_model_without_a_head_is_refused_by_name():
    problem = str(SERVERS_HEAD.problem(served(partial(nn.Linear, 6, 3), a=net)))
    assert "server has none: Linear cannot be split" in problem


def test_servers_head__an_architecture_that_clients_have_is_left_to_common_head():
    offered = offer(a=net, b=partial(net, width=5))  # the server has a
    assert SERVERS_HEAD.problem(offered) is None
    assert COMMON_HEAD.problem(offered)


def test_plain_head__batchnorm_is_refused_in_the_head_and_nowhere_else():
    before = partial(StagedNet, {"stem": nn.Linear(6, 4), "deep": nn.BatchNorm1d(4)}, nn.Linear(4, 3))
    assert PLAIN_HEAD.problem(offer(a=before)) is None
    head = normed_head()
    after = partial(StagedNet, {"stem": nn.Linear(6, 4), "deep": nn.ReLU()}, head, num_features=4)
    assert "that of b has BatchNorm" in str(PLAIN_HEAD.problem(offer(a=before, b=after)))


def test_trained_head__a_head_of_which_nothing_is_trained_is_refused_and_frozen_layers_before_it_are_not():
    def frozen(*parts):
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        found = StagedNet({"stem": nn.Linear(6, 4), "deep": nn.ReLU()}, layers, num_features=4)
        for part in parts:
            found.get_submodule(part).requires_grad_(False)
        return found

    assert TRAINED_HEAD.problem(offer(a=partial(frozen, "stages", "head.0"))) is None
    problem = str(TRAINED_HEAD.problem(offer(a=frozen, b=partial(frozen, "head"))))
    assert "the server trains the head, and that of b is frozen; leave requires_grad" in problem


@pytest.mark.parametrize("need", [COMMON_WIDTH, COMMON_HEAD, PLAIN_HEAD, SERVERS_HEAD, TRAINED_HEAD])
def test_a_net_that_cannot_be_split_is_left_to_another_need(need):
    found = offer(a=net, b=partial(nn.Linear, 6, 3))
    assert need.problem(found) is None
    assert Need.SPLIT_MODEL.problem(found)
