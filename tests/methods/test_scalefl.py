"""ScaleFL: its loss by hand, what is averaged where, and the sizes of the networks that clients train."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.federation import Federation, Site
from potluck.core.ground.errors import ConfigError, PotluckWarning
from potluck.core.ground.rng import fold_in
from potluck.core.needs import Need, Offer
from potluck.core.nets.batchnorm import batch_norms
from potluck.core.nets.scale import FULL
from potluck.core.nets.weights import load, parameters_of
from potluck.core.requests.examples import Batch, Examples
from potluck.core.requests.fit import LocalTraining
from potluck.core.requests.inference import predict
from potluck.engine.rounds.engine import Engine
from potluck.experiment.federation.needs import check_needs
from potluck.methods.scalefl import ExitsLoss, ScaleFL
from potluck.models import get_model
from potluck.models.contract import STAGES, StagedNet, blocks, of_depth
from potluck.models.preresnet import preresnet18
from potluck.testing.worlds import assigned, quick

EXACTLY = {"rtol": 0, "atol": 0}
CLOSELY = {"rtol": 1e-4, "atol": 1e-6}
SGD = LocalTraining("sgd", lr=0.05, batch_size=8)
IMAGE = (3, 8, 8)
SMALL = partial(get_model("resnet10"), 3, IMAGE, width=4, stem="cifar")  # four blocks, an exit behind each
FOUR = (1.0, 0.75, 0.5, 0.25)


def images(*capacities, build=SMALL, shape=IMAGE, classes=3):
    """One client a capacity, each with images of its own."""
    sites = {}
    for id, capacity in enumerate(capacities):
        draws = fold_in(0, "images", id).generator()
        train = Examples(torch.rand(8 + id, *shape, generator=draws), torch.arange(8 + id) % 3)
        sites[id] = Site(id, "net", train, train, train, capacity)
    return Federation(sites, {"net": build}, "net", num_classes=classes)


def plain(scale=FULL):
    """Four convolutions without norms."""
    widths = [3, *[scale.of(width) for width in (4, 4, 8, 8)]]
    names = ("stem", "one", "two", "three")
    stages = {n: nn.Conv2d(widths[i], widths[i + 1], 3, padding=1) for i, n in enumerate(names)}
    return of_depth(StagedNet(stages, nn.Linear(widths[-1], 3)), scale.depth, 3, IMAGE)


def flat():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 3))


def shallow_only(scale=FULL):
    """Has a depth to cut and no width."""
    if scale.width != 1:
        raise ValueError("no widths")
    return of_depth(SMALL(), scale.depth, 3, IMAGE)


def part(run, level):
    """The net of a level, with the weights of the state."""
    server, method = run.engine.server(0), run.engine.method
    net = method.part(server, level)
    slices = {name: tuple(map(slice, tensor.shape)) for name, tensor in net.named_parameters()}
    return load(net, {name: run.state.weights[name][at] for name, at in slices.items()}, partial=True)


def size(net, *, exits):
    return sum(p.numel() for name, p in net.named_parameters() if exits or not name.startswith("exits."))


# The networks


# What the authors' ResNet-110 for CIFAR reaches of its parameters at levels 4 to 1, as its released code counts them.
@pytest.mark.parametrize(
    ("classes", "counts"),
    [(10, [1_982_136, 783_402, 325_631, 157_453]), (100, [2_002_656, 794_472, 331_751, 159_523])],
)
def test_parts_of_a_resnet110_are_as_large_as_in_the_authors_code(classes, counts):
    net = partial(get_model("resnet110"), classes, (3, 32, 32), shortcut="B")
    method = quick(ScaleFL, assigned(ScaleFL.variants["as in the authors' code"]))
    server = Engine(method, images(1.0, build=net, shape=(3, 32, 32), classes=classes)).server(0)
    assert len(blocks(server.build())) == 54
    assert [size(method.part(server, level), exits=True) for level in method.levels] == counts


@pytest.mark.parametrize(
    "build",
    [
        SMALL,
        partial(preresnet18, 3, IMAGE),
        partial(get_model("heterofl_cnn"), 3, IMAGE),
    ],
)
def test_levels_of_convolutional_nets_have_no_more_weights_than_heterofls_of_that_capacity(play, build):
    run = play(ScaleFL(), images(1.0, build=build), rounds=0)
    for level in FOUR:
        assert size(part(run, level), exits=False) <= size(run.engine.server(0).build(width=level), exits=True)


def test_clients_have_leading_channels_and_blocks_and_the_exits_behind_them(play):
    run = play(ScaleFL(SGD), images(*FOUR))
    places = blocks(run.engine.server(0).build())
    for id, (width, end) in enumerate([(1.0, 4), (0.85, 3), (0.7, 2), (0.375, 1)]):
        sent = run.wire.sent["local_update"][0][id]["weights"]
        assert {n.split(".")[1] for n in sent if n.startswith("exits.")} == {
            places[e - 1] for e in (1, 2, 3) if e <= end
        }
        assert ("head.weight" in sent) == (id == 0)
        whole = run.engine.server(0).build(width=width)
        assert {n: w.shape for n, w in sent.items() if n.startswith("stages.")}.items() <= {
            n: w.shape for n, w in whole.named_parameters()
        }.items()
        for name, weight in sent.items():
            assert torch.equal(weight, run.states[0].weights[name][tuple(map(slice, weight.shape))])


# The loss


def with_outputs(play):
    """A net with four exits that differ, and a batch."""
    run = play(ScaleFL(), images(1.0), rounds=0)
    net, batch = part(run, 1.0), run.engine.federation.sites[0].train.batch(torch.arange(8))
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draws), alpha=0.1)
    return net, batch


@pytest.mark.parametrize("teacher_learns", [True, False])
def test_exits_loss__is_the_papers_and_the_deepest_exit_learns_from_it_or_not(play, teacher_learns):
    net, batch = with_outputs(play)
    loss = ExitsLoss(F.cross_entropy, 0.4, 3.0, teacher_learns)(net, batch, {})
    z = list(net.exit_outputs(batch.inputs).values())
    teacher = z[3] if teacher_learns else z[3].detach()
    expected = 4 * F.cross_entropy(z[3], batch.targets)
    for j in range(3):
        target, student = (teacher / 3).softmax(1), (z[j] / 3).log_softmax(1)
        kl = (target * (target.log() - student)).sum(1).mean()
        expected = expected + (j + 1) * (F.cross_entropy(z[j], batch.targets) + 0.4 * 9 * kl)
    assert len(z) == 4
    assert_close(loss, expected / 10)
    weights = list(net.parameters())
    assert_close(torch.autograd.grad(loss, weights), torch.autograd.grad(expected / 10, weights), **CLOSELY)


def test_exits_loss__without_gamma_is_a_mean_whose_weights_grow_with_depth(play):
    net, batch = with_outputs(play)
    z = list(net.exit_outputs(batch.inputs).values())
    expected = sum((j + 1) / 10 * F.cross_entropy(each, batch.targets) for j, each in enumerate(z))
    loss = ExitsLoss(F.cross_entropy, 0.0, 3.0, True)(net, batch, {})
    assert_close(loss, expected)
    weights = list(net.parameters())
    assert_close(torch.autograd.grad(loss, weights), torch.autograd.grad(expected, weights), **CLOSELY)
    one = ExitsLoss(lambda outputs, targets: torch.tensor(1.0), 0.0, 3.0, True)(net, batch, {})
    assert one == 1.0  # the weights sum to one


def said(*logits):
    """A net that says these (classes,) at its exits, and a batch of one example of the first class."""

    class Says(StagedNet):
        def exit_outputs(self, x):
            return {str(place): torch.tensor([z]) for place, z in enumerate(logits)}

    net = Says({"stem": nn.Linear(1, 1), "body": nn.Linear(1, 1)}, nn.Linear(1, 2))
    return net, Batch(torch.zeros(1, 1), torch.tensor([0]), {})


def test_exits_loss__by_hand():
    net, batch = said([0.0, 0.0], [3 * math.log(3.0), 0.0])  # at T = 3: (1/2, 1/2) and (3/4, 1/4)
    kl = 0.75 * math.log(1.5) - 0.25 * math.log(2)
    assert kl == pytest.approx(0.1308120)
    expected = (1 * (math.log(2) + 0.4 * 9 * kl) + 2 * math.log(28 / 27)) / 3
    assert ExitsLoss(F.cross_entropy, 0.4, 3.0, True)(net, batch, {}).item() == pytest.approx(expected)


def test_exits_that_agree_teach_nothing():
    net, batch = said([0.3, -0.2], [0.3, -0.2], [0.3, -0.2])
    taught, alone = (ExitsLoss(F.cross_entropy, gamma, 3.0, True)(net, batch, {}) for gamma in (5.0, 0.0))
    assert_close(taught, alone)


@pytest.mark.parametrize("gamma", [ScaleFL().gamma, 5.0])
def test_gamma_is_that_of_the_authors_whose_divergence_is_a_mean_over_classes(play, gamma):
    """One step by a client of three classes is one on the loss with torch's KLDivLoss as the authors reduce it."""
    training = LocalTraining("sgd", lr=0.5, batch_size=64, epochs=1)
    run = play(ScaleFL(training, gamma=gamma), images(1.0), rounds=0)
    net, train = part(run, 1.0), run.engine.federation.sites[0].train
    *shallow, deepest = net.exit_outputs(train.inputs).values()
    loss = 4 * F.cross_entropy(deepest, train.targets)
    for j, z in enumerate(shallow, start=1):
        kl = nn.KLDivLoss(reduction="none")((z / 3).log_softmax(1), (deepest / 3).softmax(1)).mean()
        loss = loss + j * (F.cross_entropy(z, train.targets) + gamma * 9 * kl)
    names, weights = zip(*net.named_parameters(), strict=True)
    steps = dict(zip(names, torch.autograd.grad(loss / 10, weights), strict=True))
    run.round()
    moved = {name: run.state.weights[name] - run.states[0].weights[name] for name in names}
    assert_close(moved, {name: -0.5 * step for name, step in steps.items()}, rtol=1e-3, atol=1e-5)


def test_the_deepest_exit_teaches_after_the_warmup_only(play):
    methods = [ScaleFL(SGD, gamma=5.0, warmup=1), ScaleFL(SGD, gamma=0.0), ScaleFL(SGD, gamma=5.0)]
    late, never, always = (play(method, images(1.0)) for method in methods)
    assert_close(late.state.weights, never.state.weights, **EXACTLY)
    assert any(not torch.equal(w, never.state.weights[name]) for name, w in always.state.weights.items())
    late.round(), never.round()
    assert any(not torch.equal(w, never.state.weights[name]) for name, w in late.state.weights.items())


# The server


def test_every_coordinate_is_the_mean_over_exactly_those_that_hold_it(play):
    run = play(ScaleFL(SGD), images(*FOUR))
    before = run.state
    run.round(1, 2, 3)
    found, seen = [answer["weights"] for answer in run.wire.replied["local_update"][-1].values()], set()
    for name, old in before.weights.items():
        total, held = torch.zeros_like(old), torch.zeros_like(old)
        for weights in found:
            if name in weights:
                at = tuple(map(slice, weights[name].shape))
                total[at] += weights[name]
                held[at] += 1
        assert_close(run.state.weights[name], torch.where(held > 0, total / held.clamp(min=1), old), **CLOSELY)
        assert torch.equal(run.state.weights[name][held == 0], old[held == 0])
        seen |= set(held.flatten().tolist())
    assert seen == {0.0, 1.0, 2.0, 3.0}


def test_nothing_behind_a_clients_exit_moves(play):
    run = play(ScaleFL(SGD), images(*FOUR))
    before = run.state.weights
    run.round(2)
    places = blocks(run.engine.server(0).build())
    sent = run.wire.sent["local_update"][-1][2]["weights"]
    moved = {name for name, weight in run.state.weights.items() if not torch.equal(weight, before[name])}
    assert moved == sent.keys()
    assert not any(name.startswith((f"exits.{places[2]}.", "head.")) for name in moved)


def test_an_untrained_slice_goes_back_unchanged(play):
    run = play(ScaleFL(replace(SGD, lr=0.0)), images(*FOUR), rounds=2)
    assert_close(run.state.weights, run.states[0].weights)


def test_the_cohort_measures_the_whole_network_without_its_early_exits(play):
    run = play(ScaleFL(SGD), images(1.0, 0.25))
    full = parameters_of(run.engine.server(0).build())
    for message in run.wire.sent["measure"][0].values():
        assert message["weights"].keys() == full.keys()
    found = run.engine.global_model(run.state)
    assert not found.exits
    assert_close(parameters_of(found), {name: run.state.weights[name] for name in full}, **EXACTLY)
    replies = run.wire.replied["measure"][0].values()
    name = next(name for name in run.state.statistics if name.endswith("running_mean"))
    total = sum(reply["batches"] for reply in replies)
    expected = sum(reply["batches"] * reply["statistics"][name] for reply in replies) / total
    assert_close(found.get_buffer(name), expected)


# Prediction


def test_a_client_predicts_with_its_deepest_exit_and_its_own_statistics(play):
    run = play(ScaleFL(replace(SGD, batch_size=64)), images(*FOUR), rounds=2)
    train, model = run.engine.federation.sites[2].train, run.model(2)
    net = part(run, 0.5)
    for norm in batch_norms(net).values():
        norm.running_mean = norm.running_var = None  # its one batch is all of its examples
    with torch.no_grad():
        *_, expected = net.eval().exit_outputs(train.inputs).values()
    found, spread = predict(model, train), expected.std()
    assert float((found - expected).abs().max() / spread) < 0.2  # the variance measured is the unbiased one


def test_what_enters_a_norm_is_divided_by_the_width_in_training_and_evaluation(play):
    run = play(ScaleFL(SGD), images(1.0, 0.5), rounds=0)
    net = part(run, 0.5)
    norm = next(layer for layer in net.stages.modules() if isinstance(layer, torch.nn.BatchNorm2d))
    seen = []
    norm.register_forward_hook(lambda layer, inputs, output: seen.append(inputs[0]))
    x = torch.rand(4, *IMAGE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        stem = next(layer for layer in net.stages.modules() if isinstance(layer, torch.nn.Conv2d))(x)
        for training in (True, False):
            net.train(training)(x)
    for entered in seen:
        assert_close(entered, stem / 0.7)
    assert len(seen) == 2


def test_early_exits_are_scaled_as_well_and_what_predicts_is_not(play):
    """In a net without norms, what leaves a convolution is divided, and what leaves a classifier is not."""
    run = play(ScaleFL(SGD), images(1.0, 0.5, build=SMALL), rounds=0)
    exit, features = next(part(run, 0.5).exits.children()), torch.rand(4, 3, 8, 8)
    seen = []
    exit.body[1].register_forward_hook(lambda layer, inputs, output: seen.append(inputs[0]))
    with torch.no_grad():
        exit(features)
        assert_close(seen[0], exit.body[0](features) / 0.7)
    unnormed = part(play(ScaleFL(SGD), images(1.0, 0.5, build=plain), rounds=0), 0.5)
    with torch.no_grad():
        for found in unnormed.exits.children():
            layer, x = found.body[0], torch.rand(2, found.body[0].in_channels, 4, 4)
            assert_close(layer(x), F.conv2d(x, layer.weight, layer.bias, padding=1) / 0.7)
            x = torch.rand(2, found.head.in_features)
            assert_close(found.head(x), F.linear(x, found.head.weight, found.head.bias), **EXACTLY)


# What it asks for


def test_needs_are_stated():
    shared = {Need.ONE_ARCHITECTURE, Need.WIDTH_SLICES, Need.SPLIT_MODEL, STAGES, Need.DEPTH_PREFIXES}
    assert ScaleFL().needs() == {*shared, Need.CLASSES}
    assert ScaleFL(gamma=0.0).needs() == {*shared, Need.ONE_OUTPUT}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"widths": (1.0, 0.5)}, "widths: expected one for each of 4 levels"),
        ({"levels": (1.0, 0.5, 0.5, 0.25)}, "levels: expected each of them once"),
        ({"depths": (1.0,)}, "depths: expected one for each of 4 levels"),
        ({"depths": (0.5, 0.5, 0.5, 0.5)}, "depths: expected 1 for the largest level, 1,"),
        (
            {"levels": (0.5, 1.0), "widths": (1.0, 0.5), "depths": (1.0, 1.0)},
            "widths: expected 1 for the largest level",
        ),
        ({"depths": (1.0, 0.5, 0.0, 0.5)}, "depths.2: expected above 0 and at most 1"),
    ],
)
def test_levels_that_make_no_nets_are_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        ScaleFL(**options)


@pytest.mark.parametrize(
    ("builds", "complaint"),
    [
        (
            [flat, flat],
            "it cuts the depth of net0, .*; it cuts the width of net0, .*; net0: Sequential cannot be split into",
        ),
        (
            [shallow_only, shallow_only],
            "it cuts the width of net0, which has no slices: no widths; choose another",
        ),
        ([SMALL, plain], "it needs one architecture, but client 0 has net0 and client 1 has net1; give"),
    ],
    ids=["no stages", "no widths", "two families"],
)
def test_networks_that_cannot_be_cut_or_differ_are_refused_before_training(builds, complaint):
    federation = images(1.0, 0.5)
    sites = {id: replace(site, architecture=f"net{builds.index(builds[id])}") for id, site in federation.sites.items()}
    architectures = {f"net{number}": build for number, build in enumerate(builds)}
    offer = Offer.of(replace(federation, sites=sites, architectures=architectures, server_architecture="net0"))
    with pytest.raises(ConfigError, match=f"^ScaleFL cannot run here: .*{complaint}") as error:
        check_needs(ScaleFL().needs(), "ScaleFL", offer)
    assert "\n" not in str(error.value)


def test_who_is_weaker_than_the_smallest_level_is_named_before_training(play):
    with pytest.warns(PotluckWarning, match=r"scalefl: client 1: capacity 0\.1 lies below the smallest level, 0\.25"):
        play(ScaleFL(), images(1.0, 0.1), rounds=0)
