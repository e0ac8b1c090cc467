"""DepthFL: its loss and its server step by hand, whose layers move, and the sizes of the paper's networks."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from potluck.core.federation import Federation, Site
from potluck.core.ground.errors import ConfigError, PotluckWarning
from potluck.core.ground.rng import fold_in
from potluck.core.needs import Need, Offer
from potluck.core.nets.weights import buffers_of, load, minus, parameters_of, plus
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import LocalTraining
from potluck.core.requests.inference import predict
from potluck.experiment.federation.needs import check_needs
from potluck.methods.depthfl import DepthFL, ExitsLoss
from potluck.methods.fedavg import FedAvg
from potluck.methods.feddyn import FedDyn
from potluck.models import get_model
from potluck.models.contract import STAGES, StagedNet, blocks, linear_exit, place_shapes
from potluck.models.vit import vit
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
CLOSELY = {"rtol": 1e-4, "atol": 1e-6}
SGD = LocalTraining("sgd", lr=0.05, batch_size=8)
IMAGE = (3, 8, 8)
SMALL = partial(get_model("resnet10"), 3, IMAGE, width=2, stem="cifar")  # four blocks, a classifier behind each
FOUR = (1.0, 0.75, 0.5, 0.25)


def flat():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 3))


def no_blocks():
    return StagedNet({"stem": nn.Flatten()}, nn.Linear(192, 3))


def images(*capacities, build=SMALL, shape=IMAGE):
    """One client a capacity, each with images of its own."""
    sites = {}
    for id, capacity in enumerate(capacities):
        draws = fold_in(0, "images", id).generator()
        train = Examples(torch.rand(8 + id, *shape, generator=draws), torch.arange(8 + id) % 3)
        sites[id] = Site(id, "net", train, train, train, capacity)
    return Federation(sites, {"net": build}, "net", num_classes=3)


def whole_net(run):
    """The network with all classifiers, and the weights of the state."""
    server = run.engine.server(0)
    net = run.engine.method.net(server, 1.0)
    return load(net, {**run.state.weights, **run.state.buffers})


def dual(run, client):
    """g_k as the client keeps it; nothing of one that was never drawn."""
    return run.kept(client)["state"].get("g", {})


def answers(run):
    return run.wire.replied["local_update"][-1]


# The networks


@pytest.mark.parametrize(
    ("classes", "expected"),
    [(100, [479_652, 1_347_336, 3_838_316, 12_283_344]), (10, [433_482, 1_254_996, 3_699_806, 12_098_664])],
)
def test_a_resnet18_has_the_parameters_of_the_authors_at_every_depth(play, classes, expected):
    federation = images(
        1.0, build=partial(get_model("resnet18"), classes, (3, 32, 32), stem="cifar"), shape=(3, 32, 32)
    )
    run = play(DepthFL(), replace(federation, num_classes=classes), rounds=0)
    server, found = run.engine.server(0), []
    for level in sorted(FOUR):
        part = run.engine.method.net(server, level)
        found.append(sum(parameter.numel() for parameter in part.parameters()))
    assert found == expected


def test_clients_have_the_leading_blocks_and_the_classifiers_behind_them(play):
    run = play(DepthFL(), images(*FOUR))
    places = blocks(run.engine.server(0).build())
    ends = {1.0: 4, 0.75: 3, 0.5: 2, 0.25: 1}
    for id, capacity in enumerate(FOUR):
        sent = run.wire.sent["local_update"][0][id]
        names = {*sent["weights"], *sent["buffers"]}
        exits = {name.split(".")[1] for name in names if name.startswith("exits.")}
        assert exits == {places[end - 1] for end in (1, 2, 3) if end <= ends[capacity]}
        assert ("head.weight" in names) == (capacity == 1.0)
        deployed = run.engine.inference_model(run.state, id).state_dict()
        assert names == {name.removeprefix("net.") for name in deployed}
    deepest = run.wire.sent["local_update"][0][0]
    assert deepest["weights"].keys() == run.state.weights.keys()
    assert deepest["buffers"].keys() == run.state.buffers.keys()


@pytest.mark.parametrize("build", [partial(vit, 3, IMAGE, patch=4, width=8, heads=2, depth=4)])
def test_classifiers_of_other_features_are_linear(play, build):
    run = play(DepthFL(SGD), images(1.0, 0.25, build=build))
    net = whole_net(run)
    for place, found in net.exits.named_children():
        assert repr(found) == repr(linear_exit(net, place_shapes(net, IMAGE)[place], 3))


# The loss


def outputs_and_loss(play, consistency):
    run = play(DepthFL(), images(1.0), rounds=0)
    net, batch = whole_net(run), run.engine.federation.sites[0].train.batch(torch.arange(8))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
    loss = ExitsLoss(F.cross_entropy, consistency)(net, batch, {})
    return net, batch, loss


def test_exits_loss__is_that_of_the_paper_with_teachers_that_do_not_learn(play):
    net, batch, loss = outputs_and_loss(play, 0.3)
    z = list(net.exit_outputs(batch.inputs).values())
    assert len(z) == 4
    expected = sum(F.cross_entropy(each, batch.targets) for each in z)
    for i, student in enumerate(z):
        for j, teacher in enumerate(z):
            if i != j:
                p = teacher.detach().softmax(1)
                divergence = (p * (p.log() - student.log_softmax(1))).sum(1).mean()
                expected = expected + 0.3 / 3 * divergence
    assert_close(loss, expected)
    weights = list(net.parameters())
    assert_close(torch.autograd.grad(loss, weights), torch.autograd.grad(expected, weights), **CLOSELY)


def test_classifiers_that_agree_teach_nothing(play):
    net, batch, _ = outputs_and_loss(play, 0.0)
    with torch.no_grad():
        for last in (net.head, *(found.head for found in net.exits.children())):
            last.weight.zero_()
            last.bias.copy_(torch.tensor([0.3, -0.2, 0.5]))
    taught, alone = (ExitsLoss(F.cross_entropy, weight)(net, batch, {}) for weight in (5.0, 0.0))
    assert_close(taught, alone)
    weights = list(net.parameters())
    assert_close(torch.autograd.grad(taught, weights), torch.autograd.grad(alone, weights), **CLOSELY)


def test_what_classifiers_teach_grows_to_its_full_weight_after_the_ramp():
    method = DepthFL(consistency=2.0)
    assert method.weight(1) == pytest.approx(2 * math.exp(-5))
    assert method.weight(151) == pytest.approx(2 * math.exp(-1.25))
    assert method.weight(301) == method.weight(1000) == 2.0
    assert replace(method, ramp=0).weight(1) == 2.0
    assert method.weight(100) < method.weight(101)


# The server


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_each_layer_is_the_mean_of_those_that_have_it_gone_beyond_by_h(play, alpha):
    run = play(DepthFL(SGD, alpha=alpha), images(*FOUR), rounds=2)
    before = run.state
    run.round(0, 2, 3)
    found = [answer["weights"] for answer in answers(run).values()]
    seen = set()
    for name, old in before.weights.items():
        own = [weights[name] for weights in found if name in weights]
        seen.add(len(own))
        mean = sum(own) / len(own)
        h = before.h[name] - alpha * len(own) * (mean - old) / 4
        assert_close(run.state.h[name], h, **CLOSELY)
        assert_close(run.state.weights[name], mean - h / alpha if alpha else mean, **CLOSELY)
    assert seen == {1, 2, 3}
    for name in before.buffers:
        own = [answer["buffers"][name] for answer in answers(run).values() if name in answer["buffers"]]
        expected = sum(own) / len(own) if own[0].is_floating_point() else max(own)
        assert_close(run.state.buffers[name], expected)


@pytest.mark.slow
def test_h_is_the_mean_of_all_clients_g_whoever_was_drawn_and_whatever_they_have(play):
    run = play(DepthFL(SGD, alpha=0.3), images(*FOUR), rounds=0)
    for cohort in [(0, 1), (3,), (2,), (0, 1, 2, 3), (1, 3)]:
        run.round(*cohort)
        duals = [dual(run, id) for id in range(4)]
        for name, h in run.state.h.items():
            assert_close(h, sum(g[name] if name in g else torch.zeros_like(h) for g in duals) / 4, **CLOSELY)
    assert run.state.h["head.weight"].any()


@pytest.mark.slow
def test_g_changes_by_alpha_times_the_way_gone_and_only_at_clients_that_were_drawn(play):
    run = play(DepthFL(SGD, alpha=0.5), images(*FOUR), rounds=2)
    before = {id: dual(run, id) for id in range(4)}
    run.round(0, 3)
    for id in (0, 3):
        way = minus(answers(run)[id]["weights"], run.wire.sent["local_update"][-1][id]["weights"])
        assert_close(dual(run, id), plus(before[id], way, -0.5), **CLOSELY)
        assert max(float(tensor.abs().max()) for tensor in way.values()) > 1e-3
    for id in (1, 2):
        assert_close(dual(run, id), before[id], **EXACTLY)


@pytest.mark.slow
def test_layers_that_no_client_of_a_round_has_stay_with_their_h(play):
    run = play(DepthFL(SGD, alpha=0.3), images(*FOUR), rounds=2)
    before = run.state
    run.round(2, 3)
    sent = run.wire.sent["local_update"][-1][2]
    moved = {n for n, w in run.state.weights.items() if not torch.equal(w, before.weights[n])}
    assert moved == sent["weights"].keys()
    assert {n for n, h in run.state.h.items() if not torch.equal(h, before.h[n])} <= moved
    assert {n for n, b in run.state.buffers.items() if not torch.equal(b, before.buffers[n])} == sent["buffers"].keys()


def test_without_alpha_clients_keep_nothing(play):
    run = play(DepthFL(SGD, alpha=0.0), images(1.0, 0.5), rounds=2)
    assert run.kept(0) == {"state": {}}
    assert not any(h.any() for h in run.state.h.values())


@pytest.mark.parametrize("capacity", [1.0, 0.5])
def test_with_one_level_without_feddyn_it_is_fedavg_with_equal_weights_bit_for_bit(play, capacity):
    """Whatever part of the network that level is."""
    method = DepthFL(SGD, levels=(capacity,), alpha=0.0, consistency=0.0)
    federation = images(capacity, capacity, capacity)
    run = play(method, federation, rounds=0)
    shallow = partial(leading_net, run.engine.server(0), capacity)
    fedavg = play(FedAvg(SGD, Sharing(weighting="uniform")), replace(federation, architectures={"net": shallow}), 0)
    fedavg.states[0].weights["all"].update({**run.state.weights, **run.state.buffers})
    for cohort in [(0, 1), (2,), (0, 1, 2)]:
        assert_close(
            {**run.round(*cohort).weights, **run.state.buffers}, fedavg.round(*cohort).weights["all"], **EXACTLY
        )
    assert all(not torch.equal(w, run.states[0].weights[name]) for name, w in run.state.weights.items())


def test_with_one_level_and_all_clients_alike_it_is_feddyn(play):
    """Also in what clients minimise, which h and g alone would not show."""
    federation = images(1.0, 1.0, 1.0)
    run = play(DepthFL(SGD, levels=(1.0,), alpha=0.5), federation, rounds=0)
    feddyn = play(FedDyn(SGD, 0.5), federation, rounds=0)
    for cohort in [(0, 1), (2, 0), (0, 1, 2)]:
        assert_close(
            {**run.round(*cohort).weights, **run.state.buffers}, feddyn.round(*cohort).weights["all"], **CLOSELY
        )


def test_classifiers_teach_with_the_weight_of_the_round(play):
    grown, low = (DepthFL(SGD, consistency=c, ramp=r, alpha=0.0) for c, r in ((5.0, 1), (5.0 * math.exp(-5), 0)))
    runs = [play(method, images(1.0)) for method in (grown, low)]
    assert_close(runs[0].state.weights, runs[1].state.weights, **EXACTLY)
    for run in runs:
        run.round()
    assert not torch.equal(runs[0].state.weights["head.weight"], runs[1].state.weights["head.weight"])


def leading_net(server, share, **scale):
    return DepthFL(levels=(share,)).net(server, share)


def test_notes__tell_the_norm_of_h(play):
    run = play(DepthFL(SGD), images(1.0, 0.5), rounds=2)
    norm = torch.cat([h.flatten() for h in run.state.h.values()]).norm()
    assert run.reports[-1].notes == {"h_norm": pytest.approx(float(norm), rel=1e-5)}


# Prediction


@pytest.mark.slow
@pytest.mark.parametrize("who", ["client", "server"])
def test_the_mean_of_all_classifiers_predicts(play, who):
    run = play(DepthFL(SGD), images(*FOUR), rounds=2)
    net, test = whole_net(run).eval(), run.engine.federation.sites[0].test
    with torch.no_grad():
        outputs = list(net.exit_outputs(test.inputs).values())
    model = run.model(2) if who == "client" else run.engine.global_model(run.state)
    few = 2 if who == "client" else 4
    assert_close(predict(model, test), sum(outputs[:few]) / few)


def test_a_client_with_one_classifier_predicts_with_it(play):
    run = play(DepthFL(SGD), images(1.0, 0.25), rounds=2)
    model, state = run.model(1), run.state
    assert model.ending
    assert_close(parameters_of(model), {n: state.weights[n] for n in parameters_of(model)}, **EXACTLY)
    assert_close(buffers_of(model), {n: state.buffers[n] for n in buffers_of(model)}, **EXACTLY)


# What it asks for


def test_needs_are_stated():
    shared = {Need.ONE_ARCHITECTURE, Need.SPLIT_MODEL, STAGES, Need.DEPTH_PREFIXES}
    assert DepthFL().needs() == {*shared, Need.CLASSES}
    assert DepthFL(consistency=0.0).needs() == DepthFL(levels=(1.0,)).needs() == {*shared, Need.ONE_OUTPUT}


def test_levels_that_no_net_has_are_refused():
    for levels, expected in [
        ((), "at least one share"),
        ((1.0, 0.0), "above 0 and"),
        ((1.5,), "above 0 and at most 1"),
    ]:
        with pytest.raises(ValueError, match=rf"levels(\.\d)?: expected {expected}"):
            DepthFL(levels=levels)


@pytest.mark.parametrize(
    ("builds", "complaint"),
    [
        (
            [flat, flat],
            "it cuts the depth of net0, which has no blocks to leave out; .*; net0: Sequential cannot be split",
        ),
        ([no_blocks, no_blocks], "net0: StagedNet has 1 stages, its extractor 1; there must be at least one stage"),
        ([SMALL, flat], "it needs one architecture, but client 0 has net0 and client 1 has net1; give"),
    ],
    ids=["no stages", "no blocks", "two families"],
)
def test_networks_that_have_no_depth_or_differ_are_refused_before_training(builds, complaint):
    federation = images(1.0, 0.5)
    sites = {id: replace(site, architecture=f"net{builds.index(builds[id])}") for id, site in federation.sites.items()}
    architectures = {f"net{number}": build for number, build in enumerate(builds)}
    offer = Offer.of(replace(federation, sites=sites, architectures=architectures, server_architecture="net0"))
    with pytest.raises(ConfigError, match=f"^DepthFL cannot run here: .*{complaint}") as error:
        check_needs(DepthFL().needs(), "DepthFL", offer)
    assert "\n" not in str(error.value)


def test_who_is_weaker_than_the_smallest_level_is_named_before_training(play):
    with pytest.warns(PotluckWarning, match=r"depthfl: client 1: capacity 0\.1 lies below the smallest level, 0\.25"):
        play(DepthFL(), images(1.0, 0.1), rounds=0)
