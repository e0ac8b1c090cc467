"""Nets whose head is no linear layer, or that end in an exit, under the methods that look at heads and under others."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from potluck.core.federation import Federation
from potluck.core.ground.errors import ConfigError
from potluck.core.nets.scale import FULL
from potluck.core.nets.weights import parameters_of
from potluck.core.requests.fit import LocalTraining
from potluck.core.requests.inference import predict
from potluck.methods import get_method
from potluck.methods.fedavg import FedAvg
from potluck.methods.fedgen import FedGen
from potluck.methods.heterofl import HeteroFL
from potluck.methods.moon import representation
from potluck.models.contract import StagedNet, classifier_names, of_depth
from potluck.models.split import feature_shapes
from potluck.parts.generator import sent_heads
from potluck.parts.sharing import Sharing
from potluck.testing.worlds import quick

EXACTLY = {"rtol": 0, "atol": 0}
FEATURES, WIDTH, CLASSES = 6, 8, 3
SGD = LocalTraining("sgd", lr=0.1, batch_size=8)
METHODS = [
    *("fedavg", "fedepth", "fedfomo", "fedgen", "fedgkt", "fedin", "fedmd", "fedorion", "felo", "local", "mfedepth"),
    *("moon", "scaffold", "velo"),
]


class Cosine(nn.Module):
    """Cosine similarities to a row of weights for each class, times a temperature that is learnt."""

    def __init__(self, in_features):
        super().__init__()
        self.in_features = in_features
        self.temperature = nn.Parameter(torch.tensor(5.0))
        self.weight = nn.Parameter(torch.randn(CLASSES, in_features))

    def forward(self, z):
        return self.temperature * nn.functional.normalize(z) @ nn.functional.normalize(self.weight).T


def mlp(width):
    return nn.Sequential(nn.Linear(width, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, CLASSES))


def stages(hidden, width=WIDTH):
    inputs = [FEATURES, *[width] * hidden]
    layers = (nn.Sequential(nn.Linear(n, width), nn.BatchNorm1d(width), nn.ReLU()) for n in inputs)
    return {f"stage{number}": layer for number, layer in enumerate(layers)}


def with_mlp(hidden, scale=FULL):
    return StagedNet(stages(hidden, scale.of(WIDTH)), mlp(scale.of(WIDTH)), num_features=scale.of(WIDTH))


def with_cosine(hidden):
    return StagedNet(stages(hidden), Cosine(WIDTH))


def with_an_exit(hidden):
    """The leading blocks of a deeper net, both cut at the same place, so that one has another exit than the other."""
    whole = StagedNet(stages(hidden + 1), nn.Linear(WIDTH, CLASSES))
    return of_depth(whole, hidden, CLASSES, (FEATURES,))


HEADS = {"mlp": with_mlp, "cosine": with_cosine, "exit": with_an_exit}


def clients(clouds, build, *depths) -> Federation:
    """One client a depth."""
    federation = clouds(*["mlp2"] * len(depths), public=12)
    sites = {id: replace(federation.sites[id], architecture=f"deep{d}") for id, d in enumerate(depths)}
    builders = {f"deep{d}": lambda d=d, **options: build(d, **options) for d in depths}
    return replace(federation, sites=sites, architectures=builders, server_architecture=f"deep{depths[0]}")


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", METHODS)
def test_head__of_any_kind_is_trained_and_predicts(play, clouds, name, head):
    depths = (1, 2, 2)
    method = quick(get_method(name), [], epochs=1, batch_size=8)
    run = play(method, clients(clouds, HEADS[head], *depths), rounds=0)
    names = [classifier_names(run.engine.server(0).build(f"deep{depth}")) for depth in depths]
    before = [parameters_of(run.model(id)) for id in range(3)]
    run.round()
    run.round()
    for id, mine in enumerate(names):
        model = run.model(id)
        after = parameters_of(model)
        assert mine
        assert not any(torch.equal(before[id][n], after[n]) for n in mine if n in after)
        examples = run.engine.federation.sites[id].train
        assert predict(model, examples).shape == (len(examples), CLASSES)


def test_fedavg__shares_the_layers_that_nets_of_other_depth_have_and_an_exit_with_those_that_end_there(play, clouds):
    run = play(FedAvg(SGD), clients(clouds, with_an_exit, 1, 2, 2))
    replies = [run.wire.replied["local_update"][0][id]["weights"] for id in range(3)]
    sizes = torch.tensor([12.0, 20.0, 9.0])
    for name, members in {"stages.stage1.0.weight": [0, 1, 2], "exits.stage2.head.weight": [1, 2]}.items():
        shares = sizes[members] / sizes[members].sum()
        expected = sum(share * replies[id][name] for share, id in zip(shares, members, strict=True))
        assert_close(run.state.weights["all"][name], expected)
    assert_close(
        run.state.weights["all"]["exits.stage1.head.weight"], replies[0]["exits.stage1.head.weight"], **EXACTLY
    )


@pytest.mark.parametrize("head", HEADS)
def test_fedgen__teaches_its_generator_with_the_heads_that_clients_have_trained(play, clouds, head):
    run = play(FedGen(SGD), clients(clouds, HEADS[head], 1, 2))
    replies, server = run.wire.replied["local_update"][0], run.engine.server(1)
    z = torch.randn(16, WIDTH)
    heads = sent_heads(replies, server)
    for id, found in enumerate(heads):
        trained = server.build(f"deep{id + 1}")
        trained.load_state_dict({**replies[id]["weights"], **replies[id]["buffers"]})
        assert_close(found.eval()(z), trained.eval().head(z), **EXACTLY)
        assert not torch.equal(found(z), server.build(f"deep{id + 1}").eval().head(z))


@pytest.mark.parametrize("head", HEADS)
def test_moon__compares_what_the_head_reads(head):
    net = HEADS[head](2).eval()
    z = representation(net, torch.randn(5, FEATURES))
    assert z.shape == (5, net.num_features) == (5, WIDTH)
    assert feature_shapes(net, (FEATURES,))[1] == (WIDTH,)


def test_heterofl__leaves_out_rows_of_the_heads_last_layer_alone(play, clouds):
    federation = clients(clouds, with_mlp, 1, 1)
    train = federation.sites[0].train
    lacking = replace(federation.sites[0], train=train.take((train.labels < 2).nonzero().flatten()))
    run = play(HeteroFL(SGD), replace(federation, sites={**federation.sites, 0: lacking}))
    mine, theirs = (run.wire.replied["local_update"][0][id]["weights"] for id in (0, 1))
    assert_close(run.state.weights["head.3.weight"][2], theirs["head.3.weight"][2], **EXACTLY)
    for name, rows in {"head.3.weight": slice(2), "head.0.weight": slice(None), "head.1.bias": slice(None)}.items():
        assert_close(run.state.weights[name][rows], (mine[name][rows] + theirs[name][rows]) / 2)


def test_head__that_does_not_state_its_width_is_refused_before_a_run(play, clouds):
    def unstated(hidden):
        return StagedNet(stages(hidden), mlp(WIDTH))

    with pytest.raises(ConfigError, match="does not say how many features it reads; give num_features to StagedNet"):
        play(FedAvg(SGD), clients(clouds, unstated, 1), rounds=0)


@pytest.mark.parametrize("buffers", ["local", "drop"])
def test_fedgen__refuses_heads_whose_statistics_are_not_sent(play, clouds, buffers):
    method = FedGen(SGD, sharing=Sharing(buffers=buffers))
    with pytest.raises(ConfigError, match=f"^the head of deep1 keeps statistics, and sharing.buffers='{buffers}'"):
        play(method, clients(clouds, with_mlp, 1), rounds=0)
    play(method, clients(clouds, with_cosine, 1))
