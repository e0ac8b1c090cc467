import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.rng import fold_in, isolated
from potluck.parts.inputs import InputGenerator

SHAPES = [(3, 8, 8), (1, 7, 5), (2, 4, 1), (10,), (4, 6)]


@pytest.fixture(autouse=True)
def isolated_draws():
    with isolated(fold_in(0, "test of inputs")):
        yield


@pytest.mark.parametrize("shape", SHAPES)
def test_input_generator__makes_standardised_inputs_of_the_shape_whatever_its_sides(shape):
    net, labels = InputGenerator(3, 4, shape, width=8), torch.arange(30) % 3
    made, _ = net.drawn(labels)
    assert made.shape == (30, *shape)
    over = (0, 2, 3) if len(shape) == 3 else (0,)
    assert_close(made.mean(over), torch.zeros(made.mean(over).shape), atol=1e-5, rtol=0)
    assert_close(made.var(over, unbiased=False), torch.ones(made.mean(over).shape), atol=1e-2, rtol=0)


@pytest.mark.parametrize("shape", [(1, 8, 8), (5,)])
def test_input_generator__depends_on_the_class_and_on_the_noise(shape):
    net = InputGenerator(3, 4, shape, width=8).eval()
    noise = torch.randn(1, 4).expand(3, -1)
    by_class = net(torch.arange(3), noise)
    by_noise, drawn = net.drawn(torch.zeros(3, dtype=torch.int64))
    assert drawn.shape == (3, 4)
    for made in (by_class, by_noise):
        assert (made[0] - made[1]).abs().max() > 1e-3
        assert (made[1] - made[2]).abs().max() > 1e-3


def test_input_generator__makes_images_by_the_layers_of_the_published_code():
    net = InputGenerator(3, 4, (2, 8, 8), width=5).eval()
    labels, noise = torch.tensor([2, 0]), torch.randn(2, 4)
    weights = dict(net.layers.named_parameters())
    of_noise = noise @ weights["from_noise.weight"].T + weights["from_noise.bias"]
    of_label = weights["from_label.weight"].T[labels] + weights["from_label.bias"]
    h = torch.cat([of_noise.view(2, 5, 2, 2), of_label.view(2, 5, 2, 2)], 1) / (1 + 1e-5) ** 0.5
    for name, doubled in (("middle.0", True), ("end.0", True), ("end.3", False)):
        h = h.repeat_interleave(2, 2).repeat_interleave(2, 3) if doubled else h
        h = F.conv2d(h, weights[f"{name}.weight"], weights[f"{name}.bias"], padding=1)
        h = h.tanh() if name == "end.3" else F.leaky_relu(h / (1 + 1e-5) ** 0.5, 0.2)
    assert_close(net(labels, noise), h / (1 + 1e-5) ** 0.5)


def test_input_generator__learns_what_a_classifier_recognises():
    net, classifier = InputGenerator(3, 4, (6,), width=8), nn.Linear(6, 3)
    optimizer, labels = torch.optim.Adam(net.parameters(), lr=0.01), torch.arange(30) % 3
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(classifier(net.drawn(labels)[0]), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
