"""FedGKD: which teacher a client is sent, and how it learns from it."""

from dataclasses import replace
from math import log

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.needs import Need
from potluck.core.nets.weights import load, weights_of
from potluck.core.requests.examples import Batch
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedavg import FedAvg
from potluck.methods.fedgkd import FedGKD, TaughtLoss
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step
SHORT = LocalTraining(lr=0.01, epochs=2, batch_size=4)
EQUAL = Sharing(weighting="uniform")


def sent(run, id=0, exchange=-1):
    return run.wire.sent["local_update"][exchange][id]


def mean_of(run, first, last):
    """By name, the plain mean of the global models that these rounds made."""
    pools = [state.weights["all"] for state in run.states[first : last + 1]]
    return {
        name: torch.stack([pool[name].double() for pool in pools]).mean(0).to(tensor.dtype)
        for name, tensor in pools[0].items()
        if tensor.is_floating_point()
    }


def floats_of(weights):
    return {name: tensor for name, tensor in weights.items() if tensor.is_floating_point()}


# The loss


def of(rows, taught, labels, **changes):
    settings = {"gamma": 0.5, "temperature": 1.0, "divergence": "kl", **changes}
    batch = Batch(rows, torch.tensor(labels), {})
    return TaughtLoss(F.cross_entropy, **settings)(nn.Identity(), batch, {"teacher": lambda inputs: 1 * taught})


def test_the_loss_of_a_case_done_by_hand():
    rows = torch.tensor([[0.75, 0.25]], dtype=torch.float64).log()
    taught = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    from_teacher = 0.5 * log(0.5 / 0.75) + 0.5 * log(0.5 / 0.25)
    from_student = 0.75 * log(0.75 / 0.5) + 0.25 * log(0.25 / 0.5)
    assert abs(from_teacher - from_student) > 0.01  # the directions differ
    assert_close(of(rows, taught, [0]).item(), -log(0.75) + 0.5 * from_teacher, rtol=1e-12, atol=0)
    squares = ((log(0.75) - log(0.5)) ** 2 + (log(0.25) - log(0.5)) ** 2) / 2
    assert_close(of(rows, taught, [0], divergence="mse").item(), -log(0.75) + 0.5 * squares, rtol=1e-12, atol=0)


def test_a_temperature_softens_both_and_its_square_weighs_the_divergence():
    rows = 2 * torch.tensor([[0.75, 0.25]], dtype=torch.float64).log()  # halved by a temperature of 2
    taught = 2 * torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    softened = 0.5 * log(0.5 / 0.75) + 0.5 * log(0.5 / 0.25)
    own = F.cross_entropy(rows, torch.tensor([1])).item()
    assert_close(of(rows, taught, [1], temperature=2.0).item(), own + 0.5 * 4 * softened, rtol=1e-12, atol=0)


@pytest.mark.parametrize("changes", [{}, {"temperature": 3.0}, {"divergence": "mse"}])
def test_the_gradient_is_the_slope_and_the_teacher_has_none(changes):
    rows = torch.tensor([[0.3, -1.0, 0.5], [2.0, 0.1, -0.4]], dtype=torch.float64, requires_grad=True)
    taught = torch.tensor([[-0.2, 0.8, 0.1], [0.5, 0.4, 1.5]], dtype=torch.float64, requires_grad=True)
    loss = of(rows, taught, [2, 0], **changes)
    gradient, none = torch.autograd.grad(loss, [rows, taught], allow_unused=True)
    assert none is None or not none.any()
    step = 1e-6
    for place in range(6):
        nudge = torch.zeros(6, dtype=torch.float64).index_fill(0, torch.tensor(place), step).view(2, 3)
        ahead, behind = (of(rows.detach() + sign * nudge, taught.detach(), [2, 0], **changes) for sign in (1, -1))
        assert_close(gradient.view(-1)[place], (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-9)


# The teacher


def test_the_teacher_is_the_mean_of_the_last_global_models_without_the_initial_one(play, clouds):
    run = play(FedGKD(SHORT, buffer=3), clouds("norm2", "norm2"), rounds=5)
    assert "teacher" not in sent(run, exchange=0)
    for exchange, (first, last) in enumerate([(1, 1), (1, 2), (1, 3), (2, 4)], start=1):
        assert_close(floats_of(sent(run, 1, exchange)["teacher"]), mean_of(run, first, last))
    assert sorted(run.state.history) == ["3", "4", "5"]


def test_ten_models_and_more_are_kept_in_the_order_of_their_rounds(play, clouds):
    run = play(FedGKD(FULL, buffer=2), clouds("mlp2"), rounds=11)
    assert_close(sent(run)["teacher"], mean_of(run, 9, 10))


def test_a_client_is_sent_the_teachers_layers_that_it_owns(play, clouds):
    run = play(FedGKD(FULL), clouds("norm2", "norm3"), rounds=2)
    assert sent(run, 0)["teacher"].keys() < sent(run, 1)["teacher"].keys()
    for id in range(2):
        assert sent(run, id)["teacher"].keys() == run.model(id).state_dict().keys()


def test_the_last_model_as_the_teacher_costs_no_bytes(play, clouds):
    federation = clouds("norm2", "norm2")
    one, many = (play(FedGKD(FULL, buffer=buffer), federation, rounds=2) for buffer in (1, 2))
    assert "teacher" not in one.reports[1].traffic.down
    assert one.reports[1].traffic.bytes_down * 2 == many.reports[1].traffic.bytes_down
    assert_close(one.state.weights, many.state.weights)  # after one global model both teachers are it


def test_the_last_model_teaches_from_the_second_round_on(play, clouds):
    federation = clouds("mlp2", "mlp2")
    ours, fedavg = (play(m, federation, rounds=2) for m in (FedGKD(SHORT, gamma=5.0, buffer=1), FedAvg(SHORT)))
    assert_close(ours.states[1].weights, fedavg.states[1].weights, **EXACTLY)
    assert not torch.equal(ours.state.weights["all"]["head.weight"], fedavg.state.weights["all"]["head.weight"])


def test_buffers_that_stay_at_clients_are_not_sent_with_the_teacher(play, clouds):
    method = FedGKD(SHORT, sharing=Sharing(buffers="local"))
    run = play(method, clouds("norm2", "norm2"), rounds=3)
    assert sent(run)["teacher"].keys() == sent(run)["weights"].keys()


def test_who_is_drawn_late_learns_from_the_teacher_of_the_others(play, clouds):
    run = play(FedGKD(SHORT), clouds("mlp2", "mlp3"), rounds=0)
    run.round(0)
    run.round(0)
    run.round(1)
    teacher = sent(run, 1)["teacher"]
    for name, tensor in mean_of(run, 1, 2).items():
        assert_close(teacher[name], tensor)


# A round


def test_a_clients_step_is_the_papers(play, clouds):
    federation = clouds("norm2", "norm2")
    method = FedGKD(FULL, gamma=0.7, temperature=2.0, sharing=EQUAL)
    run = play(method, federation, rounds=2)
    teacher = load(run.model(0), sent_next(run), partial=True).eval()
    replies = []
    for id in range(2):
        net, data = load(run.model(0), run.state.weights["all"]).train(), federation.sites[id].train
        logits, taught = net(data.inputs), teacher(data.inputs).detach()
        q = (taught / 2).softmax(1)
        gap = 4 * (q * (q.log() - (logits / 2).log_softmax(1))).sum(1).mean()
        loss = F.cross_entropy(logits, data.labels) + 0.7 * gap
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
        replies.append(weights_of(net))
    run.round()
    for name, tensor in floats_of(run.state.weights["all"]).items():
        assert_close(tensor, (replies[0][name] + replies[1][name]) / 2, rtol=1e-4, atol=1e-6)


def sent_next(run):
    """The teacher of the coming round: the mean of the two global models so far."""
    return mean_of(run, 1, 2)


def test_the_larger_gamma_the_nearer_clients_stay_to_the_teacher(play, clouds):
    federation = clouds("mlp2", "mlp2", labels=((0,), (1,)))
    training = LocalTraining("sgd", lr=0.1, epochs=4, batch_size=4)

    def drift(gamma):
        run = play(FedGKD(training, gamma=gamma), federation, rounds=3)
        teacher = load(run.model(0), mean_of(run, 1, 2), partial=True)
        inputs = federation.sites[1].train.inputs
        client = load(run.model(0), run.wire.replied["local_update"][-1][0]["weights"], partial=True)
        return float((client(inputs).softmax(1) - teacher(inputs).softmax(1)).abs().mean().detach())

    assert drift(5.0) < 0.7 * drift(0.0)


def test_without_gamma_it_is_fedavg_and_sends_no_teacher(play, clouds):
    federation = clouds("norm2", "norm3")
    ours, fedavg = (play(m, federation, rounds=3) for m in (FedGKD(SHORT, gamma=0.0), FedAvg(SHORT)))
    assert_close([s.weights for s in ours.states], [s.weights for s in fedavg.states], **EXACTLY)
    assert ours.reports[2].traffic == fedavg.reports[2].traffic
    taught = play(FedGKD(SHORT), federation, rounds=3)
    assert not torch.equal(taught.state.weights["all"]["head.weight"], fedavg.state.weights["all"]["head.weight"])


def test_it_needs_classes():
    assert FedGKD().needs() == {Need.CLASSES, Need.NESTED_LAYERS, Need.SHARED_LAYERS}


@pytest.mark.parametrize("changes", [{"gamma": -1.0}, {"temperature": 0.0}, {"buffer": 0}, {"divergence": "js"}])
def test_what_is_out_of_range_is_refused_by_name(changes):
    with pytest.raises(ValueError, match=rf"^{next(iter(changes))}: expected"):
        replace(FedGKD(), **changes)


def test_a_temperature_that_the_distance_of_logits_does_not_read_is_refused():
    assert FedGKD(divergence="mse").temperature == 1
    with pytest.raises(ConfigError, match=r"^temperature: expected 1 where divergence is 'mse', .*, found 3\.0$"):
        FedGKD(divergence="mse", temperature=3.0)
