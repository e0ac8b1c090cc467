from dataclasses import dataclass

import pytest
import torch
from torch import nn

from potluck.core.federation import Federation, Site, empty_like
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import Key
from potluck.core.message import Message
from potluck.core.method import Need, runs_on_client
from potluck.core.nets.scale import FULL
from potluck.core.nets.weights import buffers_of, load, parameters_of
from potluck.core.requests.examples import Examples
from potluck.core.roles import Client, Replies, Server
from potluck.parts.sharing import Averaging, SharesWeights, Sharing, WholeModels, norm

EXAMPLES = Examples(torch.arange(16.0).view(8, 2), torch.zeros(8, dtype=torch.int64))
STATISTICS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


def net(*names):
    """A BatchNorm and some layers, so that a deeper net has the layers of a shallower one."""
    model = nn.Sequential()
    model.add_module("norm", nn.BatchNorm1d(2, affine=False))
    for name in names:
        model.add_module(name, nn.Linear(2, 2, bias=False))
    return model


BUILDERS = {"shallow": lambda: net("first"), "deep": lambda: net("first", "second")}


def federation(*architectures):
    """One client an architecture, the first with one example, the second with two ..."""
    parts = [EXAMPLES.take(torch.arange(count)) for count in range(1, 1 + len(architectures))]
    sites = {
        id: Site(id, architecture, parts[id], empty_like(EXAMPLES), empty_like(EXAMPLES))
        for id, architecture in enumerate(architectures)
    }
    return Federation(sites, BUILDERS, architectures[0], num_classes=2)


def server(world):
    def build(architecture=None, scale=FULL, draw=""):
        return world.build(architecture, Key(("initial", architecture or world.server_architecture)), scale)

    return Server(world.roster, torch.Generator(), None, 2, (1,), None, build, lambda fit, key: None, Key(()), None)


def client(world, id=0, value=0.0):
    """A client whose parameters all have one value."""
    site = world.sites[id]
    model = world.build(site.architecture, Key(("client", id)))
    load(model, {n: torch.full_like(w, value) for n, w in parameters_of(model).items()}, partial=True)
    shared = {
        "criterion": nn.functional.cross_entropy,
        "num_classes": 2,
        "_build": None,
        "public": None,
        "architecture": site.architecture,
        "_module": None,
    }
    return Client(id, model, {}, site.train, site.validation, capacity=1.0, rng=torch.Generator(), **shared)


def replies(sharing, world, values):
    """The replies of clients whose parameters have these values."""
    return Replies({id: sharing.reply(client(world, id, value)) for id, value in enumerate(values)}, {})


def test_each_scope_says_what_it_needs():
    assert Sharing("layer").needs() == {Need.NESTED_LAYERS}
    assert Sharing("model").needs() == {Need.ONE_ARCHITECTURE}
    assert Sharing("architecture").needs() == Sharing("none").needs() == frozenset()


def test_one_pool_starts_with_the_largest_architectures_layers():
    host = server(federation("shallow", "deep"))
    pool = Sharing().initial(host)
    assert list(pool) == ["all"]
    deep = host.build("deep").state_dict()
    assert pool["all"].keys() == deep.keys()
    assert all(torch.equal(pool["all"][name], deep[name]) for name in deep)


def test_each_architecture_may_have_its_own_pool():
    host = server(federation("shallow", "deep"))
    pool = Sharing("architecture").initial(host)
    assert pool.keys() == {"shallow", "deep"}
    assert torch.equal(pool["shallow"]["first.weight"], host.build("shallow").first.weight)


def test_a_client_is_sent_the_layers_it_owns():
    world = federation("shallow", "deep")
    shared = Sharing().message(Sharing().initial(server(world)), world.roster[0])
    assert list(shared["weights"]) == ["first.weight"]
    assert shared["buffers"].keys() == STATISTICS


@pytest.mark.parametrize("buffers", ["local", "drop"])
def test_buffers_that_are_not_averaged_are_never_sent(buffers):
    world, sharing = federation("shallow"), Sharing(buffers=buffers)
    assert "buffers" not in sharing.message(sharing.initial(server(world)), world.roster[0])
    assert "buffers" not in sharing.reply(client(world))


@pytest.mark.parametrize(("weighting", "expected"), [("samples", (1 * 3 + 2 * 6) / 3), ("uniform", 4.5)])
def test_shared_layers_are_averaged_and_others_belong_to_their_owners(weighting, expected):
    world, sharing = federation("shallow", "deep"), Sharing(weighting=weighting)
    start = sharing.initial(server(world))
    pool = sharing.merge(start, replies(sharing, world, [3.0, 6.0]), world.roster)
    assert pool["all"]["first.weight"].mean().item() == pytest.approx(expected)
    assert pool["all"]["second.weight"].unique().tolist() == [6.0]


def test_architectures_are_averaged_apart():
    world, sharing = federation("shallow", "deep", "shallow"), Sharing("architecture", "uniform")
    start = sharing.initial(server(world))
    pool = sharing.merge(start, replies(sharing, world, [3.0, 6.0, 5.0]), world.roster)
    assert pool["shallow"]["first.weight"].unique().tolist() == [4.0]
    assert pool["deep"]["first.weight"].unique().tolist() == [6.0]


def test_what_nobody_sent_is_unchanged():
    world, sharing = federation("shallow", "deep"), Sharing()
    start = sharing.initial(server(world))
    before = start["all"]["first.weight"].clone()
    pool = sharing.merge(start, replies(sharing, world, [3.0]), world.roster)
    assert torch.equal(pool["all"]["second.weight"], start["all"]["second.weight"])
    assert torch.equal(start["all"]["first.weight"], before)


def test_averaged_buffers_are_sent_and_merged():
    world, sharing = federation("shallow"), Sharing()
    one = client(world)
    one.model.norm(EXAMPLES.inputs)
    pool = sharing.merge(sharing.initial(server(world)), Replies({0: sharing.reply(one)}, {}), world.roster)
    assert torch.equal(pool["all"]["norm.running_mean"], one.model.norm.running_mean)
    other = client(world)
    sharing.receive(other, sharing.message(pool, world.roster[0]))
    assert all(torch.equal(b, buffers_of(one.model)[name]) for name, b in buffers_of(other.model).items())


def test_local_buffers_stay_in_the_clients_state():
    world, sharing = federation("shallow"), Sharing(buffers="local")
    one = client(world)
    one.model.norm(EXAMPLES.inputs)
    sharing.reply(one)
    next_time = client(world)
    next_time.state.update(one.state)
    sharing.receive(next_time, Message(weights=parameters_of(one.model)))
    assert torch.equal(next_time.model.norm.running_var, one.model.norm.running_var)


def test_dropped_buffers_are_measured_on_the_clients_data_when_its_model_is_judged():
    world, sharing = federation("shallow", "shallow", "shallow"), Sharing(buffers="drop")
    one = client(world, 2)
    model = sharing.deploy(one, Message(weights=parameters_of(one.model)))
    assert torch.allclose(model.norm.running_mean, EXAMPLES.inputs[:3].mean(0))


def test_a_global_model_needs_one_architecture():
    sharing = Sharing()
    mixed = server(federation("shallow", "deep"))
    assert sharing.global_model(sharing.initial(mixed), mixed) is None
    alike = server(federation("shallow", "shallow"))
    pool = sharing.initial(alike)
    pool["all"]["first.weight"].fill_(7)
    assert sharing.global_model(pool, alike).first.weight.unique().tolist() == [7.0]


@pytest.mark.parametrize("buffers", ["local", "drop"])
def test_a_global_model_needs_the_buffers(buffers):
    sharing = Sharing(buffers=buffers)
    host = server(federation("shallow"))
    assert sharing.global_model(sharing.initial(host), host) is None


# Scope "none"


def test_where_nobody_averages_messages_have_what_the_method_adds_and_no_weights():
    world, sharing = federation("shallow", "deep"), Sharing("none")
    host, one = server(world), client(world, 0, 3.0)
    assert sharing.initial(host) == {}
    sent = sharing.message({}, world.roster[0], lesson=7, name=lambda member: member.architecture)
    assert dict(sent) == {"lesson": 7, "name": "shallow"}
    assert dict(sharing.reply(one, gain=2.0)) == {"gain": 2.0}
    assert sharing.expected(world.roster[0], sent) == {}


def test_where_nobody_averages_a_client_keeps_its_own_weights_and_there_is_no_model_of_all():
    world, sharing = federation("shallow", "shallow"), Sharing("none", buffers="drop")
    host, one = server(world), client(world, 0, 3.0)
    statistics = buffers_of(one.model)
    sharing.receive(one, Message())
    assert sharing.deploy(one, Message()) is one.model
    assert one.model.first.weight.unique().tolist() == [3.0]
    assert all(torch.equal(buffer, statistics[name]) for name, buffer in buffers_of(one.model).items())
    assert sharing.merge({}, replies(sharing, world, [3.0, 6.0]), world.roster) == {}
    assert sharing.global_model({}, host) is None


# Owners, and weights of one's own


def test_owners__counts_the_clients_that_own_each_trained_layer():
    roster = federation("shallow", "deep", "deep").roster
    assert Sharing().owners(roster) == {"all": {"first.weight": 3, "second.weight": 2}}
    assert Sharing().owners(roster, among={0, 2}) == {"all": {"first.weight": 2, "second.weight": 1}}
    assert Sharing().owners(roster, weight=lambda member: member.examples) == {
        "all": {"first.weight": 1 + 2 + 3, "second.weight": 2 + 3}
    }


def test_owners__are_counted_within_each_group():
    roster = federation("shallow", "deep", "deep").roster
    assert Sharing("architecture").owners(roster) == {
        "shallow": {"first.weight": 1},
        "deep": {"first.weight": 2, "second.weight": 2},
    }
    assert Sharing("architecture").owners(roster, among=[0]) == {"shallow": {"first.weight": 1}}


def test_means__weigh_a_client_in_each_layer_as_a_share_by_layer_says():
    world, sharing = federation("shallow", "deep", "deep"), Sharing()
    shares = {0: {"first.weight": 1.0}, 1: {"first.weight": 3.0, "second.weight": 1.0},
              2: {"first.weight": 4.0, "second.weight": 7.0}}  # fmt: skip
    told = replies(sharing, world, [2.0, 4.0, 8.0])
    means = sharing.means(told, world.roster, weights=lambda member, reply: shares[member.id])
    found = {name: tensor.unique().item() for name, tensor in means.of("weights")["all"].items()}
    assert found == pytest.approx({"first.weight": (2 + 12 + 32) / 8, "second.weight": (4 + 56) / 8})
    assert means.weights("weights") == {"all": {"first.weight": 8.0, "second.weight": 8.0}}


@pytest.mark.parametrize("drawn", [[0], [0, 1], [1, 2], [0, 1, 2]])
def test_means__by_shares_of_all_owners_tell_which_share_of_a_layer_answered(drawn):
    world, sharing = federation("shallow", "deep", "deep"), Sharing()
    owners = sharing.owners(world.roster)["all"]
    told = Replies({id: sharing.reply(client(world, id, float(id))) for id in drawn}, {})
    means = sharing.means(
        told, world.roster, weights=lambda member, reply: {name: 1 / owners[name] for name in member.parameters}
    )
    deep = [id for id in drawn if id > 0]
    shares = {"first.weight": len(drawn) / 3, **({"second.weight": len(deep) / 2} if deep else {})}
    assert means.weights("weights")["all"] == pytest.approx(shares)
    of = means.of("weights")["all"]
    assert of["first.weight"].mean().item() == pytest.approx(sum(drawn) / len(drawn))
    assert ("second.weight" in of) == bool(deep)


def test_means__let_each_entry_have_weights_of_its_own():
    world, sharing = federation("shallow", "shallow"), Sharing()  # of one and two examples
    told = {id: sharing.reply(client(world, id, value), extra=value) for id, value in enumerate([3.0, 6.0])}
    means = sharing.means(Replies(told, {}), world.roster, "weights", extra=lambda member, reply: 1.0)
    assert means.of("weights")["all"]["first.weight"].mean().item() == pytest.approx(5.0)
    assert means.of("extra")["all"]["first.weight"].item() == pytest.approx(4.5)


def test_zeros__are_of_the_trained_layers_and_of_each_group():
    world = federation("shallow", "deep")
    for sharing in (Sharing(), Sharing("architecture")):
        pool = sharing.initial(server(world))
        zeros = sharing.zeros(pool, world.roster)
        trained = {group: {name for name in pool[group] if "weight" in name} for group in pool}
        assert {group: set(found) for group, found in zeros.items()} == trained
        assert not any(tensor.any() for found in zeros.values() for tensor in found.values())


def test_norm__is_that_of_all_tensors_of_all_groups():
    assert norm({"a": {"x": torch.tensor([3.0])}, "b": {"y": torch.tensor([[4.0]]), "z": torch.tensor(12.0)}}) == 13


@dataclass(frozen=True)
class State:
    weights: dict


@dataclass(frozen=True)
class Shares(SharesWeights[State]):
    """Only its inference half matters here."""

    sharing: Sharing = Sharing()


def test_a_method_that_shares_weights_is_judged_by_what_the_pool_holds():
    world, method = federation("shallow", "shallow"), Shares()
    host = server(world)
    state = State(method.sharing.initial(host))
    state.weights["all"]["first.weight"].fill_(7)
    one = client(world, 1)
    model = method.inference_model(one, method.inference_message(state, 1, host))
    assert model.first.weight.unique().tolist() == [7.0]
    assert method.global_model(state, host).first.weight.unique().tolist() == [7.0]
    assert runs_on_client(method.inference_model)


def test_a_method_that_shares_weights_keeps_no_model_and_needs_what_its_scope_needs():
    assert not Shares().keeps_model
    assert Shares(Sharing("none")).keeps_model
    assert Shares(Sharing("model")).needs() == {Need.ONE_ARCHITECTURE}


@dataclass(frozen=True)
class Averager(Shares):
    sharing: Averaging = Sharing()


@dataclass(frozen=True)
class Predicting(Shares):
    sharing: WholeModels = Sharing("architecture")


def test_a_method_says_in_an_annotation_which_sharings_it_refuses():
    assert Averager(Sharing("model")).sharing.averages
    with pytest.raises(ConfigError, match=r"^sharing\.scope: expected one that averages, found 'none'$"):
        Averager(Sharing("none"))
    assert Predicting(Sharing("architecture", "uniform")).sharing.weighting == "uniform"
    with pytest.raises(ConfigError, match=r"^sharing\.scope: expected 'architecture', found 'layer'$"):
        Predicting(Sharing("layer"))
    expected = "'average', since the server predicts with clients' models"
    with pytest.raises(ConfigError, match=rf"^sharing\.buffers: expected {expected}, found 'drop'$"):
        Predicting(Sharing("architecture", buffers="drop"))
