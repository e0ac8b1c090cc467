import pytest

from potluck.analysis.read import read_run
from potluck.analysis.tables import (
    NoteRow,
    Spread,
    TrafficRow,
    architecture_table,
    curve,
    group_table,
    note_table,
    rounds_to,
    run_table,
    running_means,
    spread,
    target_table,
    traffic_table,
)
from potluck.core.ground.errors import CheckpointError

LARGE = "large(width=8)"


@pytest.fixture
def run(store_run):
    return read_run(store_run())


@pytest.fixture
def seeds(store_run, make_round):
    """Three seeds of one experiment, whose clients reach 40 %, 50 % and 90 % in their only round."""
    reached = [[0.3, 0.5, 0.4, 0.4], [0.4, 0.6, 0.5, 0.5], [0.8, 1.0, 0.9, 0.9]]
    return [
        read_run(
            store_run(
                f"seed{seed}",
                [make_round(1, personal=personal, validation=0.5, common=0.5, down=(seed + 1) * 1_000_000)],
                seed=seed,
                planned=1,
            )
        )
        for seed, personal in enumerate(reached)
    ]


def test_spread_is_over_the_values_that_there_are():
    assert spread([0.4, None, 0.5, 0.9]) == Spread(pytest.approx(0.6), pytest.approx(0.07**0.5), 3)
    assert spread([None, 0.25]) == Spread(0.25, None, 1)
    assert spread([None]) is None


def test_architectures_at_the_last_and_at_the_chosen_round(run):
    small, large = architecture_table([run])
    assert (small.architecture, small.clients) == ("small", 2)
    assert small.personal_last == Spread(pytest.approx(0.4), None, 1)
    assert small.common_last == Spread(pytest.approx(0.4), None, 1)
    assert small.personal_chosen == Spread(pytest.approx(0.3), None, 1)
    assert small.common_chosen == Spread(pytest.approx(0.25), None, 1)
    assert (large.architecture, large.clients) == (LARGE, 2)
    assert large.personal_last == Spread(pytest.approx(0.7), None, 1)
    assert large.personal_chosen == Spread(pytest.approx(0.5), None, 1)


def test_architectures_over_seeds(seeds):
    small, large = architecture_table(seeds)
    assert small.clients == large.clients == 2
    assert small.personal_last == Spread(pytest.approx(0.6), pytest.approx(0.07**0.5), 3)


def test_architectures_of_a_run_that_was_not_evaluated(store_run, make_round):
    assert architecture_table([read_run(store_run(rounds=[make_round(1)]))]) == []


def test_a_run_has_its_headlines_and_its_traffic(run):
    (row,) = run_table([run])
    assert (row.name, row.label, row.method, row.dataset, row.seed) == ("run", "fedin", "fedin", "digits", 0)
    assert (row.rounds, row.rounds_planned) == (6, 6)
    assert row.last.accuracy_personal_mean == pytest.approx(0.55)
    assert row.last.accuracy_personal_std == pytest.approx(0.0325**0.5)
    assert row.last.accuracy_personal_worst == 0.3
    assert (row.last.accuracy_common_mean, row.last.accuracy_global) == (0.5, 0.575)
    assert (row.chosen.round, row.chosen.accuracy_personal_mean) == (2, pytest.approx(0.4))
    assert row.megabytes_down == pytest.approx((5 * 1.5 + 3.0) / 6)
    assert row.megabytes_up == pytest.approx(0.5)


def test_an_experiment_is_averaged_over_its_seeds(seeds):
    (row,) = group_table(seeds)
    assert (row.label, row.seeds, row.rounds, row.experiment_id) == ("fedin", (0, 1, 2), 1, seeds[0].experiment_id)
    assert row.last.rounds == row.chosen.rounds == (1, 1, 1)
    assert row.last.personal == Spread(pytest.approx(0.6), pytest.approx(0.07**0.5), 3)
    assert row.last.worst == Spread(pytest.approx(0.5), pytest.approx(0.07**0.5), 3)
    assert row.last.common == Spread(0.5, 0.0, 3)
    assert row.last.global_model is None
    assert row.megabytes_down == pytest.approx(2.0)


def test_traffic_by_entry(run):
    assert traffic_table([run]) == [
        TrafficRow("examples", 0.0, pytest.approx(0.00008)),
        TrafficRow("weights", pytest.approx(1.75), pytest.approx(0.49992)),
    ]


@pytest.mark.parametrize(
    ("target", "measure", "reached"),
    [
        (0.0, "personal", 2),
        (0.4, "personal", 2),
        (0.41, "personal", 4),
        (0.61, "personal", None),
        (0.55, "common", 4),
        (0.5, "global", 4),
        (0.63, "global", None),
    ],
)
def test_rounds_to_a_target_count_the_first_evaluated_round_that_reaches_it(run, target, measure, reached):
    assert rounds_to(run, target, measure) == reached


def test_speed_up_is_against_a_named_run(store_run, make_round):
    fast = [make_round(1), make_round(2, personal=[0.6] * 4)]
    slow = [*(make_round(number) for number in range(1, 5)), make_round(5, personal=[0.6] * 4)]
    never = [make_round(1), make_round(2), make_round(3, personal=[0.5] * 4), make_round(4)]
    unknown = [make_round(1)]
    runs = [
        read_run(store_run(name, rounds, method=name))
        for name, rounds in {"fast": fast, "slow": slow, "never": never, "unknown": unknown}.items()
    ]
    rows = target_table(runs, 0.6, against="slow")
    assert [row.text for row in rows] == ["2", "5", ">3", "not evaluated"]
    assert [row.speedup for row in rows] == [2.5, 1.0, None, None]
    assert [row.speedup for row in target_table(runs, 0.6, against="never")] == [None] * 4
    assert [row.speedup for row in target_table(runs, 0.6)] == [None] * 4


def test_a_run_to_compare_with_must_be_there(run):
    with pytest.raises(CheckpointError, match="no run 'rum' to compare with; expected the name of one of these: run"):
        target_table([run], 0.5, against="rum")


def test_a_curve_has_the_evaluated_rounds_over_what_was_sent_until_then(run):
    points = curve([run], lambda record: record.value("personal", "accuracy"))
    assert [point.round for point in points] == [2, 4, 6]
    assert [point.megabytes for point in points] == pytest.approx([4.0, 8.0, 13.5])
    assert [point.value.mean for point in points] == pytest.approx([0.4, 0.6, 0.55])


def test_a_curve_over_seeds_has_the_points_that_all_have(seeds, run):
    (point,) = curve(seeds, lambda record: record.by_architecture("personal", "accuracy").get("small"))
    assert point.value == Spread(pytest.approx(0.6), pytest.approx(0.07**0.5), 3)
    assert point.megabytes == pytest.approx(2.5)
    assert curve([run, seeds[0]], lambda record: record.by_architecture("personal", "accuracy").get("small")) == []
    assert curve([run], lambda record: record.by_architecture("personal", "accuracy").get("tiny")) == []


@pytest.mark.parametrize(
    ("window", "means"),
    [(1, [4.0, 2.0, 9.0, 1.0]), (2, [4.0, 3.0, 5.5, 5.0]), (3, [4.0, 3.0, 5.0, 4.0]), (9, [4.0, 3.0, 5.0, 4.0])],
)
def test_running_means_are_over_the_latest_values_and_at_the_start_over_fewer(window, means):
    assert running_means([4.0, 2.0, 9.0, 1.0], window) == means
    assert running_means([], window) == []


def test_a_smoothed_curve_takes_each_runs_latest_evaluations_and_then_the_mean_over_seeds(store_run, make_round):
    often = [make_round(n, personal=[share] * 4) for n, share in enumerate((0.1, 0.3, 0.8, 0.4), start=1)]
    seldom = [make_round(n, personal=[0.5 + n / 10] * 4 if n % 2 == 0 else None) for n in range(1, 5)]
    runs = [read_run(store_run(f"s{seed}", lines, seed=seed)) for seed, lines in enumerate((often, seldom))]
    points = curve(runs, lambda record: record.value("personal", "accuracy"), smooth=2)
    assert [(point.round, point.value.mean) for point in points] == [
        (2, pytest.approx((0.2 + 0.7) / 2)),  # (0.1 + 0.3) / 2 of the one, its only one of the other
        (4, pytest.approx((0.6 + 0.8) / 2)),  # rounds 3 and 4 of the one, 2 and 4 of the other
    ]
    assert points[-1].value.std == pytest.approx(0.02**0.5)


def test_note_table__has_a_row_for_each_run_and_note_with_its_last_value(store_run, make_round):
    noted = [{"norm": 2.0, "clients/conflict": 0.5}, {"norm": 4.0}, {"norm": 3.0}]
    lines = [{**make_round(number), "notes": notes} for number, notes in enumerate(noted, start=1)]
    runs = [read_run(store_run("a", lines)), read_run(store_run("b", [make_round(1)]))]
    assert note_table(runs) == [
        NoteRow("a", "clients/conflict", round=1, value=0.5, first=0.5, low=0.5, high=0.5),
        NoteRow("a", "norm", round=3, value=3.0, first=2.0, low=2.0, high=4.0),
    ]
