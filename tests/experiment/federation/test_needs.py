from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from potluck.core.federation import Site, empty_like
from potluck.core.ground.errors import ConfigError
from potluck.core.needs import Need, Offer
from potluck.core.nets.scale import FULL
from potluck.core.requests.examples import Examples
from potluck.experiment.federation.needs import check_needs
from potluck.methods import get_method
from potluck.testing.worlds import World, toy_federation

VALIDATION = frozenset({Need.VALIDATION})
TOKENS = Examples(torch.ones(6, 10, dtype=torch.int64), torch.arange(6) % 4)


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


def test_need__of_a_methods_own_is_checked_with_its_own_advice():
    def odd_one_out(offer):
        return f"there are {len(offer.assigned)} clients" if len(offer.assigned) % 2 else None

    even = Need("an even number of clients", odd_one_out, "change federation.clients by one")
    check_needs({even}, "Paired", without_validation(of=4))
    with pytest.raises(
        ConfigError, match=r"^Paired cannot run here: there are 3 clients; change federation\.clients by"
    ):
        check_needs({even}, "Paired", without_validation(of=3))
    both = {even, Need.VALIDATION}
    with pytest.raises(ConfigError, match=r"none at 1; raise .*; there are 3 clients; change"):
        check_needs(both, "Paired", without_validation(1, of=3))


def grows(scale=FULL):
    """A net whose one layer has another shape in the shallower net."""
    return nn.Linear(2, scale.depth or 3)


def in_groups(scale=FULL):
    """A convolution that reads other channels in a narrower net, since it has two groups in all."""
    width = scale.of(8)
    return nn.Sequential(
        nn.Unflatten(1, (1, 10)),
        nn.Conv1d(1, width, 1),
        nn.Conv1d(width, width, 10, groups=2),
        nn.Flatten(1),
        nn.Linear(width, 4),
    )


@pytest.mark.parametrize(
    ("need", "changes", "complaint"),
    [
        (Need.ONE_ARCHITECTURE, {}, r"client 0 has toy1 and client 1 has toy2; give federation\.models one name"),
        (Need.PUBLIC_DATA, {"public": None}, "the federation has none; set federation.public to 'holdout'"),
        (
            Need.PUBLIC_DATA,
            {"public": empty_like(toy_federation(World()).public)},
            "public data, and the federation has none",
        ),
        (
            Need.SPLIT_MODEL,
            {"architectures": {"toy1": nn.Flatten, "toy2": nn.Flatten}},
            "toy1: Flatten cannot be split",
        ),
        (
            Need.WIDTH_SLICES,
            {"architectures": {"toy1": nn.Flatten, "toy2": nn.Flatten}},
            "toy1, which has no slices: Flatten has no hidden",
        ),
        (
            Need.WIDTH_SLICES,
            {"architectures": {"toy1": in_groups, "toy2": in_groups}},
            "no slice of itself: 2.weight has the shape of a",
        ),
        (
            Need.DEPTH_PREFIXES,
            {"architectures": {"toy1": nn.Flatten, "toy2": nn.Flatten}},
            "depth of toy1, which has no blocks to leave out; choose another model",
        ),
        (
            Need.DEPTH_PREFIXES,
            {"architectures": {"toy1": grows, "toy2": grows}},
            "toy1 at depth 1 is no part of itself; choose",
        ),
        (
            Need.REAL_INPUTS,
            {"sites": {0: Site(0, "toy1", TOKENS, TOKENS, TOKENS)}},
            "one tensor of real numbers, and those here are whole numbers; use a method that leaves inputs to",
        ),
        (Need.REAL_INPUTS, {"public": TOKENS}, "real numbers, and those here are whole numbers"),
    ],
)
def test_need__says_what_was_found_and_what_to_do(need, changes, complaint):
    federation = toy_federation(World())
    assert need.check(Offer.of(toy_federation(World(architectures=1)))) is None
    with pytest.raises(ConfigError, match=complaint):
        check_needs({need}, "Needy", Offer.of(replace(federation, **changes)))


def test_need__has_a_text_of_its_own_for_people():
    named = [value for value in vars(Need).values() if isinstance(value, Need)]
    assert len({str(need) for need in named}) == len(named) == 15


def whole_numbers(federation):
    """The same federation whose inputs are tokens."""
    sites = {id: replace(site, train=TOKENS, validation=TOKENS, test=TOKENS) for id, site in federation.sites.items()}
    return replace(federation, sites=sites, public=TOKENS, test=TOKENS)


@pytest.mark.parametrize("name", ["fedftg", "fedktl", "fedmk", "fedorion"])
def test_methods_that_make_inputs_are_refused_where_inputs_are_tokens(name):
    needs, federation = get_method(name)().needs(), toy_federation(World())
    check_needs(needs, name, Offer.of(federation))
    with pytest.raises(ConfigError, match=rf"^{name} cannot run here: it works on inputs themselves.*$"):
        check_needs(needs, name, Offer.of(whole_numbers(federation)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fedmk", r"as one tensor of real numbers, and those here have names: age \(10\)"),
        ("fedepth", r"it reckons with inputs of one tensor, and those here have names: age \(10\)"),
    ],
)
def test_methods_that_need_one_tensor_are_refused_where_inputs_have_names(name, expected):
    world = World().fit_for(get_method(name)())
    named = Examples({"age": torch.zeros(4, 10)}, torch.arange(4))
    federation = toy_federation(world)
    sites = {id: replace(site, train=named, validation=named, test=named) for id, site in federation.sites.items()}
    with pytest.raises(ConfigError, match=expected):
        check_needs(get_method(name)().needs(), name, Offer.of(replace(federation, sites=sites)))


def test_real_inputs__are_what_the_model_reads_and_not_what_is_stored():
    images = Examples(torch.zeros(4, 10, dtype=torch.uint8), torch.arange(4), lambda inputs, rng: inputs / 255)
    federation = toy_federation(World(clients=1))
    site = replace(federation.sites[0], train=images, validation=images, test=images)
    assert Offer.of(replace(federation, sites={0: site})).real_inputs
