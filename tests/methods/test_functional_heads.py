"""Nets of users whose head is no module: functions of parameters of the net's own. They do what a linear layer does."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck import ConfigError, Examples, Federation, Run, RunConfig, Site, fl, get_method
from potluck.core.ground.tree import unpack
from potluck.core.needs import Offer
from potluck.core.nets.splitting import plan_of
from potluck.experiment.federation.needs import needs_of
from potluck.methods import list_methods
from potluck.models.fitting import takes_fit
from potluck.testing.worlds import packed_state, quick

EXACTLY = {"rtol": 0, "atol": 0}
pytestmark = pytest.mark.filterwarnings("ignore:num_classes is 3, and no example has")
EXCHANGING = ("fedet", "fedgen", "fedgh", "fedre", "lgfedavg")
READING = ("fedproto", "fedtgp", "fedl2g", "moon", "fedper", "fedrep", "fedbabu", "fedin", "velo", "fedmrl", "fedkd")


class Body(nn.Module):
    """Three layers, the second of which a module follows."""

    def __init__(self, hidden=8):
        super().__init__()
        self.first, self.norm, self.middle = nn.Linear(8, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 6)
        self.act = nn.ReLU()

    def features(self, x):
        return self.act(self.middle(self.norm(self.first(x)).relu()))


class Layer(Body):
    """A head as most have it."""

    def __init__(self, hidden=8):
        super().__init__(hidden)
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(self.features(x))


class Function(Body):
    """The same, drawn alike, of parameters."""

    def __init__(self, hidden=8):
        super().__init__(hidden)
        self.weight, self.bias = nn.Linear(6, 3).parameters()

    def forward(self, x):
        return F.linear(self.features(x), self.weight, self.bias)


class Product(Function):
    """The same, written as a product."""

    def forward(self, x):
        return self.features(x) @ self.weight.T + self.bias


class Maps(Function):
    """Its head reads a mean over positions that no module has put out or been given."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.middle = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3)

    def forward(self, x):
        return F.linear(self.features(x.view(-1, 1, 8, 8)).mean((2, 3)), self.weight, self.bias)


def federation(*builds, inputs=8):
    def examples(count):
        draws = torch.Generator().manual_seed(count)
        x = torch.randn(count, inputs, generator=draws)
        return Examples(x, (x[:, :2].sum(1) > 0).long())

    names = [f"net{number}" for number in range(len(builds))]
    sites = {i: Site(i, names[i % len(names)], examples(20 + i), examples(8), examples(9)) for i in range(2)}
    return Federation(sites, dict(zip(names, builds, strict=True)), names[0], num_classes=3, public=examples(12))


def left_by(name, *builds):
    """All numbers of the server's state and the clients' after two rounds, whatever they are called."""
    run = Run(quick(get_method(name)), federation(*builds), RunConfig(rounds=2, executor="sequential"))
    run.run()
    trained = run.trained()
    states = [packed_state(trained.state), *(trained.engine.store.read(id) or b"" for id in trained.federation.sites)]
    models = [trained.model(client).state_dict() for client in trained.federation.sites]
    return Counter(_numbers([unpack(state) for state in states if state]) + _numbers(models))


def _numbers(tree):
    if isinstance(tree, torch.Tensor):
        return [tuple(tree.flatten().tolist())]
    if isinstance(tree, dict | list | tuple):
        return [one for child in (tree.values() if isinstance(tree, dict) else tree) for one in _numbers(child)]
    return []


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EXCHANGING, *READING])
@pytest.mark.parametrize("build", [Function, Product])
def test_a_head_of_functions_leaves_behind_what_a_layer_leaves(name, build):
    assert left_by(name, build) == left_by(name, Layer)


@pytest.mark.parametrize("name", ["fedgh", "lgfedavg"])
def test_unlike_nets_have_a_head_of_functions_in_common(name):
    run = Run(quick(get_method(name)), federation(Function, lambda: Function(hidden=5)), RunConfig(rounds=1))
    run.run()
    one, other = (run.trained().model(client) for client in (0, 1))
    assert torch.equal(one.weight, other.weight)
    assert torch.equal(one.bias, other.bias)


@pytest.mark.parametrize("build", [Function, Product])
def test_the_head_is_what_comes_behind_the_features_and_its_tensors_are_the_nets(build):
    net = federation(build).build("net0", fl.Key(("net",))).eval()
    parts, x = fl.split(net), torch.randn(5, 8)
    assert (parts.head_problem(), parts.head_name, parts.head_prefix, parts.num_features) == (None, "", "", 6)
    assert dict(parts.head.state_dict(keep_vars=True)) == {"weight": net.weight, "bias": net.bias}
    assert parts.last_names() == {"weight", "bias"}
    assert_close(parts.head(parts.features(x)), net(x), **EXACTLY)
    again = copy.deepcopy(parts.head)
    fl.load(parts.head, {"weight": torch.ones(3, 6), "bias": torch.zeros(3)})
    assert bool((net.weight == 1).all())
    assert not bool((again.weight == 1).any())


def test_a_factor_behind_the_last_layer_is_no_head():
    class Tempered(Layer):
        def __init__(self):
            super().__init__()
            self.temperature, self.prior = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1, 3))

        def forward(self, x):
            return super().forward(x) / self.temperature + self.prior

    plan = plan_of(federation(Tempered).build("net0", fl.Key(("net",))))
    assert (str(plan.features), plan.head) == ("<fc", None)


def methods_that_take_heads():
    """All whose needs name heads or widths of features."""
    needs = {name: needs_of(quick(get_method(name))) for name in list_methods()}
    return [name for name in needs if any(need in (fl.heads.COMMON_HEAD, fl.heads.COMMON_WIDTH, fl.heads.WHOLE_HEAD)
                                          for need in needs[name])]  # fmt: skip


NETS = {"function": (Function, 8), "maps": (Maps, 64), "layer": (Layer, 8)}


@pytest.mark.rotates
@pytest.mark.parametrize("name", methods_that_take_heads())
def test_no_refusal_advises_what_refuses_the_same_net(name):
    for build, inputs in NETS.values():
        wider = lambda: _wider(build)  # noqa: B023, E731, called in this turn
        found = federation(build, wider, inputs=inputs)
        problems = [need.problem(Offer.of(found)) for need in needs_of(quick(get_method(name)))]
        for problem in filter(None, problems):
            advised = "feature_width" in problem and "cannot bring" not in problem
            assert not advised or all(takes_fit(one, found.input_shape) for one in (build, wider))


def _wider(build):
    """A net whose head reads one feature more."""
    net = build()
    net.middle = type(net.middle)(net.middle.weight.shape[1], 7, *net.middle.weight.shape[2:])
    if isinstance(net, Layer):
        net.fc = nn.Linear(7, 3)
    else:
        net.weight = nn.Parameter(torch.randn(3, 7))
    return net


@pytest.mark.parametrize("name", ["lgfedavg", "fedgh", "fedre", "fedet", "fedgen"])
def test_a_head_that_reads_maps_is_refused_with_what_to_do(name):
    with pytest.raises(ConfigError, match="net0 cannot be taken out: what comes behind act reads features of") as found:
        Run(quick(get_method(name)), federation(Maps, inputs=64), RunConfig(rounds=1)).run()
    assert "feature_width" not in str(found.value)
    assert "nn.Identity" in str(found.value)


def test_with_an_identity_before_it_a_head_that_reads_a_mean_is_one():
    class Named(Maps):
        def __init__(self):
            super().__init__()
            self.reads = nn.Identity()

        def forward(self, x):
            return F.linear(self.reads(self.features(x.view(-1, 1, 8, 8)).mean((2, 3))), self.weight, self.bias)

    parts = fl.split(federation(Named, inputs=64).build("net0", fl.Key(("net",))))
    assert (parts.head_problem(), parts.num_features) == (None, 6)
