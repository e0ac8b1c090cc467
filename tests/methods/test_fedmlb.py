"""FedMLB: its loss by hand, whose features go where, and what it becomes without its idea."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.needs import Need
from potluck.core.nets.weights import load, weights_of
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedavg import FedAvg
from potluck.methods.fedmlb import BranchedLoss, FedMLB, hybrid_paths, online_distillation
from potluck.models.split import split

EXACTLY = {"rtol": 0, "atol": 0}
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step an epoch
LONG = LocalTraining("sgd", lr=0.1, batch_size=8, epochs=6)
BOTH = ["norm2", "mlp3"]
U, V = torch.tensor([[2.0, 1.0, -1.0], [0.0, 0.5, 0.2]]), torch.tensor([[0.0, 3.0, 1.0], [1.0, -1.0, 0.0]])


def pair(play, clouds, architecture="mlp3"):
    """A client's net, another as the global one, and a batch."""
    run = play(FedMLB(), clouds(architecture), rounds=0)
    net, common = (run.engine.server(1).build(architecture) for _ in range(2))
    load(common, {name: tensor + 0.2 * tensor.sign() for name, tensor in weights_of(common).items()})
    return net, common.eval().requires_grad_(False), run.engine.federation.sites[0].train.batch(torch.arange(8))


def softmax(row, temperature=1.0):
    powers = [math.exp(z / temperature) for z in row]
    return [p / sum(powers) for p in powers]


def cross_entropy(logits, labels):
    pairs = zip(logits.tolist(), labels.tolist(), strict=True)
    return sum(-math.log(softmax(row)[label]) for row, label in pairs) / len(logits)


def divergence(teacher, student, temperature):
    """KL(teacher || student) with loops and plain floats, the mean over rows."""
    total = 0.0
    for p, q in zip(teacher.tolist(), student.tolist(), strict=True):
        for a, b in zip(softmax(p, temperature), softmax(q, temperature), strict=True):
            total += a * math.log(a / b)
    return total / len(teacher)


# The loss


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_online_distillation__is_the_divergence_of_the_own_path_from_the_hybrid_without_a_square(temperature):
    found = online_distillation(U, V, temperature, teacher_learns=True).item()
    assert found == pytest.approx(divergence(V, U, temperature), rel=1e-4)
    assert found != pytest.approx(divergence(U, V, temperature), rel=1e-2)


@pytest.mark.parametrize("teacher_learns", [True, False])
def test_online_distillation__has_the_gradients_of_finite_differences(teacher_learns):
    u, v = U.double().requires_grad_(), V.double().requires_grad_()
    found = torch.autograd.grad(online_distillation(u, v, 2.0, teacher_learns), [u, v], allow_unused=True)
    for place, gradient in enumerate(found):
        if place == 1 and not teacher_learns:
            assert gradient is None
            continue
        for row, column in ((0, 0), (1, 2)):
            sides = []
            for step in (1e-6, -1e-6):
                moved = [u.detach().clone(), v.detach().clone()]
                moved[place][row, column] += step
                sides.append(divergence(moved[1], moved[0], 2.0))
            assert gradient[row, column].item() == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-4)


def test_hybrid_paths__go_on_in_the_global_net_from_the_clients_features(play, clouds):
    net, common, batch = pair(play, clouds)
    features, own = split(net).levels(batch.inputs)
    found = hybrid_paths(common, features)
    (first, second, third), x = net.stages, batch.inputs
    expected = [
        common.head(common.stages[2](common.stages[1](first(x)))),
        common.head(common.stages[2](second(first(x)))),
        common.head(third(second(first(x)))),
    ]
    assert len(net.stages) == len(found) == 3
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
    assert_close(own, net(x))


def test_hybrid_paths__of_equal_nets_are_the_own_path(play, clouds):
    net, common, batch = pair(play, clouds)
    load(common, weights_of(net))
    features, own = split(net).levels(batch.inputs)
    for hybrid in hybrid_paths(common, features):
        assert_close(hybrid, own)


def test_branched_loss__is_the_papers_by_hand(play, clouds):
    net, common, batch = pair(play, clouds)
    features, own = split(net).levels(batch.inputs)
    hybrids = hybrid_paths(common, features)
    expected = 0.5 * cross_entropy(own, batch.targets)
    expected += 2 * sum(cross_entropy(each, batch.targets) for each in hybrids) / 3
    expected += 7 * sum(divergence(each, own, 3.0) for each in hybrids) / 3
    loss = BranchedLoss(F.cross_entropy, 0.5, 2.0, 7.0, 3.0, teacher_learns=True)(net, batch, {"global": common})
    assert loss.item() == pytest.approx(expected, rel=1e-4)


def test_branched_loss__trains_the_client_through_the_global_net_and_not_that_net(play, clouds):
    """The hybrid paths alone: the client's head is on none of them, and its first stage is on all."""
    net, common, batch = pair(play, clouds)
    before = weights_of(common)
    BranchedLoss(F.cross_entropy, 0.0, 1.0, 0.0, 1.0, True)(net, batch, {"global": common}).backward()
    assert all(parameter.grad is None for parameter in common.parameters())
    assert_close(weights_of(common), before, **EXACTLY)
    assert not net.head.weight.grad.any()
    assert all(next(stage.parameters()).grad.any() for stage in net.stages)


@pytest.mark.parametrize("teacher_learns", [True, False])
def test_branched_loss__with_a_constant_teacher_is_learnt_from_on_the_own_path_alone(play, clouds, teacher_learns):
    net, common, batch = pair(play, clouds)
    loss = BranchedLoss(F.cross_entropy, 0.0, 0.0, 1.0, 1.0, teacher_learns)(net, batch, {"global": common})
    (found,) = torch.autograd.grad(loss, net.stages[0].linear.weight)
    told = [each.detach() for each in hybrid_paths(common, split(net).levels(batch.inputs)[0])]
    constant = torch.stack([online_distillation(net(batch.inputs), each, 1.0, False) for each in told]).mean()
    (expected,) = torch.autograd.grad(constant, net.stages[0].linear.weight)
    assert torch.allclose(found, expected) != teacher_learns


# A round


def test_the_second_client_step_is_the_papers(play, clouds):
    """In the first step both nets are equal, so the second is the first in which they differ."""
    federation = clouds(*BOTH)
    methods = [
        FedMLB(replace(FULL, epochs=epochs), lambda1=1.0, lambda2=2.0, lambda3=3.0, temperature=2.0)
        for epochs in (1, 2)
    ]
    once, twice = (play(method, federation) for method in methods)
    for id, architecture in enumerate(BOTH):
        sent, before = once.wire.sent["local_update"][0][id], once.wire.replied["local_update"][0][id]
        net, common = (once.engine.server(1).build(architecture) for _ in range(2))
        for each, held in ((net, before), (common, sent)):
            load(each, {**held["weights"], **(held.get("buffers") or {})}, partial=True)
        data, stages = federation.sites[id].train, list(net.train().stages)
        common.eval().requires_grad_(False)
        h, hybrids = data.inputs, []
        for place, stage in enumerate(stages):
            h = rest = stage(h)
            for other in list(common.stages)[place + 1 :]:
                rest = other(rest)
            hybrids.append(common.head(rest))
        own = net.head(h)
        loss = F.cross_entropy(own, data.targets)
        for each in hybrids:
            taught = F.kl_div((own / 2).log_softmax(1), (each / 2).softmax(1), reduction="batchmean")
            loss = loss + (2 * F.cross_entropy(each, data.targets) + 3 * taught) / len(stages)
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        found = twice.wire.replied["local_update"][0][id]["weights"]
        for (name, parameter), gradient in zip(net.named_parameters(), gradients, strict=True):
            assert_close(found[name], (parameter - 0.1 * gradient).detach(), rtol=1e-4, atol=1e-6)


def test_the_global_net_is_the_one_of_this_round(play, clouds):
    """Without the hybrid paths' own loss, a client's first step is FedAvg's while both nets are equal."""
    runs = [play(method, clouds("mlp2", "mlp3"), rounds=3) for method in (FedMLB(FULL, lambda2=0.0), FedAvg(FULL))]
    assert_close(runs[0].state.weights, runs[1].state.weights, rtol=1e-5, atol=1e-6)


def test_after_training_the_global_net_can_use_a_clients_features_better_than_after_fedavgs(play, clouds):
    federation = clouds("mlp3", sizes=(40,), labels=((0, 1),))
    start = play(FedAvg(LONG), federation, rounds=2)
    data = federation.sites[0].train

    def of_hybrids(method):
        run = play(method, federation, rounds=0)
        state, _ = run.engine.round(3, start.state, [0])
        net, common = run.engine.inference_model(state, 0), run.engine.inference_model(start.state, 0)
        hybrids = hybrid_paths(common, split(net).levels(data.inputs)[0])
        return torch.stack([F.cross_entropy(each, data.targets) for each in hybrids]).mean().item()

    assert of_hybrids(FedMLB(LONG)) < of_hybrids(FedAvg(LONG))


# Limits and refusals


def test_without_hybrid_paths_it_is_fedavg_bit_for_bit(play, clouds):
    federation = clouds("norm2", "norm3", sizes=(12, 20))
    runs = [play(m, federation, rounds=3) for m in (FedMLB(LONG, lambda2=0.0, lambda3=0.0), FedAvg(LONG))]
    assert_close(runs[0].state.weights, runs[1].state.weights, **EXACTLY)
    both = play(FedMLB(LONG), federation, rounds=3).state.weights["all"]
    assert not torch.allclose(both["head.weight"], runs[1].state.weights["all"]["head.weight"], atol=1e-4)


def test_a_batch_of_one_example_can_be_learnt_from(play, clouds):
    play(FedMLB(LocalTraining(batch_size=1)), clouds("mlp2", sizes=(1,), labels=((2,),)))


def test_it_needs_models_in_stages_and_classes():
    assert {Need.SPLIT_MODEL, Need.CLASSES, Need.NESTED_LAYERS} <= FedMLB().needs()


@pytest.mark.parametrize("changes", [{"lambda1": -1.0}, {"lambda2": -1.0}, {"lambda3": -1.0}, {"temperature": 0.0}])
def test_what_is_out_of_range_is_refused_by_name(changes):
    with pytest.raises(ValueError, match=rf"^{next(iter(changes))}: expected"):
        replace(FedMLB(), **changes)
