"""The count of private releases: what is certain, what may have been, and that nothing takes it back."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace

import pytest

from potluck.core.ground.errors import CheckpointError
from potluck.core.method import Releases
from potluck.core.roles import ClientFailure, Failure
from potluck.core.schema import Misfit
from potluck.engine.answers.ledger import Ledger
from potluck.engine.client.session import Answer, ContractError
from potluck.engine.executors.sequential import Sequential
from potluck.engine.executors.stacked import Stacked
from potluck.engine.executors.workers import Workers, can_fork
from potluck.engine.rounds.engine import Engine
from potluck.experiment.folder.checkpoint import Checkpoints
from potluck.experiment.running.run import Run
from potluck.experiment.settings.schema import RunConfig
from potluck.methods import get_method
from potluck.parts.privacy import FeaturePrivacy
from potluck.testing.checks.clients import Without
from potluck.testing.worlds import World, quick, run_rounds, toy_federation


def answer(client: int = 0, releases: int = 1, released: int | None = None) -> Answer:
    return Answer(client, b"", None, (), releases, released)


def failure(client: int = 0, *, unheard: bool = False) -> Failure:
    return Failure(client, "work", "no", unheard=unheard)


def told(*outcomes: Answer | Failure, ledger: Ledger | None = None) -> Releases:
    """What is known of client 0 after an exchange for each of these outcomes."""
    ledger = ledger or Ledger()
    for outcome in outcomes:
        with ledger.exchange([0]) as note:
            note(outcome)
    return ledger.releases.get(0, Releases())


LATE = failure(unheard=True)


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([], Releases()),
        ([answer(), answer()], Releases(2)),
        ([answer(releases=0)], Releases()),
        ([failure(), answer(), failure()], Releases(1)),
        ([answer(), LATE, LATE], Releases(1, 2)),
        ([LATE, answer(), failure()], Releases(1, 1)),  # an answer says nothing of the one before it
        ([LATE, LATE, answer(released=3)], Releases(3)),  # but the client's own count does
        ([LATE, answer(released=1)], Releases(1)),
        ([answer(released=5), LATE, answer(released=1)], Releases(6, 1)),  # it has lost its count
        ([answer(released=5), LATE], Releases(5, 1)),
    ],
)
def test_an_exchange_counts_what_is_certain_and_what_may_have_been(outcomes, expected):
    assert told(*outcomes) == expected


def test_who_was_not_asked_is_not_counted():
    ledger = Ledger()
    with ledger.exchange([0]) as note:
        note(answer(1))
    assert ledger.releases == {0: Releases(0, 1)}


def test_an_outcome_that_never_came_may_have_been_a_release():
    ledger = Ledger()
    with ledger.exchange([0, 1]) as note:
        note(answer(1))
    assert ledger.releases == {0: Releases(0, 1), 1: Releases(1)}


def test_the_count_is_on_disk_before_anybody_is_asked_and_after_everybody_has_answered(tmp_path):
    path = tmp_path / "releases.json"
    with Ledger(path).exchange([0, 11]) as note:
        assert Ledger(path).releases == {0: Releases(0, 1), 11: Releases(0, 1)}
        note(answer(0))
        note(failure(11))
    assert Ledger(path).releases == {0: Releases(1)}
    assert told(answer(), ledger=Ledger(path)) == Releases(2)


def test_what_was_certain_before_a_failure_that_ends_the_run_is_on_disk(tmp_path):
    path = tmp_path / "releases.json"
    with Ledger(path).exchange([0, 1, 2]) as note:
        note(answer(0))
        note(failure(1))
        assert Ledger(path).releases == {0: Releases(1), 2: Releases(0, 1)}


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"0": 1}', '{"x": [1, 2, 3]}', '{"0": [1, 2]}', '{"0": [null, 1, 1]}', "\xff"]
)
def test_a_damaged_count_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "releases.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"releases\.json is damaged") as caught:
        Ledger(tmp_path / "releases.json")
    assert "\n" not in str(caught.value)


def test_a_client_cannot_have_released_more_often_than_it_was_asked(tmp_path):
    path = tmp_path / "releases.json"
    told(answer(), LATE, ledger=Ledger(path))  # asked twice, and once before the server was started anew
    ledger = Ledger(path)
    with ledger.exchange([0]):
        ledger.check(answer(released=3))
        with pytest.raises(Misfit, match="it claims 4 private releases in this run; expected at most 3, as often as"):
            ledger.check(answer(released=4))
        with pytest.raises(Misfit, match="it claims 2 private releases in one answer; expected at most 1"):
            ledger.check(answer(releases=2))


# In a run

PRIVATE = replace(quick(get_method("fedin")), privacy=FeaturePrivacy(1.0, 1.0, 1e-5))


class Killed(BaseException):
    """The process is gone."""


def run(folder, rounds, method=PRIVATE, **config):
    return Run(method, toy_federation(World(clients=2)), RunConfig(rounds=rounds, **config), folder)


def test_a_run_counts_each_answer_of_each_client(tmp_path):
    finished = run(tmp_path, 3, cohort_fraction=0.5)
    result = finished.run()
    replied = [client for record in result.rounds for client in record.replied]
    assert finished.releases == {client: Releases(replied.count(client)) for client in sorted(set(replied))}


@pytest.mark.slow
def test_a_round_that_is_played_again_has_released_twice(tmp_path, monkeypatch):
    run(tmp_path, 1).run()
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", lambda *_, **named: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            run(tmp_path, 2).run()
    resumed = run(tmp_path, 2)
    assert [record.round for record in resumed.run().rounds] == [2]
    assert resumed.releases == {0: Releases(3), 1: Releases(3)}
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == 2


def test_a_run_that_was_killed_among_its_clients_counts_those_who_may_have_released(tmp_path, monkeypatch):
    execute = Sequential.run

    def dies(self, host, tasks) -> Iterator:
        yield next(execute(self, host, tasks))
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Sequential, "run", dies)
        patch.setattr(Ledger, "_save", only_before(Ledger._save))
        with pytest.raises(Killed):
            run(tmp_path, 1, executor="sequential").run()
    resumed = run(tmp_path, 1, executor="sequential")
    resumed.run()
    assert {client: of.at_most for client, of in resumed.releases.items()} == {0: 2, 1: 2}


def only_before(save):
    """A process that is killed among its clients does not write after them."""
    calls = []

    def saved(self, asked):
        calls.append(asked)
        if len(calls) == 1:
            save(self, asked)

    return saved


def test_a_client_that_failed_has_released_nothing():
    federation = toy_federation(World(clients=2))
    engine = Engine(PRIVATE, federation, executor=Without(1), tolerate_failures=True)
    run_rounds(engine, 2)
    assert engine.ledger.releases == {0: Releases(2)}
    alone = Engine(PRIVATE, toy_federation(World(clients=1)), executor=Without(0), tolerate_failures=True)
    with suppress(ClientFailure):
        run_rounds(alone, 1)
    assert alone.ledger.releases == {}


@pytest.mark.parametrize("make", [Sequential, Stacked, lambda: Workers(2)], ids=["sequential", "stacked", "workers"])
def test_every_executor_brings_the_counts_home(make):
    executor = make()
    if isinstance(executor, Workers) and not can_fork():
        pytest.skip("this system cannot fork")
    engine = Engine(PRIVATE, toy_federation(World(clients=2)), executor=executor)
    try:
        run_rounds(engine, 2)
    finally:
        engine.close()
    assert engine.ledger.releases == {0: Releases(2), 1: Releases(2)}


class ReleasesTwice(type(PRIVATE)):
    """Calls the mechanism twice where the account allows one release."""

    def released(self, client, count, features=None):
        super().released(client, count, features)
        return super().released(client, count, features)


def test_a_method_that_releases_twice_in_a_call_breaks_the_contract():
    twice = ReleasesTwice(**{spec.name: getattr(PRIVATE, spec.name) for spec in fields(PRIVATE)})
    engine = Engine(twice, toy_federation(World(clients=2)))
    with pytest.raises(ContractError, match="made 2 private releases in one call; expected at most one"):
        run_rounds(engine, 1)


def test_a_run_without_private_releases_counts_and_writes_nothing(tmp_path):
    finished = run(tmp_path, 1, replace(PRIVATE, privacy=None))
    finished.run()
    assert finished.releases == {}
    assert not (tmp_path / "releases.json").exists()


def test_a_private_run_whose_count_was_lost_is_not_resumed(tmp_path):
    run(tmp_path, 1).run()
    assert json.loads((tmp_path / "releases.json").read_text()) == {"0": [1, 0, 1], "1": [1, 0, 1]}
    (tmp_path / "releases.json").unlink()
    with pytest.raises(CheckpointError, match=r"releases\.json is missing; what clients have released is not known"):
        run(tmp_path, 2).run()
