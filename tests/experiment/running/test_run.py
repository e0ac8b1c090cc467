import json
from dataclasses import replace

import pytest
import torch

from potluck.core.ground.errors import CheckpointError, DataError, DivergenceError
from potluck.core.message import Message
from potluck.core.method import on_client
from potluck.core.roles import ClientFailure
from potluck.core.schema import Schema
from potluck.core.tasks.own_metrics import with_metrics
from potluck.engine.disk.store import Layout
from potluck.experiment.folder.folder import new_folder, open_folder
from potluck.experiment.results.records import Records
from potluck.experiment.running.run import Run
from potluck.experiment.settings.presets import experiment_for
from potluck.experiment.settings.schema import RoundsClose, RunConfig
from potluck.methods import get_method, list_methods
from potluck.records import ROUNDS, Checkpoint, name_of_layout
from potluck.testing.worlds import World, quick, toy_federation

FEDIN, FEDMD = get_method("fedin"), get_method("fedmd")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


OF_EACH_KIND = ["fedavg", "fedmd", "fedin"]
"""A method whose clients keep nothing, one whose clients keep all, and one with more in its state than weights. That
every method does so is a check of its conformance."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_the_same_run_twice_writes_the_same_bytes(name, play, tmp_path):
    digests = [play(get_method(name), place, rounds=2).checkpoint.digest for place in ("first", "second")]
    assert digests[0] == digests[1]
    for file in ("rounds.jsonl", "clients.jsonl"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()


@pytest.mark.slow
def test_another_seed_ends_elsewhere(play):
    assert play(FEDIN, "a", seed=0).checkpoint.digest != play(FEDIN, "b", seed=1).checkpoint.digest


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_a_run_continued_ends_like_one_that_was_never_stopped(name, play, tmp_path):
    whole = play(get_method(name), "whole", rounds=3, cohort_fraction=0.5)
    play(get_method(name), "parts", rounds=1, cohort_fraction=0.5)
    parts = play(get_method(name), "parts", rounds=3, cohort_fraction=0.5)
    assert parts.checkpoint == whole.checkpoint
    for file in ("rounds.jsonl", "clients.jsonl"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "parts" / file).read_bytes()


def test_lines_of_a_round_that_was_not_checkpointed_are_dropped(play, tmp_path):
    play(FEDMD, rounds=1)
    with (tmp_path / "run" / "rounds.jsonl").open("a") as file:
        file.write('{"round": 2, "cohort": [9]}\n{"round": 3, "coh')
    play(FEDMD, rounds=2)
    whole = play(FEDMD, "whole", rounds=2)
    assert (tmp_path / "run" / "rounds.jsonl").read_bytes() == (tmp_path / "whole" / "rounds.jsonl").read_bytes()
    assert whole.rounds[-1].round == 2


def test_playing_a_finished_run_changes_nothing(play, tmp_path):
    before = play(FEDMD).checkpoint
    records = (tmp_path / "run" / "rounds.jsonl").read_bytes()
    result = play(FEDMD)
    assert (result.checkpoint, result.rounds) == (before, [])
    assert (tmp_path / "run" / "rounds.jsonl").read_bytes() == records


def test_rounds_between_evaluations_have_no_accuracy_and_the_last_one_has(play, tmp_path):
    play(FEDIN, rounds=5, evaluate_every=2)
    evaluated = [record["accuracy_personal_mean"] is not None for record in lines(tmp_path / "run" / "rounds.jsonl")]
    assert evaluated == [False, True, False, True, True]
    assert {line["round"] for line in lines(tmp_path / "run" / "clients.jsonl")} == {2, 4, 5}


def test_records_count_what_was_sent(play, tmp_path):
    play(FEDIN, rounds=2)
    first, second = lines(tmp_path / "run" / "rounds.jsonl")
    assert first["bytes_down"] == sum(first["bytes_down_by_entry"].values())
    assert "features" not in first["bytes_down_by_entry"]
    assert second["bytes_down"] - first["bytes_down"] == second["bytes_down_by_entry"]["features"]
    assert second["bytes_evaluation"] > 0


def test_records_hold_no_clock(play, tmp_path):
    play(FEDIN, rounds=1)
    for file in ("rounds.jsonl", "clients.jsonl"):
        assert "seconds" not in (tmp_path / "run" / file).read_text()
    assert lines(tmp_path / "run" / "timings.jsonl")[0]["seconds_total"] > 0


@pytest.mark.slow
def test_the_best_round_is_chosen_on_validation_and_kept(play, tmp_path):
    result = play(FEDIN, rounds=6)
    records = lines(tmp_path / "run" / "rounds.jsonl")
    validation = [record["accuracy_validation_mean"] for record in records]
    assert result.checkpoint.best_validation == max(validation)
    assert result.checkpoint.best_round == validation.index(max(validation)) + 1
    best = json.loads((tmp_path / "run" / "checkpoint" / "best.json").read_text())
    assert best["round"] == result.checkpoint.best_round
    assert all((tmp_path / "run" / "checkpoint" / name).is_file() for name in best["state"])


def test_files_that_no_checkpoint_needs_are_deleted(play, tmp_path):
    play(FEDMD, rounds=4)
    folder = tmp_path / "run" / "checkpoint"
    needed = {"last.json", "best.json"}
    for name in ("last.json", "best.json"):
        found = Checkpoint.read(folder / name)
        layout = Layout.read(folder / name_of_layout(found.round))
        assert layout.segments
        needed |= {*found.state, name_of_layout(found.round), *layout.segments}
    assert {path.name for path in folder.iterdir()} == needed


@pytest.mark.slow
def test_a_flipped_byte_anywhere_in_the_checkpoint_is_noticed(play, tmp_path):
    play(FEDMD, rounds=1)
    folder = tmp_path / "run" / "checkpoint"
    last = json.loads((folder / "last.json").read_text())
    for name in ("last.json", *last["state"], "states-000001.json", "states-000001.segment"):
        path = folder / name
        content = path.read_bytes()
        for position in (0, len(content) // 3, len(content) // 2, len(content) - 1):
            damaged = bytearray(content)
            damaged[position] ^= 1
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match="damaged"):
                play(FEDMD, rounds=2)
        path.write_bytes(content)
    assert play(FEDMD, rounds=2).checkpoint.round == 2


@pytest.mark.slow
def test_a_missing_file_of_the_checkpoint_is_noticed(play, tmp_path):
    play(FEDMD, rounds=1)
    folder = tmp_path / "run" / "checkpoint"
    for name in ("states-000001.json", "states-000001.segment"):
        (folder / name).rename(tmp_path / "aside")
        with pytest.raises(CheckpointError, match=f"{name} is missing"):
            play(FEDMD, rounds=2)
        (tmp_path / "aside").rename(folder / name)
    assert play(FEDMD, rounds=2).checkpoint.round == 2


@pytest.mark.slow
def test_client_records_spilled_to_disk_change_nothing(play):
    assert play(FEDMD, "small", memory_gib=0.0).checkpoint == play(FEDMD, "large").checkpoint


def fail_on_client_2(monkeypatch):
    good = FEDMD.digest_and_revisit

    def fails_on_client_2(self, client, message):
        if client.id == 2:
            raise MemoryError("no room")
        return good(self, client, message)

    fails_on_client_2.on_client = True
    fails_on_client_2.__name__ = "digest_and_revisit"
    monkeypatch.setattr(FEDMD, "digest_and_revisit", fails_on_client_2)


def test_a_failure_stops_the_run_unless_it_is_tolerated(play, tmp_path, monkeypatch):
    fail_on_client_2(monkeypatch)
    with pytest.raises(ClientFailure, match=r"client 2 failed in FedMD\.digest_and_revisit: MemoryError: no room"):
        play(FEDMD, "strict")
    result = play(FEDMD, "tolerant", tolerate_failures=True)
    assert [record.failed for record in result.rounds] == [{"2": "MemoryError: no room"}] * 3
    assert 2 not in result.rounds[0].replied


class Unlucky(FEDMD):
    """FedMD with clients that fail in the rounds that the server names."""

    lost = frozenset({2, 3})

    def round(self, state, cohort, server):
        if server._key.path[-1] in self.lost:
            cohort.ask(self.fail, Message())
        return super().round(state, cohort, server)

    def replies(self, handler, member, message, server):
        return Schema() if handler == "fail" else super().replies(handler, member, message, server)

    @on_client
    def fail(self, client, message):
        raise MemoryError("no room")


def test_a_round_that_everybody_fails_is_recorded_and_the_run_goes_on(play, tmp_path):
    result = play(Unlucky, rounds=4, tolerate_failures=True)
    written = lines(tmp_path / "run" / "rounds.jsonl")
    why = "no client answered; client 0 failed in Unlucky.fail: MemoryError: no room"
    assert [line.get("lost") for line in written] == [None, why, why, None]
    assert ["lost" in line for line in written] == [False, True, True, False]
    assert [len(record.failed) for record in result.rounds] == [0, 4, 4, 0]
    assert written[0]["accuracy_personal_mean"] == written[2]["accuracy_personal_mean"]


@pytest.mark.slow
def test_a_round_with_fewer_replies_than_the_quorum_is_lost(play, monkeypatch):
    all_four = {"tolerate_failures": True, "rounds_close": RoundsClose(quorum=4)}
    before = play(FEDMD, rounds=1, **all_four).checkpoint
    fail_on_client_2(monkeypatch)
    result = play(FEDMD, rounds=3, **all_four)
    assert [record.lost for record in result.rounds] == [
        "3 of 4 clients answered, and 4 must; client 2 failed in FedMD.digest_and_revisit: MemoryError: no room"
    ] * 2
    assert (result.checkpoint.state, result.checkpoint.states) == (before.state, before.states)
    with pytest.raises(ClientFailure, match="3 rounds in a row were lost"):
        play(FEDMD, "strict", rounds=9, lost_rounds=3, **all_four)
    three = play(FEDMD, "three", tolerate_failures=True, rounds_close=RoundsClose(quorum=3))
    assert [record.lost for record in three.rounds] == [None] * 3


def test_a_lost_round_leaves_no_trace_in_the_checkpoint(play):
    before = play(Unlucky, "before", rounds=1, tolerate_failures=True).checkpoint
    after = play(Unlucky, "after", rounds=3, tolerate_failures=True).checkpoint
    assert (after.state, after.states) == (before.state, before.states)


@pytest.mark.slow
def test_too_many_lost_rounds_in_a_row_end_the_run_also_when_it_was_stopped_between(play, monkeypatch):
    monkeypatch.setattr(Unlucky, "lost", frozenset(range(2, 9)))
    play(Unlucky, rounds=3, tolerate_failures=True, lost_rounds=3)
    with pytest.raises(
        ClientFailure, match=r"^3 rounds in a row were lost, the last one, 4, because: no client"
    ) as told:
        play(Unlucky, rounds=9, tolerate_failures=True, lost_rounds=3)
    assert str(told.value).endswith("run.lost_rounds sets how many may be")


@pytest.mark.slow
def test_a_client_with_one_example_and_batch_norm_alone_in_a_cohort_does_not_end_the_run(tmp_path):
    federation = toy_federation(World(batchnorm=True, clients=3, architectures=1))
    lone = replace(federation.sites[1], train=federation.sites[1].train.take(torch.tensor([0])))
    federation = replace(federation, sites={**federation.sites, 1: lone})
    config = RunConfig(rounds=12, cohort_fraction=0.4, tolerate_failures=True)
    result = Run(quick(get_method("fedavg")), federation, config, tmp_path).run()
    lost = [record.round for record in result.rounds if record.lost is not None]
    assert lost == [record.round for record in result.rounds if record.cohort == [1]] != []
    assert all("1 training examples; expected at least 2" in result.rounds[n - 1].lost for n in lost)
    assert len(result.rounds) == 12


@pytest.mark.slow
@pytest.mark.rotates
@pytest.mark.parametrize("name", list_methods())
def test_a_client_that_diverges_stops_every_method_with_round_and_client(name, tmp_path):
    method = quick(get_method(name), optimizer="sgd", lr=1e20)
    federation = toy_federation(World(batchnorm=False).fit_for(method))
    who = r"client \d diverged in \w+\.\w+" if name != "centralised" else "the server's state diverged"
    with pytest.raises(DivergenceError, match=rf"^round 1: {who}: "):
        Run(method, federation, RunConfig(rounds=2), tmp_path).run()
    assert not (tmp_path / "checkpoint" / "last.json").exists()


def test_targets_that_are_no_classes_are_refused_before_the_first_round(tmp_path):
    federation = toy_federation(World())
    site = federation.sites[2]
    train = replace(site.train, targets=site.train.targets.float())
    federation = replace(federation, sites={**federation.sites, 2: replace(site, train=train)})
    with pytest.raises(DataError, match=r"^client 2: the targets of its training part are float32"):
        Run(quick(get_method("fedavg")), federation, RunConfig(rounds=1), tmp_path).run()
    assert not (tmp_path / "rounds.jsonl").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_never_written_as_null(value, tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        Records(tmp_path).add(ROUNDS, [{"round": 1, "loss_local": value}])


@pytest.mark.slow
def test_cohorts_are_the_same_for_every_method(play):
    cohorts = [[r.cohort for r in play(m, m.__name__, cohort_fraction=0.5).rounds] for m in (FEDIN, FEDMD)]
    assert cohorts[0] == cohorts[1]
    assert {len(cohort) for cohort in cohorts[0]} == {2}


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"is not a run: it has no config\.toml and no manifest\.json"):
        open_folder(tmp_path)


def test_two_runs_started_in_one_second_get_two_folders(tmp_path):
    experiment = experiment_for(None, [])
    folders = {new_folder(tmp_path, experiment) for _ in range(5)}
    assert len(folders) == 5
    assert all("-fedin-digits-s0-" in folder.name for folder in folders)


def test_examples_of_one_class_and_a_metric_without_a_value_are_said_once(tmp_path, caplog):
    (tmp_path / "own.py").write_text("def nothing(outputs, targets): return outputs[:, 0] * float('nan')")
    federation = toy_federation(World(labels=1))
    alone = {0: federation.sites[0]}
    task = with_metrics(federation.task, [f"{tmp_path / 'own.py'}:nothing"])
    Run(quick(get_method("local")), replace(federation, sites=alone, task=task), RunConfig(rounds=2)).run()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == [
        "all training examples are of class 0; to predict it is always right",
        "nothing has no value after round 1: it is NaN or undefined on all examples",
    ]
