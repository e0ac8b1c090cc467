"""Methods that train stages apart or leave some out, on nets that know nothing of Potluck: no StagedNet, no `scale`."""

from collections import Counter
from itertools import chain

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck import ConfigError, Examples, Federation, Run, RunConfig, Site, fl, get_method
from potluck.core.needs import Offer
from potluck.core.nets.weights import parameters_of
from potluck.core.requests.inference import predict
from potluck.data.dataset import arrays_digest
from potluck.engine.executors.stacked import Stacked
from potluck.engine.rounds.engine import Engine
from potluck.experiment.federation.needs import check_needs
from potluck.models.contract import StagedNet

from ..own_networks import Encoder

SHAPE = (1, 8, 8)
TRAINING = fl.LocalTraining(optimizer="sgd", lr=0.05, batch_size=8)
pytestmark = pytest.mark.filterwarnings("ignore:num_classes is 3, and no example has")


class Tutorial(nn.Module):
    """As tutorials have it, with functions between layers; what is flattened is a place, and two layers meet there."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.left, self.right = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(4, 2, 1)
        self.fc1, self.fc2, self.fc3 = nn.Linear(32, 16), nn.Linear(16, 12), nn.Linear(12, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(torch.cat([self.left(x), self.right(x)], 1)), 2)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x):
        return F.relu(x + self.norm(self.conv(x)))


class Residual(nn.Module):
    """Blocks in a list, behind a stem of layers."""

    def __init__(self, depth=4):
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(1, 4, 3, padding=1), nn.ModuleList(Block() for _ in range(depth))
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Patches(nn.Module):
    """A transformer with a class token."""

    def __init__(self, depth=4):
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 4, stride=4)
        self.cls_token, self.positions = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.blocks = nn.Sequential(*(Encoder() for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


NETS = {"tutorial": Tutorial, "residual": Residual, "patches": Patches}
METHODS = ("depthfl", "fedepth", "fedgkt", "hypemefed", "inclusivefl", "mfedepth", "scalefl")
OPTIONS = {"hypemefed": {"hidden": 8}}


def federation(architectures, capacities=(1.0, 0.5)):
    def examples(count):
        inputs = torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(count))
        return Examples(inputs, (inputs.mean((1, 2, 3)) > 0).long())

    names = list(architectures)
    sites = {
        i: Site(i, names[i % len(names)], train=examples(16 + i), validation=examples(8), test=examples(9),
                capacity=capacity)
        for i, capacity in enumerate(capacities)
    }  # fmt: skip
    return Federation(sites, architectures, names[0], num_classes=3, test=examples(10))


def method(name, **options):
    return get_method(name)(training=TRAINING, **OPTIONS.get(name, {}), **options)


def world(name, net):
    """One architecture, or the two sizes that InclusiveFL is about."""
    build = NETS[net]
    if name == "inclusivefl" and net != "tutorial":
        return federation({"small": lambda: build(2), "large": lambda: build(4)})
    return federation({"own": build}, (1.0, 0.7))


@pytest.mark.slow
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", METHODS)
def test_a_plain_net_of_the_users_own_runs_and_stacked_as_one_by_one(name, net):
    found = []
    for options in ({}, {"executor": Stacked()}):
        engine = Engine(method(name), world(name, net), **options)
        state, _ = engine.round(1, engine.start(), [0, 1])
        outputs = [predict(engine.inference_model(state, i), engine.federation.sites[i].test) for i in (0, 1)]
        found.append((vars(state), outputs))
    assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


def staged_residual():
    """A `Residual` in stages, as a user cuts it who makes nothing of `scale`, by the names of the dataflow."""
    net = Residual()
    blocks = {f"blocks-{number}": block for number, block in enumerate(net.blocks)}
    stages = {"stem": nn.Sequential(net.stem, nn.ReLU()), **blocks}
    return StagedNet(stages, net.fc, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))


@pytest.mark.rotates
@pytest.mark.parametrize("name", ["depthfl", "hypemefed", "scalefl"])
def test_a_net_in_stages_runs_without_a_scale_and_its_plain_twin_ends_with_the_same_numbers(name):
    ends, options = [], {"widths": (1.0, 0.5), "depths": (1.0, 0.5)} if name == "scalefl" else {}
    for build in (Residual, staged_residual):
        engine = Engine(method(name, levels=(1.0, 0.5), **options), federation({"own": build}))
        check_needs(engine.method.needs(), name, Offer.of(engine.federation))
        state, _ = engine.round(1, engine.start(), [0, 1])
        models = [engine.inference_model(state, client).state_dict() for client in (0, 1)]
        ends.append(Counter(map(arrays_digest, chain(*(tensors.values() for tensors in (state.weights, *models))))))
    assert ends[0] == ends[1] or name == "hypemefed"  # whose hypernetworks begin as the layers are called


@pytest.mark.rotates
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", ["depthfl", "hypemefed", "scalefl"])
def test_a_weak_client_has_the_leading_stages_under_their_names_and_an_exit(name, net):
    options = {"widths": (1.0, 1.0), "depths": (1.0, 0.5)} if name == "scalefl" else {}
    engine = Engine(method(name, levels=(1.0, 0.5), **options), federation({"own": NETS[net]}, (0.5, 0.5)))
    state = engine.start()
    server = engine.server(1)
    whole = parameters_of(server.build())
    depth, stages = fl.exits.blocks_within(server.build(), 0.5), fl.stages.stages_of(server.build())
    before = stages.stages[: 1 + depth]
    kept = {n for place in before for n in stages.names()[place] if n in whole}
    assert {n for n in state.weights if not n.startswith("exits.")} == whole.keys()
    old = {n: tensor.clone() for n, tensor in state.weights.items()}
    state, _ = engine.round(1, state, [0, 1])
    moved = {n for n, tensor in state.weights.items() if not torch.equal(tensor, old[n])}
    of_exits = {n for n in moved if n.startswith("exits.")}
    assert moved - of_exits == kept < whole.keys()
    assert {n.split(".")[1] for n in of_exits} == {before[-1]}


@pytest.mark.parametrize("net", NETS)
def test_scalefl__narrow_clients_change_the_weights_of_their_channels_and_no_others(net):
    subject = method("scalefl", levels=(1.0, 0.5), widths=(1.0, 0.5), depths=(1.0, 0.7))
    engine = Engine(subject, federation({"own": NETS[net]}, (0.5, 0.5)))
    state = engine.start()
    old = {n: tensor.clone() for n, tensor in state.weights.items()}
    places = subject.submodel(engine.server(1), 0.5)
    state, _ = engine.round(1, state, [0, 1])
    for n, tensor in old.items():
        trained = torch.zeros(tensor.shape, dtype=torch.bool)
        if n in places:
            positions = [torch.arange(size)[i] for i, size in zip(places[n], tensor.shape, strict=True)]
            trained[torch.meshgrid(*positions, indexing="ij")] = True
        assert not ((state.weights[n] != tensor) & ~trained).any(), n
    exits = [n for n in places if n.startswith("exits.") and n.endswith("head.weight")]
    assert exits


def test_fedgkt__the_server_has_the_layers_behind_the_extractor_under_their_names():
    engine = Engine(method("fedgkt"), federation({"own": Tutorial}))
    state, _ = engine.round(1, engine.start(), [0, 1])
    assert {n.split(".")[0] for n in state.net} == {"left", "right", "fc1", "fc2", "fc3"}
    data = engine.federation.sites[1].test
    both = engine.inference_model(state, 1)
    assert {n for n, _ in both.named_parameters()} == {
        *(f"behind.{n}" for n in state.net),
        *(f"extractor.{n}" for n in ("conv1.weight", "norm1.weight", "norm1.bias")),
    }
    assert predict(both, data).shape == (9, 3)


@pytest.mark.parametrize("name", ["fedepth", "mfedepth"])
def test_fedepth__stages_that_do_not_fit_stay_as_they_are(name):
    subject = method(name)
    memory = subject.estimate(Engine(subject, federation({"own": Tutorial})).server(1).build(), SHAPE)
    assert [part.name for part in memory.parts] == ["conv1", "left", "fc1", "fc2", "head"]
    assert memory.costs[0] > memory.costs[-1]
    weak = 1.01 * max(memory.costs[-1], 2 * memory.forward(memory.blocks[0][1])) / memory.whole / subject.slack
    pieces = memory.pieces(subject.budget(weak, memory))
    engine = Engine(subject, federation({"own": Tutorial}, (weak, weak)))
    before = engine.start()
    after, _ = engine.round(1, before, [0, 1])
    names = fl.stages.stages_of(engine.server(1).build()).names_between(0, pieces[0].start)
    assert pieces[0].start > 0
    assert "conv1.weight" in names
    for n, tensor in before.weights["all"].items():
        assert torch.equal(after.weights["all"][n], tensor) == (n in names), n


class Tied(Tutorial):
    """One layer is called in two stages."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, 12), nn.Linear(12, 12)
        self.again = self.fc2

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(torch.cat([self.left(x), self.right(x)], 1)), 2)
        return self.fc3(F.relu(self.again(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))))


def short():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (short, r"has one stage, 1: no layer with weights lies"),
        (Tied, r"reads again\.bias in two of its stages, again and again-2"),
    ],
)
@pytest.mark.parametrize("name", sorted({*METHODS} - {"fedgkt"}))
def test_a_net_whose_stages_cannot_be_told_apart_is_refused_in_one_line_before_anything_trains(name, build, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        Run(method(name), federation({"own": build}), RunConfig(rounds=1)).run()
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_fedepth__refuses_a_piece_from_which_no_skip_link_leads_before_anything_trains():
    class Mean(Patches):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(8, 8)

        def forward(self, x):
            x = self.blocks(self.patches(x).flatten(2).transpose(1, 2))
            return self.head(self.last(x.mean(1)).relu())

    with pytest.raises(ConfigError, match=r"no skip link leads to features \(8,\); use mfedepth, which has none"):
        Run(method("fedepth"), federation({"own": Mean}, (1.0, 0.7)), RunConfig(rounds=1)).run()
    assert Run(method("mfedepth"), federation({"own": Mean}, (1.0, 0.7)), RunConfig(rounds=1)).run() is not None
