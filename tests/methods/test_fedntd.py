"""FedNTD: its loss by hand, what it must not depend on, and what it becomes without its idea."""

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
from potluck.methods.fedntd import FedNTD, NotTrueLoss, not_true, not_true_distillation
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step an epoch
LONG = LocalTraining("sgd", lr=0.1, batch_size=8, epochs=3)
BOTH = ["norm2", "mlp3"]
U, V = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([[0.0, 3.0, 1.0, 0.5]])
SECOND = torch.tensor([1])


def logits(*shape, seed=0):
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_hand(u, v, labels, temperature):
    """tau^2 KL(q_g || q_l) with loops and plain floats."""
    total = 0.0
    for mine, theirs, label in zip(u.tolist(), v.tolist(), labels.tolist(), strict=True):
        rest = [c for c in range(len(mine)) if c != label]
        q, p = ([math.exp(row[c] / temperature) for c in rest] for row in (mine, theirs))
        pairs = zip([x / sum(p) for x in p], [x / sum(q) for x in q], strict=True)
        total += sum(a * math.log(a / b) for a, b in pairs)
    return temperature**2 * total / len(u)


# The loss


def test_not_true__leaves_out_the_label_and_keeps_the_order():
    rows = torch.arange(12.0).view(3, 4)
    expected = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 7.0], [8.0, 9.0, 10.0]])
    assert_close(not_true(rows, torch.tensor([0, 2, 3])), expected, **EXACTLY)


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, 1.0842031221), (3.0, 1.1963072733)])
def test_not_true_distillation__is_the_papers_on_four_classes(temperature, expected):
    found = not_true_distillation(U, V, SECOND, temperature)
    assert found.item() == pytest.approx(expected, rel=1e-5)
    assert found.item() == pytest.approx(by_hand(U, V, SECOND, temperature), rel=1e-5)


def test_not_true_distillation__is_the_mean_over_a_batch_of_several_labels():
    u, v, labels = logits(6, 5), logits(6, 5, seed=1), torch.tensor([0, 4, 2, 2, 1, 3])
    for temperature in (0.5, 1.0, 3.0):
        found = not_true_distillation(u, v, labels, temperature)
        assert found.item() == pytest.approx(by_hand(u, v, labels, temperature), rel=1e-4)


def test_not_true_distillation__has_no_gradient_in_the_true_logit_nor_in_the_global_nets():
    u, v, labels = (
        logits(6, 5).requires_grad_(),
        logits(6, 5, seed=1).requires_grad_(),
        torch.tensor([0, 4, 2, 2, 1, 3]),
    )
    mine, theirs = torch.autograd.grad(not_true_distillation(u, v, labels, 1.0), (u, v), allow_unused=True)
    assert theirs is None
    true = F.one_hot(labels, 5).bool()
    assert_close(mine[true], torch.zeros(6), **EXACTLY)
    assert (mine[~true] != 0).all()
    # (q_l - q_g) tau / n: what is too large for the global net goes down
    q_l, q_g = (torch.softmax(x.detach().masked_fill(true, -math.inf), 1) for x in (u, v))
    assert_close(mine, (q_l - q_g) / 6)


def test_not_true_distillation__does_not_depend_on_what_all_logits_have_in_common():
    u, v, labels = logits(6, 5), logits(6, 5, seed=1), torch.tensor([0, 4, 2, 2, 1, 3])
    expected = not_true_distillation(u, v, labels, 2.0)
    assert_close(not_true_distillation(u + 7, v - 3, labels, 2.0), expected)


def test_not_true_distillation__of_equal_nets_and_of_two_classes_is_zero_without_a_gradient():
    for u, v in ((logits(6, 5), logits(6, 5)), (logits(6, 2), logits(6, 2, seed=1))):
        loss = not_true_distillation(u.requires_grad_(), v, torch.tensor([0, 1, 1, 0, 1, 0]), 1.0)
        (gradient,) = torch.autograd.grad(loss, u)
        assert loss.item() == pytest.approx(0, abs=1e-7)
        assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-7)


def test_not_true_loss__adds_it_to_the_tasks_and_trains_only_the_net(clouds, play):
    run = play(FedNTD(), clouds("mlp2"), rounds=0)
    net, common = (run.engine.server(1).build("mlp2") for _ in range(2))
    load(common, {name: tensor + 0.2 * tensor.sign() for name, tensor in weights_of(common).items()})
    batch = run.engine.federation.sites[0].train.batch(torch.arange(8))
    loss = NotTrueLoss(F.cross_entropy, 2.0, 3.0)(net, batch, {"global": common})
    u, v = net(batch.inputs), common(batch.inputs)
    assert loss.item() == pytest.approx(
        F.cross_entropy(u, batch.targets).item() + 2 * by_hand(u, v, batch.targets, 3.0), rel=1e-4
    )
    loss.backward()
    assert all(parameter.grad is None for parameter in common.parameters())
    assert net.stages[0].linear.weight.grad.any()


# A round


def test_the_second_client_step_is_the_papers(play, clouds):
    """In the first step both nets are equal, so the second is the first in which the distillation counts."""
    federation = clouds(*BOTH)
    once, twice = (
        play(FedNTD(replace(FULL, epochs=epochs), beta=3.0, temperature=2.0), federation) for epochs in (1, 2)
    )
    for id, architecture in enumerate(BOTH):
        sent, before = once.wire.sent["local_update"][0][id], once.wire.replied["local_update"][0][id]
        net, common = (once.engine.server(1).build(architecture) for _ in range(2))
        for each, held in ((net, before), (common, sent)):
            load(each, {**held["weights"], **(held.get("buffers") or {})}, partial=True)
        data = federation.sites[id].train
        u, v = net.train()(data.inputs), common.eval()(data.inputs).detach()
        loss = F.cross_entropy(u, data.targets) + 3 * not_true_distillation(u, v, data.targets, 2.0)
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        found = twice.wire.replied["local_update"][0][id]["weights"]
        for (name, parameter), gradient in zip(net.named_parameters(), gradients, strict=True):
            assert_close(found[name], (parameter - 0.1 * gradient).detach(), rtol=1e-4, atol=1e-6)


def test_a_client_distils_the_net_it_was_sent_in_this_round(play, clouds):
    """With one step a round the two nets are equal, so were another net distilled, it would not be FedAvg."""
    runs = [play(method, clouds("mlp2", "mlp3"), rounds=3) for method in (FedNTD(FULL, beta=5.0), FedAvg(FULL))]
    assert_close(runs[0].state.weights, runs[1].state.weights, rtol=1e-5, atol=1e-6)


def test_a_class_that_the_client_lacks_is_forgotten_less_than_with_fedavg(play, clouds):
    """The point of it: after long training without class 2, the net still tells it from class 0 and 1 as it did."""
    federation = clouds("mlp2", "mlp2", sizes=(40, 60), labels=((0, 1), (0, 1, 2)))
    start = play(FedAvg(LONG), federation, rounds=0)
    start.round(1)
    start.round(1)
    seen = federation.sites[1].train

    def of_class_2(method):
        run = play(method, federation, rounds=0)
        state, _ = run.engine.round(3, start.state, [0])
        net = run.engine.inference_model(state, 0)
        rows = seen.labels == 2
        return net(seen.inputs[rows]).softmax(1)[:, 2].mean().item()

    held, kept, lost = of_class_2(FedAvg(replace(LONG, lr=0.0))), of_class_2(FedNTD(LONG)), of_class_2(FedAvg(LONG))
    assert held - kept < 0.8 * (held - lost)


# Limits and refusals


def test_without_beta_it_is_fedavg_bit_for_bit(play, clouds):
    federation = clouds("norm2", "norm3", "mlp2", sizes=(12, 20, 9))
    sharing = Sharing("architecture")
    runs = [play(method, federation, rounds=3) for method in (FedNTD(LONG, sharing, 0.0, 3.0), FedAvg(LONG, sharing))]
    assert_close(runs[0].state.weights, runs[1].state.weights, **EXACTLY)


def test_with_two_classes_it_is_fedavg(play, clouds):
    federation = clouds("mlp2", "mlp2", labels=((0, 1), (0, 1)))
    two = replace(federation, architectures={"mlp2": two_classes}, num_classes=2)
    runs = [play(method, two, rounds=2) for method in (FedNTD(LONG, beta=5.0), FedAvg(LONG))]
    assert_close(runs[0].state.weights, runs[1].state.weights)
    three = [
        play(method, federation, rounds=2).state.weights["all"] for method in (FedNTD(LONG, beta=5.0), FedAvg(LONG))
    ]
    assert not torch.allclose(three[0]["head.weight"], three[1]["head.weight"], atol=1e-4)


def two_classes():
    return torch.nn.Linear(6, 2)


def test_a_batch_of_one_example_can_be_learnt_from(play, clouds):
    federation = clouds("mlp2", sizes=(1,), labels=((2,),))
    play(FedNTD(LocalTraining(batch_size=1)), federation)


def test_it_needs_classes():
    assert Need.CLASSES in FedNTD().needs()
    assert Need.NESTED_LAYERS in FedNTD().needs()


@pytest.mark.parametrize("changes", [{"beta": -1.0}, {"temperature": 0.0}])
def test_what_is_out_of_range_is_refused_by_name(changes):
    with pytest.raises(ValueError, match=rf"^{next(iter(changes))}: expected"):
        replace(FedNTD(), **changes)
