from dataclasses import replace
from functools import partial

import pytest
from torch import nn

from potluck.core.errors import ConfigError
from potluck.core.federation import empty_like
from potluck.core.method import Need
from potluck.experiment.needs import Offer, check_needs
from potluck.testing.worlds import World, toy_federation

VALIDATION = frozenset({Need.VALIDATION})


def without_validation(*clients, of=4):
    """A toy federation in which these clients have no validation part."""
    federation = toy_federation(World(clients=of))
    bare = {id: replace(federation.sites[id], validation=empty_like(federation.sites[id].train)) for id in clients}
    return Offer.of(replace(federation, sites={**federation.sites, **bare}))


def test_validation_is_promised_for_every_client():
    check_needs(VALIDATION, "Needy", without_validation())
    with pytest.raises(ConfigError, match=r"^Needy cannot run here: .*at every client, and there are none at 2; raise"):
        check_needs(VALIDATION, "Needy", without_validation(2))


def test_validation_names_some_of_the_clients_that_lack_it():
    with pytest.raises(ConfigError, match=r"none at 0, 1, 2, 3, 4 and 2 more; raise federation\.validation_fraction"):
        check_needs(VALIDATION, "Needy", without_validation(*range(7), of=8))


@pytest.mark.parametrize("frozen", [True, False])
def test_layers_that_are_frozen_may_differ_in_shape(frozen):
    def build(width):
        net = nn.Sequential(nn.Linear(10, width), nn.Linear(width, 4).requires_grad_(True), nn.Linear(4, 4))
        net[:2].requires_grad_(not frozen)
        return net

    builders = {f"toy{number}": partial(build, 8 * number) for number in (1, 2)}
    offer = Offer.of(replace(toy_federation(World()), architectures=builders))
    if frozen:
        check_needs(frozenset({Need.NESTED_LAYERS}), "Averages", offer)
    else:
        with pytest.raises(ConfigError, match=r"0\.weight has shape \(8, 10\) in toy1"):
            check_needs(frozenset({Need.NESTED_LAYERS}), "Averages", offer)
