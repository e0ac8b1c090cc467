"""What an analysis says first, and what it writes."""

import csv
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from potluck.analysis.findings import find
from potluck.analysis.findings_page import write_findings
from potluck.analysis.findings_tables import tables_of
from potluck.analysis.inside import EVERYBODY, Calibrated, Inside, StageOf, feature_map, similarities
from potluck.analysis.numbers.calibration import calibration
from potluck.analysis.numbers.drift import drift
from potluck.analysis.numbers.similarity import gram
from potluck.analysis.read import read_run
from potluck.core.ground.errors import ConfigError

LOCAL = [0.5, 0.5, 0.5, 0.5]


@pytest.fixture
def scored(store_run, make_round, write_clients):
    def stored(name, values, **facts):
        folder = store_run(name, [make_round(1, personal=[0.5] * 4)], planned=1, **facts)
        return read_run(write_clients(folder, values))

    return stored


@pytest.fixture
def inside():
    draws = np.random.default_rng(0)

    def of(name, experiment):
        stages = [
            StageOf(client, stage, f"layer{stage}", gram(found), found.mean((2, 3)))
            for client in range(3)
            for stage in range(2)
            for found in [draws.normal(size=(24, 3, 2, 2))]
        ]
        shares = draws.dirichlet(np.ones(4), 30)
        calibrated = Calibrated("all", EVERYBODY, 3, calibration(shares, draws.integers(4, size=30)))
        weights = {client: {"stem.weight": draws.normal(size=5)} for client in range(3)}
        mapped = feature_map(stages[1::2], [0, 1] * 12)
        return Inside(
            name,
            experiment,
            round=1,
            examples=24,
            similarity=tuple(similarities(stages)),
            drift=tuple(drift(weights)),
            calibration=(calibrated,),
            map=mapped,
        )

    return of


def test_sentences__say_who_profits_and_who_loses(scored):
    runs = [scored("l", LOCAL, method="local"), scored("a", [0.7, 0.9, 0.5, 0.4], method="fedavg")]
    runs.append(scored("b", [0.6, 0.6, 0.6, 0.6], method="fedper"))
    assert find(runs).sentences == [
        "With fedavg 2 of 4 clients do better than alone (+12.5 points in the mean); 1 loses: client 3"
        " (the most -10.0 points).",
        "With fedper 4 of 4 clients do better than alone (+10.0 points in the mean); nobody loses.",
    ]
    guide = Path(__file__).parents[2] / "docs" / "guides" / "analyse.md"
    assert find(runs).sentences[0] in guide.read_text(encoding="utf-8")


def test_sentences__have_intervals_and_tests_where_there_are_seeds(scored):
    runs = [scored(f"l{seed}", LOCAL, method="local", seed=seed) for seed in range(3)]
    for seed in range(3):
        values = [0.7 + 0.01 * seed, 0.4 + 0.001 * seed, 0.45 - 0.04 * seed, 0.55]
        runs.append(scored(f"a{seed}", values, method="fedavg", seed=seed))
    (sentence,) = find(runs).sentences
    assert re.search(r"\(\+\d\.\d points in the mean, 95 % interval [+-]\d\.\d to \+\d\.\d over 3 seeds\)", sentence)
    assert "2 lose: clients 1 and 2 (the most -9.9 points, 1 of them beyond chance)." in sentence


def test_sentences__say_what_is_missing_without_a_run_of_local(scored):
    runs = [scored("a", LOCAL, method="fedavg"), scored("b", LOCAL, method="fedper", seed=1)]
    (sentence,) = find(runs).sentences
    assert sentence.startswith("Who profits and who loses cannot be told: none of these runs is of local")
    runs += [scored("l", LOCAL, method="local", seed=1)]
    assert find(runs).sentences[-1] == "There is no run of local to hold beside fedavg."


def test_find__refuses_a_measure_that_is_not_of_single_clients(scored):
    with pytest.raises(ConfigError, match="measure 'global': who profits is told by scores of single clients"):
        find([scored("a", LOCAL)], measure="global")


def test_tables__hold_fairness_over_seeds(scored):
    first, second = [0.2, 0.4, 0.6, 0.8], [0.1, 0.4, 0.6, 0.9]
    rows = tables_of(find([scored("a", first, seed=0), scored("b", second, seed=1)]))["fairness"]
    (row,) = rows
    assert row["worst_tenth"] == pytest.approx(0.15)
    assert row["spread"] == pytest.approx((np.std(first) + np.std(second)) / 2)
    assert row["spread_half"] == pytest.approx(12.706 * abs(np.std(first) - np.std(second)) / 2, rel=1e-3)
    assert row["gini"] == pytest.approx((0.25 + 0.325) / 2)


@pytest.mark.slow
def test_write__makes_a_page_and_every_table_and_figure_and_always_the_same_bytes(scored, inside, tmp_path):
    runs = [scored("l", LOCAL, method="local"), scored("a", [0.7, 0.9, 0.5, 0.4], method="fedavg")]
    found = find(runs, [inside("local", "local"), inside("fedavg", "fedavg")], target=0.6, remarks=["<b> is left out"])
    page = write_findings(found, tmp_path / "one")
    write_findings(found, tmp_path / "two")
    files = {path.relative_to(tmp_path / "one") for path in page.parent.rglob("*") if path.is_file()}
    assert {f"analysis/{name}.csv" for name in tables_of(found)} <= {str(path) for path in files}
    assert {"analysis/heatmaps-2.pdf", "analysis/correlations-2.pdf"} <= {str(path) for path in files}
    assert all((tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes() for file in files)
    text = page.read_text(encoding="utf-8")
    assert text.index("With fedavg 2 of 4 clients do better than alone") < text.index("<main>")
    assert "&lt;b&gt; is left out" in text
    assert text.count("data:image/svg+xml") == 11
    assert "http" not in re.sub(r"data:[^\"]*|http-equiv", "", text)
    with (page.parent / "analysis" / "similarity.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 6 * 5 / 2
    row = found.inside[1].similarity[-1]
    assert float(rows[-1]["unbiased_cka"]) == row.unbiased_cka
    assert (rows[-1]["other_place"], rows[-1]["experiment"]) == ("layer1", "fedavg")


def test_similarity__between_clients_is_the_mean_over_pairs_of_one_stage(inside):
    one = inside("a", "a")
    pairs = [row for row in one.similarity if row.stage == row.other_stage == 1]
    assert len(pairs) == 3
    assert one.between_clients()[1] == (
        pytest.approx(np.mean([row.cka for row in pairs])),
        pytest.approx(np.mean([row.unbiased_cka for row in pairs])),
    )
    assert replace(one, similarity=()).between_clients() == {}
