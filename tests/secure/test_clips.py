"""Runs whose clients clip their own updates: whatever carries the work out, nothing longer leaves, liars apart."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from potluck import fl
from potluck.attackers.settings import Attackers
from potluck.core.ground.errors import ConfigError, DivergenceError
from potluck.core.message import Message
from potluck.core.summed import tensor_at
from potluck.engine.client.session import Answer
from potluck.engine.executors.choice import ChosenExecutor
from potluck.engine.executors.sequential import Sequential
from potluck.engine.executors.stacked import Stacked
from potluck.engine.executors.workers import Workers, can_fork
from potluck.experiment.running.run import Run
from potluck.experiment.settings.budget import Budget
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import RunConfig
from potluck.methods import get_method
from potluck.methods.fedavg import FedAvg
from potluck.testing.worlds import World, packed_state, quick, toy_federation

from .test_methods import SUMMING

CLIP = 0.01
WORLD = World(clients=4)
ALIKE = World(clients=4, architectures=1)
UNIFORM = quick(get_method("fedavg"), ["sharing.weighting=uniform"])
ROWS = ("fedproto", "fd")


class Listening(Sequential):
    """Hears what leaves clients, and of which calls it is the reply."""

    def __init__(self):
        self.left = []

    def run(self, host, tasks):
        for task in tasks:
            call = task.make()
            outcome = host.execute(call)
            if isinstance(outcome, Answer):
                self.left.append((host, call, Message.decode(outcome.payload)))
            yield outcome

    @property
    def lengths(self):
        """The L2 norm of each update that has left."""
        return [update_norm(*one) for one in self.left]


def update_norm(host, call, reply):
    tensors = host.summed(call, reply).tensors
    gaps = [
        tensor_at(reply, path).double() - one.keep.double()
        for path, one in tensors.items()
        if isinstance(one.keep, Tensor)
    ]
    return math.sqrt(sum(float(gap.square().sum()) for gap in gaps))


def played(method=UNIFORM, world=ALIKE, by=None, **config):
    """A run that is over, and its records."""
    choice = ChosenExecutor(by, "sequential", 1, "") if by is not None else None
    given = {"rounds": 1, "clip_update": CLIP, "common_test": False, **config}
    run = Run(method, toy_federation(world), RunConfig(**given), choice=choice)
    return run, run.run().rounds


def moved(run):
    """How far the server's weights have moved from the run's initial ones, in L2."""
    before = run._engine.method.init(run._engine.server(0)).weights["all"]
    after = run._state.weights["all"]
    return math.sqrt(sum(float((after[name].double() - before[name].double()).square().sum()) for name in before))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "assignments"), [one for one in SUMMING if one[0] not in ROWS])
def test_of_every_method_that_has_updates_none_leaves_that_is_longer(name, assignments):
    method = quick(get_method(name), assignments)
    world = replace(WORLD, batchnorm=True).fit_for(method)
    ears, free = Listening(), Listening()
    _, (record,) = played(method, world, ears)
    _, (plain,) = played(method, world, free, clip_update=None)
    assert record.lost is None
    assert max(free.lengths) > CLIP  # so that there was something to clip
    assert 0.5 * CLIP < max(ears.lengths) <= CLIP
    assert 0 < record.notes["clients/update_scale"] < 1
    assert "clients/update_scale" not in (plain.notes or {})
    assert record.bytes_up_by_entry == plain.bytes_up_by_entry


@pytest.mark.parametrize("make", [Sequential, Stacked, lambda: Workers(2)], ids=["sequential", "stacked", "workers"])
def test_wherever_clients_work_their_mean_moves_the_server_no_further(make):
    executor = make()
    if isinstance(executor, Workers) and not can_fork():
        pytest.skip("this system cannot fork")
    run, _ = played(by=executor)
    assert 0.5 * CLIP < moved(run) <= CLIP * 1.001  # the mean is rounded to single precision
    run, _ = played(by=Sequential(), clip_update=None)
    assert moved(run) > 2 * CLIP


@pytest.mark.slow
def test_where_clients_are_measured_by_themselves_they_clip_too():
    budgets = tuple(Budget((client,), memory_mib=1000.0) for client in range(4))
    run, (record,) = played(budgets=budgets, executor="sequential")
    assert moved(run) <= CLIP * 1.001
    assert record.notes["clients/update_scale"] < 1


def test_a_bound_that_no_update_reaches_changes_no_bit():
    runs = [played(by=Sequential(), clip_update=most, rounds=2)[0] for most in (None, 1e6)]
    assert len({packed_state(run._state) for run in runs}) == 1


def test_secure_sums_are_of_clipped_updates_and_their_notes_tell_no_norm():
    world = replace(ALIKE, clients=5)
    plain, _ = played(world=world, by=Sequential())
    secure, (record,) = played(world=world, by=Sequential(), secure_sums=True)
    for name, tensor in plain._state.weights["all"].items():
        torch.testing.assert_close(secure._state.weights["all"][name], tensor, rtol=1e-5, atol=1e-6)
    assert moved(secure) <= CLIP * 1.001
    assert record.notes["clients/update_clipped"] == 1.0
    assert "clients/update_scale" not in record.notes


def test_a_liar_does_not_clip():
    honest, _ = played(by=Sequential())
    lying, _ = played(by=Sequential(), attackers=Attackers("scaled", clients=(2,), strength=1000.0))
    assert moved(honest) <= CLIP * 1.001
    assert moved(lying) > 10 * CLIP


def test_a_robust_rule_may_stand_behind_it():
    method = quick(get_method("fedavg"), ["sharing.combine.rule=median"])
    ears = Listening()
    played(method, by=ears)
    assert max(ears.lengths) <= CLIP


@dataclass(frozen=True)
class Broken(FedAvg):
    """Its client 1 sends a number that is none."""

    @fl.on_client
    def local_update(self, client, message):
        reply = yield from super().local_update(client, message)
        if client.id == 1:
            next(iter(reply["weights"].values())).view(-1)[0] = math.nan
        return reply


def test_an_update_that_is_not_finite_is_that_clients_divergence_and_does_not_leave():
    method, ears = replace(Broken(), training=UNIFORM.training), Listening()
    with pytest.raises(DivergenceError, match=r"client 1 diverged in Broken\.local_update: its update is NaN or"):
        played(method, by=ears)
    _, (record,) = played(method, by=ears, tolerate_failures=True)
    assert list(record.failed) == ["1"]
    assert 1 not in {call.client for _, call, _ in ears.left}


@pytest.mark.parametrize(
    ("name", "assignments", "said"),
    [
        (
            "fedtgp",
            [],
            "found FedTGP, which needs single replies: its server reads each client's own; expected a method",
        ),
        ("local", [], "found Local, which needs single replies"),
        ("fedavg", ["sharing.scope=none"], "found FedAvg, which needs single replies: it averages nothing"),
        ("fd", [], "found FD, which needs single replies: a client is sent the mean of the others'"),
        ("fd", ["averaged=all"], "found FD, whose clients send what they have measured, such as means of classes"),
        ("fedproto", [], "found FedProto, whose clients send what they have measured"),
    ],
)
def test_methods_without_updates_are_refused_in_one_line_before_anything_trains(name, assignments, said):
    method, ears = quick(get_method(name), assignments), Listening()
    with pytest.raises(ConfigError, match=f"^run.clip_update: {said}") as caught:
        played(method, WORLD.fit_for(method), ears)
    assert "\n" not in str(caught.value)
    assert ears.left == []


@pytest.mark.parametrize("most", [0.0, -1.0, math.inf, math.nan])
def test_a_bound_that_is_none_is_refused(most):
    with pytest.raises(ConfigError, match=r"^clip_update: expected"):
        RunConfig(clip_update=most)


def test_who_says_nothing_of_it_has_the_experiment_of_before():
    tree = {"method": {"name": "fedavg"}}
    plain, clipped = (resolve({**tree, "run": run}) for run in ({}, {"clip_update": 1}))
    assert "clip_update" not in plain.toml()
    assert "private_weights" not in plain.toml()
    assert plain.run.clipping is None
    assert clipped.run.clip_update == 1.0
    assert resolve(clipped.tree()).run == clipped.run
    assert plain.experiment_id != clipped.experiment_id
