"""A model of one's own with a pre-trained part that is frozen, under every method that takes any module.

The conformance suite asks the same of all methods with a staged net.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.nets.weights import frozen_names, frozen_of, weights_of
from potluck.core.requests.fit import LocalTraining
from potluck.engine.executors.stacked import Stacked
from potluck.engine.executors.workers import Workers, can_fork
from potluck.engine.rounds.engine import Engine
from potluck.experiment.running.run import Run
from potluck.experiment.settings.schema import RunConfig
from potluck.methods import get_method
from potluck.methods.fedavg import FedAvg
from potluck.methods.fedepth import FeDepth
from potluck.methods.fedmd import FedMD
from potluck.methods.fedorion import FedORION
from potluck.methods.local import Local
from potluck.methods.scaffold import Scaffold
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
SGD = LocalTraining("sgd", lr=0.1, momentum=0.5, weight_decay=0.1, batch_size=4)
PLAIN = LocalTraining("sgd", lr=0.1, weight_decay=0.1, batch_size=4)


class FineTuned(nn.Module):
    """A frozen backbone with a BatchNorm in evaluation mode, fixed positions, two tied layers, a head of its own."""

    def __init__(self, width):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3))
        self.backbone.requires_grad_(False).eval()
        nn.init.normal_(self.backbone[1].running_mean)
        self.positions = nn.Parameter(torch.randn(width), requires_grad=False)
        self.there, self.back = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.back.weight = self.there.weight
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        h = self.backbone(x) + self.positions
        return self.head(self.norm(self.back(self.there(h).relu())))


class Heedless(FineTuned):
    """Whose author held the statistics in `train`, as is usual, and left the flags alone."""

    def __init__(self, width):
        super().__init__(width)
        self.backbone.train()

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self


def fine_tuning(clouds, build=FineTuned):
    """Three clients with the small model and one with a large one."""
    federation = clouds("norm2", "norm2", "norm2", "norm3", public=12)
    return replace(federation, architectures={"norm2": lambda: build(8), "norm3": lambda: build(12)})


FROZEN = {
    "backbone.0.weight", "backbone.0.bias", "backbone.1.weight", "backbone.1.bias", "backbone.1.running_mean",
    "backbone.1.running_var", "backbone.1.num_batches_tracked", "positions",
}  # fmt: skip
BY_ARCHITECTURE = Sharing("architecture")
METHODS = [
    Local(SGD),
    FedAvg(SGD, BY_ARCHITECTURE),
    FedAvg(LocalTraining(lr=0.1, weight_decay=0.1, clip_norm=1.0, batch_size=4), BY_ARCHITECTURE),
    FedAvg(SGD, Sharing("architecture", buffers="local")),
    FedAvg(SGD, Sharing("architecture", buffers="drop")),
    Scaffold(PLAIN, sharing=BY_ARCHITECTURE),
    Scaffold(PLAIN, option="gradient", sharing=BY_ARCHITECTURE),
    Scaffold(LocalTraining(batch_size=4), sharing=BY_ARCHITECTURE),
    FedMD(SGD, SGD),
    FedORION(SGD, SGD, noise_batches=2),
    FedORION(SGD, SGD, order="simultaneous", noise_batches=2, mutual_from=0.5),
    FedORION(SGD, SGD, selective=False, mutual=False, noise_batches=2),
]


def names_in(message):
    """Every name in a message, however deep."""
    return {*message, *(name for entry in message.values() if isinstance(entry, dict) for name in names_in(entry))}


def sent_by(run):
    """Every name that crossed the wire in either direction, for training and for evaluating."""
    exchanges = [e for way in (run.wire.sent, run.wire.replied) for exchanges in way.values() for e in exchanges]
    messages = [message for exchange in exchanges for message in exchange.values()]
    method, server = run.engine.method, run.engine.server(0)
    messages += [method.inference_message(run.state, id, server) for id in run.engine.federation.sites]
    return set().union(*map(names_in, messages))


@pytest.mark.slow
@pytest.mark.parametrize("build", [FineTuned, Heedless])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_what_is_frozen_stays_with_its_builder(play, clouds, method, build):
    run = play(method, fine_tuning(clouds, build), rounds=2)
    built = {name: run.engine.server(0).build(name) for name in run.engine.federation.architectures}
    assert all(frozen_names(net) == FROZEN for net in built.values())
    for id, site in run.engine.federation.sites.items():
        model = run.model(id)
        assert_close(frozen_of(model), frozen_of(built[site.architecture]), **EXACTLY)
        assert not torch.equal(model.there.weight, built[site.architecture].there.weight)
        assert not FROZEN & run.kept(id).get("model", {}).keys()
    if (common := run.engine.global_model(run.state)) is not None:
        assert_close(frozen_of(common), frozen_of(built["norm2"]), **EXACTLY)
    assert not FROZEN & sent_by(run)


def test_a_layer_that_one_architecture_has_frozen_is_averaged_over_the_others(play, clouds):
    """And stays what its builder made it where it is frozen."""

    def frozen():
        net = federation.architectures["norm2"]()
        net.stages.stage0[0].requires_grad_(False)
        net.stages.stage0[1].eval()
        return net

    federation = clouds("norm2", "norm3", "norm3")
    run = play(FedAvg(SGD), replace(federation, architectures={**federation.architectures, "norm2": frozen}), rounds=2)
    replied = run.wire.replied["local_update"][-1]
    name, statistics = "stages.stage0.0.weight", "stages.stage0.1.running_mean"
    assert name not in replied[0]["weights"]
    assert statistics not in replied[0]["buffers"]
    assert "stages.stage0.1.weight" in replied[0]["weights"]  # it learns, though its statistics do not
    for entry, tensor in (("weights", name), ("buffers", statistics)):
        total = 20 + 9
        expected = sum(replied[id][entry][tensor] * (size / total) for id, size in ((1, 20), (2, 9)))
        assert_close(run.state.weights["all"][tensor], expected)
    built = run.engine.server(0).build("norm2")
    assert_close(frozen_of(run.model(0)), frozen_of(built), **EXACTLY)
    assert not torch.equal(weights_of(run.model(0))[name], run.state.weights["all"][name])


@pytest.mark.parametrize(
    "executor",
    [
        pytest.param(lambda: Workers(2), marks=pytest.mark.skipif(not can_fork(), reason="cannot fork"), id="workers"),
        pytest.param(Stacked, id="stacked"),
    ],
)
@pytest.mark.parametrize("method", [METHODS[0], METHODS[1], METHODS[5]], ids=str)
def test_what_is_frozen_stays_under_every_executor(clouds, executor, method):
    engine = Engine(method, fine_tuning(clouds), executor=executor())
    try:
        state = engine.start()
        for number in (1, 2):
            state, _ = engine.round(number, state, [0, 1, 2, 3])
    finally:
        engine.close()
    for id, site in engine.federation.sites.items():
        expected = frozen_of(engine.server(0).build(site.architecture))
        assert_close(frozen_of(engine.inference_model(state, id)), expected, **EXACTLY)


def test_two_backbones_under_equal_heads_are_no_one_architecture(play, clouds):
    """FedORION's clients have the global architecture if what is frozen has the same shapes too."""

    def build(depth):
        frozen = [nn.Linear(6, 8)] if depth == 1 else [nn.Linear(6, 5), nn.Linear(5, 8)]
        return nn.Sequential(nn.Sequential(*frozen).requires_grad_(False), nn.Linear(8, 3))

    federation = clouds("norm2", "norm3")
    nets = {"norm2": lambda: build(1), "norm3": lambda: build(2)}
    run = play(FedORION(SGD, SGD, noise_batches=1), replace(federation, architectures=nets))
    assert ["own" in reply for reply in run.wire.replied["local_update"][0].values()] == [False, True]
    assert [len(run.model(id)[0]) for id in (0, 1)] == [1, 2]


def test_fedepth_passes_over_a_piece_that_is_all_frozen(play, clouds):
    """And what it puts out reaches the pieces behind it, buffered or not."""
    thawed = clouds("norm3", capacities=(0.5,))

    def frozen():
        net = thawed.architectures["norm3"]()
        for part in (net.stages.stage1, net.head):
            part.requires_grad_(False).eval()
        return net

    federation = replace(thawed, architectures={"norm3": frozen})
    still = LocalTraining("sgd", lr=0.1, batch_size=12, epochs=2)
    runs = [play(FeDepth(still, buffer=buffer), federation) for buffer in (True, False)]
    assert [len(run.reports[0].losses[0]) for run in runs] == [1, 2]  # of three pieces; buffered, one is on raw data
    built = weights_of(runs[0].engine.server(0).build("norm3"))
    one, two = (weights_of(run.model(0)) for run in runs)
    assert_close(one, two, rtol=1e-4, atol=1e-6)
    moved = {name.rpartition(".")[0] for name in one if not torch.equal(one[name], built[name])}
    assert moved == {"stages.stage0.0", "stages.stage0.1", "stages.stage2.0", "stages.stage2.1"}


@pytest.mark.parametrize("name", ["fedgh", "fedre"])
def test_a_head_that_the_server_is_to_train_may_not_be_frozen(clouds, name):
    """And is refused in a line before anybody trains."""
    thawed = clouds("norm2", "norm3")

    def frozen():
        net = thawed.architectures["norm3"]()
        net.head.requires_grad_(False)
        return net

    federation = replace(thawed, architectures={**thawed.architectures, "norm3": frozen})
    with pytest.raises(ConfigError, match=r"cannot run here: the server trains the head, and that of norm3 is frozen"):
        Run(get_method(name)(SGD), federation, RunConfig(rounds=1)).load()


def test_peers_that_start_afresh_have_what_is_frozen(play, clouds):
    federation = clouds("norm2")

    def part_frozen():
        net = federation.architectures["norm2"]()
        net.stages.stage0.requires_grad_(False).eval()
        nn.init.normal_(net.stages.stage0[1].running_mean)
        return net

    run = play(FeDepth(SGD, models=2), replace(federation, architectures={"norm2": part_frozen}))
    (peer,) = run.kept(0)["modules"].values()
    assert not {"stages.stage0.0.weight", "stages.stage0.1.running_mean"} & peer.keys()
