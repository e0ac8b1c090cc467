"""Networks on a device, one made of the processor: the processor's bits, no mixing, no copy back in a step."""

import gc
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from potluck.core.ground.rng import fold_in
from potluck.core.nets.weights import weights_of
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import Fit, LocalTraining
from potluck.core.roles import Supervised
from potluck.engine.client.training import train
from potluck.engine.executors.sequential import Sequential
from potluck.engine.executors.stacked import Stacked
from potluck.engine.numerics import device as device_module
from potluck.engine.numerics.device import CPU, resident
from potluck.engine.numerics.numerics import PLAIN, Numerics
from potluck.engine.rounds.engine import Engine
from potluck.engine.stacking.nets import train_stacked
from potluck.experiment.results.evaluate import evaluate
from potluck.methods import get_method, list_methods
from potluck.testing.checks.networks import unstaged
from potluck.testing.pretend import PretendDevice, can_pretend, register
from potluck.testing.worlds import World, assigned, quick, run_rounds, toy_federation

pretends = pytest.mark.skipif(not can_pretend(), reason="this version of torch lets no one add a device")
if can_pretend():
    register()
FAST = {"fedavg", "local"}


@pytest.fixture
def device():
    with PretendDevice() as pretend:
        yield pretend


def on_device():
    return Numerics(device="pretend")  # a name that torch knows inside the fixture


def net():
    layers = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(40, 3)
    return nn.Sequential(nn.Unflatten(1, (1, 10)), *layers)


def fit(steps, augmented=False):
    with torch.random.fork_rng():
        torch.manual_seed(steps)
        model, inputs = net(), torch.randn(30, 10)
    data = Examples(inputs, torch.arange(30) % 3, _Noisy() if augmented else None)
    training = LocalTraining("adam", steps=steps, batch_size=10, clip_norm=1.0)
    return Fit(model, _Observes(), data, training, keep=4)


class _Observes(Supervised):
    def __init__(self):
        super().__init__(F.cross_entropy)

    def __call__(self, net, batch, extras):
        outputs = net(batch[0])
        return F.cross_entropy(outputs, batch[1]), {"outputs": outputs}

    def __eq__(self, other):
        return type(self) is type(other)

    __hash__ = None


class _Noisy:
    def __call__(self, inputs, rng):
        return inputs if rng is None else inputs + torch.randn(inputs.shape, generator=rng).to(inputs.device)


# The pretend device itself


@pretends
@pytest.mark.parametrize(
    "mixes",
    [
        lambda here, there: here + there,
        lambda here, there: torch.cat([there, here]),
        lambda here, there: F.linear(there, here),
        lambda here, there: nn.Linear(4, 4).to("pretend")(here),
    ],
)
def test_pretend_device_refuses_what_a_gpu_would(device, mixes):
    here = torch.ones(4, 4)
    with pytest.raises(RuntimeError, match="same device"):
        mixes(here, here.to("pretend"))


@pretends
def test_pretend_device_counts_what_comes_back(device):
    there = torch.ones(4).to("pretend")
    before = device.counted.to_host
    assert float(there.sum()) == 4
    assert there.cpu().tolist() == [1, 1, 1, 1]
    assert device.counted.to_host == before + 2


# Training


@pretends
@pytest.mark.parametrize("augmented", [False, True])
def test_train_gives_the_processors_bits_and_brings_everything_back(device, augmented):
    here, there = fit(7, augmented), fit(7, augmented)
    expected, found = train(here, fold_in(0)), train(there, fold_in(0), on_device())
    assert found.loss == expected.loss
    assert torch.equal(found.kept["outputs"], expected.kept["outputs"])
    for name, tensor in weights_of(here.net).items():
        assert there.net.state_dict()[name].device == CPU
        assert torch.equal(there.net.state_dict()[name], tensor), name


def copies(device, work):
    before = device.counted.to_host, device.counted.computed
    work()
    return device.counted.to_host - before[0], device.counted.computed - before[1]


@pretends
def test_train_copies_nothing_to_the_processor_in_a_step(device):
    few, many = (copies(device, lambda steps=steps: train(fit(steps), fold_in(0), on_device())) for steps in (3, 9))
    assert many[0] == few[0]
    assert many[1] > 2 * few[1]  # it did compute there


@pretends
def test_train_stacked_copies_nothing_to_the_processor_in_a_step(device):
    def stacked(steps):
        fits = [fit(steps) for _ in range(3)]
        train_stacked(fits, [fold_in(number) for number in range(3)], on_device())

    few, many = (copies(device, lambda steps=steps: stacked(steps)) for steps in (3, 9))
    assert many[0] == few[0]
    assert many[1] > 2 * few[1]


@pretends
def test_resident_moves_a_tensor_once_for_all_who_share_it_and_lets_it_go_with_the_last(device):
    inputs = torch.ones(8, 2)
    whole = Examples(inputs, torch.arange(8))
    first, second = (resident(whole.take(rows), torch.device("pretend", 0)) for rows in torch.arange(8).chunk(2))
    assert first.inputs is second.inputs
    assert first.inputs.device.type == "pretend"
    assert second.batch(torch.tensor([1]))[1].cpu().tolist() == [5]
    key = id(inputs), torch.device("pretend", 0)
    assert key in device_module._resident
    del inputs, whole, first, second
    gc.collect()
    assert key not in device_module._resident


# Whole rounds


def rounds(name, executor, computing, chosen=(), number=2, staged=True):
    method = quick(get_method(name), chosen)
    federation = toy_federation(World(batchnorm=True).fit_for(method))
    if not staged:
        architectures = {name: partial(unstaged, build) for name, build in federation.architectures.items()}
        federation = replace(federation, architectures=architectures)
    engine = Engine(method, federation, executor=executor, computing=computing)
    state = run_rounds(engine, number)
    return evaluate(engine, state), [engine.store.read(id) for id in engine.federation.sites]


IN_TURN = [pytest.mark.slow, pytest.mark.rotates]


@pretends
@pytest.mark.parametrize(
    ("name", "executor"),
    [
        pytest.param(name, executor, marks=[] if name in FAST and executor is Sequential else IN_TURN)
        for name in list_methods()
        for executor in (Sequential, Stacked)
    ],
)
def test_every_method_gives_the_processors_bits_on_a_device(device, name, executor):
    before = device.counted.computed
    assert rounds(name, executor(), on_device()) == rounds(name, executor(), PLAIN)
    assert device.counted.computed > before


@pretends
@pytest.mark.slow
@pytest.mark.parametrize("executor", [Sequential, Stacked])
@pytest.mark.parametrize("name", ["fedin", "fedmlb", "fedproto"])
def test_networks_that_are_cut_by_their_dataflow_give_the_processors_bits_on_a_device(device, name, executor):
    here, there = (rounds(name, executor(), where, staged=False) for where in (PLAIN, on_device()))
    assert here == there


@pretends
@pytest.mark.slow
@pytest.mark.rotates
@pytest.mark.parametrize(("name", "variant"), [(name, v) for name in list_methods() for v in get_method(name).variants])
def test_every_option_gives_the_processors_bits_on_a_device(device, name, variant):
    chosen = assigned(get_method(name).variants[variant])
    if quick(get_method(name), chosen).releases_privately:
        pytest.skip("private noise never repeats")
    here, there = (rounds(name, Sequential(), where, chosen, number=1) for where in (PLAIN, on_device()))
    assert here == there
