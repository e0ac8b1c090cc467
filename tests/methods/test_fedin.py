from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.federation import Federation, Site
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import Key, isolated
from potluck.core.nets.weights import load, parameters_of
from potluck.core.requests.examples import Batch, Examples
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedavg import FedAvg
from potluck.methods.fedin import FedIN
from potluck.models import get_model
from potluck.models.contract import StagedNet
from potluck.models.split import split
from potluck.parts.features import FeatureLoss, ObservingLoss
from potluck.parts.projection import Reconcile, without_conflict
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
STILL = LocalTraining("sgd", lr=0.0, batch_size=4)
FULL = LocalTraining("sgd", lr=0.1, epochs=3, batch_size=64)  # three full steps
OUTER = ("stages.stem.", "stages.stage0.", "head.")
UNIFORM = Sharing(weighting="uniform")


def rows_in(rows, table):
    """For every row its place in the table, found by value."""
    gaps = (rows[:, None] - table[None]).abs().amax(2)
    assert (gaps.amin(1) < 1e-5).all()
    return gaps.argmin(1).tolist()


def uniform(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


# Limits


def test_without_features_and_pull_it_is_fedavg_bit_for_bit(play, clouds):
    federation = clouds("norm2", "norm3", "norm2", "norm3")
    fedin, fedavg = FedIN(mu=0.0, feature_training=False), FedAvg(sharing=UNIFORM)
    ours, theirs = play(fedin, federation, rounds=3), play(fedavg, federation, rounds=3)
    assert_close([s.weights for s in ours.states], [s.weights for s in theirs.states], **EXACTLY)
    assert [r.traffic for r in ours.reports] == [r.traffic for r in theirs.reports]
    assert [r.losses for r in ours.reports] == [r.losses for r in theirs.reports]


@pytest.mark.parametrize("optimization", ["joint", "sequential"])
def test_the_first_round_knows_no_features(play, clouds, optimization):
    federation = clouds("norm2", "norm3", "norm3")
    full = play(FedIN(optimization=optimization), federation, rounds=2)
    without = play(FedIN(feature_training=False), federation, rounds=2)
    assert_close(full.states[1].weights, without.states[1].weights, **EXACTLY)
    inner = "stages.stage1.0.weight"
    assert not torch.equal(full.state.weights["all"][inner], without.state.weights["all"][inner])


def test_without_features_it_is_local_training_with_a_pull(play, clouds):
    federation = clouds("mlp2", "mlp3")
    run = play(FedIN(FULL, mu=0.5, feature_training=False), federation, rounds=2)
    for id in (0, 1):
        sent = run.wire.sent["local_update"][1][id]["weights"]
        net = local_steps(run, federation, id, lambda local, feature: local, mu=0.5)
        assert_close(run.wire.replied["local_update"][1][id]["weights"], parameters_of(net))
        assert not torch.allclose(parameters_of(net)["head.weight"], sent["head.weight"])


def test_the_pull_is_nothing_at_the_first_step(play, clouds):
    one_step = replace(FULL, epochs=1)
    weak, strong = (play(FedIN(one_step, mu=mu), clouds("norm2", "norm3")) for mu in (0.0, 100.0))
    assert_close(weak.state.weights, strong.state.weights, **EXACTLY)


def test_a_strong_pull_keeps_clients_near_what_was_sent(play, clouds):
    runs = [play(FedIN(FULL, mu=mu, feature_training=False), clouds("mlp2")) for mu in (0.0, 1.0, 5.0)]
    ways = [
        (run.state.weights["all"]["head.weight"] - run.states[0].weights["all"]["head.weight"]).norm() for run in runs
    ]
    assert ways[0] > ways[1] > ways[2] > 0


# Local losses


def test_the_local_loss_is_the_tasks_loss_of_the_whole_network_and_the_pull(play, clouds):
    federation = clouds("norm2")
    net = play(FedIN(), federation).model(0)
    anchor = {name: uniform(*p.shape) for name, p in net.named_parameters()}
    batch = federation.sites[0].train.batch(torch.arange(12))
    loss, observed = ObservingLoss(F.cross_entropy, mu=0.2)(net, batch, {"anchor": anchor})
    found = dict(zip(anchor, torch.autograd.grad(loss, list(net.parameters())), strict=True))
    task = F.cross_entropy(net(batch[0]), batch[1])
    gradient = dict(zip(anchor, torch.autograd.grad(task, list(net.parameters())), strict=True))
    distance = sum((p - anchor[name]).square().sum() for name, p in net.named_parameters())
    assert_close(loss, task + 0.2 / 2 * distance)
    assert_close(found, {n: gradient[n] + 0.2 * (p - anchor[n]) for n, p in net.named_parameters()})
    assert_close(net.head(observed["s_out"]), net(batch[0]))


def test_features_of_the_same_layers_in_the_same_batch_have_no_loss(play, clouds):
    net = play(FedIN(), clouds("norm3")).model(0).train()
    parts = split(net)
    s_in = parts.extractor(uniform(16, 6)).detach()
    features = {"s_in": s_in, "s_out": parts.intermediate(s_in).detach()}
    assert FeatureLoss(100)(net, (s_in, s_in), {"features": features}).item() == 0


def test_the_feature_loss_is_the_mean_over_batch_and_features(play, clouds):
    net = play(FedIN(), clouds("mlp2")).model(0)
    s_in, s_out = uniform(5, 8), uniform(5, 8, seed=1)
    predicted = F.relu(net.stages.hidden1.linear(s_in))
    expected = (predicted - s_out).square().sum() / (5 * 8)
    assert_close(FeatureLoss(100)(net, (s_in, s_out), {"features": {"s_in": s_in, "s_out": s_out}}), expected)


def test_the_feature_loss_has_no_gradient_outside_the_intermediate_layers(play, clouds):
    net = play(FedIN(), clouds("norm3")).model(0).train()
    features = {"s_in": uniform(5, 8), "s_out": uniform(5, 8, seed=1)}
    loss = FeatureLoss(100)(net, (features["s_in"], features["s_out"]), {"features": features})
    gradients = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
    without = {name for (name, _), g in zip(net.named_parameters(), gradients, strict=True) if g is None}
    assert without == {name for name, _ in net.named_parameters() if name.startswith(OUTER)}
    assert without == {name for name, _ in net.named_parameters()} - split(net).intermediate_names


@pytest.mark.parametrize("optimization", ["joint", "sequential"])
def test_the_pass_over_received_features_leaves_running_statistics_alone(play, clouds, optimization):
    federation = clouds("norm2", "norm3")
    full = play(FedIN(STILL, optimization=optimization), federation, rounds=2)
    without = play(FedIN(STILL, feature_training=False), federation, rounds=2)
    assert "features" in full.reports[1].traffic.down
    assert_close(full.state.weights, without.state.weights, **EXACTLY)


# The rule


def vectors(*values):
    return [{"w": torch.tensor(value)} for value in values]


@pytest.mark.parametrize(
    ("feature", "exact", "simplified"),
    # With G_local = (1, 0), a = 1 and b is the first component of G_IN.
    # Exact: G_IN - (b / a) G_local where b < 0. Simplified: G_IN + (1 / 2) G_local.
    [((-3.0, 1.0), (0.0, 1.0), (-2.5, 1.0)), ((2.0, 1.0), (2.0, 1.0), (2.5, 1.0))],
)
def test_both_rules_on_a_small_conflict(feature, exact, simplified):
    local, g_in, exact, simplified = vectors((1.0, 0.0), feature, exact, simplified)
    assert_close(without_conflict(g_in, local, "tensor"), exact, **EXACTLY)
    for rule, expected in (("exact", exact), ("simplified", simplified)):
        assert_close(Reconcile(frozenset({"w"}), rule)([local, g_in], {})[0], expected, **EXACTLY)


def test_the_simplified_rule_may_still_oppose_the_local_gradient():
    local, g_in = vectors((1.0, 0.0), (-3.0, 1.0))
    z = Reconcile(frozenset({"w"}))([local, g_in], {})[0]["w"]
    assert (z * local["w"]).sum() == -2.5  # b + a / 2
    z = Reconcile(frozenset({"w"}), multiplier=6.0)([local, g_in], {})[0]["w"]
    assert_close(z, torch.tensor((0.0, 1.0)))  # lambda = -2 b / a is the one that makes the rules equal


def blocks(weights, granularity):
    """The vectors that the exact rule projects one by one."""
    if granularity == "whole":
        return [torch.cat([w.flatten() for w in weights.values()])]
    if granularity == "tensor":
        return [w.flatten() for w in weights.values()]
    return [
        *weights["conv"].flatten(0, 1).flatten(1),
        *[weights[name].flatten() for name in ("matrix", "bias")],
    ]


def random_gradients(seed):
    draws = torch.Generator().manual_seed(seed)
    shapes = {"conv": (3, 2, 3, 3), "matrix": (4, 5), "bias": (4,)}
    return [{n: torch.randn(s, generator=draws) for n, s in shapes.items()} for _ in range(2)]


every_granularity = pytest.mark.parametrize("granularity", ["tensor", "whole", "kernel"])


@every_granularity
@pytest.mark.parametrize("seed", range(8))
def test_the_exact_rule_is_the_nearest_gradient_that_does_not_oppose_the_local_one(granularity, seed):
    local, feature = random_gradients(seed)
    z = without_conflict(feature, local, granularity)
    for g_l, g_in, z_block in zip(*(blocks(w, granularity) for w in (local, feature, z)), strict=True):
        assert z_block @ g_l >= -1e-5
        assert z_block.norm() <= g_in.norm() + 1e-6
        if g_l @ g_in >= 0:
            assert torch.equal(z_block, g_in)
        else:
            assert abs(z_block @ g_l) < 1e-5
            gap = z_block - g_in
            assert_close((gap @ g_l).abs(), gap.norm() * g_l.norm(), rtol=1e-4, atol=1e-6)  # parallel
        others = torch.randn(50, len(g_l), generator=torch.Generator().manual_seed(seed))
        feasible = others[others @ g_l >= 0]
        assert ((feasible - g_in).norm(dim=1) >= (z_block - g_in).norm() - 1e-5).all()


@every_granularity
def test_the_exact_rule_is_idempotent_and_ignores_the_length_of_the_local_gradient(granularity):
    local, feature = random_gradients(0)
    z = without_conflict(feature, local, granularity)
    assert_close(without_conflict(z, local, granularity), z, rtol=1e-4, atol=1e-5)
    assert_close(without_conflict(feature, {n: 7 * g for n, g in local.items()}, granularity), z)


@every_granularity
def test_where_the_local_gradient_vanishes_the_exact_rule_keeps_the_feature_gradient(granularity):
    local, feature = random_gradients(0)
    local = {name: torch.zeros_like(g) for name, g in local.items()}
    assert_close(without_conflict(feature, local, granularity), feature, **EXACTLY)


def test_the_simplified_rule_is_the_gradient_of_one_loss(play, clouds):
    federation = clouds("norm3", "norm3")
    run = play(FedIN(), federation)
    net, batch = run.model(0).train(), federation.sites[0].train.batch(torch.arange(12))
    extras = {"anchor": {n: p.detach() - 0.1 for n, p in net.named_parameters()}}
    extras["features"] = {"s_in": uniform(5, 8), "s_out": uniform(5, 8, seed=1)}
    losses = [ObservingLoss(F.cross_entropy, 0.1)(net, batch, extras)[0], FeatureLoss(100)(net, batch, extras)]
    names, parameters = zip(*net.named_parameters(), strict=True)
    gradients = []
    for loss in losses:
        found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
        gradients.append({n: g for n, g in zip(names, found, strict=True) if g is not None})
    together = torch.autograd.grad(losses[1] + losses[0] / 2, parameters)
    z = Reconcile(split(net).intermediate_names)(gradients, extras)[0]
    assert_close(z, dict(zip(names, together, strict=True)))


def test_where_one_loss_does_not_depend_on_a_weight_its_gradient_is_zero():
    local = {"both": torch.tensor([2.0]), "local": torch.tensor([4.0]), "outer": torch.tensor([6.0])}
    feature = {"both": torch.tensor([1.0]), "feature": torch.tensor([3.0])}
    inner = frozenset({"both", "local", "feature"})
    for rule, expected in (("simplified", (2.0, 2.0, 3.0, 3.0)), ("exact", (1.0, 0.0, 3.0, 6.0))):
        z = Reconcile(inner, rule)([local, feature], {})[0]
        assert tuple(z[name].item() for name in ("both", "local", "feature", "outer")) == expected


class WithUnused(nn.Module):
    """A stage with a weight that nothing depends on."""

    def __init__(self):
        super().__init__()
        self.linear, self.unused = nn.Linear(8, 8), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return F.relu(self.linear(x))


def with_unused():
    return StagedNet({"stem": nn.Linear(6, 8), "inner": WithUnused()}, nn.Linear(8, 3))


@pytest.mark.parametrize("mu", [0.0, 0.1])
@pytest.mark.parametrize(
    "options",
    [
        {"rule": "simplified"},
        {"rule": "exact"},
        {"rule": "exact", "granularity": "whole"},
        {"optimization": "sequential"},
    ],
)
def test_an_intermediate_weight_that_nothing_depends_on_stays_where_it_is(play, clouds, mu, options):
    federation = replace(clouds("mlp2", "mlp2"), architectures={"mlp2": with_unused})
    run = play(FedIN(mu=mu, **options), federation, rounds=3)
    assert not run.reports[-1].failures
    before, after = (run.states[round].weights["all"] for round in (1, 3))
    assert_close(after["stages.inner.unused"], torch.ones(3), **EXACTLY)
    assert not torch.equal(after["stages.inner.linear.weight"], before["stages.inner.linear.weight"])


# Local training as a whole, redone by hand with three full steps of plain SGD


def local_steps(run, federation, id, rule, mu, steps=3, net=None):
    """Client `id`'s net after the steps of the last round, where `rule` makes Z of two gradients."""
    sent, data = run.wire.sent["local_update"][-1][id], federation.sites[id].train
    net = load(run.engine.server(0).build(federation.sites[id].architecture), sent["weights"])
    for _ in range(steps):
        pull = sum((p - sent["weights"][name]).square().sum() for name, p in net.named_parameters())
        local = F.cross_entropy(net(data.inputs), data.targets) + mu / 2 * pull
        step(
            net,
            gradients(net, local),
            None if sent.get("features") is None else feature_gradients(net, sent),
            rule,
        )
    return net


def step(net, local, feature, rule):
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter -= 0.1 * rule(local.get(name), None if feature is None else feature.get(name))


def gradients(net, loss):
    found = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
    return {n: g for (n, _), g in zip(net.named_parameters(), found, strict=True) if g is not None}


def feature_gradients(net, sent):
    h = sent["features"]["s_in"]
    for stage in list(net.stages)[1:]:
        h = stage(h)
    return gradients(net, (h - sent["features"]["s_out"]).square().mean())


def simplified(multiplier, outside, local, feature):
    if feature is None:
        return outside * local
    return feature + multiplier / 2 * local


def exact(local, feature):
    if feature is None:
        return local
    a, b = (local * local).sum(), (local * feature).sum()
    return feature if b >= 0 else feature - b / a * local


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, partial(simplified, 1.0, 0.5)),
        ({"multiplier": 3.0}, partial(simplified, 3.0, 1.5)),
        ({"outside": "unit"}, partial(simplified, 1.0, 1.0)),
        ({"rule": "exact"}, exact),
        ({"mu": 0.0}, partial(simplified, 1.0, 0.5)),
    ],
)
def test_joint_training_steps_along_z_with_one_set_of_features_for_the_round(play, clouds, options, rule):
    federation = clouds("mlp2", "mlp3")
    method = FedIN(FULL, **options)
    run = play(method, federation, rounds=2)
    for id in (0, 1):
        net = local_steps(run, federation, id, rule, method.mu)
        assert_close(run.wire.replied["local_update"][1][id]["weights"], parameters_of(net))


@pytest.mark.parametrize(("changes", "same"), [({}, True), ({"weight_decay": 0.1}, False), ({"clip_norm": 0.1}, False)])
def test_adam_takes_the_scale_outside_away_unless_it_decays_or_clips(play, clouds, changes, same):
    training = replace(LocalTraining(lr=0.01, batch_size=4), **changes)
    pools = [
        play(FedIN(training, outside=outside), clouds("mlp2", "mlp3"), rounds=3).state.weights["all"]
        for outside in ("half", "unit")
    ]
    gap = max((one - other).abs().max().item() for one, other in zip(*(pool.values() for pool in pools), strict=True))
    assert (gap < 1e-4) is same


def test_sequential_training_ends_with_as_many_steps_on_the_features_alone(play, clouds):
    federation = clouds("mlp2", "mlp3")
    run = play(FedIN(FULL, optimization="sequential"), federation, rounds=2)
    for id in (0, 1):
        sent = run.wire.sent["local_update"][1][id]
        net = local_steps(run, federation, id, lambda local, feature: local, mu=0.1)
        for _ in range(3):
            step(net, {}, feature_gradients(net, sent), lambda _, feature: 0.0 if feature is None else feature)
        assert_close(run.wire.replied["local_update"][1][id]["weights"], parameters_of(net))


@pytest.mark.parametrize("training", [LocalTraining(), LocalTraining(weight_decay=0.1)])
def test_the_phase_on_features_alone_leaves_extractor_and_classifier_bit_for_bit(play, clouds, training):
    federation = clouds("norm2", "norm3")
    both = play(FedIN(training, optimization="sequential"), federation, rounds=2)
    first = play(FedIN(training, feature_training=False), federation, rounds=2)
    for id in (0, 1):
        after, before = (run.wire.replied["local_update"][1][id] for run in (both, first))
        assert_close(after["buffers"], before["buffers"], **EXACTLY)
        for name, tensor in before["weights"].items():
            assert torch.equal(after["weights"][name], tensor) == name.startswith(OUTER), name


# Features that are sent


def test_a_client_sends_pairs_of_its_last_epoch_as_they_were_in_training(play, clouds):
    federation = clouds("mlp2")
    run = play(FedIN(replace(FULL, epochs=2), feature_batch=5), federation)
    features = run.wire.replied["local_update"][0][0]["features"]
    assert features["s_in"].shape == features["s_out"].shape == (5, 8)
    net = local_steps(run, federation, 0, lambda local, feature: local, mu=0.1, steps=1)  # before the second
    s_in = net.stages[0](federation.sites[0].train.inputs).detach()
    places = rows_in(features["s_in"], s_in)
    assert len(set(places)) == 5
    assert_close(features["s_out"], net.stages[1](s_in[places]).detach())


def test_pairs_are_drawn_from_the_whole_epoch(play, clouds):
    federation = clouds("mlp2", sizes=(20,))
    run = play(FedIN(STILL, feature_batch=20), federation)
    s_in = run.model(0).stages[0](federation.sites[0].train.inputs).detach()
    sent = run.wire.replied["local_update"][0][0]["features"]["s_in"]
    assert sorted(rows_in(sent, s_in)) == list(range(20))


def test_every_round_draws_other_pairs(play, clouds):
    federation = clouds("mlp2", sizes=(20,))
    run = play(FedIN(STILL, feature_batch=5), federation, rounds=12)
    s_in = run.model(0).stages[0](federation.sites[0].train.inputs).detach()
    places = [rows_in(replies[0]["features"]["s_in"], s_in) for replies in run.wire.replied["local_update"]]
    assert all(len(set(drawn)) == 5 for drawn in places)
    assert len({place for drawn in places for place in drawn}) > 15


def test_a_client_with_few_examples_sends_as_many_pairs_as_it_has(play, clouds):
    run = play(FedIN(), clouds("norm2", sizes=(7,)))
    assert len(run.wire.replied["local_update"][0][0]["features"]["s_in"]) == 7


def test_sending_features_does_not_change_the_training(play, clouds):
    federation = clouds("norm2", "norm3")
    few, many = (play(FedIN(feature_batch=n), federation) for n in (2, 16))
    assert_close(few.state.weights, many.state.weights, **EXACTLY)


def test_without_features_none_are_sent(play, clouds):
    run = play(FedIN(feature_training=False), clouds("norm2"), rounds=2)
    assert run.state.features == {}
    assert "features" not in {*run.reports[1].traffic.up, *run.reports[1].traffic.down}


# Features that are stored and drawn


def test_the_store_keeps_the_newest_pairs_in_order_and_aligned(play, clouds):
    run = play(FedIN(STILL, feature_batch=3, store_capacity=10), clouds("mlp2", "mlp2"), rounds=3)
    replies = [r[id]["features"] for r in run.wire.replied["local_update"] for id in (0, 1)]
    for state, pairs in zip(run.states, (0, 2, 4, 6), strict=True):
        for name in ("s_in", "s_out") if pairs else ():
            sent = torch.cat([reply[name] for reply in replies[:pairs]])
            (store,) = state.features.values()
            assert_close(store[name], sent[-10:], **EXACTLY)
    (store,) = run.state.features.values()
    assert len(store["s_in"]) == 10
    assert_close(store["s_out"], run.model(0).stages[1](store["s_in"]).detach())


def test_all_clients_of_a_round_receive_the_same_pairs_drawn_without_replacement(play, clouds):
    run = play(FedIN(feature_batch=6), clouds("mlp2", "mlp3", "mlp2"), rounds=3)
    for sent, state in zip(run.wire.sent["local_update"][1:], run.states[1:], strict=False):
        (store,) = state.features.values()
        for message in sent.values():
            assert_close(message["features"], sent[0]["features"], **EXACTLY)
        places = rows_in(torch.cat(list(sent[0]["features"].values()), 1), torch.cat(list(store.values()), 1))
        assert len(set(places)) == 6
    first, second = (sent[0]["features"]["s_in"] for sent in run.wire.sent["local_update"][1:])
    assert not torch.equal(first, second)


def test_clients_receive_pairs_of_their_own_shapes_only(play, clouds):
    sharing = Sharing("architecture", "uniform")
    run = play(FedIN(sharing=sharing), clouds("mlp2", "wide2", "mlp3"), rounds=2)
    narrow, wide, deep = (run.wire.sent["local_update"][1][id]["features"] for id in (0, 1, 2))
    assert_close(narrow, deep, **EXACTLY)
    assert wide["s_in"].shape[1:] == wide["s_out"].shape[1:] == (16,)
    assert sorted(pairs["s_in"].shape[1] for pairs in run.state.features.values()) == [8, 16]


@pytest.mark.parametrize("late", ["mlp2", "mlp3"])
def test_a_client_drawn_late_receives_features_like_everybody(play, clouds, late):
    run = play(FedIN(), clouds("mlp2", late), rounds=0)
    run.round(0)
    run.round(0, 1)
    sent = run.wire.sent["local_update"][1]
    assert sent[0]["features"] is not None
    assert_close(sent[1]["features"], sent[0]["features"], **EXACTLY)


def test_a_single_pair_is_not_stored_because_it_has_no_batch_statistics(play, clouds):
    run = play(FedIN(LocalTraining()), clouds("mlp2", sizes=(1,)), rounds=2)
    assert run.state.features == {}


def test_a_round_leaves_the_state_it_was_given_unchanged(play, clouds):
    run = play(FedIN(), clouds("norm2", "norm3"))
    before = ({n: t.clone() for n, t in run.state.weights["all"].items()}, dict(run.state.features))
    run.round()
    assert_close((run.states[1].weights["all"], run.states[1].features), before, **EXACTLY)


# Wire and hyper-parameters


@pytest.mark.parametrize("buffers", ["average", "local", "drop"])
def test_statistics_are_sent_by_default_and_not_where_the_text_of_the_revision_is_followed(play, clouds, buffers):
    run = play(FedIN(sharing=Sharing(weighting="uniform", buffers=buffers)), clouds("norm2", "norm3"))
    traffic = run.reports[0].traffic
    assert ("buffers" in traffic.up) is ("buffers" in traffic.down) is (buffers == FedIN().sharing.buffers)


def test_a_first_round_sends_weights_to_all_and_so_does_a_clients_own_first_one(play, clouds):
    run = play(FedIN(), clouds("norm2", "norm2"), rounds=0)
    before = run.state.weights["all"]
    run.round(0)
    run.round(1)
    first, late = run.wire.sent["local_update"][0][0], run.wire.sent["local_update"][1][1]
    assert_close(first["weights"], {name: before[name] for name in first["weights"]}, **EXACTLY)
    assert_close(late["weights"], {name: run.states[1].weights["all"][name] for name in late["weights"]}, **EXACTLY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "floats"),
    # 16 pairs of the stem's output, 64 channels on a quarter of the side, and of 512 features.
    [((3, 32, 32), 16 * (64 * 8 * 8 + 512)), ((1, 28, 28), 16 * (64 * 7 * 7 + 512))],
)
def test_messages_carry_one_batch_of_features_more_than_fedavg(play, shape, floats):
    assert floats in (73_728, 58_368)
    train = Examples(uniform(16, *shape), torch.arange(16) % 10)
    federation = Federation(
        {0: Site(0, "resnet10", train, train, train)},
        {"resnet10": partial(get_model("resnet10"), 10, shape)},
        "resnet10",
        num_classes=10,
    )
    one_step = LocalTraining(steps=1)
    fedin = [report.traffic for report in play(FedIN(one_step), federation, rounds=2).reports]
    fedavg = play(FedAvg(one_step, UNIFORM), federation).reports[0].traffic
    assert [t.bytes_up - fedavg.bytes_up for t in fedin] == [4 * floats, 4 * floats]
    assert [t.bytes_down - fedavg.bytes_down for t in fedin] == [0, 4 * floats]


def test_the_defaults_are_the_papers():
    method = FedIN()
    assert (method.mu / 2, method.multiplier, method.rule, method.optimization) == (
        0.05,
        1.0,
        "simplified",
        "joint",
    )
    assert (method.feature_batch, method.store_capacity) == (16, 5000)
    assert method.sharing == Sharing("layer", "uniform", "average")
    assert method.training == LocalTraining("adam", lr=0.001, batch_size=16)


@pytest.mark.parametrize(
    ("name", "value"), [("mu", -0.1), ("multiplier", -1.0), ("feature_batch", 1), ("store_capacity", 1)]
)
def test_impossible_hyper_parameters_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name}: expected at least .* found {value}"):
        FedIN(**{name: value})


def test_a_model_that_cannot_be_split_is_refused_with_advice(play, clouds):
    federation = replace(clouds("mlp2"), architectures={"mlp2": lambda: nn.Linear(6, 3)})
    with pytest.raises(ConfigError, match="no layer with weights reads all that its outputs are computed from"):
        play(FedIN(), federation, rounds=0)


# Noise on features, several batches of them


def test_no_noise_is_no_noise_bit_for_bit(play, clouds):
    plain, silent = (play(FedIN(noise=noise), clouds("norm2", "norm3"), rounds=2) for noise in (0.0, 0))
    assert_close(plain.state.weights, silent.state.weights, **EXACTLY)


@pytest.mark.parametrize("strength", [0.8, 2.0])
def test_noise_is_as_strong_as_asked_in_standard_deviations_of_the_features(play, clouds, strength):
    net = play(FedIN(), clouds("mlp2")).model(0)
    batch = Batch(uniform(4000, 6), torch.zeros(4000, dtype=torch.int64), {})
    with torch.no_grad():
        _, clean = ObservingLoss(F.cross_entropy, 0.0)(net, batch, {})
        _, noisy = ObservingLoss(F.cross_entropy, 0.0, strength)(net, batch, {})
        added = noisy["s_in"] - clean["s_in"]
        assert added.mean().abs() < 0.05 * strength * clean["s_in"].std()
        assert_close(added.std(), strength * clean["s_in"].std(), rtol=0.05, atol=0)
        after = noisy["s_out"] - split(net).intermediate(noisy["s_in"])
        assert_close(after.std(), strength * split(net).intermediate(noisy["s_in"]).std(), rtol=0.05, atol=0)


@pytest.mark.parametrize(("multiplies", "multiple"), [("deviation", 0.8), ("variance", 0.894)])
@pytest.mark.parametrize("of", ["batch", "channel", "feature"])
def test_noise_has_the_deviation_of_either_reading_over_what_was_asked(play, clouds, multiplies, multiple, of):
    """0.8 sigma in section 4.3, N(0, 0.8 sigma^2) in appendix D."""
    whole = LocalTraining("sgd", lr=0.0, batch_size=2000)
    method = FedIN(whole, feature_batch=2000, noise=0.8, noise_multiplies=multiplies, noise_sigma=of)
    run = play(method, clouds("mlp2", sizes=(2000,)))
    sent = run.wire.replied["local_update"][0][0]["features"]
    clean = split(run.model(0)).intermediate(sent["s_in"]).detach()
    each = clean.std(0)
    assert each.max() > 1.5 * each[each > 0].min(), "deviations that are alike would not tell the readings apart"
    sigma = clean.std().expand(8) if of == "batch" else each
    assert_close((sent["s_out"] - clean).std(0), multiple * sigma, rtol=0.1, atol=1e-6)  # 6 deviations of chance


@pytest.mark.parametrize(
    ("name", "options", "channels"), [("resnet10", {"width": 4}, 1), ("vit", {"width": 8, "depth": 2}, 2)]
)
@pytest.mark.parametrize("of", ["batch", "channel", "feature"])
def test_sigma_is_of_the_batch_or_of_each_channel_wherever_it_is_or_of_each_feature(name, options, channels, of):
    net = get_model(name)(3, (3, 32, 32), **options).train()
    batch = Batch(uniform(6, 3, 32, 32), torch.arange(6) % 3, {})
    loss = ObservingLoss(F.cross_entropy, 0.0, 0.8, noise_sigma=of)
    with torch.no_grad(), isolated(Key((1,))):
        seen = loss(net, batch, {})[1]
    with torch.no_grad(), isolated(Key((1,))):
        s_in = split(net).extractor(batch.inputs)
        rows = {
            "batch": s_in.reshape(1, -1),
            "channel": s_in.transpose(0, channels).flatten(1),
            "feature": s_in.flatten(1).T,
        }[of]
        shape = {"batch": (1,) * s_in.dim(), "feature": (1, *s_in.shape[1:])}.get(of)
        shape = shape or [-1 if axis == channels else 1 for axis in range(s_in.dim())]
        assert_close(seen["s_in"], s_in + 0.8 * rows.std(1).reshape(shape) * torch.randn(s_in.shape))


def test_a_batch_of_one_example_has_no_noise_by_feature_and_noise_that_can_never_be_is_refused(play, clouds):
    net = play(FedIN(), clouds("mlp2")).model(0)
    batch = Batch(uniform(1, 6), torch.zeros(1, dtype=torch.int64), {})
    (_, clean), (_, seen) = (
        ObservingLoss(F.cross_entropy, 0.0, noise, noise_sigma="feature")(net, batch, {}) for noise in (0.0, 0.8)
    )
    assert_close(seen, clean, **EXACTLY)
    single = LocalTraining(batch_size=1)
    with pytest.raises(
        ValueError, match=r"noise_sigma: expected 'batch' where training.batch_size is 1, found 'feature'"
    ):
        FedIN(single, noise=0.8, noise_sigma="feature")
    assert FedIN(single, noise=0.8).noise_sigma == FedIN(single).noise_sigma == "batch"


@pytest.mark.parametrize(
    ("name", "value", "expected"), [("noise_multiplies", "sigma", "variance"), ("noise_sigma", "layer", "channel")]
)
def test_another_reading_of_the_noise_is_refused_by_name(name, value, expected):
    with pytest.raises(ValueError, match=f"{name}: expected .*{expected}.*found '{value}'"):
        FedIN(noise=0.8, **{name: value})


def test_the_loss_and_the_upload_are_those_of_the_noisy_features(play, clouds):
    net = play(FedIN(), clouds("mlp2")).model(0)
    targets = torch.zeros(20, dtype=torch.int64)
    loss, seen = ObservingLoss(F.cross_entropy, 0.0, 0.8)(net, Batch(uniform(20, 6), targets, {}), {})
    assert_close(loss, F.cross_entropy(net.head(seen["s_out"]), targets))
    run = play(FedIN(noise=5.0), clouds("mlp2"), rounds=1)
    pairs = run.wire.replied["local_update"][0][0]["features"]
    assert (pairs["s_in"] < 0).any(), "rectified features are never negative without noise"


def test_predictions_have_no_noise(play, clouds):
    run = play(FedIN(noise=5.0), clouds("norm2"), rounds=1)
    net, x = run.model(0).eval(), uniform(10, 6)
    assert_close(net(x), net(x), **EXACTLY)


def test_noise_repeats_under_one_seed(play, clouds):
    first, again = (play(FedIN(noise=0.8), clouds("norm2", "norm3"), rounds=2) for _ in range(2))
    assert_close(first.state.weights, again.state.weights, **EXACTLY)


def test_several_batches_are_sent_and_one_is_drawn_at_every_step(play, clouds):
    method = FedIN(LocalTraining(batch_size=4), feature_batch=4, feature_batches=3)
    run = play(method, clouds(*["mlp2"] * 4), rounds=2)
    sent = run.wire.sent["local_update"][1][0]["features"]
    assert len(sent["s_in"]) == len(sent["s_out"]) == 12
    net, features = run.model(0), {"s_in": uniform(12, 8), "s_out": uniform(12, 8, seed=1)}
    losses = {FeatureLoss(4)(net, (), {"features": features}).item() for _ in range(8)}
    assert len(losses) > 1
    whole = FeatureLoss(12)(net, (), {"features": features}).item()
    assert min(losses) < whole < max(losses)


@pytest.mark.parametrize(("name", "value"), [("noise", -0.1), ("feature_batches", 0)])
def test_noise_and_batches_have_a_range(name, value):
    with pytest.raises(ValueError, match=f"{name}: expected at least"):
        FedIN(**{name: value})


def test_notes__tell_in_which_share_of_the_steps_the_gradients_oppose_each_other(play, clouds):
    def step(*gradients):
        named = [{name: torch.tensor([x, 1.0]) for name, x in zip("ab", pair, strict=True)} for pair in gradients]
        return Reconcile(frozenset("ab"))(named, {})[1]

    assert step((1.0, 3.0), (-2.0, -2.0)) == {"conflict": 1.0}  # 1 - 2, and 1 - 6
    assert step((1.0, -1.0), (-3.0, -5.0)) == {"conflict": 0.0}  # a opposes, 1 - 3; b agrees by more, 1 + 5
    assert Reconcile(frozenset())([{}, {}], {})[1] == {}
    run = play(FedIN(), clouds("mlp2", "mlp3"), rounds=2)
    first, second = (report.notes for report in run.reports)
    assert first == {}  # no features yet
    assert 0 <= second["clients/conflict"] <= 1
