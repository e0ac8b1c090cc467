import itertools
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
from potluck.core.method import Need
from potluck.core.nets.batchnorm import measure_statistics
from potluck.core.nets.scale import Scale
from potluck.core.nets.weights import load, parameters_of
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedavg import FedAvg
from potluck.methods.heterofl import HeteroFL
from potluck.models import get_model
from potluck.parts.losses import masked_cross_entropy
from potluck.parts.sharing import Sharing
from potluck.parts.submodels import leading, select
from potluck.parts.width import level_within, with_scaler

EXACTLY = {"rtol": 0, "atol": 0}
STILL = LocalTraining("sgd", lr=0.0)
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
RATES = (1.0, 0.5, 0.25, 0.5)
LABELS = ((0, 1, 2), (0, 1), (1,), (0, 2))


def padded(weights, name, shape):
    """One client's tensor in the place it has in the full one; NaN where it covers nothing."""
    full = torch.full(shape, torch.nan)
    full[tuple(map(slice, weights[name].shape))] = weights[name]
    return full


# Limits


@pytest.mark.parametrize("architecture", ["mlp3", "norm3"])
def test_at_full_width_it_is_fedavg_with_equal_weights(play, clouds, architecture):
    federation = clouds(*[architecture] * 3)
    # Plain SGD: Adam would blow up the rounding of gradients that are zero, such as of biases before a norm.
    training = LocalTraining("sgd", lr=0.1, clip_norm=1.0)
    heterofl = play(HeteroFL(training), federation, rounds=3)
    fedavg = play(FedAvg(training, Sharing(weighting="uniform")), federation, rounds=3)
    expected = {name: fedavg.state.weights["all"][name] for name in heterofl.state.weights}
    assert_close(heterofl.state.weights, expected, rtol=1e-4, atol=1e-5)


def test_cutting_and_putting_back_without_training_changes_nothing(play, clouds):
    run = play(HeteroFL(STILL), clouds(*["norm3"] * 4, capacities=RATES, labels=LABELS), rounds=2)
    assert_close(run.state.weights, run.states[0].weights, **EXACTLY)


# Averaging what is covered


@pytest.mark.parametrize("mask", [True, False])
def test_every_weight_is_the_mean_over_exactly_the_clients_that_cover_it(play, clouds, mask):
    run = play(HeteroFL(mask=mask), clouds(*["norm3"] * 4, capacities=RATES, labels=LABELS), rounds=0)
    for ids in [(0, 1, 2, 3), (1, 2), (2,)]:
        run.round(*ids)
        before, after = (state.weights for state in run.states[-2:])
        replies = run.wire.replied["local_update"][-1]
        for name, old in before.items():
            contributions = []
            for id in ids:
                full = padded(replies[id]["weights"], name, old.shape)
                if name.startswith("head."):
                    full[[label for label in range(3) if label not in LABELS[id]]] = torch.nan
                contributions.append(full)
            expected = torch.stack(contributions).nanmean(0)
            covered = ~expected.isnan()
            assert_close(after[name][covered], expected[covered])
            assert torch.equal(after[name][~covered], old[~covered])
    assert not torch.equal(after["head.weight"], before["head.weight"])


def test_beside_a_narrow_client_the_full_one_decides_the_rest(play, clouds):
    run = play(HeteroFL(), clouds("mlp3", "mlp3", capacities=(1.0, 0.5)))
    full, half = (run.wire.replied["local_update"][0][id]["weights"] for id in (0, 1))
    for name, weight in run.state.weights.items():
        leading = tuple(map(slice, half[name].shape))
        outside = torch.ones_like(weight, dtype=torch.bool)
        outside[leading] = False
        assert_close(weight[leading], (full[name][leading] + half[name]) / 2)
        assert torch.equal(weight[outside], full[name][outside])
    assert half["stages.hidden1.linear.weight"].shape == (4, 4)


@pytest.mark.parametrize(("left_out", "counted"), [((0.5,), (0, 2)), ((0.25, 0.5), (0,)), ((1.0,), (1, 2, 3))])
def test_sub_models_of_levels_that_are_left_out_do_not_count(play, clouds, left_out, counted):
    """As in FeDepth's Figure 2: the mean is over the clients of the other levels, where they cover a weight."""
    method = HeteroFL(levels=(1.0, 0.5, 0.25), leave_out=left_out)
    run = play(method, clouds(*["norm3"] * 4, capacities=RATES))
    before, after = (state.weights for state in run.states)
    replies = run.wire.replied["local_update"][0]
    assert list(replies) == [0, 1, 2, 3]  # all train
    for name, old in before.items():
        mean = torch.stack([padded(replies[id]["weights"], name, old.shape) for id in counted]).nanmean(0)
        assert_close(after[name], torch.where(mean.isnan(), old, mean))
    assert list(run.wire.replied["measure"][0]) == [0, 1, 2, 3]  # and statistics are of the new weights on everyone's


@pytest.mark.parametrize("left_out", [(0.3,), (1.0, 0.5)])
def test_only_some_of_the_levels_can_be_left_out(left_out):
    with pytest.raises(ConfigError, match=r"leave_out: expected some of the levels \(1\.0, 0\.5\), not all, found"):
        HeteroFL(levels=(1.0, 0.5), leave_out=left_out)


@pytest.mark.parametrize("mask", [True, False])
def test_a_class_that_nobody_drawn_holds_keeps_its_row(play, clouds, mask):
    federation = clouds("norm2", "norm2", capacities=RATES, labels=((0, 1), (0,)))
    run = play(HeteroFL(mask=mask), federation)
    for name in ("head.weight", "head.bias"):
        before, after = (state.weights[name] for state in run.states)
        assert torch.equal(after[2], before[2])
        assert not torch.equal(after[1], before[1])


def test_what_clients_cover_adds_up(play, clouds):
    run = play(HeteroFL(), clouds(*["norm2"] * 4, capacities=RATES))
    sent = run.wire.sent["local_update"][0].values()
    elements = sum(tensor.numel() for message in sent for tensor in message["weights"].values())
    covering = 0
    for row, column in itertools.product(range(8), range(8)):  # of the square layer, 8 units wide
        covering += sum(row < math.ceil(8 * r) and column < math.ceil(8 * r) for r in RATES)
    for unit in range(8):
        holders = sum(unit < math.ceil(8 * r) for r in RATES)
        # 6 inputs, 2 biases, 2 scales and 2 shifts of the norms, 3 outputs
        covering += holders * (6 + 2 + 2 + 2 + 3)
    assert elements == covering + 4 * 3  # every client has the head's biases


# Slices


@pytest.mark.parametrize("rate", [0.5, 0.25, 0.3])
@pytest.mark.parametrize("name", ["resnet14", "preresnet18", "heterofl_cnn", "cnn3", "mlp3"])
def test_a_slice_loads_strictly_into_the_net_of_its_rate(name, rate):
    build = partial(get_model(name), 3, (2, 8, 8), width=8)
    full, narrow = build(), build(scale=Scale(rate))
    shapes = {key: tensor.shape for key, tensor in narrow.state_dict().items()}
    narrow.load_state_dict(select(full.state_dict(), leading(shapes)), strict=True)
    assert narrow.eval()(torch.zeros(2, 2, 8, 8)).shape == (2, 3)
    first = next(iter(narrow.parameters()))
    assert torch.equal(first, next(iter(full.parameters()))[: len(first)])


def test_a_slice_computes_what_the_full_net_computes_without_the_other_units(clouds):
    federation = clouds("mlp3")
    full, half = (federation.architectures["mlp3"](scale=Scale(rate)) for rate in (1.0, 0.5))
    shapes = {name: tensor.shape for name, tensor in half.state_dict().items()}
    load(half, select(full.state_dict(), leading(shapes)))
    with torch.no_grad():
        for stage in full.stages:
            stage.linear.weight[4:] = 0
            stage.linear.bias[4:] = 0
    inputs = federation.sites[0].train.inputs
    assert_close(half(inputs), full(inputs))


def test_a_slice_shares_no_memory_with_the_full_net(clouds):
    full = clouds("mlp2").architectures["mlp2"]().state_dict()
    select(full, leading({"head.weight": torch.Size((3, 4))}))["head.weight"].zero_()
    assert full["head.weight"].any()


def test_clients_train_the_leading_slice_they_are_sent(play, clouds):
    run = play(HeteroFL(STILL), clouds(*["norm3"] * 4, capacities=RATES))
    for id, sent in run.wire.sent["local_update"][0].items():
        assert sent["rate"] == RATES[id]
        for name, tensor in sent["weights"].items():
            assert torch.equal(tensor, run.states[0].weights[name][tuple(map(slice, tensor.shape))])
        reply = run.wire.replied["local_update"][0][id]
        assert_close(reply["weights"], sent["weights"], **EXACTLY)
    assert run.kept(0) == {"state": {}}


# Levels


@pytest.mark.parametrize(
    ("capacity", "level"),
    [(1.0, 1.0), (0.99, 0.5), (0.5, 0.5), (0.3, 0.25), (0.0625, 0.0625), (0.01, 0.0625)],
)
def test_a_client_has_the_largest_level_within_its_capacity(capacity, level):
    assert level_within(HeteroFL().levels, capacity) == level


class Heard(Exception):
    pass


class Listener:
    """A cohort that hears what it is asked and answers nothing."""

    def __init__(self, ids):
        self.ids = ids
        self.messages = {}

    def stream(self, handler, messages):
        self.messages = messages
        raise Heard


def test_dynamic_levels_are_drawn_afresh_with_equal_chances(play, clouds):
    method = HeteroFL(levels=(1.0, 0.5, 0.25), assignment="dynamic")
    run = play(method, clouds(*["mlp2"] * 4, capacities=(0.25,) * 4), rounds=0)
    rates = {id: [] for id in range(4)}
    for number in range(1, 101):
        cohort = Listener(tuple(range(4)))
        with pytest.raises(Heard):
            method.round(run.state, cohort, run.engine.server(number))
        for id, message in cohort.messages.items():
            rates[id].append(message["rate"])
    drawn = list(itertools.chain(*rates.values()))
    for level in method.levels:
        # 400 draws at one third: 133.3 expected with a deviation of sqrt(400 * 1/3 * 2/3) = 9.4
        assert abs(drawn.count(level) - 400 / 3) < 4 * 9.5
    assert all(len(set(own)) == 3 for own in rates.values())
    assert rates[0] != rates[1]


def test_dynamic_levels_are_averaged_by_what_was_drawn(play, clouds):
    run = play(HeteroFL(assignment="dynamic"), clouds(*["norm2"] * 4), rounds=3)
    for sent, replies in zip(run.wire.sent["local_update"], run.wire.replied["local_update"], strict=True):
        for id, message in sent.items():
            narrow = replies[id]["weights"]["stages.stage0.0.bias"]
            assert len(narrow) == math.ceil(8 * message["rate"])


# Masked cross-entropy


def test_logits_of_absent_labels_are_zero_and_get_no_gradient():
    logits = torch.tensor([[2.0, -1.0, 5.0], [0.5, 1.5, -3.0]], requires_grad=True)
    loss = masked_cross_entropy(logits, torch.tensor([0, 1]), torch.tensor([True, True, False]))
    e = math.e
    by_hand = [math.log(e**2 + e**-1 + 1) - 2, math.log(e**0.5 + e**1.5 + 1) - 1.5]  # the third adds e^0
    assert loss.item() == pytest.approx(sum(by_hand) / 2)
    loss.backward()
    assert not logits.grad[:, 2].any()
    assert logits.grad[:, :2].all()


@pytest.mark.parametrize("mask", [True, False])
def test_the_mask_decides_the_loss_of_a_client_that_lacks_labels(play, clouds, mask):
    federation = clouds("mlp2", labels=((0, 1),))
    run = play(HeteroFL(FULL, mask=mask), federation)
    net, train = run.engine.server(0).build(), federation.sites[0].train
    keep = torch.tensor([1.0, 1.0, 0.0 if mask else 1.0])
    loss = F.cross_entropy(net(train.inputs) * keep, train.targets)
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    expected = {name: p.detach() - 0.1 * g for (name, p), g in zip(net.named_parameters(), gradients, strict=True)}
    assert_close(run.wire.replied["local_update"][0][0]["weights"], expected)


# Scaler


def test_the_scaler_divides_what_enters_a_norm_in_training_only():
    net = nn.Sequential(nn.Identity(), nn.BatchNorm1d(3, eps=10.0))
    plain = nn.BatchNorm1d(3, eps=10.0)
    with_scaler(net, 0.25)
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    assert_close(net(x), plain(x / 0.25))
    assert_close(net.eval()(x), plain.eval()(x))


@pytest.mark.parametrize("architecture", ["norm2", "mlp2"])
def test_the_scaler_acts_on_every_hidden_layer_of_a_narrow_net(play, clouds, architecture):
    federation = clouds(architecture, capacities=(0.5,))
    run = play(HeteroFL(FULL), federation)
    net, train = run.engine.server(0).build(width=0.5), federation.sites[0].train
    load(net, run.wire.sent["local_update"][0][0]["weights"], partial=True)
    h = train.inputs
    for stage in net.stages:
        for number, layer in enumerate(stage):
            h = layer(h)
            if isinstance(layer, nn.Linear):
                assert number < 2
                h = h / 0.5
    loss = F.cross_entropy(net.head(h), train.targets)
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    expected = {name: p.detach() - 0.1 * g for (name, p), g in zip(net.named_parameters(), gradients, strict=True)}
    assert_close(run.wire.replied["local_update"][0][0]["weights"], expected)


# Static BatchNorm


def test_statistics_of_one_batch_are_its_mean_and_unbiased_variance():
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(nn.BatchNorm1d(4))
    assert measure_statistics(net, [x]) == 1
    assert_close(net[0].running_mean, x.mean(0))
    assert_close(net[0].running_var, x.var(0, unbiased=True))


def test_statistics_of_many_batches_are_plain_means_of_theirs():
    x = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    batches = [x[:4], x[4:5], x[5:]]  # the middle one has no variance and is left out
    net = nn.Sequential(nn.BatchNorm1d(4)).eval()
    net[0].running_mean.fill_(7.0)
    assert measure_statistics(net, batches) == 2
    assert_close(net[0].running_mean, (x[:4].mean(0) + x[5:].mean(0)) / 2)
    assert_close(net[0].running_var, (x[:4].var(0) + x[5:].var(0)) / 2)
    assert net[0].momentum == 0.1
    assert not net.training


def test_statistics_of_nothing_are_fresh():
    net = nn.Sequential(nn.BatchNorm1d(4))
    net(torch.ones(3, 4))
    assert measure_statistics(net, [torch.ones(1, 4)]) == 0
    assert_close(net[0].running_mean, torch.zeros(4), **EXACTLY)
    assert_close(net[0].running_var, torch.ones(4), **EXACTLY)


def test_training_neither_reads_nor_sends_running_statistics(play, clouds):
    run = play(HeteroFL(), clouds("norm2", "norm2", capacities=RATES), rounds=2)
    for exchange in (*run.wire.sent["local_update"], *run.wire.replied["local_update"]):
        for message in exchange.values():
            assert message["weights"].keys() == run.state.weights.keys()
            assert "statistics" not in message
    assert not [name for name in run.state.weights if "running" in name or "num_batches" in name]


def test_the_cohort_measures_the_new_weights_and_counts_by_batches(play, clouds):
    # Batches of 4 of 8 and 16 examples: all 24 count equally in a plain mean over the six batches.
    federation = clouds("norm2", "norm2", "norm2", sizes=(8, 16, 12), capacities=RATES)
    run = play(HeteroFL(LocalTraining(batch_size=4)), federation, rounds=0)
    run.round(0, 1)
    inputs = torch.cat([federation.sites[id].train.inputs for id in (0, 1)])
    weights, statistics = run.state.weights, run.state.statistics
    hidden = inputs @ weights["stages.stage0.0.weight"].T + weights["stages.stage0.0.bias"]
    assert_close(statistics["stages.stage0.1.running_mean"], hidden.mean(0), rtol=1e-4, atol=1e-5)
    one, two = run.wire.replied["measure"][0].values()
    assert (one["batches"], two["batches"]) == (2, 4)
    for name in statistics:
        if "running" in name:
            assert_close(statistics[name], (2 * one["statistics"][name] + 4 * two["statistics"][name]) / 6)


@pytest.mark.parametrize("who", ["global", "client"])
def test_statistics_do_not_depend_on_the_order_in_which_examples_are_stored(play, who):
    # 128 zeros and then 128 tens: mixed batches have a variance near 25, batches of one class have none.
    inputs = torch.cat([torch.zeros(128, 1), 10 * torch.ones(128, 1)])
    train = Examples(inputs, (inputs[:, 0] > 0).long())
    family = partial(get_model("heterofl_cnn"), 2, (1, 8, 8), width=2)
    images = Examples(inputs[:, :, None, None].expand(-1, 1, 8, 8), train.targets)
    federation = Federation({0: Site(0, "cnn", images, images, images)}, {"cnn": family}, "cnn", num_classes=2)
    run = play(HeteroFL(LocalTraining(steps=1, clip_norm=1.0)), federation)
    net = run.engine.global_model(run.state) if who == "global" else run.model(0)
    conv = net.stages[0][0]
    hidden = conv(images.inputs).detach()
    variance = next(m for m in net.modules() if isinstance(m, nn.BatchNorm2d)).running_var
    assert_close(variance, hidden.var((0, 2, 3)), rtol=0.15, atol=0.01)


# Models to evaluate, and the wire


def test_the_global_model_has_the_weights_and_the_measured_statistics(play, clouds):
    run = play(HeteroFL(), clouds("norm2", "norm2", capacities=RATES), rounds=2)
    expected = {**run.state.weights, **run.state.statistics}
    assert_close(dict(run.engine.global_model(run.state).state_dict()), expected, **EXACTLY)


def test_a_client_is_judged_with_its_slice_and_its_own_statistics(play, clouds):
    federation = clouds("norm2", "norm2", capacities=(1.0, 0.5))
    run = play(HeteroFL(LocalTraining(batch_size=64)), federation)
    net = run.model(1)
    for name, weight in parameters_of(net).items():
        assert torch.equal(weight, run.state.weights[name][tuple(map(slice, weight.shape))])
    linear, norm, _ = net.stages[0]
    hidden = linear(federation.sites[1].train.inputs).detach()
    assert len(norm.running_mean) == 4
    assert_close(norm.running_mean, hidden.mean(0))
    assert_close(norm.running_var, hidden.var(0))


def test_messages_carry_slices_and_the_full_weights_once_for_measuring(play, clouds):
    run = play(HeteroFL(), clouds("norm2", "norm2", capacities=(1.0, 0.5)))
    net, narrow = run.engine.server(0).build(), run.engine.server(0).build(width=0.5)
    full, half = (4 * sum(p.numel() for p in n.parameters()) for n in (net, narrow))
    traffic = run.reports[0].traffic
    assert traffic.down == {"weights": full + half + 2 * full, "rate": 2 * 8}
    assert traffic.up == {
        "weights": full + half,
        "labels": 2 * 3,
        "statistics": 2 * sum(b.nbytes for b in net.buffers()),
        "batches": 2 * 8,
    }


def test_a_round_leaves_the_state_it_was_given_unchanged(play, clouds):
    run = play(HeteroFL(), clouds("norm2", "norm2", capacities=RATES))
    before = {name: tensor.clone() for name, tensor in run.state.weights.items()}
    run.round()
    assert_close(run.states[1].weights, before, **EXACTLY)


def test_needs_and_levels_are_stated():
    assert HeteroFL().needs() == {Need.ONE_ARCHITECTURE, Need.WIDTH_SLICES, Need.CLASSES}
    assert HeteroFL().levels == (1.0, 0.5, 0.25, 0.125, 0.0625)
    assert HeteroFL().training.clip_norm == 1.0
    for levels, expected in [((), "at least one rate"), ((1.0, 0.0), "above 0 and"), ((1.5,), "above 0 and at most 1")]:
        with pytest.raises(ValueError, match=rf"levels(\.\d)?: expected {expected}"):
            HeteroFL(levels=levels)


def test_who_is_weaker_than_the_smallest_level_is_named_before_training(play, clouds):
    federation = clouds("norm2", "norm2", "norm2", capacities=(1.0, 0.2, 0.1))
    method = HeteroFL(levels=(1.0, 0.25))
    with pytest.warns(PotluckWarning, match=r"client 1 and 1 more: capacity 0\.2 lies below the smallest level, 0\.25"):
        play(method, federation, rounds=0)
    play(replace(method, levels=(1.0, 0.1)), federation, rounds=0)  # warnings are errors
    play(replace(method, assignment="dynamic"), federation, rounds=0)
