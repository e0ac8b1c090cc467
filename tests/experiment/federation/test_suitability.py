"""`potluck check FEDERATION` says what a run would find."""

import pytest

from potluck.core.ground.errors import ConfigError, PotluckError
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.federation.suitability import federation_of, verdicts
from potluck.experiment.running.run import Run
from potluck.experiment.settings.resolve import resolve
from potluck.methods import list_methods
from potluck.testing.worlds import quick

MIXED = [{"name": "cnn2", "width": 4}, {"name": "cnn3", "width": 4}]
ALIKE = [{"name": "preresnet20", "widths": [2, 4, 8]}]


def described(models, method="local", **federation):
    table = {"dataset": "digits", "clients": 4, "models": models, **federation}
    return {"federation": table, "method": {"name": method}, "run": {"rounds": 1, "executor": "sequential"}}


def judged(models, **federation):
    return {found.method: found for found in verdicts(federation_of(resolve(described(models, **federation))))}


def test_verdicts__name_the_need_and_what_was_found():
    found = judged(MIXED)
    assert found["fedavg"].problem is None
    assert "needs one architecture, but client 0 has cnn2(width=4)" in found["heterofl"].problem
    assert "needs public data, and the federation has none" in found["fedmd"].problem
    assert list(found) == list_methods()


@pytest.mark.slow
def test_verdicts__carry_the_warnings_with_which_a_run_would_begin():
    found = judged(ALIKE, capacities=[1.0, 0.01])
    assert found["heterofl"].problem is None
    assert "capacity 0.01 lies below the smallest level" in found["heterofl"].notes[0]
    assert not found["fedavg"].notes


def test_federation_of__an_experiment_whose_own_method_cannot_run_on_it():
    experiment = resolve(described(MIXED, method="heterofl"))
    with pytest.raises(ConfigError, match="needs one architecture"):
        assemble(experiment)
    assert len(federation_of(experiment).sites) == 4


def test_federation_of__refuses_a_model_that_cannot_be_trained(tmp_path):
    file = tmp_path / "nets.py"
    file.write_text("from torch import nn\ndef net(num_classes, input_shape): return nn.Linear(3, num_classes)\n")
    with pytest.raises(ConfigError, match="cannot read inputs"):
        federation_of(resolve(described([f"{file}:net"])))


@pytest.mark.slow
@pytest.mark.parametrize(("models", "public"), [(MIXED, "none"), (ALIKE, "holdout")], ids=["mixed", "alike"])
def test_verdicts__are_what_runs_come_to(models, public):
    offered = {"public": public, "capacities": [1.0, 0.5], "train_fraction": 0.05}
    for name, found in judged(models, **offered).items():
        refused = refusal(resolve(described(models, name, **offered)))
        assert (found.problem is None) == (refused is None), f"{name}: check: {found.problem}; run: {refused}"
        assert refused is None or found.problem in refused


def refusal(experiment):
    """What a run of one round is refused for; None if it is not."""
    try:
        Run(quick(type(experiment.method), epochs=1), assemble(experiment).federation, experiment.run).run()
    except PotluckError as error:
        return str(error)
    return None
