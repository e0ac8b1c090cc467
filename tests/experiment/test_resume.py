"""What a run that goes on takes for granted, and what it refuses: records, configuration, length, code."""

import dataclasses
import json
import os
import re

import pytest

from potluck.core.ground.errors import CheckpointError, ConfigError
from potluck.experiment.results.records import rounds_of
from potluck.experiment.running.run import Run
from potluck.experiment.settings.schema import RoundsClose, RunConfig
from potluck.methods import get_method
from potluck.records import Checkpoint, kept_rounds
from potluck.testing.worlds import World, toy_federation

LOCAL = get_method("local")


def lines(path):
    return path.read_bytes().splitlines(keepends=True)


def flipped(content, place):
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def digit_in(line):
    """Where a number in the line has a digit; with another one the line still is a record."""
    return re.search(rb'"accuracy_personal(_mean)?": (\d)', line).start(2)


DAMAGES = {
    "torn": (lambda found: [*found[:2], found[2][:20]], "line 3"),
    "doubled": (lambda found: [*found[:2], found[1], *found[2:]], r"lines? 2"),
    "missing": (lambda found: [found[0], *found[2:]], r"lines? 2"),
    "missing at the end": (lambda found: found[:2], "which ends with line 2"),
    "flipped": (lambda found: [found[0], flipped(found[1], digit_in(found[1])), *found[2:]], "line 2"),
    "swapped": (lambda found: [found[1], found[0], *found[2:]], "line 1"),
    "no UTF-8": (lambda found: [found[0], b"\xff\xfe" + found[1], *found[2:]], "line 2"),
    "another end of line": (lambda found: [found[0], found[1].replace(b" ", b"\r", 1), *found[2:]], "line 2"),
    "emptied": (lambda found: [], "which is missing or empty"),
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_rounds_are_named_with_their_line(damage, play, tmp_path):
    change, named = DAMAGES[damage]
    play(LOCAL, rounds=3)
    path = tmp_path / "run" / "rounds.jsonl"
    path.write_bytes(b"".join(change(lines(path))))
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match=rf"rounds\.jsonl, {named}\b.* is damaged") as caught:
        play(LOCAL, rounds=4)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "named"), [(0, r"lines 1 to 4 \(round 1\)"), (5, r"lines 5 to 8 \(round 2\)"), (-1, r"lines 9 to 12")]
)
def test_damaged_clients_are_named_with_their_lines(place, named, play, tmp_path):
    play(LOCAL, rounds=3)
    path = tmp_path / "run" / "clients.jsonl"
    found = lines(path)
    found[place] = flipped(found[place], digit_in(found[place]))
    path.write_bytes(b"".join(found))
    with pytest.raises(CheckpointError, match=rf"clients\.jsonl, {named}.* is damaged"):
        play(LOCAL, rounds=4)
    found[place] = found[place][:-3]
    path.write_bytes(b"".join(found))
    with pytest.raises(CheckpointError, match=rf"clients\.jsonl, line {range(1, 13)[place]}, is damaged"):
        play(LOCAL, rounds=4)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"clients\.jsonl, which is missing or empty"):
        play(LOCAL, rounds=4)


@pytest.mark.slow
def test_a_checkpoint_of_an_earlier_version_is_resumed_with_a_word_if_its_records_are_in_order(play, tmp_path):
    whole = play(LOCAL, "whole", rounds=3)
    play(LOCAL, rounds=2)
    folder = tmp_path / "run"
    place = folder / "checkpoint" / "last.json"
    old = dataclasses.replace(Checkpoint.read(place), records=None, config=None)
    content = json.loads(old.sealed())
    for name in ("schema", "records", "config", "seal"):
        del content[name]
    place.write_bytes(_sealed_as_before(content))
    assert Checkpoint.read(place) == old
    found = lines(folder / "rounds.jsonl")
    (folder / "rounds.jsonl").write_bytes(b"".join([found[0], found[0], found[1]]))
    with pytest.raises(CheckpointError, match=r"rounds\.jsonl, lines 1 to 2 \(round 1\), is damaged"):
        play(LOCAL, rounds=3)
    (folder / "rounds.jsonl").write_bytes(b"".join(found) + b'{"round": 3, "coh')
    assert play(LOCAL, rounds=3).checkpoint == whole.checkpoint


def _sealed_as_before(content):
    from potluck.records import _seal

    return json.dumps({**content, "seal": _seal(content)}).encode()


def test_a_checkpoint_of_a_newer_version_is_refused(play, tmp_path):
    play(LOCAL, rounds=1)
    place = tmp_path / "run" / "checkpoint" / "last.json"
    content = {**json.loads(place.read_text()), "schema": 9}
    del content["seal"]
    place.write_bytes(_sealed_as_before(content))
    with pytest.raises(CheckpointError, match=r"has schema 9; this Potluck reads up to \d+"):
        play(LOCAL, rounds=2)


def test_digest_of_a_checkpoint_is_of_what_was_computed_alone(play, tmp_path):
    play(LOCAL, rounds=1)
    last = Checkpoint.read(tmp_path / "run" / "checkpoint" / "last.json")
    assert last.records
    assert last.config
    assert dataclasses.replace(last, records=None, config=None).digest == last.digest


def test_without_its_checkpoint_a_run_starts_over_and_keeps_the_old_records(play, tmp_path, caplog):
    whole = play(LOCAL, rounds=2)
    folder = tmp_path / "run"
    before = {name: (folder / name).read_bytes() for name in ("rounds.jsonl", "clients.jsonl", "timings.jsonl")}
    (folder / "checkpoint" / "last.json").unlink()
    assert play(LOCAL, rounds=2).checkpoint == whole.checkpoint
    assert "its checkpoint is missing, so the run starts over" in caplog.text
    assert {name: (folder / "set-aside-1" / name).read_bytes() for name in before} == before
    assert (folder / "rounds.jsonl").read_bytes() == before["rounds.jsonl"]


@pytest.mark.slow
@pytest.mark.parametrize("obstacle", ["damaged", "folder"])
def test_the_best_rounds_checkpoint_is_not_needed_to_go_on(obstacle, play, tmp_path):
    whole = play(LOCAL, "whole", rounds=3)
    play(LOCAL, rounds=1)
    place = tmp_path / "run" / "checkpoint" / "best.json"
    place.unlink()
    if obstacle == "folder":
        place.mkdir()
    else:
        place.write_text("{")
    assert play(LOCAL, rounds=3).checkpoint == whole.checkpoint
    assert place.with_name("best.json.damaged-1").exists()


def test_a_last_checkpoint_that_is_a_folder_is_refused(play, tmp_path):
    play(LOCAL, rounds=1)
    place = tmp_path / "run" / "checkpoint" / "last.json"
    place.unlink()
    place.mkdir()
    with pytest.raises(CheckpointError, match=r"last\.json is damaged: "):
        play(LOCAL, rounds=2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cohort_fraction": 0.5}, "run.cohort_fraction was 1.0 and is 0.5"),
        ({"seed": 3, "threads": 2}, "run.seed was 0 and is 3; run.threads was 1 and is 2"),
    ],
)
def test_a_changed_configuration_is_refused_key_by_key(changes, said, play):
    play(LOCAL, rounds=1)
    with pytest.raises(CheckpointError, match=r"--branch") as caught:
        play(LOCAL, rounds=2, **changes)
    assert said in str(caught.value)


def test_a_changed_method_is_refused(play):
    play(LOCAL, rounds=1)
    with pytest.raises(CheckpointError, match=r"method\.name was .*Local.* and is .*FedAvg"):
        play(get_method("fedavg"), rounds=2)


@pytest.mark.slow
def test_length_memory_workers_and_when_rounds_close_may_change(play):
    whole = play(LOCAL, "whole", rounds=2)
    play(LOCAL, rounds=1)
    close = RoundsClose(quorum=3, deadline_s=5.0, patience_s=60.0)
    assert play(LOCAL, rounds=2, memory_gib=0.5, workers=2, rounds_close=close).checkpoint == whole.checkpoint


@pytest.mark.slow
def test_keeping_rounds_changes_nothing_and_may_begin_later(play, tmp_path):
    whole = play(LOCAL, "whole", rounds=4)
    play(LOCAL, rounds=1)
    assert play(LOCAL, rounds=4, keep_every=2).checkpoint == whole.checkpoint
    folders = [tmp_path / name / "checkpoint" for name in ("whole", "run")]
    assert [list(kept_rounds(folder)) for folder in folders] == [[], [2, 4]]
    assert (folders[0] / "last.json").read_bytes() == (folders[1] / "last.json").read_bytes()


def test_rounds_are_kept_in_a_folder_alone(play):
    with pytest.raises(ConfigError, match=r"run\.keep_every: found 2; expected a run with a folder to keep it in"):
        Run(LOCAL(), toy_federation(World()), RunConfig(keep_every=2))


def test_fewer_rounds_than_are_played_are_refused(play):
    play(LOCAL, rounds=2)
    with pytest.raises(CheckpointError, match=r"has 2 finished rounds; run\.rounds: found 1, expected at least 2"):
        play(LOCAL, rounds=1)


def test_rounds_of__a_run_are_those_that_count(play, tmp_path):
    """A killed run may have recorded one more than its checkpoint has."""
    records = play(get_method("fedavg"), rounds=3).rounds
    assert rounds_of(tmp_path / "run", 2) == records[:2]
    assert rounds_of(tmp_path / "nothing", 0) == []


def test_play_twice_without_a_folder_is_the_same_run_twice():
    from potluck.experiment.running.run import Run
    from potluck.experiment.settings.schema import RunConfig
    from potluck.testing.worlds import World, quick, toy_federation

    run = Run(quick(LOCAL), toy_federation(World()), RunConfig(rounds=2, executor="sequential"))
    first, second = run.run(), run.run()
    assert first.rounds == second.rounds
    assert first.evaluation == second.evaluation


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_workers_of_a_run_that_was_loaded_and_never_played_end_with_it():
    import multiprocessing

    from potluck.experiment.running.run import Run
    from potluck.experiment.settings.schema import RunConfig
    from potluck.testing.worlds import World, quick, toy_federation

    before = set(multiprocessing.active_children())
    run = Run(quick(LOCAL), toy_federation(World()), RunConfig(rounds=1, executor="workers", workers=2))
    run.load()
    started = set(multiprocessing.active_children()) - before
    assert len(started) == 2
    del run
    assert [worker.is_alive() for worker in started] == [False, False]
    assert set(multiprocessing.active_children()) == before
