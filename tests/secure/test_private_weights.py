"""Noise in secure sums: that there is enough of it whoever leaves, what one client can move, and what is stated."""

import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import potluck
from potluck.attackers.settings import Attackers
from potluck.attacks.audit import audit
from potluck.core.ground.errors import ConfigError
from potluck.core.roles import ClientFailure, Failure
from potluck.engine.client import clipping
from potluck.engine.executors.choice import ChosenExecutor
from potluck.engine.executors.sequential import Sequential
from potluck.experiment.folder.branch import branch
from potluck.experiment.running.run import Run
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import RunConfig
from potluck.experiment.settings.secure import SecureRule
from potluck.methods import get_method
from potluck.parts import privacy
from potluck.parts.privacy import FURTHEST, SumPrivacy
from potluck.records import MANIFEST, RELEASES
from potluck.testing.worlds import World, quick, toy_federation

from ..carried_out import carried_out

CLIP = 0.5
MECHANISM = SumPrivacy(noise_multiplier=2.0, delta=1e-5)
UNIFORM = quick(get_method("fedavg"), ["sharing.weighting=uniform", "training.lr=0.2"])
WORLD = World(clients=7, architectures=1, width=64)
LEAVING = (2, 5)  # of seven, as many as may


class Leaving(Sequential):
    """Some clients leave after their training."""

    def run(self, host, tasks):
        for outcome in super().run(host, tasks):
            left = outcome.client in LEAVING
            yield Failure(outcome.client, "left", "it has left", kind="absence") if left else outcome


def played(method=UNIFORM, world=WORLD, by=None, **config):
    """The server's weights after a run, and the run."""
    choice = ChosenExecutor(by or Sequential(), "sequential", 1, "")
    given = {"rounds": 1, "clip_update": CLIP, "secure_sums": True, "private_weights": MECHANISM}
    given |= {"common_test": False, "evaluate_clients": 1}
    run = Run(method, toy_federation(world), RunConfig(**{**given, **config}), choice=choice)
    run.run()
    return run._state.weights["all"], run


@pytest.fixture
def silenced(monkeypatch):
    """Runs something with the noise left out, to know what it was added to."""

    def call(what):
        with monkeypatch.context() as patch:
            patch.setattr(privacy, "_noise", partial(torch.zeros, dtype=torch.float64))
            return what()

    return call


def gaps(weights, others, survivors):
    """What two sums differ by, of means over so many clients."""
    return {name: survivors * (weights[name].double() - others[name].double()) for name in weights}


def flat(tensors):
    return torch.cat([tensor.flatten() for _, tensor in sorted(tensors.items())])


# The noise of those who stay


@pytest.mark.parametrize(("clients", "members"), [(3, 3), (7, 7), (10, 10), (10, 6), (30, 11), (30, 5)])
def test_the_noise_of_those_who_stay_is_enough_however_many_leave_that_may(clients, members):
    may_leave = clients - (2 * clients // 3 + 1)
    values, numbers = {"w": torch.zeros(100, 200)}, [(np.arange(20_000), members)]
    stay = max(1, members - may_leave)
    total = sum(MECHANISM.noisy(values, CLIP, numbers, may_leave)["w"] for _ in range(stay))
    needed = MECHANISM.noise_multiplier * CLIP
    assert float(total.std()) == pytest.approx(needed, rel=0.03)  # six deviations of chance
    assert MECHANISM.deviation(CLIP, members, may_leave) * math.sqrt(stay) == pytest.approx(needed)


def test_each_number_has_the_noise_of_those_who_have_it_where_the_agreement_says_that_it_lies():
    values = {"b": torch.ones(4, 5000), "a": torch.ones(3000)}  # by name, `a` comes first
    rare, common = np.arange(3000, 13_000), np.concatenate([np.arange(3000), np.arange(13_000, 23_000)])
    found = MECHANISM.noisy(values, CLIP, [(rare, 3), (common, 12)], may_leave=3)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == {
        name: (tensor.shape, torch.float64) for name, tensor in values.items()
    }
    deviations = [MECHANISM.deviation(CLIP, members, 3) for members in (3, 12)]
    assert deviations[0] == pytest.approx(3 * deviations[1])
    assert float((found["b"][:2] - 1).std()) == pytest.approx(deviations[0], rel=0.05)
    assert float((found["b"][2:] - 1).std()) == pytest.approx(deviations[1], rel=0.05)
    assert float((found["a"] - 1).std()) == pytest.approx(deviations[1], rel=0.08)


def test_a_number_without_noise_is_refused():
    with pytest.raises(ValueError, match="would have no noise"):
        MECHANISM.noisy({"w": torch.zeros(5)}, CLIP, [(np.arange(4), 3)], 0)


def test_no_noise_is_further_from_zero_than_there_is_room_for(monkeypatch):
    for byte in (b"\x00", b"\xff"):
        monkeypatch.setattr(privacy, "urandom", lambda count, byte=byte: byte * count)
        assert 8 < float(privacy._noise(torch.Size([1])).abs()) < FURTHEST


def noises(silenced):
    """What the servers of two runs of one seed get beside the sum of the updates, when as many have left as may."""
    once = partial(played, by=Leaving(), tolerate_failures=True)
    (one, run), (two, _), (clean, _) = once(), once(), silenced(once)
    assert run._engine.ledger.releases.keys() == set(range(7)) - set(LEAVING)
    return [gaps(noisy, clean, 7 - len(LEAVING)) for noisy in (one, two)]


def check_noise(one, two):
    """That of two runs of one seed, each sum has noise enough, and knowing that of one tells nothing of the other."""
    z = [flat(noise) / (MECHANISM.noise_multiplier * CLIP) for noise in (one, two)]
    assert all(float(found.std()) == pytest.approx(1, abs=0.06) for found in z)
    assert abs(float(torch.corrcoef(torch.stack(z))[0, 1])) < 0.1


def test_a_runs_sum_has_the_noise_that_is_claimed_with_the_most_that_may_leave(silenced):
    check_noise(*noises(silenced))


def from_a_seed(shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_noise_from_a_known_seed_is_noticed(silenced, monkeypatch):
    monkeypatch.setattr(privacy, "_noise", from_a_seed)
    with pytest.raises(AssertionError):
        check_noise(*noises(silenced))


def test_noise_that_counts_on_everybody_to_stay_is_noticed(silenced, monkeypatch):
    of_all = SumPrivacy.deviation
    monkeypatch.setattr(SumPrivacy, "deviation", lambda self, clip, members, may_leave: of_all(self, clip, members, 0))
    with pytest.raises(AssertionError):
        check_noise(*noises(silenced))


def test_layers_that_few_clients_have_get_more_noise_of_each(silenced):
    world = replace(WORLD, architectures=2)  # the deeper network is that of clients 1, 3 and 5
    (noisy, _), (clean, _) = played(world=world), silenced(lambda: played(world=world))
    deep = {name for name in noisy if name.startswith("stages.hidden2")}
    for names, members in ((deep, 3), (noisy.keys() - deep, 7)):
        found = flat(gaps({n: noisy[n] for n in names}, {n: clean[n] for n in names}, members))
        expected = MECHANISM.deviation(CLIP, members, 2) * math.sqrt(members)
        assert expected >= MECHANISM.noise_multiplier * CLIP
        assert float(found.std()) == pytest.approx(expected, rel=0.07)


# What one client moves


def moved_by_one(silenced, client=3):
    """How far a sum moves in L2 if a client contributes nothing: it sends what it was sent."""
    (full, _), (without, _) = (
        silenced(lambda one=one: played(attackers=one)) for one in (None, Attackers("free_rider", clients=(client,)))
    )
    return float(flat(gaps(full, without, 7)).norm())


def test_a_client_moves_the_sum_by_no_more_than_the_clip(silenced):
    assert 0.9 * CLIP < moved_by_one(silenced) <= CLIP * (1 + 1e-3)  # means are rounded to single precision


def test_clipping_left_out_is_noticed(silenced, monkeypatch):
    monkeypatch.setattr(clipping, "clipped_update", lambda reply, of, most: (reply, 1.0))
    assert moved_by_one(silenced) > 2 * CLIP


# What is stated


def integrated_delta(ratio, epsilon):
    """delta = integral of max(0, p - e^epsilon q) for p = N(ratio, 1), q = N(0, 1): the definition."""
    x = torch.linspace(-14, ratio + 14, 400_001, dtype=torch.float64)
    p = torch.exp(-((x - ratio) ** 2) / 2) / math.sqrt(2 * math.pi)
    q = torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    return float(torch.trapezoid((p - math.exp(epsilon) * q).clamp(min=0), x))


@pytest.mark.parametrize("releases", [1, 10, 100])
@pytest.mark.parametrize("multiplier", [1.0, 5.0])
def test_the_epsilon_of_many_sums_is_that_of_one_whose_noise_is_less_by_their_root(releases, multiplier):
    mechanism = SumPrivacy(multiplier, 1e-5)
    found = integrated_delta(math.sqrt(releases) / multiplier, mechanism.spent(releases))
    assert found == pytest.approx(1e-5, rel=1e-3)


def test_without_a_sum_there_is_no_epsilon():
    with pytest.raises(ValueError, match="releases: expected at least 1"):
        MECHANISM.spent(0)
    assert MECHANISM.statement({}, alone=True).startswith("Nothing was added to sums, so no epsilon")


def shown_at_least(mechanism, canaries=4000, clients=10, may_leave=3):
    """The epsilon that guesses show: each number of one client's update is a canary's, the clip or nothing."""
    coins = torch.rand(canaries, generator=torch.Generator().manual_seed(1)) < 0.5
    own, nothing = {"w": CLIP * coins.double()}, {"w": torch.zeros(canaries)}
    numbers = [(np.arange(canaries), clients)]
    addends = [own, *[nothing] * (clients - may_leave - 1)]
    total = sum(mechanism.noisy(values, CLIP, numbers, may_leave)["w"] for values in addends)
    return audit(coins.tolist(), (total - CLIP / 2).tolist(), MECHANISM.delta).lower


def test_a_sum_shows_less_than_is_stated_and_one_with_too_little_noise_more():
    assert 0.3 < shown_at_least(MECHANISM) < MECHANISM.spent(1)
    assert shown_at_least(replace(MECHANISM, noise_multiplier=0.3)) > MECHANISM.spent(1)


TABLES = {
    "federation": {"dataset": "digits", "clients": 6, "train_fraction": 0.1, "models": [{"name": "mlp2", "width": 4}]},
    "method": {"name": "fedavg", "training": {"epochs": 1}, "sharing": {"weighting": "uniform"}},
    "run": {
        "secure_sums": True,
        "clip_update": 1.0,
        "private_weights": {"noise_multiplier": 2.0, "delta": 1e-5},
        "common_test": False,
        "cohort_fraction": 0.7,
        "executor": "sequential",
    },
}


def stated(folder, rounds):
    """The statement of a run in a folder, which goes on with it if there is one, and its manifest and records."""
    result = carried_out(folder, {**TABLES, "run": {**TABLES["run"], "rounds": rounds}})
    manifest = json.loads((folder / MANIFEST).read_text())
    return manifest["privacy"], manifest, result.rounds


@pytest.mark.slow
def test_a_run_states_the_epsilon_of_the_client_that_took_part_most_also_when_it_was_resumed(tmp_path):
    said, manifest, rounds = stated(tmp_path / "whole", 3)
    times = {client: sum(client in record.cohort for record in rounds) for client in range(6)}
    assert set(times.values()) != {3}  # cohorts are partial
    counts = json.loads((tmp_path / "whole" / RELEASES).read_text())
    assert {int(client): made for client, (made, _, _) in counts.items()} == {c: n for c, n in times.items() if n}
    epsilon = SumPrivacy(2.0, 1e-5).spent(max(times.values()))
    found = float(said.split("epsilon ")[1].split()[0])
    assert epsilon <= found < 1.01 * epsilon
    assert "fewer than a third leave or tell their noise" in said
    assert "no epsilon can be stated for the run as a whole" in said
    assert "nobody was protected" in said
    assert "another run of this seed differs" in manifest["computing"]["private_noise"]
    stated(tmp_path / "parts", 1)
    assert stated(tmp_path / "parts", 3)[0] == said


@pytest.mark.slow
def test_a_branch_keeps_the_noise_of_its_run_or_promises_none(tmp_path):
    run = {**TABLES["run"], "rounds": 1}
    loud = {**run, "private_weights": {"noise_multiplier": 9.0, "delta": 1e-5}}
    none = {key: value for key, value in run.items() if key != "private_weights"}
    carried_out(tmp_path / "private", {**TABLES, "run": run})
    carried_out(tmp_path / "plain", {**TABLES, "run": none})
    for folder, later in (("private", loud), ("plain", run)):
        with pytest.raises(
            ConfigError, match=r"run\.private_weights.* changed, and sums of its first 1 rounds"
        ) as caught:
            branch(tmp_path / folder, resolve({**TABLES, "run": {**later, "rounds": 2}}), tmp_path)
        assert "\n" not in str(caught.value)
    branch(tmp_path / "private", resolve({**TABLES, "run": {**none, "rounds": 2}}), tmp_path)
    onward = {**TABLES, "run": {**run, "rounds": 2, "cohort_fraction": 1.0}}
    place = branch(tmp_path / "private", resolve(onward), tmp_path)
    carried_out(place, onward)
    said = json.loads((place / MANIFEST).read_text())["privacy"]
    assert " did so 2 times; " in said


def test_in_python_the_result_has_the_statement():
    settings = {"federation.train_fraction": 0.1, "method.sharing.weighting": "uniform", "run.secure_sums": True}
    settings |= {"run.clip_update": 1.0, "run.private_weights": {"noise_multiplier": 1.0, "delta": 1e-5}}
    result = potluck.run("fedavg", clients=4, models=[{"name": "mlp2", "width": 4}], rounds=1, settings=settings)
    assert result.privacy.startswith("Weights: epsilon 4.38 at delta 1e-05 for all that one client adds to sums")
    assert result.rounds[0].notes is None or not any("update" in name for name in result.rounds[0].notes)


# What is refused


class Refusing(Sequential):
    """Nothing may train."""

    def run(self, host, tasks):
        raise AssertionError("it trains")


@pytest.mark.parametrize(
    ("name", "assignments", "world", "config", "said"),
    [
        ("fedavg", [], {}, {}, r"^run.private_weights: found all/weights/.* weighed by examples"),
        ("fjord", ["levels=[1.0, 0.5]"], {}, {}, "^run.private_weights: found .* weighed by examples"),
        ("fedin", [], {}, {}, r"^run.private_weights: found features\.s_in, which is sent and in no sum"),
        ("scaffold", [], {"batchnorm": True}, {}, r"^run.private_weights: found .*running_var, a variance"),
        ("fedproto", [], {}, {}, "^run.clip_update: found FedProto, whose clients send what they have measured"),
        (
            "scaffold",
            [],
            {},
            {"secure_sums": SecureRule(largest=8.0)},
            r"^run.secure_sums.largest: found 8; expected at",
        ),
        ("scaffold", [], {}, {"secure_sums": SecureRule(bits=8)}, r"^run.secure_sums.bits: found 8, units of"),
    ],
)
def test_what_is_not_private_is_refused_in_one_line_before_anything_trains(name, assignments, world, config, said):
    method = quick(get_method(name), assignments)
    with pytest.raises(ConfigError, match=said) as caught:
        played(method, replace(WORLD, **world).fit_for(method), Refusing(), **config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"secure_sums": True}, "clip_update: expected a number with private_weights"),
        ({"clip_update": 1.0}, "secure_sums: expected true with private_weights"),
    ],
)
def test_it_needs_a_bound_and_sums(config, said):
    with pytest.raises(ConfigError, match=said):
        RunConfig(private_weights=MECHANISM, **config)


@pytest.mark.parametrize(
    "wrong", [{"noise_multiplier": 0.0}, {"delta": 0.0}, {"delta": 1.0}, {"noise_multiplier": math.inf}]
)
def test_numbers_that_claim_nothing_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))}: expected"):
        SumPrivacy(**{"noise_multiplier": 1.0, "delta": 1e-5, **wrong})


@pytest.mark.parametrize(
    ("name", "assignments"),
    [
        ("scaffold", []),
        ("fedopt", ["sharing.weighting=uniform", "optimizer=momentum"]),
        ("heterofl", ["levels=[1.0, 0.5]"]),
        ("fedrolex", ["levels=[1.0, 0.5]"]),
        ("depthfl", ["levels=[1.0, 0.5]"]),
        ("lgfedavg", ["weighting=uniform"]),
        ("fedin", ["feature_training=false"]),
        ("fednova", ["sharing.weighting=uniform"]),
    ],
)
@pytest.mark.slow
def test_methods_whose_clients_count_once_are_private(name, assignments):
    method = quick(get_method(name), assignments)
    world = World(clients=8, architectures=1).fit_for(method)
    run = Run(
        method,
        toy_federation(world),
        RunConfig(
            rounds=1, clip_update=0.01, secure_sums=True, private_weights=SumPrivacy(0.5, 1e-5), common_test=False
        ),
    )
    (record,) = run.run().rounds
    assert record.lost is None
    assert record.secure["clipped"] == 0
    assert run.releases.keys() == set(range(8))
    assert run.privacy.startswith("Weights: epsilon ")


def test_what_is_measured_in_a_later_exchange_does_not_leave():
    method = quick(get_method("heterofl"), ["levels=[1.0]"])
    world = World(clients=5, architectures=1, batchnorm=True, capacity=1.0)
    with pytest.raises(ClientFailure, match=r"HeteroFL\.measure: ConfigError: run\.private_weights: found statistics/"):
        played(method, world)
