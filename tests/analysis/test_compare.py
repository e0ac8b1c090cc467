import csv
import json
import math

import pytest

from potluck.analysis.compare import compare, interval, unequal
from potluck.analysis.export import comma_separated, latex, markdown, table_of, target_table_of, write_comparison
from potluck.analysis.read import read_run, seconds
from potluck.core.ground.errors import ConfigError
from potluck.records import ACCURACY

BASE, BETTER = (0.5, 0.6, 0.7), (0.6, 0.72, 0.78)  # by seed; differences 0.1, 0.12, 0.08


@pytest.fixture
def runs(store_run, make_round):
    """Two methods, three seeds each, whose scores in the last round are BASE and BETTER."""

    def stored(method, seed, score):
        rounds = [make_round(1, personal=[score - 0.2] * 4), make_round(2, personal=[score] * 4, common=score / 2)]
        folder = store_run(f"{method}-{seed}", rounds, method=method, seed=seed, planned=2)
        lines = [{"round": n, "seconds_local": 3.0 + seed, "seconds_server": 1.0} for n in (1, 2)]
        (folder / "timings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return read_run(folder)

    scores = {"base": BASE, "better": BETTER}
    return [stored(method, seed, score) for method, of in scores.items() for seed, score in enumerate(of)]


def test_interval__is_students():
    found = interval([1.0, None, 2.0, 4.0])
    assert found.count == 3
    assert found.mean == pytest.approx(7 / 3)
    deviation = math.sqrt(sum((x - 7 / 3) ** 2 for x in (1, 2, 4)) / 2)
    assert found.half == pytest.approx(4.302653 * deviation / math.sqrt(3), rel=1e-6)  # 97.5 % of Student's, 2 degrees
    assert interval([None]) is None
    assert interval([3.0]).half is None


def test_compare__differences_are_within_a_seed(runs):
    base, better = compare(runs)
    assert base.difference is None
    assert better.scores["personal"].mean == pytest.approx(0.7)
    assert better.difference.by.mean == pytest.approx(0.1)
    assert better.difference.by.half == pytest.approx(4.302653 * 0.02 / math.sqrt(3), rel=1e-6)
    statistic = 0.1 / (0.02 / math.sqrt(3))  # with two degrees of freedom p = 1 - t / sqrt(2 + t^2)
    assert better.difference.p == pytest.approx(1 - statistic / math.sqrt(2 + statistic**2), rel=1e-6)


def test_compare__against_names_the_reference(runs):
    base, better = compare(runs, against="better")
    assert better.difference is None
    assert base.difference.by.mean == pytest.approx(-0.1)
    with pytest.raises(ConfigError, match="no experiment 'beter' to compare with; expected one of these: better"):
        compare(runs, against="beter")


def test_compare__p_is_raised_for_the_number_of_experiments(runs, store_run, make_round):
    worse = [
        read_run(
            store_run(
                f"worse-{seed}",
                [make_round(1), make_round(2, personal=[score] * 4)],
                method="worse",
                seed=seed,
                planned=2,
            )
        )
        for seed, score in enumerate((0.1, 0.2, 0.31))
    ]
    alone = [compare([*runs[:3], *others])[1].difference.p for others in (runs[3:], worse)]
    together = [row.difference.p for row in compare([*runs, *worse])[1:]]
    small, large = sorted(alone)
    assert sorted(together) == pytest.approx([2 * small, max(2 * small, large)])


def test_compare__seeds_that_only_one_has_are_left_out(runs):
    (_, better) = compare([runs[0], *runs[3:]])
    assert better.difference.by.count == 1
    assert better.difference.p is None


def test_compare__equal_differences_have_no_p(runs, store_run, make_round):
    shifted = [
        read_run(
            store_run(f"up-{seed}", [make_round(1), make_round(2, personal=[score + 0.25] * 4)], method="up", seed=seed)
        )
        for seed, score in enumerate((0.25, 0.5))
    ]
    level = [
        read_run(store_run(f"at-{seed}", [make_round(1), make_round(2, personal=[score] * 4)], method="at", seed=seed))
        for seed, score in enumerate((0.25, 0.5))
    ]
    assert compare([*level, *shifted])[1].difference.p is None


def test_compare__counts_what_it_took_to_reach_a_target(runs):
    base, better = compare(runs, target=0.49)
    # Base: 0.3 then 0.5, 0.4 then 0.6, 0.5 at once; better: 0.4 then 0.6, 0.52 at once, 0.58 at once.
    assert (base.reached.count, base.reached.rounds.mean) == (3, pytest.approx(5 / 3))
    assert better.reached.rounds.mean == pytest.approx(4 / 3)
    assert better.reached.megabytes.mean == pytest.approx(2 * 4 / 3)  # 2 MB a round
    assert better.reached.seconds.mean == pytest.approx((2 * 4 + 5 + 6) / 3)
    (nobody, _) = compare(runs, target=0.9)
    assert (nobody.reached.count, nobody.reached.rounds) == (0, None)


@pytest.mark.parametrize("damage", ["", '{"round": 1, "seco\n', "[]\n", '{"round": null}\n'])
def test_seconds__are_those_of_the_rounds_that_have_them(runs, damage):
    assert seconds(runs[1]) == {1: 5.0, 2: 5.0}
    kept = json.dumps({"round": 2, "seconds_local": 1.5, "seconds_server": 0.5})
    for run in runs[:3]:
        (run.folder / "timings.jsonl").write_text(f"{damage}{kept}\n")
    assert seconds(runs[1]) == {2: 2.0}
    (base, _) = compare(runs, target=0.6)
    assert base.seconds.mean == 2.0
    assert base.reached.seconds.mean == 2.0
    (runs[1].folder / "timings.jsonl").unlink()
    assert seconds(runs[1]) == {}


def test_unequal__names_what_differs_besides_the_method(store_run):
    first = read_run(store_run("one", method="base"))
    second = read_run(store_run("two", method="better", dataset="mnist", lr=0.1))
    found = unequal([first, second])
    assert list(found) == ["method.training.lr"]  # the data set is in the names of the blocks
    assert sorted(found["method.training.lr"].values()) == ["0.005", "0.1"]


def test_unequal__names_local_training_that_differs_unless_the_labels_do(store_run):
    runs = [read_run(store_run(method, method=method)) for method in ("base", "better")]
    assert unequal(runs) == {}
    config = runs[1].folder / "config.toml"
    config.write_text(config.read_text().replace("[method.training]", "[method.training]\nepochs = 5"))
    assert unequal([runs[0], read_run(runs[1].folder)]) == {}  # which the other does not have
    first = runs[0].folder / "config.toml"
    first.write_text(first.read_text().replace("[method.training]", "[method.training]\nepochs = 1"))
    found = unequal([read_run(run.folder) for run in runs])
    assert found == {"method.training.epochs": {"base": "1", "better": "5"}}


def test_table_of__shows_percent_with_intervals(runs):
    table = table_of(compare(runs), ACCURACY)
    assert table.columns == (
        *("", "seeds", "own test parts (%)", "common test set (%)", "difference", "p", "MB", "seconds"),
    )
    assert table.rows[1][:2] == ("better", "3")
    assert table.rows[1][2].startswith("70.0 ± ")
    assert table.rows[1][4].startswith("+10.0 ± 5.0")
    assert table.rows[1][5].endswith(" *")
    assert table.rows[0][4:6] == ("–", "–")
    assert table.rows[0][6] == "4"
    assert target_table_of(compare(runs, target=0.75)).rows == (
        ("base", "0 of 3", "–", "–", "–"),
        ("better", "1 of 3", "2", "4", "12"),
    )


def test_comma_separated__has_the_numbers_of_the_records(runs):
    lines = list(csv.DictReader(comma_separated(compare(runs, target=0.49)).splitlines()))
    assert [line["experiment"] for line in lines] == ["base", "better"]
    assert float(lines[1]["personal"]) == pytest.approx(0.7)
    assert float(lines[1]["difference"]) == pytest.approx(0.1)
    assert lines[0]["difference"] == lines[0]["p"] == ""
    assert lines[1]["seeds_at_target"] == "3"


def test_markdown_and_latex__escape_what_they_must(runs):
    table = table_of(compare(runs), ACCURACY)
    renamed = type(table)(table.columns, (("a|b_c & d", *table.rows[0][1:]),))
    assert markdown(renamed).splitlines()[2].startswith("| a\\|b_c & d | 3 |")
    assert "a|b\\_c \\& d & 3" in latex(renamed)
    assert r"own test parts (\%)" in latex(renamed)


@pytest.mark.parametrize(
    ("name", "expected"), [("t.md", "| better | 3 |"), ("t.tex", "\\toprule"), ("t.csv", "better,3,2")]
)
def test_write_comparison__writes_the_format_of_the_name(runs, tmp_path, name, expected):
    write_comparison(compare(runs), ACCURACY, tmp_path / "new" / name)
    assert expected in (tmp_path / "new" / name).read_text()


def test_write_comparison__refuses_other_names(runs, tmp_path):
    with pytest.raises(
        ConfigError, match=r"t\.xls: a table is written as \.md, \.csv, \.tex; give the file such a name"
    ):
        write_comparison(compare(runs), ACCURACY, tmp_path / "t.xls")
