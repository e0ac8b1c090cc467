"""Every method over Flower's messages, with clients that keep their own data and state, gives the same bytes."""

import re
from dataclasses import replace

import pytest
import torch
from flwr.app import Message

from potluck.core.federation import Site
from potluck.core.needs import Offer
from potluck.core.requests.examples import Examples
from potluck.engine.client.runtime import ClientRuntime
from potluck.engine.rounds.engine import Engine
from potluck.experiment.settings.schema import RoundsClose
from potluck.flower.node.service import Node
from potluck.flower.node.store import NodeStore
from potluck.flower.server.elsewhere import KeptElsewhere
from potluck.flower.server.grid import GridExecutor
from potluck.flower.server.nodes import Nodes
from potluck.flower.server.serve import RemoteFederation
from potluck.flower.wire.envelope import unwrap, wrap
from potluck.flower.wire.schemas import from_outcome, to_job
from potluck.methods import get_method, list_methods
from potluck.testing.loopback import Loopback
from potluck.testing.wire import documented
from potluck.testing.worlds import World, assigned, packed_state, quick, run_rounds, toy_federation

ROUNDS = 2


def at_home(subject, federation, client, folder):
    """What a client's node does with a message; of the others it has nothing."""
    own = replace(federation, sites={client: federation.sites[client]})
    node = Node(client, own, ClientRuntime(subject, own, seed=0), NodeStore(folder))

    def answer(message):
        return Message(wrap(*from_outcome(node.execute(to_job(unwrap(message.content))))), reply_to=message)

    return answer


def as_the_server_sees(federation, builds, networks=True):
    """The same clients, with as many examples and nothing in them.

    Their networks are known if the method says that it builds them; that of the common or global model always is. If
    clients have no `networks`, their shapes are none.
    """

    def empty(examples):
        return Examples(torch.empty(len(examples), 0), torch.empty(len(examples), 0))

    sites = {
        client: Site(client, site.architecture, empty(site.train), empty(site.validation), empty(site.test))
        for client, site in federation.sites.items()
    }
    known = federation.architectures if builds else {federation.server_architecture}
    return RemoteFederation(
        sites=sites,
        architectures={name: of if name in known else unknown_here for name, of in federation.architectures.items()},
        server_architecture=federation.server_architecture,
        num_classes=federation.num_classes,
        public=federation.public,
        test=federation.test,
        members=federation.roster if networks else {id: no_network(of) for id, of in federation.roster.items()},
        shape=federation.input_shape,
    )


def no_network(member):
    """The member as a node without a network introduces itself."""
    return replace(member, architecture="forest", shapes={}, parameters=frozenset(), frozen=frozenset())


BUILT = "the server has built a client's network"


def unknown_here(**options):
    raise AssertionError(BUILT)


@pytest.mark.slow
@pytest.mark.rotates
@pytest.mark.parametrize(
    ("name", "frozen"), [*((name, False) for name in list_methods()), ("local", True), ("scaffold", True)]
)
def test_a_method_does_not_notice_where_its_clients_are(name, frozen, tmp_path):
    compare_here_and_there(quick(get_method(name)), frozen, tmp_path)


@pytest.mark.slow
@pytest.mark.rotates
@pytest.mark.parametrize(
    ("name", "variant"),
    [(name, variant) for name in list_methods() for variant in get_method(name).variants],
)
def test_no_option_notices_where_the_clients_are(name, variant, tmp_path):
    method = get_method(name)
    subject = quick(method, assigned(method.variants[variant]))
    if subject.releases_privately:
        pytest.skip("private noise never repeats")
    compare_here_and_there(subject, False, tmp_path)


@pytest.mark.slow
@pytest.mark.rotates
@pytest.mark.parametrize("name", list_methods())
def test_a_method_says_whether_the_server_builds_clients_networks(name, tmp_path):
    """Where it need not, nodes with networks of their own can take part."""
    method = get_method(name)
    options = [(), *(assigned(variant) for variant in method.variants.values())]
    builds = any(asks_about_networks(quick(method, option)) for option in options)
    try:
        compare_here_and_there(quick(method), False, tmp_path, builds=False)
    except AssertionError as error:
        if BUILT not in str(error):
            raise
        builds = True
    assert method.builds_clients_models == builds


ANY_MODEL = [name for name in list_methods() if not get_method(name).needs_networks]
PREDICTIONS = {"public", "integer", "|z|", "classes", "present", "flag", "nothing"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ANY_MODEL)
def test_the_server_of_a_method_for_any_model_asks_nothing_about_networks(name, tmp_path):
    method = get_method(name)
    assert not method.builds_clients_models
    compare_here_and_there(quick(method), False, tmp_path, networks=False)
    for variant, options in method.variants.items():
        compare_here_and_there(quick(method, assigned(options)), False, tmp_path / variant, networks=False)


@pytest.mark.parametrize("name", ANY_MODEL)
def test_a_method_for_any_model_sends_predictions_classes_and_rows_alone(name):
    for wire in documented(get_method(name)):
        formulas = " ".join([*wire.down.values(), *wire.up.values()])
        assert {*re.findall(r"[^\s()*+]+", formulas)} <= PREDICTIONS, name


def asks_about_networks(subject):
    """Whether something that a method needs can only be found in clients' networks."""
    names = ("one", "other")
    offer = Offer(
        dict.fromkeys(names, unknown_here),
        dict(enumerate(names)),
        "one",
        public=True,
        unvalidated=(),
        public_labels=True,
    )
    try:
        return any(need.check(offer) for need in subject.needs())
    except AssertionError:
        return True


def compare_here_and_there(subject, frozen, tmp_path, builds=None, networks=True):
    """A run in one process and one over messages have the same states, evaluations and clients' stores.

    In the second one the server knows clients' networks if it `builds` them; None for what the method says. It knows
    their shapes if there are `networks`.
    """
    federation = toy_federation(World(batchnorm=True, frozen=frozen).fit_for(subject))
    here = Engine(subject, federation)
    nodes = {
        f"node{client}": at_home(subject, federation, client, tmp_path / str(client)) for client in federation.sites
    }
    names = Nodes(Loopback(nodes), {client: f"node{client}" for client in federation.sites})
    executor = GridExecutor(names, {}, RoundsClose(), poll=0.0)
    seen = as_the_server_sees(federation, subject.builds_clients_models if builds is None else builds, networks)
    there = Engine(subject, seen, store=KeptElsewhere(), executor=executor)
    states = [run_rounds(engine, ROUNDS) for engine in (here, there)]
    assert packed_state(states[0]) == packed_state(states[1])
    parts = dict.fromkeys(federation.sites, ("own", "validation", "common"))
    assert here.evaluate(states[0], parts) == there.evaluate(states[1], parts)
    assert here.store.save().states == there.store.save().states
