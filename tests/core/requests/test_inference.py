import pytest
import torch
from torch import nn

from potluck.core.nets.weights import weights_of
from potluck.core.requests.examples import Examples
from potluck.core.requests.inference import predict

EXAMPLES = Examples(torch.randn(7, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(7, dtype=torch.int64))


@pytest.fixture
def net():
    return nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 2))


@pytest.mark.usefixtures("global_generator_unchanged")
def test_predictions_do_not_depend_on_the_batches():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.utils.skip_init(nn.Linear, 3, 2))
    nn.init.ones_(net[2].weight)
    nn.init.zeros_(net[2].bias)
    whole = predict(net, EXAMPLES)
    assert whole.shape == (7, 2)
    assert torch.allclose(predict(net, EXAMPLES, batch_size=2), whole)


def test_predicting_leaves_the_net_and_asks_for_no_gradients(net):
    before = weights_of(net)
    assert not predict(net, EXAMPLES).requires_grad
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(net).items())


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_put_back(net, training):
    net.train(training)
    predict(net, EXAMPLES)
    assert all(module.training is training for module in net.modules())


def test_the_mode_of_a_frozen_part_is_put_back(net):
    net.train()
    net[0].eval()
    predict(net, EXAMPLES)
    assert not net[0].training
    assert net[1].training


def test_no_examples_give_no_predictions(net):
    assert predict(net, EXAMPLES.take(torch.empty(0, dtype=torch.int64))).shape == (0, 2)
