"""The same bytes whatever must not matter: time, order, processes, interruptions."""

import math
import tempfile
from pathlib import Path

import torch

from potluck.core.ground.digest import digest
from potluck.core.nets.weights import Weights, weights_of
from potluck.engine.executors.sequential import Sequential
from potluck.engine.executors.stacked import Stacked
from potluck.engine.executors.workers import Workers, can_fork
from potluck.engine.rounds.engine import Engine
from potluck.experiment.running.run import Run
from potluck.experiment.settings.schema import RunConfig
from potluck.records import CLIENTS, ROUNDS
from potluck.testing.checks.subjects import Overrides, Subject, all_bytes, engine_for, ran
from potluck.testing.worlds import World, packed_state, quick, run_rounds, toy_federation

_ROUNDING = 1e-10


def is_deterministic(method: Subject, overrides: Overrides = ()) -> None:
    """The same seed gives the same bytes; another seed does not."""
    first, second, other = (ran(method, overrides, seed=seed) for seed in (0, 0, 1))
    assert all_bytes(first) == all_bytes(second), "two runs of one seed differ"
    assert all_bytes(first) != all_bytes(other), "two seeds give the same run"


def leaves_the_global_generator_alone(method: Subject, overrides: Overrides = ()) -> None:
    """No draw comes from torch's global generator."""
    before = torch.default_generator.get_state()
    ran(method, overrides)
    assert torch.equal(before, torch.default_generator.get_state()), "torch's global generator was advanced"


def does_not_change_the_state_it_is_given(method: Subject, overrides: Overrides = ()) -> None:
    """`round` returns a new state. The first round counts too, since some of a state may change in it alone."""
    engine = engine_for(method, overrides)
    state = engine.start()
    for number in (1, 2):
        before = packed_state(state)
        new, _ = engine.round(number, state, sorted(engine.federation.sites))
        assert packed_state(state) == before, "round() changed the state that it was given"
        state = new


def does_not_depend_on_the_order_of_clients(method: Subject, overrides: Overrides = ()) -> None:
    """The order of the cohort does not matter."""
    results: list[bytes] = []
    for ids in ([0, 1, 2, 3], [3, 1, 0, 2]):
        engine = engine_for(method, overrides)
        state, _ = engine.round(1, engine.start(), ids)
        results.append(packed_state(state))
    assert results[0] == results[1], "the order of the ids changed the result"


def gives_the_same_bytes_on_workers(method: Subject, overrides: Overrides = ()) -> None:
    """The result does not depend on the process that runs a client; skipped if processes cannot be forked."""
    if not can_fork():
        return
    engine, threads = engine_for(method, overrides, executor=Workers(2)), torch.get_num_threads()
    torch.set_num_threads(1)  # as in workers
    try:
        spread, alone = (engine, run_rounds(engine, 2)), ran(method, overrides)
    finally:
        engine.close()
        torch.set_num_threads(threads)
    assert all_bytes(spread) == all_bytes(alone), "two processes give another result than one"


def agrees_when_stacked(method: Subject, overrides: Overrides = ()) -> None:
    """Stacked training gives the same results and notes as training one by one, up to rounding in double precision.

    With SGD, since Adam takes a full step for a gradient that is only rounding error, such as that of a bias before a
    BatchNorm.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        subject = quick(method, overrides, optimizer="sgd")
        world = World(batchnorm=True).fit_for(subject)
        engines = [Engine(subject, toy_federation(world), executor=e) for e in (Sequential(), Stacked())]
        (alone, expected), (stacked, found) = (_evaluated(engine) for engine in engines)
    finally:
        torch.set_default_dtype(before)
    for mine, theirs in zip(stacked, alone, strict=True):
        for name, tensor in theirs.items():
            assert torch.allclose(mine[name], tensor, rtol=_ROUNDING, atol=_ROUNDING), f"{name} differs"
    assert found.keys() == expected.keys(), f"it reports {sorted(found)}, and {sorted(expected)} one by one"
    for name, value in expected.items():
        assert math.isclose(found[name], value, rel_tol=_ROUNDING, abs_tol=_ROUNDING), f"the note {name} differs"


def resumes_to_the_same_bytes(method: Subject, overrides: Overrides = ()) -> None:
    """Two rounds, and two rounds with a stop between them, give the same result."""
    with tempfile.TemporaryDirectory() as place:
        whole, halves = Path(place) / "whole", Path(place) / "halves"
        straight = _run(method, overrides, whole, rounds=2)
        _run(method, overrides, halves, rounds=1)
        resumed = _run(method, overrides, halves, rounds=2)
    assert straight == resumed, "a resumed run ends in another checkpoint or other records than an uninterrupted one"


def _evaluated(engine: Engine) -> tuple[list[Weights], dict[str, float]]:
    """After two rounds with everyone, the models that clients would use, and the last round's notes."""
    state, ids = engine.start(), sorted(engine.federation.sites)
    state, _ = engine.round(1, state, ids)
    state, report = engine.round(2, state, ids)
    return [weights_of(engine.inference_model(state, id)) for id in ids], report.notes


def _run(method: Subject, overrides: Overrides, folder: Path, rounds: int) -> tuple[str, ...]:
    """The digests of the checkpoint and of the records that a run leaves in its folder."""
    subject = quick(method, overrides)
    federation = toy_federation(World(batchnorm=True).fit_for(subject))
    result = Run(subject, federation, RunConfig(rounds=rounds, cohort_fraction=0.5), folder).run()
    assert result.checkpoint is not None
    return result.checkpoint.digest, *(digest((folder / name).read_bytes()) for name in (ROUNDS, CLIENTS))
