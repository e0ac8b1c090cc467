import threading

import pytest
import torch
from torch import nn

from potluck.core.errors import ConfigError
from potluck.core.modes import mode, threads


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


def test_threads_of_two_blocks_are_put_back_when_both_are_over():
    before = torch.get_num_threads()
    with threads(2):
        with threads(1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == before


def test_python_threads_must_agree_on_torchs():
    entered, over = threading.Event(), threading.Event()

    def stay():
        with threads(1):
            entered.set()
            over.wait()

    other = threading.Thread(target=stay)
    other.start()
    entered.wait()
    try:
        with threads(1):
            pass
        with pytest.raises(ConfigError, match="a run in another thread of this process computes with 1"), threads(2):
            pass
    finally:
        over.set()
        other.join()
    with threads(2):
        pass
