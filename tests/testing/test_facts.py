"""What a method is like to run is what the engine sees."""

import pytest

from potluck.core.method import on_client
from potluck.engine.executors.hearing import Hearing
from potluck.engine.rounds.engine import Engine
from potluck.methods import get_method, list_methods
from potluck.testing.facts import Behaviour, behaviour_of, facts_of, handlers
from potluck.testing.worlds import World, quick, run_rounds, toy_federation


@pytest.mark.slow
@pytest.mark.rotates
@pytest.mark.parametrize("name", list_methods())
def test_exchanges__are_the_handlers_that_a_round_asks(name):
    method = get_method(name)
    hearing, world = Hearing(), World(batchnorm=True)
    run_rounds(Engine(quick(method), toy_federation(world.fit_for(quick(method))), executor=hearing), 2)
    assert tuple(dict.fromkeys(call.handler for call, _ in hearing.exchanges)) == facts_of(method).exchanges


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keeps", "stacks"),
    [
        ("scaffold", "control", True),
        ("fedavg", "nothing", True),
        ("local", "model", True),
        ("fedkd", "common, model, modules, version", True),
        ("fedgen", "nothing", False),
        ("fedkemf", "model", False),
    ],
)
def test_behaviour_of__is_what_clients_store_and_whether_they_stack(name, keeps, stacks):
    assert behaviour_of(get_method(name)) == Behaviour(keeps, stacks)


def test_exchanges__of_a_derived_method_follow_its_bases():
    class More(get_method("heterofl")):
        @on_client
        def count(self, client, message):
            return message

    assert handlers(More) == ("local_update", "measure", "count")
