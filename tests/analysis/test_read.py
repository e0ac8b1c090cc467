import hashlib
import json

import pytest

from potluck.analysis.read import chosen, find_runs, last, read_run
from potluck.core.ground.errors import CheckpointError
from potluck.experiment.folder import folder as run_folder
from potluck.experiment.settings.resolve import resolve


def checkpoint(folder, number):
    """Write the small sealed file that says how far the run in a folder is."""
    clients = {"10": "10-0b.safetensors", "9": "9-0c.safetensors"}
    content = {
        "round": number,
        "state": "state-0a.safetensors",
        "clients": clients,
        "best_validation": 0.5,
        "best_round": 2,
    }
    seal = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "last.json").write_text(json.dumps({**content, "seal": seal}, indent=1))


def test_a_run_is_read_as_it_was_written(store_run):
    run = read_run(store_run("miniature", method="fedavg", dataset="mnist", seed=3))
    assert (run.name, run.method, run.dataset, run.seed) == ("miniature", "fedavg", "mnist", 3)
    assert (run.client_count, run.rounds_planned) == (4, 6)
    assert [record.round for record in run.rounds] == [1, 2, 3, 4, 5, 6]
    assert [record.evaluated for record in run.rounds] == [False, True, False, True, False, True]
    assert run.rounds[4].bytes_down == 3_000_000
    assert len(run.clients) == 12
    assert run.config["method"]["training"]["lr"] == 0.005
    assert run.manifest["status"] == "finished"


def test_the_dataset_of_a_path_is_its_name(store_run):
    assert read_run(store_run(dataset="/data/leaves.npz")).dataset == "leaves"


def test_the_headlines_are_the_last_round_and_the_first_of_the_best_on_validation(store_run):
    run = read_run(store_run())
    assert last(run).round == 6
    assert chosen(run).round == 2  # round 4 has the same validation accuracy and a better test accuracy


def test_headlines_of_a_run_that_was_not_evaluated_are_none(store_run, make_round):
    run = read_run(store_run(rounds=[make_round(1)]))
    assert last(run) is None
    assert chosen(run) is None


def test_without_validation_no_round_is_chosen(store_run, make_round):
    run = read_run(store_run(rounds=[make_round(1, personal=[0.1, 0.2, 0.3, 0.4])]))
    assert last(run).round == 1
    assert chosen(run) is None


def test_the_hash_is_that_of_the_experiment_whatever_the_folder_is_called(tmp_path, make_round):
    experiment = resolve({"run": {"rounds": 1, "seed": 5}})
    folder = run_folder.new_folder(tmp_path, experiment)
    renamed = folder.rename(tmp_path / "best")
    (renamed / "config.toml").write_text(experiment.toml())
    (renamed / "manifest.json").write_text('{"schema_version": 1}')
    (renamed / "rounds.jsonl").write_text(json.dumps(make_round(1)) + "\n")
    run = read_run(renamed)
    assert run.experiment_id == experiment.experiment_id
    assert folder.name.endswith(f"-{run.method}-{run.dataset}-s{run.seed}-{run.experiment_id}")


def test_the_digests_are_those_of_the_run(store_run):
    folder = store_run()
    checkpoint(folder, 6)
    assert read_run(folder).digests == run_folder.run_digest(folder)


def test_a_run_whose_checkpoint_was_cleared_away_has_digests_of_its_records(store_run):
    assert set(read_run(store_run()).digests) == {"rounds.jsonl", "clients.jsonl"}


def test_a_round_that_the_checkpoint_does_not_have_is_not_finished(store_run):
    folder = store_run()
    checkpoint(folder, 5)
    run = read_run(folder)
    assert len(run.rounds) == 5
    assert last(run).round == 4
    assert max(line.round for line in run.clients) == 4


def test_records_that_end_before_the_checkpoint_are_damaged(store_run):
    folder = store_run()
    checkpoint(folder, 7)
    with pytest.raises(
        CheckpointError, match=r"rounds.jsonl is damaged: it ends with round 6 and the checkpoint has 7"
    ):
        read_run(folder)


def test_half_a_line_at_the_end_was_never_written(store_run):
    folder = store_run()
    with (folder / "rounds.jsonl").open("a") as file:
        file.write('{"round": 7, "coh')
    assert len(read_run(folder).rounds) == 6


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"is not a run: it has no config.toml and no manifest.json; expected"):
        read_run(tmp_path)


def test_a_run_without_a_finished_round_is_refused(store_run):
    folder = store_run(rounds=[])
    with pytest.raises(CheckpointError, match="has no finished round yet; expected at least one"):
        read_run(folder)


def test_another_schema_is_refused_with_the_version_that_reads_it(store_run):
    folder = store_run(schema_version=2, packages={"potluck": "0.9.0"})
    with pytest.raises(
        CheckpointError, match=r"has schema version 2; this Potluck reads version 1; .* Potluck 0\.9\.0"
    ):
        read_run(folder)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("rounds.jsonl", '{"round": 3,', '{"round": 3;', r"rounds.jsonl, line 3, is damaged: Expecting"),
        ("rounds.jsonl", '{"round": 3,', '{"round": 8,', r"rounds.jsonl is damaged: its rounds are not 1, 2, 3"),
        ("rounds.jsonl", "bytes_up", "bytes_vp", r"rounds.jsonl, line 1, is damaged: it has no 'bytes_up'"),
        ("rounds.jsonl", '{"round": 1', b"\xff\xff", r"line 1, is damaged"),
        ("clients.jsonl", '"client"', '"clone"', r"clients.jsonl, line 1, is damaged: it has no 'client'"),
        ("manifest.json", "{", "[", r"manifest.json is damaged"),
        ("manifest.json", "schema_version", "schema", r"manifest.json is damaged: it has no 'schema_version'"),
        ("config.toml", "[run]", "[run", r"config.toml is damaged"),
        ("config.toml", "seed", "sid", r"config.toml has no run.seed; expected the resolved configuration"),
        ("config.toml", "[method]", "[way]", r"config.toml has no method.name"),
        ("checkpoint/last.json", '"round": 6', '"round": 5', r"last.json is damaged: its content does not match"),
        ("checkpoint/last.json", '"seal"', '"sael"', r"last.json is damaged: it has no 'seal'"),
        ("checkpoint/last.json", "{", "[", r"last.json is damaged"),
    ],
)
def test_damage_is_named_by_its_place(store_run, name, old, new, message):
    folder = store_run()
    checkpoint(folder, 6)
    file = folder / name
    new = new if isinstance(new, bytes) else new.encode()
    file.write_bytes(file.read_bytes().replace(old.encode(), new, 1))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_run(folder)
    assert "\n" not in str(caught.value)


def test_runs_are_found_by_themselves_and_in_their_folder_each_once(store_run):
    second, first = store_run("b"), store_run("a")
    (first.parent / "notes").mkdir()
    assert find_runs([first.parent]) == [first, second]
    assert find_runs([second]) == [second]
    assert find_runs([second, first.parent]) == [second, first]


def test_runs_that_have_only_begun_are_skipped(store_run):
    finished, begun = store_run("finished"), store_run("begun", rounds=[], status="running")
    just_made = store_run("just_made", status="new")
    (just_made / "rounds.jsonl").unlink()
    assert find_runs([finished.parent]) == [finished]
    with pytest.raises(CheckpointError, match="begun: found no run with a finished round; expected a folder"):
        find_runs([begun])


def test_a_path_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: no such folder; expected a run, or a folder of runs"):
        find_runs([tmp_path / "nowhere"])


def test_half_a_run_is_found_so_that_reading_it_tells_what_is_missing(store_run):
    folder = store_run()
    (folder / "config.toml").unlink()
    with pytest.raises(CheckpointError, match=r"is not a run: it has no config.toml; expected"):
        read_run(*find_runs([folder]))
