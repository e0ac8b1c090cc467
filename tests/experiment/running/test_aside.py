"""Whoever is late again and again is set aside, by what the records say alone."""

import json
from dataclasses import replace

import pytest

from potluck.core.ground.errors import ConfigError
from potluck.experiment.running.aside import SetAside
from potluck.experiment.running.run import Run
from potluck.experiment.settings.aside import AsideRule
from potluck.experiment.settings.presets import experiment_for
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import RoundsClose, RunConfig
from potluck.methods import get_method
from potluck.records import RoundRecord
from potluck.testing.worlds import World, quick, toy_federation
from potluck.twin.devices import Fleet, Twin, TwinDevice
from potluck.twin.simulate import Load, simulate
from potluck.twin.timeline import Errand

RULE = AsideRule(late=2, of=3, rest=3)
DEVICES = (TwinDevice(clients="0", latency_s=5.0), TwinDevice(latency_s=0.5))
EVERYBODY = [0, 1, 2, 3]


def configured(rule=RULE, rounds=8, **close):
    closes = RoundsClose(deadline_s=1.0, set_aside=rule, **close)
    run = RunConfig(rounds=rounds, executor="sequential", tolerate_failures=True)
    return replace(run, twin=Twin(DEVICES), rounds_close=closes)


def carried_out(folder, config):
    return Run(quick(get_method("fedavg")), toy_federation(World()), config, folder).run()


def lines(folder):
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def contents(folder):
    names = ("rounds.jsonl", "clients.jsonl", "costs.jsonl", "twin.jsonl", "checkpoint/last.json")
    return [(folder / name).read_bytes() for name in names]


def test_a_client_that_is_late_again_and_again_is_not_drawn_for_a_while(tmp_path, caplog):
    result = carried_out(tmp_path, configured())
    found = lines(tmp_path)
    rest = EVERYBODY[1:]
    assert [line["cohort"] for line in found] == [*[EVERYBODY] * 2, *[rest] * 3, *[EVERYBODY] * 2, rest]
    assert [line.get("late") for line in found] == [*[[0]] * 2, *[None] * 3, *[[0]] * 2, None]
    assert [line.get("set_aside") for line in found] == [None, {"0": 5}, *[None] * 4, {"0": 10}, None]
    assert [score.client for score in result.evaluation.scores] == EVERYBODY, "by a twin's clock all are evaluated"
    said = [record.getMessage() for record in caplog.records if getattr(record, "on_screen", False)]
    assert said[0] == "client 0 is set aside for rounds 3 to 5: it was late in 2 or more of its last 3 rounds"
    assert len(said) == 2


@pytest.mark.slow
@pytest.mark.parametrize("stops", [(1,), (2,), (4, 6), (7,)])
def test_a_run_that_is_resumed_sets_the_same_clients_aside(tmp_path, stops):
    carried_out(tmp_path / "whole", configured())
    for rounds in (*stops, 8):
        carried_out(tmp_path / "parts", configured(rounds=rounds))
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_without_a_rule_the_late_are_recorded_and_drawn_again(tmp_path):
    carried_out(tmp_path, configured(rule=None, rounds=4))
    assert [line["cohort"] for line in lines(tmp_path)] == [EVERYBODY] * 4
    assert [line["late"] for line in lines(tmp_path)] == [[0]] * 4
    assert "set_aside" not in (tmp_path / "rounds.jsonl").read_text()


def test_a_simulation_foresees_who_is_set_aside(tmp_path):
    config = configured()
    aside = SetAside(config, 4)
    loads = (
        Load([{client: Errand(1, 0, 0) for client in config.cohort(EVERYBODY, number, aside.at(number))}])
        for number in range(1, 9)
    )
    rounds = aside.following(simulate(config.course(Fleet(DEVICES, EVERYBODY)), loads, config.needed))
    foreseen = [sorted(turn.client for _, turn in timed.turns) for timed in rounds]
    carried_out(tmp_path, config)
    assert foreseen == [line["cohort"] for line in lines(tmp_path)]


def test_as_many_as_a_round_needs_stay_and_the_slowest_go_first():
    aside = SetAside(configured(AsideRule(late=1, of=2, rest=1), quorum=2), 4)
    assert aside.after(1, EVERYBODY, [1, 3]) == {1: 2, 3: 2}
    aside = SetAside(configured(AsideRule(late=2, of=4, rest=9), quorum=3), 4)
    for number, late in enumerate(([2], [1, 2, 3]), start=1):
        assert aside.after(number, EVERYBODY, late) == ({} if number == 1 else {2: 11})
    assert aside.after(3, [0, 1, 3], [1, 3]) == {}, "with one more, too few would be left"
    assert aside.at(3) == {2}
    assert aside.at(12) == set()


def test_after_its_rest_a_client_begins_anew_and_only_rounds_for_which_it_was_drawn_count():
    aside = SetAside(configured(RULE), 4)
    assert aside.after(1, EVERYBODY, [0]) == {}
    assert aside.after(2, [1, 2], []) == {}
    assert aside.after(3, EVERYBODY, [0]) == {0: 6}
    assert aside.after(7, EVERYBODY, [0]) == {}
    assert aside.after(8, EVERYBODY, [0]) == {0: 11}


def test_what_records_say_counts_whatever_the_rule_was():
    empty = dict.fromkeys(RoundRecord.__dataclass_fields__)
    record = {**empty, "cohort": EVERYBODY, "late": [1], "failed": {}}
    aside = SetAside(configured(RULE), 4)
    aside.remember(
        [RoundRecord(**{**record, "round": 1}), RoundRecord(**{**record, "round": 2, "set_aside": {"3": 9}})]
    )
    assert aside.at(3) == {3}
    assert aside.after(3, [0, 1, 2], [1]) == {1: 6}


def test_others_come_in_the_place_of_those_who_are_set_aside():
    config = RunConfig(cohort_fraction=0.5)
    ids = list(range(10))
    for number in range(1, 6):
        drawn = config.cohort(ids, number)
        without = config.cohort(ids, number, {drawn[0]})
        assert len(without) == len(drawn) == 5
        assert set(drawn) - set(without) == {drawn[0]}
    assert config.cohort(ids, 1, set(range(8))) == [8, 9]


def test_the_rule_is_part_of_an_experiment_only_where_it_is_set():
    base = experiment_for("fedavg", ["run.tolerate_failures=true"])
    aside = experiment_for("fedavg", ["run.tolerate_failures=true", "run.rounds_close.set_aside={late=2}"])
    assert "set_aside" not in base.tree()["run"]["rounds_close"]
    assert aside.run.rounds_close.set_aside == AsideRule(late=2)
    assert resolve(aside.tree()).tree() == aside.tree()
    assert aside.experiment_id != base.experiment_id


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ({"rounds_close": {"set_aside": {}}}, r"set_aside: expected none without run\.tolerate_failures"),
        (
            {"tolerate_failures": True, "rounds_close": {"set_aside": {"late": 6}}},
            r"set_aside\.late: expected at most the 5 rounds that count, found 6",
        ),
        ({"tolerate_failures": True, "rounds_close": {"set_aside": {"rest": 0}}}, r"set_aside\.rest: expected"),
        (
            {
                "tolerate_failures": True,
                "twin": {},
                "rounds_close": {"set_aside": {}, "asynchronous": {"rule": "fedbuff"}},
            },
            "set_aside: expected none where rounds are asynchronous",
        ),
    ],
)
def test_a_rule_that_means_nothing_is_refused(run, expected):
    with pytest.raises(ConfigError, match=expected):
        resolve({"run": run})
