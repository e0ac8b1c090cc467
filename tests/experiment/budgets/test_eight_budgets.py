"""A federation of eight budgets that was assigned stays within each, by measurement."""

from dataclasses import replace

import pytest

from potluck.experiment.budgets.assign import assign, assigned_experiment
from potluck.experiment.budgets.limits import limits
from potluck.experiment.budgets.measure import Bench, Trial
from potluck.experiment.budgets.table import read_budgets
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.settings.presets import experiment_for

BUDGETS = """device,memory,seconds,bandwidth,disk,speed
pi-4,12 MiB,,,,
pi-5,28 MiB,,,,
jetson-nano,60 MiB,,,,
phone-entry,28 MiB,,,,
phone-middle,12 MiB,,,,
laptop,200 MiB,,,,
workstation,,,,,
,200 MiB,600,1 Mbit/s,3 MiB,1 TFLOP/s
"""
MODELS = "federation.models=[{name='cnn6', width=32}, {name='cnn6', width=96}, {name='cnn6', width=160}]"


@pytest.mark.slow
def test_each_client_of_eight_keeps_within_its_budget_and_could_not_train_the_next(tmp_path):
    table = tmp_path / "budgets.csv"
    table.write_text(BUDGETS)
    experiment = experiment_for("local", ["federation.clients=8", "run.cohort_fraction=0.125", MODELS])
    bench = Bench(experiment, rounds=1)
    try:
        found = assign(bench, read_budgets(table, 8))
        made = assigned_experiment(bench, found)
        trial = Trial(replace(made, run=replace(made.run, budgets=None)), assemble(made).federation)
        for client, one in enumerate(found):
            taken = trial.take(bench._origin, client, 2)  # as it will run, in a process of its own
            assert all(limit.is_kept for limit in limits(one.budget, taken)), (client, taken)
    finally:
        bench.close()
    chosen = [str(spec) for spec in made.models]
    assert len(set(chosen)) == 3, chosen
    assert all(any(not limit.is_kept for limit in one.larger[-1].broken) for one in found if one.larger)
    assert [one.why for one in found if one.chosen.candidate == bench.candidates[0]] == ["the largest"] * chosen.count(
        str(bench.candidates[0].model)
    )
