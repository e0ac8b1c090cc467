import pytest
import torch
from torch import nn

from potluck.core.modes import mode


@pytest.fixture
def net():
    """In training mode but for its frozen first layer."""
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.Dropout()))
    net[0].eval()
    return net


def modes(net):
    return [module.training for module in net.modules()]


@pytest.mark.parametrize("training", [True, False])
def test_all_of_a_net_is_in_one_mode_for_a_while(net, training):
    with mode(net, training=training):
        assert modes(net) == [training] * 4
    assert modes(net) == [True, False, True, True]


def test_modes_are_put_back_after_an_error(net):
    with pytest.raises(RuntimeError), mode(net, training=False):
        net(torch.zeros(1, 9))
    assert modes(net) == [True, False, True, True]
