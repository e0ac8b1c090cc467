"""FedNova: the normalisation, against sums by hand."""

import re

import pytest
import torch
from torch import nn

from potluck.core.federation import Federation, Site
from potluck.core.ground.errors import ConfigError
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import LocalTraining
from potluck.engine.rounds.engine import Engine
from potluck.methods.fedavg import FedAvg
from potluck.methods.fednova import FedNova
from potluck.methods.inconova import InCoNova
from potluck.parts.sharing import Sharing

LR = 0.1
SIZES = (1, 3, 6)


class Slope(nn.Module):
    """Its loss falls by its input at every weight, wherever it is: a constant field of gradients."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ParameterDict({name: nn.Parameter(torch.zeros(1)) for name in layers})

    def forward(self, x):
        return -x * sum(self.layers.values())


def federation(architectures=("net",) * 3):
    """Clients with 1, 3 and 6 examples, whose gradients are -1, -2 and -3."""
    sites = {}
    for id, size in enumerate(SIZES):
        data = Examples(torch.full((size, 1), id + 1.0), torch.zeros(size, 1))
        sites[id] = Site(id, architectures[id], data, data, data)
    builders = {"net": lambda: Slope("w"), "deep": lambda: Slope("w", "deep")}
    return Federation(sites, builders, architectures[0], 1, criterion=lambda outputs, targets: outputs.mean())


def after_a_round(method, world=None):
    engine = Engine(method, world or federation())
    state, _ = engine.round(1, engine.start(), range(3))
    return state.weights["all"]


def sgd(**more):
    return LocalTraining("sgd", lr=LR, batch_size=1, **more)


def test_round_goes_the_mean_number_of_steps_along_the_mean_normalised_update():
    share = [size / sum(SIZES) for size in SIZES]
    tau = sum(p * steps for p, steps in zip(share, SIZES, strict=True))
    mean_gradient = sum(p * gradient for p, gradient in zip(share, (1, 2, 3), strict=True))
    assert after_a_round(FedNova(sgd()))["layers.w"].item() == pytest.approx(LR * tau * mean_gradient)
    fedavg = sum(p * steps * gradient for p, steps, gradient in zip(share, SIZES, (1, 2, 3), strict=True))
    assert after_a_round(FedAvg(sgd()))["layers.w"].item() == pytest.approx(LR * fedavg)


def test_round_counts_momentum_as_the_steps_that_it_is_worth():
    """In a constant field of gradients d_i is eta times the gradient, whatever the momentum and the steps."""
    velocity, steps = 0.0, []
    for size in SIZES:
        worth = velocity = 0.0
        for _ in range(size):
            velocity = 0.5 * velocity + 1
            worth += velocity
        steps.append(worth)
    share = [size / sum(SIZES) for size in SIZES]
    tau = sum(p * a for p, a in zip(share, steps, strict=True))
    mean_gradient = sum(p * gradient for p, gradient in zip(share, (1, 2, 3), strict=True))
    assert after_a_round(FedNova(sgd(momentum=0.5)))["layers.w"].item() == pytest.approx(LR * tau * mean_gradient)


def test_a_layer_has_the_steps_of_its_owners():
    found = after_a_round(FedNova(sgd()), federation(("net", "deep", "deep")))
    share = [size / sum(SIZES[1:]) for size in SIZES[1:]]
    tau = share[0] * SIZES[1] + share[1] * SIZES[2]
    assert found["layers.deep"].item() == pytest.approx(LR * tau * (share[0] * 2 + share[1] * 3))


def test_clients_that_take_as_many_steps_average_as_in_fedavg():
    training = sgd(steps=4, momentum=0.9)
    torch.testing.assert_close(after_a_round(FedNova(training)), after_a_round(FedAvg(training)))


def test_a_client_that_nobody_heard_of_changes_nothing_of_a_layer():
    engine = Engine(FedNova(sgd()), federation(("net", "deep", "deep")))
    before = engine.start()
    after, _ = engine.round(1, before, [0])
    assert torch.equal(after.weights["all"]["layers.deep"], before.weights["all"]["layers.deep"])
    assert not torch.equal(after.weights["all"]["layers.w"], before.weights["all"]["layers.w"])


def test_a_sharing_that_averages_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"sharing\.scope: expected one that averages, found 'none'"):
        FedNova(sharing=Sharing("none"))


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_a_step_of_adam_and_adamw_counts_as_one(optimizer):
    """In a constant field of gradients every bias-corrected step is one learning rate long, whatever the slope."""
    share = [size / sum(SIZES) for size in SIZES]
    tau = sum(p * steps for p, steps in zip(share, SIZES, strict=True))
    found = after_a_round(FedNova(LocalTraining(optimizer, lr=LR, batch_size=1)))
    assert found["layers.w"].item() == pytest.approx(LR * tau, rel=1e-4)


def test_the_decay_of_adamw_is_a_part_of_the_update_and_not_of_its_number_of_steps():
    """Each step of AdamW takes the share lr * decay off the weight before it goes lr along the slope."""
    ways, decay = [], 0.5
    for size in SIZES:
        w = 0.0
        for _ in range(size):
            w = w * (1 - LR * decay) + LR
        ways.append(w / size)
    share = [size / sum(SIZES) for size in SIZES]
    tau = sum(p * steps for p, steps in zip(share, SIZES, strict=True))
    expected = tau * sum(p * way for p, way in zip(share, ways, strict=True))
    found = after_a_round(FedNova(LocalTraining("adamw", lr=LR, batch_size=1, weight_decay=decay)))
    assert found["layers.w"].item() == pytest.approx(expected, rel=1e-4)


def of_opposite_slopes(training, rounds=12):
    """The weight after some rounds of two equal clients that take 1 and 40 steps and have the gradients -1 and +1."""
    slope = {0: Examples(torch.ones(1, 1), torch.zeros(1, 1)), 1: Examples(-torch.ones(40, 1), torch.zeros(40, 1))}
    sites = {id: Site(id, "net", data, data, data) for id, data in slope.items()}
    world = Federation(sites, {"net": lambda: Slope("w")}, "net", 1, criterion=lambda outputs, targets: outputs.mean())
    engine = Engine(FedNova(training, Sharing(weighting="uniform")), world)
    state = engine.start()
    for number in range(1, rounds + 1):
        state, _ = engine.round(number, state, range(2))
    return state.weights["all"]["layers.w"].item()


@pytest.mark.parametrize(
    "training",
    [sgd(), sgd(momentum=0.9), sgd(persist=True), LocalTraining("adam", lr=LR, batch_size=1, persist=True)],
)
def test_opposite_gradients_cancel_however_many_steps_each_client_takes(training):
    assert of_opposite_slopes(training) == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("method", [FedNova, InCoNova])
def test_momentum_that_lasts_is_refused_since_its_steps_are_counted_from_zero(method):
    expected = "training.persist: expected False with momentum, which |a_i| counts from zero in every round, found True"
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$"):
        method(sgd(momentum=0.9, persist=True))


def test_an_optimiser_whose_steps_have_no_known_length_is_refused():
    with pytest.raises(ConfigError, match=r"^training\.optimizer: expected 'sgd', 'adam' or 'adamw', .* 'rmsprop'$"):
        FedNova(LocalTraining("rmsprop"))
