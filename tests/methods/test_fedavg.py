import pytest
import torch
from torch.testing import assert_close

from potluck.core.nets.weights import load, parameters_of
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedavg import FedAvg
from potluck.parts.sharing import Sharing

FULL_STEP = LocalTraining("sgd", lr=0.1, epochs=1, batch_size=64)
EXACTLY = {"rtol": 0, "atol": 0}


def test_one_client_alone_sets_the_weights_bit_for_bit(play, clouds):
    run = play(FedAvg(), clouds("norm2", "norm2"), rounds=0)
    run.round(1)
    (reply,) = run.wire.replied["local_update"][0].values()
    assert_close(run.state.weights["all"], {**reply["weights"], **reply["buffers"]}, **EXACTLY)


def test_one_full_batch_step_of_all_clients_is_one_step_on_the_pooled_data(play, clouds):
    federation = clouds("mlp2", "mlp2", "mlp2", sizes=(5, 20, 11))
    run = play(FedAvg(FULL_STEP), federation)
    net = load(run.engine.server(0).build(), run.states[0].weights["all"])
    inputs = torch.cat([site.train.inputs for site in federation.sites.values()])
    targets = torch.cat([site.train.targets for site in federation.sites.values()])
    federation.criterion(net(inputs), targets).backward()
    expected = {name: p.detach() - 0.1 * p.grad for name, p in net.named_parameters()}
    assert_close(run.state.weights["all"], expected)


def test_a_learning_rate_of_zero_leaves_the_weights_unchanged(play, clouds):
    run = play(FedAvg(LocalTraining(lr=0.0)), clouds("mlp2", "mlp2", "mlp2"))
    assert_close(run.state.weights, run.states[0].weights, rtol=1e-6, atol=0)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_mean_is_taken_over_the_clients_drawn(play, clouds, weighting):
    run = play(FedAvg(sharing=Sharing(weighting=weighting)), clouds(*["mlp2"] * 4), rounds=0)
    run.round(1, 2)
    one, two = (run.wire.replied["local_update"][0][id]["weights"] for id in (1, 2))
    share = 20 / (20 + 9) if weighting == "samples" else 1 / 2  # the sizes of clients 1 and 2
    expected = {name: share * one[name] + (1 - share) * two[name] for name in one}
    assert_close(run.state.weights["all"], expected)


def test_gradients_are_clipped_to_the_limit(play, lines):
    # The gradient x (x w - y) is -100 at the start: three steps of the rate 0.1 and the norm 2 each.
    training = LocalTraining("sgd", lr=0.1, epochs=3, clip_norm=2.0)
    (weight,) = play(FedAvg(training), lines((1, 100, 4))).state.weights["all"].values()
    assert weight.item() == pytest.approx(3 * 0.1 * 2)


def test_the_norm_that_is_clipped_is_that_of_all_layers_together(play, clouds):
    run = play(FedAvg(LocalTraining("sgd", lr=0.1, batch_size=64, clip_norm=0.02)), clouds("mlp3"))
    before, after = (state.weights["all"] for state in run.states)
    way = torch.cat([(after[name] - before[name]).flatten() for name in after])
    assert way.norm().item() == pytest.approx(0.1 * 0.02, rel=1e-3)


def test_clients_count_by_examples_and_not_by_batches(play, clouds):
    run = play(FedAvg(LocalTraining(batch_size=4, epochs=2)), clouds("mlp2", "mlp2"))
    assert [reply["examples"] for reply in run.wire.replied["local_update"][0].values()] == [12, 20]


def test_every_round_starts_from_the_weights_that_were_sent(play, clouds):
    run = play(FedAvg(LocalTraining(lr=0.0)), clouds("norm2", "norm2"), rounds=2)
    for sent, reply in zip(run.wire.sent["local_update"], run.wire.replied["local_update"], strict=True):
        for id in sent:
            assert_close(reply[id]["weights"], sent[id]["weights"], **EXACTLY)
    assert_close(run.model(0).state_dict(), run.state.weights["all"], **EXACTLY)


def test_clients_keep_nothing_between_rounds(play, clouds):
    run = play(FedAvg(), clouds("norm2", "norm2"))
    assert run.kept(0) == {"state": {}}


def test_clients_who_are_not_drawn_are_left_alone(play, clouds):
    run = play(FedAvg(), clouds("norm2", "norm2"), rounds=0)
    run.round(0)
    assert run.engine.store.read(1) is None


def test_a_round_leaves_the_state_it_was_given_unchanged(play, clouds):
    run = play(FedAvg(), clouds("norm2", "norm3"), rounds=0)
    before = {name: tensor.clone() for name, tensor in run.state.weights["all"].items()}
    run.round()
    assert_close(run.states[0].weights["all"], before, **EXACTLY)


def test_the_wire_carries_weights_and_buffers_both_ways_and_one_number_up(play, clouds):
    run = play(FedAvg(), clouds("norm2", "norm3"))
    nets = [run.model(id) for id in (0, 1)]
    weights = sum(4 * p.numel() for net in nets for p in net.parameters())
    buffers = sum(b.nbytes for net in nets for b in net.buffers())
    traffic = run.reports[0].traffic
    assert traffic.down == {"weights": weights, "buffers": buffers}
    assert traffic.up == {"weights": weights, "buffers": buffers, "examples": 2 * 8}


def test_several_local_steps_miss_the_optimum_of_two_lines(play, lines):
    # From w, K full steps with rate r give y/x + (1 - r x^2)^K (w - y/x). Here the optima are 1 and -1 and
    # the contractions a = 0.9^5, b = 0.6^5, so the mean's fixed point is ((1 - a) - (1 - b)) / (2 - a - b).
    # The optimum of the sum is (1 * 1 + 2 * -2) / (1 + 4) = -0.6.
    a, b = 0.9**5, 0.6**5
    run = play(FedAvg(LocalTraining("sgd", lr=0.1, epochs=5)), lines((1, 1, 3), (2, -2, 3)), rounds=30)
    (weight,) = run.state.weights["all"].values()
    assert weight.item() == pytest.approx((b - a) / (2 - a - b), abs=1e-5)
    assert weight.item() > -0.5


def test_the_global_model_is_the_mean(play, clouds):
    run = play(FedAvg(), clouds("norm2", "norm2"))
    net = run.engine.global_model(run.state)
    assert_close(net.state_dict(), run.state.weights["all"], **EXACTLY)
    assert_close(parameters_of(run.model(1)), parameters_of(net), **EXACTLY)
