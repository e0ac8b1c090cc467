"""InclusiveFL: its momentum by hand, in every round; who shares what; and what it is without either."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.core.needs import Need, Offer
from potluck.core.nets.weights import parameters_of, weights_of
from potluck.core.requests.fit import LocalTraining
from potluck.experiment.federation.needs import check_needs
from potluck.methods.fedavg import FedAvg
from potluck.methods.inclusivefl import InclusiveFL, momentum, next_larger, rows
from potluck.models.contract import STAGES
from potluck.models.mlp import mlp2, mlp3, mlp5
from potluck.models.resnet import VARIANTS as RESNETS
from potluck.models.vit import vit
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
CLOSELY = {"rtol": 1e-4, "atol": 1e-6}
SGD = LocalTraining("sgd", lr=0.1, batch_size=8)
APART = Sharing("architecture")
DEPTHS = {2: mlp2, 3: mlp3, 5: mlp5}
SIZES = (12, 20, 9, 16)
HIDDEN = "stages.hidden{}.linear.{}"


@pytest.fixture
def deep(clouds):
    """Clients with networks of these numbers of layers, all of one width."""

    def make(*depths):
        federation = clouds(*["mlp2"] * len(depths))
        sites = {id: replace(site, architecture=f"mlp{depths[id]}") for id, site in federation.sites.items()}
        builders = {f"mlp{depth}": partial(DEPTHS[depth], 3, (6,), width=8) for depth in sorted(set(depths))}
        return replace(federation, sites=sites, architectures=builders, server_architecture=f"mlp{depths[0]}")

    return make


def sent(run, id, exchange=-1):
    return run.wire.sent["local_update"][exchange][id]["weights"]


def replied(run, id, exchange=-1):
    return run.wire.replied["local_update"][exchange][id]["weights"]


def of_size(run, size, exchange=-1):
    """The clients of this size that answered."""
    sites = run.engine.federation.sites
    return [id for id in run.wire.replied["local_update"][exchange] if sites[id].architecture == size]


def way(run, size, exchange=-1):
    """g_i: the mean way of the clients of a size, weighted by their examples."""
    ids = of_size(run, size, exchange)
    whole = sum(SIZES[id] for id in ids)
    return {
        name: sum(SIZES[id] / whole * (replied(run, id, exchange)[name] - x) for id in ids)
        for name, x in sent(run, ids[0], exchange).items()
    }


def mixed(run, size, larger, own, above, beta, exchange=-1):
    """The way of a size after momentum: beta of the mean of the larger's layers `above`, into layer `own`."""
    g, other = way(run, size), way(run, larger, exchange)
    for kind in ("weight", "bias"):
        m = sum(other[HIDDEN.format(j, kind)] for j in above) / len(above)
        g[HIDDEN.format(own, kind)] = beta * m + (1 - beta) * g[HIDDEN.format(own, kind)]
    return g


def after(run, size, g):
    """What a size's clients were sent, moved by g."""
    start = sent(run, of_size(run, size)[0])
    return {name: start[name] + g[name] for name in start}


# Momentum


def test_in_every_round_the_top_layer_gets_the_mean_of_the_deeper_models_layers(play, deep):
    """Round by round, since the authors' code mixes in the first round only."""
    run = play(InclusiveFL(SGD, beta=0.3, sharing=APART), deep(2, 5, 2, 5), rounds=0)
    for _ in range(3):
        run.round()
        expected = after(run, "mlp2", mixed(run, "mlp2", "mlp5", own=1, above=(1, 2, 3, 4), beta=0.3))
        assert_close(run.state.weights["mlp2"], expected, **CLOSELY)
        assert_close(run.state.weights["mlp5"], after(run, "mlp5", way(run, "mlp5")), **CLOSELY)
        plain = after(run, "mlp2", way(run, "mlp2"))[HIDDEN.format(1, "weight")]
        assert not torch.allclose(run.state.weights["mlp2"][HIDDEN.format(1, "weight")], plain, atol=1e-4)


def test_with_beta_one_the_top_layer_moves_as_the_deeper_models_layers_do_in_the_mean(play, deep):
    run = play(InclusiveFL(SGD, beta=1.0, sharing=APART), deep(2, 3))
    name = HIDDEN.format(1, "weight")
    moved = run.state.weights["mlp2"][name] - run.states[0].weights["mlp2"][name]
    g = way(run, "mlp3")
    assert_close(moved, (g[name] + g[HIDDEN.format(2, "weight")]) / 2, **CLOSELY)


def test_each_of_three_sizes_learns_from_the_next_larger_and_its_update_before_mixing(play, deep):
    run = play(InclusiveFL(SGD, beta=0.5, sharing=APART), deep(3, 5, 2), rounds=2)
    two = mixed(run, "mlp2", "mlp3", own=1, above=(1, 2), beta=0.5)
    three = mixed(run, "mlp3", "mlp5", own=2, above=(2, 3, 4), beta=0.5)
    for size, g in (("mlp2", two), ("mlp3", three), ("mlp5", way(run, "mlp5"))):
        assert_close(run.state.weights[size], after(run, size, g), **CLOSELY)


def test_shared_layers_are_the_mean_over_sizes_of_their_mixed_updates(play, deep):
    run = play(InclusiveFL(SGD, beta=0.3), deep(2, 5, 2, 5), rounds=2)
    small = after(run, "mlp2", mixed(run, "mlp2", "mlp5", own=1, above=(1, 2, 3, 4), beta=0.3))
    large, n, m = after(run, "mlp5", way(run, "mlp5")), SIZES[0] + SIZES[2], SIZES[1] + SIZES[3]
    for name, found in run.state.weights["all"].items():
        expected = (n * small[name] + m * large[name]) / (n + m) if name in small else large[name]
        assert_close(found, expected, **CLOSELY)


@pytest.mark.parametrize("cohort", [(0,), (0, 2)])
def test_where_nobody_of_the_next_larger_size_answers_there_is_no_momentum(play, deep, cohort):
    federation = deep(2, 3, 5)
    runs = [play(method, federation, rounds=1) for method in (InclusiveFL(SGD, 0.9), FedAvg(SGD))]
    runs[1].states[-1] = type(runs[1].state)(runs[0].state.weights)
    for run in runs:
        run.round(*cohort)
    assert_close(runs[0].state.weights, runs[1].state.weights, **CLOSELY)


def test_of_the_previous_round_it_is_mixed_in_from_the_second_on(play, deep):
    run = play(InclusiveFL(SGD, beta=0.4, momentum="previous", sharing=APART), deep(2, 5), rounds=1)
    assert_close(run.state.weights["mlp2"], after(run, "mlp2", way(run, "mlp2")), **CLOSELY)
    assert_close(run.state.updates["mlp5"], way(run, "mlp5"), **CLOSELY)
    run.round(0)  # nobody of the larger size now, but in the round before
    g = mixed(run, "mlp2", "mlp5", own=1, above=(1, 2, 3, 4), beta=0.4, exchange=-2)
    assert_close(run.state.weights["mlp2"], after(run, "mlp2", g), **CLOSELY)
    run.round()
    assert_close(run.state.weights["mlp2"], after(run, "mlp2", way(run, "mlp2")), **CLOSELY)


def test_of_the_same_round_no_update_is_kept(play, deep):
    assert play(InclusiveFL(SGD), deep(2, 5)).state.updates == {}


def test_next_larger__has_the_same_top_blocks(play, clouds):
    run = play(InclusiveFL(sharing=APART), clouds("mlp3", "wide2", "mlp2", "norm2"), rounds=0)
    server = run.engine.server(1)
    found = {size: next_larger(size, server) for size in ("mlp2", "mlp3", "norm2", "wide2")}
    assert found == {"mlp2": "mlp3", "mlp3": None, "norm2": None, "wide2": None}


# Rows of blocks


def prefixes(net):
    """By row, what the names of each block's tensors begin with."""
    return {
        row: [one.pop() for one in ({name.removesuffix(own) for own, name in block.items()} for block in blocks)]
        for row, blocks in rows(net).items()
    }


def test_rows__of_a_net_of_plain_stages_are_one_without_stem_and_last_norm():
    assert prefixes(mlp5(3, (6,))) == {"": [f"stages.hidden{j}." for j in range(1, 5)]}
    net = vit(3, (1, 8, 8), patch=4, width=8, heads=2, depth=3)
    assert prefixes(net) == {"": [f"stages.block{j}." for j in range(1, 4)]}


def test_momentum__of_resnets_is_that_of_each_stages_blocks_from_the_smaller_ones_last_on():
    small, large = (RESNETS[name](10, (3, 32, 32), width=4) for name in ("resnet10", "resnet14"))
    assert prefixes(small)["layer3"] == ["stages.layer3.0."]
    assert prefixes(large)["layer3"] == ["stages.layer3.0.", "stages.layer3.1."]
    g, other = (parameters_of(net) for net in (small, large))
    found = momentum(g, rows(small), other, rows(large))
    for stage in ("layer1", "layer2"):  # as many blocks in both
        own = {name: tensor for name, tensor in other.items() if name.startswith(f"stages.{stage}.0.")}
        assert_close({name: tensor for name, tensor in found.items() if stage in name}, own, **EXACTLY)
    for stage in ("layer3", "layer4"):
        name = f"stages.{stage}.{{}}.conv2.weight"
        assert_close(found[name.format(0)], (other[name.format(0)] + other[name.format(1)]) / 2)
        assert f"stages.{stage}.0.conv1.weight" not in found  # of another shape in the second block
        assert f"stages.{stage}.0.norm1.weight" in found
        assert not any(name.startswith(f"stages.{stage}.0.shortcut") for name in found)  # which the second lacks
    assert not any(name.startswith(("stages.stem", "head")) for name in found)


def test_momentum__of_nets_without_common_blocks_is_none():
    g, other = parameters_of(mlp2(3, (6,))), parameters_of(mlp5(3, (6,), width=8))
    assert momentum(g, rows(mlp2(3, (6,))), other, rows(mlp5(3, (6,)))) == {}
    block = {"weight": "stages.hidden1.0.weight"}
    assert momentum(g, {"": [block]}, other, {"layer1": [block]}) == {}


# Who shares what


def test_a_size_keeps_its_top_layer_and_head_to_itself_and_shares_the_others(play, deep):
    run = play(InclusiveFL(SGD, beta=0.0, shared="lower"), deep(2, 5, 2, 5), rounds=2)
    small, large = (after(run, size, way(run, size)) for size in ("mlp2", "mlp5"))
    n, m = SIZES[0] + SIZES[2], SIZES[1] + SIZES[3]
    for id in range(4):
        own = small if id in (0, 2) else large
        for name, found in parameters_of(run.model(id)).items():
            stem = name.startswith("stages.stem")
            expected = (n * small[name] + m * large[name]) / (n + m) if stem else own[name]
            assert_close(found, expected, **CLOSELY)
    for name in (HIDDEN.format(1, "weight"), "head.weight"):
        assert not torch.allclose(weights_of(run.model(0))[name], weights_of(run.model(1))[name], atol=1e-4)


def test_a_layer_that_one_size_keeps_is_still_shared_by_the_others(play, deep):
    run = play(InclusiveFL(SGD, beta=0.0, shared="lower"), deep(2, 3, 5))
    three, five = (after(run, size, way(run, size)) for size in ("mlp3", "mlp5"))
    name = HIDDEN.format(1, "weight")
    expected = (SIZES[1] * three[name] + SIZES[2] * five[name]) / (SIZES[1] + SIZES[2])
    for id in (1, 2):
        assert_close(parameters_of(run.model(id))[name], expected, **CLOSELY)


def test_who_is_not_drawn_gets_what_is_shared_and_keeps_what_is_its_own(play, deep):
    run = play(InclusiveFL(SGD, shared="lower"), deep(2, 5), rounds=1)
    before = parameters_of(run.model(0))
    run.round(1)
    now, other = parameters_of(run.model(0)), parameters_of(run.model(1))
    for name, found in now.items():
        stem = name.startswith("stages.stem")
        assert_close(found, other[name] if stem else before[name], **EXACTLY)
        assert not stem or not torch.equal(found, before[name])


def test_layers_begin_alike_also_where_they_are_not_shared(play, deep):
    for shared in ("all", "lower"):
        small, large = (weights_of(play(InclusiveFL(shared=shared), deep(2, 5), rounds=0).model(id)) for id in (0, 1))
        assert_close(small, {name: large[name] for name in small}, **EXACTLY)


def test_what_is_frozen_in_a_top_layer_is_nobodys_own(play, deep):
    federation = deep(2, 5)
    for depth, build in list(federation.architectures.items()):
        federation.architectures[depth] = partial(with_frozen_bias, build)
    run = play(InclusiveFL(SGD, shared="lower"), federation, rounds=2)
    assert HIDDEN.format(1, "bias") not in run.state.own["mlp2"]
    assert HIDDEN.format(1, "weight") in run.state.own["mlp2"]


def with_frozen_bias(build):
    net = build()
    net.get_parameter(HIDDEN.format(1, "bias")).requires_grad_(False)
    return net


def test_running_statistics_are_plain_means(play, clouds):
    run = play(InclusiveFL(SGD, beta=0.9), clouds("norm2", "norm3"))
    one, two = (run.wire.replied["local_update"][0][id]["buffers"] for id in (0, 1))
    for name, buffer in one.items():
        expected = (12 * buffer + 20 * two[name]) / 32 if buffer.is_floating_point() else max(buffer, two[name])
        assert_close(run.state.weights["all"][name], expected)


def test_statistics_of_a_layer_that_a_size_keeps_are_its_own(play, clouds):
    run = play(InclusiveFL(SGD, shared="lower"), clouds("norm2", "norm3"))
    for id, top in enumerate(("stage1", "stage2")):
        name = f"stages.{top}.1.running_mean"
        assert_close(weights_of(run.model(id))[name], run.wire.replied["local_update"][0][id]["buffers"][name])


# Limits and refusals


def test_with_one_size_it_is_fedavg_bit_for_bit_and_has_a_global_model(play, clouds):
    federation = clouds("norm2", "norm2", "norm2")
    for shared in ("all", "lower"):
        runs = [play(method, federation, rounds=2) for method in (InclusiveFL(SGD, 0.9, shared=shared), FedAvg(SGD))]
        mine, theirs = (run.engine.method.global_model(run.state, run.engine.server(2)) for run in runs)
        assert_close(weights_of(mine), weights_of(theirs), **EXACTLY)


def test_without_beta_it_is_fedavg(play, clouds):
    federation = clouds("norm2", "norm3", "norm3")
    runs = [play(method, federation, rounds=3) for method in (InclusiveFL(SGD, 0.0), FedAvg(SGD))]
    assert_close(runs[0].state.weights, runs[1].state.weights, **CLOSELY)


def test_it_needs_models_in_stages():
    assert InclusiveFL().needs() == {Need.NESTED_LAYERS, Need.SPLIT_MODEL, STAGES, Need.SHARED_LAYERS}
    assert InclusiveFL(sharing=APART).needs() == {Need.SPLIT_MODEL, STAGES, Need.SHARED_ARCHITECTURES}


@pytest.mark.parametrize(
    ("builds", "complaint"),
    [
        (
            [partial(mlp2, 3, (6,), width=8), partial(mlp2, 3, (6,), width=16)],
            "no client has a layer in common with another .*weight has shape",
        ),
        ([lambda: torch.nn.Linear(6, 3)] * 2, "net0: Linear cannot be split into extractor, intermediate layers and"),
    ],
    ids=["two families", "no stages"],
)
def test_networks_without_layers_in_common_or_stages_are_refused_before_training(clouds, builds, complaint):
    federation = clouds("mlp2", "mlp2")
    sites = {id: replace(site, architecture=f"net{id}") for id, site in federation.sites.items()}
    architectures = {f"net{number}": build for number, build in enumerate(builds)}
    offer = Offer.of(replace(federation, sites=sites, architectures=architectures, server_architecture="net0"))
    with pytest.raises(ConfigError, match=f"^InclusiveFL cannot run here: .*{complaint}") as error:
        check_needs(InclusiveFL().needs(), "InclusiveFL", offer)
    assert "\n" not in str(error.value)


def test_a_sharing_that_averages_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"sharing\.scope: expected one that averages, found 'none'"):
        InclusiveFL(sharing=Sharing("none"))


@pytest.mark.parametrize("changes", [{"beta": -0.1}, {"beta": 1.1}, {"momentum": "next"}, {"shared": "none"}])
def test_what_is_out_of_range_is_refused_by_name(changes):
    with pytest.raises(ValueError, match=rf"^{next(iter(changes))}: expected"):
        replace(InclusiveFL(), **changes)
