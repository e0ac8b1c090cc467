"""FedAUX: who is certain of which public example, and a distillation in which each client counts where it is."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.needs import Need, Offer
from potluck.core.nets.weights import load
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import LocalTraining
from potluck.experiment.federation.needs import check_needs
from potluck.methods.fedaux import FedAUX, Weighted, others
from potluck.methods.fedavg import FedAvg
from potluck.methods.feddf import FedDF
from potluck.models.split import split
from potluck.parts.certainty import certainty, logistic
from potluck.parts.means import Aggregate
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
STILL = LocalTraining("sgd", lr=0.0, batch_size=64)
ONE_STEP = FedAUX(FULL, FULL)
BOTH = pytest.mark.parametrize("regression", ["sum", "mean"])


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def with_public(federation, examples=30):
    inputs = 2 * normal(examples, 6, seed=3).float()
    return replace(federation, public=Examples(inputs, torch.zeros(examples, dtype=torch.int64)))


@pytest.fixture
def mixed(clouds):
    return with_public(clouds("norm2", "mlp3", "norm2", labels=((0, 1), (1, 2), (0, 2))))


def replied(run, exchange=-1):
    return run.wire.replied["local_update"][exchange]


def sent(run, exchange=-1):
    return run.wire.sent["local_update"][exchange]


def net_of(run, id, weights):
    federation = run.engine.federation
    return load(federation.architectures[federation.sites[id].architecture](), weights)


def targets_of(run):
    """The target of the distillation for each row of D_distill, by the replies of the last round."""
    public = run.engine.federation.public.inputs
    rest = [row for row in range(len(public)) if row not in run.state.negatives.tolist()]
    total = weight = 0.0
    for id, reply in replied(run).items():
        net = net_of(run, id, {**reply["weights"], **reply.get("buffers", {})}).eval()
        score = run.state.scores[id][:, None] + 1e-8
        total, weight = total + score * net(public[rest]).detach(), weight + score
    return public[rest], (total / weight).softmax(1)


# Certainty


@BOTH
def test_logistic__is_where_scikit_learn_arrives(regression):
    """Its objective is |w|^2 / 2 + C times the sum of the losses."""
    x, kind = normal(50, 5), torch.sign(normal(50, seed=1) + normal(50, 5)[:, 0])
    found = logistic(x, kind, torch.full((5,), 0.01).double(), regression)
    c = 1 / (0.01 if regression == "sum" else 0.01 * 50)
    fitted = LogisticRegression(C=c, fit_intercept=False, tol=1e-12, max_iter=10_000).fit(x.numpy(), kind.numpy())
    assert_close(found, torch.from_numpy(fitted.coef_[0]), rtol=1e-5, atol=1e-6)


def test_logistic__does_not_penalise_an_intercept():
    x, kind = normal(50, 3) + 1, torch.cat([torch.ones(40), -torch.ones(10)]).double()
    padded, penalty = F.pad(x, (0, 1), value=1.0), torch.tensor([0.5, 0.5, 0.5, 0.0]).double()
    found = logistic(padded, kind, penalty, "sum")
    fitted = LogisticRegression(C=2.0, tol=1e-12, max_iter=10_000).fit(x.numpy(), kind.numpy())
    expected = np.append(fitted.coef_[0], fitted.intercept_)
    assert_close(found, torch.from_numpy(expected), rtol=1e-5, atol=1e-6)


@BOTH
def test_logistic__of_more_weights_than_examples_is_where_scikit_learn_arrives(regression):
    x, kind = normal(12, 40) + 1, torch.cat([torch.ones(8), -torch.ones(4)]).double()
    padded, penalty = F.pad(x, (0, 1), value=1.0), F.pad(torch.full((40,), 0.01).double(), (0, 1))
    found = logistic(padded, kind, penalty, regression)
    c = 1 / (0.01 if regression == "sum" else 0.01 * 12)
    fitted = LogisticRegression(C=c, tol=1e-14, max_iter=100_000).fit(x.numpy(), kind.numpy())
    expected = np.append(fitted.coef_[0], fitted.intercept_)
    assert_close(found, torch.from_numpy(expected), rtol=1e-5, atol=1e-6)


def test_logistic__of_more_weights_than_examples_is_what_it_is_with_as_many_examples():
    """An example of zeros says nothing, and with enough of them there are no more weights than examples."""
    x, kind, penalty = normal(12, 40), torch.sign(normal(12, seed=1)), 0.01 + normal(40, seed=2).square()
    more, kinds = torch.cat([x, torch.zeros(40, 40).double()]), torch.cat([kind, torch.ones(40).double()])
    found, expected = logistic(x, kind, penalty, "sum"), logistic(more, kinds, penalty, "sum")
    assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("penalty", [1e-6, 0.01, 1.0, 100.0])
def test_logistic__of_two_examples_by_hand(penalty):
    """One at 1 and one at -1: 2 / (1 + exp(w)) = penalty w; separable, so a small penalty makes w large."""
    x, kind = torch.tensor([[1.0], [-1.0]]).double(), torch.tensor([1.0, -1.0]).double()
    (w,) = logistic(x, kind, torch.tensor([penalty], dtype=torch.float64), "sum")
    assert float(2 / (1 + w.exp())) == pytest.approx(float(penalty * w), rel=1e-9)


def test_logistic__arrives_where_whole_steps_lead_away():
    """Newton's method with whole steps alone is at a slope of 34 after sixty of them."""
    x = torch.tensor([[-20.8, -15.8], [-1.0, -1.1], [-12.4, -2.2], [0.0, 0.2], [0.1, 0.0], [0.0, 0.0]]).double()
    kind, penalty = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, -1.0]).double(), torch.full((2,), 1e-6).double()
    w = logistic(x, kind, penalty, "sum")
    slope = penalty * w - x.T @ (kind * (-kind * (x @ w)).sigmoid())
    assert float(slope.abs().max()) < 1e-9


def test_logistic__one_example_of_n_moves_the_mean_s_weights_by_two_over_n_lambda_at_most_and_the_sum_s_further():
    x, kind = F.normalize(normal(20, 3)), torch.cat([torch.ones(10), -torch.ones(10)]).double()
    other, ridge = x.clone(), torch.ones(3).double()
    other[0] = -x[0]
    moved = {r: float((logistic(x, kind, ridge, r) - logistic(other, kind, ridge, r)).norm()) for r in ("sum", "mean")}
    assert 0 < moved["mean"] <= 2 / 20 < moved["sum"]


@BOTH
def test_certainty__is_high_where_a_row_looks_like_the_own_data(regression):
    own, negatives = normal(60, 4).abs() + torch.tensor([3.0, 0.0, 0.0, 0.0]), normal(60, 4, seed=1).abs()
    asked = torch.cat([own[:20] + 0.1, negatives[:20] + 0.1])
    found = certainty(own[20:], negatives[20:], asked, 1e-4, regression)
    assert bool((found >= 0).all() and (found <= 1).all())
    assert found[:20].mean() > 0.8
    assert found[20:].mean() < 0.4
    swapped = certainty(negatives[20:], own[20:], asked, 1e-4, "sum")
    assert_close(swapped, 1 - certainty(own[20:], negatives[20:], asked, 1e-4, "sum"))


@BOTH
def test_certainty__does_not_depend_on_the_scale_of_features(regression):
    own, negatives, asked = normal(9, 4), normal(12, 4, seed=1), normal(7, 4, seed=2)
    found = certainty(own, negatives, asked, 0.01, regression)
    assert_close(certainty(50 * own, 50 * negatives, 50 * asked, 0.01, regression), found)


def test_certainty__by_the_sum_is_that_of_the_code():
    own, negatives, asked = normal(9, 4), normal(12, 4, seed=1), normal(7, 4, seed=2)
    x, longest = torch.cat([own, negatives]), torch.cat([own, negatives]).norm(dim=1).max()
    fitted = LogisticRegression(C=100.0, tol=1e-12, max_iter=10_000).fit(x / longest, np.repeat([0, 1], [9, 12]))
    expected = torch.from_numpy(fitted.predict_proba(asked / longest)[:, 0])
    assert_close(certainty(own, negatives, asked, 0.01, "sum"), expected, rtol=0, atol=1e-6)


def test_certainty__by_the_mean_no_single_own_example_counts_more_than_another():
    """A client's example that is longer than all of D_minus is shortened, so that it cannot change the scale."""
    own, negatives, asked = normal(9, 4), normal(12, 4, seed=1), normal(7, 4, seed=2)
    far, farther = own.clone(), own.clone()
    far[0], farther[0] = 100 * own[0], 10_000 * own[0]
    assert_close(certainty(far, negatives, asked, 0.01, "mean"), certainty(farther, negatives, asked, 0.01, "mean"))
    assert not torch.allclose(
        certainty(far, negatives, asked, 0.01, "sum"), certainty(farther, negatives, asked, 0.01, "sum"), rtol=0.01
    )


# The ensemble


def test_weighted__is_the_sum_of_scores_times_logits_over_the_sum_of_scores():
    mean = Weighted()
    mean.add(torch.tensor([[4.0, 0.0], [1.0, 1.0]]), torch.tensor([0.75, 0.0]))
    mean.add(torch.tensor([[0.0, 8.0], [5.0, 3.0]]), torch.tensor([0.25, 0.6]))
    assert_close(mean.mean(), torch.tensor([[3.0, 2.0], [5.0, 3.0]]))


def test_weighted__counts_all_equally_where_nobody_is_certain():
    mean = Weighted()
    mean.add(torch.tensor([[4.0, 0.0]]), torch.zeros(1))
    mean.add(torch.tensor([[0.0, 8.0]]), torch.zeros(1))
    assert_close(mean.mean(), torch.tensor([[2.0, 4.0]]))


def test_others__are_the_rest_in_order():
    assert others(6, torch.tensor([4, 0])).tolist() == [1, 2, 3, 5]
    assert others(2, torch.empty(0, dtype=torch.int64)).tolist() == [0, 1]


# A round


def test_a_distillation_step_is_the_codes(play, mixed):
    """Each prototype: from its plain average, a step on KL(weighted ensemble || prototype) by autograd."""
    run = play(ONE_STEP, mixed, rounds=2)
    averages = play(replace(ONE_STEP, server_training=STILL), mixed, rounds=0).engine
    start, _ = averages.round(2, run.states[1], [0, 1, 2])  # the same clients' work, and no distillation
    inputs, targets = targets_of(run)
    for id, p in ((0, "norm2"), (1, "mlp3")):
        pool = {n: t for n, t in start.weights[p].items() if "running" not in n and "num_batches" not in n}
        student = net_of(run, id, {**run.state.weights[p], **pool}).train()
        loss = (targets * (targets.log() - F.log_softmax(student(inputs), 1))).sum() / len(inputs)
        gradients = torch.autograd.grad(loss, list(student.parameters()))
        for (name, parameter), gradient in zip(student.named_parameters(), gradients, strict=True):
            assert_close(run.state.weights[p][name], (parameter - 0.1 * gradient).detach(), rtol=1e-4, atol=1e-6)


def test_averages_are_plain_or_by_examples(play, clouds):
    federation = with_public(clouds("mlp2", "mlp2", sizes=(3, 60)))
    for weighting, shares in (("uniform", (1, 1)), ("samples", (3, 60))):
        run = play(FedAUX(FULL, STILL, sharing=Sharing("architecture", weighting)), federation)
        first, second = (reply["weights"] for reply in replied(run).values())
        for name, tensor in run.state.weights["mlp2"].items():
            assert_close(tensor, (shares[0] * first[name] + shares[1] * second[name]) / sum(shares))


def test_scores_are_of_the_initial_nets_features(play, mixed):
    run = play(ONE_STEP, mixed)
    public, negatives = mixed.public.inputs, run.state.negatives
    for id, site in mixed.sites.items():
        net = split(run.engine.server(0).build(site.architecture).eval())
        h = lambda x, net=net: net.intermediate(net.extractor(x)).detach()  # noqa: E731
        asked = h(public[others(30, negatives)])
        expected = certainty(h(site.train.inputs), h(public[negatives]), asked, 0.01, "sum")
        assert_close(run.state.scores[id], expected, rtol=1e-4, atol=1e-5)


def test_negatives_are_a_share_of_the_public_data_and_are_not_distilled_on(play, mixed):
    run = play(replace(FedAUX(STILL, STILL), negative_share=0.4), mixed)
    assert len(run.state.negatives.unique()) == 12
    assert all(scores.shape == (18,) for scores in run.state.scores.values())
    rest = mixed.public.inputs[others(30, run.state.negatives)]
    moved = [reply["buffers"]["stages.stage0.1.running_mean"] for id, reply in replied(run).items() if id != 1]
    net = net_of(run, 0, run.states[0].weights["norm2"])
    seen = 0.9 * (moved[0] + moved[1]) / 2 + 0.1 * net.stages[0][0](rest).mean(0).detach()
    assert_close(run.state.weights["norm2"]["stages.stage0.1.running_mean"], seen)  # one batch of these rows alone


def test_scores_are_sent_once_by_each_client(play, mixed):
    run = play(ONE_STEP, mixed, rounds=0)
    run.round(0, 1)
    run.round(1, 2)
    assert [[("negatives" in m, "scores" in replied(run, r)[i]) for i, m in sent(run, r).items()] for r in (0, 1)] == [
        [(True, True), (True, True)],
        [(False, False), (True, True)],
    ]
    assert_close(run.states[2].scores[1], run.states[1].scores[1], **EXACTLY)
    early = play(ONE_STEP, mixed)
    assert_close(run.state.scores[2], early.state.scores[2], **EXACTLY)  # whenever it comes, of the initial net
    assert_close(run.state.negatives, early.state.negatives, **EXACTLY)


def test_the_bytes_of_scores_are_four_for_each_row(play, mixed):
    traffic = play(ONE_STEP, mixed).reports[0].traffic
    assert traffic.up["scores"] == 3 * 24 * 4
    assert traffic.down["negatives"] == 3 * 6 * 8


def apart(federation):
    """The first client's data on one side, the second's on the other."""
    sites = federation.sites.items()
    far = {id: site.train.inputs + torch.tensor([6.0 - 12 * id, *[0.0] * 5]) for id, site in sites}
    return {id: replace(site, train=Examples(far[id], site.train.targets)) for id, site in sites}


def test_who_knows_little_is_asked_about_what_it_knows(play, clouds):
    """Each of two clients has one class and is sure of it everywhere, the one with more data surer.

    Among equals it prevails also where only the other has been.
    """
    federation = clouds("mlp2", "mlp2", sizes=(8, 100), labels=((0,), (1,)))
    seen = [site.train for site in apart(clouds("mlp2", "mlp2", sizes=(60, 60), labels=((0,), (1,)), seed=1)).values()]
    x, y = torch.cat([data.inputs for data in seen]), torch.cat([data.targets for data in seen])
    federation = replace(federation, sites=apart(federation), public=Examples(x, torch.zeros_like(y)))
    training, teaching = LocalTraining(lr=0.02, epochs=8), LocalTraining(lr=0.02, epochs=10)
    weighted, equal = (play(method(training, teaching), federation) for method in (FedAUX, FedDF))
    labels = y[others(120, weighted.state.negatives)]
    for id, scores in weighted.state.scores.items():
        assert scores[labels == id].mean() > 4 * scores[labels != id].mean()
    right = [(run.engine.global_model(run.state)(x).argmax(1) == y).float() for run in (weighted, equal)]
    assert right[0][y == 0].mean() > 0.9
    assert right[1][y == 0].mean() < 0.5


def test_with_equal_clients_all_public_data_are_distilled_on_and_nothing_is_asked(play, mixed):
    run = play(replace(ONE_STEP, certainty="equal"), mixed)
    same = play(FedDF(FULL, FULL, sharing=Sharing("architecture", "uniform")), mixed)
    assert run.state.scores == {}
    assert not any("negatives" in message for message in sent(run).values())
    for p, pool in same.state.weights.items():
        assert_close(run.state.weights[p], pool)


# Who takes part, and what is evaluated


def test_a_prototype_that_nobody_trained_is_distilled_from_where_it_was(play, mixed):
    still = play(replace(ONE_STEP, server_training=STILL), mixed, rounds=0)
    taught = play(ONE_STEP, mixed, rounds=0)
    for run in (still, taught):
        run.round(0)
    assert_close(still.state.weights["mlp3"], still.states[0].weights["mlp3"], **EXACTLY)
    assert not torch.equal(taught.state.weights["mlp3"]["head.weight"], still.state.weights["mlp3"]["head.weight"])


def test_those_who_were_not_drawn_do_not_teach_even_if_their_scores_are_known(play, mixed):
    run = play(ONE_STEP, mixed)
    run.round(0, 1)
    inputs, targets = targets_of(run)
    student = net_of(run, 1, replied(run)[1]["weights"])  # the only one of its kind
    loss = -(targets * F.log_softmax(student(inputs), 1)).sum() / len(inputs)
    gradients = torch.autograd.grad(loss, list(student.parameters()))
    for (name, parameter), gradient in zip(student.named_parameters(), gradients, strict=True):
        assert_close(run.state.weights["mlp3"][name], (parameter - 0.1 * gradient).detach(), rtol=1e-4, atol=1e-6)


def test_clients_start_from_their_prototype_and_the_global_model_is_their_ensemble(play, mixed):
    run = play(FedAUX(STILL, FULL), mixed, rounds=2)
    for id, p in enumerate(("norm2", "mlp3", "norm2")):
        message = sent(run)[id]
        assert_close({**message["weights"], **message.get("buffers", {})}, run.states[1].weights[p], **EXACTLY)
        assert_close(dict(run.model(id).state_dict()), run.state.weights[p], **EXACTLY)
        assert run.kept(id).get("model") is None
    x = mixed.public.inputs
    nets = [net_of(run, id, run.state.weights[p]).eval() for id, p in ((0, "norm2"), (1, "mlp3"))]
    assert_close(run.engine.global_model(run.state).eval()(x), (nets[0](x) + nets[1](x)) / 2)


def test_public_targets_are_never_read(play, mixed):
    foreign = replace(mixed, public=Examples(mixed.public.inputs, torch.full((30,), torch.nan)))
    own, other = play(ONE_STEP, mixed, rounds=2), play(ONE_STEP, foreign, rounds=2)
    assert_close(own.state.weights, other.state.weights, **EXACTLY)


def test_a_robust_rule_makes_the_averages_and_certainty_the_ensemble(play, clouds):
    federation = with_public(clouds("mlp2", "mlp2", "mlp2"))
    robust = Sharing("architecture", "uniform", combine=Aggregate("median"))
    run = play(FedAUX(FULL, FULL, sharing=robust), federation)
    weights = [reply["weights"] for reply in replied(run).values()]
    student = net_of(run, 0, {n: torch.stack([w[n] for w in weights]).median(0).values for n in weights[0]})
    inputs, targets = targets_of(run)
    loss = -(targets * F.log_softmax(student(inputs), 1)).sum() / len(inputs)
    gradients = torch.autograd.grad(loss, list(student.parameters()))
    for (name, parameter), gradient in zip(student.named_parameters(), gradients, strict=True):
        assert_close(run.state.weights["mlp2"][name], (parameter - 0.1 * gradient).detach(), rtol=1e-4, atol=1e-6)


def test_without_distillation_prototypes_are_fedavg_s(play, mixed):
    still = play(replace(ONE_STEP, server_training=STILL), mixed)
    plain = play(FedAvg(FULL, Sharing("architecture", "uniform")), mixed)
    assert_close(still.state.weights["mlp3"], plain.state.weights["mlp3"], **EXACTLY)


# What it needs


def test_features_are_needed_only_for_certainty():
    assert FedAUX().needs() == {Need.PUBLIC_DATA, Need.CLASSES, Need.SPLIT_MODEL}
    assert replace(FedAUX(), certainty="equal").needs() == {Need.PUBLIC_DATA, Need.CLASSES}


def test_a_federation_without_public_data_is_refused(clouds):
    with pytest.raises(ConfigError, match="needs public data"):
        check_needs(FedAUX().needs(), "fedaux", Offer.of(clouds("mlp2")))


def test_of_two_public_examples_one_is_a_negative_and_of_one_none_is_left(play, clouds):
    run = play(ONE_STEP, with_public(clouds("mlp2", "mlp3"), examples=2))
    assert len(run.state.negatives) == len(run.state.scores[0]) == 1
    with pytest.raises(ConfigError, match=r"federation\.public: expected at least two examples, .* found 1"):
        play(ONE_STEP, with_public(clouds("mlp2"), examples=1), rounds=0)


@pytest.mark.parametrize(
    ("method", "public", "negatives"),
    [(ONE_STEP, 2, 1), (replace(ONE_STEP, negative_share=0.9), 5, 4), (replace(ONE_STEP, certainty="equal"), 1, 0)],
)
def test_one_example_to_distil_on_is_refused_where_batchnorm_needs_two(play, clouds, method, public, negatives):
    """Before anybody trains; networks without BatchNorm learn from one."""
    play(method, with_public(clouds("mlp2"), examples=public))
    expected = rf"at least two examples to distil on, beside {negatives} negatives: a batch for BatchNorm"
    with pytest.raises(ConfigError, match=rf"^federation\.public: expected {expected}, found {public}$"):
        play(method, with_public(clouds("norm2"), examples=public), rounds=0)


@pytest.mark.parametrize(
    ("regression", "own", "expected"),
    [
        ("mean", [[0.0, 0.0]] * 3, 0.5),  # nothing to tell them apart by
        ("mean", [[3.0, 4.0]] * 3, None),
        ("sum", [[0.0, 0.0]] * 3, 3 / 5),  # the intercept alone: three of five are the client's
    ],
)
def test_certainty__is_a_number_where_features_are_zero(regression, own, expected):
    """As behind a ReLU that is off for all negatives."""
    asked = torch.tensor([[0.0, 0.0], [6.0, 8.0]])
    found = certainty(torch.tensor(own), torch.zeros(2, 2), asked, 0.01, regression)
    if expected is None:
        assert found[0] == 0.5 < found[1]
    else:
        assert_close(found, torch.full((2,), expected))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"sharing": Sharing("layer")}, r"sharing\.scope: expected 'architecture', found 'layer'"),
        ({"sharing": Sharing("architecture", buffers="drop")}, r"sharing\.buffers: expected 'average',.* found 'drop'"),
        ({"negative_share": 1.0}, "negative_share: expected above 0 and below 1"),
        ({"penalty": 0.0}, "penalty: expected above 0"),
        ({"regression": "max"}, "regression: expected"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(changes, found):
    with pytest.raises(ValueError, match=found):
        replace(FedAUX(), **changes)
