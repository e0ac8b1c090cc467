"""What a method's documentation says of running it is what the engine sees."""

import sys
from types import ModuleType

import pytest

from potluck.core.method import on_client
from potluck.engine.rounds.engine import Engine
from potluck.methods import get_method, list_methods
from potluck.testing.facts import facts_of, handlers, keeps_what_it_says, stacks_as_it_says, stated
from potluck.testing.hearing import Hearing
from potluck.testing.worlds import World, quick, run_rounds, toy_federation


def saying(base, **lines):
    """A method that behaves as another one, and states these facts."""
    module = ModuleType("stating")
    text = "\n".join(f"    {head} {said}" for head, said in lines.items())
    module.__doc__ = f"A method.\n\nWire\n    down nothing\n    up nothing\n\nFacts\n{text}\n"
    sys.modules["stating"] = module
    return type("Saying", (get_method(base),), {"__module__": "stating"})


@pytest.fixture(autouse=True)
def forget():
    yield
    sys.modules.pop("stating", None)


@pytest.mark.rotates
@pytest.mark.parametrize("name", list_methods())
def test_exchanges__are_the_handlers_that_a_round_asks(name):
    method = get_method(name)
    hearing, world = Hearing(), World(batchnorm=True)
    run_rounds(Engine(quick(method), toy_federation(world.fit_for(quick(method))), executor=hearing), 2)
    assert tuple(dict.fromkeys(call.handler for call, _ in hearing.exchanges)) == facts_of(method).exchanges


@pytest.mark.parametrize("name", list_methods())
def test_every_method_states_all_facts(name):
    said = stated(get_method(name))
    assert set(said) == {"keeps", "stacks"}
    assert said["stacks"] == "yes" or said["stacks"].startswith("no: ")


@pytest.mark.parametrize(
    ("base", "keeps", "found"),
    [
        ("scaffold", "nothing", "found control"),
        ("fedavg", "model", "found nothing"),
        ("local", "nothing", "found model"),
    ],
)
def test_what_clients_store_is_compared_with_what_is_said(base, keeps, found):
    lying = saying(base, keeps=keeps, stacks="yes")
    with pytest.raises(AssertionError, match=found):
        keeps_what_it_says(lying)


@pytest.mark.parametrize(("base", "said"), [("fedgen", "yes"), ("fedavg", "no: it draws")])
def test_stacking_is_tried(base, said):
    with pytest.raises(AssertionError, match="Facts: stacks"):
        stacks_as_it_says(saying(base, keeps="nothing", stacks=said))


def test_a_section_that_leaves_a_fact_out_is_refused():
    with pytest.raises(AssertionError, match="expected each of keeps, stacks"):
        stated(saying("fedavg", keeps="nothing"))


def test_exchanges__of_a_derived_method_follow_its_bases():
    class More(get_method("heterofl")):
        @on_client
        def count(self, client, message):
            return message

    assert handlers(More) == ("local_update", "measure", "count")
