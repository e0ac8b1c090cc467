"""The Wire section is read, evaluated and compared; what cannot be is an error and never passed over."""

import re
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from potluck.core.message import Message
from potluck.core.method import Method, on_client
from potluck.engine.rounds.engine import Engine
from potluck.methods import get_method, list_methods
from potluck.testing.checks.statements import sends_what_it_documents
from potluck.testing.limits import section
from potluck.testing.wire import SYMBOLS, WirePlace, documented, evaluated
from potluck.testing.worlds import World, quick, toy_federation


@dataclass(frozen=True)
class State:
    table: torch.Tensor


@dataclass(frozen=True)
class Sends(Method[State]):
    """Sends five numbers and a counter down, `pairs` features up."""

    pairs: int = 3

    def init(self, server):
        return State(torch.zeros(5))

    def round(self, state, cohort, server):
        cohort.ask(self.work, Message(table=state.table, round=1))
        return state

    @on_client
    def work(self, client, message):
        return Message(features=torch.zeros(self.pairs, 16))


@pytest.fixture
def sending(monkeypatch):
    """The method above with a Wire section of one's own."""

    def make(*lines):
        module = ModuleType("sending")
        module.__doc__ = "A method.\n\nWire\n" + "".join(f"    {line}\n" for line in lines)
        monkeypatch.setitem(sys.modules, "sending", module)
        monkeypatch.setattr(Sends, "__module__", "sending")
        return Sends

    return make


DOWN, UP = "down      table |table|, round 1", "up        features pairs * |h|"


@pytest.mark.parametrize(
    "lines",
    [
        (DOWN, UP),
        ("down      table at most 2 * |table|, round 1", UP),
        (DOWN, "up        features pairs*(|h| + 0 * flag)"),
        (DOWN, UP, "with      pairs=4 also: up features 4 * |h|"),
        (DOWN, UP, "with      pairs=4 also:", "          up features", "          4 * |h|"),
    ],
)
def test_a_true_section_passes(sending, lines):
    sends_what_it_documents(sending(*lines))


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ((DOWN, "up        features pairs * |z|"), "up: features is 768 bytes, documented pairs * |z|, that is 192"),
        (("down      table |table|, round 2", UP), "down: round is 32 bytes, documented 2, that is 64"),
        (("down      table at most 19 * flag, round 1", UP), "down: table is 80 bytes, documented at most 19"),
        ((DOWN, "up        features 3 * |v|"), "'3 * |v|' has '|v|', which is not a symbol; known: |w|, "),
        ((DOWN, "up        features rows * |h|"), "'rows * |h|' has 'rows', which is not a symbol"),
        ((DOWN, "up        features pairs - |h|"), "'pairs - |h|' is not a formula"),
        ((DOWN, "up        features pairs |h|"), "'pairs |h|' is not a formula"),
        ((DOWN, "up        features"), "up: found 'features'; expected 'NAME FORMULA'"),
        ((DOWN, "up        nothing"), "up: documented [], sent ['features']"),
        ((DOWN,), "one line that starts with 'down', one with 'up'"),
        ((DOWN, UP, "sharing   both ways |w|"), "found 'sharing both ways |w|'; expected a line that starts with"),
        ((DOWN, UP, "with      pairs=4: up features |h|"), "expected 'OVERRIDES also: down ...; up ...'"),
        ((DOWN, UP, "with      pairs=4 also: up features 3 * |h|"), "up: features is 1024 bytes"),
    ],
)
def test_a_section_that_is_false_or_unreadable_fails(sending, lines, complaint):
    with pytest.raises(AssertionError, match=re.escape(complaint)):
        sends_what_it_documents(sending(*lines))


@pytest.mark.rotates
@pytest.mark.parametrize("name", list_methods())
def test_every_formula_of_every_method_is_evaluated(name):
    method, formulas = get_method(name)(), list[str]()
    for wire in documented(type(method)):
        subject = quick(type(method), wire.overrides)
        engine = Engine(subject, toy_federation(World().fit_for(subject)))
        place, found = WirePlace(engine, engine.start(), engine.federation.sites[1]), (wire.down, wire.up)
        said = [formula for way in found for formula in way.values()]
        assert all(evaluated(formula.removeprefix("at most "), place) >= 0 for formula in said)
        formulas += said
    words = [line.split(" ", 1)[1].split("also:")[-1] for line in section(type(method), "Wire")]
    entries = [entry for line in words for entry in re.split("[,;]", line) if entry.strip() != "nothing"]
    assert all(any(entry.strip().endswith(formula) for formula in formulas) for entry in entries)


def test_symbols_are_what_they_say():
    engine = Engine(Sends(), toy_federation(World(labels=2, batchnorm=True)))
    at = WirePlace(engine, engine.start(), engine.federation.sites[1])  # two hidden stages; the server's model has one
    weights = (10 * 16 + 16) + 2 * (16 * 16 + 16) + 3 * 2 * 16 + 16 * 4 + 4
    buffers = 3 * (4 * 2 * 16 + 8)
    assert SYMBOLS["|w|"](at) == 4 * weights
    assert SYMBOLS["|b|"](at) == buffers
    assert SYMBOLS["|theta_i|"](at) == 4 * weights + buffers
    assert SYMBOLS["|theta_i|"](at) > SYMBOLS["|theta_g|"](at) > 0
    assert [SYMBOLS[name](at) for name in ("|s_in|", "|h|", "|z|", "flag", "integer", "float")] == [64, 64, 16, 1, 8, 4]
    assert [SYMBOLS[name](at) for name in ("classes", "present", "examples", "public", "differs")] == [4, 2, 48, 64, 1]
    assert (
        evaluated("training.batch_size", WirePlace(Engine(get_method("fedavg")(), engine.federation), None, at.site))
        == 16
    )
