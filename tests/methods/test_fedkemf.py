"""FedKEMF: mutual learning at clients, and an ensemble of their copies that teaches on public data."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.needs import Need
from potluck.core.nets.batchnorm import keep_statistics
from potluck.core.nets.weights import load, weights_of
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedkemf import FedKEMF, fused
from potluck.methods.local import Local
from potluck.parts.means import Aggregate

EXACTLY = {"rtol": 0, "atol": 0}
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
STILL = LocalTraining("sgd", lr=0.0, batch_size=64)
KEMF = FedKEMF(FULL, LocalTraining("sgd", lr=0.1, batch_size=64))
BOTH_ORDERS = pytest.mark.parametrize("order", ["sequential", "simultaneous"])
LOGITS = torch.tensor([[[2.0, 0.0, -1.0], [0.0, 1.0, 0.5]], [[0.0, 3.0, 1.0], [0.2, 0.9, 0.0]]])


def told(net, inputs):
    """A peer's probabilities: by batch statistics, which are not remembered."""
    with torch.no_grad(), keep_statistics(net):
        return F.softmax(net(inputs), 1)


def entropy_to(probabilities, logits):
    return -(probabilities * F.log_softmax(logits, 1)).sum(1).mean()


def full_step(net, loss):
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter -= 0.1 * gradient


def differs(a, b):
    return any(not torch.equal(tensor, b[name]) for name, tensor in a.items())


# The ensemble


@pytest.mark.parametrize(
    ("ensemble", "expected"),
    [
        ("mean", (LOGITS[0].softmax(1) + LOGITS[1].softmax(1)) / 2),
        ("max", torch.tensor([[2.0, 3.0, 1.0], [0.2, 1.0, 0.5]]).softmax(1)),
        ("vote", torch.tensor([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]])),
    ],
)
def test_fused__is_a_distribution_made_of_all_teachers(ensemble, expected):
    found = fused(LOGITS, ensemble, Aggregate())
    assert_close(found, expected)
    assert_close(found.sum(1), torch.ones(2))


def test_fused__of_a_median_are_the_middle_probabilities_divided_by_their_sum():
    p = torch.tensor([[[0.7, 0.2, 0.1]], [[0.5, 0.1, 0.4]], [[0.0, 0.0, 1.0]]])
    found = fused(p.clamp(min=1e-30).log(), "mean", Aggregate("median"))
    assert_close(found, torch.tensor([[0.5, 0.1, 0.4]]))
    p[2] = torch.tensor([[0.3, 0.6, 0.1]])
    assert_close(fused(p.log(), "mean", Aggregate("median")), torch.tensor([[5 / 8, 2 / 8, 1 / 8]]))


def test_a_rule_of_means_is_refused_where_none_is_taken():
    with pytest.raises(ConfigError, match="combine: expected the default, since the ensemble 'vote' takes no mean"):
        FedKEMF(ensemble="vote", combine=Aggregate("median"))


@pytest.mark.parametrize("ensemble", ["mean", "max"])
def test_fused__of_one_teacher_is_its_prediction(ensemble):
    assert_close(fused(LOGITS[:1], ensemble, Aggregate()), LOGITS[0].softmax(1))


# A round


@BOTH_ORDERS
def test_a_client_step_is_the_papers(play, clouds, order):
    federation = clouds("norm2", "mlp3", "norm2", public=20)  # the first and last hold the global architecture too
    run = play(replace(KEMF, order=order), federation, rounds=0)
    pairs = [(run.new_model(id).train(), run.engine.global_model(run.state).train()) for id in (0, 1)]
    run.round()
    for id, (own, common) in enumerate(pairs):
        x, y = federation.sites[id].train.inputs, federation.sites[id].train.targets
        before, logits = told(own, x), own(x)
        full_step(own, F.cross_entropy(logits, y) + entropy_to(told(common, x), logits))
        peer, logits = (told(own, x) if order == "sequential" else before), common(x)
        full_step(common, F.cross_entropy(logits, y) + entropy_to(peer, logits))
        assert_close(run.kept(id)["model"], weights_of(own))
        assert_close(run.wire.replied["local_update"][0][id]["common"], weights_of(common))


@pytest.mark.parametrize("ensemble", ["mean", "max", "vote"])
def test_a_servers_step_is_the_papers(play, clouds, ensemble):
    """From where theta_g was, by the copies with their running statistics, on all public data."""
    federation = clouds("norm2", "mlp3", "norm3", public=20)
    run = play(replace(KEMF, ensemble=ensemble), federation, rounds=2)
    net = load(run.engine.server(1).build(), run.states[1].common).train()
    copies = [reply["common"] for reply in run.wire.replied["local_update"][1].values()]
    teachers = [load(run.engine.server(1).build(), copy).eval() for copy in copies]
    x = federation.public.inputs
    taught = fused(torch.stack([teacher(x) for teacher in teachers]), ensemble, Aggregate()).detach()
    full_step(net, entropy_to(taught, net(x)))
    assert_close(run.state.common, weights_of(net))


def test_only_the_copy_is_sent_and_nothing_of_the_own_model(play, clouds):
    run = play(KEMF, clouds("mlp3", "mlp2", public=20))
    common = sum(tensor.numel() * tensor.element_size() for tensor in run.state.common.values())
    assert run.reports[0].traffic.up == run.reports[0].traffic.down == {"common": 2 * common}


def test_copies_are_not_averaged(play, clouds):
    run = play(replace(KEMF, server_training=STILL), clouds("mlp2", "mlp3", public=20), rounds=2)
    assert_close(run.state.common, run.states[0].common, **EXACTLY)
    assert differs(run.wire.replied["local_update"][0][0]["common"], run.state.common)


def test_theta_g_approaches_a_single_clients_copy_on_public_data(play, clouds):
    federation = clouds("mlp2", public=30)
    long = LocalTraining("sgd", lr=1.0, epochs=200, batch_size=64)
    run = play(FedKEMF(replace(FULL, epochs=10), long), federation)
    x = federation.public.inputs
    copy = load(run.engine.server(1).build(), run.wire.replied["local_update"][0][0]["common"])
    before, after = (run.engine.global_model(state)(x).softmax(1) for state in run.states)
    goal = copy(x).softmax(1)
    assert (after - goal).abs().max() < 0.3 * (before - goal).abs().max()


def test_public_rows_are_drawn_anew_and_their_labels_do_not_matter(play, clouds):
    federation = clouds("norm2", public=30)
    public = federation.public
    other = replace(federation, public=replace(public, targets=torch.full_like(public.targets, 2)))
    runs = [play(replace(KEMF, public_examples=10), each, rounds=2) for each in (federation, other)]
    assert_close(runs[0].state.common, runs[1].state.common, **EXACTLY)
    still = FedKEMF(STILL, replace(STILL, batch_size=10), public_examples=10)
    means = [state.common["stages.stage0.1.running_mean"] for state in play(still, federation, rounds=2).states]
    assert not torch.allclose(means[1] - 0.9 * means[0], means[2] - 0.9 * means[1])  # of other rows


def test_a_client_that_was_not_drawn_keeps_its_model_and_a_newcomer_gets_the_current_copy(play, clouds):
    run = play(KEMF, clouds("mlp2", "mlp3", public=20), rounds=0)
    run.round(0)
    mine = run.kept(0)["model"]
    run.round(1)
    assert_close(run.kept(0)["model"], mine, **EXACTLY)
    assert_close(weights_of(run.model(0)), mine, **EXACTLY)
    assert_close(run.wire.sent["local_update"][1][1]["common"], run.states[1].common, **EXACTLY)


def test_notes__tell_the_loss_of_the_distillation(play, clouds):
    still, moving = (
        play(replace(KEMF, server_training=replace(FULL, lr=lr, epochs=5)), clouds("mlp2", public=20)).reports[0].notes
        for lr in (0.0, 0.5)
    )
    assert moving["distillation_loss"] < still["distillation_loss"]


# Limits and refusals


def test_without_mutual_learning_own_models_learn_as_alone(play, clouds):
    federation = clouds("norm2", "mlp3", public=20)
    runs = [play(method, federation, rounds=2) for method in (replace(KEMF, mutual=False), Local(FULL), KEMF)]
    alone, local, both = (run.kept(1)["model"] for run in runs)
    assert_close(alone, local, **EXACTLY)
    assert differs(both, local)
    net, train = load(runs[0].engine.server(1).build(), runs[0].states[0].common).train(), federation.sites[1].train
    full_step(net, F.cross_entropy(net(train.inputs), train.targets))
    assert_close(runs[0].wire.replied["local_update"][0][1]["common"], weights_of(net))


def test_it_needs_public_data_and_classes():
    assert FedKEMF().needs() == {Need.PUBLIC_DATA, Need.CLASSES}


@pytest.mark.parametrize(("changes", "expected"), [({"public_examples": 0}, "at least 1"), ({"ensemble": "sum"}, "")])
def test_what_is_out_of_range_is_refused_by_name(changes, expected):
    with pytest.raises(ValueError, match=rf"^{next(iter(changes))}: expected {expected}"):
        replace(FedKEMF(), **changes)


def test_an_order_of_two_networks_that_do_not_meet_is_refused():
    with pytest.raises(ConfigError, match=r"^order: expected 'sequential' without mutual .*, found 'simultaneous'$"):
        replace(KEMF, mutual=False, order="simultaneous")
