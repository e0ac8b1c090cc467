from potluck.analysis.read import read_run
from potluck.analysis.settings import differing, settings


def test_settings_are_the_configuration_without_seed_and_machine(store_run):
    assert settings(read_run(store_run(seed=4))) == {
        "federation.dataset": "digits",
        "federation.clients": "4",
        "federation.models": "small, large(width=8)",
        "federation.validation_fraction": "0.1",
        "federation.partition.name": "dirichlet",
        "federation.partition.alpha": "0.5",
        "method.name": "fedin",
        "method.training.lr": "0.005",
        "run.rounds": "6",
        "run.evaluate_every": "2",
        "run.common_test": "true",
    }


def test_keys_differ_where_a_value_does_or_is_missing():
    assert differing([{"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}]) == ["b", "c"]
