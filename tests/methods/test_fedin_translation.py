"""FedIN between networks whose features have no shape in common: what is sent, learnt and kept private."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.needs import Need, Offer
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import LocalTraining
from potluck.engine.rounds.engine import Engine
from potluck.methods.fedin import FedIN
from potluck.models.contract import StagedNet
from potluck.models.split import split
from potluck.parts import privacy
from potluck.parts.features import FeatureLoss
from potluck.parts.privacy import FeaturePrivacy
from potluck.parts.sharing import Sharing
from potluck.parts.translation import Translation
from potluck.testing.worlds import World, toy_federation

FEATURES, CLASSES = 10, 4
APART, TOGETHER = Sharing(scope="none"), Sharing(scope="architecture")
SMALL = Translation(s_in=6, s_out=4, anchors=40, ridge=0.01)
STEPS = LocalTraining("sgd", lr=0.05, batch_size=8)
MECHANISM = FeaturePrivacy(clip=1.0, epsilon=1.0, delta=1e-5)


class Image(nn.Module):
    """Ten numbers as an image of one row."""

    def forward(self, x):
        return x[:, None, None]


def wide(width=24):
    stages = {
        "stem": nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU()),
        "hidden": nn.Sequential(nn.Linear(width, width), nn.ReLU()),
    }
    return StagedNet(stages, nn.Linear(width, CLASSES, bias=False))


def convolutional():
    stages = {
        "stem": nn.Sequential(Image(), nn.Conv2d(1, 3, (1, 3), padding=(0, 1)), nn.ReLU()),
        "hidden": nn.Sequential(nn.Flatten(), nn.Linear(30, 7), nn.ReLU()),
    }
    return StagedNet(stages, nn.Linear(7, CLASSES, bias=False))


def unlike():
    """Clients with networks whose features have no shape in common."""
    federation = toy_federation(World())
    nets = ["toy1", "wide", "image", "wide"]
    sites = {id: replace(site, architecture=nets[id]) for id, site in federation.sites.items()}
    more = {"toy1": federation.architectures["toy1"], "wide": wide, "image": convolutional}
    return replace(federation, sites=sites, architectures=more)


def method(training=STEPS, **options):
    given = {"mu": 0.0, "feature_batch": 8, "translation": SMALL, "sharing": APART} | options
    return FedIN(training, **given)


def fitted(own, common, ridge=SMALL.ridge):
    """The map from own features to common ones, by the formula of ridge regression."""
    x, y = own.flatten(1).double(), common.double()
    x, centre, mean = x - x.mean(0), x.mean(0), y.mean(0)
    penalty = ridge * x.square().sum(1).mean()
    matrix = torch.linalg.inv(x.T @ x + penalty * torch.eye(x.shape[1])) @ x.T @ (y - mean)
    return lambda features: ((features.flatten(1).double() - centre) @ matrix + mean).float()


def seen(net, inputs):
    passed = split(net.eval()).passed(inputs)
    return {"s_in": passed.s_in.detach(), "s_out": passed.s_out.detach()}


# What is refused


@pytest.mark.parametrize(
    ("to", "problem"),
    [
        (
            Translation(s_in=17, s_out=4),
            r"translation\.s_in: found 17; expected at most 16, since there are 64 anchors",
        ),
        (Translation(s_in=4, s_out=17), r"translation\.s_out: found 17; expected at most 16"),
    ],
)
def test_more_common_features_than_the_server_sees_are_refused_before_anything_trains(to, problem):
    with pytest.raises(ConfigError, match=problem):
        Engine(method(translation=to), unlike()).start()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"sharing": Sharing(buffers="drop")}, r"sharing\.buffers: expected 'average' with translation, found 'drop'"),
        ({"feature_training": False}, r"feature_training: expected true with translation"),
        ({"noise": 0.8}, r"noise: expected 0 with translation, or privacy"),
    ],
)
def test_options_that_mean_nothing_beside_a_translation_are_refused(options, problem):
    with pytest.raises(ConfigError, match=problem):
        method(**options)


def test_without_it_such_clients_have_nothing_to_exchange_and_with_it_they_have():
    lonely = replace(unlike(), sites={id: site for id, site in unlike().sites.items() if id < 3})
    without = [need.problem(Offer.of(lonely)) for need in method(translation=None).needs()]
    assert any("no client has them in common with another" in (problem or "") for problem in without)
    assert not any(need.problem(Offer.of(lonely)) for need in method().needs())


def test_it_needs_public_examples_and_the_paper_does_not():
    assert Need.PUBLIC_DATA in method().needs()
    assert Need.PUBLIC_DATA not in FedIN().needs()


# What is sent


@pytest.mark.parametrize("client", [0, 1, 2])
def test_a_client_sends_what_its_map_makes_of_the_anchors_and_of_its_examples(play, client):
    run = play(method(), unlike())
    federation, common = run.engine.federation, run.states[0].common
    net = run.engine.server(0).build(federation.sites[client].architecture)
    anchors = seen(net, federation.public.inputs[common["rows"]])
    mine = seen(net, federation.sites[client].train.inputs)
    reply = run.wire.replied["local_update"][0][client]
    for place in ("s_in", "s_out"):
        down = fitted(anchors[place], common[place])
        assert_close(reply["common"][place], down(anchors[place]), rtol=1e-3, atol=1e-3)
        gaps = (reply["features"][place][:, None] - down(mine[place])[None]).abs().amax(2)
        assert (gaps.amin(1) < 1e-3).all()
        assert len(set(gaps.argmin(1).tolist())) == 8  # none twice


def test_all_clients_share_one_store_and_receive_pairs_of_one_another(play):
    run = play(method(), unlike(), rounds=2)
    assert {name: len(pairs["s_in"]) for name, pairs in run.state.features.items()} == {"6 > 4": 2 * 4 * 8}
    received = [message["features"]["s_in"] for message in run.wire.sent["local_update"][1].values()]
    assert all(torch.equal(one, received[0]) for one in received)


def test_what_all_agree_on_has_no_correlation_and_moves_with_the_clients(play):
    run = play(method(), unlike(), rounds=2)
    for state in run.states:
        for place, width in SMALL.widths.items():
            assert_close(state.common[place].T @ state.common[place] / 40, torch.eye(width), rtol=0, atol=1e-4)
    assert not torch.allclose(run.states[1].common["s_out"], run.states[2].common["s_out"])
    assert torch.equal(run.states[0].common["rows"], run.states[2].common["rows"])


def turned(turn):
    """A linear network whose features are turned by an orthogonal matrix; the same network otherwise."""
    generator = torch.Generator().manual_seed(0)
    stem, hidden = torch.randn(24, FEATURES, generator=generator), torch.randn(24, 24, generator=generator)
    net = StagedNet({"stem": nn.Linear(FEATURES, 24), "hidden": nn.Linear(24, 24)}, nn.Linear(24, CLASSES))
    with torch.no_grad():
        net.stages.stem.weight.copy_(turn @ stem)
        net.stages.hidden.weight.copy_(turn @ hidden @ turn.T)
    for bias in (net.stages.stem.bias, net.stages.hidden.bias):
        nn.init.zeros_(bias)
    return net


def test_networks_that_see_the_same_in_turned_features_say_the_same(play):
    turn = torch.linalg.qr(torch.randn(24, 24, generator=torch.Generator().manual_seed(3)))[0]
    federation = unlike()
    sites = {id: replace(federation.sites[0], id=id, architecture=name) for id, name in enumerate(("plain", "turned"))}
    nets = {"plain": partial(turned, torch.eye(24)), "turned": partial(turned, turn)}
    federation = replace(federation, sites=sites, architectures=nets, server_architecture="plain")
    run = play(method(LocalTraining("sgd", lr=0.0)), federation, rounds=2)
    own = [seen(run.model(id), federation.public.inputs)["s_out"] for id in (0, 1)]
    assert not torch.allclose(*own, atol=0.1)
    for replies in run.wire.replied["local_update"]:
        assert_close(replies[0]["common"], replies[1]["common"], rtol=1e-3, atol=1e-3)


# What is learnt


@pytest.mark.parametrize("client", [0, 1, 2])
@pytest.mark.parametrize("optimization", ["joint", "sequential"])
def test_a_step_makes_the_layers_take_the_received_s_in_to_the_received_s_out(play, client, optimization):
    """Alone, the step on features is a step down the distance in common features, of the intermediate layers."""
    step = LocalTraining("sgd", lr=0.1, steps=1)
    only = method(step, multiplier=0.0, optimization=optimization, sharing=TOGETHER)
    run = play(only, unlike(), rounds=2)
    federation, common = run.engine.federation, run.states[1].common
    message, reply = (crossed["local_update"][1][client] for crossed in (run.wire.sent, run.wire.replied))
    net = run.engine.server(0).build(federation.sites[client].architecture)
    net.load_state_dict(message["weights"])
    anchors = seen(net, federation.public.inputs[common["rows"]])
    down = fitted(anchors["s_out"], common["s_out"])
    up = fitted(common["s_in"], anchors["s_in"].flatten(1))
    pairs, cut = message["features"], split(net)
    s_in = up(pairs["s_in"]).unflatten(1, anchors["s_in"].shape[1:])
    inner = [name for name, _ in net.named_parameters() if name in cut.intermediate_names]
    loss = F.mse_loss(down(cut.intermediate(s_in)), pairs["s_out"])
    gradients = torch.autograd.grad(loss, [net.get_parameter(name) for name in inner])
    for name, gradient in zip(inner, gradients, strict=True):
        moved = reply["weights"][name] - message["weights"][name]
        if optimization == "joint":
            assert_close(moved, -0.1 * gradient, rtol=1e-2, atol=1e-5)
        assert moved.flatten() @ gradient.flatten() < 0
    if optimization == "joint":
        outer = reply["weights"].keys() - set(inner)
        assert all(torch.equal(reply["weights"][name], message["weights"][name]) for name in outer)


def test_the_loss_reads_outputs_by_the_map_it_is_given(play):
    net = unlike().architectures["wide"]()
    s_in, s_out, matrix = torch.rand(5, 24), torch.rand(5, 4), torch.rand(24, 4)
    extras = {"features": {"s_in": s_in, "s_out": s_out}}
    reading = {"down": {"matrix": matrix, "origin": torch.ones(24), "target": torch.full((4,), 2.0)}}
    expected = ((split(net).intermediate(s_in) - 1) @ matrix + 2 - s_out).square().mean()
    assert_close(FeatureLoss(8)(net, (s_in, s_out), {**extras, **reading}), expected)


# What stays private


@pytest.fixture
def silent(monkeypatch):
    """Leaves the noise out, to know what it is added to."""
    monkeypatch.setattr(privacy, "_noise", partial(torch.zeros, dtype=torch.float64))


def neighbour_of(federation, place):
    """The federation with one example of client 1 replaced."""
    site = federation.sites[1]
    inputs, targets = site.train.inputs[site.train.rows].clone(), site.train.targets[site.train.rows].clone()
    inputs[place], targets[place] = 10.0, (targets[place] + 1) % CLASSES
    return replace(federation, sites={**federation.sites, 1: replace(site, train=Examples(inputs, targets))})


@pytest.mark.parametrize("place", [0, 7])
def test_an_example_moves_its_own_common_pair_alone_and_no_map(play, silent, place):
    hard = LocalTraining("adam", lr=0.1, epochs=2, batch_size=4)
    private = method(hard, sharing=TOGETHER, privacy=MECHANISM, feature_batch=48)
    federation = unlike()
    before, after = (
        play(private, one).wire.replied["local_update"][0][1] for one in (federation, neighbour_of(federation, place))
    )
    assert not torch.equal(before["weights"]["head.weight"], after["weights"]["head.weight"])
    assert_close(before["common"], after["common"], rtol=0, atol=0)
    for name in ("s_in", "s_out"):
        assert before["features"][name].norm(dim=1).max() <= 1 + 1e-6
    gaps = torch.cat([after["features"][name] - before["features"][name] for name in ("s_in", "s_out")], 1).norm(dim=1)
    assert sorted(gaps.tolist())[:-1] == [0.0] * 47
    assert 0 < gaps.max() <= MECHANISM.sensitivity


def test_common_pairs_get_noise_of_the_mechanism(play):
    private = method(sharing=TOGETHER, privacy=MECHANISM, feature_batch=48)
    pairs = play(private, unlike()).wire.replied["local_update"][0][1]["features"]
    numbers = torch.cat([pairs["s_in"], pairs["s_out"]], 1)
    assert numbers.shape == (48, 10)
    assert numbers.std() == pytest.approx(MECHANISM.sigma, rel=0.2)


def test_a_model_that_the_client_keeps_is_refused_beside_privacy():
    with pytest.raises(ConfigError, match=r"sharing\.scope: found 'none' beside privacy"):
        method(privacy=MECHANISM)
    with pytest.raises(ConfigError, match=r"sharing\.scope: found 'none' beside privacy"):
        FedIN(privacy=MECHANISM, sharing=APART)
