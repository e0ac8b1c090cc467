import dataclasses
import tomllib
from itertools import permutations

import pytest
import torch

from potluck.core.ground.errors import ConfigError
from potluck.engine.rounds.engine import Engine
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.settings.presets import experiment_for, experiment_on
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.tables import override, read_toml
from potluck.methods import get_method, list_methods
from potluck.records import experiment_hash


def test_a_configuration_from_before_there_were_quorums_is_the_same_experiment():
    base = experiment_for("fedin", [])
    before = base.tree()
    del before["run"]["rounds_close"]
    assert experiment_hash(before) == base.experiment_id
    assert resolve(before).tree() == base.tree()
    patient = experiment_for("fedin", ["run.rounds_close.deadline_s=5", "run.rounds_close.patience_s=60"])
    assert patient.experiment_id == base.experiment_id
    assert experiment_for("fedin", ["run.rounds_close.quorum=2"]).experiment_id != base.experiment_id


@pytest.mark.parametrize("quorum", [0, -1, 1.5, True, "half", 11])
def test_a_quorum_is_a_number_of_clients_of_a_cohort(quorum):
    with pytest.raises(ConfigError, match=r"run\.rounds_close\.quorum"):
        resolve({"federation": {"clients": 20}, "run": {"cohort_fraction": 0.5, "rounds_close": {"quorum": quorum}}})


@pytest.mark.slow
@pytest.mark.parametrize("name", list_methods())
def test_a_resolved_configuration_resolves_to_itself(name, tmp_path):
    first = experiment_for(name, ["run.seed=3"])
    (tmp_path / "config.toml").write_text(first.toml())
    again = resolve(read_toml(tmp_path / "config.toml"))
    assert again.tree() == first.tree()
    assert again.method == first.method
    assert again.experiment_id == first.experiment_id


def test_the_hash_ignores_seed_and_length_and_nothing_else():
    base = experiment_for("fedin", []).experiment_id
    assert experiment_for("fedin", ["run.seed=9", "run.rounds=3"]).experiment_id == base
    assert experiment_for("fedin", ["method.mu=0.2"]).experiment_id != base
    assert experiment_for("fedin", ["federation.clients=11"]).experiment_id != base
    assert experiment_for("fedin", ["federation.image_size=16"]).experiment_id != base
    assert "image_size" not in experiment_for("fedin", []).tree()["federation"]


def test_the_width_of_features_is_part_of_an_experiment_only_where_it_is_set():
    assert not [key for key in experiment_for("fedin", []).tree()["federation"] if key.startswith("feature")]
    wide = experiment_for("fedproto", ["federation.feature_width=8"])
    said = experiment_for("fedproto", ["federation.feature_width=8", "federation.feature_fit=linear"])
    assert wide.tree()["federation"]["feature_fit"] == "linear"
    assert wide.experiment_id == said.experiment_id == resolve(wide.tree()).experiment_id
    assert wide.experiment_id != experiment_for("fedproto", []).experiment_id


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


@pytest.mark.parametrize("key", ["training", "server_training", "generator_training"])
def test_epochs_that_are_given_take_the_place_of_a_methods_own_steps(key):
    own = getattr(get_method("fedmk")(), key)
    assert own.steps
    stepped = {"method": {"name": "fedmk", key: {"steps": 7}}}
    for tree in (stepped, {"method": {"name": "fedmk"}}):
        found = resolve(override(tree, [f"method.{key}.epochs=3"]))
        assert getattr(found.method, key) == dataclasses.replace(own, epochs=3, steps=None)
        assert resolve(found.tree()).tree() == found.tree()
    both = resolve(override(stepped, [f"method.{key}.epochs=3", f"method.{key}.steps=8"]))
    assert getattr(both.method, key) == dataclasses.replace(own, epochs=3, steps=8)


def test_the_demonstration_settings_apply_to_digits_only():
    assert experiment_for("fedavg", []).method.training.lr == 0.01
    assert experiment_for("fedavg", ["federation.dataset=cifar10"]).method.training.lr == 0.001


def test_cifar_gets_the_five_resnets_and_digits_small_networks():
    names = [str(model) for model in experiment_for("fedin", ["federation.dataset=cifar10"]).models]
    assert names == ["resnet10", "resnet14", "resnet18", "resnet22", "resnet26"]
    assert [model.name for model in experiment_for("fedin", []).models] == ["cnn2", "cnn3", "cnn4", "cnn5", "cnn6"]


FAIR = (1 / 6, 1 / 3, 1 / 2, 1.0)


@pytest.mark.parametrize("method", ["fedepth", "mfedepth"])
@pytest.mark.parametrize(
    ("dataset", "model"), [("digits", "preresnet20(widths=[8, 16, 32])"), ("cifar10", "preresnet20")]
)
def test_methods_that_train_in_pieces_get_the_papers_budgets_and_its_network(method, dataset, model):
    experiment = experiment_for(method, [f"federation.dataset={dataset}"])
    assert experiment.federation.capacities == FAIR
    assert [str(model) for model in experiment.models] == [model]
    assert resolve(experiment.tree()).tree() == experiment.tree()


def test_capacities_that_are_given_leave_the_models_as_for_other_methods():
    experiment = experiment_for("fedepth", ["federation.capacities=[1.0, 0.5]"])
    assert experiment.federation.capacities == (1.0, 0.5)
    assert experiment.models == experiment_for("fedavg", []).models


def test_default_capacities_are_the_methods_own():
    found = {name: experiment_for(name, []).federation.capacities for name in ("fedavg", "heterofl", "fedepth")}
    assert found == {"fedavg": (1.0,), "heterofl": (1.0, 0.5, 0.25, 0.125, 0.0625), "fedepth": FAIR}
    given = experiment_for("fedepth", ["federation.models=['cnn6']"])
    assert (given.federation.capacities, str(given.models[0])) == (FAIR, "cnn6")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedepth", "mfedepth"])
def test_the_default_run_of_a_method_that_trains_in_pieces_is_not_fedavg(method):
    def weights(name, settings):
        experiment = experiment_for(name, ["run.rounds=1", "federation.clients=4", *settings])
        engine = Engine(experiment.method, assemble(experiment).federation)
        return engine.round(1, engine.start(), range(4))[0].weights["all"]

    mine, theirs = weights(method, []), weights("fedavg", ["federation.models=[{name='preresnet20',widths=[8,16,32]}]"])
    assert not torch.allclose(mine["head.weight"], theirs["head.weight"])


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
        ("federation.partition.alpha=-1", "federation.partition.alpha: expected above 0, found -1.0"),
        ("run.rounds=1.5", "run.rounds: expected a whole number, found 1.5"),
        ('run.rounds="3"', "run.rounds: expected a whole number, found '3'"),
        ("run.rounds=0", "run.rounds: expected at least 1, found 0"),
        ("run.common_test=yes", "run.common_test: expected True or False, found 'yes'"),
        ("run.cohort_fraction=0.0", "run.cohort_fraction: expected above 0 and at most 1, found 0.0"),
        ("method.training.optimizer=adamm", "method.training.optimizer: found 'adamm', expected the name of a class"),
        ("method.training.lr=-0.1", "method.training.lr: expected at least 0, found -0.1"),
        ("federation.clients=0", "federation.clients: expected at least 1 and at most 1,000,000, found 0"),
        ("federation.capacities=[2.0]", "federation.capacities.0: expected above 0 and at most 1, found 2.0"),
        ("federation.validation_fraction=1.0", "federation.validation_fraction: expected at least 0 and below 1"),
        ("federation.partition=dirchlet", "unknown partition 'dirchlet'; nearest: dirichlet"),
        ('federation.models=["resnet11"]', "unknown model 'resnet11'; nearest: resnet1"),
        ('federation.models=[{name="resnet10",wdith=8}]', "resnet10: unknown key federation.models.wdith"),
        ("federation.models=[]", "federation.models: expected at least one"),
        ("federation.feature_fit=pool", "federation.feature_fit: expected none without federation.feature_width"),
        ("federation.feature_width=0", "federation.feature_width: expected at least 1 and at most 65,536, found 0"),
        (
            'federation={feature_width=8, feature_fit="mean"}',
            "federation.feature_fit: expected 'linear' or 'pool', found 'mean'",
        ),
        ("run=3", "run: expected a table, found 3"),
        ("run.rounds.more=3", "rounds is not a table"),
        ("run.rounds", "expected key=value, such as run.rounds=10"),
        ("'cnn3']", "expected key=value, such as run.rounds=10; quotes keep a value with spaces whole"),
        ("run.memory_gib=inf", "run.memory_gib: "),
        ("run.memory_gib=nan", "run.memory_gib: "),
        ("run.threads=1_000_000", "run.threads: expected at least 1 and at most 1,024, found 1000000"),
        ("run.workers=1_000_000", "run.workers: expected at least 1 and at most 1,024, found 1000000"),
        (
            "federation.clients=1_000_000_000",
            "federation.clients: expected at least 1 and at most 1,000,000, found 1000000000",
        ),
        ("run.seed=2026-01-01", "run.seed: found a date or time, 2026-01-01; expected a number or text, in quotes"),
        ("method.training.lr=07:30:00", "method.training.lr: found a date or time, 07:30:00"),
        ('federation.models=["cnn2", {name="cnn2", width=2026-01-01T00:00:00Z}]', "federation.models.1.width: found a"),
        ("method.name=2026-01-01", "method.name: expected text"),
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
    assert override(base, ["federation.partition.name=dirichlet"]) == base
    for assignments in permutations(["federation.partition.classes=3", "federation.partition.name=pathological"]):
        assert override(base, assignments)["federation"]["partition"] == {"name": "pathological", "classes": 3}


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
    assert (
        resolve({name: table for name, table in experiment.tree().items() if name != "preset"}).experiment_id
        == again.experiment_id
    )


def test_what_the_user_sets_is_no_preset():
    assert experiment_for("fedavg", ["method.training.lr=0.01", "run.rounds=20"]).preset_words is None
    assert experiment_for("fedavg", ["federation.dataset=cifar10"]).preset_words is None
    stored = override(experiment_for("fedavg", []).tree(), ["run.rounds=30"])
    assert resolve(stored).preset_words == "preset of digits: method.training.lr 0.01 (default 0.001)"


def test_a_date_in_a_file_is_named_also_where_another_key_is_given(tmp_path):
    path = tmp_path / "dated.toml"
    path.write_text("[run]\nseed = 2026-01-01\n")
    with pytest.raises(ConfigError, match=r"dated\.toml: run\.seed: found a date or time, 2026-01-01"):
        experiment_for(str(path), ["run.rounds=3"])


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_toml(tmp_path)


def test_override_leaves_its_argument_alone():
    tree = {"run": {"rounds": 2}}
    override(tree, ["run.rounds=3"])
    assert tree == {"run": {"rounds": 2}}


def test_a_file_that_is_not_toml_is_refused(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("rounds = = 3")
    with pytest.raises(ConfigError, match=r"broken\.toml: not a TOML file"):
        read_toml(path)


def test_experiment_on__gives_a_files_local_training_to_every_method_that_trains(tmp_path):
    file = tmp_path / "f.toml"
    file.write_text('[method]\nname = "fedprox"\nmu = 0.7\ntraining = { optimizer = "sgd", lr = 0.3 }\n')
    same, other = (experiment_on(name, [], file).settings()["method"] for name in ("fedprox", "fedavg"))
    assert same["training"] == other["training"]
    assert (other["training"]["optimizer"], other["training"]["lr"]) == ("sgd", 0.3)
    assert same["mu"] == 0.7
    assert "mu" not in other


def test_what_a_table_s_columns_are_is_in_the_configuration_of_tables_alone(tmp_path):
    assert "columns" not in experiment_for("fedavg", []).tree()["federation"]
    (tmp_path / "table.csv").write_text("age,outcome\n" + "1,a\n2,b\n" * 9)
    told = ["federation.columns.target=outcome", "federation.columns.test=0.5"]
    told += [f"federation.dataset={tmp_path / 'table.csv'}"]
    columns = experiment_for("fedavg", told).tree()["federation"]["columns"]
    assert (columns["target"], columns["test"], columns["tokens"]) == ("outcome", 0.5, 64)
