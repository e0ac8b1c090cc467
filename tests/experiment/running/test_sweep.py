import pytest

from potluck.core.ground.errors import ConfigError
from potluck.experiment.running.sweep import Search, Tuner, flat, nested, read_sweep

BASE = {"run": {"rounds": 3}, "method": {"name": "fedavg", "training": {"epochs": 2}}}


def swept(**sweep):
    return read_sweep({**BASE, "sweep": sweep}, "s.toml")


def test_read_sweep__every_value_with_every_other_and_every_seed():
    sweep = swept(**{"seeds": 2, "method.name": ["fedavg", "local"], "method.training.lr": [0.1, 0.01]})
    assert [tuple(point.values()) for point in sweep.points] == [
        *(("fedavg", 0.1), ("fedavg", 0.01), ("local", 0.1), ("local", 0.01)),
    ]
    for point in sweep.points:
        found = sweep.experiments(point)
        assert [one.run.seed for one in found] == [0, 1]
        for one in found:
            assert (one.method_name, one.method.training.lr) == tuple(point.values())
            assert (one.method.training.epochs, one.run.rounds) == (2, 3)


def test_read_sweep__takes_tables_for_dotted_keys():
    assert swept(method={"name": ["fedavg", "local"]}).points == swept(**{"method.name": ["fedavg", "local"]}).points


def test_read_sweep__rows_go_together_and_cross_the_grid():
    rows = [{"method.name": "fedprox", "method.mu": 0.1}, {"method": {"name": "local"}}]
    sweep = swept(**{"rows": rows, "run.cohort_fraction": [0.5, 1.0], "seeds": [3, 7]})
    assert [sweep.experiments(point)[1].run.seed for point in sweep.points] == [7] * 4
    assert [(one.method_name, one.run.cohort_fraction) for p in sweep.points for one in sweep.experiments(p)[:1]] == [
        *(("fedprox", 0.5), ("fedprox", 1.0), ("local", 0.5), ("local", 1.0)),
    ]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (None, r"s\.toml: it has no table \[sweep\]; list there what varies"),
        ({"method.lr": 0.1}, r"s\.toml: sweep\.method\.lr: expected a list of values, found 0\.1"),
        ({"method.lr": []}, r"sweep\.method\.lr: expected a list of values, found \[\]"),
        ({"seeds": 0}, r"sweep\.seeds: expected how many, or a list of different ones, found 0"),
        ({"seeds": [1, 1]}, r"sweep\.seeds: .*found \[1, 1\]"),
        ({"rows": "fedavg"}, r"sweep\.rows: expected a list of tables"),
        ({"method.training.lr": [0.1, "fast"]}, r"s\.toml, method\.training\.lr='fast': .*lr"),
        ({"method.mu": [0.1]}, r"method\.mu=0\.1: .*mu"),
        ({"search": {"trials": 3}}, r"sweep\.search: it names nothing to tune"),
        ({"search": {"trials": 0, "method.training.lr": [1]}}, r"sweep\.search\.trials"),
        ({"search": {"method.training.lr": {"low": 1, "high": 0.1}}}, r"sweep\.search\.method\.training\.lr: expected"),
        ({"search": {"method.training.lr": {"low": 0, "high": 1, "log": True}}}, r"with low below high, found"),
        ({"search": {"method.training.lr": {"low": 0, "high": 1, "step": 1}}}, r"with low below high, found"),
        ({"search": {"method.mu": {"low": 0.1, "high": 1}}}, r"method\.mu=0\.1: .*mu"),
    ],
)
def test_read_sweep__refuses_what_makes_no_sense_before_anything_runs(table, expected):
    with pytest.raises(ConfigError, match=expected):
        read_sweep(BASE if table is None else {**BASE, "sweep": table}, "s.toml")


def test_flat_and_nested_are_inverse():
    tree = {"method": {"name": "fedavg", "training": {"lr": 0.1}}, "run": {"rounds": 2}}
    assert nested(flat(tree)) == tree


def proposals(scores, together=2, seed=0):
    """What a tuner proposes, if every proposal scores as `scores` says."""
    search = Search(trials=8, together=together, space=(("x", {"low": 0.0, "high": 1.0}), ("kind", ["a", "b"])))
    tuner, found = Tuner(search, higher_is_better=True, seed=seed), []
    for batch in tuner.batches():
        for trial, settings in batch:
            found.append(settings)
            tuner.tell(trial, scores(settings))
    return found


def test_tuner__proposes_the_same_if_everything_goes_the_same():
    def score(settings):
        return None if settings["kind"] == "b" else -((settings["x"] - 0.3) ** 2)

    first = proposals(score)
    assert len(first) == 8
    assert all(0 <= settings["x"] <= 1 and settings["kind"] in "ab" for settings in first)
    assert first == proposals(score) != proposals(score, seed=1)


def test_tuner__learns_from_what_it_is_told():
    search = Search(trials=40, together=4, space=(("x", {"low": 0.0, "high": 1.0}),))

    def mean_of_the_last(sign):
        tuner, found = Tuner(search, higher_is_better=True, seed=0), []
        for batch in tuner.batches():
            for trial, settings in batch:
                found.append(settings["x"])
                tuner.tell(trial, sign * settings["x"])
        return sum(found[-10:]) / 10

    assert mean_of_the_last(1) > 0.7
    assert mean_of_the_last(-1) < 0.3
