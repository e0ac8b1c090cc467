import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from potluck.core.ground.rng import Key
from potluck.core.nets.weights import buffers_of, parameters_of
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import Fit, LocalTraining
from potluck.engine.client.training import schedule, train

KEY = Key((1,))
SGD = LocalTraining(optimizer="sgd", lr=0.1)


def scalar(value=2.0):
    """A net of one weight: x to w * x."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, value)
    return net


def deep(*middle):
    """The same net every time, with linear layers first and last."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 4), *middle, nn.Linear(4, 2))


def line(*inputs):
    """Examples of one number each, with target 0."""
    return Examples(torch.tensor(inputs, dtype=torch.float32).view(-1, 1), torch.zeros(len(inputs), 1))


def cloud(count):
    generator = torch.Generator().manual_seed(count)
    return Examples(torch.randn(count, 3, generator=generator), torch.arange(count) % 2)


def square(net, batch, extras):
    """Mean of (w x)^2; its gradient is 2 w mean(x^2)."""
    return net(batch[0]).square().mean()


def task(net, batch, extras):
    return F.cross_entropy(net(batch[0]), batch[1])


def trained(net=None, objectives=task, data=None, training=SGD, key=KEY, **request):
    """The net after training, by default a deep one on ten examples."""
    net = deep() if net is None else net
    train(Fit(net, objectives, cloud(10) if data is None else data, training, **request), key)
    return net


def same(one, other):
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


# The schedule


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 12))
def test_steps_are_epochs_times_batches(examples, epochs, size):
    plan = schedule(examples, LocalTraining(epochs=epochs, batch_size=size), KEY, batch_statistics=False)
    assert sum(map(len, plan)) == epochs * math.ceil(examples / size)
    for epoch in plan:
        assert sorted(torch.cat(epoch).tolist()) == list(range(examples))
        assert all(len(batch) == size for batch in epoch[:-1])


@given(st.integers(2, 40), st.integers(1, 4), st.integers(2, 12))
def test_only_a_last_batch_of_one_is_dropped_for_batch_statistics(examples, epochs, size):
    plan = schedule(examples, LocalTraining(epochs=epochs, batch_size=size), KEY, batch_statistics=True)
    lonely = examples % size == 1
    assert all(sum(map(len, epoch)) == examples - lonely for epoch in plan)
    assert min(len(batch) for epoch in plan for batch in epoch) > 1
    assert len(plan) == epochs


@given(st.integers(1, 20), st.integers(1, 30), st.integers(1, 8))
def test_steps_may_be_given_instead_of_epochs(examples, steps, size):
    plan = schedule(examples, LocalTraining(epochs=9, steps=steps, batch_size=size), KEY, batch_statistics=False)
    assert sum(map(len, plan)) == steps
    assert len(plan) == math.ceil(steps / math.ceil(examples / size))


def test_given_steps_skip_batches_of_one_for_batch_statistics():
    plan = schedule(5, LocalTraining(steps=5, batch_size=2), KEY, batch_statistics=True)
    assert [len(epoch) for epoch in plan] == [2, 2, 1]


def test_every_epoch_has_an_order_of_its_own():
    plan = schedule(20, LocalTraining(epochs=2, batch_size=20), KEY, batch_statistics=False)
    again = schedule(20, LocalTraining(epochs=2, batch_size=20), KEY, batch_statistics=False)
    other = schedule(20, LocalTraining(epochs=2, batch_size=20), Key((2,)), batch_statistics=False)
    assert not torch.equal(plan[0][0], plan[1][0])
    assert torch.equal(plan[0][0], again[0][0])
    assert not torch.equal(plan[0][0], other[0][0])


def test_longer_training_begins_as_shorter_training():
    one = schedule(9, LocalTraining(epochs=1, batch_size=4), KEY, batch_statistics=False)
    three = schedule(9, LocalTraining(epochs=3, batch_size=4), KEY, batch_statistics=False)
    assert all(map(torch.equal, one[0], three[0]))


@pytest.mark.parametrize(
    ("examples", "size", "batch_statistics", "complaint"),
    [
        (0, 2, False, "^0 training examples; expected at least 1$"),
        (0, 2, True, "^0 training examples; expected at least 2 because the model has BatchNorm$"),
        (1, 2, True, "^1 training examples; expected at least 2 because the model has BatchNorm$"),
        (4, 1, True, "^batch_size: found 1, expected at least 2 because the model has BatchNorm$"),
    ],
)
def test_too_little_to_train_on_is_refused(examples, size, batch_statistics, complaint):
    with pytest.raises(ValueError, match=complaint):
        schedule(examples, LocalTraining(batch_size=size), KEY, batch_statistics)


# The report


@pytest.mark.parametrize(("middle", "steps", "seen"), [((), 6, 10), ((nn.BatchNorm1d(4),), 4, 8)])
def test_the_report_counts_steps_and_examples(middle, steps, seen):
    training = LocalTraining(epochs=2, batch_size=2)
    report = train(Fit(deep(*middle), task, cloud(5), training), KEY)
    assert (report.steps, report.examples) == (steps, seen)
    assert report.kept == {}


def test_the_loss_is_the_mean_over_steps_of_the_first_objective():
    def second(net, batch, extras):
        return 100 + net(batch[0]).sum()

    training = LocalTraining(optimizer="sgd", lr=0, batch_size=2)
    data = line(1.0, 1.0, 1.0)
    report = train(Fit(scalar(), [lambda net, batch, extras: net(batch[0]).sum(), second], data, training), KEY)
    assert report.loss == (2 * 2 + 2) / 2


def test_a_fit_that_was_carried_out_is_done():
    fit = Fit(deep(), task, cloud(4), SGD)
    assert not fit.done
    train(fit, KEY)
    assert fit.done


# The step


def test_a_step_of_sgd_is_the_one_computed_by_hand():
    # w = 2, x = 1 and 2: the gradient of mean((w x)^2) is 2 * 2 * 2.5 = 10, and 2 - 0.1 * 10 = 1.
    assert trained(scalar(2.0), square, line(1.0, 2.0)).weight.item() == pytest.approx(1.0)


def test_momentum_and_weight_decay_are_the_optimisers():
    # Gradient 2 w + 0.5 w = 2.5 w. w: 2, then v = 5, w = 1.5; then v = 0.5 * 5 + 3.75 = 6.25, w = 0.875.
    training = LocalTraining(optimizer="sgd", lr=0.1, momentum=0.5, weight_decay=0.5, steps=2)
    assert trained(scalar(2.0), square, line(1.0), training).weight.item() == pytest.approx(0.875)


def test_the_first_step_of_adam_is_one_learning_rate():
    assert trained(scalar(2.0), square, line(3.0), LocalTraining(lr=0.25)).weight.item() == pytest.approx(1.75)


@pytest.mark.parametrize(("decay", "expected"), [(0.0, 2.0), (0.5, 1.75)])
def test_weight_decay_is_a_gradient_for_adam_too(decay, expected):
    training = LocalTraining(lr=0.25, weight_decay=decay)
    assert trained(scalar(2.0), square, line(0.0), training).weight.item() == pytest.approx(expected)


def test_adam_has_its_usual_betas():
    # Gradients 2 w: g = 4, then 3 after a step of 0.5. m = 0.1 * (0.9 * 4 + 3) / 0.19, v = 0.001 * (0.999 * 16 + 9)
    # / 0.001999, and the second step is 0.5 * m / sqrt(v).
    training = LocalTraining(lr=0.5, steps=2)
    step = 0.5 * (0.66 / 0.19) / math.sqrt(0.024984 / 0.001999)
    assert trained(scalar(2.0), square, line(1.0), training).weight.item() == pytest.approx(1.5 - step)


@pytest.mark.parametrize("training", [LocalTraining(lr=0.25), LocalTraining(optimizer="sgd", lr=0.1, momentum=0.9)])
def test_the_optimiser_starts_fresh_with_every_fit(training):
    def loss(net, batch, extras):
        return net(batch[0]).sum()

    net = scalar(2.0)
    lengths = []
    for _ in range(3):
        before = net.weight.item()
        trained(net, loss, line(1.0), training)
        lengths.append(before - net.weight.item())
    assert lengths == pytest.approx([training.lr if training.momentum else 0.25] * 3)


def test_several_objectives_are_summed():
    both = trained(scalar(2.0), [square, square], line(1.0))
    assert both.weight.item() == pytest.approx(2 - 0.1 * 8)


def test_objectives_read_the_extras():
    def scaled(net, batch, extras):
        return extras["factor"] * square(net, batch, extras)

    net = trained(scalar(2.0), scaled, line(1.0), extras={"factor": torch.tensor(0.5)})
    assert net.weight.item() == pytest.approx(2 - 0.1 * 2)


def test_combining_one_gradient_into_itself_changes_nothing():
    assert same(trained(), trained(combine=lambda gradients, extras: gradients[0]))


def test_adding_gradients_is_what_happens_anyway():
    def added(gradients, extras):
        one, other = gradients
        return {name: one[name] + other[name] for name in one}

    default, combined = (trained(objectives=[task, task], combine=rule) for rule in (None, added))
    for name, tensor in default.state_dict().items():
        assert torch.allclose(combined.state_dict()[name], tensor, atol=1e-6)


def test_gradients_come_by_objective_and_name_where_they_exist():
    seen = []

    def body(net, batch, extras):
        return net[0](batch[0]).square().mean()

    def chosen(gradients, extras):
        seen.append(([sorted(gradient) for gradient in gradients], torch.is_grad_enabled(), extras["note"]))
        return gradients[0]

    trained(objectives=[task, body], combine=chosen, training=LocalTraining(steps=1), extras={"note": 5})
    assert seen == [([["0.bias", "0.weight", "1.bias", "1.weight"], ["0.bias", "0.weight"]], False, 5)]


def test_an_objective_that_depends_on_no_trained_weight_has_no_gradients():
    seen = []

    def apart(net, batch, extras):
        return net[0](batch[0]).square().mean()

    def chosen(gradients, extras):
        seen.append([sorted(gradient) for gradient in gradients])
        return gradients[0]

    trained(objectives=[task, apart], combine=chosen, trainable=("1.",), training=LocalTraining(steps=1))
    assert seen == [[["1.bias", "1.weight"], []]]


def test_what_combine_leaves_out_is_not_stepped():
    net = trained(combine=lambda gradients, extras: {"1.bias": gradients[0]["1.bias"]})
    before, after = parameters_of(deep()), parameters_of(net)
    assert [name for name in after if not torch.equal(after[name], before[name])] == ["1.bias"]


def test_gradients_are_clipped_after_they_are_combined():
    def raised(gradients, extras):
        return {name: 1000 * gradient for name, gradient in gradients[0].items()}

    training = LocalTraining(optimizer="sgd", lr=0.1, clip_norm=0.5)
    net = trained(training=training, combine=raised)
    before = parameters_of(deep())
    length = torch.cat([(after - before[name]).flatten() for name, after in parameters_of(net).items()]).norm()
    assert length.item() == pytest.approx(0.1 * 0.5, rel=1e-3)


def test_a_gradient_within_the_limit_is_not_clipped():
    assert same(trained(training=LocalTraining(optimizer="sgd", lr=0.1, clip_norm=1e6)), trained())


def test_extras_are_never_changed():
    direction = {name: torch.ones_like(weight) for name, weight in parameters_of(deep()).items()}
    training = LocalTraining(optimizer="sgd", lr=0.1, clip_norm=0.5, weight_decay=0.1, epochs=2)
    trained(training=training, combine=lambda gradients, extras: extras["d"], extras={"d": direction})
    assert all(bool((tensor == 1).all()) for tensor in direction.values())


def test_the_correction_comes_after_the_step_with_weights_and_learning_rate():
    seen = []

    def corrected(weights, extras, lr):
        seen.append((weights["weight"].item(), torch.is_grad_enabled()))
        return {name: weight - lr * extras["c"] for name, weight in weights.items()}

    net = trained(scalar(2.0), square, line(1.0, 2.0), after_step=corrected, extras={"c": torch.tensor(3.0)})
    assert seen == [(pytest.approx(1.0), False)]
    assert net.weight.item() == pytest.approx(1.0 - 0.1 * 3.0)


def test_the_correction_is_made_at_every_step():
    lifted = trained(
        scalar(0.0),
        square,
        line(1.0),
        LocalTraining(optimizer="sgd", lr=0, steps=3),
        after_step=lambda weights, extras, lr: {name: weight + 1 for name, weight in weights.items()},
    )
    assert lifted.weight.item() == 3.0


# What is trained


@pytest.mark.parametrize("training", [SGD, LocalTraining(weight_decay=0.1)])
def test_what_is_not_trainable_keeps_its_bits(training):
    net = trained(training=training, trainable=("1.",))
    before, after = parameters_of(deep()), parameters_of(net)
    assert {name for name in after if not torch.equal(after[name], before[name])} == {"1.weight", "1.bias"}


def test_gradients_are_asked_for_where_they_are_needed():
    switches = []

    def noted(net, batch, extras):
        switches.append([parameter.requires_grad for parameter in net.parameters()])
        return task(net, batch, extras)

    net = deep()
    net[1].bias.requires_grad_(False)
    trained(net, noted, trainable=("1.",), training=LocalTraining(steps=1))
    assert switches == [[False, False, True, False]]


def test_hooks_see_trainable_weights_only():
    names = []

    def noted(weights, extras, lr):
        names.append(sorted(weights))
        return weights

    trained(trainable=("1.",), after_step=noted, training=LocalTraining(steps=1))
    assert names == [["1.bias", "1.weight"]]


@pytest.mark.parametrize("trainable", [None, ("1.",)])
def test_gradients_and_their_switches_are_put_back(trainable):
    net = deep()
    net[0].bias.requires_grad_(False)
    trained(net, trainable=trainable)
    assert [name for name, p in net.named_parameters() if not p.requires_grad] == ["0.bias"]
    assert all(parameter.grad is None for parameter in net.parameters())


def test_switches_are_put_back_after_an_error():
    def fails(net, batch, extras):
        raise ZeroDivisionError

    net = deep()
    with pytest.raises(ZeroDivisionError):
        trained(net, fails, trainable=("1.",))
    assert all(parameter.requires_grad for parameter in net.parameters())


def test_a_prefix_that_fits_nothing_is_refused_and_changes_nothing():
    net = deep()
    with pytest.raises(ValueError, match=r"^no parameter's name starts with \('head',\); there is nothing to train$"):
        trained(net, trainable=("head",))
    assert all(parameter.requires_grad for parameter in net.parameters())


# What is frozen


@pytest.mark.parametrize(
    "training",
    [
        LocalTraining("sgd", lr=0.1, momentum=0.9, weight_decay=0.1, clip_norm=1.0),
        LocalTraining("adam", lr=0.1, weight_decay=0.1),
    ],
)
@pytest.mark.parametrize("trainable", [None, ("0.",)])
def test_a_frozen_parameter_keeps_its_bits_whatever_is_asked_for(training, trainable):
    net = deep()
    net[0].bias.requires_grad_(False)
    before = net[0].bias.clone()
    trained(net, training=training, trainable=trainable)
    assert torch.equal(net[0].bias, before)
    assert not torch.equal(net[0].weight, deep()[0].weight)
    assert [parameter.requires_grad for parameter in net.parameters()] == [True, False, True, True]


def test_hooks_do_not_see_frozen_parameters():
    seen = []

    def combine(gradients, extras):
        seen.append(set(gradients[0]))
        return gradients[0]

    def after_step(weights, extras, lr):
        seen.append(set(weights))
        return weights

    net = deep()
    net[0].requires_grad_(False)
    trained(net, combine=combine, after_step=after_step, training=LocalTraining(steps=1))
    assert seen == [{"1.weight", "1.bias"}] * 2


@pytest.mark.parametrize(
    ("frozen", "trainable", "complaint"),
    [
        ("", None, r"^every parameter of the model is frozen; there is nothing to train$"),
        ("0", ("0.",), r"^every parameter whose name starts with \('0\.',\) is frozen; there is nothing to train$"),
    ],
)
def test_a_fit_of_frozen_parameters_alone_is_refused(frozen, trainable, complaint):
    net = deep()
    net.get_submodule(frozen).requires_grad_(False)
    with pytest.raises(ValueError, match=complaint):
        trained(net, trainable=trainable)


def test_a_layer_held_in_evaluation_mode_normalises_by_its_own_statistics_and_keeps_them():
    net, modes = deep(nn.BatchNorm1d(4), nn.Dropout(0.5)), []
    net[1].running_mean.fill_(3.0)
    net[1].eval()
    net[2].eval()
    before = {name: tensor.clone() for name, tensor in net[1].state_dict().items() if "running" in name}

    def noted(net, batch, extras):
        modes.append([module.training for module in net])
        with torch.no_grad():
            expected = net[3]((net[0](batch[0]) - 3.0) / (1 + 1e-5) ** 0.5)
            assert torch.allclose(net(batch[0]), expected, atol=1e-5)
        return task(net, batch, extras)

    trained(net, noted, training=LocalTraining(optimizer="sgd", lr=0.0, steps=2))
    assert modes == [[True, False, False, True]] * 2
    assert all(torch.equal(net[1].state_dict()[name], tensor) for name, tensor in before.items())
    assert net[1].num_batches_tracked == 0


def test_one_example_is_enough_where_every_batch_norm_is_held():
    net = deep(nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match="1 training examples; expected at least 2"):
        trained(net, data=cloud(1))
    net[1].eval()
    before = parameters_of(net)
    trained(net, data=cloud(1), training=LocalTraining(batch_size=1))
    assert not torch.equal(before["0.weight"], net[0].weight)


def test_a_net_trains_in_training_mode_and_gets_its_mode_back():
    modes = []

    def noted(net, batch, extras):
        modes.append(net[1].training)
        return task(net, batch, extras)

    net = deep(nn.Dropout()).eval()
    trained(net, noted, training=LocalTraining(steps=1))
    assert modes == [True]
    assert not any(module.training for module in net.modules())


def test_batch_statistics_are_tracked_while_training():
    net = trained(deep(nn.BatchNorm1d(4)), training=LocalTraining(epochs=2, batch_size=5))
    assert buffers_of(net)["1.num_batches_tracked"] == 4


def test_two_nets_train_as_one():
    pair = nn.ModuleDict({"own": scalar(2.0), "common": scalar(4.0)})

    def both(net, batch, extras):
        return square(net["own"], batch, extras) + square(net["common"], batch, extras)

    trained(pair, both, line(1.0))
    assert [pair[name].weight.item() for name in pair] == pytest.approx([1.6, 3.2])


# Turns


def pair():
    """Two nets of one weight each."""
    return nn.ModuleDict({"one": scalar(2.0), "other": scalar(4.0)})


def gap(net, batch, extras):
    """Mean of (w1 x - w2 x)^2, which pulls each weight to the other."""
    return (net["one"](batch[0]) - net["other"](batch[0])).square().mean()


def test_objectives_step_one_after_the_other_each_on_weights_of_its_own():
    # Gradients 2 (w1 - w2) and 2 (w2 - w1): 2 - 0.1 * 2 * (2 - 4) = 2.4, and then 4 - 0.1 * 2 * (4 - 2.4) = 3.68.
    net = trained(pair(), [gap, gap], line(1.0), turns=[("one.",), ("other.",)])
    assert [net[name].weight.item() for name in net] == pytest.approx([2.4, 3.68])


def test_every_turn_has_an_optimiser_of_its_own():
    # Momentum 0.5 and constant gradients 1 and 10: after two steps each weight went 0.1 * (1 + 1.5) gradients.
    def constant(name, slope):
        return lambda net, batch, extras: slope * net[name](batch[0]).sum()

    training = LocalTraining(optimizer="sgd", lr=0.1, momentum=0.5, steps=2)
    objectives = [constant("one", 1), constant("other", 10)]
    net = trained(pair(), objectives, line(1.0), training, turns=[("one.",), ("other.",)])
    assert [net[name].weight.item() for name in net] == pytest.approx([2 - 0.25, 4 - 2.5])


def test_every_turn_may_observe_and_the_first_ones_loss_is_reported():
    def noted(name):
        return lambda net, batch, extras: (gap(net, batch, extras), {name: batch[0]})

    turns = [("one.",), ("other.",)]
    report = train(Fit(pair(), [noted("a"), noted("b")], line(1.0, 2.0, 3.0), SGD, turns=turns, keep=2), KEY)
    assert torch.equal(report.kept["a"], report.kept["b"])
    assert len(report.kept["a"]) == 2
    assert report.loss == pytest.approx((2 - 4) ** 2 * 14 / 3)
    assert report.steps == 1


def test_what_no_turn_trains_keeps_its_bits():
    net = trained(pair(), [gap], line(1.0), turns=[("other.",)])
    assert net["one"].weight.item() == 2.0
    assert net["other"].weight.item() == pytest.approx(3.6)
    assert all(parameter.requires_grad for parameter in net.parameters())


def test_a_turn_that_trains_nothing_is_refused():
    with pytest.raises(ValueError, match=r"^no parameter's name starts with \('third',\); there is nothing to train$"):
        trained(pair(), [gap, gap], line(1.0), turns=[("one.",), ("third",)])


# Randomness


@pytest.mark.usefixtures("global_generator_unchanged")
def test_training_depends_on_its_key_alone():
    nets = [trained(deep(nn.Dropout()), key=Key((k,)), training=LocalTraining(epochs=2)) for k in (1, 1, 2)]
    assert same(nets[0], nets[1])
    assert not same(nets[0], nets[2])


def test_dropout_does_not_follow_the_global_generator():
    nets = []
    for seed in (1, 2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            nets.append(trained(deep(nn.Dropout())))
    assert same(*nets)


def test_dropout_draws_anew_at_every_step():
    outputs = []

    def noted(net, batch, extras):
        outputs.append(net[0](torch.ones(50)))
        return net[1](batch[0]).sum()

    trained(nn.Sequential(nn.Dropout(), nn.Linear(3, 2)), noted, training=LocalTraining(epochs=2))
    assert not torch.equal(outputs[0], outputs[1])


def test_augmentation_draws_anew_at_every_step_and_follows_the_key():
    def noisy(inputs, rng):
        return inputs if rng is None else torch.rand(inputs.shape, generator=rng)

    def inputs_seen(key):
        seen = []

        def noted(net, batch, extras):
            seen.append(batch[0].clone())
            return net(batch[0]).sum()

        data = Examples(torch.zeros(2, 1), torch.zeros(2), noisy)
        trained(scalar(), noted, data, LocalTraining(epochs=2, batch_size=2), key)
        return torch.stack(seen)

    first = inputs_seen(KEY)
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first, inputs_seen(KEY))
    assert not torch.equal(first, inputs_seen(Key((2,))))


# Observations


def watched(net, batch, extras):
    """The task's loss, with the inputs and ten times the inputs as observations."""
    return task(net, batch, extras), {"x": batch[0], "y": 10 * batch[0]}


def kept_of(keep, count=10, key=KEY, net=None, **training):
    fit = Fit(
        deep() if net is None else net,
        watched,
        cloud(count),
        LocalTraining(batch_size=4, **training),
        keep=keep,
    )
    return train(fit, key).kept


def rows_of(kept, count=10):
    """Which examples of the cloud were kept, in the order kept."""
    inputs = cloud(count).inputs
    return [int((inputs == row).all(1).nonzero()) for row in kept["x"]]


@given(st.integers(1, 12), st.integers(1, 15), st.integers(1, 3))
def test_as_many_different_examples_are_kept_as_were_asked_for(count, keep, epochs):
    kept = kept_of(keep, count, epochs=epochs)
    assert len(set(rows_of(kept, count))) == len(kept["x"]) == min(keep, count)


def test_rows_of_observations_belong_together():
    kept = kept_of(6, epochs=2)
    assert torch.equal(kept["y"], 10 * kept["x"])
    assert not kept["x"].requires_grad


def test_only_the_last_epoch_is_observed():
    calls = []

    def counted(net, batch, extras):
        calls.append(len(batch[0]))
        return task(net, batch, extras), {"call": torch.full((len(batch[0]),), len(calls))}

    fit = Fit(deep(), counted, cloud(10), LocalTraining(batch_size=4, epochs=3), keep=10)
    assert sorted(train(fit, KEY).kept["call"].tolist()) == [7] * 4 + [8] * 4 + [9] * 2


def test_only_what_the_last_epoch_visited_is_kept():
    assert len(kept_of(10, steps=4)["x"]) == 4
    assert len(kept_of(10, count=9, net=deep(nn.BatchNorm1d(4)))["x"]) == 8


def test_every_example_may_be_kept():
    found = [row for k in range(60) for row in rows_of(kept_of(2, 6, Key((k,))), 6)]
    assert all(10 <= found.count(row) <= 30 for row in range(6))  # 20 expected; four standard deviations are 15


def test_kept_examples_come_from_all_of_the_epoch():
    batches = set()
    for k in range(20):
        calls = []

        def counted(net, batch, extras, calls=calls):
            calls.append(len(batch[0]))
            return task(net, batch, extras), {"call": torch.full((len(batch[0]),), len(calls))}

        fit = Fit(deep(), counted, cloud(10), LocalTraining(batch_size=4), keep=2)
        batches.update(train(fit, Key((k,))).kept["call"].tolist())
    assert batches == {1, 2, 3}


@pytest.mark.usefixtures("global_generator_unchanged")
def test_keeping_does_not_change_the_training():
    training = LocalTraining(epochs=2, batch_size=4)
    nets = [trained(deep(nn.Dropout()), watched, training=training, keep=keep) for keep in (0, 1, 5)]
    assert same(nets[0], nets[1])
    assert same(nets[0], nets[2])


def test_what_is_kept_follows_the_key():
    first = kept_of(3)["x"]
    assert torch.equal(first, kept_of(3)["x"])
    assert not torch.equal(first, kept_of(3, key=Key((2,)))["x"])


def test_nothing_is_kept_unless_asked_for():
    assert kept_of(0) == {}


def test_several_objectives_may_observe():
    def other(net, batch, extras):
        return task(net, batch, extras), {"z": -batch[0]}

    fit = Fit(deep(), [watched, other], cloud(10), LocalTraining(batch_size=4), keep=5)
    kept = train(fit, KEY).kept
    assert kept.keys() == {"x", "y", "z"}
    assert torch.equal(kept["z"], -kept["x"])
