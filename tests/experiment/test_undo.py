"""Rounds that a reply has spoilt are undone in the records and on disk too, wherever the run is interrupted."""

import json

import pytest

from potluck.core.ground.errors import ConfigError
from potluck.engine.executors.choice import ChosenExecutor
from potluck.experiment.running.run import Run
from potluck.experiment.settings.schema import RunConfig
from potluck.methods import get_method
from potluck.records import BEST, CHECKPOINT, CLIENTS, LAST, ROUNDS, Checkpoint
from potluck.testing.lying import LIAR, Lying
from potluck.testing.worlds import World, quick, toy_federation

LIES = 2, 4, 6
END = 6
METHOD = quick(get_method("moon"))  # clients keep something


def play(folder, rounds, *lies):
    """A run of four clients, among whom too few answer for a median."""
    federation = toy_federation(World(clients=4, architectures=1, batchnorm=True))
    config = RunConfig(rounds=rounds, tolerate_failures=True, outlier_factor=100.0)
    Run(METHOD, federation, config, folder, ChosenExecutor(Lying(*lies or LIES), "sequential", 1, "")).run()
    return folder


def lines(folder):
    return [json.loads(line) for line in (folder / ROUNDS).read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return play(tmp_path_factory.mktemp("whole") / "run", END)


def test_the_records_name_the_liar_and_no_honest_client(whole):
    records = lines(whole)
    assert [one.get("undone") for one in records] == [None, None, 2, None, 4, None]
    assert [one.get("outlier") for one in records] == [None, None, LIAR, None, LIAR, None]
    assert all("undone" not in one for one in records if one.get("lost") is None)
    for record in records:
        for client, reason in record["failed"].items():
            assert int(client) == LIAR or f"client {LIAR}'s reply of round" in reason
    assert list(records[5]["failed"]) == [str(LIAR)]
    assert "left out" in records[5]["failed"][str(LIAR)]


def test_what_is_kept_to_undo_a_round_is_gone_once_it_cannot_be_undone(whole):
    last, best = (Checkpoint.read(whole / CHECKPOINT / name) for name in (LAST, BEST))
    assert last.undo is None
    assert {path.name for path in (whole / CHECKPOINT).glob("*.safetensors")} == last.files | best.files


@pytest.mark.slow
@pytest.mark.parametrize("stop", [2, 3, 4])
def test_a_run_interrupted_anywhere_undoes_what_an_uninterrupted_one_does(whole, stop, tmp_path):
    folder = play(tmp_path / "run", stop)
    assert (Checkpoint.read(folder / CHECKPOINT / LAST).undo is not None) == (stop in LIES)
    play(folder, END)
    for name in (ROUNDS, CLIENTS, f"{CHECKPOINT}/{LAST}"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes(), name


def test_the_first_round_is_undone_to_the_methods_initial_state_also_after_an_interruption(tmp_path):
    folder = play(tmp_path / "run", 1, 1)
    assert Checkpoint.read(folder / CHECKPOINT / LAST).undo.state == ()
    play(folder, 3, 1)
    assert [one.get("undone") for one in lines(folder)] == [None, 1, None]
    other = play(tmp_path / "other", 3, 1)
    for name in (ROUNDS, CLIENTS, f"{CHECKPOINT}/{LAST}"):
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.parametrize("factor", [0.5, 1.0, -1.0, float("inf")])
def test_a_factor_that_would_refuse_half_of_all_is_none(factor):
    with pytest.raises(ConfigError, match=r"outlier_factor.*expected"):
        RunConfig(outlier_factor=factor)
    assert RunConfig(outlier_factor=0).outlier_factor == 0
