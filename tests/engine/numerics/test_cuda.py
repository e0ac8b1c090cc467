"""On a real CUDA device, where there is one: single precision is single precision, and the same run has the same bits.

`on_pretend_device.py` tests everywhere that nothing is mixed up between devices.
"""

import math

import pytest
import torch
from torch import nn

from potluck.core.ground.rng import fold_in
from potluck.core.nets.weights import weights_of
from potluck.core.requests.beside_training import Predict
from potluck.core.requests.examples import Examples
from potluck.engine.client.requests import carry_out
from potluck.engine.executors.sequential import Sequential
from potluck.engine.executors.stacked import Stacked
from potluck.engine.numerics.device import moved
from potluck.engine.numerics.numerics import PLAIN, Numerics
from potluck.engine.rounds.engine import Engine
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.running.execute import execute, prepare
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.watching.observers import Observer
from potluck.methods import get_method, list_methods
from potluck.records import CHECKPOINT, CLIENTS, LAST, ROUNDS, Checkpoint
from potluck.testing.worlds import World, packed_state, quick, run_rounds, toy_federation

CUDA = Numerics(device="cuda")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


@pytest.fixture(autouse=True)
def as_before():
    """The process computes afterwards as it did."""
    yield
    PLAIN.make_ready()


# Single precision


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(64, 64, 3, padding=1), nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(1024, 64))]
)
def test_single_precision_is_single_precision(layer):
    """TF32 rounds each factor by up to a two-thousandth."""
    CUDA.make_ready()
    images = torch.randn(32, 64, 16, 16, generator=torch.Generator().manual_seed(0))
    examples = Examples(images, torch.zeros(32, dtype=torch.long))
    found = carry_out(Predict(layer, examples), fold_in(0), CUDA).double()
    exact = layer.double()(images.double()).detach()
    layer.float()
    assert (found - exact).norm() / exact.norm() < 2e-6


# The same bits


def ended(name, executor, computing):
    """What a method and its clients have after two rounds, and a model of each client."""
    engine = Engine(
        quick(get_method(name), (), optimizer="sgd"),
        toy_federation(World(batchnorm=True).fit_for(quick(get_method(name)))),
        executor=executor(),
        computing=computing,
    )
    state, ids = run_rounds(engine, 2), sorted(engine.federation.sites)
    told = packed_state(state) + b"".join(engine.store.read(id) or b"" for id in ids)
    return told, [weights_of(engine.inference_model(state, id)) for id in ids]


@pytest.fixture
def double():
    """Double precision, in which one order of sums is as good as another."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


EXECUTORS = pytest.mark.parametrize("executor", [Sequential, Stacked])


@EXECUTORS
@pytest.mark.parametrize("name", list_methods())
def test_every_method_computes_there_what_the_processor_computes(double, name, executor):
    _, here = ended(name, executor, PLAIN)
    _, there = ended(name, executor, CUDA)
    for mine, theirs in zip(there, here, strict=True):
        for key, tensor in theirs.items():
            assert torch.allclose(mine[key], tensor, rtol=1e-8, atol=1e-8), key


@EXECUTORS
@pytest.mark.parametrize("name", list_methods())
def test_every_method_has_the_same_bits_each_time(name, executor):
    if quick(get_method(name)).releases_privately:
        pytest.skip("private noise never repeats")
    first, second = (ended(name, executor, CUDA)[0] for _ in range(2))
    assert first == second


def ran(folder, rounds=4, **run):
    """The records and the digest of a run with convolutions."""
    folder.mkdir(exist_ok=True)
    found = resolve(
        {
            "federation": {
                "dataset": "digits",
                "clients": 4,
                "models": [{"name": "resnet10", "width": 8}, {"name": "resnet14", "width": 8}],
            },
            "method": {"name": "fedin", "training": {"epochs": 1}},
            "run": {"rounds": rounds, "computing": {"device": "cuda"}, **run},
        }
    )
    execute(prepare(found, assemble(found), folder), found, folder, Observer.of())
    records = [(folder / name).read_bytes() for name in (ROUNDS, CLIENTS)]
    return [*records, Checkpoint.read(folder / CHECKPOINT / LAST).digest]


@pytest.mark.slow
def test_a_run_has_the_same_bits_each_time_resumed_and_by_any_number_of_processes(tmp_path):
    whole = ran(tmp_path / "whole", executor="sequential")
    assert ran(tmp_path / "again", executor="sequential") == whole
    assert ran(tmp_path / "spread", executor="workers", workers=3) == whole
    assert ran(tmp_path / "halves", rounds=2, executor="sequential") != whole
    assert ran(tmp_path / "halves", executor="sequential") == whole


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_precision_is_that_of_the_run(precision):
    computing = Numerics(precision, device="cuda")
    computing.make_ready()
    net, inputs = nn.Linear(8, 8), torch.ones(2, 8)
    with computing.applied(net), computing.cast():
        found = net(moved(inputs, computing.place))
    assert found.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
    assert math.isclose(float(found[0, 0].detach()), float(net(inputs)[0, 0].detach()), rel_tol=0.02, abs_tol=0.02)
