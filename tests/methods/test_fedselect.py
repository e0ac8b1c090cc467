"""FedSelect: which weights become a client's own, how the two parts learn, and what is averaged."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.message import Message
from potluck.core.method import on_client
from potluck.core.needs import Need
from potluck.core.nets.weights import load, parameters_of
from potluck.core.requests.fit import LocalTraining
from potluck.methods.fedavg import FedAvg
from potluck.methods.fedselect import FedSelect
from potluck.parts.sharing import Sharing
from potluck.parts.submodels import unpacked

EXACTLY = {"rtol": 0, "atol": 0}
CLOSELY = {"rtol": 1e-4, "atol": 1e-6}
FULL = LocalTraining("sgd", lr=0.1, batch_size=64)  # one full step a pass
OFTEN = FedSelect(FULL, rate=0.5, grow_every=1)
BOTH = ["norm2", "mlp3"]


def masks_of(run, client, entry="masks"):
    """By name, what is a client's own."""
    shapes = run.engine.federation.roster[client].shapes
    return {n: unpacked(b, shapes[n]) for n, b in getattr(run.state, entry).get(str(client), {}).items()}


def share(masks):
    return sum(int(mask.sum()) for mask in masks.values()) / sum(mask.numel() for mask in masks.values())


# What becomes a client's own


def test_grown__takes_the_shared_weights_that_moved_most_of_each_sign():
    mask = torch.tensor([[True, False, False], [False, False, False]])
    moved = torch.tensor([[9.0, 0.1, 5.0], [0.2, 3.0, 0.3]])
    found = FedSelect(rate=0.4).grown(mask, moved)  # two of the five that are shared
    assert found.tolist() == [[True, False, True], [False, True, False]]
    assert mask.sum() == 1


def test_grown__follows_the_sequence_of_the_code_and_stops_once_it_is_above_the_limit():
    method, mask = FedSelect(rate=0.25, limit=0.8), torch.zeros(64, 64, dtype=torch.bool)
    moved = torch.rand(64, 64, generator=torch.Generator().manual_seed(0))
    shares = []
    for _ in range(8):
        mask = method.grown(mask, moved) | mask
        shares.append(float(mask.float().mean()))
    assert shares == pytest.approx([0.25, 0.4375, 0.578, 0.684, 0.763, 0.822, 0.822, 0.822], abs=1e-3)


@pytest.mark.parametrize("moved", [0.0, 1.0])
def test_grown__is_exact_where_all_weights_have_moved_alike(moved):
    mask = FedSelect(rate=0.25).grown(torch.zeros(8, dtype=torch.bool), torch.full((8,), moved))
    assert mask.tolist() == [True, True, *[False] * 6]


def test_grown__takes_nothing_at_rate_0_and_everything_at_rate_1():
    none, moved = torch.zeros(5, dtype=torch.bool), torch.rand(5)
    assert not FedSelect(rate=0.0).grown(none, moved).any()
    everything = FedSelect(rate=1.0, limit=1.0).grown(none, moved)
    assert everything.all()
    assert FedSelect(rate=1.0, limit=1.0).grown(everything, moved).all()


def test_masks_grow_after_every_so_many_rounds_of_the_client_but_not_after_its_first(play, clouds):
    run = play(replace(OFTEN, grow_every=2, rate=0.25), clouds("mlp2", "mlp2"), rounds=0)
    shares = []
    for ids in [(0, 1), (0,), (0,), (0,), (0, 1), (0, 1)]:
        run.round(*ids)
        shares.append(tuple(share(masks_of(run, id)) if str(id) in run.state.masks else None for id in (0, 1)))
    assert [first for first, _ in shares] == pytest.approx([0, 0, 0.25, 0.25, 0.4375, 0.4375], abs=0.02)
    assert [second for _, second in shares] == pytest.approx([0, 0, 0, 0, 0, 0.25], abs=0.02)


def test_masks_have_the_weights_that_moved_since_the_last_growth_and_no_biases(play, clouds):
    """What has moved counts from the net that the client started from, through two rounds and the average."""
    run = play(OFTEN, clouds("norm2", "norm2"), rounds=0)
    start = parameters_of(run.engine.server(1).build("norm2"))
    run.round()
    run.round()
    trained = run.kept(0)["model"]
    masks = masks_of(run, 0)
    assert set(masks) == {name for name in start if "weight" in name}
    for name, mask in masks.items():
        moved = (trained[name] - start[name]).abs()
        assert mask.sum() == mask.numel() - round(0.5 * mask.numel())
        assert moved[mask].min() >= moved[~mask].max()
    assert_close(run.kept(0)["state"]["snapshot"], {name: trained[name] for name in masks}, **EXACTLY)
    run.round()
    again = run.kept(0)["model"]
    for name, mask in masks_of(run, 0).items():
        moved, gained = (again[name] - trained[name]).abs(), mask & ~masks[name]
        assert mask[masks[name]].all()
        assert moved[gained].min() >= moved[~mask].max()


def test_a_client_cannot_take_back_what_was_its_own(play, clouds):
    class Empties(FedSelect):
        @on_client
        def local_update(self, client, message):
            reply = yield from super().local_update(client, message)
            if client.round < 4:
                return reply
            return Message(**{**reply, "masks": {name: 0 * bits for name, bits in reply["masks"].items()}})

    run = play(Empties(FULL, rate=0.5, grow_every=1), clouds("mlp2"), rounds=3)
    owned = masks_of(run, 0)
    run.round()
    for name, mask in masks_of(run, 0).items():
        assert torch.equal(mask, owned[name])
        assert mask.any()


# Training


def by_hand(net, data, masks, training):
    """Two passes an epoch, of one full batch each: over the client's own weights, then over the shared ones."""
    named = dict(net.named_parameters())
    for own in (True, False) * training.epochs:
        optimizer = training.new_optimizer(list(named.values()))
        before = parameters_of(net)
        net.zero_grad()
        F.cross_entropy(net(data.inputs), data.targets).backward()
        optimizer.step()
        with torch.no_grad():
            for name, weight in named.items():
                mask = masks.get(name, torch.zeros_like(weight, dtype=torch.bool))
                weight.copy_(torch.where(mask == own, weight, before[name]))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_round_of_a_client_with_weights_of_its_own_is_the_papers(play, clouds, optimizer):
    training = LocalTraining(optimizer, lr=0.05, batch_size=64, epochs=2)
    names = BOTH if optimizer == "sgd" else ["mlp2", "mlp3"]  # Adam steps on what is rounding of a bias before a norm
    federation = clouds(*names)
    run = play(replace(OFTEN, training=training), federation, rounds=2)
    state, masks = run.state, [masks_of(run, id) for id in (0, 1)]
    nets = [load(run.engine.server(1).build(name), run.kept(id)["model"]) for id, name in enumerate(names)]
    run.round()
    for id, net in enumerate(nets):
        assert not share(masks_of(run, id)) == share(masks[id]) == 0.0
        average = {name: state.weights[name] for name, _ in net.named_parameters()}
        load(net, average, partial=True)  # of all weights: in its last training the client had none of its own
        by_hand(net.train(), federation.sites[id].train, masks[id], training)
        found = run.kept(id)["model"]
        assert_close({name: found[name] for name in average}, parameters_of(net), **CLOSELY)


@pytest.mark.usefixtures("in_double_precision")
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_own_and_shared_weights_have_an_optimiser_each_that_lasts_where_it_persists(play, clouds, optimizer):
    """Six rounds by hand: at first nothing is a client's own, then more and more; one client misses a round."""
    momentum = {"momentum": 0.9} if optimizer == "sgd" else {}
    training = LocalTraining(optimizer, lr=0.05, batch_size=64, epochs=2, persist=True, **momentum)
    names, federation = ["mlp2", "mlp3"], clouds("mlp2", "mlp3")
    run = play(replace(OFTEN, rate=0.3, training=training), federation, rounds=0)
    nets = [run.engine.server(1).build(name) for name in names]
    made = {"sgd": partial(torch.optim.SGD, momentum=0.9), "adam": torch.optim.Adam}[optimizer]
    optimizers = [{part: made(net.parameters(), lr=0.05) for part in ("own", "shared")} for net in nets]
    for ids in ((0, 1), (0, 1), (0, 1), (1,), (0, 1), (0, 1)):
        average = run.state.weights
        owned = {id: [masks_of(run, id, entry) for entry in ("before", "masks")] for id in ids}
        run.round(*ids)
        for id in ids:
            named, (before, now) = dict(nets[id].named_parameters()), owned[id]
            none = {name: torch.zeros_like(weight, dtype=torch.bool) for name, weight in named.items()}
            before, now = {**none, **before}, {**none, **now}
            with torch.no_grad():
                for name, weight in named.items():
                    weight.copy_(torch.where(before[name], weight, average[name]))
            has_own, data = any(bool(mask.any()) for mask in now.values()), federation.sites[id].train
            for part in (("own", "shared") if has_own else ("shared",)) * 2:
                start = parameters_of(nets[id])
                optimizers[id][part].zero_grad()
                F.cross_entropy(nets[id](data.inputs), data.targets).backward()
                optimizers[id][part].step()
                with torch.no_grad():
                    for name, weight in named.items():
                        weight.copy_(torch.where(now[name] == (part == "own"), weight, start[name]))
            kept = run.kept(id)["model"]
            assert_close({name: kept[name] for name in named}, parameters_of(nets[id]), rtol=0, atol=1e-9)
    assert 0 < share(masks_of(run, 0, "before")) < share(masks_of(run, 0)) < 1


def test_own_weights_are_only_moved_by_the_first_pass_and_shared_ones_by_the_second(play, clouds):
    """With momentum and decay too, which move weights that have no gradient."""
    held = LocalTraining("sgd", lr=0.1, batch_size=4, momentum=0.9, weight_decay=0.1, steps=1)
    run = play(replace(OFTEN, training=held, rate=1.0, limit=0.9), clouds("mlp2"), rounds=2)
    masks = masks_of(run, 0)
    assert share(masks) == 1  # so that the shared part is the biases
    before = run.state.weights
    run.round()
    after = run.kept(0)["model"]
    assert all(not torch.equal(after[name], before[name]) for name in before)
    assert all(tensor.numel() == 0 for name, tensor in run.wire.replied["local_update"][-1][0]["weights"].items()
               if name in masks)  # fmt: skip
    run.round()
    assert not torch.equal(run.kept(0)["model"]["head.weight"], after["head.weight"])


def test_steps_are_those_of_each_part_and_epochs_do_not_count(play, clouds):
    held = LocalTraining("sgd", lr=0.1, batch_size=4, steps=2)
    once, thrice = (
        play(replace(OFTEN, training=replace(held, epochs=epochs)), clouds("mlp2"), rounds=3) for epochs in (1, 3)
    )
    assert_close(once.state.weights, thrice.state.weights, **EXACTLY)
    assert share(masks_of(once, 0, "before")) > 0


# The average


def test_a_weight_is_averaged_over_the_clients_that_have_and_share_it(play, clouds):
    run = play(OFTEN, clouds("mlp2", "mlp3", "mlp3"), rounds=2)
    masks, kept = [masks_of(run, id) for id in (0, 1, 2)], run.state.weights
    run.round()
    models = [run.kept(id)["model"] for id in (0, 1, 2)]
    nobody = 0
    for name, found in run.state.weights.items():
        expected = kept[name].clone()
        for place in range(expected.numel()):
            shared = [
                model[name].view(-1)[place]
                for model, mask in zip(models, masks, strict=True)
                if name in model and not (name in mask and mask[name].view(-1)[place])
            ]
            nobody += not shared
            if shared:
                expected.view(-1)[place] = sum(shared) / len(shared)
        assert_close(found, expected)
    assert nobody  # some weights are everybody's own


def test_own_weights_come_through_the_average_bit_for_bit_and_shared_ones_are_its(play, clouds):
    run = play(OFTEN, clouds("mlp2", "mlp2"), rounds=3)
    model, trained, masks = parameters_of(run.model(0)), run.kept(0)["model"], masks_of(run, 0, "before")
    for name, tensor in model.items():
        mask = masks.get(name, torch.zeros_like(tensor, dtype=torch.bool))
        assert torch.equal(tensor[mask], trained[name][mask])
        assert torch.equal(tensor[~mask], run.state.weights[name][~mask])
    assert 0 < share(masks) < 1


def test_what_a_mask_gains_is_taken_over_from_the_average_once_more(play, clouds):
    run = play(OFTEN, clouds("mlp2", "mlp2"), rounds=2)
    assert share(masks_of(run, 0, "before")) == 0
    assert share(masks_of(run, 0)) == pytest.approx(0.5, abs=0.02)
    assert_close(parameters_of(run.model(0)), run.state.weights, **EXACTLY)
    run.round()
    assert torch.equal(run.wire.sent["local_update"][2][0]["weights"]["head.weight"],
                       run.states[2].weights["head.weight"].flatten())  # fmt: skip


def test_a_client_that_was_not_drawn_keeps_its_own_weights_and_takes_the_current_average(play, clouds):
    run = play(OFTEN, clouds("mlp2", "mlp2"), rounds=3)
    mine, masks = run.kept(0)["model"], masks_of(run, 0, "before")
    run.round(1)
    assert_close(run.kept(0)["model"], mine, **EXACTLY)
    model = parameters_of(run.model(0))
    assert torch.equal(model["head.weight"][masks["head.weight"]], mine["head.weight"][masks["head.weight"]])
    assert torch.equal(model["head.bias"], run.state.weights["head.bias"])


def test_a_newcomer_starts_from_the_average(play, clouds):
    run = play(OFTEN, clouds("mlp2", "mlp2"), rounds=0)
    for _ in range(3):
        run.round(0)
    assert_close(parameters_of(run.model(1)), run.state.weights, **EXACTLY)
    state = run.state
    run.round(1)
    assert_close(run.kept(1)["state"]["snapshot"]["head.weight"], state.weights["head.weight"], **EXACTLY)


def test_running_statistics_stay_at_the_client(play, clouds):
    run = play(OFTEN, clouds("norm2", "norm2"), rounds=2)
    assert not any("running" in name for name in run.state.weights)
    first, second = (run.kept(id)["model"]["stages.stage0.1.running_mean"] for id in (0, 1))
    assert not torch.equal(first, second)


def test_as_it_was_trained__a_client_is_evaluated_before_the_average(play, clouds):
    run = play(replace(OFTEN, evaluated="trained"), clouds("mlp2", "mlp2"), rounds=0)
    run.round(0)
    assert_close(parameters_of(run.model(0)), run.kept(0)["model"], **EXACTLY)
    assert_close(parameters_of(run.model(1)), run.state.weights, **EXACTLY)


# Limits and refusals


def test_without_weights_of_their_own_it_is_fedavg_bit_for_bit(play, clouds):
    federation, uniform = clouds("mlp2", "mlp3"), Sharing(weighting="uniform")
    long = LocalTraining("adam", lr=0.01, batch_size=8, epochs=2)
    runs = [play(m, federation, rounds=4) for m in (FedSelect(long, rate=0.0, grow_every=1), FedAvg(long, uniform))]
    assert_close(runs[0].state.weights, runs[1].state.weights["all"], **EXACTLY)


def test_it_needs_layers_of_one_shape():
    assert {need.text for need in FedSelect().needs()} == {Need.NESTED_LAYERS.text, Need.SHARED_LAYERS.text}
    assert not any("sharing" in need.advice for need in FedSelect().needs())  # which is no setting of its own


@pytest.mark.parametrize("changes", [{"rate": 1.1}, {"limit": -0.1}, {"grow_every": 0}])
def test_what_is_out_of_range_is_refused_by_name(changes):
    with pytest.raises(ValueError, match=rf"^{next(iter(changes))}: expected"):
        replace(FedSelect(), **changes)
