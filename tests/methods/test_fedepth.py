import copy
import importlib
import sys
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close

from potluck.core.federation import Federation, Site
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import fold_in
from potluck.core.message import Message
from potluck.core.nets.batchnorm import keep_statistics, measure_statistics
from potluck.core.nets.weights import mean, weights_of
from potluck.core.requests.examples import Batch, Examples
from potluck.core.requests.fit import Fit, LocalTraining
from potluck.core.requests.inference import predict
from potluck.engine.client.session import Answer, Call
from potluck.engine.client.training import train
from potluck.methods.fedavg import FedAvg
from potluck.methods.fedepth import FeDepth, linked
from potluck.methods.mfedepth import MFeDepth
from potluck.models.contract import StagedNet
from potluck.models.preresnet import preresnet20
from potluck.models.vit import vit
from potluck.parts.activations import RowsOnDisk
from potluck.parts.depthwise import Mutual, Plan
from potluck.parts.links import SkipLink
from potluck.parts.memory import MemoryModel, saved_bytes
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
PLAIN = LocalTraining("sgd", lr=0.1, epochs=2, batch_size=4)
ROUGH = replace(PLAIN, momentum=0.9, weight_decay=0.1)
IMAGE = (3, 8, 8)
SMALL = partial(preresnet20, 3, IMAGE, widths=(2, 4, 8))
WIDER = replace(PLAIN, batch_size=16)  # ten examples are one batch
SIXTH = 1 / 6


def images(*capacities, build=SMALL, size=10):
    """One client a capacity, each with images of its own."""
    sites = {}
    for id, capacity in enumerate(capacities):
        draws = fold_in(0, "images", id).generator()
        train = Examples(torch.rand(size + id, *IMAGE, generator=draws), torch.arange(size + id) % 3)
        sites[id] = Site(id, "net", train, train, train, capacity)
    return Federation(sites, {"net": build}, "net", num_classes=3)


def sub_problems(run, id):
    """A client's handler played by hand on the message it was sent last: the client and each fit, before it is done.

    The reply comes last.
    """
    client = run.engine._host._open(id, run.engine.store.read(id), fold_in(0, "by hand", id), 1)
    work = run.engine.method.local_update(client, run.wire.sent["local_update"][-1][id])
    report = None
    while True:
        try:
            fit = next(work) if report is None else work.send(report)
        except StopIteration as stop:
            yield client, stop.value
            return
        yield client, fit
        report = train(fit, fold_in(0, "by hand", id, "fit"))


def fits_of(run, id):
    """The same without the reply."""
    return ((client, found) for client, found in sub_problems(run, id) if isinstance(found, Fit))


def moved(before, after):
    """The stages and the head that hold a tensor which is not what it was."""
    names = {name for name in before if not torch.equal(before[name], after[name])}
    return {name.split(".")[1] if name.startswith("stages.") else name.split(".")[0] for name in names}


# Limits


def test_with_memory_for_all_it_is_fedavg_bit_for_bit(play, clouds):
    federation = clouds("norm2", "norm3", "norm3")
    fedepth, fedavg = play(FeDepth(PLAIN), federation, rounds=3), play(FedAvg(PLAIN), federation, rounds=3)
    assert_close([s.weights for s in fedepth.states], [s.weights for s in fedavg.states], **EXACTLY)
    assert [r.traffic for r in fedepth.reports] == [r.traffic for r in fedavg.reports]
    assert [r.losses for r in fedepth.reports] == [r.losses for r in fedavg.reports]


def test_with_less_memory_it_is_not(play, clouds):
    capacities = (0.5, 1.0)
    federation = clouds("norm3", "norm3", capacities=capacities)
    fedepth, fedavg = play(FeDepth(PLAIN), federation), play(FedAvg(PLAIN), federation)
    one, two = (run.wire.replied["local_update"][0] for run in (fedepth, fedavg))
    assert_close(one[1]["weights"], two[1]["weights"], **EXACTLY)
    assert not torch.allclose(one[0]["weights"]["stages.stage0.0.weight"], two[0]["weights"]["stages.stage0.0.weight"])


@pytest.mark.parametrize("capacities", [(1.0, 1.0), (SIXTH, 1.0)])
def test_clients_weigh_by_their_examples(play, capacities):
    run = play(FeDepth(PLAIN), images(*capacities))
    one, two = (run.wire.replied["local_update"][0][id]["weights"] for id in (0, 1))
    expected = {name: mean([one[name], two[name]], [10, 11]) for name in one}
    assert_close({name: run.state.weights["all"][name] for name in one}, expected, **EXACTLY)


# Sub-problems


def test_each_sub_problem_moves_its_piece_and_the_classifier_alone(play):
    run = play(FeDepth(ROUGH), images(SIXTH))
    fits = sub_problems(run, 0)
    pieces = [
        ["stem", "block1"],
        ["block2"],
        ["block3"],
        ["block4"],
        ["block5", "block6"],
        ["block7"],
        ["block8"],
        ["block9"],
    ]
    client, _ = next(fits)
    before = weights_of(client.model)
    for piece in pieces:
        client, _ = next(fits)  # the engine has trained the piece
        after = weights_of(client.model)
        assert moved(before, after) == {*piece, "norm", "head"}
        before = after


def test_every_piece_has_all_the_epochs(play):
    run = play(FeDepth(PLAIN), images(SIXTH))
    *fits, _ = sub_problems(run, 0)
    assert len(fits) == 8
    assert {fit.training for _, fit in fits} == {PLAIN}
    assert {len(fit.data) for _, fit in fits} == {10}


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


@pytest.mark.slow
@pytest.mark.parametrize("buffer", [True, False])
def test_no_tensor_of_another_piece_is_saved_for_the_backward_pass(play, buffer):
    run = play(FeDepth(PLAIN, buffer=buffer), images(SIXTH))
    counts = []
    for client, fit in fits_of(run, 0):
        own = set(fit.net.modules())
        mine = set(fit.net.state_dict(keep_vars=True).values())
        others = [tensor for tensor in client.model.state_dict(keep_vars=True).values() if tensor not in mine]
        saved, entered = [], []  # held until compared, so that no address is used twice
        hooks = [fit.net.register_forward_pre_hook(lambda _m, inputs, entered=entered: entered.append(inputs[0]))]
        hooks += [
            module.register_forward_hook(lambda _m, _i, output, others=others: others.append(output))
            for module in client.model.modules()
            if module not in own
        ]

        def note(tensor, saved=saved):
            saved.append(tensor)
            return tensor

        batch = fit.data.batch(torch.arange(4))
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), keep_statistics(fit.net):
            loss = fit.losses[0](fit.net.train(), batch, {**fit.extras, **fit.frozen})
        for hook in hooks:
            hook.remove()
        (z,) = entered  # the one tensor that two pieces share: output of the finished, input of this
        assert loss.requires_grad
        assert not z.requires_grad
        assert not addresses(others) - addresses([z]) & addresses(saved)
        # Nor anything nameless: the piece saves on z what it saves anywhere, and the criterion a few numbers more.
        sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
        activations = sum(size for address, size in sizes.items() if address not in addresses(mine))
        assert 0 <= activations - saved_bytes(fit.net, z) <= 4 * (4 * 3 + 1) + 8 * 4  # log-probabilities, targets
        counts.append(len(saved))
    assert len(counts) == 8


def addresses(tensors):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_the_input_of_a_piece_is_the_output_of_the_finished_ones_in_evaluation_mode(play):
    federation = images(SIXTH)
    run = play(FeDepth(PLAIN), federation)
    data = federation.sites[0].train
    starts = [0, 2, 3, 4, 5, 7, 8, 9]
    for (client, fit), start in zip(fits_of(run, 0), starts, strict=False):
        expected = predict(client.model.stages[:start], data, 4) if start else data.inputs
        found, labels, _ = fit.data.batch(torch.arange(10))
        assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(labels, data.labels)
        assert torch.equal(fit.data.labels, data.labels)
        assert not found.requires_grad


@pytest.mark.parametrize("buffer", [True, False])
def test_a_finished_piece_has_the_statistics_of_all_examples(play, buffer):
    run = play(FeDepth(WIDER, buffer=buffer), images(SIXTH))
    client, first = next(fits := fits_of(run, 0))
    stages = {name for name, _ in first.net.stages.named_children()} - {"norm", "skip link"}
    assert stages == {"stem", "block1"}
    next(fits)  # the next piece is asked for, so this one is finished
    finished = nn.Sequential(*(client.model.stages.get_submodule(name) for name in ("stem", "block1")))
    found = weights_of(finished)
    inputs = next(client.train.batches(16)).inputs
    measure_statistics(finished, [inputs])
    assert_close(weights_of(finished), found)
    assert not torch.allclose(found["1.norm1.running_mean"], torch.zeros(2))


def test_buffered_and_unbuffered_training_are_equal(play):
    runs = [play(FeDepth(replace(PLAIN, epochs=1), buffer=b), images(SIXTH, 0.5)) for b in (True, False)]
    assert_close(*[run.state.weights for run in runs], rtol=1e-3, atol=1e-4)
    # Only fits on the client's own examples are counted among its losses.
    assert [len(next(iter(run.reports[0].losses.values()))) for run in runs] == [1, 8]


def shifted(inputs, rng):
    return inputs if rng is None else inputs + torch.rand((), generator=rng)


@pytest.mark.parametrize("buffer", [True, False])
def test_only_unbuffered_pieces_see_augmented_examples(play, buffer):
    federation = images(SIXTH)
    site = federation.sites[0]
    augmented = replace(federation, sites={0: replace(site, train=replace(site.train, preprocess=shifted))})
    fits = fits_of(play(FeDepth(PLAIN, buffer=buffer), augmented), 0)
    next(fits)
    _, second = next(fits)
    plain, moved = (second.data.batch(torch.arange(4), key)[0] for key in (None, fold_in(0, "augment")))
    assert torch.equal(plain, moved) == buffer


# The link


def test_the_link_takes_every_sth_row_and_pads_both_sides():
    features = torch.Size((64, 8, 8))
    x = torch.rand(2, 16, 32, 32)
    found = SkipLink(features, "subsample")(x)
    assert torch.equal(found[:, 24:40], x[:, :, ::4, ::4])
    assert not found[:, :24].any()
    assert not found[:, 40:].any()
    y = torch.rand(2, 32, 16, 16)
    found = SkipLink(features, "subsample")(y)
    assert torch.equal(found[:, 16:48], y[:, :, ::2, ::2])
    assert_close(found.sum(1), y[:, :, ::2, ::2].sum(1))


def test_the_averaging_link_has_the_means_of_the_cells():
    x = torch.arange(16.0).view(1, 1, 4, 4)
    found = SkipLink(torch.Size((1, 2, 2)), "average")(x)
    # By hand: rows 0..3, 4..7 ...; the first cell holds 0, 1, 4, 5.
    assert_close(found.flatten(), torch.tensor([2.5, 4.5, 10.5, 12.5]))


@pytest.mark.parametrize("link", ["subsample", "average"])
@pytest.mark.parametrize(
    ("found", "features"),
    [
        ((5, 9, 9), (8, 4, 4)),
        ((7, 4, 6), (4, 4, 3)),
        ((8,), (8,)),
        ((5,), (8,)),
        ((9,), (4,)),
        ((3, 4, 4), (6,)),
        ((5, 8), (5, 8)),
    ],
)
def test_the_link_ends_in_the_classifiers_shape_and_has_no_parameters(link, found, features):
    skip = SkipLink(torch.Size(features), link)
    assert skip(torch.rand(2, *found)).shape == (2, *features)
    assert not list(skip.parameters())
    assert not list(skip.buffers())


def test_flat_features_of_equal_width_pass_and_others_are_filled_up_or_cut_on_both_sides():
    x = torch.tensor([[1.0, 2.0, 3.0]])
    assert SkipLink(torch.Size((3,)), "subsample")(x) is x
    assert SkipLink(torch.Size((6,)), "subsample")(x).tolist() == [[0, 1, 2, 3, 0, 0]]
    assert SkipLink(torch.Size((1,)), "subsample")(x).tolist() == [[2]]


def test_an_image_before_flat_features_becomes_its_mean():
    x = torch.rand(2, 3, 4, 4)
    assert_close(SkipLink(torch.Size((3,)), "subsample")(x), x.mean((2, 3)))


@pytest.mark.parametrize(("found", "features"), [((5, 8), (3, 8)), ((5,), (3, 4, 4)), ((5, 8), (8,))])
def test_a_shape_that_no_link_leads_to_is_an_error_with_both_shapes(found, features):
    with pytest.raises(ValueError, match=r"output \(5.*no skip link") as refused:
        SkipLink(torch.Size(features), "subsample")(torch.rand(2, *found))
    assert str(features) in str(refused.value)


@pytest.mark.parametrize("build", [SMALL, partial(SMALL, variant="fedepth"), partial(vit, 3, IMAGE, width=8, heads=2)])
@pytest.mark.parametrize("link", ["subsample", "average"])
def test_every_block_of_a_net_can_be_a_piece(play, build, link):
    run = play(FeDepth(PLAIN, link=link, slack=1.3), images(0.2, build=build))
    before, after = (state.weights["all"] for state in run.states)
    assert moved(before, after) == {*(name for name, _ in build().stages.named_children()), "head"}


def test_the_last_piece_has_no_link():
    net = SMALL()
    memory = MemoryModel.of(net, IMAGE)
    pieces = memory.pieces(max(memory.costs))
    *before, last = [linked(net, piece, memory) for piece in pieces]
    assert all(any(isinstance(m, SkipLink) for m in sub_problem.modules()) for sub_problem in before)
    assert not any(isinstance(m, SkipLink) for m in last.modules())
    x = torch.rand(2, *IMAGE)
    z = net.eval().stages[: pieces[-1].start](x)
    assert_close(last.eval()(z), net(x), **EXACTLY)


# Partial training


@pytest.mark.parametrize("other", [1.0, SIXTH])
def test_frozen_blocks_of_a_client_do_not_count(play, other):
    run = play(FeDepth(PLAIN), images(1 / 8, other))
    lacking, full = (run.wire.replied["local_update"][0][id] for id in (0, 1))
    frozen = {
        n for n in full["weights"] if n.startswith(("stages.stem", "stages.block1", "stages.block2", "stages.block3"))
    }
    assert frozen
    assert full["weights"].keys() - lacking["weights"].keys() == frozen
    assert not any(name.startswith("stages.block2") for name in lacking["buffers"])
    assert_close({n: run.state.weights["all"][n] for n in frozen}, {n: full["weights"][n] for n in frozen}, **EXACTLY)
    name = "stages.block9.conv1.weight"
    expected = mean([lacking["weights"][name], full["weights"][name]], [10, 11])
    assert_close(run.state.weights["all"][name], expected, **EXACTLY)


def test_frozen_blocks_that_nobody_trains_stay(play):
    run = play(FeDepth(replace(ROUGH, batch_size=8)), images(1 / 8), rounds=2)
    first, last = run.states[0].weights["all"], run.state.weights["all"]
    assert moved(first, last) == {"block4", "block5", "block6", "block7", "block8", "block9", "norm", "head"}


@pytest.mark.parametrize("buffers", ["local", "drop"])
def test_frozen_blocks_have_measured_statistics_where_none_come(play, buffers):
    run = play(FeDepth(WIDER, Sharing(buffers=buffers)), images(1 / 8))
    client, fit = next(playing := sub_problems(run, 0))
    assert client.model.stages.block2.norm1.running_mean.any()
    assert fit.data.input_shape == (2, 8, 8)
    assert client.model.stages.block2.norm1.num_batches_tracked == 1
    playing.close()


def test_with_averaged_buffers_nothing_is_measured(play):
    run = play(FeDepth(PLAIN), images(1 / 8))
    client, _ = next(sub_problems(run, 0))
    assert not client.model.stages.block2.norm1.running_mean.any()


def test_bypassed_blocks_are_jumped_over_and_sent_back_as_they_came(play):
    run = play(FeDepth(PLAIN, partial="bypass"), images(1 / 8))
    sent, reply = (run.wire.sent["local_update"][0][0], run.wire.replied["local_update"][0][0])
    assert sent["weights"].keys() == reply["weights"].keys()
    whole = {"stem", "block4", "block5", "block6", "block7", "block8", "block9", "norm", "head"}
    assert moved(sent["weights"], reply["weights"]) == whole
    fits = fits_of(run, 0)
    client, first = next(fits)
    trained = {name for name, _ in first.net.stages.named_children()}
    assert trained == {"stem", "block4", "skip link", "norm"}
    next(fits)
    _, third = next(fits)
    found, _, _ = third.data.batch(torch.arange(10))
    assert len(list(fits)) == 3
    data = run.engine.federation.sites[0].train
    stages = client.model.eval().stages
    with torch.no_grad():
        expected = stages.block5(stages.block4(stages.stem(data.inputs)))
    assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", [FeDepth, MFeDepth])
def test_a_bypass_between_unequal_shapes_is_refused_before_anybody_trains(play, method):
    # Widths that grow at block 4 put the first block that fits, block 5, behind another shape.
    broken = method(replace(PLAIN, batch_size=32), partial="bypass", slack=1.0)
    memory = broken.estimate(SMALL(), IMAGE)
    share = (memory.costs[4] + 1) / memory.whole
    message = r"client 1, capacity .* of net: .*'bypass', but stem returns \(2, 8, 8\) and block5 reads \(4, 4, 4\)"
    with pytest.raises(ConfigError, match=message):
        play(broken, images(1.0, share), rounds=0)
    play(replace(broken, partial="freeze"), images(1.0, share), rounds=0)


def test_a_bypass_without_a_stem_is_refused_before_anybody_trains(play, clouds):
    federation = clouds("mlp3", capacities=(0.25,))
    federation = replace(federation, architectures={"mlp3": hourglass})
    with pytest.raises(ConfigError, match="'bypass', but first takes at least half as much memory as second"):
        play(FeDepth(PLAIN, partial="bypass"), federation, rounds=0)


def hourglass():
    stages = {"first": nn.Linear(6, 40), "second": nn.Linear(40, 4), "third": nn.Linear(4, 4)}
    return StagedNet(stages, nn.Linear(4, 3))


def test_too_little_memory_for_any_piece_is_an_error_with_the_smallest_that_works(play):
    message = r"client 0, capacity 0\.01 of \w+: budget of .* too small for any piece; expected at least [\d.]+ .iB"
    with pytest.raises(ConfigError, match=message):
        play(FeDepth(PLAIN), images(0.01))


# Mutual distillation


def pair():
    nets = nn.ModuleDict({"own": SMALL(), "peer1": SMALL()})
    batch = Batch(torch.rand(6, *IMAGE), torch.arange(6) % 3, {})
    return nets, batch


def gradients(loss, net):
    return torch.autograd.grad(loss, list(net.parameters()))


def test_identical_nets_teach_each_other_nothing():
    nets, batch = pair()
    nets["peer1"].load_state_dict(nets["own"].state_dict())
    nets.train()
    plain = F.cross_entropy(nets["own"](batch[0]), batch[1])
    mutual = Mutual("own", F.cross_entropy)(nets, batch, {})
    assert_close(mutual, plain)
    assert_close(gradients(mutual, nets["own"]), gradients(plain, nets["own"]), rtol=1e-4, atol=1e-6)


def test_each_net_approaches_its_peers_and_they_get_no_gradient():
    nets, batch = pair()
    nets["peer2"] = SMALL()
    nets.train()
    loss = Mutual("peer1", F.cross_entropy)(nets, batch, {})
    with keep_statistics(nets):
        own, peer, other = (nets[name](batch[0]).detach() for name in ("peer1", "own", "peer2"))

    def kl(teacher, student):
        return (teacher.softmax(1) * (teacher.log_softmax(1) - student.log_softmax(1))).sum(1).mean()

    assert_close(loss.detach(), F.cross_entropy(own, batch[1]) + (kl(peer, own) + kl(other, own)) / 2)
    loss.backward()
    assert all(p.grad is not None for p in nets["peer1"].parameters())
    assert all(p.grad is None for p in nets["own"].parameters())


def test_teaching_leaves_the_teachers_statistics_alone():
    nets, batch = pair()
    before = weights_of(nets["peer1"].train())
    Mutual("own", F.cross_entropy)(nets.train(), batch, {})
    assert_close(weights_of(nets["peer1"]), before, **EXACTLY)
    assert nets["own"].stages.block1.norm1.num_batches_tracked == 1


def test_clients_of_full_capacity_train_several_nets_and_send_one(play):
    run = play(FeDepth(PLAIN, models=3), images(1.0, 0.5, 1.0))
    plain = play(FeDepth(PLAIN), images(1.0, 0.5, 1.0))
    assert run.reports[0].traffic == plain.reports[0].traffic
    mine, theirs = (r.wire.replied["local_update"][0] for r in (run, plain))
    assert_close(mine[1]["weights"], theirs[1]["weights"], **EXACTLY)
    assert not torch.allclose(mine[0]["weights"]["head.weight"], theirs[0]["weights"]["head.weight"])
    assert run.kept(1)["state"] == {}
    peers = [run.kept(id)["modules"][name] for id in (0, 2) for name in ("peer1", "peer2")]
    kernels = [peer["stages.block9.conv1.weight"] for peer in [*peers, mine[0]["weights"]]]
    for place, kernel in enumerate(kernels):
        assert not any(torch.allclose(kernel, other) for other in kernels[:place])


def test_nets_step_in_turn_and_a_peer_learns_from_the_step_before(play):
    run = play(FeDepth(replace(PLAIN, epochs=1, batch_size=64), models=2), images(1.0))
    data = run.engine.federation.sites[0].train
    fits = sub_problems(run, 0)
    _, fit = next(fits)
    expected = copy.deepcopy(fit.net).train()
    next(fits)  # the engine has taken one full step with each
    for name, other in (("own", "peer1"), ("peer1", "own")):
        logits, taught = expected[name](data.inputs), expected[other](data.inputs).detach()
        kl = (taught.softmax(1) * (taught.log_softmax(1) - logits.log_softmax(1))).sum(1).mean()
        found = gradients(F.cross_entropy(logits, data.targets) + kl, expected[name])
        with torch.no_grad():
            for parameter, gradient in zip(expected[name].parameters(), found, strict=True):
                parameter -= PLAIN.lr * gradient
        assert_close(list(fit.net[name].parameters()), list(expected[name].parameters()), rtol=1e-3, atol=1e-5)


def test_a_peer_starts_from_weights_of_its_own(play):
    run = play(FeDepth(replace(PLAIN, lr=0.0), models=2), images(1.0))
    sent, peer = run.wire.sent["local_update"][0][0]["weights"], run.kept(0)["modules"]["peer1"]
    layers = [name for name in sent if name.endswith(("conv.weight", "conv1.weight", "conv2.weight", "head.weight"))]
    assert len(layers) == 20
    assert not any(torch.allclose(sent[name], peer[name]) for name in layers)


def test_peers_go_on_where_they_stopped(play):
    still = replace(PLAIN, lr=0.0)
    run = play(FeDepth(still, models=2), images(1.0))
    first = run.kept(0)["modules"]["peer1"]
    run.round()
    second = run.kept(0)["modules"]["peer1"]
    parameters = dict(SMALL().named_parameters())
    assert_close({n: second[n] for n in parameters}, {n: first[n] for n in parameters}, **EXACTLY)
    assert second["stages.block1.norm1.num_batches_tracked"] == 2 * first["stages.block1.norm1.num_batches_tracked"]


# On FedProx


@pytest.mark.parametrize("method", [FeDepth, MFeDepth])
@pytest.mark.parametrize("buffer", [True, False])
def test_each_sub_problem_is_pulled_to_what_the_server_sent_of_what_it_trains(play, method, buffer):
    """Its loss is the task's and mu / 2 times the squared way from the round's weights, the classifier's too."""
    mu = 0.4
    run = play(method(replace(WIDER, epochs=3), mu=mu, buffer=buffer), images(0.5))
    message = run.wire.sent["local_update"][0][0]
    exits = {f"exits.{name}": weight for name, weight in message.get("exits", {}).items()}
    sent, ways = {**message["weights"], **exits}, []
    for _, fit in fits_of(run, 0):
        trained = dict(fit.net.named_parameters())
        way = sum((weight - sent[name]).square().sum() for name, weight in trained.items())
        batch, extras = fit.data.batch(torch.arange(10)), {**fit.extras, **fit.frozen}
        with keep_statistics(fit.net.train()):
            task = fit.losses[0].loss(fit.net, batch, extras)
            found = fit.losses[0](fit.net, batch, extras)
        assert_close(found, task + mu / 2 * way)
        gap = torch.autograd.grad(found - task, list(trained.values()))
        assert_close(list(gap), [mu * (weight - sent[name]) for name, weight in trained.items()], rtol=1e-4, atol=1e-6)
        ways.append(float(way.detach()))
    assert len(ways) == 2
    assert ways[0] == 0  # nothing has moved before the first piece
    assert (ways[1] > 0) == (method is FeDepth)  # its classifier has; auxiliary ones are trained once


def test_with_a_strong_pull_the_blocks_of_every_piece_go_a_shorter_way(play):
    free, pulled = (play(FeDepth(replace(PLAIN, lr=0.02), mu=mu), images(0.5)).wire for mu in (0.0, 20.0))
    for stage in ("block1", "block5", "block9"):
        assert 0 < way_of(pulled, stage) < 0.5 * way_of(free, stage)


def way_of(wire, stage):
    """How far client 0's training has moved a stage."""
    sent, replied = (said["local_update"][0][0]["weights"] for said in (wire.sent, wire.replied))
    return sum((replied[n] - sent[n]).square().sum() for n in sent if n.startswith(f"stages.{stage}.")).item()


def test_of_nets_that_teach_each_other_the_one_that_is_sent_is_pulled_and_its_peers_are_not(play, clouds):
    training, federation = replace(PLAIN, lr=0.02, epochs=5), clouds("mlp3")
    free, pulled = (play(FeDepth(training, models=2, mu=mu), federation) for mu in (0.0, 20.0))
    still = play(FeDepth(replace(training, lr=0.0), models=2), federation).kept(0)["modules"]["peer1"]
    moves = [[(w - still[n]).norm() for n, w in run.kept(0)["modules"]["peer1"].items()] for run in (free, pulled)]
    assert 0 < way_of(pulled.wire, "hidden1") < 0.5 * way_of(free.wire, "hidden1")
    assert all(one > 0.8 * other for other, one in zip(*moves, strict=True))


@pytest.mark.parametrize("method", [FeDepth, MFeDepth])
def test_with_a_pull_every_trained_weight_is_counted_twice_more(method):
    net = SMALL()
    free, pulled = (method(PLAIN, mu=mu).estimate(net, IMAGE) for mu in (0.0, 0.1))
    parameters = [4 * sum(p.numel() for p in stage.parameters()) for stage in (*net.stages, net.head)]
    assert [b.cost - a.cost for a, b in zip(free.parts, pulled.parts, strict=True)] == [2 * p for p in parameters]


# Budgets that change


def test_dynamic_capacities_are_those_of_the_federations_clients_drawn_anew_each_round(play, clouds):
    run = play(FeDepth(assignment="dynamic"), clouds(*["mlp3"] * 3, capacities=(0.5, 1.0, 1.0)), rounds=0)
    drawn = [run.engine.method.capacities(run.engine.server(number)) for number in range(1, 301)]
    weak = [sum(found[id] == 0.5 for found in drawn) for id in range(3)]
    assert {capacity for found in drawn for capacity in found.values()} == {0.5, 1.0}
    for count in weak:  # a third of 300 is expected, with a deviation of sqrt(300 * 1/3 * 2/3) = 8.2
        assert abs(count - 100) < 4 * 8.2
    assert drawn[0] != drawn[1]
    assert [run.engine.method.capacities(run.engine.server(number)) for number in range(1, 301)] == drawn


@pytest.mark.parametrize("method", [FeDepth, MFeDepth])
def test_with_dynamic_capacities_a_client_trains_as_one_that_has_what_it_was_drawn_whoever_else_is_there(
    play, clouds, method
):
    federation = clouds(*["norm3"] * 3, capacities=(0.5, 0.7, 1.0))
    dynamic, met = play(method(PLAIN, assignment="dynamic"), federation, rounds=0), set()
    for number in range(1, 6):
        dynamic.round()
        drawn = {id: message["capacity"] for id, message in dynamic.wire.sent["local_update"][-1].items()}
        sites = {id: replace(site, capacity=drawn[id]) for id, site in federation.sites.items()}
        fixed = play(method(PLAIN), replace(federation, sites=sites), rounds=0)
        expected, _ = fixed.engine.round(number, dynamic.states[-2], [1])
        alone, _ = dynamic.engine.round(number, dynamic.states[-2], [1])
        assert_close(alone.weights, expected.weights, **EXACTLY)
        met.add(drawn[1])
    assert len(met) > 1


def test_a_client_that_is_drawn_full_capacity_trains_several_nets_in_that_round(play, clouds):
    run = play(FeDepth(PLAIN, models=2, assignment="dynamic"), clouds("mlp3", "mlp3", capacities=(0.5, 1.0)), rounds=0)
    drawn, peers = [], []
    for _ in range(8):
        run.round()
        drawn.append(run.wire.sent["local_update"][-1][1]["capacity"])
        peers.append(run.kept(1).get("modules", {}).get("peer1"))
    assert peers[0] is None
    assert drawn[0] == 0.5  # this seed's first
    for before, after, capacity in zip(peers, peers[1:], drawn[1:], strict=False):
        moved = after is not None and (before is None or not torch.equal(before["head.weight"], after["head.weight"]))
        assert moved == (capacity == 1.0)
    assert set(drawn) == {0.5, 1.0}


@pytest.mark.parametrize("method", [FeDepth, MFeDepth])
def test_every_capacity_that_may_be_drawn_is_checked_before_anybody_trains_with_every_architecture(
    play, clouds, method
):
    # A half holds a piece of the deeper net and none of the shallower one, which client 1 may come to train with it.
    federation = clouds("mlp3", "mlp2", capacities=(0.5, 1.0))
    play(method(), federation, rounds=0)
    with pytest.raises(ConfigError, match=r"client 1, capacity 0\.5 of mlp2: budget of .* too small"):
        play(method(assignment="dynamic"), federation, rounds=0)


# Hyper-parameters


@pytest.mark.parametrize(("name", "value"), [("slack", 0.0), ("slack", -1.0), ("models", 0), ("mu", -0.1)])
def test_impossible_hyper_parameters_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}: expected .* found {value}"):
        FeDepth(**{name: value})


def test_slack_stretches_the_budget(play):
    counts = [len(list(fits_of(play(FeDepth(PLAIN, slack=s), images(0.25)), 0))) for s in (1.0, 2.0, 4.5)]
    assert counts[0] > counts[1] > counts[2] == 1


def test_the_server_judges_the_mean_as_it_stands(play):
    run = play(FeDepth(PLAIN), images(SIXTH, 1.0))
    evaluated = weights_of(run.model(0))
    assert_close(evaluated, run.state.weights["all"], **EXACTLY)
    assert_close(weights_of(run.engine.global_model(run.state)), evaluated, **EXACTLY)


# Budgets


def layers(*widths):
    """Stages of a linear layer, a batch norm and ReLU: none of them takes memory that its own tensors do not show."""
    stages = {
        f"stage{place}": nn.Sequential(nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU())
        for place, (before, after) in enumerate(pairwise(widths))
    }
    return StagedNet(stages, nn.Linear(widths[-1], 3))


EVEN = partial(layers, 32, 32, 32, 32, 32, 32)
WIDE_FIRST = partial(layers, 32, 256, 32, 32, 32, 32)


def most_allocated(work):
    """The most bytes that torch holds while it works, beyond what it held before: every allocation and release."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        work()
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def most_in_a_round(play, method, build, capacity, examples):
    """The most bytes of tensors that a client's call holds, from the message's bytes to the reply's."""
    data = Examples(torch.rand(examples, 32), torch.arange(examples) % 3)
    run = play(method, Federation({0: Site(0, "net", data, data, data, capacity)}, {"net": build}, "net", 3), rounds=0)
    share = method.sharing.message(run.state.weights, run.engine.federation.roster[0])
    exits = {"exits": run.state.exits["all"]} if isinstance(method, MFeDepth) else {}
    call = Call("local_update", 0, Message(**share, **exits).encode(), None, fold_in(0, "call"))
    found = []
    peak = most_allocated(lambda: found.append(run.engine._host.execute(call)))
    assert isinstance(found[0], Answer), found
    return peak


@pytest.mark.parametrize(
    ("method", "build", "capacity"),
    [
        (FeDepth(), EVEN, 0.32),
        (FeDepth(), EVEN, 0.5),
        (FeDepth(), EVEN, 1.0),
        (FeDepth(buffer=False), EVEN, 0.32),
        (MFeDepth(), EVEN, 0.32),
        (MFeDepth(buffer=False), EVEN, 0.5),
        (FeDepth(), WIDE_FIRST, 0.2),
        (FeDepth(buffer=False), WIDE_FIRST, 0.2),
        (FeDepth(sharing=Sharing(buffers="drop")), WIDE_FIRST, 0.2),
        (FeDepth(mu=0.1), EVEN, 0.32),
        (FeDepth(mu=0.1, buffer=False), EVEN, 0.32),
        (MFeDepth(mu=0.1), EVEN, 0.5),
    ],
)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_clients_whole_round_stays_within_its_budget(play, method, build, capacity, optimizer):
    method = replace(method, training=LocalTraining(optimizer, lr=0.001, batch_size=64))
    net = build()
    memory = method.estimate(net, (32,))
    budget = method.budget(capacity, memory)
    assert (memory.pieces(budget)[0].start > 0) == (build is WIDE_FIRST)
    # Beside the budget: the network, and the weights that the process starts new ones with; after training the reply's
    # too. And some whole numbers for each example, which say in what order they come.
    weights = sum(tensor.numel() * tensor.element_size() for tensor in net.state_dict().values())
    examples = 600  # the last batch has 24
    measured = [most_in_a_round(play, method, build, capacity, examples) for _ in range(2)]
    peak = max(measured) - 5 * 8 * examples  # the profiler was seen to lose most of the events, once
    assert weights < peak < max(budget + 2 * weights, 4 * weights)


def test_z_lies_in_memory_where_there_is_room_and_in_a_file_elsewhere_with_the_same_bits(play, monkeypatch):
    def play_with(examples):
        data = Examples(torch.rand(examples, 32, generator=fold_in(0).generator()), torch.arange(examples) % 3)
        federation = Federation({0: Site(0, "net", data, data, data, 0.45)}, {"net": EVEN}, "net", num_classes=3)
        run = play(FeDepth(LocalTraining("sgd", lr=0.1, batch_size=16)), federation)
        in_files = [isinstance(fit.data.preprocess, RowsOnDisk) for _, fit in fits_of(run, 0)]
        return in_files, run.wire.replied["local_update"][0][0]["weights"]

    in_files, _ = play_with(640)
    assert in_files == [False, True, True]  # the first piece reads the examples themselves
    in_files, in_memory = play_with(4)
    assert in_files == [False, False, False]
    monkeypatch.setattr(Plan, "has_room", lambda *_: False)
    in_files, from_files = play_with(4)
    assert in_files == [False, True, True]
    assert_close(from_files, in_memory, **EXACTLY)


def test_statistics_are_measured_in_batches_of_the_trainings_size(play):
    sizes = set()

    def note(layer, inputs):
        if layer.training and not torch.is_grad_enabled():
            sizes.add(len(inputs[0]))

    def listening():
        net = EVEN()
        net.stages[0][1].register_forward_pre_hook(note)
        return net

    for buffer in (True, False):
        method = FeDepth(LocalTraining("sgd", lr=0.1, batch_size=8), buffer=buffer)
        data = Examples(torch.rand(41, 32), torch.arange(41) % 3)
        play(method, Federation({0: Site(0, "net", data, data, data, 0.4)}, {"net": listening}, "net", num_classes=3))
        assert sizes == {8, 9}  # the last example joins a batch
        sizes.clear()


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("share", ["1/2", "1/3", "1/6", "1/8"])
@pytest.mark.parametrize("method", ["fedepth", "mfedepth"])
def test_at_the_papers_size_a_round_stays_within_its_budget_in_a_process_of_its_own(monkeypatch, share, method):
    # PreResNet-20 on 32 x 32 images, batches of 32, Adam; the whole network's weights lie beside the budget: as they
    # came, in the network, and as they go.
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    fedepth_memory = importlib.import_module("fedepth_memory")
    round = fedepth_memory.Round(share, method=method, examples=130, watched="process")
    budget = float(Fraction(share)) * fedepth_memory.whole(round)
    peak = fedepth_memory.play(round, **fedepth_memory.FREED_AT_ONCE).peak
    most = 1.05 * budget + 3 * fedepth_memory.weights()
    assert budget / 8 < peak < most, f"{peak / 2**20:.1f} of {most / 2**20:.1f} MiB"


@pytest.mark.parametrize("buffer", [True, False])
def test_a_client_that_trains_a_part_has_a_loss(play, clouds, buffer):
    run = play(FeDepth(buffer=buffer), clouds("mlp3", capacities=(0.6,)))
    assert "stages.stem.0.weight" not in run.wire.replied["local_update"][0][0]["weights"]
    assert run.reports[0].loss_local > 0
