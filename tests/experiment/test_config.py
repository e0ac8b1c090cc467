import dataclasses
import tomllib
from itertools import permutations

import pytest

from potluck.core.errors import ConfigError
from potluck.experiment.config import hyper_parameters, override, read_toml, resolve
from potluck.experiment.presets import experiment_for
from potluck.methods import get_method, list_methods


@pytest.mark.parametrize("name", list_methods())
def test_a_resolved_configuration_resolves_to_itself(name, tmp_path):
    first = experiment_for(name, ["run.seed=3"])
    (tmp_path / "config.toml").write_text(first.toml())
    again = resolve(read_toml(tmp_path / "config.toml"))
    assert again.tree() == first.tree()
    assert again.method == first.method
    assert again.hash8 == first.hash8


def test_the_hash_ignores_seed_and_length_and_nothing_else():
    base = experiment_for("fedin", []).hash8
    assert experiment_for("fedin", ["run.seed=9", "run.rounds=3"]).hash8 == base
    assert experiment_for("fedin", ["method.mu=0.2"]).hash8 != base
    assert experiment_for("fedin", ["federation.clients=11"]).hash8 != base


@pytest.mark.parametrize("name", list_methods())
def test_every_method_resolves_on_the_default_federation(name):
    assert isinstance(experiment_for(name, []).method, get_method(name))


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[method]\nname = "fedavg"\ntraining = { lr = 0.5, epochs = 3 }\n[run]\nrounds = 7\n')
    experiment = experiment_for(str(path), ["method.training.lr=0.25"])
    assert (experiment.method.training.lr, experiment.method.training.epochs) == (0.25, 3)
    assert experiment.run.rounds == 7
    assert experiment.method.training.batch_size == 16


def test_a_methods_own_defaults_stay_where_a_table_does_not_name_them():
    method = experiment_for("fedorion", ["federation.dataset=cifar10", "method.server_training.lr=0.5"]).method
    assert method.server_training == dataclasses.replace(type(method)().server_training, lr=0.5)
    assert experiment_for("fedin", ["method.sharing.buffers=local"]).method.sharing.weighting == "uniform"
    assert experiment_for("felo", ["method.sharing.buffers=local"]).method.sharing.weighting == "samples"


def test_the_demonstration_settings_apply_to_digits_only():
    assert experiment_for("fedavg", []).method.training.lr == 0.01
    assert experiment_for("fedavg", ["federation.dataset=cifar10"]).method.training.lr == 0.001


def test_cifar_gets_the_five_resnets_and_digits_small_networks():
    names = [str(model) for model in experiment_for("fedin", ["federation.dataset=cifar10"]).models]
    assert names == ["resnet10", "resnet14", "resnet18", "resnet22", "resnet26"]
    assert [model.name for model in experiment_for("fedin", []).models] == ["cnn2", "cnn3", "cnn4", "cnn5", "cnn6"]


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("federation.clinets=3", "unknown key federation.clinets; nearest: federation.clients"),
        ("alpha=-1", "unknown key alpha; nearest: federation.partition.alpha"),
        ("methods.name=fedin", "unknown key methods; nearest: method"),
        ("method.training.lrr=1.0", "unknown key method.training.lrr; nearest: method.training.lr"),
        (
            "federation.partition.alhpa=1.0",
            "unknown key federation.partition.alhpa; nearest: federation.partition.alpha",
        ),
        ("federation.partition.alpha=-1", "federation.partition.alpha: expected a number above 0, found -1.0"),
        ("run.rounds=1.5", "run.rounds: input should be a valid integer, found 1.5"),
        ('run.rounds="3"', "run.rounds: input should be a valid integer, found '3'"),
        ("run.rounds=0", "run.rounds: expected at least 1, found 0"),
        ("run.common_test=yes", "run.common_test: input should be a valid boolean, found 'yes'"),
        ("run.cohort_fraction=0.0", "run.cohort_fraction: expected above 0 and at most 1, found 0.0"),
        ("method.training.optimizer=adamw", "method.training.optimizer: input should be 'adam' or 'sgd'"),
        ("method.training.lr=-0.1", "method.training.lr: expected at least 0, found -0.1"),
        ("federation.clients=0", "federation.clients: expected at least 1, found 0"),
        ("federation.capacities=[2.0]", "federation.capacities: expected shares above 0 and at most 1, found 2.0"),
        ("federation.validation_fraction=1.0", "federation.validation_fraction: expected from 0 to below 1"),
        ("federation.partition=dirchlet", "unknown partition 'dirchlet'; nearest: dirichlet"),
        ('federation.models=["resnet11"]', "unknown model 'resnet11'; nearest: resnet1"),
        ('federation.models=[{name="resnet10",wdith=8}]', "resnet10: unknown key federation.models.wdith"),
        ("federation.models=[]", "federation.models: expected at least one"),
        ("run=3", "run: expected a table, found 3"),
        ("run.rounds.more=3", "rounds is not a table"),
        ("run.rounds", "expected key=value, such as run.rounds=10"),
        ("method.name=fedinn", "unknown method 'fedinn'; nearest: fedin"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_what_was_expected(assignment, expected):
    base = {"run": {"rounds": 2}}
    with pytest.raises(ConfigError) as caught:
        resolve(override(base, [assignment]))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "assignments",
    [
        ("federation.partition.alpha=0.1", "federation.partition=dirichlet"),
        ("method.mu=0.3", 'method={name="fedin"}'),
        ("run.seed=4", "run={rounds=3}", "run.rounds=5"),
    ],
)
def test_the_order_of_overrides_does_not_matter(assignments):
    trees = [experiment_for("fedin", list(order)).tree() for order in permutations(assignments)]
    assert all(tree == trees[0] for tree in trees)
    values = {key: value for key, _, value in (given.partition("=") for given in assignments) if value[0] != "{"}
    for key, value in values.items():
        if key != "federation.partition":
            table = trees[0]
            for name in key.split("."):
                table = table[name]
            assert str(table) == value


def test_another_partition_drops_the_parameters_of_the_one_before_and_the_same_keeps_them():
    base = {"federation": {"partition": {"name": "dirichlet", "alpha": 0.1}}}
    assert override(base, ["federation.partition=dirichlet"]) == base
    assert override(base, ["federation.partition=iid"]) == {"federation": {"partition": {"name": "iid"}}}


def test_of_one_key_the_last_assignment_counts_and_a_second_method_is_refused():
    assert experiment_for("fedin", ["run.rounds=3", " run.rounds = 4", "method.name=fedin"]).run.rounds == 4
    with pytest.raises(ConfigError, match=r"method\.name is given twice, as 'fedin' and as 'fedmd'; give it once"):
        experiment_for("fedin", ["method.name=fedmd"])


def test_a_method_given_by_key_gets_the_demonstrations_settings_of_its_own():
    assert experiment_for(None, ["method.name=fedavg"]).tree() == experiment_for("fedavg", []).tree()


def test_what_the_preset_of_digits_changes_is_noted_and_changes_no_hash():
    experiment = experiment_for("fedavg", [])
    assert dict(experiment.preset) == {"method.training.lr": 0.001, "run.rounds": 20}
    words = "preset of digits: method.training.lr 0.01 (default 0.001), run.rounds 25 (default 20)"
    assert experiment.preset_words == words
    assert experiment.toml().startswith(f"# {words}")
    again = resolve(tomllib.loads(experiment.toml()))
    assert (again.preset, again.tree()) == (experiment.preset, experiment.tree())
    assert resolve({name: table for name, table in experiment.tree().items() if name != "preset"}).hash8 == again.hash8


def test_what_the_user_sets_is_no_preset():
    assert experiment_for("fedavg", ["method.training.lr=0.01", "run.rounds=20"]).preset_words is None
    assert experiment_for("fedavg", ["federation.dataset=cifar10"]).preset_words is None
    stored = override(experiment_for("fedavg", []).tree(), ["run.rounds=30"])
    assert resolve(stored).preset_words == "preset of digits: method.training.lr 0.01 (default 0.001)"


def test_override_leaves_its_argument_alone():
    tree = {"run": {"rounds": 2}}
    override(tree, ["run.rounds=3"])
    assert tree == {"run": {"rounds": 2}}


def test_a_file_that_is_not_toml_is_refused(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("rounds = = 3")
    with pytest.raises(ConfigError, match=r"broken\.toml: not a TOML file"):
        read_toml(path)


def test_hyper_parameters_open_nested_dataclasses():
    found = {name: default for name, _, default in hyper_parameters(get_method("fedin"))}
    assert found["training.lr"] == 0.001
    assert found["sharing.weighting"] == "uniform"
    assert found["mu"] == 0.1


def test_unknown_keys_are_refused_in_dataclasses_of_other_authors_too():
    @dataclasses.dataclass(frozen=True)
    class Inner:
        size: int = 1

    @dataclasses.dataclass(frozen=True)
    class Outer:
        inner: Inner = Inner()

    from potluck.experiment.config import typed

    Outer.__annotations__["inner"] = Inner
    with pytest.raises(ConfigError, match=r"unknown key outer\.inner\.sise; nearest: outer\.inner\.size"):
        typed(Outer, {"inner": {"sise": 2}}, "outer", "test")
