from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.federation import Federation, Site
from potluck.core.method import Need
from potluck.core.nets.weights import parameters_of
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import LocalTraining
from potluck.methods.felo import Felo
from potluck.methods.velo import Velo
from potluck.models.contract import StagedNet
from potluck.models.split import split
from potluck.parts.features import MIDDLE, ONE_ROW
from potluck.parts.prototypes import ReplayLoss
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
STILL = LocalTraining("sgd", lr=0.0)
FULL = LocalTraining("sgd", lr=0.1, epochs=3, batch_size=64)  # three full steps
QUICK = LocalTraining(epochs=1, batch_size=50)
CLASSES = 3
BOTH_USES = pytest.mark.parametrize("use", ["target", "replay"])


def sent(run, exchange=-1):
    return run.wire.sent["local_update"][exchange]


def replied(run, exchange=-1):
    return run.wire.replied["local_update"][exchange]


def uniform(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


# The VAE


@pytest.mark.parametrize(("widest", "expected"), [(1024, 8), (6, 6)])
def test_the_vae_is_as_wide_as_the_features_up_to_a_limit(play, clouds, widest, expected):
    run = play(Velo(vae_training=QUICK, vae_width=widest), clouds("mlp2"))
    assert run.state.vaes["8"]["decoder.0.weight"].shape == (expected, expected + expected // 2)


# What clients send, what the server keeps


@BOTH_USES
def test_clients_send_features_of_every_example_with_their_classes(play, clouds, use):
    federation = clouds("mlp2", "mlp3", labels=((0, 2), (0, 1, 2)))
    run = play(Velo(STILL, QUICK, use=use), federation)
    for id, site in federation.sites.items():
        net, reply = split(run.model(id)), replied(run)[id]
        s_in = net.extractor(site.train.inputs).detach()
        s_out = net.intermediate(s_in).detach()
        expected = s_out if use == "target" else s_in
        places = [(expected - row).abs().amax(1).argmin().item() for row in reply["features"]]
        assert sorted(places) == list(range(len(site.train)))
        assert_close(reply["features"], expected[places])
        assert_close(reply["labels"], site.train.labels[places], **EXACTLY)
        logits = net.classifier(s_out).detach()
        present = site.train.labels.unique()
        assert_close(reply["logits"], torch.stack([logits[site.train.labels == c].mean(0) for c in present]))


def test_messages_weigh_what_the_wire_section_says(play, clouds):
    federation = clouds("mlp2", "wide2", sizes=(12, 20), labels=((0, 1), (0, 1, 2)))
    traffic = play(Velo(vae_training=QUICK), federation, rounds=2).reports[1].traffic
    width, wide, floats, integers, flags = 8, 16, 4, 8, 1
    assert traffic.up == {
        "features": (12 * width + 20 * wide) * floats,
        "labels": (12 + 20) * integers,
        "logits": (2 + 3) * CLASSES * floats,
    }
    assert traffic.down == {
        "features": CLASSES * (width + wide) * floats + 2 * CLASSES * flags,
        "logits": 2 * (CLASSES * CLASSES * floats + CLASSES * flags),
    }


def test_the_store_keeps_the_newest_features_of_each_class(play, clouds):
    federation = clouds("mlp2", "mlp3", sizes=(12, 9))
    run = play(Velo(FULL, QUICK, feature_capacity=5), federation, rounds=2)
    came = [reply for exchange in (0, 1) for reply in replied(run, exchange).values()]
    values, labels = (torch.cat([reply[name] for reply in came]) for name in ("features", "labels"))
    store = run.state.features["8"]
    for label in range(CLASSES):
        assert_close(store["values"][store["labels"] == label], values[labels == label][-5:], **EXACTLY)
    assert store["counts"].tolist() == [1] * 5 * CLASSES


def test_logits_are_felos(play, clouds):
    federation = clouds("mlp2", "wide2", labels=((0, 1), (0, 1, 2)))
    ours, theirs = play(Velo(STILL, QUICK), federation, rounds=3), play(Felo(STILL), federation, rounds=3)
    for id in (0, 1):
        assert_close(sent(ours)[id]["logits"], sent(theirs)[id]["logits"])


# What the server generates


def test_all_clients_of_a_round_receive_the_same_features_and_every_round_draws_others(play, clouds):
    still = replace(STILL, epochs=1)
    run = play(Velo(still, LocalTraining("sgd", lr=0.0, batch_size=50)), clouds("mlp2", "mlp3"), rounds=3)
    for exchange in (1, 2):
        one, two = (sent(run, exchange)[id]["features"] for id in (0, 1))
        assert_close(one, two, **EXACTLY)
        assert one["means"].shape == (CLASSES, 8)
    assert not torch.allclose(sent(run, 1)[0]["features"]["means"], sent(run, 2)[0]["features"]["means"], atol=1e-3)


def test_what_is_generated_does_not_depend_on_who_is_drawn(play, clouds):
    runs = [play(Velo(vae_training=QUICK), clouds("mlp2", "wide2", "mlp3")) for _ in range(2)]
    runs[0].round(0, 1, 2)
    runs[1].round(2)
    assert_close(sent(runs[0])[2], sent(runs[1])[2], **EXACTLY)


def test_a_decoder_that_ignores_the_code_generates_the_same_in_every_round(play, clouds):
    method = Velo(vae_training=QUICK)
    run = play(method, clouds("mlp2"))
    deaf = {name: tensor.clone() for name, tensor in run.state.vaes["8"].items()}
    deaf["decoder.0.weight"][:, :8] = 0.0
    first, second, other = (
        method._generated(replace(run.state, vaes={"8": weights}), "8", run.engine.server(number))["means"]
        for weights, number in ((deaf, 2), (deaf, 3), (run.state.vaes["8"], 3))
    )
    assert_close(first, second, **EXACTLY)
    assert not torch.allclose(second, other, atol=1e-3)
    assert not torch.allclose(first[0], first[1], atol=1e-3)


def test_a_trained_vae_generates_features_of_the_right_class(play, clouds):
    # With the summed KL the code carries nothing, so that what is generated is near the class mean.
    vae_training = LocalTraining(lr=0.02, epochs=100, batch_size=50)
    federation = clouds("mlp2", sizes=(60,))
    run = play(Velo(STILL, vae_training, kl_reduction="sum", warmup_rounds=0), federation, rounds=2)
    reply, table = replied(run)[0], sent(run)[0]["features"]["means"]
    means = torch.stack([reply["features"][reply["labels"] == label].mean(0) for label in range(CLASSES)])
    distances = (table[:, None] - means[None]).square().mean(2)
    assert distances.argmin(1).tolist() == [0, 1, 2]
    assert distances.diagonal().mean() < 0.2 * (means - means.mean(0)).square().mean()


def test_the_vae_is_trained_on_what_is_stored_from_its_own_weights(play, clouds):
    still = LocalTraining("sgd", lr=0.0, batch_size=50)
    run = play(Velo(vae_training=still), clouds("mlp2"), rounds=2)
    one, two = (state.vaes["8"] for state in run.states[1:])
    moving = {name for name in one if not torch.equal(one[name], two[name])}
    assert moving == {"encoder.1.running_mean", "encoder.1.running_var", "encoder.1.num_batches_tracked"}
    run = play(Velo(vae_training=QUICK), clouds("mlp2"), rounds=2)
    assert not torch.equal(run.states[1].vaes["8"]["decoder.1.weight"], run.states[2].vaes["8"]["decoder.1.weight"])


@pytest.mark.parametrize(
    ("warmup", "every", "trained"), [(0, 1, [1, 2, 3, 4, 5]), (1, 2, [2, 4]), (3, 1, [3, 4, 5]), (3, 2, [4])]
)
def test_the_vae_is_trained_every_so_many_rounds_from_the_end_of_warm_up(play, clouds, warmup, every, trained):
    method = Velo(STILL, QUICK, warmup_rounds=warmup, vae_every=every)
    run = play(method, clouds("mlp2"), rounds=5)
    weights = [state.vaes.get("8", {}).get("decoder.1.weight", torch.zeros(())) for state in run.states]
    assert [r for r in range(1, 6) if not torch.equal(weights[r], weights[r - 1])] == trained
    with_features = [r for r in range(1, 6) if sent(run, r - 1)[0].get("features") is not None]
    assert with_features == list(range(trained[0] + 1, 6))
    with_logits = [r for r in range(1, 6) if sent(run, r - 1)[0].get("logits") is not None]
    assert with_logits == list(range(max(warmup, 1) + 1, 6))


def test_a_class_that_the_vae_was_not_trained_on_is_unknown_though_it_was_reported(play, clouds):
    federation = clouds("mlp2", "mlp2", labels=((0, 2), (0, 1, 2)))
    run = play(Velo(vae_training=QUICK, vae_every=2), federation, rounds=0)
    run.round(0)
    run.round(0)  # the VAE is trained on what client 0 has
    run.round(1)
    assert sent(run)[1]["features"]["known"].tolist() == [True, False, True]
    run.round(1)  # still the same VAE, though class 1 is in the store and its logits are known
    assert 1 in run.states[3].features["8"]["labels"]
    message = sent(run)[1]
    assert message["features"]["known"].tolist() == [True, False, True]
    assert not message["features"]["means"][1].any()
    assert message["features"]["means"][[0, 2]].all()
    assert message["logits"]["known"].all()
    run.round(1)
    assert sent(run)[1]["features"]["known"].all()


@BOTH_USES
def test_clients_whose_features_differ_in_shape_have_a_vae_of_their_own(play, clouds, use):
    run = play(Velo(vae_training=QUICK, use=use), clouds("mlp2", "wide2", "mlp3"), rounds=2)
    narrow, wide, deep = (sent(run)[id]["features"]["means"] for id in range(3))
    assert set(run.state.vaes) == {"8", "16"}
    assert_close(narrow, deep, **EXACTLY)
    assert wide.shape == (CLASSES, 16)


def test_a_client_whose_shape_nobody_has_reported_receives_logits_alone(play, clouds):
    run = play(Velo(vae_training=QUICK), clouds("mlp2", "wide2"), rounds=0)
    run.round(0)
    run.round(0, 1)
    assert set(sent(run)[0]) == {"features", "logits"}
    assert set(sent(run)[1]) == {"logits"}


def test_one_feature_alone_trains_no_vae(play, clouds):
    run = play(Velo(vae_training=QUICK), clouds("mlp2", sizes=(1,)))
    assert run.state.vaes == {}
    run.round()
    assert set(run.state.vaes) == {"8"}


# Local training


def full_step(net, loss):
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter -= 0.1 * gradient


@BOTH_USES
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_local_training_descends_the_loss_of_its_use(play, clouds, use, alpha):
    federation = clouds("mlp2", "mlp3")
    run = play(Velo(FULL, QUICK, use=use, alpha=alpha), federation)
    nets = [run.model(id) for id in (0, 1)]
    run.round()
    for id, net in enumerate(nets):
        inputs, labels = federation.sites[id].train.inputs, federation.sites[id].train.labels
        h, z = (sent(run)[id][name]["means"][labels] for name in ("features", "logits"))
        for _ in range(3):
            parts = split(net)
            mid = parts.features(inputs)
            logits = parts.classifier(mid)
            task, pull = F.cross_entropy(logits, labels), (logits - z).square().mean()
            if use == "target":
                full_step(net, task + alpha * ((mid - h).square().mean() + pull))
            else:
                again = parts.classifier(parts.intermediate(h))
                replayed = F.cross_entropy(again, labels) + (again - z).square().mean()
                full_step(net, (1 - alpha) * task + alpha * (replayed + pull))
        assert_close(parameters_of(run.model(id)), parameters_of(net))


def replay_of(net, batch, known, logits_known=(True,) * CLASSES, alpha=0.4, width=8):
    """The replay loss with random tables."""
    tables = {
        "features": {"means": uniform(CLASSES, width, seed=1), "known": torch.tensor(known)},
        "logits": {"means": uniform(CLASSES, CLASSES, seed=2), "known": torch.tensor(logits_known)},
    }
    return ReplayLoss(F.cross_entropy, alpha)(net, batch, tables)[0], tables


def test_replay_weighs_by_the_share_of_the_batch_that_has_a_synthetic_feature(play, clouds):
    federation = clouds("mlp2")
    net, batch = play(Velo(), federation, rounds=0).model(0), federation.sites[0].train.batch(torch.arange(8))
    loss, tables = replay_of(net, batch, known=[True, False, True])
    labels = batch[1]
    mine, share = labels[labels != 1], (labels != 1).float().mean()
    z, again = net(batch[0]), net.head(split(net).intermediate(tables["features"]["means"][mine]))
    gap = (z - tables["logits"]["means"][labels]).square().mean()
    taught = F.cross_entropy(again, mine) + (again - tables["logits"]["means"][mine]).square().mean()
    assert 0 < share < 1
    assert_close(loss, (1 - 0.4 * share) * F.cross_entropy(z, labels) + 0.4 * (share * taught + gap))


def test_replay_without_synthetic_features_is_the_tasks_loss_and_the_logits_distance(play, clouds):
    federation = clouds("mlp2")
    net, batch = play(Velo(), federation, rounds=0).model(0), federation.sites[0].train.batch(torch.arange(8))
    masked, tables = replay_of(net, batch, known=[False] * CLASSES)
    absent, _ = ReplayLoss(F.cross_entropy, 0.4)(net, batch, {**tables, "features": None})
    gap = (net(batch[0]) - tables["logits"]["means"][batch[1]]).square().mean()
    assert_close(masked, F.cross_entropy(net(batch[0]), batch[1]) + 0.4 * gap)
    assert_close(absent, masked, **EXACTLY)
    nothing, _ = ReplayLoss(F.cross_entropy, 0.4)(net, batch, {"features": None, "logits": None})
    assert_close(nothing, F.cross_entropy(net(batch[0]), batch[1]), **EXACTLY)


def test_replay_leaves_running_statistics_and_mode_alone(play, clouds):
    federation = clouds("norm2")
    net = play(Velo(), federation, rounds=0).model(0).train()
    batch = federation.sites[0].train.batch(torch.arange(8))
    inner = net.stages[1][1]
    reference = play(Velo(), federation, rounds=0).model(0).train()
    reference(batch[0])
    replay_of(net, batch, known=[True] * CLASSES)
    assert_close(dict(net.state_dict()), dict(reference.state_dict()), **EXACTLY)
    assert net.training
    assert inner.training


def test_replay_normalises_with_the_statistics_of_its_own_batch(play, clouds):
    federation = clouds("norm2")
    net = play(Velo(), federation, rounds=0).model(0).train()
    batch = federation.sites[0].train.batch(torch.arange(8))
    inputs, labels, _ = batch
    loss, tables = replay_of(net, batch, known=[True] * CLASSES)
    h, z = (tables[name]["means"][labels] for name in ("features", "logits"))
    linear = net.stages[1][0](h)
    again = net.head(((linear - linear.mean(0)) / (linear.var(0, correction=0) + 1e-5).sqrt()).relu())
    logits = net(inputs)
    taught = F.cross_entropy(again, labels) + (again - z).square().mean()
    expected = 0.6 * F.cross_entropy(logits, labels) + 0.4 * (taught + (logits - z).square().mean())
    assert_close(loss, expected)


def test_a_single_example_with_a_synthetic_feature_is_not_replayed(play, clouds):
    federation = clouds("norm2")
    net = play(Velo(), federation, rounds=0).model(0).train()
    batch = federation.sites[0].train.batch(torch.tensor([0, 1]))  # classes 0 and 1
    one, _ = replay_of(net, batch, known=[True, False, False])
    none, _ = replay_of(net, batch, known=[False] * CLASSES)
    both, _ = replay_of(net, batch, known=[True, True, False])
    assert_close(one, none, **EXACTLY)
    assert both != none


def test_replay_does_not_train_the_extractor_by_synthetic_features(play, clouds):
    federation = clouds("mlp2")
    net, batch = play(Velo(), federation, rounds=0).model(0), federation.sites[0].train.batch(torch.arange(9))
    loss, tables = replay_of(net, batch, known=[True] * CLASSES, alpha=1.0)
    weight = net.stages[0].linear.weight
    (found,) = torch.autograd.grad(loss, weight)
    pull = (net(batch[0]) - tables["logits"]["means"][batch[1]]).square().mean()
    (expected,) = torch.autograd.grad(pull, weight)  # (1 - 1) task's loss is gone
    assert_close(found, expected)


def maps():
    """A stem that makes maps of 4 x 2 x 3, and layers behind it."""
    stem = nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 1), nn.ReLU())
    return StagedNet({"stem": stem, "deep": nn.Conv2d(4, 5, 1)}, nn.Linear(5, CLASSES))


def test_replay_generates_feature_maps(play):
    train = Examples(uniform(12, 6), torch.arange(12) % CLASSES)
    federation = Federation({0: Site(0, "maps", train, train, train)}, {"maps": maps}, "maps", num_classes=CLASSES)
    run = play(Velo(vae_training=QUICK, use="replay"), federation, rounds=2)
    assert replied(run)[0]["features"].shape == (12, 4, 2, 3)
    assert sent(run)[0]["features"]["means"].shape == (CLASSES, 4, 2, 3)
    assert run.state.vaes["4x2x3"]["decoder.1.weight"].shape[0] == 4 * 2 * 3
    assert play(Velo(vae_training=QUICK), federation).state.vaes.keys() == {"5"}


# Who takes part, and sharing


@BOTH_USES
def test_clients_keep_their_own_models_whoever_is_drawn(play, clouds, use):
    run = play(Velo(vae_training=QUICK, use=use), clouds("norm2", "norm2", "mlp3"))
    before = [run.model(id).state_dict() for id in range(3)]
    run.round(0, 2)
    after = [run.model(id).state_dict() for id in range(3)]
    assert_close(after[1], before[1], **EXACTLY)
    assert not torch.equal(after[0]["head.weight"], before[0]["head.weight"])
    assert run.engine.global_model(run.state) is None
    assert run.state.weights == {}


def test_with_sharing_and_without_alpha_it_is_felo_with_sharing_bit_for_bit(play, clouds):
    federation = clouds("norm2", "norm3", "norm2")
    sharing = Sharing("architecture")
    ours = play(Velo(vae_training=QUICK, alpha=0.0, sharing=sharing), federation, rounds=3)
    theirs = play(Felo(alpha=0.0, sharing=sharing), federation, rounds=3)
    assert_close([s.weights for s in ours.states], [s.weights for s in theirs.states], **EXACTLY)
    assert set(ours.reports[1].traffic.up) == {"features", "labels", "logits", "weights", "buffers", "examples"}
    assert set(ours.reports[1].traffic.down) == {"features", "logits", "weights", "buffers"}


def test_models_must_split():
    assert Velo().needs() == {Need.SPLIT_MODEL, Need.CLASSES, ONE_ROW}
    assert MIDDLE in Velo(use="replay").needs()
    assert Velo(sharing=Sharing()).needs() == {Need.SPLIT_MODEL, Need.NESTED_LAYERS, Need.CLASSES, ONE_ROW}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"alpha": -0.1}, "alpha: expected at least 0, found -0.1"),
        ({"alpha": 1.5, "use": "replay"}, "alpha: expected at most 1 where use is 'replay', found 1.5"),
        (
            {"training": LocalTraining(batch_size=1), "use": "replay"},
            "training.batch_size: expected at least 2 where use is 'replay', found 1",
        ),
        ({"warmup_rounds": -1}, "warmup_rounds: expected at least 0, found -1"),
        ({"vae_every": 0}, "vae_every: expected at least 1, found 0"),
        ({"vae_width": 1}, "vae_width: expected at least 2, found 1"),
        ({"kl_weight": -1.0}, "kl_weight: expected at least 0, found -1.0"),
        ({"feature_capacity": 0}, "feature_capacity: expected at least 1, found 0"),
        ({"logit_capacity": 0}, "logit_capacity: expected at least 1, found 0"),
        ({"vae_training": LocalTraining(batch_size=1)}, "vae_training.batch_size: expected at least 2, .* found 1"),
    ],
)
def test_hyper_parameters_out_of_range_are_refused(options, expected):
    with pytest.raises(ValueError, match=expected):
        Velo(**options)


def test_as_a_target_alpha_has_no_upper_limit():
    assert Velo(alpha=1.5).alpha == 1.5
