"""Who profits and who loses, with numbers written by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import t, ttest_1samp, ttest_rel

from potluck.analysis.gains import gains
from potluck.analysis.read import read_run
from potluck.core.ground.errors import ConfigError
from potluck.records import Metric


@pytest.fixture
def scored(store_run, make_round, write_clients):
    """A function that stores a run of one evaluated round whose clients have these accuracies."""

    def stored(name, values, **facts):
        folder = store_run(name, [make_round(1, personal=[0.5] * 4)], planned=1, **facts)
        return read_run(write_clients(folder, values))

    return stored


@pytest.fixture
def three_seeds(scored):
    alone = [[0.5, 0.6, 0.7], [0.4, 0.6, 0.75], [0.5, 0.65, 0.7]]
    ours = [[0.7, 0.62, 0.6], [0.62, 0.6, 0.66], [0.69, 0.66, 0.62]]
    runs = [scored(f"l{seed}", values, method="local", seed=seed) for seed, values in enumerate(alone)]
    runs += [scored(f"a{seed}", values, method="fedavg", seed=seed) for seed, values in enumerate(ours)]
    return runs, np.array(ours) - np.array(alone), alone, ours


def test_gains__are_paired_seed_by_seed_with_intervals_over_seeds_and_over_clients(three_seeds):
    runs, gaps, _, _ = three_seeds
    (found,) = gains(runs)
    assert (found.experiment, found.against) == ("fedavg", "local")
    over_seeds, over_clients = gaps.mean(1), gaps.mean(0)
    for interval, values in ((found.over_seeds, over_seeds), (found.over_clients, over_clients)):
        assert interval.mean == pytest.approx(gaps.mean())
        half = t.ppf(0.975, 2) * values.std(ddof=1) / np.sqrt(3)
        assert interval.half == pytest.approx(half)
    assert found.p == pytest.approx(ttest_1samp(over_seeds, 0).pvalue)
    assert {name: one.mean for name, one in found.by_architecture.items()} == {
        "small": pytest.approx(gaps[:, :2].mean()),
        "large(width=8)": pytest.approx(gaps[:, 2].mean()),
    }


def test_gains__of_each_client_are_tested_and_adjusted_for_the_number_of_clients(three_seeds):
    runs, gaps, alone, ours = three_seeds
    (found,) = gains(runs)
    raw = [ttest_rel(np.array(ours)[:, client], np.array(alone)[:, client]).pvalue for client in range(3)]
    order = np.argsort(raw)
    stepped = np.maximum.accumulate([min(1, raw[client] * (3 - rank)) for rank, client in enumerate(order)])
    expected = dict(zip(order.tolist(), stepped, strict=True))
    assert [one.p for one in found.clients] == [pytest.approx(expected[client]) for client in range(3)]
    assert [one.gain.mean for one in found.clients] == [pytest.approx(gap) for gap in gaps.mean(0)]
    assert [one.client for one in found.profiting] == [0, 1]
    assert [(one.client, one.sure) for one in found.losing] == [(2, True)]
    assert [one.sure for one in found.profiting] == [True, False]
    assert found.clients[2].alone == pytest.approx(np.mean([row[2] for row in alone]))


def test_gains__need_the_same_federation_seed_and_data(scored):
    runs = [
        scored("l", [0.5, 0.5, 0.5], method="local", seed=0, data_checksum="a"),
        scored("a", [0.6, 0.5, 0.5], method="fedavg", seed=1),
        scored("b", [0.6, 0.5, 0.5], method="fedprox", seed=0, data_checksum="b"),
        scored("c", [0.6, 0.5, 0.5], method="fedper", seed=0, dataset="mnist"),
        scored("d", [0.6, 0.5, 0.5], method="fedrep", seed=0, data_checksum="a"),
    ]
    assert [one.experiment for one in gains(runs)] == ["fedrep on digits"]
    (found,) = gains(runs)
    assert (found.p, found.over_seeds.half) == (None, None)
    assert not any(one.sure for one in found.clients)
    assert gains(runs[1:]) == []


def test_gains__another_experiment_can_stand_for_training_alone(scored):
    runs = [
        scored("a", [0.5, 0.5, 0.5], method="local", lr=0.1),
        scored("b", [0.6, 0.5, 0.5], method="local", lr=0.2),
        scored("c", [0.7, 0.5, 0.5], method="fedavg"),
    ]
    with pytest.raises(ConfigError, match="'local' is several experiments"):
        gains(runs)
    found = {one.experiment: one for one in gains(runs, alone="local, lr=0.2")}
    assert found["fedavg"].over_seeds.mean == pytest.approx(0.1 / 3)
    assert found["local, lr=0.1"].over_seeds.mean == pytest.approx(-0.1 / 3)


def test_gains__of_errors_are_positive_where_they_fall(scored):
    runs = [scored("l", [2.0, 1.0, 1.0], method="local"), scored("a", [1.5, 1.0, 3.0], method="fedavg")]
    error = Metric("accuracy", "error", higher_is_better=False)
    (found,) = gains([replace(run, metrics=(error,)) for run in runs])
    assert [one.gain.mean for one in found.clients] == [0.5, 0.0, -2.0]


def test_gains__of_classes_are_in_the_share_that_is_classified_right(scored):
    counts = {
        ("local", 0): [[2, 6, 0], [5, 10, 5], [8, 12, 0]],
        ("local", 1): [[4, 3, 0], [5, 10, 5], [8, 12, 0]],
        ("fedavg", 0): [[4, 3, 0], [6, 10, 4], [8, 12, 0]],
        ("fedavg", 1): [[5, 6, 0], [6, 10, 4], [8, 12, 0]],
    }
    runs = []
    for (method, seed), rows in counts.items():
        run = scored(f"{method}{seed}", [0.5, 0.5, 0.5], method=method, seed=seed)
        (run.folder / "classes.json").write_text(json.dumps({"round": 1, "confusion": None, "counts": rows}))
        runs.append(run)
    (found,) = gains(runs)
    assert {number: one.mean for number, one in found.by_class.items()} == {
        0: pytest.approx((2 / 8 + 1 / 8) / 2),
        1: pytest.approx((-3 / 12 + 3 / 12) / 2),
    }
    assert found.by_class[0].half == pytest.approx(t.ppf(0.975, 1) * np.std([2 / 8, 1 / 8], ddof=1) / np.sqrt(2))
