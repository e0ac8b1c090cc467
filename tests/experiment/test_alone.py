"""Clients that share nothing with any other: refused, or said, and by every method that does nothing for them."""

import json
from collections import OrderedDict
from dataclasses import replace
from functools import partial

import pytest
from torch import nn

from potluck import Run, RunConfig
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.tree import pack
from potluck.core.needs import Need, Offer
from potluck.core.nets.weights import weights_of
from potluck.engine.rounds.engine import Engine
from potluck.experiment.federation.assemble import assemble
from potluck.experiment.federation.needs import cautions, check_needs
from potluck.experiment.running.execute import prepare
from potluck.experiment.settings.resolve import resolve
from potluck.methods import get_method, list_methods
from potluck.parts.features import FITTING_FEATURES, MEETING
from potluck.testing.worlds import CLASSES, World, quick, run_rounds, toy_federation

FEATURES = 10
TO_SHARE = {Need.SHARED_LAYERS, Need.SHARED_ARCHITECTURES, MEETING, FITTING_FEATURES}


class Named(nn.Module):
    """A network whose layers have names that no other architecture has."""

    def __init__(self, name, width):
        super().__init__()
        self.add_module(f"{name}_in", nn.Linear(FEATURES, width))
        self.add_module(f"{name}_out", nn.Linear(width, CLASSES))

    def forward(self, inputs):
        first, last = self.children()
        return last(first(inputs).relu())


def unlike(*names):
    """A federation with one client for each name, which is its architecture's."""
    federation = toy_federation(World(clients=len(names)))
    builders = {name: partial(Named, name, 8 + place) for place, name in enumerate(dict.fromkeys(names))}
    sites = {id: replace(federation.sites[id], architecture=name) for id, name in enumerate(names)}
    return replace(federation, sites=sites, architectures=builders, server_architecture=names[0])


def prepared(folder, federation, scope):
    """The folder of a run of FedAvg on digits, ready to start."""
    tree = {
        "federation": {"dataset": "digits", **federation},
        "method": {"name": "fedavg", "sharing": {"scope": scope}},
    }
    experiment = resolve(tree, "test")
    folder.mkdir()
    prepare(experiment, assemble(experiment), folder).close()
    return folder


def problems(method, federation, needs):
    offer = Offer.of(federation)
    return [need for need in needs if need.problem(offer)]


def lonely(method, federation, rounds=3):
    """Whether client 0 ends alike with the others and without them, and the bytes that went to and from it."""
    ends, sent = [], 0
    for ids in (sorted(federation.sites), [0]):
        engine = Engine(method, federation)
        state = run_rounds(engine, 0)
        for number in range(1, rounds + 1):
            state, report = engine.round(number, state, ids)
            sent += report.traffic.bytes_up
        ends.append(pack(weights_of(engine.inference_model(state, 0))))
    return ends[0] == ends[1], sent


@pytest.mark.slow
@pytest.mark.rotates
@pytest.mark.parametrize("name", list_methods())
def test_a_method_is_refused_just_where_its_clients_learn_nothing_of_each_other(name):
    method, federation = quick(get_method(name)), unlike("conv", "deep", "flat")
    unmet = problems(method, federation, method.needs())
    if not TO_SHARE.issuperset(unmet):
        pytest.skip("it needs other networks")
    alone, sent = lonely(method, federation)
    assert alone == bool(unmet) or not sent, f"alone: {alone}, refused: {bool(unmet)}, bytes sent: {sent}"


@pytest.mark.parametrize("scope", ["layer", "architecture"])
def test_a_run_is_refused_in_one_line_before_it_trains(scope, tmp_path):
    method = get_method("fedavg")(sharing=replace(get_method("fedavg")().sharing, scope=scope))
    run = Run(method, unlike("conv", "deep", "flat"), RunConfig(rounds=1), tmp_path)
    with pytest.raises(ConfigError, match=r"no client has a layer in common with another \(conv, deep, flat") as found:
        run.load()
    assert "\n" not in str(found.value)
    assert "fedmd" in str(found.value)
    run.close()


class Headed(nn.Sequential):
    """A body and a head, of whose tensors networks of other widths have the bias alone."""

    def __init__(self, width):
        body, head = nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU()), nn.Linear(width, CLASSES)
        super().__init__(OrderedDict({f"body{width}": body, f"more{width}": nn.Linear(width, width), "head": head}))


def headed(*widths):
    """A federation of a client with a `Headed` for each width."""
    federation = unlike(*(f"wide{width}" for width in widths))
    return replace(federation, architectures={f"wide{width}": partial(Headed, width) for width in widths})


@pytest.mark.parametrize("name", ["fedfomo", "fedavg"])
def test_who_has_a_bias_alone_in_common_with_others_shares_nothing(name):
    with pytest.raises(ConfigError, match=r"no client has a layer in common with another \(wide3, wide5"):
        Run(quick(get_method(name)), headed(3, 5), RunConfig(rounds=1)).load()


@pytest.mark.parametrize(("scope", "averaged"), [("layer", "layers and features"), ("none", "features of one shape")])
def test_fedin_needs_features_in_common_where_no_layers_are_averaged(scope, averaged):
    method = quick(get_method("fedin"), [f'sharing.scope="{scope}"'])
    with pytest.raises(ConfigError, match=f"it exchanges {averaged}, and no client has .* with another"):
        Run(method, headed(3, 5), RunConfig(rounds=1)).load()
    alike = unlike("conv", "deep")  # of which no layer has a name in common
    Run(method, replace(alike, architectures={n: partial(Alike, n) for n in ("conv", "deep")}), RunConfig()).load()


class Alike(nn.Sequential):
    """Networks of unlike names whose features have one shape."""

    def __init__(self, name):
        widths = [FEATURES, 6, 6, CLASSES]
        super().__init__(OrderedDict((f"{name}{i}", nn.Linear(*widths[i : i + 2])) for i in range(3)))


def test_clients_that_share_nothing_are_named_where_others_do(tmp_path):
    run = Run(get_method("fedavg")(), unlike("conv", "conv", "deep", "flat"), RunConfig(rounds=1), tmp_path)
    run.load()
    (caution,) = run.notes
    assert caution.startswith("FedAvg: clients 2 (deep), 3 (flat) share no layer with any other")
    run.close()


def test_many_of_them_are_counted():
    offer = Offer.of(unlike("conv", "conv", *(f"own{number}" for number in range(9))))
    (caution,) = cautions(get_method("fedavg")().needs(), "fedavg", offer)
    assert "clients 2 (own0), 3 (own1), 4 (own2), 5 (own3), 6 (own4) and 4 more share no layer" in caution


@pytest.mark.parametrize("names", [("conv",), ("conv", "conv"), ("conv", "conv", "deep", "deep")])
def test_a_federation_whose_clients_all_share_is_neither_refused_nor_warned_of(names):
    for method in ("fedavg", "fedfomo", "fedselect", "feddf", "fedmd"):
        needs, offer = get_method(method)().needs() & TO_SHARE, Offer.of(unlike(*names))
        check_needs(needs, method, offer)
        assert not cautions(needs, method, offer)


def test_our_own_unlike_models_share_nothing_within_architectures_and_nested_ones_do(tmp_path):
    unlike_models = {"models": ["cnn2", {"name": "vit", "depth": 1}, "mlp2"], "clients": 3}
    with pytest.raises(ConfigError, match=r"no client has a layer in common with another \(cnn2, mlp2, vit"):
        prepared(tmp_path / "unlike", unlike_models, scope="architecture")
    nested = prepared(tmp_path / "nested", {"models": ["mlp2", "mlp3"], "clients": 2}, scope="layer")
    assert "cautions" not in json.loads((nested / "manifest.json").read_text())


def test_the_manifest_says_it_for_the_report(tmp_path):
    folder = prepared(tmp_path / "run", {"models": ["mlp2", "mlp2", "cnn2"], "clients": 3}, scope="architecture")
    (caution,) = json.loads((folder / "manifest.json").read_text())["cautions"]
    assert caution.startswith("fedavg: client 2 (cnn2) share")
