"""FedRolex: the window, and what becomes of what it covers, against channels counted by hand."""

import itertools
import re

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from potluck.core.federation import Federation
from potluck.core.ground.errors import ConfigError, PotluckWarning
from potluck.core.nets.scale import FULL
from potluck.core.nets.weights import parameters_of
from potluck.core.requests.fit import LocalTraining
from potluck.engine.rounds.engine import Engine
from potluck.methods.fedrolex import FedRolex
from potluck.models.contract import StagedNet
from potluck.testing.worlds import World, toy_federation

EXACTLY = {"rtol": 0, "atol": 0}
STILL = LocalTraining("sgd", lr=0.0)
RATES = (1.0, 0.5, 0.25, 0.5)
LABELS = ((0, 1, 2), (0, 1), (1,), (0, 2))
SQUARE = "stages.stage1.0.weight"  # of norm2: 8 units that read 8 units


def window(number, rate):
    """The units of a layer of 8 that are trained in round `number`."""
    return [(number - 1 + i) % 8 for i in range(int(8 * rate))] if rate < 1 else list(range(8))


def placed(weights, old, number, rate):
    """One client's tensor in its place in the full one; NaN where it covers nothing. Dimensions of 8 are hidden."""
    full, units = torch.full_like(old, torch.nan), torch.tensor(window(number, rate))
    listed = [units if size == 8 else torch.arange(size) for size in old.shape]
    full[torch.meshgrid(*listed, indexing="ij")] = weights
    return full


def test_a_client_is_sent_the_window_of_the_round(play, clouds):
    run = play(FedRolex(STILL), clouds(*["norm2"] * 4, capacities=RATES), rounds=10)
    for number, (before, sent) in enumerate(zip(run.states, run.wire.sent["local_update"], strict=False), start=1):
        for id, message in sent.items():
            units = window(number, RATES[id])
            assert_close(message["weights"][SQUARE], before.weights[SQUARE][units][:, units], **EXACTLY)
            assert_close(message["weights"]["stages.stage1.1.bias"], before.weights["stages.stage1.1.bias"][units])
            assert_close(message["weights"]["head.weight"], before.weights["head.weight"][:, units], **EXACTLY)
    assert window(6, 0.5) == [5, 6, 7, 0]


def test_every_weight_is_the_mean_over_exactly_the_clients_whose_window_covers_it(play, clouds):
    run = play(FedRolex(), clouds(*["norm3"] * 4, capacities=RATES, labels=LABELS), rounds=0)
    cohorts = [(0, 1, 2, 3), (1, 2), (2,), (1, 3), (1, 2), (1, 2, 3), (2, 3)]
    for number, ids in enumerate(cohorts, start=1):
        run.round(*ids)
        before, after = (state.weights for state in run.states[-2:])
        replies = run.wire.replied["local_update"][-1]
        for name, old in before.items():
            found = {id: placed(replies[id]["weights"][name], old, number, RATES[id]) for id in ids}
            for id in ids if name.startswith("head.") else ():
                found[id][[label for label in range(3) if label not in LABELS[id]]] = torch.nan
            expected = torch.stack(list(found.values())).nanmean(0)
            covered = ~expected.isnan()
            assert_close(after[name][covered], expected[covered])
            assert torch.equal(after[name][~covered], old[~covered])
        assert not torch.equal(after[SQUARE], before[SQUARE])


def test_without_training_no_bit_changes_wherever_the_windows_are(play, clouds):
    run = play(FedRolex(STILL), clouds(*["norm3"] * 4, capacities=RATES, labels=LABELS), rounds=9)
    assert_close(run.state.weights, run.states[0].weights, **EXACTLY)


def test_in_a_full_roll_every_unit_is_trained_equally_often_and_weights_by_how_near_their_units_are(play, clouds):
    federation = clouds("norm2", capacities=(0.5,))
    run = play(FedRolex(LocalTraining("sgd", lr=0.1)), federation, rounds=8)
    trained = torch.zeros(8, 8)
    for before, after in itertools.pairwise(run.states):
        trained += after.weights[SQUARE] != before.weights[SQUARE]
    # Windows of 4 around a circle of 8 that hold two units d apart: 4 - d.
    apart = [[min((a - b) % 8, (b - a) % 8) for a in range(8)] for b in range(8)]
    assert_close(trained.diagonal(), torch.full((8,), 4.0))
    assert_close(trained, 4.0 - torch.tensor(apart))


def test_a_client_is_evaluated_with_the_window_of_the_last_round(play, clouds):
    run = play(FedRolex(), clouds("norm2", "norm2", capacities=(1.0, 0.5)), rounds=0)
    for number in (0, 1, 6):  # the first window before the first round
        while len(run.states) <= number:
            run.round()
        units, weights = window(max(number, 1), 0.5), run.state.weights
        assert_close(parameters_of(run.model(1))[SQUARE], weights[SQUARE][units][:, units], **EXACTLY)


def test_what_is_frozen_rolls_with_the_rest():
    engine = Engine(FedRolex(STILL), toy_federation(World(clients=2, architectures=1, capacity=0.5, frozen=True)))
    state, whole = engine.start(), engine.server(0).build()
    for number in (1, 2, 12):
        state, _ = engine.round(number, state, [0, 1])
        units = [(number - 1 + i) % 16 for i in range(8)]
        net = engine.inference_model(state, 0)
        assert_close(net.stages.stem[0].weight, whole.stages.stem[0].weight[units], **EXACTLY)
        # What the units left out would add is 0 in both, so the narrow net is the full one without them.
        others = [unit for unit in range(16) if unit not in units]
        full = engine.global_model(state)
        with torch.no_grad():
            for stage in full.stages:
                stage[0].weight[others] = 0
                stage[0].bias[others] = 0
        inputs = engine.federation.sites[0].train.inputs
        assert_close(net(inputs), full(inputs))


class Shuffling(nn.Module):
    def forward(self, x):
        return x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def test_a_net_whose_channels_cannot_roll_is_refused_before_anything_trains(clouds):
    def shuffled(scale=FULL):
        width = scale.of(8)
        hidden = nn.Sequential(Shuffling(), nn.Linear(width, width), nn.ReLU())
        return StagedNet({"stem": nn.Linear(6, width), "hidden": hidden}, nn.Linear(width, 3))

    sites = clouds("norm2").sites
    engine = Engine(FedRolex(levels=(1.0, 0.5)), Federation(sites, {"norm2": shuffled}, "norm2", num_classes=3))
    with pytest.raises(ConfigError, match="StagedNet: the channels of its layers cannot change places"):
        engine.start()


def test_it_warns_in_its_own_name_of_clients_below_the_smallest_level(play, clouds):
    with pytest.warns(PotluckWarning, match=r"fedrolex: client 0: capacity 0\.2 lies below the smallest level, 0\.5"):
        play(FedRolex(levels=(1.0, 0.5)), clouds("norm2", capacities=(0.2,)), rounds=0)


def test_an_optimiser_that_lasts_is_refused_since_a_channel_would_have_the_momentum_of_another():
    """In the toy world the second window reads at each place a channel that the first read at another."""
    assert window(1, 0.5)[1:] == window(2, 0.5)[:-1]
    expected = "training.persist: expected False, since the window moves on to other channels than it is of, found True"
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$"):
        FedRolex(LocalTraining(persist=True))
