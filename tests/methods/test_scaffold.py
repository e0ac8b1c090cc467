from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.nets.weights import load, minus, zeros_like
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedavg import FedAvg
from potluck.methods.incoscaffold import InCoScaffold
from potluck.methods.scaffold import Scaffold
from potluck.parts.normalised import effective_steps
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
SGD = LocalTraining("sgd", lr=0.1, epochs=5)
PLAIN = LocalTraining("sgd", lr=0.05, epochs=2, batch_size=4)
LINES = [(1, 1, 3), (2, -2, 3)]
OPTIMUM = (1 * 1 + 2 * -2) / (1 * 1 + 2 * 2)  # of the sum of the two losses (x w - y)^2 / 2
BOTH_OPTIONS = pytest.mark.parametrize("option", ["path", "gradient"])
UNIFORM = FedAvg(PLAIN, Sharing(weighting="uniform"))


def weight(run):
    (weights,) = run.state.weights["all"].values()
    return weights.item()


def controls(run, ids):
    return {id: run.kept(id)["state"]["control"] for id in ids}


# Fixed points


@BOTH_OPTIONS
def test_all_clients_together_reach_the_optimum_that_fedavg_misses(play, lines, option):
    assert weight(play(FedAvg(SGD), lines(*LINES), rounds=30)) == pytest.approx(-0.385, abs=1e-3)
    assert weight(play(Scaffold(SGD, option), lines(*LINES), rounds=30)) == pytest.approx(OPTIMUM, abs=1e-6)


@BOTH_OPTIONS
def test_half_of_the_clients_a_round_reach_the_optimum_that_fedavg_misses(play, lines, option):
    # Four lines with the curvatures 1, 4, 2.25 and 0.25; the optimum is the sum of x y over the sum of x^2.
    federation = lines((1, 1, 2), (2, -2, 2), (1.5, 3, 2), (0.5, -1, 2))
    optimum = (1 - 4 + 4.5 - 0.5) / (1 + 4 + 2.25 + 0.25)
    scaffold, fedavg = (
        play(Scaffold(SGD, option), federation, rounds=0),
        play(FedAvg(SGD), federation, rounds=0),
    )
    draws = torch.Generator().manual_seed(0)
    gaps = []
    for number in range(50):
        ids = torch.randperm(4, generator=draws)[:2].tolist()
        scaffold.round(*ids)
        if number < 15:
            fedavg.round(*ids)
            gaps.append(abs(weight(fedavg) - optimum))
    assert weight(scaffold) == pytest.approx(optimum, abs=1e-5)
    assert max(gaps[-5:]) > 0.1


def one_client_a_round(play, federation, option, order):
    """The distance to the optimum after rounds with one client each, at 0.44 per largest curvature."""
    run = play(Scaffold(LocalTraining("sgd", lr=0.11, epochs=5), option), federation, rounds=0)
    for client in order:
        run.round(client)
    return abs(weight(run) - OPTIMUM)


def test_option_gradient__diverges_where_two_clients_are_drawn_in_turn(play, lines):
    federation, in_turn = lines((1, 1, 1), (2, -2, 1)), [0, 1] * 40
    assert one_client_a_round(play, federation, "gradient", in_turn) > 1.0
    assert one_client_a_round(play, federation, "path", in_turn) < 1e-4


@pytest.mark.parametrize("seed", range(3))
def test_option_gradient__converges_where_they_are_drawn_at_random(play, lines, seed):
    order = torch.randint(2, (80,), generator=torch.Generator().manual_seed(seed)).tolist()
    assert one_client_a_round(play, lines((1, 1, 1), (2, -2, 1)), "gradient", order) < 0.05


@BOTH_OPTIONS
def test_clients_with_unequal_numbers_of_steps_reach_the_optimum(play, lines, option):
    training = LocalTraining("sgd", lr=0.1, epochs=3, batch_size=1)  # 3 and 12 steps
    run = play(Scaffold(training, option), lines((1, 1, 1), (2, -2, 4)), rounds=30)
    assert weight(run) == pytest.approx(OPTIMUM, abs=1e-6)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize(
    ("control_weighting", "optimum"),
    # Pooled, the second line counts three times: (1 * 1 + 3 * 2 * -2) / (1 * 1 + 3 * 2 * 2).
    [("uniform", OPTIMUM), ("samples", -11 / 13)],
)
def test_the_weights_of_the_control_decide_which_optimum(play, lines, weighting, control_weighting, optimum):
    method = Scaffold(SGD, control_weighting=control_weighting, sharing=Sharing(weighting=weighting))
    run = play(method, lines((1, 1, 2), (2, -2, 6)), rounds=30)
    assert weight(run) == pytest.approx(optimum, abs=1e-6)


def test_momentum_that_lasts_belongs_to_option_gradient_which_does_not_divide_by_steps(play, lines):
    training = LocalTraining("sgd", lr=0.01, epochs=10, momentum=0.5, persist=True)
    run = play(Scaffold(training, "gradient"), lines(*LINES), rounds=60)
    assert weight(run) == pytest.approx(OPTIMUM, abs=1e-4)
    for method in (Scaffold, InCoScaffold):
        with pytest.raises(
            ConfigError, match=r"^training\.persist: expected False with momentum, which option 'path' "
        ):
            method(training, "path")


@BOTH_OPTIONS
def test_momentum_does_not_move_the_fixed_point(play, lines, option):
    training = LocalTraining("sgd", lr=0.01, epochs=10, momentum=0.9)
    run = play(Scaffold(training, option), lines(*LINES), rounds=30)
    assert weight(run) == pytest.approx(OPTIMUM, abs=1e-4)


# Control variates


@BOTH_OPTIONS
def test_the_servers_control_is_the_mean_of_the_clients_after_every_round(play, clouds, option):
    run = play(Scaffold(PLAIN, option), clouds(*["norm2"] * 4), rounds=0)
    for ids in [(0, 1), (1, 2, 3), (3,), (0, 2)]:
        run.round(*ids)
        known = [id for id in range(4) if run.engine.store.read(id) is not None]
        kept = controls(run, known).values()
        expected = {name: sum(c[name] for c in kept) / 4 for name in run.state.control["all"]}
        assert_close(run.state.control["all"], expected, rtol=1e-5, atol=1e-6)


def test_a_clients_control_is_the_mean_of_its_raw_gradients(play, clouds):
    raw = {}

    def listening():
        net = nn.Linear(6, 3)
        for name, parameter in net.named_parameters():
            parameter.register_hook(lambda gradient, name=name: raw.setdefault(name, []).append(gradient))
        return net

    federation = clouds("mlp2", "mlp2", sizes=(11, 20))
    run = play(Scaffold(PLAIN), replace(federation, architectures={"mlp2": listening}), rounds=2)
    raw.clear()
    run.round(0)
    assert len(raw["weight"]) == 6  # two epochs of batches of 4, 4 and 3
    expected = {name: torch.stack(gradients).mean(0) for name, gradients in raw.items()}
    assert_close(controls(run, [0])[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("architecture", "size"), [("norm2", 12), ("mlp2", 300)])
def test_the_first_option_is_the_full_gradient_at_the_weights_that_were_sent(play, clouds, architecture, size):
    federation = clouds(architecture, architecture, sizes=(size, 20))
    run = play(Scaffold(PLAIN, "gradient"), federation, rounds=0)
    run.round(0)
    assert_close(controls(run, [0])[0], gradient_at_the_start(run, federation), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [257, 513])
def test_a_single_example_left_over_does_not_break_the_full_gradient(play, clouds, size):
    federation = clouds("norm2", sizes=(size,))
    run = play(Scaffold(PLAIN, "gradient"), federation)
    # How the leftover is handled changes batch statistics a little.
    assert_close(controls(run, [0])[0], gradient_at_the_start(run, federation), rtol=0, atol=0.02)


def gradient_at_the_start(run, federation):
    net, data = run.engine.server(0).build(), federation.sites[0].train
    federation.criterion(net(data.inputs), data.targets).backward()
    return {name: parameter.grad for name, parameter in net.named_parameters()}


def test_the_full_gradient_leaves_the_statistics_alone(play, clouds):
    federation = clouds("norm2", "norm2")
    by_gradient = play(Scaffold(PLAIN, "gradient"), federation)
    by_path = play(Scaffold(PLAIN, "path"), federation)
    assert_close(by_gradient.state.weights, by_path.state.weights)


def test_clients_who_are_not_drawn_keep_their_control(play, clouds):
    run = play(Scaffold(PLAIN), clouds("mlp2", "mlp2"), rounds=2)
    before = controls(run, [1])
    run.round(0)
    assert_close(controls(run, [1]), before, **EXACTLY)


def test_a_client_drawn_late_starts_from_a_control_of_zero(play, clouds):
    run = play(Scaffold(PLAIN), clouds("mlp2", "mlp2"), rounds=0)
    run.round(0)
    run.round(1)
    assert_close(run.wire.replied["local_update"][1][1]["dc"], controls(run, [1])[1])
    assert run.wire.sent["local_update"][1][1]["control"]["head.bias"].any()


def test_a_change_of_control_is_divided_by_all_clients_that_own_the_layer(play, clouds):
    run = play(Scaffold(PLAIN), clouds("mlp2", "mlp2", "mlp3", "mlp3"), rounds=0)
    run.round(0, 2)
    dc = {id: reply["dc"] for id, reply in run.wire.replied["local_update"][0].items()}
    for name, control in run.state.control["all"].items():
        owned = [change[name] for change in dc.values() if name in change]
        owners = 2 if "hidden2" in name else 4
        assert len(owned) == owners / 2
        assert_close(control, sum(owned) / owners)


def test_groups_have_controls_of_their_own(play, clouds):
    sharing = Sharing("architecture", "uniform")
    run = play(Scaffold(PLAIN, sharing=sharing), clouds("mlp2", "mlp3"), rounds=2)
    kept = controls(run, [0, 1])
    assert_close(run.state.control, {"mlp2": kept[0], "mlp3": kept[1]}, rtol=1e-4, atol=1e-6)


def test_controls_cover_parameters_only(play, clouds):
    run = play(Scaffold(PLAIN), clouds("norm2", "norm3"), rounds=2)
    parameters = run.engine.federation.roster[1].parameters
    assert run.state.control["all"].keys() == parameters
    for reply in run.wire.replied["local_update"][1].values():
        assert reply["dy"].keys() <= parameters
        assert reply["dc"].keys() == reply["dy"].keys()


def test_the_first_controls_are_zero(play, clouds):
    run = play(Scaffold(PLAIN), clouds("norm2"))
    sent = run.wire.sent["local_update"][0][0]
    assert_close(sent["control"], zeros_like(sent["weights"]), **EXACTLY)


class Tied(nn.Module):
    """Two layers of one weight, which the state dict names twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(self.second(self.first(x).relu()).relu())


@BOTH_OPTIONS
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_tied_weights_stay_tied_and_have_one_control(play, clouds, option, optimizer):
    federation = replace(clouds("mlp2", "mlp2"), architectures={"mlp2": Tied})
    run = play(Scaffold(replace(PLAIN, optimizer=optimizer), option), federation, rounds=3)
    for part in (run.state.weights["all"], run.state.control["all"], controls(run, [0])[0]):
        assert "second.weight" not in part
    assert run.state.control["all"]["first.weight"].any()
    model = run.model(0)
    assert model.second.weight is model.first.weight


class Branching(nn.Module):
    """x to w x, and to (w + v) x where x is large, so that the loss of a client with small x does not reach v."""

    def __init__(self, reached):
        super().__init__()
        self.w, self.v = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        self.reached = reached

    def forward(self, x):
        slope = self.w + self.v if x.max() > 1.5 else self.w + (0.0 * self.v if self.reached else 0.0)
        return slope * x


@pytest.mark.parametrize(
    "training",
    [SGD, replace(SGD, momentum=0.5), replace(SGD, weight_decay=0.01, clip_norm=1.0), replace(SGD, optimizer="adam")],
)
@BOTH_OPTIONS
def test_a_parameter_that_a_clients_loss_does_not_reach_has_the_gradient_zero(play, lines, option, training):
    unreached, reached = (
        play(Scaffold(training, option), lines(*LINES, architecture=partial(Branching, zero)), rounds=4)
        for zero in (False, True)
    )
    if training.optimizer == "adam" and option == "path":  # steps without a gradient are none, and so corrected
        assert controls(unreached, [0])[0]["v"].item() == pytest.approx(0.0, abs=1e-6)
        return
    assert_close(unreached.state.weights, reached.state.weights, **EXACTLY)
    assert_close(controls(unreached, [0, 1]), controls(reached, [0, 1]), **EXACTLY)
    if not training.weight_decay:
        assert controls(unreached, [0])[0]["v"].item() == pytest.approx(0.0, abs=1e-6)
    assert unreached.state.control["all"]["v"].abs().item() > 0.01


@BOTH_OPTIONS
def test_what_one_clients_loss_does_not_reach_finds_the_others_optimum(play, lines, option):
    run = play(Scaffold(SGD, option), lines(*LINES, architecture=partial(Branching, False)), rounds=60)
    assert {name: tensor.item() for name, tensor in run.state.weights["all"].items()} == {
        "w": pytest.approx(1.0, abs=5e-3),
        "v": pytest.approx(-2.0, abs=5e-3),
    }


# Limits


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_first_round_is_fedavg(play, clouds, optimizer):
    training = replace(PLAIN, optimizer=optimizer)
    federation = clouds("norm2", "norm3", "norm3")
    fedavg = play(FedAvg(training, Sharing(weighting="uniform")), federation)
    assert_close(play(Scaffold(training), federation).state.weights, fedavg.state.weights, rtol=1e-5, atol=1e-6)


def test_from_the_second_round_on_scaffold_goes_its_own_way(play, clouds):
    federation = clouds("mlp2", "mlp2")
    scaffold, fedavg = play(Scaffold(PLAIN), federation, rounds=2), play(UNIFORM, federation, rounds=2)
    gap = minus(scaffold.state.weights["all"], fedavg.state.weights["all"])
    assert max(tensor.abs().max().item() for tensor in gap.values()) > 1e-3


@BOTH_OPTIONS
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_equal_clients_share_one_control_and_walk_like_fedavg(play, lines, option, optimizer):
    training = LocalTraining(optimizer, lr=0.1, epochs=5)
    federation = lines((1.5, 2, 3), (1.5, 2, 3), (1.5, 2, 3))
    scaffold, fedavg = play(Scaffold(training, option), federation, 5), play(FedAvg(training), federation, 5)
    for control in controls(scaffold, [0, 1, 2]).values():
        assert_close(control, scaffold.state.control["all"], rtol=1e-4, atol=1e-6)
    assert weight(scaffold) == pytest.approx(weight(fedavg), abs=1e-5)


def test_under_plain_sgd_both_places_of_the_correction_are_one(play, clouds):
    # With one full step the mean raw gradient is the full gradient, so that both options also agree on c_i.
    training = LocalTraining("sgd", lr=0.1, batch_size=64)
    federation = clouds("mlp2", "mlp2")
    path, gradient = (play(Scaffold(training, o), federation, rounds=4) for o in ("path", "gradient"))
    assert_close(path.state.weights, gradient.state.weights, rtol=1e-4, atol=1e-5)
    assert_close(path.state.control, gradient.state.control, rtol=1e-3, atol=1e-5)


# Local steps


def corrected(run, federation, optimizer, lr):
    """Client 0's weights after one full step from what it was sent last and its correction c - c_i."""
    sent = run.wire.sent["local_update"][-1][0]
    net = load(run.engine.server(0).build(), sent["weights"])
    optimizer = optimizer(net.parameters(), lr=lr)
    data = federation.sites[0].train
    federation.criterion(net(data.inputs), data.targets).backward()
    return sent, net, optimizer


def test_under_adam_the_correction_follows_the_step(play, clouds):
    federation = clouds("mlp2", "mlp2")
    run = play(Scaffold(LocalTraining(lr=0.01, batch_size=64)), federation, rounds=1)
    c_i = controls(run, [0])[0]
    run.round()
    sent, net, adam = corrected(run, federation, torch.optim.Adam, 0.01)
    adam.step()
    expected = {name: y.detach() - 0.01 * (sent["control"][name] - c_i[name]) for name, y in net.named_parameters()}
    dy = run.wire.replied["local_update"][-1][0]["dy"]
    assert_close(dy, minus(expected, sent["weights"]), rtol=1e-4, atol=1e-6)


def test_the_second_option_corrects_the_gradient_before_adam(play, clouds):
    federation = clouds("mlp2", "mlp2")
    run = play(Scaffold(LocalTraining(lr=0.01, batch_size=64), "gradient"), federation, rounds=1)
    c_i = controls(run, [0])[0]
    run.round()
    sent, net, adam = corrected(run, federation, torch.optim.Adam, 0.01)
    for name, parameter in net.named_parameters():
        parameter.grad += sent["control"][name] - c_i[name]
    adam.step()
    dy = run.wire.replied["local_update"][-1][0]["dy"]
    expected = minus({name: y.detach() for name, y in net.named_parameters()}, sent["weights"])
    assert_close(dy, expected, rtol=1e-3, atol=1e-5)


def test_under_adam_controls_have_the_unit_of_steps(play, lines):
    # A gradient of -1000 gives Adam steps of one learning rate each, so the mean direction is -1.
    run = play(Scaffold(LocalTraining(lr=0.001, epochs=5)), lines((1, 1000, 3)))
    assert controls(run, [0])[0]["weight"].item() == pytest.approx(-1, abs=1e-3)


def test_gradients_are_clipped_after_the_correction(play, lines):
    # Gradients of about -100 and 100 have the mean 0: corrected, nothing is left to clip.
    training = LocalTraining("sgd", lr=0.1, clip_norm=1.0)
    run = play(Scaffold(training, "gradient"), lines((1, 100, 2), (1, -100, 2)), rounds=2)
    for reply in run.wire.replied["local_update"][1].values():
        assert reply["dy"]["weight"].abs().item() < 0.01


@pytest.mark.parametrize(
    ("steps", "momentum", "expected"),
    # A constant gradient of 1 moves the velocity to (1 - rho^t) / (1 - rho) at step t; this is their sum.
    # By hand, rho = 0.5 and 3 steps: 1 + 1.5 + 1.75.
    [(10, 0.0, 10), (1, 0.9, 1), (3, 0.5, 4.25), (10, 0.9, sum((1 - 0.9**t) / 0.1 for t in range(1, 11)))],
)
def test_momentum_lengthens_the_way(steps, momentum, expected):
    assert effective_steps(steps, momentum) == pytest.approx(expected)


def test_with_momentum_the_first_control_is_the_gradient(play, lines):
    run = play(Scaffold(LocalTraining("sgd", lr=1e-6, epochs=10, momentum=0.9)), lines((2, -3, 4)))
    assert controls(run, [0])[0]["weight"].item() == pytest.approx(2 * 3, rel=1e-3)  # x (x w - y) at w = 0


def test_a_learning_rate_of_zero_is_refused_where_the_way_gone_is_divided_by_it():
    with pytest.raises(ValueError, match="lr"):
        Scaffold(LocalTraining(lr=0.0), "path")


# Server step, buffers, wire


@pytest.mark.parametrize("server_lr", [0.5, 2.0])
def test_the_server_goes_its_own_rate_along_the_mean_change(play, clouds, server_lr):
    run = play(Scaffold(PLAIN, server_lr=server_lr), clouds("norm2", "norm2", "norm2"), rounds=0)
    run.round(0, 2)
    one, two = (run.wire.replied["local_update"][0][id]["dy"] for id in (0, 2))
    x = run.states[0].weights["all"]
    expected = {name: x[name] + server_lr * (one[name] + two[name]) / 2 for name in one}
    assert_close({name: run.state.weights["all"][name] for name in expected}, expected)


def test_a_layer_that_nobody_drawn_owns_keeps_weights_and_control(play, clouds):
    run = play(Scaffold(PLAIN), clouds("norm2", "norm3"), rounds=2)
    run.round(0)
    for part in ("weights", "control"):
        before, after = (getattr(state, part)["all"] for state in run.states[-2:])
        kept = [name for name in after if name.startswith("stages.stage2.")]
        assert len(kept) == (7 if part == "weights" else 4)
        for name in kept:
            assert_close(after[name], before[name], **EXACTLY)


@pytest.mark.parametrize("server_lr", [1.0, 2.0])
def test_buffers_are_plain_means_without_any_correction(play, clouds, server_lr):
    run = play(Scaffold(PLAIN, server_lr=server_lr), clouds("norm2", "norm2"), rounds=3)
    one, two = (run.wire.replied["local_update"][-1][id]["buffers"] for id in (0, 1))
    assert len(one) == 6
    for name, buffer in one.items():
        expected = (buffer + two[name]) / 2 if buffer.is_floating_point() else max(buffer, two[name])
        assert_close(run.state.weights["all"][name], expected)


@pytest.mark.parametrize("buffers", ["local", "drop"])
def test_the_policy_for_buffers_does_not_change_weights_or_controls(play, clouds, buffers):
    federation = clouds("norm2", "norm3")
    averaged = play(Scaffold(PLAIN), federation, rounds=3)
    run = play(Scaffold(PLAIN, sharing=Sharing(weighting="uniform", buffers=buffers)), federation, rounds=3)
    assert_close(run.state.control, averaged.state.control, **EXACTLY)
    for name in run.state.control["all"]:
        assert_close(run.state.weights["all"][name], averaged.state.weights["all"][name], **EXACTLY)
    assert not {"buffers"} & {*run.reports[0].traffic.down, *run.reports[0].traffic.up}


def test_messages_carry_twice_the_parameters_of_fedavg(play, clouds):
    federation = clouds("norm2", "norm3")
    scaffold = play(Scaffold(PLAIN), federation).reports[0].traffic
    fedavg = play(UNIFORM, federation).reports[0].traffic
    parameters = fedavg.down["weights"]
    assert scaffold.down == {**fedavg.down, "control": parameters}
    assert scaffold.up == {
        "dy": parameters,
        "dc": parameters,
        "buffers": fedavg.up["buffers"],
        "examples": fedavg.up["examples"],
    }


def test_a_round_leaves_the_state_it_was_given_unchanged(play, clouds):
    run = play(Scaffold(PLAIN), clouds("norm2", "norm2"))
    before = {n: t.clone() for part in (run.state.weights, run.state.control) for n, t in part["all"].items()}
    run.round()
    after = {n: t for part in (run.states[1].weights, run.states[1].control) for n, t in part["all"].items()}
    assert_close(after, before, **EXACTLY)


def test_notes__tell_the_norm_of_the_servers_control_variate(play, lines):
    run = play(Scaffold(SGD), lines(*LINES), rounds=2)
    for state, report in zip(run.states[1:], run.reports, strict=True):
        (control,) = state.control["all"].values()
        assert report.notes == {"control_norm": pytest.approx(abs(control.item()))}
