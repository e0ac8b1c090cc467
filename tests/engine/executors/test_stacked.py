"""Stacked training against training one by one, in double precision; and when it steps aside."""

import itertools
import logging
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.federation import Federation, Site, empty_like
from potluck.core.ground.rng import fold_in
from potluck.core.message import Message
from potluck.core.method import Method, on_client
from potluck.core.nets.weights import frozen_of, weights_of
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import Fit, LocalTraining
from potluck.core.roles import Supervised
from potluck.engine.client.training import train
from potluck.engine.executors import Pending, bundles
from potluck.engine.executors.sequential import Sequential
from potluck.engine.executors.stacked import Stacked, pays, small_products
from potluck.engine.executors.workers import Workers, can_fork
from potluck.engine.rounds.engine import Engine
from potluck.engine.stacking.nets import CannotStack, stacking_key, train_stacked

SGD = LocalTraining("sgd", lr=0.1, epochs=3, batch_size=4)
EVEN, RAGGED = (8, 8, 8), (8, 11, 3)
KEYS = [fold_in(0, "client", id) for id in range(3)]
TASK = Supervised(F.cross_entropy)


@pytest.fixture(autouse=True)
def in_double_precision():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def plain():
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))


def normed():
    return nn.Sequential(nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def convolutional():
    layers = nn.Conv2d(1, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(10, 3)
    return nn.Sequential(nn.Unflatten(1, (1, 1, 5)), *layers)


def dropping():
    return nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3))


def fits_for(build, sizes=EVEN, training=SGD, objectives=TASK, extras=lambda draws: {}, **options):
    """One fit a client, each with weights, examples and extras of its own; the same at every call."""
    fits = []
    for id, size in enumerate(sizes):
        draws = torch.Generator().manual_seed(id)
        net = build()
        for tensor in net.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=draws) - 0.3)
        for name, buffer in net.named_buffers():
            if "running_var" in name:
                buffer.fill_(1.0)
        data = Examples(torch.randn(size, 5, generator=draws), torch.randint(3, (size,), generator=draws))
        fits.append(Fit(net, objectives, data, training, extras(draws), **options))
    return fits


def both_ways(*args, **options):
    """Nets and reports of the same fits, trained one by one and together."""
    one_by_one, together = fits_for(*args, **options), fits_for(*args, **options)
    expected = [train(fit, key) for fit, key in zip(one_by_one, KEYS, strict=True)]
    found = train_stacked(together, KEYS)
    return (one_by_one, expected), (together, found)


def agree(one, other):
    (fits, expected), (stacked, found) = one, other
    for fit, net in zip(fits, stacked, strict=True):
        assert_close(weights_of(net.net), weights_of(fit.net), rtol=1e-10, atol=1e-10)
        assert net.done
    for report, mine in zip(expected, found, strict=True):
        assert mine.loss == pytest.approx(report.loss, rel=1e-10)
        assert (mine.steps, mine.examples) == (report.steps, report.examples)
        assert_close(mine.kept, report.kept, rtol=1e-10, atol=1e-10)
        assert mine.combined == pytest.approx(report.combined, rel=1e-10)


@pytest.mark.parametrize("sizes", [EVEN, RAGGED])
@pytest.mark.parametrize("build", [plain, normed, convolutional])
def test_nets_end_where_they_do_one_by_one(build, sizes):
    agree(*both_ways(build, sizes))


@pytest.mark.parametrize(
    "training",
    [
        replace(SGD, momentum=0.9, weight_decay=0.1),
        replace(SGD, clip_norm=0.05),
        replace(SGD, steps=5),
        LocalTraining("adam", lr=0.01, epochs=2, batch_size=4, weight_decay=0.1),
    ],
)
def test_every_kind_of_local_training_agrees(training):
    agree(*both_ways(plain, RAGGED, training))


@dataclass(frozen=True)
class Taught:
    """Towards columns, and towards frozen nets by which the net's outputs are read."""

    def __call__(self, net, batch, extras):
        outputs = net(batch.inputs)
        read = extras["reader"](outputs).square().mean() + extras["twin"](batch.inputs).mul(outputs).mean()
        gap = (outputs - batch.columns["teacher"]).square().mean(1) * batch.columns["weight"]
        return F.cross_entropy(outputs, batch.targets) + gap.mean() + read


@pytest.mark.parametrize("sizes", [EVEN, RAGGED])
@pytest.mark.parametrize("build", [plain, normed])
def test_columns_and_frozen_nets_are_each_clients_own(build, sizes):
    def taught():
        found = []
        for id, fit in enumerate(fits_for(build, sizes, objectives=Taught())):
            draws = torch.Generator().manual_seed(100 + id)
            readers = {"reader": nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout()), "twin": build()}
            for net in readers.values():
                for tensor in net.state_dict().values():
                    if tensor.is_floating_point():
                        tensor.copy_(torch.rand(tensor.shape, generator=draws))
            size = sizes[id]
            columns = {"teacher": torch.randn(size, 3, generator=draws), "weight": torch.rand(size, generator=draws)}
            found.append(replace(fit, data=fit.data.with_columns(**columns), frozen=readers))
        return found

    one_by_one, together = taught(), taught()
    before = [weights_of(nn.ModuleDict(fit.frozen)) for fit in together]
    assert stacking_key(together[0]) == stacking_key(together[1])
    expected = [train(fit, key) for fit, key in zip(one_by_one, KEYS, strict=True)]
    agree((one_by_one, expected), (together, train_stacked(together, KEYS)))
    assert_close([weights_of(nn.ModuleDict(fit.frozen)) for fit in together], before, rtol=0, atol=0)
    assert all(net.training for fit in together for net in fit.frozen.values())


def test_fits_whose_frozen_nets_or_columns_differ_in_kind_are_not_stacked_together():
    one, two = fits_for(plain, EVEN[:2])
    assert stacking_key(one) == stacking_key(two)
    assert stacking_key(replace(one, frozen={"a": plain()})) != stacking_key(replace(two, frozen={"b": plain()}))
    assert stacking_key(replace(one, frozen={"a": plain()})) != stacking_key(replace(two, frozen={"a": normed()}))
    assert stacking_key(replace(one, data=one.data.with_columns(a=torch.zeros(8)))) != stacking_key(two)


@dataclass(frozen=True)
class Pull:
    """Towards an anchor, and what the net puts out."""

    def __call__(self, net, batch, extras):
        gaps = [(parameter - extras["anchor"][name]).square().sum() for name, parameter in net.named_parameters()]
        outputs = net(batch[0])
        return torch.stack(gaps).sum() + 0 * outputs.sum(), {"outputs": outputs}


@dataclass(frozen=True)
class Weigh:
    """Another part of each objective for every client."""

    def __call__(self, gradients, extras):
        first, second = gradients
        return {name: first[name] + extras["share"] * second[name] for name in first}


@dataclass(frozen=True)
class Shrink:
    def __call__(self, weights, extras, lr):
        return {name: tensor * (1 - lr * extras["share"]) for name, tensor in weights.items()}


def anchored(draws):
    anchor = {name: torch.rand(t.shape, generator=draws) for name, t in plain().named_parameters()}
    return {"anchor": anchor, "share": torch.rand((), generator=draws), "absent": None}


@pytest.mark.parametrize("sizes", [EVEN, RAGGED])
def test_several_objectives_hooks_and_observations_agree(sizes):
    agree(*both_ways(plain, sizes, objectives=[TASK, Pull()], extras=anchored, keep=4))
    hooks = {"combine": Weigh(), "after_step": Shrink(), "trainable": ("2.",)}
    agree(*both_ways(plain, sizes, objectives=[TASK, Pull()], extras=anchored, keep=4, **hooks))


def test_what_is_not_trained_stays():
    before = [weights_of(fit.net) for fit in fits_for(plain)]
    _, (fits, _) = both_ways(plain, trainable=("2.",))
    for fit, old in zip(fits, before, strict=True):
        new = weights_of(fit.net)
        assert all(torch.equal(new[name], old[name]) for name in ("0.weight", "0.bias"))
        assert not torch.equal(new["2.weight"], old["2.weight"])


def part_frozen():
    """A frozen layer with a BatchNorm in evaluation mode behind it, and a bias of its own that is frozen."""
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    net[0].requires_grad_(False)
    net[1].eval()
    net[3].bias.requires_grad_(False)
    return net


def linear_part_frozen():
    """One that goes end to end."""
    net = plain()
    net[0].requires_grad_(False)
    return net


@pytest.mark.parametrize("build", [part_frozen, linear_part_frozen])
def test_what_is_frozen_stays(build):
    before = [frozen_of(fit.net) for fit in fits_for(build, RAGGED)]
    training = replace(SGD, weight_decay=0.1, momentum=0.9, clip_norm=1.0)
    one_by_one, together = both_ways(build, RAGGED, training)
    agree(one_by_one, together)
    for fits, _ in (one_by_one, together):
        for fit, old in zip(fits, before, strict=True):
            assert len(old) >= 2
            assert_close(frozen_of(fit.net), old, rtol=0, atol=0)


# Who can be stacked


def test_nets_with_other_frozen_layers_are_not_alike():
    kinds = [stacking_key(fits_for(build)[0]) for build in (plain, linear_part_frozen)]
    held = fits_for(normed)[0]
    held.net[1].eval()
    kinds += [stacking_key(fits_for(normed)[0]), stacking_key(held)]
    assert all(one != other for one, other in itertools.combinations(kinds, 2))


def test_a_net_that_is_all_frozen_is_left_to_the_one_by_one():
    fits = fits_for(plain)
    for fit in fits:
        fit.net.requires_grad_(False)
    with pytest.raises(CannotStack, match="nothing to train"):
        train_stacked(fits, KEYS)


def test_fits_are_alike_whatever_their_weights_and_data():
    first, second, _ = fits_for(plain, RAGGED, extras=anchored)
    assert stacking_key(first) == stacking_key(second)


@pytest.mark.parametrize(
    "other",
    [
        {"build": normed},
        {"training": replace(SGD, lr=0.2)},
        {"objectives": Pull()},
        {"extras": lambda draws: {}},
        {"combine": Weigh()},
        {"trainable": ("2.",)},
        {"keep": 3},
    ],
)
def test_fits_that_differ_in_what_they_do_are_not(other):
    first, second = (fits_for(**{"build": plain, "extras": anchored, **options})[0] for options in ({}, other))
    assert stacking_key(first) != stacking_key(second)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"build": dropping}, "random"),
        ({"build": plain, "objectives": [TASK, TASK], "turns": [("0.",), ("2.",)]}, "turns"),
        ({"build": plain, "extras": lambda draws: {"n": int(torch.randint(9, (), generator=draws))}}, "differs"),
    ],
)
def test_what_cannot_be_stacked_is_refused_and_nothing_has_moved(options, reason):
    fits = fits_for(**options)
    with pytest.raises(CannotStack, match=reason):
        train_stacked(fits, KEYS)
    for fit, fresh in zip(fits, fits_for(**options), strict=True):
        assert_close(weights_of(fit.net), weights_of(fresh.net), rtol=0, atol=0)


# The executor


@dataclass(frozen=True)
class Learns(Method):
    """Two fits a client, one after the other, the second on a net of its own making."""

    build: str = "plain"

    def init(self, server):
        return {}

    def round(self, state, cohort, server):
        return dict(cohort.ask(self.work, Message()))

    @on_client
    def work(self, client, message):
        first = yield Fit(client.model, client.objective, client.train, SGD)
        second = client.build()
        report = yield Fit(second, client.objective, client.train, replace(SGD, lr=0.05), name="second")
        drawn = torch.rand(2)
        weights = {"first": weights_of(client.model), "second": weights_of(second)}
        return Message(losses=torch.tensor([first.loss, report.loss]), drawn=drawn, **weights)


def federation(builders, sizes):
    sites = {}
    for id, size in enumerate(sizes):
        draws = torch.Generator().manual_seed(id)
        part = Examples(torch.randn(size, 5, generator=draws), torch.randint(3, (size,), generator=draws))
        nothing = empty_like(part)
        sites[id] = Site(id, f"net{id % len(builders)}", part, nothing, nothing)
    nets = {f"net{number}": build for number, build in enumerate(builders)}
    return Federation(sites, nets, "net0", num_classes=3)


def replies(executor, builders=(plain, normed), sizes=(8, 11, 3, 6, 7, 9, 5), **options):
    engine = Engine(Learns(), federation(builders, sizes), executor=executor, **options)
    try:
        state, report = engine.round(1, {}, range(len(sizes)))
    finally:
        engine.close()
    return {id: dict(reply) for id, reply in state.items()}, report


def close(found, expected):
    assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("at_once", [1, 2, 3, 10])
def test_an_exchange_agrees_whoever_is_together(at_once):
    close(replies(Stacked(at_once=at_once))[0], replies(Sequential())[0])


@pytest.mark.skipif(not can_fork(), reason="this system cannot fork")
def test_how_many_workers_stack_does_not_matter():
    one, three = (replies(Workers(count, Stacked(at_once=3)))[0] for count in (1, 3))
    assert_close(one, three, rtol=0, atol=0)
    close(one, replies(Sequential())[0])


def test_clients_with_one_kind_of_net_are_trained_together(monkeypatch):
    groups = []

    def counting(fits, keys, computing):
        groups.append(len(fits))
        return train_stacked(fits, keys, computing)

    monkeypatch.setattr("potluck.engine.executors.stacked.train_stacked", counting)
    replies(Stacked())
    assert groups == [4, 4, 3, 3]


def test_what_cannot_be_stacked_is_trained_one_by_one_and_said_once(caplog):
    with caplog.at_level(logging.INFO):
        found, _ = replies(Stacked(), (dropping,))
    expected, _ = replies(Sequential(), (dropping,))
    assert_close(found, expected, rtol=0, atol=0)
    told = [record.message for record in caplog.records if "one client at a time" in record.message]
    assert len(told) == 1
    assert "random" in told[0]


def test_a_client_without_examples_fails_alone():
    found, report = replies(Stacked(), (plain,), sizes=(8, 0, 8), tolerate_failures=True)
    assert list(found) == [0, 2]
    assert "0 training examples" in report.failures[1].reason
    close(found, replies(Sequential(), (plain,), sizes=(8, 0, 8), tolerate_failures=True)[0])


def test_the_rule_leaves_convolutions_alone(monkeypatch):
    monkeypatch.setattr("potluck.engine.executors.stacked.train_stacked", None)
    found, _ = replies(Stacked(pays), (convolutional,))
    assert_close(found, replies(Sequential(), (convolutional,))[0], rtol=0, atol=0)
    assert small_products(plain())


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("aaaaaaa", [[0, 1, 2], [3, 4, 5, 6]]),  # two cores have something to do
        ("a" * 11, [[0, 1], [2, 3, 4], [5, 6, 7], [8, 9, 10]]),  # evenly
        ("abab", [[0, 2], [1, 3]]),
        ("a", [[0]]),
        ("", []),
    ],
)
def test_tasks_of_one_kind_are_bundled(kinds, expected):
    assert (
        bundles([Pending(lambda: None, kind=kind) for kind in kinds], at_once=4 if len(kinds) < 11 else 3) == expected
    )


class Doubled(Supervised):
    """Derives from the task's objective and is another."""

    def __call__(self, net, batch, extras):
        return 2 * super().__call__(net, batch, extras)


def test_an_objective_derived_from_the_tasks_own_is_not_taken_for_it():
    agree(*both_ways(plain, RAGGED, objectives=Doubled(F.cross_entropy)))


@pytest.mark.parametrize("sizes", [EVEN, RAGGED])
def test_combined__is_the_mean_over_each_clients_own_steps(sizes):
    def first(gradients, extras):
        largest = torch.stack([gradient.abs().max() for gradient in gradients[0].values()]).max()
        return gradients[0], {"largest": largest, "one": torch.ones(())}

    one, other = both_ways(plain, sizes, combine=first)
    agree(one, other)
    assert all(report.combined["one"] == 1 and report.combined["largest"] > 0 for report in other[1])
    assert len({report.combined["largest"] for report in other[1]}) == len(sizes)
