from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from potluck.core.federation import Federation, Site
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import fold_in
from potluck.core.nets.weights import mean, weights_of
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import Fit, LocalTraining
from potluck.engine.client.training import train
from potluck.methods.fedavg import FedAvg
from potluck.methods.mfedepth import MFeDepth
from potluck.models.contract import StagedNet
from potluck.models.preresnet import preresnet20
from potluck.models.vit import vit
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
PLAIN = LocalTraining("sgd", lr=0.1, epochs=2, batch_size=4)
ROUGH = replace(PLAIN, momentum=0.9, weight_decay=0.1)
IMAGE = (3, 8, 8)
SMALL = partial(preresnet20, 3, IMAGE, widths=(2, 4, 8))  # cut like the paper's, see test_memory


def images(*capacities, build=SMALL):
    """One client a capacity, each with images of its own."""
    sites = {}
    for id, capacity in enumerate(capacities):
        draws = fold_in(0, "images", id).generator()
        train = Examples(torch.rand(10 + id, *IMAGE, generator=draws), torch.arange(10 + id) % 3)
        sites[id] = Site(id, "net", train, train, train, capacity)
    return Federation(sites, {"net": build}, "net", num_classes=3)


def fits_of(run, id):
    """A client's handler played by hand on the message it was sent last: each fit before it is done."""
    client = run.engine._host._open(id, run.engine.store.read(id), fold_in(0, "by hand", id), 1)
    work = run.engine.method.local_update(client, run.wire.sent["local_update"][-1][id])
    report = None
    while isinstance(fit := next(work, None) if report is None else resumed(work, report), Fit):
        yield client, fit
        report = train(fit, fold_in(0, "by hand", id, "fit"))
    yield client, None


def resumed(work, report):
    try:
        return work.send(report)
    except StopIteration:
        return None


def moved(before, after):
    """The stages, the head and the auxiliary heads that hold a tensor which is not what it was."""
    names = {name for name in before if not torch.equal(before[name], after[name])}
    return {name.split(".")[1] if name.startswith("stages.") else name.split(".")[0] for name in names}


def exits_in(message):
    return {name.split(".")[0] for name in message.get("exits", {})}


def exit_of(fit):
    """The auxiliary classifier that a piece is trained with."""
    (found,) = fit.net.exits.values()
    return found


def test_with_memory_for_all_it_is_fedavg_and_sends_no_heads_back(play, clouds):
    federation = clouds("norm2", "norm3", "norm3")
    mfedepth, fedavg = play(MFeDepth(PLAIN), federation, rounds=2), play(FedAvg(PLAIN), federation, rounds=2)
    assert_close([s.weights for s in mfedepth.states], [s.weights for s in fedavg.states], **EXACTLY)
    assert mfedepth.reports[1].traffic.up == fedavg.reports[1].traffic.up
    assert_close(mfedepth.states[2].exits, mfedepth.states[0].exits, **EXACTLY)


def test_each_piece_moves_itself_and_its_head_alone(play):
    run = play(MFeDepth(ROUGH), images(1 / 6))
    fits = fits_of(run, 0)
    pieces = [["stem", "block1"], ["block2"], ["block3"], ["block4"], ["block5", "block6"], ["block7"], ["block8"]]
    client, fit = next(fits)
    before = weights_of(client.model)
    for piece in pieces:
        own, kept = exit_of(fit), weights_of(exit_of(fit))
        client, fit = next(fits)  # the engine has trained the piece
        after = weights_of(client.model)
        assert moved(before, after) == set(piece)
        assert not torch.equal(own.head.weight, kept["head.weight"])
        before = after
    client, fit = next(fits)
    assert fit is None
    assert moved(before, weights_of(client.model)) == {"block9", "norm", "head"}


def test_a_head_is_averaged_over_the_clients_that_trained_it(play):
    run = play(MFeDepth(PLAIN), images(1 / 6, 1 / 3, 1 / 2, 1.0))
    replies = run.wire.replied["local_update"][0]
    assert [exits_in(replies[id]) for id in range(4)] == [
        {"block1", "block2", "block3", "block4", "block6", "block7", "block8"},
        {"block2", "block5", "block8"},
        {"block4"},
        set(),
    ]
    before, after = (state.exits["all"] for state in run.states)
    for head, trainers in {"block1": [0], "block2": [0, 1], "block4": [0, 2], "block5": [1], "block8": [0, 1]}.items():
        for name in (n for n in before if n.startswith(head)):
            expected = mean([replies[id]["exits"][name] for id in trainers], [10 + id for id in trainers])
            assert_close(after[name], expected, **EXACTLY)
    assert moved(before, after) == {f"block{number}" for number in range(1, 9)}


def test_heads_go_on_from_the_servers(play):
    run = play(MFeDepth(PLAIN), images(1 / 6), rounds=2)
    _, fit = next(fits_of(run, 0))
    sent = run.wire.sent["local_update"][1][0]["exits"]
    assert_close(sent, run.states[1].exits["all"], **EXACTLY)
    assert_close(exit_of(fit).head.weight.detach(), sent["block1.head.weight"], **EXACTLY)


def test_a_frozen_client_trains_no_head_before_its_first_piece(play):
    run = play(MFeDepth(PLAIN), images(1 / 8))
    assert exits_in(run.wire.replied["local_update"][0][0]) == {"block4", "block5", "block6", "block7", "block8"}


def test_a_bypass_names_heads_by_their_blocks_all_the_same(play):
    run = play(MFeDepth(PLAIN, partial="bypass"), images(1 / 8))
    assert exits_in(run.wire.replied["local_update"][0][0]) == {"block4", "block5", "block6", "block7", "block8"}


def test_auxiliary_classifiers_are_a_norm_a_mean_and_a_layer_without_relu(play):
    net = SMALL()
    run = play(method := MFeDepth(PLAIN), images(1.0), rounds=0)
    exits = method.all_exits(run.engine.server(0), net)
    assert list(exits) == [f"block{number}" for number in range(1, 9)]
    head = exits["block5"].train()
    x = torch.randn(6, 4, 4, 4)
    normed = (x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), keepdim=True, correction=0) + 1e-5).sqrt()
    assert_close(head(x), head.head(normed.mean((2, 3))))
    assert not list(head.buffers())


def test_heads_of_flat_nets_have_a_norm_where_the_net_has_one(play, clouds):
    for name, kinds in {"norm3": [nn.BatchNorm1d], "mlp3": []}.items():
        run = play(MFeDepth(PLAIN), clouds(name, capacities=(0.5,)))
        _, fit = next(fits_of(run, 0))
        norms = [type(module) for module in exit_of(fit).modules() if isinstance(module, nn.BatchNorm1d)]
        assert norms == kinds


def test_heads_of_transformers_read_what_the_nets_pooling_reads(play):
    build = partial(vit, 3, IMAGE, width=8, heads=2, depth=3)
    run = play(MFeDepth(PLAIN), images(0.4, build=build))
    assert exits_in(run.wire.replied["local_update"][0][0]) == {"block1", "block2"}
    _, fit = next(fits_of(run, 0))
    tokens = torch.rand(2, 5, 8)
    found = exit_of(fit)
    assert_close(found(tokens), found.head(found.body[0](tokens)[:, 0]))


def test_architectures_that_share_layers_share_heads(play, clouds):
    # norm2 ends in stage1, behind which norm3 has a head.
    run = play(MFeDepth(PLAIN), clouds("norm2", "norm3", "norm3", capacities=(0.7, 0.5, 0.5)))
    replies = run.wire.replied["local_update"][0]
    assert [exits_in(replies[id]) for id in range(3)] == [{"stage0"}, {"stage0", "stage1"}, {"stage0", "stage1"}]
    name = "stage0.head.weight"
    expected = mean([replies[id]["exits"][name] for id in range(3)], [12, 20, 9])
    assert_close(run.state.exits["all"][name], expected, **EXACTLY)


def test_a_shallower_architecture_takes_no_heads_away(play, clouds):
    federation = clouds("norm3", "norm2", capacities=(0.7, 0.7))
    deep, shallow = federation.architectures["norm3"], federation.architectures["norm2"]
    run = play(MFeDepth(PLAIN), replace(federation, architectures={"norm3": shallow, "norm2": deep}), rounds=0)
    assert {name.split(".")[0] for name in run.state.exits["all"]} == {"stage0", "stage1"}


def test_architectures_that_do_not_share_layers_have_heads_of_their_own(play, clouds):
    federation = clouds("norm2", "norm3", capacities=(0.7, 0.5))
    run = play(MFeDepth(PLAIN, Sharing(scope="architecture")), federation)
    one, two = (run.wire.replied["local_update"][0][id]["exits"] for id in (0, 1))
    assert_close(run.state.exits["norm2"], one, **EXACTLY)
    assert_close(run.state.exits["norm3"], two, **EXACTLY)


def test_no_averaging_is_refused_since_heads_are_averaged_like_all_layers():
    with pytest.raises(ConfigError, match=r"sharing\.scope: expected one that averages, found 'none'"):
        MFeDepth(sharing=Sharing("none"))


def test_a_net_of_one_block_needs_no_heads(play, clouds):
    federation = replace(clouds("mlp3"), architectures={"mlp3": one_block})
    run = play(MFeDepth(PLAIN), federation, rounds=2)
    assert run.state.exits == {"all": {}}
    assert not torch.equal(run.state.weights["all"]["head.weight"], run.states[0].weights["all"]["head.weight"])


def one_block():
    return StagedNet({"stem": nn.Linear(6, 2), "wide": nn.Linear(2, 40)}, nn.Linear(40, 3))


def test_heads_are_drawn_from_the_runs_seed(play, clouds, global_generator_unchanged):
    starts = [play(MFeDepth(), clouds("mlp3"), rounds=0, seed=seed).state.exits["all"] for seed in (0, 0, 1)]
    assert_close(starts[0], starts[1], **EXACTLY)
    assert not torch.equal(starts[0]["stem.head.weight"], starts[2]["stem.head.weight"])


def test_the_heads_of_a_state_are_left_as_they_were(play):
    run = play(MFeDepth(PLAIN), images(1 / 6))
    before = {name: tensor.clone() for name, tensor in run.state.exits["all"].items()}
    run.round()
    assert_close(run.states[1].exits["all"], before, **EXACTLY)
