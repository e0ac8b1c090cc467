"""Runs some of whose clients lie."""

import pytest
import torch

from potluck.analysis.read import read_run
from potluck.analysis.report import report_text
from potluck.attackers.data import poisoned, with_square
from potluck.attackers.settings import Attackers
from potluck.core.federation import Site, empty_like
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import Key
from potluck.core.requests.examples import Examples
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.running.execute import execute, prepare
from potluck.experiment.settings.resolve import resolve

from ..carried_out import carried_out, digest_of


def tree(attackers=None, rule="mean", rounds=3, method="fedavg", **run):
    federation = {"dataset": "digits", "clients": 5, "models": [{"name": "mlp4"}], "partition": "iid"}
    hyper = {"name": method, "sharing": {"combine": {"rule": rule}}}
    run = {"rounds": rounds, "executor": "sequential", "common_test": False, "evaluate_every": rounds, **run}
    run |= {} if attackers is None else {"attackers": attackers}
    return {"federation": federation, "method": hyper, "run": run}


def accuracy(folder, tables):
    return carried_out(folder, tables).rounds[-1].value("personal", "accuracy")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "strength"), [("sign_flip", 10.0), ("scaled", 30.0), ("noise", 100.0)])
def test_a_liar_spoils_a_mean_and_not_a_median(tmp_path, kind, strength):
    lies = {"kind": kind, "strength": strength}
    honest = accuracy(tmp_path / "honest", tree())
    assert accuracy(tmp_path / "mean", tree(lies)) < honest - 0.1
    assert accuracy(tmp_path / "median", tree(lies, "median")) > honest - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["free_rider", "alie", "label_flip", "backdoor"])
def test_every_other_attack_changes_the_run_and_is_deterministic(tmp_path, kind):
    lies = {"kind": kind, "share": 0.4}
    digests = [digest_of(tmp_path / str(n), tree(lies)) for n in range(2)]
    assert digests[0] == digests[1]
    assert digests[0] != digest_of(tmp_path / "honest", tree())


@pytest.mark.slow
def test_workers_lie_alike(tmp_path):
    lies = {"kind": "noise", "share": 0.4}
    one = digest_of(tmp_path / "one", tree(lies))
    assert digest_of(tmp_path / "two", tree(lies, executor="workers", workers=2)) == one


@pytest.mark.slow
def test_scores_are_of_honest_clients_and_run_and_report_say_who_lies(tmp_path):
    experiment = resolve(tree({"kind": "sign_flip", "clients": [1, 3]}, rounds=1))
    run = prepare(experiment, assemble(experiment), tmp_path)
    said = "2 of 5 clients lie (sign_flip): 1, 3; all scores are of the others"
    assert run.notes == [said]
    result, _ = execute(run, experiment, tmp_path)
    assert [score.client for score in result.evaluation.scores] == [0, 2, 4]
    assert result.evaluation.missing == 0
    assert said in report_text([read_run(tmp_path)])


def site(inputs, targets):
    examples = Examples(inputs, targets, rows=torch.tensor([1, 3]))
    none = empty_like(examples)
    return Site(0, "net", examples, none, none)


def test_labels_are_turned_round():
    found = poisoned(site(torch.zeros(4, 2), torch.tensor([0, 1, 2, 2])), Attackers("label_flip"), 3, Key(("a",)))
    assert found.train.labels.tolist() == [1, 0]


def test_half_of_the_images_have_a_square_as_bright_as_the_brightest_and_the_class():
    images = torch.zeros(4, 1, 8, 8, dtype=torch.uint8)
    images[0, 0, 0, 0] = 16
    of = site(images, torch.tensor([0, 1, 2, 2]))
    found = poisoned(of, Attackers("backdoor", target=2), 3, Key(("a",))).train
    marked = [bool(image[0, -2:, -2:].eq(16).all()) for image in found.inputs]
    assert sorted(marked) == [False, True]
    assert found.labels[marked.index(True)] == 2
    assert of.train.inputs.sum() == 16
    assert with_square(of.train, Attackers("backdoor", target=1)).labels.tolist() == [1, 1]


def test_data_without_images_or_classes_are_refused_in_one_line():
    with pytest.raises(ConfigError, match="found 'backdoor', which marks images"):
        poisoned(site(torch.zeros(4, 2), torch.tensor([0, 1, 2, 2])), Attackers("backdoor"), 3, Key(("a",)))
    with pytest.raises(ConfigError, match="found 'label_flip', which changes classes"):
        poisoned(site(torch.zeros(4, 2), torch.zeros(4)), Attackers("label_flip"), 1, Key(("a",)))
