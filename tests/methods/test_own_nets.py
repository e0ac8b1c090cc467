"""Sub-model methods on nets that know nothing of Potluck: no StagedNet, no `scale`."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from potluck import ConfigError, Examples, Federation, Run, RunConfig, Site, fl, get_method
from potluck.core.nets.scale import FULL
from potluck.core.nets.slicing import lies_in
from potluck.engine.rounds.engine import Engine

SHAPE = (1, 8, 8)
TRAINING = fl.LocalTraining(optimizer="sgd", lr=0.1, batch_size=8)


class Residual(nn.Module):
    """Convolutions with BatchNorm and a residual sum, flattened before linear layers."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 6, 3, padding=1)
        self.hidden, self.out = nn.Linear(6 * 4, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        x = F.avg_pool2d(x + self.second(x), 4)
        return self.out(F.relu(self.hidden(x.view(x.size(0), -1))))


class Attending(nn.Module):
    """Patches as tokens, positions, attention beside a shortcut; without a norm."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 4, stride=4)
        self.positions = nn.Parameter(torch.randn(4, 8))
        self.attention = nn.MultiheadAttention(8, 4, batch_first=True)
        self.wide, self.out = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        h = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.out(self.wide(h.mean(1)).tanh())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.out = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.rows(x[:, 0])[0][:, -1])


NETS = {"residual": Residual, "attending": Attending}
pytestmark = pytest.mark.filterwarnings("ignore:num_classes is 3, and no example has")  # on purpose, see `federation`
METHODS = {
    "heterofl": {"levels": (1.0, 0.5)},
    "fedrolex": {"levels": (1.0, 0.5)},
    "fjord": {"levels": (1.0, 0.5)},
    "splitmix": {"atom": 0.5},
}


def federation(build, capacities=(1.0, 0.5)):
    def examples(count):
        inputs = torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(count))
        return Examples(inputs, (inputs.mean((1, 2, 3)) > 0).long())  # nobody has the third class

    sites = {
        i: Site(i, "own", train=examples(16 + i), validation=examples(8), test=examples(9), capacity=capacity)
        for i, capacity in enumerate(capacities)
    }
    return Federation(sites, {"own": build}, "own", num_classes=3, test=examples(10))


@pytest.mark.slow
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", METHODS)
def test_a_plain_net_of_the_users_own_runs(name, net):
    result = Run(get_method(name)(training=TRAINING, **METHODS[name]), federation(NETS[net]), RunConfig(rounds=1)).run()
    assert 0 <= result.evaluation.mean("accuracy_personal") <= 1


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", ["heterofl", "fedrolex", "fjord"])
def test_narrow_clients_change_the_weights_of_their_channels_and_no_others(name, net):
    method = get_method(name)(training=TRAINING, levels=(0.5,))
    engine = Engine(method, federation(NETS[net], (0.5, 0.5)))
    state = engine.start()
    before = {n: tensor.clone() for n, tensor in state.weights.items()}
    places = method.submodel(engine.server(1), 0.5)
    state, _ = engine.round(1, state, [0, 1])
    narrow = lies_in(engine.server(1).build(width=0.5))
    head = {"out.weight", "out.bias"}  # some of its rows are of classes that clients lack
    for n, tensor in before.items():
        trained = torch.zeros(tensor.shape, dtype=torch.bool)
        trained[_at(places[n], tensor.shape)] = True
        moved = state.weights[n] != tensor
        assert not (moved & ~trained).any()
        assert n in head or moved[trained].float().mean() > 0.3
        assert 0 < trained.sum() < trained.numel() or n == "out.bias"
        assert [_size(i, s) for i, s in zip(places[n], tensor.shape, strict=True)] == [
            _size(i, s) for i, s in zip(narrow[n], tensor.shape, strict=True)
        ]


def _size(index, size):
    return len(range(*index.indices(size))) if isinstance(index, slice) else len(index)


def _at(place, shape):
    listed = [torch.arange(size)[index] for index, size in zip(place, shape, strict=True)]
    return torch.meshgrid(*listed, indexing="ij")


def test_attentions_heads_are_taken_whole_and_the_same_in_query_key_and_value():
    engine = Engine(get_method("fedrolex")(training=TRAINING, levels=(0.5,)), federation(Attending, (0.5,)))
    engine.start()
    for number, heads in ((1, [0, 1]), (2, [1, 2]), (4, [3, 0])):
        place = get_method("fedrolex")(levels=(0.5,)).submodel(engine.server(number), 0.5)
        rows = [2 * head + i for head in heads for i in range(2)]
        assert place["attention.in_proj_weight"][0].tolist() == [8 * part + row for part in range(3) for row in rows]
        assert place["attention.out_proj.weight"][1].tolist() == rows


def test_heterofl__a_plain_nets_classifier_is_the_layer_that_writes_its_outputs():
    engine = Engine(get_method("heterofl")(training=TRAINING, levels=(1.0,)), federation(Residual, (1.0,)))
    state = engine.start()
    before = {n: tensor.clone() for n, tensor in state.weights.items()}
    state, _ = engine.round(1, state, [0])
    for n in ("out.weight", "out.bias"):
        moved = (
            (state.weights[n] != before[n]).flatten(1).any(1) if before[n].dim() > 1 else state.weights[n] != before[n]
        )
        assert moved.tolist() == [True, True, False]


@pytest.mark.parametrize("name", METHODS)
def test_a_net_that_cannot_be_cut_is_refused_with_its_layer_before_anything_trains(name):
    with pytest.raises(ConfigError) as caught:
        Run(get_method(name)(), federation(Recurrent), RunConfig(rounds=1)).run()
    assert "it cuts the width of own, which has no slices: layer rows (GRU) calls gru" in str(caught.value)
    assert "choose another model, or give its builder a `scale`" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["heterofl", "fedrolex", "fjord"])
def test_a_level_that_a_net_cannot_have_is_refused_before_anything_trains(name):
    def build():
        fours = [nn.Unflatten(1, (4, -1)), nn.Flatten()]  # takes a multiple of four channels
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), *fours, nn.Linear(8, 3))

    engine = Engine(get_method(name)(levels=(1.0, 0.5, 0.25)), federation(build))
    with pytest.raises(ConfigError, match=r"own: cannot be built at width 0\.25: .*layer 2 \(Unflatten\) fails"):
        engine.start()


def test_a_convolution_in_groups_that_its_builder_narrows_group_by_group_is_refused():
    def build(scale=FULL):
        width = scale.of(8)
        layers = [nn.Conv2d(1, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3, groups=2), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(16 * width, 3))

    with pytest.raises(ConfigError, match=r"own at width 0\.5 is no slice of itself: 2\.weight has the sh"):
        Run(get_method("heterofl")(), federation(build), RunConfig(rounds=1)).run()
    plain = Run(get_method("heterofl")(training=TRAINING), federation(lambda: build()), RunConfig(rounds=1))
    assert plain.run() is not None  # cut by Potluck, it has fewer groups
