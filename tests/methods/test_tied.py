"""Networks that have a tensor in several places compute, train and send what those do that have it once."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.nets.weights import weights_of
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import Fit, LocalTraining
from potluck.core.roles import Supervised
from potluck.engine.executors.stacked import Stacked
from potluck.engine.rounds.engine import Engine
from potluck.engine.stacking import nets as stacking
from potluck.engine.stacking.nets import stacking_key
from potluck.methods import get_method
from potluck.methods.fedepth import FeDepth
from potluck.models.contract import StagedNet, classifier_names
from potluck.testing.worlds import packed_state, quick

FEATURES, WIDTH, CLASSES = 6, 8, 3
METHODS = ["fedavg", "local", "fedprox", "fml", "feddpa", "fedl2g", "fedmk", "fiarse", "heterofl"]


class Repeated(nn.Sequential):
    """Layers that are applied several times over and are registered once."""

    def __init__(self, times, *layers):
        super().__init__(*layers)
        self.times = times

    def forward(self, x):
        for _ in range(self.times):
            x = super().forward(x)
        return x


class Named(nn.Module):
    """Layers that are applied as often as they have names."""

    def __init__(self, *layers):
        super().__init__()
        for number, layer in enumerate(layers):
            self.add_module(str(number), layer)

    def forward(self, x):
        for layer in self._modules.values():
            x = layer(x)
        return x


def ends():
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU()), nn.Linear(WIDTH, CLASSES)


def like(layer):
    """Another layer that shares the weight and the bias of this one."""
    other = nn.Linear(WIDTH, WIDTH)
    other.weight, other.bias = layer.weight, layer.bias
    return other


def once(times, *more):
    layer, (stem, head) = nn.Linear(WIDTH, WIDTH), ends()
    return StagedNet({"stem": stem, "hidden": Repeated(times, layer, *more, nn.ReLU())}, head)


def module_twice():
    layer, (stem, head) = nn.Linear(WIDTH, WIDTH), ends()
    return StagedNet({"stem": stem, "hidden": nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU())}, head)


def weight_twice():
    layer, (stem, head) = nn.Linear(WIDTH, WIDTH), ends()
    return StagedNet({"stem": stem, "hidden": nn.Sequential(layer, nn.ReLU(), like(layer), nn.ReLU())}, head)


def both():
    layer, (stem, head) = nn.Linear(WIDTH, WIDTH), ends()
    return StagedNet({"stem": stem, "hidden": Named(layer, nn.ReLU(), like(layer), nn.ReLU(), layer, nn.ReLU())}, head)


def norm_twice():
    layer, (stem, head) = nn.Linear(WIDTH, WIDTH), ends()
    norm = nn.BatchNorm1d(WIDTH)
    return StagedNet(
        {"stem": stem, "hidden": nn.Sequential(layer, norm, nn.ReLU(), like(layer), norm, nn.ReLU())}, head
    )


NETS = [
    pytest.param(module_twice, lambda: once(2), id="a module of two names"),
    pytest.param(weight_twice, lambda: once(2), id="two modules of one weight"),
    pytest.param(both, lambda: once(3), id="both"),
    pytest.param(norm_twice, lambda: once(2, nn.BatchNorm1d(WIDTH)), id="with a norm"),
]


def of(clouds, build):
    """Three clients of one architecture."""
    return replace(clouds("mlp2", "mlp2", "mlp2", public=12), architectures={"mlp2": build})


def traffic(run):
    return [(report.traffic.down, report.traffic.up) for report in run.reports]


def models(engine, state):
    return [weights_of(engine.inference_model(state, id)) for id in engine.federation.sites]


@pytest.mark.slow
@pytest.mark.parametrize(("several", "one"), NETS)
@pytest.mark.parametrize("name", METHODS)
def test_it_trains_and_sends_what_the_net_does_that_has_each_tensor_once(play, clouds, name, several, one):
    method = quick(get_method(name), optimizer="sgd", lr=0.1)
    runs = [play(method, of(clouds, build), rounds=2) for build in (several, one)]
    assert_close(models(runs[0].engine, runs[0].state), models(runs[1].engine, runs[1].state))
    assert traffic(runs[0]) == traffic(runs[1])
    assert len(packed_state(runs[0].state)) == len(packed_state(runs[1].state))


@pytest.mark.slow
@pytest.mark.parametrize(("several", "one"), NETS)
@pytest.mark.parametrize("name", METHODS)
def test_stacked_clients_learn_what_they_learn_one_by_one(play, clouds, monkeypatch, name, several, one):
    trained = []
    train = stacking._Stack
    monkeypatch.setattr(stacking, "_Stack", lambda fits, *more: trained.append(len(fits)) or train(fits, *more))
    method, federation = quick(get_method(name), optimizer="sgd", lr=0.1), of(clouds, several)
    run = play(method, federation, rounds=2)
    engine = Engine(method, federation, executor=Stacked())
    state = engine.start()
    for number in (1, 2):
        state, _ = engine.round(number, state, [*federation.sites])
    assert_close(models(engine, state), models(run.engine, run.state))
    assert max(trained) == 2


def stage_twice():
    stage, (stem, head) = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), ends()
    return StagedNet({"stem": stem, "hidden": stage, "again": stage}, head)


def stages_alike():
    stage, (stem, head) = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), ends()
    return StagedNet({"stem": stem, "hidden": stage, "again": nn.Sequential(like(stage[0]), nn.ReLU())}, head)


@pytest.mark.parametrize("name", ["fedgh", "fedgkt", "fedtgp", "fedmlb"])
def test_a_stage_of_two_names_is_passed_twice(play, clouds, name):
    method = quick(get_method(name), optimizer="sgd", lr=0.1)
    runs = [play(method, of(clouds, build), rounds=2) for build in (stage_twice, stages_alike)]
    assert_close(models(runs[0].engine, runs[0].state), models(runs[1].engine, runs[1].state))
    assert traffic(runs[0]) == traffic(runs[1])


@pytest.mark.parametrize("build", [stage_twice, stages_alike])
def test_pieces_of_a_net_that_share_a_weight_are_not_trained_one_by_one(play, clouds, build):
    federation = of(clouds, build)
    play(FeDepth(), federation)  # as a whole
    small = {id: replace(site, capacity=0.55) for id, site in federation.sites.items()}
    with pytest.raises(
        ConfigError, match=r"^client 0, capacity 0\.55 of mlp2: stages\.hidden\.0\.bias is in several of"
    ):
        play(FeDepth(), replace(federation, sites=small))


def test_nets_that_share_other_weights_are_not_stacked():
    data = Examples(torch.zeros(2, WIDTH), torch.zeros(2, WIDTH))

    def fit(*shared):
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]
        for one, other in shared:
            layers[other].weight = layers[one].weight
        return Fit(nn.Sequential(*layers), Supervised(nn.functional.mse_loss), data, LocalTraining())

    kinds = [stacking_key(fit(*shared)) for shared in ((), [(0, 1)], [(0, 2)], [(0, 1), (2, 3)], [(0, 2), (1, 3)])]
    assert [kind == stacking_key(fit((0, 2))) for kind in kinds] == [False, False, True, False, False]


def test_a_classifier_that_shares_its_weight_goes_by_the_first_name():
    net = stage_twice()
    net.stages.stem.register_parameter("table", net.head.weight)
    assert classifier_names(net) == {"stages.stem.table", "head.bias"}
