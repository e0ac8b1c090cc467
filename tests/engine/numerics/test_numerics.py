import os

import pytest
import torch
from torch import nn
from torch.backends import cuda, cudnn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.rng import fold_in
from potluck.core.nets.weights import weights_of
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import Fit, LocalTraining
from potluck.core.roles import Supervised
from potluck.engine.client.training import train
from potluck.engine.numerics import numerics as computing
from potluck.engine.numerics.numerics import PLAIN, Numerics
from potluck.engine.numerics.repeatable import make_repeatable

BF16 = Numerics(precision="bf16")
LAST = Numerics(layout="channels_last")
KEY = fold_in(0, "fit")


def net():
    torch.manual_seed(0)
    deep = [nn.Conv2d(128, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3)]
    return nn.Sequential(nn.Conv2d(2, 128, 3, stride=2, padding=1), nn.ReLU(), *deep)


def trained(computing, keep=0):
    with torch.random.fork_rng():
        model = net()
        data = Examples(torch.randn(12, 2, 8, 8), torch.arange(12) % 3)
    training = LocalTraining("sgd", lr=0.05, epochs=2, batch_size=4)
    report = train(Fit(model, Looks(), data, training, keep=keep), KEY, computing)
    return model, report


class Looks(Supervised):
    def __init__(self):
        super().__init__(F.cross_entropy)

    def __call__(self, net, batch, extras):
        outputs = net(batch[0])
        return F.cross_entropy(outputs, batch[1]), {"outputs": outputs}


@pytest.mark.parametrize("computing", [BF16, LAST, Numerics("bf16", "channels_last")])
def test_training_comes_near_the_plain_one_and_leaves_the_net_as_it_was(computing):
    (plain, expected), (model, report) = trained(Numerics(), keep=3), trained(computing, keep=3)
    loose = 0.05 if computing.precision == "bf16" else 1e-4
    assert report.loss == pytest.approx(expected.loss, rel=loose)
    assert_close(weights_of(model), weights_of(plain), rtol=loose, atol=loose)
    assert report.kept["outputs"].dtype == torch.float32
    assert all(tensor.is_contiguous() for tensor in model.state_dict().values())


def test_a_lower_precision_really_computes_less_exactly():
    (plain, _), (model, _) = trained(Numerics()), trained(BF16)
    gaps = [(one - other).abs().max() for one, other in zip(plain.parameters(), model.parameters(), strict=True)]
    assert max(gaps) > 1e-5
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_a_net_is_as_before_when_training_fails():
    model = net()
    with pytest.raises(ZeroDivisionError), LAST.applied(model):
        raise ZeroDivisionError
    assert all(tensor.is_contiguous() for tensor in model.state_dict().values())


# What bfloat16 costs on this machine


@pytest.mark.slow  # where there are no instructions for it
def test_the_probe_measures_what_training_takes(global_generator_unchanged):
    found = computing.bf16_time_over_fp32()
    assert 0.05 < found < 1000
    assert BF16.facts() == {"bf16_time_over_fp32": round(found, 2)}


@pytest.mark.parametrize(("times", "said"), [(0.5, 0), (1.1, 0), (9.04, 1)])
def test_slow_bfloat16_is_said_on_one_line(monkeypatch, times, said):
    monkeypatch.setattr(computing, "bf16_time_over_fp32", lambda: times)
    assert len(BF16.notes()) == said
    assert BF16.facts() == {"bf16_time_over_fp32": times}
    if said:
        assert "in bf16 takes 9.0 times as long as in fp32" in BF16.notes()[0]


def test_nothing_is_measured_where_bfloat16_is_not_asked_for(monkeypatch):
    monkeypatch.setattr(computing, "bf16_time_over_fp32", None)
    for other in (PLAIN, LAST):
        assert (other.facts(), other.notes()) == ({}, [])


# On a CUDA device, whose switches are there on every machine; test_cuda.py tests what they do, where there is one


def switches():
    return (
        torch.are_deterministic_algorithms_enabled(),
        cudnn.deterministic,
        cudnn.benchmark,
        cudnn.allow_tf32,
        cuda.matmul.allow_tf32,
    )


@pytest.fixture
def fast(monkeypatch):
    """A program that has chosen the fast kernels."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = cudnn.benchmark, cudnn.allow_tf32, cuda.matmul.allow_tf32
    cudnn.benchmark, cudnn.allow_tf32, cuda.matmul.allow_tf32 = True, True, True
    yield (False, False, True, True, True)
    make_repeatable(torch.device("cpu"))
    cudnn.benchmark, cudnn.allow_tf32, cuda.matmul.allow_tf32 = before


def test_on_cuda_bits_repeat_and_single_precision_is_not_rounded_and_afterwards_all_is_as_it_was(fast):
    for _ in range(2):  # however often, and in whatever order, runs follow one another
        make_repeatable(torch.device("cuda"))
        assert switches() == (True, True, False, False, False)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        make_repeatable(torch.device("cuda", 1))
        assert switches() == (True, True, False, False, False)
        make_repeatable(torch.device("cpu"))
        assert switches() == fast


def test_a_run_on_the_processor_leaves_the_switches_alone(fast):
    PLAIN.make_ready()
    assert switches() == fast
