"""Tasks: metrics from sums are those of scikit-learn on all examples at once, however these are divided."""

import math
from functools import reduce

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch.func import vmap
from torch.nn import functional as F

from potluck.core.ground.errors import ConfigError, DataError
from potluck.core.tasks.binary import Binary
from potluck.core.tasks.classification import Classification
from potluck.core.tasks.metric import ACCURACY, Metric
from potluck.core.tasks.multilabel import MultiLabel
from potluck.core.tasks.named import CLASSIFICATION, TASKS, task_named
from potluck.core.tasks.next_token import NextToken
from potluck.core.tasks.regression import Regression
from potluck.core.tasks.scoring import SCORE_BINS, auroc, auroc_error
from potluck.core.tasks.targets import IGNORED
from potluck.core.tasks.task import added
from potluck.core.tasks.token_classification import TokenClassification

SCORED = Classification(scores=True)
WIDTHS = {
    "classification": 5,
    "binary": 1,
    "multilabel": 4,
    "regression": 3,
    "next_token": 7,
    "token_classification": 4,
}


def drawn(task, n=500, width=None, seed=0):
    """Outputs of a network that is somewhat right, and targets."""
    rng = torch.Generator().manual_seed(seed)
    width = WIDTHS[task.name] if width is None else width
    if task.name == "classification":
        targets = torch.randint(0, width, (n,), generator=rng)
        return 2 * F.one_hot(targets, width) + 1.5 * torch.randn(n, width, generator=rng), targets
    if task.name == "binary":
        targets = (torch.rand(n, generator=rng) < 0.3).long()
        return (2.0 * targets - 1 + 1.5 * torch.randn(n, generator=rng))[:, None], targets
    if task.name == "multilabel":
        targets = (torch.rand(n, width, generator=rng) < 0.3).float()
        return 2 * targets - 1 + torch.randn(n, width, generator=rng), targets
    if task.name == "regression":
        targets = 3 * torch.randn(n, width, generator=rng) + 2
        return targets + torch.randn(n, width, generator=rng), targets
    targets = torch.randint(0, width, (n, 6), generator=rng)
    outputs = 2 * F.one_hot(targets, width) + 1.5 * torch.randn(n, 6, width, generator=rng)
    return outputs, torch.where(torch.rand(n, 6, generator=rng) < 0.2, IGNORED, targets)


def in_parts(task, outputs, targets, parts=7):
    """The sums over a random division into parts, some of them with one example."""
    rng = np.random.default_rng(3)
    order = torch.from_numpy(rng.permutation(len(targets)))
    cuts = sorted({1, *rng.choice(np.arange(2, len(targets)), parts - 2, replace=False).tolist()})
    pieces = torch.tensor_split(order, cuts)
    return reduce(added, [task.sums(outputs[rows], targets[rows]) for rows in pieces], task.zeros(outputs.shape[-1]))


def reference(task, outputs, targets):
    """What scikit-learn says of all examples together."""
    if task.by_position:
        kept = targets != IGNORED
        outputs, targets = outputs[kept], targets[kept]
    y, o = (targets.double() if task.name == "regression" else targets).numpy(), outputs.double().numpy()
    if task.name == "regression":
        return {
            "mae": sk.mean_absolute_error(y, o),
            "rmse": sk.root_mean_squared_error(y, o),
            "r2": sk.r2_score(y, o),
        }
    if task.name == "multilabel":
        said = o > 0
        return {
            "label_accuracy": 1 - sk.hamming_loss(y, said),
            "subset_accuracy": sk.accuracy_score(y, said),
            "macro_f1": sk.f1_score(y, said, average="macro", zero_division=0),
            "auroc": sk.roc_auc_score(y, o),
        }
    if task.name == "binary":
        said = o[:, 0] > 0
        return {
            "accuracy": sk.accuracy_score(y, said),
            "f1": sk.f1_score(y, said),
            "balanced_accuracy": sk.balanced_accuracy_score(y, said),
            "auroc": sk.roc_auc_score(y, o[:, 0]),
        }
    shares, said = outputs.double().softmax(1).numpy(), o.argmax(1)
    found = {"accuracy": sk.accuracy_score(y, said)}
    if task.name == "next_token":
        return {**found, "perplexity": math.exp(sk.log_loss(y, shares, labels=range(shares.shape[1])))}
    found |= {
        "macro_f1": sk.f1_score(y, said, average="macro", zero_division=0),
        "balanced_accuracy": sk.balanced_accuracy_score(y, said),
    }
    if task.name == "classification":
        found["auroc"] = sk.roc_auc_score(y, shares, multi_class="ovr", average="macro")
    return found


TOLERANCES = {"auroc": 2e-3, "perplexity": 1e-5}


@pytest.mark.parametrize("task", [SCORED, *list(TASKS.values())[1:]], ids=lambda task: task.name)
def test_metrics_of_sums_over_any_division_are_scikit_learns_of_all_examples(task):
    outputs, targets = drawn(task)
    found, expected = task.values(in_parts(task, outputs, targets)), reference(task, outputs, targets)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=TOLERANCES.get(name, 1e-9)), name
    assert found.keys() == {metric.name for metric in task.metrics}
    assert found.keys() - expected.keys() <= {"ece"}


@pytest.mark.parametrize("task", [SCORED, CLASSIFICATION, *list(TASKS.values())[1:]], ids=lambda task: task.name)
def test_sums_of_real_predictions_are_possible_and_of_the_form_of_zeros(task):
    outputs, targets = drawn(task, n=60)
    sums, zeros = task.sums(outputs, targets), task.zeros(WIDTHS[task.name])
    assert {name: (t.shape, t.dtype) for name, t in sums.items()} == {n: (t.shape, t.dtype) for n, t in zeros.items()}
    assert task.impossible(sums, 60, 6) is None
    assert task.impossible(sums, 59, 3), "the sums of sixty examples were taken for those of fewer"
    assert set(task.values(zeros).values()) == {None}
    assert task.fault(targets, WIDTHS[task.name]) is None
    assert task.width_for(targets) == WIDTHS[task.name]
    assert task.output_shape(torch.zeros(60, 6), WIDTHS[task.name]) == tuple(outputs.shape)


def changed(sums, name, at, by):
    """The sums with one number of one entry changed."""
    tensor = sums[name].clone()
    tensor[at] += by
    return {**sums, name: tensor}


LIES = [
    (CLASSIFICATION, "confusion", (1, 1), 1),
    (SCORED, "confusion", (1, 1), 1),
    (SCORED, "scores", (2, 1, 3), 1),
    (SCORED, "calibration", (1, 4), 1),
    (SCORED, "calibration", (2, 3), 2**26),
    (Binary(), "confusion", (0, 0), 1),
    (Binary(), "scores", (0, 0, 5), 1),
    (Binary(), "calibration", (2, 12), -(2**27)),
    (MultiLabel(), "examples", (), 1),
    (MultiLabel(), "exact", (), 1000),
    (MultiLabel(), "exact", (), -60),
    (MultiLabel(), "by_label", (0, 1), 60),
    (MultiLabel(), "by_label", (1, 1), 60),
    (MultiLabel(), "scores", (0, 0, 5), 1),
    (Regression(), "examples", (), 1),
    (Regression(), "absolute", (1,), -1e4),
    (Regression(), "absolute", (1,), 1e4),
    (Regression(), "squared", (1,), -1e4),
    (Regression(), "squared", (1,), 1e9),
    (Regression(), "target_squared", (0,), -600.0),
    (NextToken(), "tokens", (), 1000),
    (NextToken(), "right", (), 1000),
    (NextToken(), "loss", (), -1e4),
    (NextToken(), "loss", (), 1e8),
    (TokenClassification(), "by_class", (2, 1), 1000),
    (TokenClassification(), "by_class", (0, 1), 1000),
]


@pytest.mark.parametrize(("task", "name", "at", "by"), LIES, ids=lambda part: str(getattr(part, "name", part)))
def test_sums_that_no_predictions_have_are_found_out(task, name, at, by):
    sums = task.sums(*drawn(task, n=60))
    assert task.impossible(sums, 60, 6) is None
    assert task.impossible(changed(sums, name, at, by), 60, 6)


def test_auroc_is_as_near_to_the_exact_one_as_its_bound_says_and_the_bound_is_small():
    for seed, scale in ((1, 0.05), (2, 1.0), (3, 8.0)):
        outputs, targets = drawn(Binary(), n=2000, seed=seed)
        outputs = scale * outputs
        histogram = Binary().sums(outputs, targets)["scores"][0]
        exact, bound = sk.roc_auc_score(targets.numpy(), outputs[:, 0].numpy()), auroc_error(histogram)
        assert abs(auroc(histogram) - exact) <= bound + 1e-12
        assert bound < (0.1 if scale < 1 else 0.01)


def test_auroc_of_scores_in_one_bin_is_a_half_and_its_bound_says_that_nothing_is_known():
    histogram = torch.zeros(2, SCORE_BINS, dtype=torch.int64)
    histogram[:, 7] = 5
    assert (auroc(histogram), auroc_error(histogram)) == (0.5, 0.5)
    histogram[1] = 0
    assert auroc(histogram) is None


def test_scores_of_a_class_keep_their_order_also_near_certainty():
    logits = torch.zeros(40, 3)
    logits[:, 0] = torch.linspace(-15, 15, 40)
    targets = torch.arange(40) % 3
    targets[20:] = torch.tensor([0, 1] * 10)
    histogram = SCORED.sums(logits, targets)["scores"][0]
    shares = logits.double().softmax(1)[:, 0].numpy()
    assert auroc(histogram) == pytest.approx(sk.roc_auc_score((targets == 0).numpy(), shares), abs=1e-12)


def test_calibration_error_is_that_of_its_definition():
    outputs, targets = drawn(SCORED)
    confidence, said = outputs.double().softmax(1).max(1)
    right, expected = (said == targets).double(), 0.0
    for low in range(15):
        inside = (confidence * 15).floor().clamp(max=14) == low
        expected += abs(float((right - confidence)[inside].sum())) / len(targets)
    assert SCORED.values(in_parts(SCORED, outputs, targets))["ece"] == pytest.approx(expected, abs=1e-6)
    sure = torch.tensor([[20.0, 0.0], [20.0, 0.0]])
    assert SCORED.values(SCORED.sums(sure, torch.tensor([0, 1])))["ece"] == pytest.approx(0.5, abs=1e-6)


def test_accuracy_is_to_the_last_bit_the_mean_of_hits():
    for n in (3, 7, 49, 361):
        outputs, targets = drawn(CLASSIFICATION, n=n)
        mean = float(torch.eq(outputs.argmax(1), targets).double().mean())
        assert CLASSIFICATION.values(in_parts(CLASSIFICATION, outputs, targets, 3))["accuracy"] == mean


def test_classification_of_many_classes_keeps_no_confusion_matrix_and_the_same_metrics():
    outputs, targets = drawn(CLASSIFICATION, width=101)
    sums = CLASSIFICATION.sums(outputs, targets)
    assert sums.keys() == {"by_class"}
    assert CLASSIFICATION.impossible(sums, 500, 1) is None
    said = outputs.argmax(1).numpy()
    expected = sk.f1_score(targets.numpy(), said, average="macro", zero_division=0)
    assert CLASSIFICATION.values(sums)["macro_f1"] == pytest.approx(expected)
    assert CLASSIFICATION.impossible(changed(sums, "by_class", (0, 5), 500), 500, 1)


def test_confusion_matrix_is_scikit_learns():
    outputs, targets = drawn(CLASSIFICATION)
    found = in_parts(CLASSIFICATION, outputs, targets)["confusion"]
    assert np.array_equal(found.numpy(), sk.confusion_matrix(targets.numpy(), outputs.argmax(1).numpy()))


@pytest.mark.parametrize("task", [SCORED, *list(TASKS.values())[1:]], ids=lambda task: task.name)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_sums_are_finite_and_possible_whatever_a_diverged_network_says(task, broken):
    outputs, targets = drawn(task, n=30)
    outputs[::3] = broken
    sums = task.sums(outputs, targets)
    assert all(bool(tensor.double().isfinite().all()) for tensor in sums.values())
    assert task.impossible(sums, 30, 6) is None
    assert all(value is None or math.isfinite(value) for value in task.values(sums).values())


def test_metrics_that_the_data_do_not_define_are_none():
    outputs, _ = drawn(SCORED, n=20)
    one = torch.zeros(20, dtype=torch.int64)
    assert Binary().values(Binary().sums(outputs[:, :1], one))["auroc"] is None
    same = torch.full((20, 1), 4.0)
    assert Regression().values(Regression().sums(outputs[:, :1], same))["r2"] is None
    nothing = torch.full((2, 3), IGNORED)
    assert NextToken().values(NextToken().sums(torch.zeros(2, 3, 4), nothing)) == {"perplexity": None, "accuracy": None}


@pytest.mark.parametrize("task", list(TASKS.values()), ids=lambda task: task.name)
def test_criterion_is_torchs_has_a_gradient_and_can_be_stacked(task):
    outputs, targets = drawn(task, n=8)
    expected = {
        "classification": lambda: F.cross_entropy(outputs, targets),
        "binary": lambda: F.binary_cross_entropy_with_logits(outputs[:, 0], targets.float()),
        "multilabel": lambda: F.binary_cross_entropy_with_logits(outputs, targets),
        "regression": lambda: F.mse_loss(outputs, targets),
    }
    tokens = outputs.flatten(0, -2), targets.flatten()
    by_token = F.cross_entropy(*tokens, ignore_index=IGNORED) if task.by_position else None
    loss = task.criterion(outputs.requires_grad_(), targets)
    wanted = expected.get(task.name, lambda: by_token)()
    torch.testing.assert_close(loss.detach(), wanted.detach())
    loss.backward()
    assert outputs.grad.abs().sum() > 0
    stacked = vmap(task.criterion)(torch.stack([outputs.detach()] * 2), torch.stack([targets] * 2))
    torch.testing.assert_close(stacked, torch.stack([loss.detach()] * 2))


def test_token_loss_of_a_batch_in_which_nothing_counts_is_zero():
    outputs = torch.zeros(2, 3, 4, requires_grad=True)
    loss = NextToken().criterion(outputs, torch.full((2, 3), IGNORED))
    loss.backward()
    assert (loss.item(), outputs.grad.abs().sum().item()) == (0.0, 0.0)


def test_regression_of_one_number_takes_targets_of_one_axis():
    outputs, targets = drawn(Regression(), width=1)
    flat = Regression().values(Regression().sums(outputs, targets[:, 0]))
    assert flat == Regression().values(Regression().sums(outputs, targets))
    torch.testing.assert_close(Regression().criterion(outputs, targets[:, 0]), F.mse_loss(outputs, targets))


FAULTS = [
    (CLASSIFICATION, torch.tensor([0, 5]), "go from 0 to 5"),
    (CLASSIFICATION, torch.tensor([-1, 4]), "go from -1 to 4"),
    (CLASSIFICATION, torch.tensor([0.5, 1.0]), r"are float32 of shape \(2,\)"),
    (Binary(), torch.tensor([0, 2]), "go from 0 to 2"),
    (MultiLabel(), torch.tensor([0, 1]), r"are int64 of shape \(2,\)"),
    (MultiLabel(), torch.tensor([[0.0, 1.0, 0.5, 0.0]]), "hold other numbers"),
    (MultiLabel(), torch.zeros(2, 3), "need networks with 3 outputs; these have 4"),
    (Regression(), torch.tensor([[1.0, math.nan, 2.0]]), "hold NaN or infinity"),
    (Regression(), torch.tensor([1, 2]), "are int64"),
    (Regression(), torch.tensor([1.0, 2.0]), "need networks with 1 outputs; these have 3"),
    (NextToken(), torch.tensor([[0, 7]]), "go from 0 to 7"),
    (NextToken(), torch.tensor([0, 1]), r"are int64 of shape \(2,\)"),
    (TokenClassification(), torch.tensor([[0, -1]]), "go from -1 to 0"),
]


@pytest.mark.parametrize(("task", "targets", "found"), FAULTS, ids=lambda part: str(getattr(part, "name", "")))
def test_check_targets_refuses_what_the_task_cannot_use_in_one_line(task, targets, found):
    with pytest.raises(DataError, match=rf"^client 3: its targets {found}.*; {task.name} expects .*") as caught:
        task.check_targets(targets, WIDTHS[task.name], "client 3: its targets")
    assert "\n" not in str(caught.value)
    assert "{" not in str(caught.value)


def test_labels_are_the_targets_of_single_label_tasks_and_of_others_all_the_same():
    for name, task in TASKS.items():
        targets = drawn(task, 5)[1]
        assert task.has_labels == (name in ("classification", "binary"))
        assert torch.equal(task.labels(targets), targets if task.has_labels else torch.zeros(5, dtype=torch.int64))


def test_task_named_knows_all_and_names_the_nearest():
    assert [task_named(name).name for name in TASKS] == list(TASKS)
    with pytest.raises(ConfigError, match=r"unknown task 'regresion'; nearest: regression; all: classification, "):
        task_named("regresion")


def test_metric_knows_its_direction():
    mae = Metric("mae", "MAE", higher_is_better=False)
    assert mae.better(0.1, 0.2)
    assert not mae.better(0.2, 0.2)
    assert ACCURACY.better(0.2, 0.1)
    assert mae.better(9.0, None)
    assert (mae.worst([1, 3, 2]), ACCURACY.worst([1, 3, 2]), mae.worst([])) == (3, 1, None)
    assert (mae.direction, ACCURACY.direction) == ("lower is better", "higher is better")
    assert (mae.text(12.345678), ACCURACY.text(0.8444), mae.text(None)) == ("12.35", "84.4 %", "-")
    assert Metric.of(mae.facts()) == mae
