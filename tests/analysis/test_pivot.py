import pytest

from potluck.analysis.compare import ComparedRow, Difference, Interval, compare
from potluck.analysis.export import latex
from potluck.analysis.pivot import pivot_of
from potluck.analysis.read import read_run
from potluck.records import ACCURACY, Metric


def row(name, block, mean, p=None, half=None):
    difference = None if p is None else Difference(Interval(0.1, None, 3), p)
    one = Interval(1.0, None, 1)
    scores = {"personal": mean and Interval(mean, half, 3)}
    return ComparedRow(name, block, name, "local", {}, (0,), 1, scores, difference, one, one)


ROWS = [
    row("local", "alpha=0.1", 0.5, half=0.02),
    row("fed_avg", "alpha=0.1", 0.61, p=0.01),
    row("local", "alpha=1", 0.7),
    row("fed_avg", "alpha=1", 0.6, p=0.2),
    row("fedper", "alpha=1", None),
]


def test_pivot__has_settings_as_columns_the_best_of_each_in_bold_and_stars_for_small_p():
    table = pivot_of(ROWS, ACCURACY, "personal")
    assert table.columns == ("", "alpha=0.1", "alpha=1")
    assert table.rows == (
        ("local", "50.0 ± 2.0", "70.0"),
        ("fed_avg", "61.0 *", "60.0"),
        ("fedper", "–", "–"),
    )
    assert table.bold == {("fed_avg", 1), ("local", 2)}
    text = latex(table)
    assert r"local & 50.0 $\pm$ 2.0 & \textbf{70.0} \\" in text
    assert r"fed\_avg & \textbf{61.0 *} & 60.0 \\" in text


def test_pivot__of_errors_the_smallest_is_best():
    error = Metric("loss", "loss", higher_is_better=False)
    assert pivot_of(ROWS[:2], error, "personal").bold == {("local", 1)}


@pytest.mark.parametrize("others", [[], [{"method": "fedavg"}]])
def test_pivot__of_stored_runs_stands_under_the_metric_and_marks_nothing_of_one_alone(store_run, others):
    runs = [read_run(store_run(f"r{place}", **table)) for place, table in enumerate([{"method": "local"}, *others])]
    table = pivot_of(compare(runs), ACCURACY, "personal")
    assert table.columns == ("", "accuracy (%)")
    assert len(table.bold) == len(others)
