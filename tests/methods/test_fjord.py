"""FjORD: networks inside one another, what is drawn, what teaches, and what every client's widths add to the mean."""

import itertools
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError, PotluckWarning
from potluck.core.ground.rng import Key, isolated
from potluck.core.needs import Need
from potluck.core.nets.scale import Scale
from potluck.core.nets.weights import load, parameters_of
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fjord import FjORD, OrderedDropout
from potluck.models import get_model
from potluck.parts.nested import Nested
from potluck.parts.submodels import leading, select

EXACTLY = {"rtol": 0, "atol": 0}
STILL = LocalTraining("sgd", lr=0.0)
RATES = (1.0, 0.5, 0.25, 0.5)
HALVES = partial(FjORD, levels=(1.0, 0.5, 0.25))
INPUTS = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
BATCH = Batch(INPUTS, torch.arange(12) % 3, {})


def nested(clouds, *widths):
    with isolated(Key(("nested",))):
        return Nested(clouds("norm2").architectures["norm2"](scale=Scale(width)) for width in widths)


def gathered(net, narrow):
    """A copy of the narrow net with the leading slices of the wide one's weights, and a new net's statistics."""
    shapes = {name: tensor.shape for name, tensor in narrow.named_parameters()}
    return load(narrow, select(parameters_of(net), leading(shapes)), partial=True)


def keyed(drawn, count):
    """A key under which torch's generator draws this number next."""

    def draws(key):
        with isolated(key):
            return int(torch.randint(count, ()))

    return next(key for key in (Key((number,)) for number in itertools.count()) if draws(key) == drawn)


def batches_seen(replies, width):
    name = f"{width}/stages.stage0.1.num_batches_tracked"
    return {id: int(reply["tracked"][name]) for id, reply in replies.items() if name in reply["tracked"]}


# Networks inside one another


@pytest.mark.parametrize("name", ["resnet14", "preresnet18", "preresnet20", "heterofl_cnn", "cnn3", "mlp3"])
@pytest.mark.parametrize("training", [True, False])
def test_a_nested_net_computes_what_its_slices_compute_alone(name, training):
    options = {"widths": (8, 16, 32)} if name == "preresnet20" else {"width": 8}
    build = partial(get_model(name), 3, (2, 8, 8), **options)
    nets = Nested([build(), build(scale=Scale(0.5)), build(scale=Scale(0.3))]).train(training)
    x = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    for place, width in enumerate((1.0, 0.5, 0.3)):
        alone = gathered(nets[0], build(scale=Scale(width))).train(training)
        assert_close(nets.at(place, x), alone(x))
        buffers = dict(alone.named_buffers())
        assert_close(dict(nets[place].named_buffers()), buffers)


def test_a_narrow_net_uses_no_weight_outside_its_slice(clouds):
    nets = nested(clouds, 1.0, 0.5)
    before, wide = nets.at(1, INPUTS), nets.at(0, INPUTS)
    with torch.no_grad():
        for name, weight in nets[0].named_parameters():
            inside = torch.zeros_like(weight, dtype=torch.bool)
            inside[tuple(map(slice, nets[1].get_parameter(name).shape))] = True
            weight[~inside] += 1.0
    assert_close(nets.at(1, INPUTS), before, **EXACTLY)
    assert not torch.allclose(nets.at(0, INPUTS), wide)


def test_a_narrow_net_has_its_own_statistics(clouds):
    nets = nested(clouds, 1.0, 0.5)
    nets.at(1, INPUTS)
    tracked = [int(net.stages.stage0[1].num_batches_tracked) for net in nets]
    assert tracked == [0, 1]
    hidden = nets[0].stages.stage0[0](INPUTS)[:, :4]
    assert_close(nets[1].stages.stage0[1].running_mean, 0.1 * hidden.mean(0))


# The loss


@pytest.mark.parametrize("drawn", [0, 1, 2])
@pytest.mark.parametrize("distil", [True, False])
def test_the_gradient_is_that_of_the_widest_net_and_of_a_pupil_whose_teacher_is_fixed(clouds, drawn, distil):
    nets, wide = nested(clouds, 1.0, 0.5, 0.25), nested(clouds, 1.0)[0]
    with isolated(keyed(drawn, 3)):
        loss = OrderedDropout(F.cross_entropy, distil)(nets, BATCH, {})
    loss.backward()
    expected = {name: torch.zeros_like(p) for name, p in wide.named_parameters()}
    teacher = wide(BATCH.inputs)
    value = torch.zeros(())
    if distil:
        value = F.cross_entropy(teacher, BATCH.targets)
        for name, g in zip(
            expected, torch.autograd.grad(value, list(wide.parameters()), retain_graph=True), strict=True
        ):
            expected[name] += g
    pupil = gathered(nets[0], nested(clouds, (1.0, 0.5, 0.25)[drawn])[0])
    logits = pupil(BATCH.inputs)
    q = teacher.detach().softmax(1)
    own = (q * (q.log() - logits.log_softmax(1))).sum(1).mean() if distil else F.cross_entropy(logits, BATCH.targets)
    for (name, p), g in zip(pupil.named_parameters(), torch.autograd.grad(own, list(pupil.parameters())), strict=True):
        expected[name][tuple(map(slice, p.shape))] += g
    assert_close(loss, value + own)
    found = {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in nets[0].named_parameters()}
    assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert not any(p.grad is not None for net in nets[1:] for p in net.parameters())


def test_the_widest_net_is_taught_by_labels_alone_whatever_is_drawn(clouds):
    nets = nested(clouds, 1.0, 0.5)
    with isolated(keyed(1, 2)):
        OrderedDropout(F.cross_entropy, distil=True)(nets, BATCH, {}).backward()
    wide = nested(clouds, 1.0)[0]
    F.cross_entropy(wide(BATCH.inputs), BATCH.targets).backward()
    outside = nets[0].get_parameter("head.weight").grad[:, 4:]  # which the pupil does not use
    assert_close(outside, wide.head.weight.grad[:, 4:])
    assert outside.any()


@pytest.mark.parametrize("distil", [True, False])
def test_a_batch_is_for_one_width_and_all_widths_within_reach_are_equally_likely(play, clouds, distil):
    training = LocalTraining("sgd", lr=0.001, steps=300, batch_size=3)
    run = play(HALVES(training, distil=distil), clouds(*["norm2"] * 3, capacities=RATES))
    replies = run.wire.replied["local_update"][0]
    seen = {width: batches_seen(replies, width) for width in (1.0, 0.5, 0.25)}
    # 300 draws at 1/3 and 1/2 have deviations of 8.2 and 8.7.
    if distil:
        assert (seen[1.0][0], seen[0.5][1], seen[0.25][2]) == (300, 300, 300)  # the teacher sees every batch
        assert abs(seen[0.5][0] - 100) < 4 * 8.7
        assert abs(seen[0.25][0] - 100) < 4 * 8.7
    else:
        assert sum(seen[width][0] for width in seen) == 300
        assert all(abs(seen[width][0] - 100) < 4 * 8.7 for width in seen)
        assert seen[0.5][1] + seen[0.25][1] == 300
    assert abs(seen[0.25][1] - 150) < 4 * 8.7
    assert seen[1.0].keys() == {0}
    assert seen[0.5].keys() == {0, 1}


def test_clients_and_rounds_draw_differently(play, clouds):
    training = LocalTraining("sgd", lr=0.001, steps=40, batch_size=3)
    run = play(HALVES(training), clouds(*["norm2"] * 4, capacities=(1.0,) * 4), rounds=2)
    counts = [batches_seen(replies, 0.25) for replies in run.wire.replied["local_update"]]
    assert len(set(counts[0].values())) > 1
    assert {id: counts[1][id] - max(counts[0].values()) for id in counts[0]} != counts[0]  # counters give their maximum


# Clients and the mean


def test_a_client_is_sent_its_slice_and_the_statistics_of_its_widths(play, clouds):
    run = play(HALVES(STILL), clouds(*["norm3"] * 4, capacities=RATES), rounds=2)
    for before, sent in zip(run.states, run.wire.sent["local_update"], strict=False):
        for id, message in sent.items():
            assert message["rate"] == RATES[id]
            for name, tensor in message["weights"].items():
                assert torch.equal(tensor, before.weights[name][tuple(map(slice, tensor.shape))])
            assert {name.split("/")[0] for name in message["statistics"]} == {
                str(width) for width in (1.0, 0.5, 0.25) if width <= RATES[id]
            }
            assert_close(message["statistics"], {n: before.statistics[n] for n in message["statistics"]}, **EXACTLY)
    assert message["weights"]["stages.stage1.0.weight"].shape == (4, 4)
    assert run.kept(0) == {"state": {}}


@pytest.mark.parametrize("distil", [True, False])
def test_every_weight_is_the_mean_by_examples_over_exactly_the_clients_that_cover_it(play, clouds, distil):
    federation = clouds(*["norm3"] * 4, capacities=RATES)
    run = play(HALVES(distil=distil), federation, rounds=0)
    for ids in [(0, 1, 2, 3), (1, 2), (2,)]:
        run.round(*ids)
        before, after = (state.weights for state in run.states[-2:])
        replies = run.wire.replied["local_update"][-1]
        for name, old in before.items():
            total, weight = torch.zeros_like(old), torch.zeros_like(old)
            for id in ids:
                value, examples = replies[id]["weights"][name], len(federation.sites[id].train)
                place = tuple(map(slice, value.shape))
                total[place] += examples * value
                weight[place] += examples
            covered = weight > 0
            assert_close(after[name][covered], (total / weight)[covered])
            assert torch.equal(after[name][~covered], old[~covered])
    assert not torch.equal(after["head.weight"], before["head.weight"])


def test_outside_a_narrow_clients_slice_no_bit_changes(play, clouds):
    before, after = (s.weights for s in play(HALVES(), clouds("norm2", capacities=(0.5,))).states)
    changed = after["stages.stage1.0.weight"] != before["stages.stage1.0.weight"]
    assert changed[:4, :4].any()
    assert not changed[4:].any()
    assert not changed[:, 4:].any()


def test_statistics_of_a_width_are_the_mean_by_examples_over_the_clients_that_reach_it(play, clouds):
    federation = clouds(*["norm2"] * 4, capacities=RATES)
    run = play(HALVES(LocalTraining(batch_size=4, epochs=3)), federation, rounds=0)
    run.round(1, 2, 3)
    before, after = (state.statistics for state in run.states)
    replies = run.wire.replied["local_update"][0]
    for name, old in after.items():
        if name.startswith("1.0/"):
            assert torch.equal(old, before[name])
        elif "running" in name:
            held = [(r["tracked"][name], r["examples"]) for r in replies.values() if name in r["tracked"]]
            assert len(held) == (2 if name.startswith("0.5/") else 3)
            assert_close(after[name], sum(n * value for value, n in held) / sum(n for _, n in held))
            assert not torch.equal(after[name], before[name])


def test_only_weights_that_are_trained_travel(play, clouds):
    run = play(HALVES(), clouds("mlp2", "mlp2", capacities=RATES))
    (sent,), (replied,) = run.wire.sent["local_update"], run.wire.replied["local_update"]
    for message in (*sent.values(), *replied.values()):
        assert not {"statistics", "tracked"} & set(message)
        assert message["weights"].keys() == run.state.weights.keys()


# Predicting


def test_a_client_predicts_at_its_width_with_that_widths_statistics(play, clouds):
    run = play(HALVES(), clouds(*["norm2"] * 4, capacities=RATES), rounds=2)
    for id, rate in enumerate(RATES):
        for name, tensor in run.model(id).state_dict().items():
            expected = run.state.weights.get(name, run.state.statistics.get(f"{rate}/{name}"))
            assert torch.equal(tensor, expected[tuple(map(slice, tensor.shape))])


@pytest.mark.parametrize("levels", [(1.0, 0.5), (0.25, 0.5)])
def test_the_global_model_is_that_of_the_largest_width(play, clouds, levels):
    run = play(FjORD(levels=levels), clouds("norm2", "norm2", capacities=(1.0, 0.5)))
    for name, tensor in run.engine.global_model(run.state).state_dict().items():
        expected = run.state.weights.get(name, run.state.statistics.get(f"{max(levels)}/{name}"))
        assert torch.equal(tensor, expected[tuple(map(slice, tensor.shape))])
    assert run.engine.global_model(run.state).head.in_features == 8 * max(levels)


# What it asks for


def test_it_warns_in_its_own_name_of_clients_below_the_smallest_width(play, clouds):
    with pytest.warns(PotluckWarning, match=r"fjord: client 0: capacity 0\.1 lies below the smallest level, 0\.25"):
        play(HALVES(), clouds("norm2", capacities=(0.1,)), rounds=0)


def test_distillation_needs_classes():
    assert Need.CLASSES in FjORD().needs()
    assert Need.CLASSES not in FjORD(distil=False).needs()


@pytest.mark.parametrize("levels", [(), (0.0, 1.0), (1.5,)])
def test_widths_are_shares_of_the_net(levels):
    with pytest.raises(ConfigError, match="levels"):
        FjORD(levels=levels)


def test_equal_widths_are_one():
    assert FjORD(levels=(0.5, 1.0, 0.5, 0.25)).within(0.5) == [0.5, 0.25]
