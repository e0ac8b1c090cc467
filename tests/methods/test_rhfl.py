"""RHFL: a loss for wrong labels, and clients that weigh more in what others learn the better they do themselves."""

from dataclasses import replace
from math import exp, log

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.federation import empty_like
from potluck.core.ground.errors import ConfigError
from potluck.core.message import Message
from potluck.core.method import on_client
from potluck.core.needs import Need, Offer
from potluck.core.requests.examples import Batch, Examples
from potluck.core.requests.fit import LocalTraining
from potluck.experiment.federation.needs import check_needs
from potluck.methods.rhfl import RHFL, SymmetricLoss, confidences
from potluck.parts.means import Aggregate

EXACTLY = {"rtol": 0, "atol": 0}
STILL = LocalTraining("sgd", lr=0.0)
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
BOTH_SCALES = pytest.mark.parametrize("scale", ["absolute", "sum"])


def numbers(rows, classes, seed=0):
    return torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def symmetric(logits, labels, forward=0.1, reverse=1.0, floor=1e-4):
    return SymmetricLoss(F.cross_entropy, forward, reverse, floor).of(logits, torch.tensor(labels))


def reversed_by_definition(logits, labels, floor=1e-4):
    """The cross-entropy of labels, with a floor for zeros, to predictions."""
    labels = F.one_hot(torch.tensor(labels), logits.shape[1]).double().clamp(min=floor)
    return -(logits.softmax(1) * labels.log()).sum(1).mean()


def full_step(net, loss):
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter -= 0.1 * gradient


def own_loss(net, site):
    return symmetric(net.eval()(site.train.inputs), site.train.targets.tolist())


def measured(nets, sites):
    return [float(own_loss(net, sites[id]).detach()) for id, net in enumerate(nets)]


# The symmetric loss


def test_the_symmetric_loss_of_a_case_done_by_hand():
    logits = torch.tensor([[0.75, 0.25], [0.2, 0.8]], dtype=torch.float64).log()
    forward = (-log(0.75) - log(0.2)) / 2
    backward = -log(1e-4) * (0.25 + 0.8) / 2
    assert_close(symmetric(logits, [0, 0]).item(), 0.1 * forward + backward)
    assert_close(symmetric(logits, [0, 0], 1.0, 0.0).item(), forward)
    assert_close(symmetric(logits, [0, 0], 0.0, 2.0, 0.01).item(), 2 * -log(0.01) * 1.05 / 2)


def test_the_symmetric_loss_is_the_papers_definition():
    logits, labels = 3 * numbers(6, 4), [0, 3, 1, 1, 2, 0]
    expected = 0.3 * F.cross_entropy(logits, torch.tensor(labels)) + 0.7 * reversed_by_definition(logits, labels, 1e-3)
    assert_close(symmetric(logits, labels, 0.3, 0.7, 1e-3), expected)


def test_the_symmetric_loss_has_the_slope_of_finite_differences():
    logits, labels = numbers(4, 3).requires_grad_(), [2, 0, 1, 1]
    (gradient,) = torch.autograd.grad(symmetric(logits, labels), logits)
    for place in range(12):
        nudge = torch.zeros(12, dtype=torch.float64).index_fill(0, torch.tensor(place), 1e-6).view(4, 3)
        ahead, behind = (symmetric(logits.detach() + sign * nudge, labels) for sign in (1, -1))
        assert_close(gradient.view(-1)[place], (ahead - behind) / 2e-6, rtol=1e-6, atol=1e-9)


def test_a_label_that_contradicts_a_certain_net_hardly_moves_it():
    """The reverse cross-entropy is bounded: its gradient vanishes where cross-entropy's is largest."""
    logits = torch.tensor([[12.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    (mild,) = torch.autograd.grad(symmetric(logits, [1], 0.0), logits)
    (strong,) = torch.autograd.grad(F.cross_entropy(logits, torch.tensor([1])), logits)
    assert mild.abs().max() < 1e-3 < 0.9 < strong.abs().max()
    assert symmetric(1e3 * logits.detach(), [1], 0.0) <= -log(1e-4) + 1e-9


def test_a_net_learns_more_of_the_truth_by_it_where_labels_are_wrong(play, clouds):
    """Two fifths of the labels of two classes are flipped; what counts is the true one."""
    federation = clouds("mlp2", sizes=(200,), labels=((0, 1),), public=4)
    data = federation.sites[0].train
    wrong = data.targets.clone()
    wrong[::5], wrong[1::5] = 1 - wrong[::5], 1 - wrong[1::5]
    site = replace(federation.sites[0], train=Examples(data.inputs, wrong))
    noisy = replace(federation, sites={0: site})
    training = LocalTraining(lr=0.01, epochs=100, batch_size=64)

    def right(**weights):
        run = play(RHFL(training, STILL, pretrain=0, **weights), noisy)
        return (run.model(0)(data.inputs).argmax(1) == data.targets).float().mean()

    assert right() > right(forward=1.0, reverse=0.0) + 0.02


# Confidence


@BOTH_SCALES
def test_confidences_are_equal_while_no_quality_is_known(scale):
    """1 / (N - 1) each, so that the others of a client have a weight of 1 together."""
    assert confidences([None] * 4, 0.5, scale) == [1 / 3] * 4
    assert confidences([None], 0.5, scale) == [1.0]


@BOTH_SCALES
def test_confidences_of_a_case_done_by_hand(scale):
    """Qualities of 0.3 and 0.1 are shares of 3/4 and 1/4."""
    one, two, three = exp(1 / 2 + 0.5 * 0.75), exp(1 / 2 + 0.5 * 0.25), exp(1 / 2)
    expected = [w / (one + two + three) for w in (one, two, three)]
    assert confidences([0.3, 0.1, 0.0], 0.5, scale) == pytest.approx(expected)
    assert confidences([0.3, 0.1, None], 0.5, scale) == pytest.approx(expected)  # as if its loss had not changed


def test_confidences_of_clients_who_got_worse():
    """Shares of 3/2 and -1/2 in the paper's sum, of 3/4 and -1/4 in that of absolute values."""
    ratio = {scale: (found := confidences([0.3, -0.1], 0.5, scale))[0] / found[1] for scale in ("sum", "absolute")}
    assert ratio == pytest.approx({"sum": exp(0.5 * 2), "absolute": exp(0.5 * 1)})
    both_worse = {scale: confidences([-0.1, -0.3], 0.5, scale) for scale in ("sum", "absolute")}
    assert both_worse["absolute"][0] > both_worse["absolute"][1]
    assert both_worse["sum"][0] < both_worse["sum"][1]  # as the departure says


@BOTH_SCALES
@pytest.mark.parametrize("qualities", [[0.0, 0.0, 0.0], [0.2, 0.2, 0.2], [-0.2, -0.2, -0.2]])
def test_equal_qualities_make_equal_confidences(scale, qualities):
    assert confidences(qualities, 0.5, scale) == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize("qualities", [[0.1, -0.1], [1e9, 1e-9], [-1.0, 1.0 + 1e-15], [5e-324, 0.0]])
@BOTH_SCALES
def test_confidences_are_finite_and_sum_to_one(scale, qualities):
    found = confidences(qualities, 0.5, scale)
    assert sum(found) == pytest.approx(1)
    assert min(found) >= 0


def test_no_claim_of_quality_gains_much_confidence():
    """With absolute values one client of ten weighs at most exp(eta) times as much as an honest one."""
    found = confidences([0.1] * 9 + [1e9], 0.5, "absolute")
    assert found[-1] / found[0] <= exp(0.5) + 1e-9


def test_without_eta_all_confidences_are_equal():
    assert confidences([0.5, -0.2, 3.0, None], 0.0, "absolute") == pytest.approx([0.25] * 4)


# A round


def divergences(target_of, weights, logits):
    """The sum of w_l KL(R_l || net), means over the rows."""
    q = logits.log_softmax(1)
    return sum(w * (r * (r.log() - q)).sum(1).mean() for w, r in zip(weights, target_of, strict=True))


@pytest.mark.parametrize(("scale", "exchanges"), [("absolute", 1), ("sum", 1), ("absolute", 3)])
def test_a_round_is_the_papers(play, clouds, scale, exchanges):
    federation = clouds("mlp2", "mlp3", "wide2", public=31)
    run = play(RHFL(FULL, FULL, exchanges=exchanges, scale=scale), federation, rounds=0)
    nets, sites = [run.model(id) for id in range(3)], federation.sites
    for id, net in enumerate(nets):  # pre-training
        full_step(net, own_loss(net, sites[id]))
    losses, weights = measured(nets, sites), [1 / 2] * 3
    for number in range(3):
        run.round()
        for exchange in range(number * exchanges, (number + 1) * exchanges):
            inputs = federation.public.inputs[run.wire.sent["predict_public"][exchange][0]["rows"]]
            r = [net(inputs).detach().softmax(1) for net in nets]
            for id, net in enumerate(nets):
                others = [other for other in range(3) if other != id]
                full_step(
                    net, divergences([r[other] for other in others], [weights[other] for other in others], net(inputs))
                )
        for id, net in enumerate(nets):
            full_step(net, own_loss(net, sites[id]))
            assert_close(dict(run.model(id).state_dict()), dict(net.state_dict()), rtol=1e-4, atol=1e-5)
        last, losses = losses, measured(nets, sites)
        f = [(before - after) / after for before, after in zip(last, losses, strict=True)]
        assert [run.state.qualities[id] for id in range(3)] == pytest.approx(f, rel=1e-3, abs=1e-5)
        shares = [x / sum(map(abs, f) if scale == "absolute" else f) for x in f]
        raised = [exp(1 / 2 + 0.5 * share) for share in shares]
        weights = [x / sum(raised) for x in raised]


def test_the_target_leaves_out_a_clients_own_predictions(play, clouds):
    run = play(RHFL(), clouds("mlp2", "mlp3", "wide2", public=30), rounds=2)
    w = confidences([run.states[1].qualities[id] for id in range(3)], 0.5, "absolute")
    r = [reply["predictions"] for reply in run.wire.replied["predict_public"][-1].values()]
    for id, others in enumerate([(1, 2), (0, 2), (0, 1)]):
        expected = sum(w[other] * r[other] for other in others)
        assert_close(run.wire.sent["learn_from_others"][-1][id]["target"], expected)
    first = run.wire.replied["predict_public"][0]
    expected = (first[1]["predictions"] + first[2]["predictions"]) / 2
    assert_close(run.wire.sent["learn_from_others"][0][0]["target"], expected)


def test_learning_from_others_brings_a_client_nearer_to_them(play, clouds):
    federation = clouds("mlp2", "mlp3", "wide2", public=30)
    run = play(RHFL(STILL, LocalTraining(lr=0.01, epochs=10), pretrain=0), federation)
    inputs = federation.public.inputs[run.wire.sent["predict_public"][0][0]["rows"]]
    for id in range(3):
        target = run.wire.sent["learn_from_others"][0][id]["target"]
        before, after = run.wire.replied["predict_public"][0][id]["predictions"], run.model(id)(inputs).softmax(1)
        assert (after - target).abs().mean() < 0.7 * (before - target).abs().mean()


def test_equal_clients_stay_as_they_are_on_public_data(play, clouds):
    """Nothing is learnt from others who predict the same."""

    def fixed():
        net = nn.Linear(6, 3)
        nn.init.zeros_(net.bias)
        net.weight.data = torch.linspace(-1, 1, 18).view(3, 6)
        return net

    federation = clouds("mlp2", "mlp2", "mlp2", public=30)
    federation = replace(federation, architectures={"mlp2": fixed})
    run = play(RHFL(STILL, replace(FULL, epochs=3), pretrain=0), federation)
    assert_close(run.model(1).state_dict()["weight"], torch.linspace(-1, 1, 18).view(3, 6))


def test_whose_labels_are_wrong_has_less_confidence(play, clouds):
    """Its loss stays high, while those of the others fall."""
    federation = clouds("mlp2", "mlp2", "mlp2", "mlp2", sizes=(40, 40, 40, 40), public=30)
    data = federation.sites[2].train
    shuffled = torch.randint(3, (40,), generator=torch.Generator().manual_seed(3))
    sites = {**federation.sites, 2: replace(federation.sites[2], train=Examples(data.inputs, shuffled))}
    run = play(RHFL(LocalTraining(lr=0.01)), replace(federation, sites=sites), rounds=2)
    for qualities in (state.qualities for state in run.states[1:]):
        weights = confidences([qualities[id] for id in range(4)], 0.5, "absolute")
        assert weights[2] == min(weights)


def test_predictions_and_losses_are_made_in_evaluation_mode(play, clouds):
    federation = clouds("norm2", "norm3", public=30)
    run = play(RHFL(pretrain=0), federation, rounds=0)
    initial = run.new_model(1).eval()
    run.round()
    inputs = federation.public.inputs[run.wire.sent["predict_public"][0][1]["rows"]]
    assert_close(run.wire.replied["predict_public"][0][1]["predictions"], initial(inputs).softmax(1).detach())
    before, after = (float(own_loss(net, federation.sites[1]).detach()) for net in (initial, run.model(1)))
    assert run.state.qualities[1] == pytest.approx(before / after - 1, rel=1e-4)
    assert run.kept(1)["state"] == {"loss": pytest.approx(after)}


def test_a_loss_that_has_vanished_makes_a_finite_quality(play, clouds):
    """A net that is certain and right has a loss of 0; it may have been wrong before."""

    class Sure(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1e4 * F.one_hot(torch.zeros(len(x), dtype=torch.int64), 3)

    federation = clouds("mlp2", "mlp3", public=30, labels=((0,), (0, 1, 2)))
    architectures = {**federation.architectures, "mlp2": lambda: Sure(6, 3)}
    run = play(RHFL(), replace(federation, architectures=architectures), rounds=2)
    assert run.state.qualities[0] == 0.0
    assert run.kept(0)["state"]["loss"] == 1e-6


def test_confidences_are_in_the_records(play, clouds):
    run = play(RHFL(), clouds("mlp2", "mlp3", "wide2", public=30), rounds=2)
    assert run.reports[0].server_notes == pytest.approx({"highest_confidence": 0.5, "lowest_confidence": 0.5})
    w = confidences([run.states[1].qualities[id] for id in range(3)], 0.5, "absolute")
    assert run.reports[1].server_notes == pytest.approx({"highest_confidence": max(w), "lowest_confidence": min(w)})


def test_clients_train_on_their_own_data_before_they_first_predict(play, clouds):
    federation = clouds("mlp2", "mlp3", public=30)
    run = play(RHFL(FULL, STILL, pretrain=3), federation, rounds=0)
    net = run.model(0)
    for _ in range(3):
        full_step(net, own_loss(net, federation.sites[0]))
    run.round(0)
    run.round(0, 1)
    inputs = federation.public.inputs[run.wire.sent["predict_public"][0][0]["rows"]]
    found = run.wire.replied["predict_public"][0][0]["predictions"]
    assert_close(found, net(inputs).detach().softmax(1))
    fits = [{id: len(losses) for id, losses in report.losses.items()} for report in run.reports]
    assert fits == [{0: 3 + 1}, {0: 1, 1: 3 + 1}]  # on its own data: beforehand, and in every round


def test_every_public_row_of_a_round_is_in_one_exchange(play, clouds):
    run = play(RHFL(public_examples=20, exchanges=3), clouds("mlp2", "mlp3", public=30))
    parts = [sent[0]["rows"].tolist() for sent in run.wire.sent["predict_public"]]
    assert [len(part) for part in parts] == [7, 7, 6]
    assert len({row for part in parts for row in part}) == 20
    assert len(play(RHFL(exchanges=9), clouds("mlp2", public=4)).wire.sent["predict_public"]) == 4


def test_public_targets_are_never_read_and_public_inputs_never_augmented(play, clouds):
    drawn = []

    def note(inputs, rng):
        drawn.append(rng)
        return inputs

    federation = clouds("mlp2", "norm3", public=30)
    foreign = Examples(federation.public.inputs, torch.full((30,), torch.nan), note)
    own, other = play(RHFL(), federation, 2), play(RHFL(), replace(federation, public=foreign), 2)
    for id in (0, 1):
        assert_close(dict(own.model(id).state_dict()), dict(other.model(id).state_dict()), **EXACTLY)
    assert drawn
    assert drawn == [None] * len(drawn)


# Who takes part


def test_a_client_that_was_not_drawn_stays_as_it_is_and_its_quality_is_kept(play, clouds):
    run = play(RHFL(), clouds("norm2", "norm2", "mlp3", public=30), rounds=0)
    initial = run.model(2).state_dict()
    run.round(0, 1)
    before, quality = run.kept(1), run.state.qualities[1]
    run.round(0)
    assert_close(run.kept(1)["model"], before["model"], **EXACTLY)
    assert_close(dict(run.model(2).state_dict()), dict(initial), **EXACTLY)
    assert run.state.qualities[1] == quality
    assert run.state.qualities.keys() == {0, 1}
    run.round(1, 2)  # a late joiner beside one who is known
    known = confidences([quality, None], 0.5, "absolute")
    reply = run.wire.replied["predict_public"][-1]
    assert_close(run.wire.sent["learn_from_others"][-1][2]["target"], known[0] * reply[1]["predictions"])
    assert_close(run.wire.sent["learn_from_others"][-1][1]["target"], known[1] * reply[2]["predictions"])


def test_a_client_alone_learns_nothing_on_public_data(play, clouds):
    federation = clouds("mlp2", public=30)
    run = play(RHFL(STILL, LocalTraining(lr=0.1), pretrain=0), federation, rounds=0)
    initial = run.model(0).state_dict()
    run.round()
    assert not run.wire.sent["learn_from_others"][0][0]["target"].any()
    assert_close(dict(run.model(0).state_dict()), dict(initial), **EXACTLY)
    run.round()
    assert run.state.qualities == {0: 0.0}


def test_a_client_that_fails_between_exchanges_is_left_out_of_the_rest(play, clouds):
    class Failing(RHFL):
        @on_client
        def learn_from_others(self, client, message):
            if client.id == 1 and len(message["target"]) == 3:  # the third part of the rows
                raise RuntimeError("out of order")
            return (yield from super().learn_from_others(client, message))

    run = play(
        Failing(public_examples=11, exchanges=3), clouds("mlp2", "mlp3", "wide2", public=30), tolerate_failures=True
    )
    assert [set(sent) for sent in run.wire.sent["predict_public"]] == [{0, 1, 2}] * 3
    assert set(run.wire.sent["local_update"][0]) == {0, 2}
    assert run.state.qualities.keys() == {0, 2}


def test_clients_that_lack_classes_take_part(play, clouds):
    run = play(RHFL(), clouds("mlp2", "mlp3", public=30, labels=((0,), (1, 2))), rounds=2)
    assert all(tensor.isfinite().all() for id in (0, 1) for tensor in run.model(id).state_dict().values())


@pytest.mark.parametrize("quality", [torch.tensor([torch.nan]), torch.tensor([1e10]), torch.tensor([0.5, 0.5]), 0.5])
def test_an_impossible_quality_is_its_senders_failure(play, clouds, quality):
    class Lying(RHFL):
        @on_client
        def local_update(self, client, message):
            reply = yield from super().local_update(client, message)
            return Message(quality=quality) if client.id == 1 else reply

    options = {"tolerate_failures": True, "on_divergence": "drop"}
    run = play(Lying(), clouds("mlp2", "mlp3", "wide2", public=30), **options)
    assert run.state.qualities.keys() == {0, 2}


@pytest.mark.parametrize("rule", ["median", "trimmed", "clipped"])
def test_a_robust_rule_combines_the_others_to_distributions(play, clouds, rule):
    run = play(RHFL(combine=Aggregate(rule)), clouds("mlp2", "mlp3", "wide2", "mlp2", public=30))
    r = [reply["predictions"] for reply in run.wire.replied["predict_public"][0].values()]
    target = run.wire.sent["learn_from_others"][0][3]["target"]
    assert_close(target.sum(1), torch.ones(30))
    if rule == "median":
        middle = torch.stack(r[:3]).median(0).values
        assert_close(target, middle / middle.sum(1, keepdim=True))


# Wire and hyper-parameters


@pytest.mark.parametrize("exchanges", [1, 4])
def test_messages_carry_predictions_the_rows_once_and_one_number(play, clouds, exchanges):
    run = play(RHFL(public_examples=10, exchanges=exchanges), clouds("norm2", "mlp3", public=30))
    size = 2 * 10 * 3 * 4
    assert run.reports[0].traffic.up == {"predictions": size, "quality": 2 * 4}
    assert run.reports[0].traffic.down == {"target": size, "rows": 2 * 10 * 8}


@pytest.mark.parametrize("public", [0, 4])
def test_public_data_are_needed_and_empty_ones_are_none(clouds, public):
    assert RHFL().needs() == {Need.PUBLIC_DATA, Need.CLASSES}
    federation = clouds("mlp2", public=public)
    if public:
        federation = replace(federation, public=empty_like(federation.public))
    with pytest.raises(ConfigError, match="it needs public data, and the federation has none"):
        check_needs(RHFL().needs(), "rhfl", Offer.of(federation))


def test_the_defaults_are_the_authors():
    method = RHFL()
    assert (method.forward, method.reverse, method.floor, method.confidence) == (0.1, 1.0, 1e-4, 0.5)
    assert (method.public_examples, method.distillation.batch_size, method.training.lr) == (5000, 256, 0.001)


@pytest.mark.parametrize(
    "changes",
    [
        {"forward": -0.1},
        {"reverse": -1.0},
        {"floor": 0.0},
        {"floor": 1.0},
        {"confidence": -0.5},
        {"pretrain": -1},
        {"exchanges": 0},
        {"public_examples": 0},
        {"scale": "both"},
    ],
)
def test_what_is_out_of_range_is_refused_by_name(changes):
    with pytest.raises(ValueError, match=rf"^{next(iter(changes))}: expected"):
        replace(RHFL(), **changes)


def test_the_loss_of_a_batch_is_that_of_its_logits():
    net, inputs = nn.Linear(4, 3).double(), numbers(5, 4)
    batch = Batch(inputs, torch.tensor([0, 1, 2, 0, 1]), {})
    found = SymmetricLoss(F.cross_entropy, 0.1, 1.0, 1e-4)(net, batch, {})
    assert_close(found, symmetric(net(inputs), [0, 1, 2, 0, 1]))
