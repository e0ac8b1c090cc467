"""SplitMix: bases that share nothing, their turns, their means, and how they predict together."""

import itertools
import math
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError, PotluckWarning
from potluck.core.needs import Need
from potluck.core.nets.weights import load, parameters_of, weights_of
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import LocalTraining
from potluck.engine.rounds.engine import Engine
from potluck.methods.splitmix import BaseLoss, Mix, SplitMix
from potluck.testing.worlds import World, toy_federation

EXACTLY = {"rtol": 0, "atol": 0}
STILL = LocalTraining("sgd", lr=0.0)
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
QUARTERS = partial(SplitMix, atom=0.25)  # four bases, of 2 of 8 channels
SQUARE = "stages.stage1.0.weight"  # of norm2: 8 units that read 8 units


def bases_in(weights):
    return sorted({int(name.split(".")[0]) for name in weights})


def base_of(weights, number):
    return {name.split(".", 1)[1]: t for name, t in weights.items() if name.startswith(f"{number}.")}


# How many bases there are, and who trains which


@pytest.mark.parametrize("atom", [1e-320, 1e-30, 1 / 9])
def test_a_base_is_at_least_one_channel_of_the_widest_layer(play, clouds, atom):
    with pytest.raises(
        ConfigError, match=r"^method\.atom: found .*, narrower than one of 8 channels.*at least 0\.125$"
    ):
        play(SplitMix(atom=atom), clouds("norm2"), rounds=0)
    play(SplitMix(atom=0.125), clouds("norm2"), rounds=0)


@pytest.mark.parametrize(
    ("atom", "capacity", "budget", "bases"),
    [
        (0.125, 1.0, 8, 8),
        (0.125, 0.25, 2, 8),
        (0.125, 0.2, 1, 8),
        (0.125, 0.05, 1, 8),
        (0.165, 1 / 3, 2, 6),  # these three are FeDepth's run of SplitMix
        (0.165, 0.5, 3, 6),
        (0.165, 1.0, 6, 6),
        (0.1, 0.3, 3, 10),  # 0.3 / 0.1 is 2.9999999999999996
        (0.3, 1.0, 3, 3),
        (0.5, 4.0, 2, 2),
        (1.0, 0.5, 1, 1),
    ],
)
def test_a_capacity_is_a_number_of_bases(atom, capacity, budget, bases):
    assert SplitMix(atom=atom).budget(capacity) == budget
    assert SplitMix(atom=atom).bases == bases


def test_every_base_is_drawn_once_before_any_is_drawn_again(play, clouds):
    run = play(QUARTERS(STILL), clouds(*["mlp2"] * 4, capacities=(0.25,) * 4), rounds=0)
    for cohort in itertools.islice(itertools.cycle([(0, 1, 2), (3,), (1, 2), (0, 1, 2, 3)]), 16):
        run.round(*cohort)
    drawn = [bases_in(m["weights"]) for sent in run.wire.sent["local_update"] for m in sent.values()]
    assert {len(bases) for bases in drawn} == {1}
    order = [base for (base,) in drawn]
    turns = [tuple(order[start : start + 4]) for start in range(0, len(order), 4)]
    assert all(sorted(turn) == [0, 1, 2, 3] for turn in turns)
    assert len(set(turns)) > 1


def test_a_client_trains_as_many_bases_as_it_can_no_two_alike_and_any_of_them(play, clouds):
    federation = clouds(*["mlp2"] * 4, capacities=(1.0, 0.75, 0.5, 0.3))
    run, method, waiting = play(QUARTERS(STILL), federation), QUARTERS(), []
    times = {id: Counter() for id in range(4)}
    for number in range(1, 61):
        drawn, waiting = method.drawn(waiting, range(4), run.engine.server(number))
        for id, bases in drawn.items():
            assert len(bases) == len(set(bases)) == (4, 3, 2, 1)[id]
            times[id].update(bases)
    for id, expected in ((1, 45), (2, 30), (3, 15)):
        # 60 draws at 3/4, 1/2 and 1/4 have deviations of 3.4, 3.9 and 3.4.
        assert all(abs(times[id][base] - expected) < 4 * 3.9 for base in range(4))
    sent = run.wire.sent["local_update"][0]
    assert [len(bases_in(message["weights"])) for message in sent.values()] == [4, 3, 2, 1]


def test_what_is_sent_are_the_bases_as_they_are(play, clouds):
    run = play(QUARTERS(), clouds(*["norm2"] * 3, capacities=(1.0, 0.5, 0.25)), rounds=2)
    for before, sent in zip(run.states, run.wire.sent["local_update"], strict=False):
        for message in sent.values():
            assert_close(message["weights"], {n: before.weights[n] for n in message["weights"]}, **EXACTLY)
    assert run.kept(0) == {"state": {}}


# The bases


def test_bases_begin_as_blocks_of_the_full_net(play, clouds):
    run = play(QUARTERS(), clouds("norm2"), rounds=0)
    full = parameters_of(run.engine.server(0).build())
    assert bases_in(run.state.weights) == [0, 1, 2, 3]
    for number in range(4):
        own = slice(2 * number, 2 * number + 2)
        base = base_of(run.state.weights, number)
        assert base.keys() == full.keys()
        assert_close(base["stages.stage0.0.weight"], full["stages.stage0.0.weight"][own], **EXACTLY)
        assert_close(base["stages.stage0.0.bias"], full["stages.stage0.0.bias"][own], **EXACTLY)
        assert_close(base[SQUARE], full[SQUARE][own, own], **EXACTLY)
        assert_close(base["head.weight"], full["head.weight"][:, own], **EXACTLY)
        assert_close(base["head.bias"], full["head.bias"], **EXACTLY)


def test_bases_that_do_not_fit_side_by_side_go_around_and_still_differ(play, clouds):
    run = play(SplitMix(atom=0.3), clouds("norm2"), rounds=0)  # three bases, of 3 of 8 channels
    full = parameters_of(run.engine.server(0).build())[SQUARE]
    third = base_of(run.state.weights, 2)[SQUARE]
    assert_close(third, full[[6, 7, 0]][:, [6, 7, 0]], **EXACTLY)
    pairs = itertools.combinations([base_of(run.state.weights, number)[SQUARE] for number in range(3)], 2)
    assert not any(torch.equal(one, other) for one, other in pairs)


def test_no_two_bases_share_memory(play, clouds):
    run = play(QUARTERS(), clouds("norm2"), rounds=1)
    pointers = [t.data_ptr() for model in (run.engine.global_model(run.state),) for t in model.state_dict().values()]
    assert len(set(pointers)) == len(pointers)


def test_what_is_frozen_is_cut_into_blocks_too():
    federation = toy_federation(World(clients=2, architectures=1, capacity=0.5, batchnorm=True, frozen=True))
    engine = Engine(QUARTERS(STILL), federation)
    state, full = engine.start(), weights_of(engine.server(0).build())
    state, _ = engine.round(1, state, [0, 1])
    for net, count in ((engine.inference_model(state, 0), 2), (engine.global_model(state), 4)):
        assert len(net) == count
        for number, base in net.items():
            own = slice(4 * int(number), 4 * int(number) + 4)
            for name in ("stages.stem.0.weight", "stages.stem.1.running_mean", "stages.hidden1.0.bias"):
                assert_close(base.state_dict()[name], full[name][own], **EXACTLY)


# Training


@pytest.mark.parametrize("architecture", ["norm2", "mlp2"])
@pytest.mark.parametrize("scaler", [True, False])
def test_every_base_steps_by_its_own_loss(play, clouds, architecture, scaler):
    federation = clouds(architecture, capacities=(0.5,))
    run = play(QUARTERS(FULL, scaler=scaler), federation)
    (sent,), (reply,) = run.wire.sent["local_update"][0].values(), run.wire.replied["local_update"][0].values()
    train = federation.sites[0].train
    assert len(bases_in(sent["weights"])) == 2
    for number in bases_in(sent["weights"]):
        net = load(run.engine.server(0).build(width=0.25), base_of(sent["weights"], number), partial=True)
        h = train.inputs
        for layer in itertools.chain(*net.stages):
            h = layer(h)
            if isinstance(layer, nn.Linear) and scaler and architecture == "mlp2":  # norms undo it
                h = h / 0.25
        gradients = torch.autograd.grad(F.cross_entropy(net.head(h), train.targets), list(net.parameters()))
        expected = {name: p.detach() - 0.1 * g for (name, p), g in zip(net.named_parameters(), gradients, strict=True)}
        assert_close(base_of(reply["weights"], number), expected)


def test_the_report_is_the_loss_of_a_base_and_not_of_all_together(play, clouds):
    run = play(QUARTERS(FULL), clouds("norm2"))
    assert 0.5 < run.reports[0].loss_local < 2.5  # log 3 is 1.1; the losses of four bases add up to four times as much


def test_the_mask_drops_the_classes_that_a_batch_lacks():
    inputs, targets = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 2, 2, 0])
    net = Mix({"0": nn.Linear(6, 3), "7": nn.Linear(6, 3)})
    logits = net["7"](inputs).detach().requires_grad_()
    expected = F.cross_entropy(logits * torch.tensor([1.0, 0.0, 1.0]), targets)
    loss = BaseLoss(F.cross_entropy, "7", mask=True)(net, Batch(inputs, targets, {}), {})
    loss.backward()
    assert_close(loss, expected)
    assert not net["7"].weight.grad[1].any()
    assert net["7"].weight.grad[[0, 2]].all()
    assert net["0"].weight.grad is None


@pytest.mark.parametrize("mask", [True, False])
def test_the_mask_acts_in_training(play, clouds, mask):
    run = play(QUARTERS(FULL, mask=mask), clouds("mlp2", labels=((0, 1),)))
    (sent,), (reply,) = run.wire.sent["local_update"][0].values(), run.wire.replied["local_update"][0].values()
    for number in range(4):
        before, after = (base_of(m["weights"], number)["head.bias"] for m in (sent, reply))
        assert torch.equal(before[2], after[2]) == mask
        assert not torch.equal(before[:2], after[:2])


# Averaging


def test_a_base_is_the_mean_by_examples_over_exactly_the_clients_that_trained_it(play, clouds):
    federation = clouds(*["norm2"] * 4, capacities=(1.0, 0.5, 0.25, 0.5))
    run = play(QUARTERS(), federation, rounds=0)
    kept = 0
    for ids in [(0, 1, 2, 3), (1, 2), (2,), (1, 3), (2, 3)]:
        run.round(*ids)
        before, after = (state.weights for state in run.states[-2:])
        replies = run.wire.replied["local_update"][-1]
        for name, old in before.items():
            owners = [id for id in ids if name in replies[id]["weights"]]
            held = [(replies[id]["weights"][name], len(federation.sites[id].train)) for id in owners]
            if not held:
                assert torch.equal(after[name], old)
                kept += 1
                continue
            assert_close(after[name], sum(n * value for value, n in held) / sum(n for _, n in held))
    assert kept


def test_statistics_are_tracked_in_training_and_averaged_like_weights(play, clouds):
    federation = clouds(*["norm2"] * 3, sizes=(8, 16, 12), capacities=(0.75, 0.5, 0.25))
    run = play(QUARTERS(LocalTraining(batch_size=64)), federation, rounds=0)  # one step
    run.round(0, 1)
    (before, after), trained = (
        run.states,
        {i: bases_in(m["weights"]) for i, m in run.wire.sent["local_update"][0].items()},
    )
    counts = Counter(itertools.chain(*trained.values()))
    assert set(counts.values()) == {1, 2}  # some base is trained by both
    for number in range(4):
        name, own = f"{number}.stages.stage0.1.running_mean", [id for id in trained if number in trained[id]]
        if not own:
            assert torch.equal(after.statistics[name], before.statistics[name])
            continue
        inputs = torch.cat([federation.sites[id].train.inputs for id in own])
        base = base_of(before.weights, number)
        hidden = inputs @ base["stages.stage0.0.weight"].T + base["stages.stage0.0.bias"]
        assert_close(after.statistics[name], 0.1 * hidden.mean(0), rtol=1e-4, atol=1e-5)


def test_a_round_is_one_exchange_of_weights_and_of_the_statistics_there_are(play, clouds):
    for architecture, statistics in (("mlp2", 0), ("norm2", 4 * 2 * 3)):
        run = play(QUARTERS(), clouds(architecture))
        assert run.wire.sent.keys() == {"local_update"}
        (sent,), (reply,) = run.wire.sent["local_update"][0].values(), run.wire.replied["local_update"][0].values()
        assert (
            len(run.state.statistics) == len(sent.get("statistics", {})) == len(reply.get("tracked", {})) == statistics
        )


# Predicting


def test_a_mix_averages_logits_and_not_probabilities():
    net = Mix({"0": nn.Linear(2, 2, bias=False), "1": nn.Linear(2, 2, bias=False)})
    with torch.no_grad():
        net["0"].weight.copy_(torch.tensor([[8.0, 0.0], [0.0, 0.0]]))
        net["1"].weight.copy_(torch.tensor([[0.0, 0.0], [2.0, 0.0]]))
    x = torch.tensor([[1.0, 0.0]])
    assert_close(net(x), torch.tensor([[4.0, 1.0]]))
    likely = net(x).softmax(1)[0, 0].item()
    assert likely == pytest.approx(1 / (1 + math.exp(-3)))


def test_a_client_predicts_with_as_many_bases_as_it_can_train_on_statistics_of_its_own(play, clouds):
    federation = clouds(*["norm2"] * 3, capacities=(1.0, 0.5, 0.25))
    run = play(QUARTERS(LocalTraining(batch_size=64)), federation, rounds=2)
    for id, count in ((0, 4), (1, 2)):
        net, inputs = run.model(id), federation.sites[id].train.inputs
        assert list(net) == [str(number) for number in range(count)]
        assert_close(parameters_of(net), {n: run.state.weights[n] for n in parameters_of(net)}, **EXACTLY)
        for base in net.values():
            assert_close(base.stages.stage0[1].running_mean, base.stages.stage0[0](inputs).mean(0))
        net.eval()
        assert_close(net(inputs), sum(base(inputs) for base in net.values()) / count)
    assert_close(parameters_of(run.model(2)), base_of(run.state.weights, 0), **EXACTLY)


def test_the_global_model_mixes_all_bases(play, clouds):
    run = play(QUARTERS(), clouds("norm2", "norm2"), rounds=1)
    net = run.engine.global_model(run.state)
    expected = {**run.state.weights, **run.state.statistics}
    assert_close({name: net.state_dict()[name] for name in expected}, expected, **EXACTLY)
    assert len(net) == 4


# What it asks for


def test_it_warns_of_clients_that_cannot_train_a_base(play, clouds):
    with pytest.warns(PotluckWarning, match=r"splitmix: client 0: capacity 0\.2 lies below the width of a base net"):
        play(QUARTERS(), clouds("mlp2", capacities=(0.2,)), rounds=0)


@pytest.mark.parametrize("atom", [0.0, -0.5, 1.5])
def test_a_base_is_a_part_of_the_net(atom):
    with pytest.raises(ConfigError, match="atom: expected"):
        SplitMix(atom=atom)


def test_what_it_needs_depends_on_its_options():
    plain = {Need.ONE_ARCHITECTURE, Need.WIDTH_SLICES}
    assert SplitMix(scaler=False).needs() == plain
    assert SplitMix().needs() == plain  # the classifier of a net that cannot be split is found by tracing
    assert SplitMix(scaler=False, mask=True).needs() == plain | {Need.CLASSES}
