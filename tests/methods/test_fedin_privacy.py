"""FedIN with private features: what an outsider can compute, what an example can move, and what is left alone."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from potluck.core.ground.rng import Key, isolated
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import LocalTraining
from potluck.core.roles import ClientFailure
from potluck.engine.executors.sequential import Sequential
from potluck.engine.executors.stacked import Stacked
from potluck.engine.executors.workers import Workers, can_fork
from potluck.engine.rounds.engine import Engine
from potluck.methods.fedin import FedIN
from potluck.models.split import split
from potluck.parts import privacy
from potluck.parts.privacy import FeaturePrivacy
from potluck.parts.sharing import Sharing

EXACTLY = {"rtol": 0, "atol": 0}
MECHANISM = FeaturePrivacy(clip=1.0, epsilon=1.0, delta=1e-5)
HARD = LocalTraining("adam", lr=0.1, epochs=4, batch_size=4)
ROWS = 20
PRIVATE = FedIN(HARD, feature_batch=ROWS, privacy=MECHANISM)


@pytest.fixture
def silenced(monkeypatch):
    """Runs something with the noise left out, to know what it was added to."""

    def call(run: Callable):
        with monkeypatch.context() as patch:
            patch.setattr(privacy, "_noise", partial(torch.zeros, dtype=torch.float64))
            return run()

    return call


def alike(clouds, clients=4):
    """Clients with the same data and the same model."""
    federation = clouds(*["norm2"] * clients, sizes=(40,) * clients)
    site = federation.sites[0]
    return replace(federation, sites={id: replace(site, id=id) for id in range(clients)})


def noise_of(found, clean):
    """What was added, in standard deviations."""
    gaps = [(found[name] - clean[name]).flatten() for name in ("s_in", "s_out")]
    return torch.cat(gaps).double() / MECHANISM.sigma


# The outsider, who knows the seed and all messages


def keys_of(used):
    """Every key that was used, everything above it, and what guesses can be folded in below."""
    above = {path[:length] for path in used for length in range(1, len(path) + 1)}
    below = {(*path, word) for path in above for word in ("noise", "privacy", "features", "s_in", 0)}
    return [Key(path) for path in sorted(above | below, key=repr)]


def streams_of(key, size, examples):
    """Normal numbers in the ways in which they could have been drawn from a key."""
    first, second = key.generator(), key.generator()
    yield torch.cat([torch.randn(size // 2, generator=first) for _ in range(2)])  # s_in, then s_out
    torch.randperm(examples, generator=second)  # after the draw of rows
    yield torch.cat([torch.randn(size // 2, generator=second) for _ in range(2)])
    yield torch.randn(size, generator=key.generator(), dtype=torch.float64)
    with isolated(key):
        yield torch.randn(ROWS, size // ROWS).flatten()
    yield torch.from_numpy(np.random.default_rng(key.seed).standard_normal(size))


def test_an_outsider_who_replays_every_key_of_the_run_cannot_lower_the_noise(play, clouds, silenced, monkeypatch):
    used, seed = set(), Key.seed.fget
    monkeypatch.setattr(Key, "seed", property(lambda key: used.add(key.path) or seed(key)))
    run = play(PRIVATE, alike(clouds, 2), rounds=1)
    clean = silenced(lambda: play(PRIVATE, alike(clouds, 2), rounds=1))
    assert {(0, "client", 1, 1, id, "client") for id in (0, 1)} <= used
    size = ROWS * (8 + 8)
    candidates = torch.stack([s.double() for key in keys_of(used) for s in streams_of(key, size, 40)])
    assert len(candidates) > 1000
    for id in (0, 1):
        found, without = (r.wire.replied["local_update"][0][id]["features"] for r in (run, clean))
        z = noise_of(found, without)
        assert z.std() == pytest.approx(1, abs=0.3)
        shares = (candidates @ z) / (candidates * candidates).sum(1)  # the multiple that lowers it the most
        left = (z - shares[:, None] * candidates).var(1)
        assert left.min() > 0.85 * z.var()  # by chance, 15 % less is once in 1e8 runs of this test


@pytest.mark.parametrize("make", [Sequential, Stacked, lambda: Workers(2)], ids=["sequential", "stacked", "workers"])
def test_no_two_releases_share_noise_in_whatever_process_they_are_made(clouds, silenced, make):
    executor = make()
    if isinstance(executor, Workers) and not can_fork():
        pytest.skip("this system cannot fork")

    def two_rounds(executor):
        method = replace(PRIVATE, training=LocalTraining(steps=1))
        engine = Engine(method, alike(clouds), executor=executor)
        try:
            first, _ = engine.round(1, engine.start(), range(4))  # the second round's features depend on these
            again, _ = engine.round(1, engine.start(), range(4))
        finally:
            engine.close()
        (one,), (two,) = first.features.values(), again.features.values()
        return [
            {name: pairs[name][ROWS * id : ROWS * (id + 1)] for name in pairs}
            for pairs in (one, two)
            for id in range(4)
        ]

    clean = silenced(lambda: two_rounds(Sequential()))
    noises = [noise_of(found, without) for found, without in zip(two_rounds(executor), clean, strict=True)]
    for one, other in combinations(noises, 2):
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.45  # eight deviations of chance
    for z in noises:
        assert z.std() == pytest.approx(1, abs=0.3)


def test_which_examples_are_taken_is_no_secret_and_does_not_depend_on_the_data(play, clouds):
    federation = alike(clouds, 1)
    almost_clean = replace(PRIVATE, feature_batch=5, privacy=FeaturePrivacy(20.0, 1e9, 0.5))
    run = play(almost_clean, federation)
    key = Key((0, "client", 1, 1, 0, "client"))
    rows = torch.randperm(40, generator=key.generator())[:5]
    net = run.engine.server(0).build("norm2").eval()
    s_in = split(net).extractor(federation.sites[0].train.inputs[rows])
    assert_close(run.wire.replied["local_update"][0][0]["features"]["s_in"], s_in.detach(), rtol=0, atol=0.02)


# What an example can move


def neighbour_of(federation, place, scale):
    """The federation with one example of client 0 replaced."""
    site = federation.sites[0]
    inputs = site.train.inputs.clone()
    inputs[place] = scale * torch.randn(inputs.shape[1], generator=torch.Generator().manual_seed(place))
    train = Examples(inputs, (site.train.targets + (torch.arange(len(inputs)) == place)) % 3)
    return replace(federation, sites={**federation.sites, 0: replace(site, train=train)})


@pytest.mark.parametrize("buffers", ["average", "drop"])
@pytest.mark.parametrize("place", [0, 7])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_replacing_an_example_moves_its_own_pair_alone_however_hard_the_client_trains(
    play, clouds, silenced, place, scale, buffers
):
    method = replace(PRIVATE, sharing=Sharing(weighting="uniform", buffers=buffers))
    federation = clouds("norm2", sizes=(12,))
    before, after = (
        silenced(lambda f=f: play(method, f).wire.replied["local_update"][0][0])
        for f in (federation, neighbour_of(federation, place, scale))
    )
    assert not torch.equal(before["weights"]["head.weight"], after["weights"]["head.weight"])
    gaps = torch.cat([after["features"][name] - before["features"][name] for name in ("s_in", "s_out")], 1).norm(dim=1)
    assert sorted(gaps.tolist())[:-1] == [0.0] * 11
    assert 0 < gaps.max() <= MECHANISM.sensitivity


def test_what_is_released_comes_from_what_was_sent_and_not_from_what_was_trained(play, clouds, silenced):
    run = silenced(lambda: play(PRIVATE, clouds("norm2", sizes=(12,)), rounds=2))
    sent, replied = run.wire.sent["local_update"][1][0], run.wire.replied["local_update"][1][0]
    net = run.engine.server(0).build("norm2").eval()
    net.load_state_dict({**sent["weights"], **sent["buffers"]})
    s_in = split(net).extractor(run.engine.federation.sites[0].train.inputs).detach()
    clipped = s_in / s_in.norm(dim=1, keepdim=True).clamp(min=1.0)
    gaps = (replied["features"]["s_in"][:, None] - clipped[None]).abs().amax(2)
    assert (gaps.amin(1) < 1e-5).all()


def test_statistics_of_the_clients_own_are_refused_beside_privacy():
    with pytest.raises(ValueError, match=r"sharing\.buffers: found 'local' beside privacy"):
        replace(PRIVATE, sharing=Sharing(buffers="local"))
    assert replace(PRIVATE, privacy=None, sharing=Sharing(buffers="local")).sharing.buffers == "local"


def test_a_model_that_came_with_infinite_weights_costs_the_clients_reply(play, clouds, caplog):
    run = play(PRIVATE, clouds("norm2", "norm2"), rounds=0, tolerate_failures=True)
    run.state.weights["all"]["stages.stage1.0.weight"][0, 0] = float("inf")
    with suppress(ClientFailure):
        run.round()
    assert run.wire.replied["local_update"] == [{}]
    assert "stages.stage1.0.weight came with NaN or infinite numbers" in caplog.text
    assert run.engine.ledger.releases == {}


# What privacy leaves alone


def test_privacy_changes_what_is_sent_and_not_how_a_client_trains(play, clouds):
    federation = clouds("norm2", "norm3")
    private, plain = (play(replace(PRIVATE, privacy=p), federation) for p in (MECHANISM, None))
    assert_close(private.state.weights, plain.state.weights, **EXACTLY)
    assert private.reports[0].traffic == plain.reports[0].traffic
    assert private.reports[0].losses == plain.reports[0].losses


@pytest.mark.parametrize("of", ["batch", "channel", "feature"])
def test_noise_in_training_changes_neither_what_is_released_nor_what_is_stated(play, clouds, silenced, of):
    federation = clouds("norm2", "norm3")
    noisy = replace(PRIVATE, noise=0.8, noise_multiplies="variance", noise_sigma=of)
    runs = [silenced(lambda method=method: play(method, federation)) for method in (PRIVATE, noisy)]
    plain, other = (run.wire.replied["local_update"][0] for run in runs)
    for id in (0, 1):
        assert_close(plain[id]["features"], other[id]["features"], **EXACTLY)
        assert not torch.equal(plain[id]["weights"]["head.weight"], other[id]["weights"]["head.weight"])
    said = {
        method.privacy_statement(run.engine.ledger.releases) for method, run in zip((PRIVATE, noisy), runs, strict=True)
    }
    assert len(said) == 1
    assert replace(noisy, privacy=None).privacy_statement({}).startswith("No epsilon can be stated")


def test_without_features_nothing_is_released_and_runs_repeat(play, clouds):
    method = replace(PRIVATE, feature_training=False)
    assert not method.releases_privately
    runs = [play(method, clouds("norm2", "norm3"), rounds=2) for _ in range(2)]
    assert runs[0].engine.ledger.releases == {}
    assert_close(runs[0].state.weights, runs[1].state.weights, **EXACTLY)


def test_private_pairs_are_stored_sent_on_and_trained_on(play, clouds):
    run = play(PRIVATE, clouds("norm2", "norm3"), rounds=2)
    (store,) = run.state.features.values()
    assert store["s_in"].dtype == torch.float32
    received = run.wire.sent["local_update"][1][0]["features"]
    assert received["s_in"].shape == (ROWS, 8)
    without = play(replace(PRIVATE, feature_training=False), clouds("norm2", "norm3"), rounds=2)
    inner = "stages.stage1.0.weight"
    assert not torch.equal(run.state.weights["all"][inner], without.state.weights["all"][inner])
