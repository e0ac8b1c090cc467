"""Audits: the bound against exact numbers, its coverage, its power, and private releases through a client's handler."""

import math
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch

from potluck.attacks import audit as audits
from potluck.attacks.audit import audit, lower_bound, probability
from potluck.attacks.overheard import overhear
from potluck.attacks.release import audit_release, claim_of
from potluck.core.ground.errors import ConfigError
from potluck.core.method import Method
from potluck.engine.rounds.engine import Engine
from potluck.methods import get_method, list_methods
from potluck.parts import privacy
from potluck.parts.privacy import FeaturePrivacy, ReleasesFeatures
from potluck.testing.worlds import World, quick, toy_federation

DELTA = 1e-5


def exactly(canaries, guesses, right, odds, delta):
    """Theorem 5.2 with whole numbers: randomised response is right with probability odds / (1 + odds)."""

    def tail(least):
        ways = (math.comb(guesses, k) * Fraction(odds) ** k for k in range(max(least, 0), guesses + 1))
        return sum(ways, Fraction()) / (1 + Fraction(odds)) ** guesses

    beyond = tail(right)
    steepest = max((tail(right - i) - beyond) / i for i in range(1, canaries + 1))
    return min(Fraction(1), beyond + 2 * canaries * Fraction(delta) * steepest)


@pytest.mark.parametrize(("guesses", "right"), [(1, 1), (12, 12), (12, 9), (30, 21), (7, 0)])
@pytest.mark.parametrize("odds", [1, 2, 5])
@pytest.mark.parametrize("delta", [0, 0.001])
def test_the_probability_of_so_many_right_guesses_is_the_theorems(guesses, right, odds, delta):
    found = probability(30, guesses, right, math.log(odds), delta)
    assert found == pytest.approx(float(exactly(30, guesses, right, odds, delta)), rel=1e-9)


def test_the_bound_is_the_epsilon_at_which_that_probability_is_the_error():
    bound = lower_bound(400, 100, 90, DELTA, 0.05)
    assert probability(400, 100, 90, bound, DELTA) <= 0.05 < probability(400, 100, 90, bound + 2e-4, DELTA)
    assert lower_bound(400, 100, 50, DELTA, 0.05) == 0.0
    assert lower_bound(100, 100, 100, 0.0, 0.05) == pytest.approx(-math.log(0.05 ** (-1 / 100) - 1), abs=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_bound_of_randomised_response_is_above_its_epsilon_hardly_ever_and_comes_near(epsilon):
    draws, bounds = np.random.default_rng(0), list[float]()
    for _ in range(60):
        coins = draws.random(600) < 0.5
        right = draws.random(600) < 1 / (1 + math.exp(-epsilon))
        bounds.append(audit(coins, np.where(coins == right, 1.0, -1.0), 0.0).lower)
    assert sum(bound > epsilon for bound in bounds) <= 3
    assert np.median(bounds) > 0.55 * epsilon


def guessed(mechanism, canaries=20_000):
    """The audit of a mechanism whose canaries' pairs lie as far apart as its claim allows for."""
    coins = np.random.default_rng(1).random(canaries) < 0.5
    row = torch.from_numpy(np.where(coins, 2.0, -2.0) * mechanism.clip).float()[:, None]
    released = mechanism.protect({"s_in": row, "s_out": row})
    scores = (released["s_in"] + released["s_out"])[:, 0].numpy()
    return audit(coins, scores, mechanism.delta)


def test_an_audit_has_power_the_gaussian_mechanism_at_epsilon_four_shows_more_than_one_and_a_half():
    found = guessed(FeaturePrivacy(clip=1.0, epsilon=4.0, delta=DELTA))
    assert 1.5 <= found.lower <= 4.0


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0, 8.0])
def test_what_the_mechanism_claims_is_above_what_an_attack_shows(epsilon):
    assert guessed(FeaturePrivacy(clip=0.3, epsilon=epsilon, delta=DELTA)).lower < epsilon


def test_clipping_left_out_is_found_on_the_mechanism(monkeypatch):
    monkeypatch.setattr(FeaturePrivacy, "_clipped", lambda self, features: 5 * features.double())
    assert guessed(FeaturePrivacy(clip=1.0, epsilon=4.0, delta=DELTA)).lower > 4.0


def test_scores_that_are_not_as_many_as_coins_are_refused():
    with pytest.raises(ValueError, match="expected as many, at least one"):
        audit([True], [0.1, 0.2], DELTA)


TRANSLATED = ("translation.s_in=8", "translation.s_out=4", "translation.anchors=30")


def heard_of(epsilon, overrides=(), **world):
    """A FedIN whose features are private, after a round; and what passed between the server and client 0."""
    mechanism = FeaturePrivacy(clip=0.5, epsilon=epsilon, delta=DELTA)
    method = replace(quick(get_method("fedin"), overrides), privacy=mechanism)
    engine = Engine(method, toy_federation(World(clients=2, **world)))
    found = overhear(engine, engine.start())
    return found.engine, found.heard[0]


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "world"), [((), {}), (TRANSLATED, {}), ((), {"batchnorm": True})])
def test_a_private_run_shows_less_than_its_accountant_states(overrides, world):
    engine, heard = heard_of(2.0, overrides, **world)
    found = audit_release(engine, heard, 128, 0)
    assert found.upper == pytest.approx(2.0)
    assert found.found.lower < found.upper < found.found.ceiling
    assert found.holds
    assert found.repeated == 0
    assert 0.3 < found.distance <= 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["its own", "the handler's stream"])
def test_noise_from_a_known_seed_is_found_again_and_breaks_the_claim(monkeypatch, seed):
    own = partial(torch.randn, generator=None)

    def noise(shape):
        generator = torch.Generator().manual_seed(7) if seed == "its own" else None
        return own(shape, generator=generator).double()

    monkeypatch.setattr(privacy, "_noise", noise)
    engine, heard = heard_of(2.0)
    found = audit_release(engine, heard, 128, 0)
    assert found.repeated == found.found.right == found.found.guesses
    assert found.found.lower == found.found.ceiling > found.upper
    assert not found.holds


def test_clipping_left_out_breaks_the_claim(monkeypatch):
    monkeypatch.setattr(FeaturePrivacy, "_clipped", lambda self, features: features.detach().double())
    engine, heard = heard_of(2.0)
    found = audit_release(engine, heard, 128, 0)
    assert found.repeated == 0
    assert found.distance > 1
    assert found.found.lower > found.upper
    assert not found.holds


def test_without_a_private_release_there_is_nothing_to_audit():
    engine = Engine(quick(get_method("fedin")), toy_federation(World(clients=2)))
    found = overhear(engine, engine.start())
    assert claim_of(engine.method) is None
    with pytest.raises(ConfigError, match="found no private release"):
        audit_release(found.engine, found.heard[0], 16, 0)


def test_every_method_that_calls_something_private_has_a_claim_that_is_audited():
    private = [name for name in list_methods() if get_method(name).releases_privately is not Method.releases_privately]
    assert private == ["fedin"]
    assert all(issubclass(get_method(name), ReleasesFeatures) for name in private)


def test_guesses_are_tried_in_several_numbers_and_the_error_is_divided_among_them():
    assert len(audits.SHARES) == 4
    found = audit([True] * 40, [1.0] * 40, 0.0)
    assert found.lower == found.ceiling == lower_bound(40, 40, 40, 0.0, 0.05 / 4)
