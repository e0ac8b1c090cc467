"""HypeMeFed: a round by hand, from what its hypernetworks read to what is averaged; who has what, and who predicts."""

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
from potluck.core.nets.weights import load
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import LocalTraining
from potluck.core.requests.inference import predict
from potluck.experiment.federation.needs import check_needs
from potluck.methods.depthfl import DepthFL
from potluck.methods.hypemefed import HypeMeFed, as_matrix, factors
from potluck.models import get_model
from potluck.models.contract import STAGES
from potluck.parts.means import Aggregate

EXACTLY = {"rtol": 0, "atol": 0}
SGD = LocalTraining("sgd", lr=0.05, batch_size=8)
IMAGE = (3, 8, 8)
SMALL = partial(get_model("resnet10"), 3, IMAGE, width=2, stem="cifar")  # a block a stage; exits behind 2, 3 and all 4
THREE = (1.0, 0.75, 0.5)
WHOLE = LocalTraining("sgd", lr=0.5, epochs=3, batch_size=1000)
QUICK = LocalTraining("sgd", lr=0.1, epochs=1, batch_size=1)


def flat():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 3))


def images(*capacities):
    """One client a capacity, each with images of its own."""
    sites = {}
    for id, capacity in enumerate(capacities):
        draws = fold_in(0, "images", id).generator()
        train = Examples(torch.rand(8 + id, *IMAGE, generator=draws), torch.arange(8 + id) % 3)
        sites[id] = Site(id, "net", train, train, train, capacity)
    return Federation(sites, {"net": SMALL}, "net", num_classes=3)


def answers(run):
    return {id: answer["weights"] for id, answer in run.wire.replied["local_update"][-1].items()}


def source_of(name):
    """What the kernels of stages 3 and 4 are generated from; None of all else."""
    if name.startswith(("stages.layer3", "stages.layer4")) and (".conv" in name):
        return name.replace("layer3", "layer2") if "layer3" in name else name.replace("layer4", "layer3")
    return None


def read(kernel, rank):
    """By hand, what a hypernetwork reads of a kernel: a row for each singular value."""
    outputs, inputs, height, width = kernel.shape
    u, s, v = torch.linalg.svd(kernel.reshape(outputs * height, inputs * width), full_matrices=False)
    left, right = [], []
    for k in range(min(rank, len(s))):
        column, row = u[:, k] * s[k] ** 0.5, v[k] * s[k] ** 0.5
        sign = 1 if column[column.abs().argmax()] > 0 else -1
        left.append(sign * column)
        right.append(sign * row)
    return torch.stack(left), torch.stack(right)


def write(net, pair, shape):
    """By hand, the kernel that a hypernetwork makes of it."""

    def perceptron(name, x):
        hidden = (x @ net[f"{name}.0.weight"].T + net[f"{name}.0.bias"]).clamp(min=0)
        return hidden @ net[f"{name}.2.weight"].T + net[f"{name}.2.bias"]

    return (perceptron("right", pair[1]).T @ perceptron("left", pair[0])).reshape(shape)


def taught(net, pairs, kernels, training):
    """By hand, a hypernetwork after some steps on all pairs together."""
    net = {name: tensor.clone().requires_grad_() for name, tensor in net.items()}
    for _ in range(training.epochs):
        gaps = [(write(net, pair, w.shape) - w).square().mean() for pair, w in zip(pairs, kernels, strict=True)]
        gradients = torch.autograd.grad(sum(gaps) / len(gaps), list(net.values()))
        net = {
            name: (tensor - training.lr * gradient).detach().requires_grad_()
            for (name, tensor), gradient in zip(net.items(), gradients, strict=True)
        }
    return {name: tensor.detach() for name, tensor in net.items()}


# A round


@pytest.mark.usefixtures("in_double_precision")
@pytest.mark.parametrize("rank", [1, 100])
def test_a_round_is_that_of_a_computation_by_hand(play, rank):
    method = HypeMeFed(SGD, server_training=WHOLE, rank=rank, hidden=5)
    run = play(method, images(*THREE, 0.5, 1.0))
    before = run.state.hypernetworks
    after = run.round()
    models = {id: dict(weights) for id, weights in answers(run).items()}
    generated = 0
    for name, old in run.states[1].weights.items():  # from the shallow layers on
        if source := source_of(name):
            having = [model for model in models.values() if name in model]
            net = taught(
                before[name], [read(m[source], rank) for m in having], [m[name] for m in having], method.server_training
            )
            assert_close(after.hypernetworks[name], net)
            for model in models.values():
                if name not in model:
                    model[name] = write(net, read(model[source], rank), old.shape)
                    generated += 1
        own = [model[name] for model in models.values() if name in model]
        assert_close(after.weights[name], sum(own) / len(own))
    assert generated == 3 * 2 + 3 * 3  # three kernels a stage: clients 2 and 3 lack stage 3, client 1 stage 4 as well


def test_what_is_not_generated_is_the_mean_of_those_who_trained_it(play):
    run = play(HypeMeFed(SGD, server_training=QUICK), images(*THREE))
    found, alone = answers(run), run.state.weights
    for name in ("stages.layer4.0.norm1.weight", "head.weight"):
        assert_close(alone[name], found[0][name], **EXACTLY)
    exits = [name for name in alone if name.startswith("exits.layer3") and name in found[1]]
    for name in exits:
        assert_close(alone[name], (found[0][name] + found[1][name]) / 2)
    assert exits
    for name, buffer in run.state.buffers.items():
        own = [
            reply["buffers"][name]
            for reply in run.wire.replied["local_update"][-1].values()
            if name in reply["buffers"]
        ]
        assert_close(buffer, sum(own) / len(own) if own[0].is_floating_point() else max(own))


def test_without_generation_it_is_depthfl_without_what_that_adds_bit_for_bit(play):
    ours = play(HypeMeFed(SGD, generate=False), images(*THREE), rounds=0)
    theirs = play(DepthFL(SGD, levels=THREE, exits="linear", alpha=0.0, consistency=0.0), images(*THREE), rounds=0)
    for cohort in [(0, 2), (1, 2), (0, 1, 2)]:
        ours.round(*cohort)
        theirs.round(*cohort)
        assert_close(ours.state.weights, theirs.state.weights, **EXACTLY)
        assert_close(ours.state.buffers, theirs.state.buffers, **EXACTLY)
        assert ours.state.hypernetworks == {}


def test_what_nobody_of_a_round_has_stays_and_so_do_its_hypernetworks(play):
    run = play(HypeMeFed(SGD, server_training=QUICK), images(*THREE), rounds=2)
    before = run.state
    run.round(1, 2)
    for found, old in ((run.state.weights, before.weights), (run.state.hypernetworks, before.hypernetworks)):
        deep = {name for name in old if name.startswith(("stages.layer4", "head"))}
        assert deep
        for name in old:
            if name in deep:
                assert_close(found[name], old[name], **EXACTLY)
    shallow = "stages.layer3.0.conv1.weight"
    assert not torch.equal(run.state.weights[shallow], answers(run)[1][shallow])  # client 2's was generated
    assert not torch.equal(
        run.state.hypernetworks[shallow]["left.0.weight"], before.hypernetworks[shallow]["left.0.weight"]
    )


def test_a_hypernetwork_learns_what_it_is_shown(play):
    """From the source of its lesson it makes the kernel that it was shown, as nearly as its rank allows."""
    method = HypeMeFed(
        SGD, server_training=LocalTraining("adam", lr=0.01, epochs=80), levels=(1.0, 0.75), rank=2, hidden=64
    )
    run = play(method, images(1.0))
    shown = answers(run)[0]
    for name, net in run.state.hypernetworks.items():
        made = write(net, read(shown[source_of(name)], 2), shown[name].shape)
        nearest = float(torch.linalg.svdvals(as_matrix(shown[name]))[2:].square().sum())
        gap = float((made - shown[name]).square().sum())
        assert gap < nearest + 0.02 * float(shown[name].square().sum())
    assert len(run.state.hypernetworks) == 3


def test_a_robust_rule_counts_what_was_generated(play):
    run = play(HypeMeFed(SGD, server_training=QUICK, combine=Aggregate("median")), images(1.0, 0.5, 0.5))
    name = "stages.layer3.0.conv1.weight"
    mine = answers(run)[0]
    net = run.state.hypernetworks[name]
    made = [write(net, read(answers(run)[id][source_of(name)], 100), mine[name].shape) for id in (1, 2)]
    assert_close(run.state.weights[name], torch.stack([mine[name], *made]).median(0).values)


# The mathematics


def test_factors__are_those_of_the_nearest_matrix_of_that_rank():
    matrix = torch.randn(7, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = torch.linalg.svdvals(matrix)
    for rank in (1, 3, 5, 100):
        found = factors(matrix, rank)
        kept = min(rank, 5)
        assert found.shape == (kept, 12)
        left, right = found.split([7, 5], -1)
        assert float((left.mT @ right - matrix).square().sum()) == pytest.approx(float(values[kept:].square().sum()))
        for half in (left, right):
            assert_close(half @ half.mT, torch.diag(values[:kept]))
        assert all(row[row.abs().argmax()] > 0 for row in left)
    assert_close(factors(matrix, 2), factors(matrix, 5)[:2], **EXACTLY)
    assert_close(factors(matrix.flip(0), 5)[:, :7].flip(1), factors(matrix, 5)[:, :7])


@pytest.mark.parametrize(
    ("shape", "expected"), [((6, 4), (6, 4)), ((6, 4, 3), (6, 12)), ((6, 4, 3, 5), (18, 20)), ((6, 1, 3, 3), (18, 3))]
)
def test_as_matrix__has_a_row_for_each_output_and_line_of_a_kernel(shape, expected):
    tensor = torch.randn(shape)
    assert as_matrix(tensor).shape == expected
    assert_close(as_matrix(tensor).flatten(), tensor.flatten(), **EXACTLY)


# What is generated from what


def test_a_block_follows_from_the_one_as_many_before_as_its_part_has():
    net = get_model("resnet18")(3, (3, 32, 32), width=2, stem="cifar")
    found = HypeMeFed().sources(net, (3, 32, 32))
    expected = {
        f"stages.layer{stage}.{number}.{part}.weight": f"stages.layer{stage - 1}.{number}.{part}.weight"
        for stage in (3, 4)
        for number in (0, 1)
        for part in ("conv1", "conv2", "shortcut.conv")
        if (number, part) != (1, "shortcut.conv")
    }
    assert found == expected
    assert list(found) == sorted(found)  # what is generated comes before what is generated from it


def test_a_part_longer_than_what_is_before_it_follows_block_by_block():
    net = get_model("mlp5")(3, (6,))
    for levels, back in [((1.0, 0.25), {2: 1, 3: 2, 4: 3}), ((1.0, 0.5), {3: 1, 4: 2}), ((1.0,), {})]:
        expected = {f"stages.hidden{n}.linear.weight": f"stages.hidden{m}.linear.weight" for n, m in back.items()}
        assert HypeMeFed(levels=levels).sources(net, (6,)) == expected


# Losses and prediction


def test_clients_minimise_the_sum_of_their_exits_losses(play):
    run = play(HypeMeFed(LocalTraining("sgd", lr=0.1, batch_size=1000, epochs=1)), images(*THREE))
    for id, few in enumerate((3, 2, 1)):
        method, server = run.engine.method, run.engine.server(0)
        sent = run.wire.sent["local_update"][-1][id]
        net = load(method.net(server, THREE[id]), {**sent["weights"], **sent["buffers"]})
        batch = run.engine.federation.sites[id].train
        outputs = list(net.train().exit_outputs(batch.inputs).values())
        assert len(outputs) == few
        loss = sum(F.cross_entropy(z, batch.targets) for z in outputs)
        names, weights = zip(*net.named_parameters(), strict=True)
        for name, w, gradient in zip(names, weights, torch.autograd.grad(loss, weights), strict=True):
            assert_close(answers(run)[id][name], (w - 0.1 * gradient).detach(), rtol=1e-4, atol=1e-6)


def test_the_last_exit_that_a_client_has_predicts_and_the_head_is_the_servers(play):
    run = play(HypeMeFed(SGD, server_training=QUICK), images(*THREE), rounds=2)
    test = run.engine.federation.sites[0].test
    net = load(run.engine.method.net(run.engine.server(0), 1.0), {**run.state.weights, **run.state.buffers}).eval()
    with torch.no_grad():
        outputs = list(net.exit_outputs(test.inputs).values())
    for id, expected in enumerate(reversed(outputs)):
        assert_close(predict(run.model(id), test), expected)
    assert_close(predict(run.engine.global_model(run.state), test), outputs[-1])


# What it asks for


def test_needs_are_stated():
    needs = {Need.ONE_ARCHITECTURE, Need.SPLIT_MODEL, STAGES, Need.DEPTH_PREFIXES, Need.ONE_OUTPUT}
    assert HypeMeFed().needs() == needs


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"levels": ()}, "levels: expected at least one share"),
        ({"levels": (1.5,)}, "levels.0: expected above 0 and at most 1"),
        ({"rank": 0}, "rank: expected"),
        ({"hidden": 0}, "hidden: expected"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(changes, expected):
    with pytest.raises(ValueError, match=expected):
        HypeMeFed(**changes)


def test_a_network_without_stages_is_refused_before_training():
    federation = replace(
        images(1.0, 0.5), architectures={"net": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 3))}
    )
    with pytest.raises(
        ConfigError, match=r"^HypeMeFed cannot run here: .*it cuts the depth of net, which has no blocks"
    ):
        check_needs(HypeMeFed().needs(), "HypeMeFed", Offer.of(federation))


def test_who_is_weaker_than_the_smallest_level_is_named_before_training(play):
    with pytest.warns(PotluckWarning, match=r"hypemefed: client 1: capacity 0\.1 lies below the smallest level, 0\.5"):
        play(HypeMeFed(), images(1.0, 0.1), rounds=0)
