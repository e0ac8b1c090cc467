"""Limits that a method states: which are refused, and that they can fail."""

import sys
from types import ModuleType

import pytest

from potluck.core.ground.errors import ConfigError
from potluck.methods import get_method, list_methods
from potluck.parts.privacy import FeaturePrivacy
from potluck.parts.sharing import Sharing
from potluck.testing.checks.statements import private_noise_never_repeats
from potluck.testing.limits import limits_of
from potluck.testing.worlds import quick


@pytest.fixture
def stating(monkeypatch):
    """FedIN under another name, with limits of one's own."""

    def make(*limits):
        module = ModuleType("made_up")
        module.__doc__ = "Made up.\n\nLimits\n" + "".join(f"    {limit}\n" for limit in limits)
        monkeypatch.setitem(sys.modules, "made_up", module)
        return type("MadeUp", (get_method("fedin"),), {"__module__": "made_up"})

    return make


@pytest.mark.parametrize("verb", ["equals", "approaches"])
@pytest.mark.parametrize("mine", ["", "mu=0.1 ", "noise=0.0 feature_batches=1 ", "training.lr=0.01 "])
def test_a_limit_between_a_method_and_itself_cannot_fail_and_is_refused(stating, mine, verb):
    fedin = get_method("fedin")
    (limit,) = limits_of(stating(f"{mine}{verb} fedin"))
    with pytest.raises(AssertionError, match="both sides are the same method, so it cannot fail"):
        type(limit)(limit.text, fedin, limit.mine, limit.verb, limit.theirs, limit.world).verify()


@pytest.mark.parametrize("name", list_methods())
def test_no_stated_limit_compares_a_method_with_itself(name):
    for limit in limits_of(get_method(name)):
        if limit.verb in ("equals", "approaches"):
            other, *overrides = limit.theirs
            assert quick(limit.method, limit.mine) != quick(get_method(other), overrides), limit.text


def test_a_limit_that_nobody_can_read_is_refused(stating):
    with pytest.raises(ConfigError, match="cannot read the limit 'sometimes repeats'"):
        limits_of(stating("sometimes repeats"))


OWNERS = "averages each layer over its owners"


@pytest.mark.parametrize("mine", ["", 'sharing.weighting="samples" ', 'sharing.scope="architecture" '])
def test_a_mean_of_owners_with_other_weights_than_the_stated_ones_is_noticed(stating, monkeypatch, mine):
    (limit,) = limits_of(stating(f"{mine}{OWNERS} on batchnorm=true"))
    limit.verify()
    plain = Sharing.weight
    monkeypatch.setattr(
        Sharing, "weight", lambda self, member, reply: plain(self, member, reply) + 9 * (member.id == 2)
    )
    with pytest.raises(AssertionError, match=rf"{OWNERS} on batchnorm=true: group .* differs by up to"):
        limit.verify()


@pytest.mark.parametrize("mine", ['sharing.scope="none" ', ""])
def test_a_mean_of_owners_that_can_hardly_fail_is_refused(stating, mine):
    (limit,) = limits_of(stating(f"{mine}{OWNERS}{'' if mine else ' on architectures=1'}"))
    with pytest.raises(AssertionError, match="it averages no weights" if mine else "all layers have the same owners"):
        limit.verify()


PRIVATE = "privacy.clip=1.0 privacy.epsilon=1.0 privacy.delta=1e-5 never repeats"


def test_private_noise_that_repeats_is_noticed(stating, monkeypatch):
    (limit,) = limits_of(stating(PRIVATE))
    limit.verify()
    monkeypatch.setattr("potluck.parts.privacy.urandom", lambda count: bytes(range(1, 9)) * (count // 8))
    with pytest.raises(AssertionError, match="two runs of one seed end alike, so the server knows the noise"):
        limit.verify()


def test_a_release_that_is_not_counted_is_noticed(stating, monkeypatch):
    (limit,) = limits_of(stating(PRIVATE))
    release = FeaturePrivacy.release

    def uncounted(self, client, features, count):
        found = release(self, client, features, count)
        client.releases = 0
        return found

    monkeypatch.setattr(FeaturePrivacy, "release", uncounted)
    with pytest.raises(AssertionError, match=r"no release of clients \[0, 1, 2, 3\] was counted"):
        limit.verify()


def test_a_claim_of_private_releases_that_are_not_made_is_noticed(stating):
    (limit,) = limits_of(stating("feature_training=false never repeats"))
    with pytest.raises(AssertionError, match="there are no private releases"):
        limit.verify()


def test_a_method_with_private_releases_has_to_state_the_limit(stating):
    private_noise_never_repeats(stating(PRIVATE))
    private_noise_never_repeats(get_method("fedavg"))
    with pytest.raises(AssertionError, match="states no limit `OVERRIDES never repeats`"):
        private_noise_never_repeats(stating("training.lr=0.0 stays at rest"))
