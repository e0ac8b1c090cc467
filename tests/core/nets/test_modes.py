import threading

import pytest
import torch
from torch import nn

from potluck.core.ground.errors import ConfigError
from potluck.core.nets.modes import held_layers, mode, threads, to_training


@pytest.fixture
def net():
    """In training mode but for its first layer, which is held in evaluation mode."""
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.Dropout()))
    net[0].eval()
    return net


def modes(net):
    return [module.training for module in net.modules()]


@pytest.mark.parametrize(("training", "inside"), [(True, [True, False, True, True]), (False, [False] * 4)])
def test_a_net_is_in_one_mode_for_a_while_but_for_what_is_held(net, training, inside):
    with mode(net, training=training):
        assert modes(net) == inside
    assert modes(net) == [True, False, True, True]


def test_modes_are_put_back_after_an_error(net):
    with pytest.raises(RuntimeError), mode(net, training=False):
        net(torch.zeros(1, 9))
    assert modes(net) == [True, False, True, True]


def test_held_layers_are_in_evaluation_mode_inside_a_net_that_is_not(net):
    assert held_layers(net) == [net[0]]
    assert held_layers(net[1]) == []


def test_a_net_in_evaluation_mode_as_a_whole_says_nothing_of_its_layers(net):
    assert held_layers(net.eval()) == []
    with mode(net, training=True):
        assert modes(net) == [True] * 4
    assert modes(net) == [False] * 4


def test_to_training_heeds_a_train_of_the_nets_own():
    class Careful(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[0].eval()
            return self

    assert modes(to_training(Careful(nn.BatchNorm1d(2), nn.ReLU()))) == [True, False, True]


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
