import pytest
import torch
from torch import nn

from potluck.core.federation import Federation, Site, empty_like
from potluck.core.ground.rng import Key
from potluck.core.nets.scale import FULL, Scale
from potluck.core.nets.weights import weights_of
from potluck.core.requests.examples import Examples

EXAMPLES = Examples(torch.zeros(6, 2), torch.zeros(6, dtype=torch.int64))


def small(scale=FULL):
    return nn.Sequential(nn.Linear(2, scale.of(4)), nn.BatchNorm1d(scale.of(4)))


def large():
    return nn.Linear(2, 9, bias=False)


def site(id, architecture="small", count=2, **changes):
    part = EXAMPLES.take(torch.arange(count))
    return Site(id, architecture, part, empty_like(part), empty_like(part), **changes)


def federation(*sites):
    builders = {"small": small, "large": large}
    return Federation({one.id: one for one in sites}, builders, server_architecture="large", num_classes=4)


def test_the_roster_is_in_order_of_ids():
    assert list(federation(site(3), site(0), site(11)).roster) == [0, 3, 11]


def test_a_member_is_what_the_server_knows():
    roster = federation(site(0, capacity=0.5, count=5), site(1, "large", count=3)).roster
    assert roster[0].shapes == {
        "0.weight": (4, 2),
        "0.bias": (4,),
        "1.weight": (4,),
        "1.bias": (4,),
        "1.running_mean": (4,),
        "1.running_var": (4,),
        "1.num_batches_tracked": (),
    }
    assert roster[0].parameters == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert [(m.id, m.architecture, m.capacity, m.examples) for m in roster.values()] == [
        (0, "small", 0.5, 5),
        (1, "large", 1.0, 3),
    ]
    assert roster[1].parameters == {"weight"}


def test_a_member_has_trained_parameters_buffers_and_what_is_frozen():
    def frozen():
        net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3))
        net[0].bias.requires_grad_(False)
        net[1].eval()
        return net

    one = Federation({0: site(0, "frozen")}, {"frozen": frozen}, server_architecture="frozen", num_classes=2)
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert one.roster[0].frozen == {"0.bias", *(f"1.{name}" for name in statistics)}
    assert one.roster[0].parameters == {"0.weight", "1.weight", "1.bias", "2.weight", "2.bias"}
    assert one.roster[0].buffers == {f"2.{name}" for name in statistics}


@pytest.mark.parametrize(("whole", "trains"), [(True, [True] * 4), (False, [True, True, False, True])])
def test_a_net_that_is_handed_out_in_evaluation_mode_as_a_whole_is_trained(whole, trains):
    def pretrained():
        net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU())
        (net if whole else net[1]).eval()
        return net

    one = Federation({0: site(0, "net")}, {"net": pretrained}, server_architecture="net", num_classes=2)
    assert [module.training for module in one.build("net", Key((0,))).modules()] == trains


def test_a_tied_parameter_has_one_name_in_the_roster():
    def tied():
        first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        second.weight = first.weight
        return nn.Sequential(first, second)

    one = Federation({0: site(0, "tied")}, {"tied": tied}, server_architecture="tied", num_classes=2)
    assert one.roster[0].parameters == one.roster[0].shapes.keys() == {"0.weight"}


@pytest.mark.usefixtures("global_generator_unchanged")
def test_building_depends_on_the_key_alone():
    world = federation(site(0))
    one, again, other = (weights_of(world.build("small", Key((k,))))["0.weight"] for k in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.usefixtures("global_generator_unchanged")
def test_the_roster_draws_nothing_from_the_global_generator():
    assert federation(site(0)).roster


def test_no_name_builds_the_servers_architecture():
    assert federation(site(0)).build(None, Key((1,))).out_features == 9


def test_build_asks_the_builder_for_a_scale_unless_it_is_full():
    world = federation(site(0))
    assert world.build("small", Key((1,)), Scale(0.5))[0].out_features == 2
    assert world.build("large", Key((1,)), FULL).out_features == 9


def test_the_input_shape_is_that_of_the_clients():
    assert federation(site(3), site(0)).input_shape == (2,)


@pytest.mark.parametrize("capacity", [0.0, -1.0, 1.01, float("nan")])
def test_a_capacity_is_a_share(capacity):
    with pytest.raises(ValueError, match=rf"^capacity of client 4: expected above 0 and at most 1, found {capacity}$"):
        site(4, capacity=capacity)


def test_none_of_a_kind_is_empty():
    none = empty_like(EXAMPLES)
    assert len(none) == 0
    assert len(empty_like(none)) == 0
    assert len(none.labels) == 0
