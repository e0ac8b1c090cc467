"""Every task through a run: what is recorded, what is refused, and by what the best round is chosen."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from potluck.analysis.read import chosen, read_run
from potluck.analysis.report import report_text
from potluck.core.federation import Federation, Site
from potluck.core.ground.errors import ConfigError, DataError
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import LocalTraining
from potluck.core.tasks.classification import Classification
from potluck.core.tasks.named import TASKS
from potluck.engine.rounds.engine import Engine
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.federation.needs import Offer, check_needs
from potluck.experiment.folder.folder import new_folder
from potluck.experiment.results.evaluate import evaluate
from potluck.experiment.running.execute import execute, prepare
from potluck.experiment.running.run import Run
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import RunConfig
from potluck.methods import get_method
from potluck.models.contract import StagedNet

WIDTHS = {
    "classification": 3,
    "binary": 1,
    "multilabel": 2,
    "regression": 2,
    "next_token": 5,
    "token_classification": 3,
}
ANY_TASK = ("local", "fedavg", "scaffold", "fedin")


def net(task, width, depth):
    """Flat or token by token, of a depth of its own, with layers of the other depth's names."""
    first = nn.Embedding(5, 8) if task.by_position else nn.Linear(4, 8)
    inner = {f"inner{i}": nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for i in range(depth)}
    return StagedNet({"first": first, **inner, "last": nn.Linear(8, 8)}, nn.Linear(8, width), pool=nn.Identity())


def drawn(task, width, n, seed):
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randint(0, 5, (n, 6), generator=rng) if task.by_position else torch.randn(n, 4, generator=rng)
    targets = {
        "classification": lambda: inputs[:, :3].argmax(1),
        "binary": lambda: (inputs[:, 0] > 0).long(),
        "multilabel": lambda: (inputs[:, :2] > 0).float(),
        "regression": lambda: inputs[:, :2] + inputs[:, 2:],
        "next_token": lambda: (inputs + 1) % 5,
        "token_classification": lambda: inputs % 3,
    }[task.name]()
    return Examples(inputs, targets)


def federation(name, task=None):
    task = task or TASKS[name]
    width = WIDTHS[name]
    parts = [[drawn(task, width, 24, 3 * client + part) for part in range(3)] for client in range(4)]
    return Federation(
        sites={i: Site(i, f"net{i % 2}", *of) for i, of in enumerate(parts)},
        architectures={f"net{depth}": partial(net, task, width, depth) for depth in range(2)},
        server_architecture="net0",
        num_classes=width,
        test=drawn(task, width, 50, 99),
        task=task,
    )


def quick(name, **training: Any):
    method = get_method(name)()
    return replace(method, training=replace(method.training, **{"lr": 0.02, "epochs": 2, "batch_size": 8, **training}))


@pytest.mark.rotates
@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("method", ANY_TASK)
def test_methods_that_need_a_criterion_only_learn_every_task(name, method, tmp_path):
    task = TASKS[name]
    records = Run(quick(method), federation(name), RunConfig(rounds=4, executor="sequential"), tmp_path).run().rounds
    first, last = (record.value("personal", task.primary.name) for record in (records[0], records[-1]))
    assert task.primary.better(last, first)
    lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert lines[-1]["metrics"]["personal"].keys() == {metric.name for metric in task.metrics}
    assert (lines[-1]["accuracy_personal_mean"] is not None) == (name == "classification")
    assert lines[-1]["metrics_by_architecture"]["common"].keys() == {"net0", "net1"}


@pytest.mark.parametrize("name", TASKS)
def test_pooled_metrics_are_those_of_all_own_parts_as_one(name):
    engine = Engine(quick("local"), federation(name))
    state = engine.start()
    found = evaluate(engine, state)
    task = engine.federation.task
    outputs, targets = [], []
    for client, site in engine.federation.sites.items():
        model = engine.inference_model(state, client)
        outputs.append(model(site.test.inputs).detach())
        targets.append(site.test.targets)
    expected = task.values(task.sums(torch.cat(outputs), torch.cat(targets)))
    assert found.pooled == pytest.approx(expected, nan_ok=True)
    own = [task.values(task.sums(o, t))[task.primary.name] for o, t in zip(outputs, targets, strict=True)]
    assert found.value("personal") == pytest.approx(sum(own) / 4)
    assert found.personal_worst == pytest.approx(task.primary.worst(own))


def test_the_best_round_is_that_with_the_lowest_error(tmp_path):
    """Trained ever more wildly, the last round is the worst."""
    training = LocalTraining(optimizer="sgd", lr=0.3, momentum=0.9)
    run = Run(replace(quick("local"), training=training), federation("regression"), RunConfig(rounds=6), tmp_path)
    result = run.run()
    errors = [record.value("validation", "mae") for record in result.rounds]
    assert len(set(errors)) > 1
    assert result.checkpoint.best_validation == min(errors)
    assert result.checkpoint.best_round == errors.index(min(errors)) + 1


REFUSES = ("felo", "velo", "fedorion")


@pytest.mark.parametrize("method", REFUSES)
@pytest.mark.parametrize("name", sorted(set(TASKS) - {"classification"}))
def test_methods_of_classes_refuse_other_tasks_in_a_line(method, name):
    with pytest.raises(ConfigError, match=rf"works class by class, and {name} has no single class") as caught:
        check_needs(get_method(method)().needs(), method, Offer.of(federation(name)))
    assert "\n" not in str(caught.value)


def test_masks_and_mutual_distillation_need_classes_and_what_leaves_them_out_does_not():
    offer = replace(Offer.of(federation("regression")), public=True)
    check_needs(get_method("fedepth")().needs(), "fedepth", offer)
    check_needs(get_method("fedmd")().needs(), "fedmd", offer)
    for method in (
        get_method("fedepth")(models=2),
        get_method("mfedepth")(models=2),
        get_method("heterofl")(mask=True),
    ):
        with pytest.raises(ConfigError, match="class by class"):
            check_needs(method.needs(), "it", offer)
    tokens = replace(Offer.of(federation("next_token")), public=True)
    with pytest.raises(ConfigError, match="one output for each example, and next_token has one for each position"):
        check_needs(get_method("fedmd")().needs(), "fedmd", tokens)


def test_a_network_of_another_width_is_refused_before_the_first_round():
    wrong = replace(federation("regression"), num_classes=3)
    with pytest.raises(DataError, match="need networks with 2 outputs; these have 3"):
        Run(quick("local"), wrong, RunConfig())
    tokens = federation("next_token")
    flat = {"net0": partial(nn.Linear, 6, 5), "net1": tokens.architectures["net1"]}
    with pytest.raises(ConfigError, match="model net0: cannot read inputs"):
        Run(quick("local"), replace(tokens, architectures=flat), RunConfig())


# Data of one's own


@pytest.fixture
def numbers(tmp_path):
    """A file of features, and of numbers to predict."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 4)).astype(np.float32)
    place = tmp_path / "numbers.npz"
    np.savez(place, x_train=x[:80], y_train=x[:80, 0] * 3, x_test=x[80:], y_test=x[80:, 0] * 3)
    return place


def settings(place, **federation: Any):
    tables = {"dataset": str(place), "clients": 3, "models": ["mlp2", "mlp3", "mlp4"], **federation}
    return {"federation": tables, "method": {"name": "local"}, "run": {"rounds": 2, "workers": 1}}


def test_numbers_to_predict_are_refused_until_the_task_is_named(numbers):
    with pytest.raises(DataError, match=r"expected whole-number labels.*federation\.task = 'regression'"):
        assemble(resolve(settings(numbers)))
    found = assemble(resolve(settings(numbers, task="regression"))).federation
    assert (found.task.name, found.num_classes) == ("regression", 1)
    assert sum(len(site.train) + len(site.validation) for site in found.sites.values()) == 80
    assert sum(len(site.test) for site in found.sites.values()) == 40


def test_a_partition_by_label_is_refused_where_there_are_none(numbers):
    with pytest.raises(ConfigError, match="dirichlet divides examples by label, and those of a regression have none"):
        assemble(resolve(settings(numbers, task="regression", partition={"name": "dirichlet"})))


def test_a_task_is_named_in_a_word_or_a_table_and_a_wrong_one_is_refused(numbers):
    named = resolve(settings("digits", task={"name": "classification", "scores": True}))
    assert named.task == Classification(scores=True)
    assert assemble(named).federation.task == named.task
    assert resolve(named.tree()).task == named.task
    with pytest.raises(ConfigError, match="unknown task 'regresion'; nearest: regression"):
        resolve(settings(numbers, task="regresion"))
    with pytest.raises(ConfigError, match=r"federation\.task"):
        resolve(settings(numbers, task={"name": "regression", "scores": True}))
    with pytest.raises(DataError, match="digits: training part: its targets go from 0 to 9; binary expects 0 or 1"):
        assemble(resolve(settings("digits", task="binary")))


def test_records_and_report_of_a_regression_name_its_metric_and_never_an_accuracy(numbers, tmp_path):
    experiment = resolve(settings(numbers, task="regression"))
    folder = new_folder(tmp_path, experiment)
    execute(prepare(experiment, assemble(experiment), folder), experiment, folder)
    stored = read_run(folder)
    assert [metric.name for metric in stored.metrics] == ["mae", "rmse", "r2"]
    best = min(stored.rounds, key=lambda record: record.metrics["validation"]["mae"])
    assert chosen(stored) == best
    text = report_text([stored]).split("## Setting")[0]
    assert "MAE" in text
    assert "(lower is better)" in text
    assert "| R2 | higher |" in text
    assert "accuracy" not in text.lower()
    assert "(%)" not in text


def test_the_scores_of_a_classification_are_measured_where_they_are_asked_for():
    values = evaluate(engine := Engine(quick("local"), federation("classification")), engine.start()).pooled
    assert values.keys() == {"accuracy", "macro_f1", "balanced_accuracy"}
    scored = Engine(quick("local"), federation("classification", Classification(scores=True)))
    found = evaluate(scored, scored.start()).pooled
    assert values.items() <= found.items()
    assert found.keys() - values.keys() == {"auroc", "ece"}
