import math
from functools import partial

import pytest
import torch
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close

from potluck.core.requests.examples import Batch
from potluck.parts.cvae import ConditionalVAE, VAELoss, kl_to_standard

CLASSES = 3


def uniform(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def vae(features=5, width=4, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ConditionalVAE(features, CLASSES, width)


@pytest.fixture
def drawing():
    """Losses draw noise from torch's global generator, which the engine seeds; here from a fixed seed."""
    with torch.random.fork_rng():
        yield partial(torch.manual_seed, 0)


def test_the_kl_divergence_on_a_small_batch():
    # Sum of (m^2 + e^s - 1 - s) / 2 over four elements:
    # (1/4 + 0) / 2 + (1/4 + 1 - ln 2) / 2 + (1 - 1/2 + ln 2) / 2 + 0 = (1/4 + 5/4 + 1/2) / 2 = 1
    m = torch.tensor([[0.5, -0.5], [1.0, 0.0]])
    s = torch.tensor([[0.0, math.log(2)], [math.log(0.5), 0.0]])
    assert_close(kl_to_standard(m, s).sum(), torch.tensor(1.0))


def test_the_kl_divergence_is_that_of_normal_distributions():
    m, s = 2 * uniform(6, 4) - 1, 2 * uniform(6, 4, seed=1) - 1
    expected = kl_divergence(Normal(m, (s / 2).exp()), Normal(0.0, 1.0))
    assert_close(kl_to_standard(m, s), expected)
    assert (expected > 0).all()


def test_the_kl_divergence_vanishes_at_the_standard_normal_alone():
    zero = torch.zeros(2, 3)
    assert not kl_to_standard(zero, zero).any()
    assert (kl_to_standard(zero + 0.01, zero) > 0).all()
    assert (kl_to_standard(zero, zero - 0.1) > 0).all()
    assert (kl_to_standard(zero, zero + 0.1) > 0).all()


@pytest.mark.parametrize(("reduction", "share"), [("mean", 1 / (6 * 4)), ("sum", 1.0)])
def test_the_loss_is_a_mean_squared_error_and_the_kl_as_reduced(drawing, reduction, share):
    net, h, labels = vae(features=5, width=4), uniform(6, 5), torch.tensor([0, 1, 2, 0, 1, 2])
    m, s = net.encode(h, labels)
    drawing()
    code = m + s.exp().sqrt() * torch.randn(6, 4)
    error = (net.decode(code, labels) - h).square().sum() / (6 * 5)
    for weight in (0.0, 1.0, 2.5):
        drawing()
        expected = error + weight * share * kl_to_standard(m, s).sum()
        assert_close(VAELoss(weight, reduction)(net, Batch(h, labels, {}), {}), expected)


def test_the_gradient_of_the_reconstruction_reaches_the_encoder_through_the_noise(drawing):
    net, h, labels = vae(), uniform(6, 5), torch.tensor([0, 1, 2, 0, 1, 2])
    drawing()
    VAELoss(0.0, "mean")(net, Batch(h, labels, {}), {}).backward()
    last = net.encoder[-1].weight.grad
    assert last[:4].abs().sum() > 0  # the rows that give m
    assert last[4:].abs().sum() > 0  # and s
    assert net.label.weight.grad.abs().sum() > 0


def test_the_layers_have_the_sizes_of_the_authors_code_where_features_have_1024_numbers():
    net = ConditionalVAE(1024, 10, 1024)
    shapes = {name: tuple(p.shape) for name, p in net.named_parameters() if name.endswith("weight")}
    assert shapes == {
        "label.weight": (10, 512),
        "encoder.0.weight": (1024, 1024 + 512),
        "encoder.1.weight": (1024,),
        "encoder.3.weight": (2 * 1024, 1024),
        "decoder.0.weight": (1024, 1024 + 512),
        "decoder.1.weight": (1024, 1024),
    }


def test_encoder_and_decoder_depend_on_the_class():
    net, rows = vae(), uniform(1, 5).expand(2, 5)
    codes = uniform(1, 4).expand(2, 4)
    m, s = net.eval().encode(rows, torch.tensor([0, 1]))
    for pair in (m, s, net.decode(codes, torch.tensor([0, 1]))):
        assert not torch.allclose(pair[0], pair[1], atol=1e-3)


def test_the_decoder_is_linear_in_the_code():
    net, labels = vae(), torch.tensor([0, 2])
    a, b = uniform(2, 4), uniform(2, 4, seed=1)
    assert_close(net.decode((a + b) / 2, labels), (net.decode(a, labels) + net.decode(b, labels)) / 2)
