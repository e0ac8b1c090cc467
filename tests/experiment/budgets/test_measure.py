from dataclasses import asdict

import pytest
import torch
from torch.utils._pytree import tree_leaves

from potluck.core.ground.errors import ConfigError
from potluck.engine.executors import Executor
from potluck.engine.executors.metered import MeteredAnswer, metered
from potluck.engine.rounds.engine import Engine
from potluck.experiment.budgets.apart import Origin, by_itself, stored_bytes
from potluck.experiment.budgets.candidates import candidates_of, capacities_known, with_candidates
from potluck.experiment.budgets.measure import Bench
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.settings.presets import experiment_for

SMALL = ("federation.clients=3", "run.executor=sequential")


def experiment(method, *assignments):
    return experiment_for(method, [*SMALL, *assignments])


def names(made):
    return [str(one) for one in candidates_of(made, assemble(made).federation)]


def test_candidates_are_the_models_the_largest_first():
    assert names(experiment("fedavg", "federation.models=cnn2,cnn6,cnn2,cnn3")) == ["cnn6", "cnn3", "cnn2"]


def test_candidates_of_a_method_with_levels_are_these():
    assert capacities_known(experiment("heterofl", "method.levels=[1.0, 0.5]")) == (0.5, 1.0)
    assert names(experiment("heterofl", "method.levels=[1.0, 0.5]", "federation.models=preresnet18"))[-1] == (
        "preresnet18 at 0.5"
    )


def test_candidates_of_fedepth_are_the_federation_s_capacities():
    assert capacities_known(experiment("fedepth", "federation.capacities=[1.0, 0.5, 0.5]")) == (0.5, 1.0)


def test_a_method_without_capacities_has_one():
    assert capacities_known(experiment("slimfl")) == (1.0,)  # whose levels are for another end


@pytest.mark.parametrize("chosen", [["cnn6"] * 3, ["cnn2", "cnn6", "cnn3"]])
def test_the_server_keeps_its_model_whatever_is_chosen(chosen):
    made = experiment("fml", "federation.models=cnn2,cnn3,cnn6")
    federation = assemble(made).federation
    by_name = {str(one): one for one in candidates_of(made, federation)}
    found = assemble(with_candidates(made, federation, [by_name[name] for name in chosen])).federation
    assert found.server_architecture == federation.server_architecture == "cnn2"
    assert [found.sites[client].architecture for client in range(3)] == chosen


def test_what_draws_its_clients_parts_is_refused():
    with pytest.raises(ConfigError, match=r"method.assignment: found 'dynamic'"):
        Bench(experiment("heterofl", "method.assignment=dynamic"))


def test_examples_that_are_alone_are_the_same_and_share_nothing():
    site = assemble(experiment("fedavg")).federation.sites[0]
    own = by_itself(site.train)
    assert own.rows is None
    assert torch.equal(own.batch(torch.arange(5)).inputs, site.train.batch(torch.arange(5)).inputs)
    assert stored_bytes(own) == own.inputs.nbytes + own.targets.nbytes
    assert abs(stored_bytes(site.train) - stored_bytes(own)) <= 1


def test_a_metered_call_has_the_answer_of_a_plain_one():
    made = experiment("fedavg")
    federation = assemble(made).federation
    calls = []

    class Both(Executor):
        def run(self, host, tasks):
            for task in tasks:
                call = task.make()
                plain, found = host.execute(call), metered(host, call)
                assert isinstance(found, MeteredAnswer)
                assert (found.payload, found.record) == (plain.payload, plain.record)
                assert found.meter.down == len(call.payload)
                assert found.meter.up == len(found.payload)
                assert found.meter.seconds > 0
                calls.append(found)
                yield plain

    engine = Engine(made.method, federation, executor=Both())
    engine.round(1, engine.start(), [0])
    assert len(calls) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedin", ()),
        ("heterofl", ()),
        ("fedepth", ()),
        ("fedavg", ("federation.classes=own", "federation.public=holdout", "federation.partition.alpha=0.1")),
    ],
)
def test_a_client_in_a_process_of_its_own_computes_the_same_bits(method, more):
    made = experiment(method, *more)
    federation = assemble(made).federation
    states = []
    origin = Origin()
    try:
        with origin.client(made, federation, 1) as apart:
            for executor in (apart, None):
                engine = Engine(made.method, federation, seed=made.run.seed, executor=executor)
                state = engine.start()
                for number in (1, 2):
                    state, _ = engine.round(number, state, [0, 1])
                states.append([leaf for leaf in tree_leaves(asdict(state)) if isinstance(leaf, torch.Tensor)])
            assert len(apart.meters) >= 2
    finally:
        origin.close()
    assert all(map(torch.equal, *states))
    assert len(states[0]) > 4


@pytest.mark.slow
def test_memory_is_what_theory_says_a_client_holds():
    """Of an MLP with few examples weights are nearly all: the message, and the network with gradients and moments."""
    made = experiment("fedavg", "federation.models=[{name='mlp2', width=3000}]", "method.training.optimizer=adam")
    bench = Bench(made)
    try:
        [candidate] = bench.candidates
        taken = bench.take(candidate, 0)
    finally:
        bench.close()
    weights = 4 * candidate.parameters
    assert weights > 2**25
    assert 6 * weights < taken.memory < 12 * weights
    assert weights <= taken.down < 1.1 * weights
    assert weights <= taken.up < 1.1 * weights


@pytest.mark.slow
def test_a_process_that_is_killed_is_named():
    made = experiment("fedavg", "federation.models=cnn2")
    bench = Bench(made)
    try:
        bench.take(bench.candidates[0], 0)
        bench._origin._process.kill()
        found = bench.take(bench.candidates[0], 0)
        assert found == "the process that measures has ended; is there enough memory?"
        assert not isinstance(bench.take(bench.candidates[0], 0), str)  # and it begins again
    finally:
        bench.close()
