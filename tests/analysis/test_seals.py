"""Whoever reads a finished run checks it against its last checkpoint: what is damaged is named and left out, aloud."""

import json
import tomllib

import pytest

from potluck import seals
from potluck.analysis.read import find_runs, read_run, read_runs
from potluck.analysis.report import write_report
from potluck.core.ground.errors import CheckpointError, PotluckWarning
from potluck.experiment.folder.folder import run_digest


@pytest.fixture
def three(store_run, seal):
    """Three sealed runs of one method: seeds 0, 1 and 2."""
    return [seal(store_run(f"seed{seed}", seed=seed)) for seed in range(3)]


def better(folder):
    """Every accuracy of the last round set by hand."""
    place = folder / "rounds.jsonl"
    *lines, last = place.read_text().splitlines()
    record = {key: 0.99 if key.startswith("accuracy_") and value else value for key, value in json.loads(last).items()}
    place.write_text("".join(line + "\n" for line in [*lines, json.dumps(record)]))


def emptied(folder):
    (folder / "rounds.jsonl").write_text("")


def removed(folder):
    (folder / "rounds.jsonl").unlink()


def faster(folder):
    place = folder / "config.toml"
    place.write_text(place.read_text().replace("lr = 0.005", "lr = 0.5"))


def shorter(folder):
    place = folder / "config.toml"
    place.write_text(place.read_text().replace("rounds = 6", "rounds = 3"))


def cut(folder):
    place = folder / "clients.jsonl"
    place.write_bytes(b"".join(place.read_bytes().splitlines(keepends=True)[:-1]))


def unconfigured(folder):
    (folder / "config.toml").unlink()


def nonsense(folder):
    (folder / "config.toml").write_text("run = 3\nmethod = 4\nfederation = 5\n")


DAMAGES = [
    (better, r"rounds\.jsonl, line 6, is damaged: it is not what the run wrote"),
    (emptied, r"rounds\.jsonl, which is missing or empty, is damaged"),
    (removed, r"rounds\.jsonl, which is missing or empty, is damaged"),
    (faster, r"seed1: the configuration has changed since the last checkpoint: method\.training\.lr was 0\.005 and is"),
    (shorter, r"seed1 has 6 finished rounds; run\.rounds: found 3, expected at least 6"),
    (cut, r"clients\.jsonl, lines 9 to 11 \(round 6\), is damaged"),
    (unconfigured, r"seed1 is not a run: it has no config\.toml"),
    (nonsense, r"config\.toml has no method\.name, federation\.dataset"),
]


@pytest.mark.parametrize(("damage", "named"), DAMAGES)
def test_a_damaged_run_is_named_and_left_out(damage, named, three):
    damage(three[1])
    with pytest.warns(PotluckWarning, match=f"Left out: .*{named}"):
        reading = read_runs(find_runs([three[0].parent]))
    assert [run.seed for run in reading.runs] == [0, 2]
    assert len(reading.damaged) == 1


@pytest.mark.parametrize(("damage", "named"), DAMAGES)
def test_what_is_refused_by_one_reader_is_refused_by_all(damage, named, three):
    damage(three[1])
    for read in (read_run, run_digest):
        with pytest.raises(CheckpointError, match=named) as caught:
            read(three[1])
        assert "\n" not in str(caught.value)


def test_where_all_are_damaged_nothing_is_read(three):
    for folder in three:
        emptied(folder)
    with pytest.raises(CheckpointError, match=r"is damaged: .*; nor can the other 2 runs be read"):
        read_runs(find_runs([three[0].parent]))


def test_a_report_says_what_it_leaves_out_in_both_of_its_files(three, tmp_path):
    better(three[2])
    with pytest.warns(PotluckWarning, match=r"Left out: .*seed2.*line 6, is damaged"):
        page = write_report([three[0].parent], tmp_path / "report")
    for text in (page.read_text(), page.with_name("report.md").read_text()):
        assert "Left out: " in text
        assert "line 6, is damaged" in text
        assert "99.0" not in text


def test_an_unfinished_run_is_checked_up_to_its_last_checkpoint(store_run, seal, make_round):
    folder = seal(store_run(rounds=[make_round(1), make_round(2)], status="running"))
    place = folder / "rounds.jsonl"
    whole = place.read_text()
    place.write_text(whole + json.dumps(make_round(3)) + "\n" + '{"round": 4, "co')
    assert len(read_run(folder).rounds) == 2
    place.write_text(whole.replace('"loss_local": 1.25', '"loss_local": 1.35', 1) + json.dumps(make_round(3)) + "\n")
    with pytest.raises(CheckpointError, match=r"rounds\.jsonl, line 1, is damaged"):
        read_run(folder)


def test_a_run_without_a_seal_is_read_and_said_to_be_unchecked(store_run, seal):
    folders = [store_run(f"old{number}", seed=number) for number in range(6)]
    whole = seal(store_run("whole", seed=7))
    with pytest.warns(PotluckWarning, match="Not checked: old0, old1, old2, old3, and 2 more: there is no checkpoint"):
        reading = read_runs([*folders, whole])
    assert len(reading.runs) == 7
    assert [run.name for run in reading.runs if run.unchecked is None] == ["whole"]


def test_a_key_that_a_person_adds_has_no_part_in_the_run(store_run, seal):
    folder = seal(store_run())
    before = read_run(folder)
    place = folder / "config.toml"
    place.write_text(place.read_text().replace("[method]", "[method]\nlr = 0.5"))
    after = read_run(folder)
    assert after.config == before.config == tomllib.loads(place.read_text().replace("lr = 0.5", ""))
    assert after.experiment_id == before.experiment_id


def test_reading_takes_as_much_longer_as_there_is_more(store_run, seal, make_round, monkeypatch):
    hashed, plain = [], seals.digest
    monkeypatch.setattr(seals, "digest", lambda content: hashed.append(len(content)) or plain(content))
    for name, count in (("short", 50), ("long", 100)):
        folder = seal(store_run(name, [make_round(number + 1) for number in range(count)], planned=count))
        hashed.clear()
        read_run(folder)
        assert sum(hashed) == sum((folder / file).stat().st_size for file in ("rounds.jsonl", "clients.jsonl"))
