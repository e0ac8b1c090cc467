"""The benchmarks' settings are experiments that the package accepts; what they find is not tested here."""

import csv
import json
import sys
import tomllib
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest
import torch

from potluck.cli.compare import run_missing
from potluck.core.needs import Need
from potluck.core.requests.fit import Fit
from potluck.core.requests.schedule import Schedule
from potluck.engine.numerics.numerics import PLAIN
from potluck.experiment.running.sweep import read_sweep
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.tables import override, read_toml
from potluck.methods import list_methods
from potluck.recipes import load_recipe
from potluck.recipes.beside import plan

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def mini_table(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import mini_table

    yield mini_table
    del sys.modules["mini_table"]


@pytest.fixture
def table_runs(mini_table):
    return sys.modules["table_runs"]


def digest_of(entry):
    """Tells experiments apart, and seeds."""
    return entry.experiment.experiment_id, entry.seed


@pytest.fixture
def table():
    return tomllib.loads((BENCHMARKS / "mini_table.toml").read_text())


@pytest.mark.slow
def test_every_row_is_an_experiment_of_its_own(mini_table, table):
    entries = list(mini_table.entries(table))
    assert len({digest_of(entry) for entry in entries}) == len(entries) == len(table["rows"]) * len(table["seeds"])


@pytest.mark.slow
def test_rows_differ_in_nothing_but_method_models_what_it_needs_and_what_their_names_say(mini_table, table):
    def without(tree, *names):
        return {name: value for name, value in tree.items() if name not in names}

    def common(entry):
        tree = entry.experiment.tree()
        named = ("computing",) if entry.row.endswith(", bf16") else ()
        needs = entry.experiment.method.needs()
        given = {Need.PUBLIC_DATA: ("public", "none"), Need.VALIDATION: ("validation_fraction", 0.0)}
        held_out = {Need.VALIDATION} if entry.row.endswith("held out") else set()
        needed = dict(given[need] for need in (needs | held_out) & given.keys())
        federation = without(tree["federation"], "models", "server_model", "capacities", *needed) | needed
        plain = {name: value for name, value in asdict(PLAIN).items() if value is not None}
        return federation, {"computing": plain} | without(tree["run"], *named)

    first, *others = [common(entry) for entry in mini_table.entries(table) if entry.seed == 0]
    assert all(other == first for other in others)


@pytest.mark.slow
def test_a_finished_run_is_not_played_again_and_its_results_are_written(
    mini_table, table_runs, table, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(mini_table, "RESULTS", tmp_path / "results" / "table.csv")
    table["common"]["federation"].update(dataset="digits", clients=2, train_fraction=0.1)
    table["common"]["run"].update(rounds=2, evaluate_every=1)
    table["families"] = {"small": {"title": "Small", "federation": {"models": ["cnn2"]}, "training": {"epochs": 1}}}
    table["rows"] = [{"name": "Alone", "family": "small", "method": {"name": "local"}}]
    (entry,) = [entry for entry in mini_table.entries(table) if entry.seed == 1]
    assert not list(table_runs.finished([entry], tmp_path))
    table_runs.play_all([entry], tmp_path, processes=1)
    assert capsys.readouterr().out == "0 of 1 runs are finished\n1 of 1: Alone, seed 1\n"
    assert [found for found, _ in table_runs.finished([entry], tmp_path)] == [entry]
    table_runs.play_all([entry], tmp_path, processes=1)
    assert capsys.readouterr().out == "1 of 1 runs are finished\n"
    mini_table.write_results([entry], tmp_path, ["small"])
    mini_table.print_table(table)
    header, line = (tmp_path / "results" / "table.csv").read_text().splitlines()
    assert header.startswith("family,row,seed,rounds,common,personal,global")
    assert line.startswith("small,Alone,1,2,0.")
    assert "| Alone | 1 | " in capsys.readouterr().out


def test_results_of_runs_that_lie_elsewhere_are_kept_and_those_of_rows_that_are_gone_are_not(
    mini_table, table, tmp_path, monkeypatch
):
    place = tmp_path / "table.csv"
    monkeypatch.setattr(mini_table, "RESULTS", place)
    known = "resnet,FedAvg,1,20,0.2,0.3,,1.0,2.0,abc"
    place.write_text(f"{','.join(mini_table.COLUMNS)}\n{known}\nresnet,Gone,1,20,0.2,0.3,,1.0,2.0,abc\n")
    table |= {"rows": table["rows"][:2], "seeds": [1]}
    mini_table.write_results(list(mini_table.entries(table)), tmp_path, list(table["families"]))
    assert place.read_text().splitlines() == [",".join(mini_table.COLUMNS), known]


# MNIST-1D


@pytest.fixture
def mnist1d(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import mnist1d

    monkeypatch.setattr(mnist1d, "RESULTS", tmp_path / "results" / "table.csv")
    yield mnist1d
    del sys.modules["mnist1d"]


@pytest.fixture
def rows():
    return tomllib.loads((BENCHMARKS / "mnist1d.toml").read_text())


@pytest.mark.slow
def test_rows_of_mnist1d_have_equal_trials_and_differ_in_nothing_but_their_methods(mnist1d, rows):
    def common(entry):
        tree = entry.experiment.tree()
        training = tree["method"]["training"]
        training = {name: training[name] for name in ("batch_size", "optimizer")}
        federation = tree["federation"] | {"capacities": None}
        if entry.row == "FedH2L":  # which learns from labels of the public examples
            assert federation.pop("public_labels")
            federation["public_labels"] = False
        return federation, training, tree["run"] | {"seed": None}

    trials = list(mnist1d.tuning(rows))
    assert len({digest_of(entry) for entry in trials}) == len(trials)
    first, *others = map(common, trials)
    assert all(other == first for other in others)
    for row in rows["rows"]:
        own = [(entry.seed, entry.experiment.method.training.lr) for entry in trials if entry.row == row["name"]]
        assert own == list(product(rows["tuning"]["seeds"], rows["tuning"]["learning_rates"]))
    assert not set(rows["tuning"]["seeds"]) & set(rows["seeds"])


def line_of(row, lr, seed, validation, personal="0.5"):
    families = dict.fromkeys(("logistic", "mlp", "gru", "cnn"), "0.3")
    line = {"row": row, "lr": str(lr), "seed": str(seed), "validation": validation, "personal": personal}
    return line | families | {"common": "0.4", "global": "", "megabytes": "1.0", "seconds": "2.0"}


def test_the_learning_rate_is_chosen_on_validation_examples_and_only_when_all_are_tried(mnist1d, rows):
    rates, seeds = rows["tuning"]["learning_rates"], rows["tuning"]["seeds"]

    def trials(row, validation, seeds=seeds):
        return [line_of(row, *of, found, "0.9") for of, found in zip(product(rates, seeds), validation, strict=True)]

    lines = trials("Local", ["0.9", "0.1", "0.2", "0.5", "0.5", "0.5", "0.4", "0.4", "0.6"])  # means 0.4, 0.5, 0.47
    lines += trials("FD", ["0.5"] * 9)
    lines += trials("FML", ["0.9"] * 9)[:-1]
    lines += trials("FML", ["0.9"] * 3, seeds=[0])  # not one of tuning
    assert mnist1d.choices(rows, lines) == {"Local": rates[1], "FD": rates[0]}
    rows["seeds"] = [4, 7]
    played = list(mnist1d.tuned(rows, lines))
    assert [(entry.row, entry.lr) for entry in played[:2]] == [("Local", rates[1]), ("FD", rates[0])]
    assert [entry.seed for entry in played] == [4, 4, 7, 7]


def test_differences_from_local_are_taken_seed_by_seed_and_trials_of_tuning_left_out(mnist1d, rows, capsys):
    lines = [line_of("Local", 0.01, seed, "0.5", f"0.{seed + 1}") for seed in (0, 1)]
    lines += [line_of("FD", 0.01, seed, "0.5", f"0.{seed + 3}") for seed in (0, 1, 100)]
    mnist1d.print_table(rows, lines)
    local, fd = capsys.readouterr().out.splitlines()[3:]
    assert local.startswith("| Local | 0.01 | 2 | 40.0 ± 0.0 | 15.0 ± 7.1 | 0.0 ± 0.0 | 30.0 ± 0.0 |")
    assert fd.startswith("| FD | 0.01 | 2 | 40.0 ± 0.0 | 35.0 ± 7.1 | 20.0 ± 0.0 |")


@pytest.mark.slow
def test_a_row_of_mnist1d_is_tuned_and_played_once_and_measured_by_family(mnist1d, rows, tmp_path, capsys):
    rows["common"]["federation"].update(clients=4, train_fraction=0.1)
    rows["common"]["run"].update(rounds=2, evaluate_every=2)
    rows.update(seeds=[3], rows=rows["rows"][:1])
    rows["tuning"].update(learning_rates=[0.0, 0.01], seeds=[100])
    mnist1d.play_all(list(mnist1d.tuning(rows)), tmp_path, processes=1)
    (entry,) = mnist1d.tuned(rows, mnist1d.lines_of(list(mnist1d.tuning(rows)), tmp_path))
    mnist1d.play_all([entry], tmp_path, processes=1)
    lines = mnist1d.write_results(rows, tmp_path)
    assert mnist1d.write_results(rows, tmp_path / "elsewhere") == lines == mnist1d.read_results()
    assert [(line["row"], line["seed"]) for line in lines] == [("Local", "100"), ("Local", "100"), ("Local", "3")]
    shares = [float(lines[-1][family]) for family in mnist1d.FAMILIES]
    assert abs(sum(shares) / 4 - float(lines[-1]["common"])) < 1e-3
    capsys.readouterr()
    mnist1d.play_all([entry], tmp_path, processes=1)
    assert capsys.readouterr().out == "1 of 1 runs are finished\n"


def test_the_report_that_is_measured_is_on_every_method(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import report_size

    plan = read_sweep(tomllib.loads(report_size.sweep_of_all()), "sweep.toml")
    assert [point["method.name"] for point in plan.points] == list_methods()


@pytest.fixture
def long_horizon(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import long_horizon

    monkeypatch.setattr(long_horizon, "TABLE", tmp_path / "table.csv")
    monkeypatch.setattr(long_horizon, "CURVES", tmp_path / "curves.png")
    yield long_horizon
    del sys.modules["long_horizon"]


def folder_with(place, method, accuracies):
    place.mkdir(parents=True)
    (place / "config.toml").write_text(f"[run]\nseed = 0\n[method]\n{method}\n")
    (place / "manifest.json").write_text(json.dumps({"git_commit": "0123456789", "machine": "one"}))
    lines = [
        {"round": n, "bytes_down": 10**6, "bytes_up": 10**6, "loss_local": 1.0, "accuracy_common_mean": a}
        | {"accuracy_personal_mean": None}
        for n, a in enumerate(accuracies, start=1)
    ]
    (place / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.slow
def test_the_longer_of_two_runs_of_one_row_is_kept(long_horizon, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["long_horizon.py", str(tmp_path / "first")])
    folder_with(tmp_path / "first/a", 'name = "fedavg"', [0.1, None, 0.35])
    folder_with(tmp_path / "first/b", 'name = "fedin"\nnoise = 0.8', [0.2])
    long_horizon.main()
    assert "| fedavg, seed 0 | 3 | 22.5 % | 3 | – | – | – |" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["long_horizon.py", str(tmp_path / "second")])
    folder_with(tmp_path / "second/a", 'name = "fedavg"', [0.1, None, 0.35, 0.45])
    folder_with(tmp_path / "second/b", 'name = "fedin"\nnoise = 0.8', [])
    long_horizon.main()
    shown = capsys.readouterr().out
    assert "| fedavg, seed 0 | 4 | 30.0 % | 3 | 4 | – | – |" in shown
    assert "| fedin + noise, seed 0 | 1 | 20.0 % | – | – | – | – |" in shown
    assert (tmp_path / "curves.png").stat().st_size > 1000


CLAIM = """\
title = "Two methods on digits"
[paper]
title = "A paper"
place = "our own size"
url = "https://example.org"
[measured]
by = "common"
words = "it has no numbers at this size."
[experiment.federation]
dataset = "digits"
train_fraction = 0.1
clients = 3
models = [{ name = "cnn2", width = 2 }]
[experiment.run]
rounds = 20
evaluate_every = 2
[settings.digits]
images = 1437
[[columns]]
title = "accuracy"
setting = "digits"
[[rows]]
name = "Alone"
paper = [""]
method.name = "local"
[[rows]]
name = "Together"
paper = [""]
method.name = "fedavg"
"""


RESUMED = {"last_round": 4, "potluck_commit": "fedcba9876543210"}


@pytest.fixture
def claims(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import claims

    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    yield claims
    del sys.modules["claims"]


@pytest.mark.slow
def test_claims_are_of_finished_runs_alone_and_keep_what_is_not_at_hand(claims, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.toml").write_text(CLAIM)
    recipe = load_recipe(str(tmp_path / "mine.toml"))
    alone, together = plan(recipe, 1.0, 1)
    run_missing([alone.experiment], tmp_path / "first", 1, ["alone"])
    run_missing(
        [replace(together.experiment, run=replace(together.experiment.run, rounds=2))], tmp_path / "first", 1, [""]
    )
    run_missing([together.experiment], tmp_path / "second", 1, ["together"])
    (place,) = (tmp_path / "second").glob("*/manifest.json")
    place.write_text(json.dumps({**(now := json.loads(place.read_text())), "earlier": [{**now, **RESUMED}]}))
    for folder in ("first", "second"):
        monkeypatch.setattr(sys, "argv", ["claims.py", str(tmp_path / "mine.toml"), str(tmp_path / folder)])
        claims.main()
    first, second = capsys.readouterr().out.split("| row |")[1:]
    assert ("| Alone | 1 |" in first, "| Together | 1 |" in first) == (True, False)
    assert "| Together | 1 |" in second
    with (tmp_path / "mine.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["row"], line["round"]) for line in lines] == [
        (name, str(number)) for name in ("Alone", "Together") for number in range(2, 21, 2)
    ]
    assert [line["round"] for line in lines if line["commit"] == "fedcba9"] == ["2", "4"]  # each its own commit
    (last,) = [line for line in lines if line["row"] == "Alone" and line["digest"]]
    assert last["round"] == "20"
    assert f"| Alone | 1 | {100 * float(last['accuracy']):.1f} |" in second  # of 20 rounds the last tenth is one look
    assert claims.interval([50.0, 52.0]) == "51.0 ± 12.7"  # Student's 12.71 of one degree of freedom


@pytest.mark.slow
def test_claims_with_changed_settings_are_lines_of_their_own(claims, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.toml").write_text(CLAIM)
    changes = ["method.training.lr=0.01"]
    for of in ([], changes):
        alone, _ = plan(load_recipe(str(tmp_path / "mine.toml")), 1.0, 1, of)
        run_missing([alone.experiment], tmp_path / "runs", 1, ["alone"])
        monkeypatch.setattr(sys, "argv", ["claims.py", str(tmp_path / "mine.toml"), str(tmp_path / "runs"), *of])
        claims.main()
    said = capsys.readouterr().out.split("| row |")[-1]
    assert "| Alone | 1 |" in said
    assert "| Alone, method.training.lr=0.01 | 1 |" in said
    lines = claims.runs_in(tmp_path / "mine.csv")
    assert list(lines) == [("Alone", "", "0"), ("Alone", changes[0], "0")]


def test_a_claim_has_come_to_rest_by_its_last_two_fifths(claims):
    lines = [{"round": str(number), "accuracy": str(number / 100)} for number in range(5, 55, 5)]
    assert claims.still_moves(lines) == pytest.approx(10)  # 42.5 less 32.5: of rounds 35, 40 and 45, 50
    assert claims.reached(lines, 0.3) == "30"
    assert claims.reached(lines, 0.6) == "–"


def test_a_short_run_and_a_long_one_compare_over_the_same_rounds(claims, capsys):
    numbers = [(20, 0.1, 0.2), (40, 0.2, 0.4), (60, 0.4, 0.6), (80, 0.9, 0.9)]
    lines = [{"round": str(at), "accuracy": str(one), "personal": str(own)} for at, one, own in numbers]
    runs = {("A", "", "0"): lines, ("A", "", "1"): lines[1:], ("A", "lr=1", "1"): lines[:2], ("B", "", "0"): lines[:1]}
    claims.print_between(runs, 40, 60)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| A | 0, 1 | 30.0, 30.0 | 50.0, 50.0 |",
        "| A, lr=1 | 1 | 20.0 | 40.0 |",
        "| B | 0 | – | – |",
    ]


def test_rows_whose_means_are_of_other_seeds_are_drawn_apart(claims, tmp_path):
    lines = [{"round": str(number), "accuracy": str(number / 100)} for number in range(5, 55, 5)]
    runs = {("A", "", "0"): lines, ("A", "", "1"): lines, ("B", "", "1"): lines, ("C", "", "0"): lines}
    runs |= {("D", "", seed): lines for seed in "01"}
    assert claims.panels(runs) == [["A", "D"], ["C"], ["B"]]
    assert claims.panels({name: of for name, of in runs.items() if name[0] in "AD"}) == [["A", "D"]]
    claims.draw(runs, tmp_path / "apart.png")
    assert (tmp_path / "apart.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "long_horizon").glob("*.toml")), ids=lambda path: path.stem)
def test_long_runs_differ_in_their_methods_alone(path):
    tree = read_toml(path)
    resolve(tree, str(path))
    first = read_toml(BENCHMARKS / "long_horizon" / "fedavg.toml")
    assert (tree["federation"], tree["run"]) == (first["federation"], first["run"])


# Runs that are killed


@pytest.fixture
def kills(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import kills

    yield kills
    del sys.modules["kills"]


@pytest.mark.slow
def test_a_few_killed_runs_come_back_to_the_same_bytes(kills):
    cells = [kills.Cell("fedavg", "sequential"), kills.Cell("scaffold", "stacked, workers")]
    kills.warm(cells)
    trials = list(kills.kills(cells, 6, begun=0, seed=0))
    assert [trial.method for trial in trials] == ["fedavg", "scaffold"] * 3
    assert not [trial for trial in trials if trial.outcome == "lost"]
    assert any(trial.outcome == "same bytes" for trial in trials)


@pytest.mark.slow
def test_a_few_faults_at_writes_end_in_the_same_bytes_or_one_line(kills):
    cell = kills.Cell("scaffold", "workers")
    kills.warm([cell])
    whole = kills.Undisturbed.of(cell, rounds=2)
    found = [kills.fault(cell, whole, what, 30, None) for what in kills.FAULTS]
    assert [trial.outcome for trial in found] == ["same bytes", "one line"]
    assert "No space left on device" in found[1].detail


@pytest.mark.slow
def test_other_bytes_tracebacks_and_hanging_are_losses(kills):
    cell = kills.Cell("local", "sequential")
    kills.warm([cell])
    with kills.ground(cell, rounds=1) as here:
        ended = here.run().wait()
        right = here.digest()
        for digest, outcome in ((right, "same bytes"), ({**right, "rounds.jsonl": "other"}, "lost")):
            assert kills.aftermath(here, ended, kills.Undisturbed(digest, 0.0))[0] == outcome
        whole = kills.Undisturbed(right, 0.0)
        told = kills.Ended(2, "round 1  accuracy 3 %\npotluck: cannot write it: no space\n")
        assert kills.aftermath(here, told, whole) == ("one line", "potluck: cannot write it: no space")
        for bad in (
            kills.Ended(2, "potluck: one\npotluck: two\n"),
            kills.Ended(1, "Traceback (most recent call last):\nOSError\n"),
            kills.Ended(None, ""),
        ):
            assert kills.aftermath(here, bad, whole)[0] == "lost"


def test_the_table_of_kills_counts_every_trial_once(kills):
    cell = "local", "workers"
    trials = [
        kills.Trial(*cell, "one worker", 0.5, False, "same bytes"),
        kills.Trial(*cell, "all processes", 0.1, False, "lost", "why"),
        kills.Trial(*cell, "full disk at a write", 3, True, "one line", "potluck: full"),
    ]
    text = kills.table(trials, dict.fromkeys(("cpu", "cores", "system", "python", "commit"), "x"), "command")
    assert "## At 2 random moments" in text
    assert "| local | workers | 2 | 1 | 0 | 0 | 1 |" in text
    assert "| local | workers | full disk at a write | a resume | 1 | 0 | 1 | 0 | 0 |" in text
    assert '"detail": "why"' in text


def test_half_a_line_of_an_interrupted_command_is_no_trial(kills, tmp_path):
    trial = kills.Trial("local", "workers", "one worker", 0.5, False, "same bytes")
    line = json.dumps(asdict(trial)) + "\n"
    (tmp_path / "notes").write_text(line + '{"method": "lo')
    assert kills.remembered(tmp_path / "notes") == [trial]
    assert (tmp_path / "notes").read_text() == line


# HtFLlib


@pytest.fixture
def htfllib(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import htfllib

    yield htfllib
    del sys.modules["htfllib"]


@pytest.fixture
def ground(htfllib, tmp_path):
    schedule = htfllib.Schedule(clients=3, rounds=3)
    htfllib.prepare(tmp_path, 0, schedule)
    return tmp_path, schedule


def test_both_train_on_whole_batches_and_begin_with_the_same_weights(htfllib, ground):
    place, schedule = ground
    for id, family in enumerate(htfllib.FAMILIES):
        inputs, targets = htfllib.arrays(place, "train", id)
        assert len(inputs) == len(targets) > 0
        assert len(inputs) % schedule.batch_size == 0
        net = htfllib.network(family, place / f"{family}.pt").eval()
        split = htfllib.Split(net)
        assert torch.equal(split(inputs), net(inputs))
        assert split.base(inputs).shape[1] == split.head.in_features == htfllib.FEATURES


@pytest.mark.slow
def test_our_side_of_the_comparison_is_measured(htfllib, ground):
    place, schedule = ground
    found = htfllib.play_potluck(place, htfllib.CONTESTS["LG-FedAvg"], schedule, 0)
    assert set(found) == {"accuracy", "seconds", "processor", "memory", "written"}
    assert found["written"] > 0
    assert 0 <= found["accuracy"] <= 1


def test_the_comparison_has_one_row_for_each_side(htfllib):
    result = {"accuracy": 0.5, "seconds": 1.0, "processor": 0.5, "memory": 10.0, "written": 2.0}
    other = result | {"accuracy": 0.6, "seconds": 3.0}
    lines = htfllib.table({("FD", "potluck"): [result], ("FD", "htfllib"): [result, other]}).splitlines()
    assert lines[2:] == [
        "| FD | Potluck | 50.0 | 1.000 | 0.500 | 10 | 2.0 |",
        "| FD | HtFLlib | 55.0 ± 7.1 | 2.000 | 0.500 | 10 | 2.0 |",
    ]


@pytest.fixture
def fluke_steps(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import fluke_steps

    yield fluke_steps
    del sys.modules["fluke_steps"]


def test_lines_of_a_step_are_those_that_differ_from_what_was_there(fluke_steps):
    sides = {step.name: step for step in fluke_steps.STEPS}
    assert sides["three methods, three seeds"].potluck.lines("potluck") == 0
    tracking = sides["tracking"].fluke
    assert tracking.lines("fluke") == 2  # another logger, and its folder
    assert 10 < sides["own method"].potluck.lines("potluck") < 20 < sides["own method"].fluke.lines("fluke")


def test_a_step_is_timed_with_what_it_returned_and_shown_beside_the_other_side(fluke_steps, tmp_path):
    step = fluke_steps.Step("tried", fluke_steps.Side(("echo here; exit 3",)), None)
    found = fluke_steps.taken(step, "potluck", tmp_path, tmp_path)
    assert (found.status, "here" in found.output) == (3, True)
    found = replace(found, step="report", wall=1.25, processor=0.5)
    rows = fluke_steps.table([found]).splitlines()
    assert "| report | potluck | 0 | 1 | 1.2 | 0.5 | 3 |" in rows
    assert "| report | fluke | – | | | | |" in rows
    assert len(rows) == 2 + 2 * len(fluke_steps.STEPS)


def test_what_a_user_of_potluck_writes_in_the_comparison_is_accepted(monkeypatch, fluke_steps):
    monkeypatch.chdir(fluke_steps.FILES / "potluck")
    experiment = resolve(override(read_toml(Path("exp.toml")), ["method.name=prox.py"]), "exp.toml")
    assert experiment.method.mu == 0.3
    assert experiment.method.training.batch_size == 32


# Options


@pytest.fixture
def options(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "options"))
    import run

    yield run
    for name in ("arithmetic", "machine", "own", "reasons", "reference", "run", "toys", "trying"):
        sys.modules.pop(name, None)


def tried_here(options, monkeypatch, tmp_path, method, words):
    """The command on one method, with these options of its training alone, and its exit code."""
    arithmetic = sys.modules["arithmetic"]
    monkeypatch.setattr(arithmetic, "OF_TRAINING", [row for row in arithmetic.OF_TRAINING if row[0] in words])
    monkeypatch.setattr(options, "hold_properties", lambda trials: None)
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", method, "--results", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        options.main()
    return (tmp_path / "options.md").read_text(), ended.value.code


def test_options_that_do_what_they_say_are_no_findings(options, monkeypatch, tmp_path):
    words = {"clip_norm=0.001", f"momentum=0.9 {sys.modules['arithmetic'].TOGETHER} epochs=2 batch_size=5"}
    page, code = tried_here(options, monkeypatch, tmp_path, "local", words)
    assert "| local | 2 | 1 | " in page
    assert (code, "## Findings (0)" in page) == (0, True)


def test_options_that_do_nothing_or_something_else_are_findings(options, monkeypatch, tmp_path):
    words = {sys.modules["arithmetic"].EXPONENTIAL, "persist=true"}
    monkeypatch.setattr(Schedule, "share", lambda self, number: 1.0)
    monkeypatch.setattr(Fit, "lasts", False)
    page, code = tried_here(options, monkeypatch, tmp_path, "local", words)
    assert (code, "## Findings (3)" in page) == (1, True)
    assert "local: `training.schedule.rule=exponential training.schedule.factor=0.5`: no effect: look" in page
    assert page.count("differs from the reference by") == 2  # with momentum, and with Adam
