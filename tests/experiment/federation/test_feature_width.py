"""`federation.feature_width` in whole runs: unlike models meet, their features are compared and their heads shared."""

import json
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import Key
from potluck.core.nets.weights import weights_of
from potluck.engine.executors.sequential import Sequential
from potluck.engine.executors.stacked import Stacked
from potluck.engine.rounds.engine import Engine
from potluck.experiment.federation.assemble import architectures_of, assemble, assemble_server, builder_of
from potluck.experiment.running.execute import prepare
from potluck.experiment.running.run import Run
from potluck.experiment.settings.presets import experiment_for
from potluck.experiment.settings.schema import ModelSpec
from potluck.methods import get_method
from potluck.models.fitting import FeatureFit, fitted
from potluck.models.split import split
from potluck.testing.worlds import CLASSES, World, quick, run_rounds, toy_federation

NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.first, self.second, self.out = nn.Conv2d(1, 5, 3), nn.Conv2d(5, 8, 3), nn.Linear(8, num_classes)

    def forward(self, x):
        return self.out(self.second(self.first(x).relu()).relu().mean((2, 3)))
"""


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(10, 9), nn.Linear(9, 7), nn.Linear(7, CLASSES)

    def forward(self, x):
        return self.out(self.second(self.first(x).relu()).relu())


WIDTH = "federation.feature_width=12"
POOL = "federation.feature_fit=pool"


@pytest.fixture(autouse=True, scope="module")
def looked():
    """What torch loads when a network is first looked at takes longer than a test."""
    fitted(Plain, FeatureFit(6), CLASSES, (10,), "net")


@pytest.fixture
def experiment(tmp_path):
    """Three unlike architectures, at two clients each, with few digits."""
    (tmp_path / "nets.py").write_text(NET)
    models = f"federation.models=[{{name='cnn2',width=4}}, 'mlp2', '{tmp_path / 'nets.py'}:Net']"
    small = [
        "federation.clients=6", "federation.train_fraction=0.1", "run.executor=sequential", "run.common_test=false"
    ]  # fmt: skip

    def made(method, *more, rounds=1):
        return experiment_for(method, [models, *small, f"run.rounds={rounds}", "method.training.epochs=1", *more])

    return made


def ran(experiment, folder):
    return Run(experiment.method, assemble(experiment).federation, experiment.run, folder).run()


@pytest.mark.rotates
@pytest.mark.parametrize("method", ["fedproto", "fedtgp"])
@pytest.mark.parametrize("fit", ["federation.feature_fit=linear", POOL])
def test_methods_that_compare_features_run_across_unlike_models(experiment, tmp_path, method, fit):
    result = ran(experiment(method, WIDTH, fit), tmp_path / "run")
    assert len(result.evaluation.by_architecture("accuracy_personal")) == 3


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedl2g", "fedre", "fedgh", "lgfedavg", "fedgen", "fedet"])
def test_methods_that_share_heads_or_generate_features_run_across_unlike_models(experiment, tmp_path, method):
    more = {
        "fedl2g": ["method.guided=features"],
        "fedet": ["method.representation=head", "federation.public=holdout"],
        "fedgen": [POOL],
    }
    result = ran(experiment(method, WIDTH, *more.get(method, [])), tmp_path / "run")
    assert len(result.evaluation.by_architecture("accuracy_personal")) == 3


@pytest.mark.parametrize("method", ["fedproto", "fedtgp", "lgfedavg"])
def test_without_it_they_are_refused_and_told_of_it(experiment, method):
    with pytest.raises(ConfigError, match=rf"^{method} cannot run here: .* or set federation\.feature_width"):
        assemble(experiment(method))


def test_the_servers_model_and_every_clients_have_features_of_the_width(experiment):
    federation = assemble(experiment("local", WIDTH, "federation.server_model=cnn3")).federation
    for name in (*federation.architectures, None):
        assert split(federation.build(name, Key(("net",)))).num_features == 12


def test_a_server_without_clients_builds_the_same_networks(experiment):
    made = experiment("fedproto", WIDTH)
    here, there = assemble(made).federation, assemble_server(made)
    for name in here.architectures:
        ours, theirs = (weights_of(of.build(name, Key(("net",)))) for of in (here, there))
        assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


@pytest.mark.slow
def test_workers_give_the_same_bytes(experiment, tmp_path):
    one, two = (
        ran(experiment("fedproto", WIDTH, f"run.executor={executor}"), tmp_path / executor)
        for executor in ("sequential", "workers")
    )
    assert one.checkpoint.digest == two.checkpoint.digest


@pytest.mark.slow
def test_a_run_that_goes_on_gives_what_one_without_a_break_does(experiment, tmp_path):
    def play(folder, rounds):
        made = experiment("fedproto", WIDTH, rounds=rounds)
        return prepare(made, assemble(made), tmp_path / folder).run()

    (tmp_path / "broken").mkdir()
    (tmp_path / "whole").mkdir()
    play("broken", 1)
    assert play("broken", 2).checkpoint.digest == play("whole", 2).checkpoint.digest
    config = (tmp_path / "broken" / "config.toml").read_text()
    assert 'feature_width = 12\nfeature_fit = "linear"' in config
    assert json.loads((tmp_path / "broken" / "manifest.json").read_text())


@pytest.mark.parametrize("kind", ["linear", "pool"])
def test_stacked_clients_learn_what_they_do_one_by_one(kind):
    builders = {"toy1": toy_federation(World()).architectures["toy1"], "toy2": Plain}
    fit = {name: fitted(builder, FeatureFit(6, kind), CLASSES, (10,), name) for name, builder in builders.items()}
    method, found, before = quick(get_method("fedproto"), optimizer="sgd"), [], torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for executor in (Sequential(), Stacked()):
            federation = replace(toy_federation(World(clients=6)), architectures=fit)
            engine = Engine(method, federation, executor=executor)
            state = run_rounds(engine, 2)
            found.append([weights_of(engine.inference_model(state, id)) for id in range(6)])
    finally:
        torch.set_default_dtype(before)
    for alone, together in zip(*found, strict=True):
        assert all(torch.allclose(value, together[key], rtol=1e-10, atol=1e-10) for key, value in alone.items())


@pytest.mark.rotates
@pytest.mark.parametrize("method", ["heterofl", "fedrolex"])
@pytest.mark.parametrize("net", [0, 2], ids=["staged", "plain"])
def test_narrower_nets_are_slices_with_linear_and_refused_with_pool(experiment, tmp_path, method, net):
    models = experiment(method).models[net]
    one = f"federation.models=[{{name='{models.name}'}}]"
    assert ran(experiment(method, WIDTH, one), tmp_path / "run").evaluation
    with pytest.raises(ConfigError, match=r"cannot run here: it cuts the width of .*, which has no slices"):
        assemble(experiment(method, WIDTH, POOL, one))


@pytest.mark.parametrize("method", ["depthfl", "fedepth", "mfedepth", "inclusivefl"])
def test_methods_that_train_stages_apart_are_refused_and_run_when_it_is_left_out(method):
    settings = ["federation.models=['mlp4']", "federation.train_fraction=0.1"]
    with pytest.raises(ConfigError, match=r"leave out federation\.feature_width$") as found:
        assemble(experiment_for(method, [WIDTH, *settings]))
    assert "\n" not in str(found.value)
    assemble(experiment_for(method, settings))


@pytest.mark.parametrize("spec", [ModelSpec("cnn2", {"width": 4}), ModelSpec("mlp2", {})])
def test_without_it_a_model_is_as_its_builder_makes_it(spec):
    builder = builder_of(spec, 10, (1, 8, 8))
    assert isinstance(builder, partial)
    assert builder.func.__module__.startswith("potluck.models.")
    assert builder.func.__module__ != "potluck.models.fitting"
    names = [*builder().state_dict()]
    assert not [name for name in names if "feature_fit" in name]
    assert names[-2:] == ["head.weight", "head.bias"]


def test_a_builder_with_it_can_be_copied_to_another_process(experiment):
    builders, _ = architectures_of(experiment("fedproto", WIDTH, "federation.models=['cnn2', 'mlp2']"), 10, (1, 8, 8))
    for builder in builders.values():
        torch.manual_seed(0)
        ours = weights_of(builder())
        torch.manual_seed(0)
        theirs = weights_of(pickle.loads(pickle.dumps(builder))())
        assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
