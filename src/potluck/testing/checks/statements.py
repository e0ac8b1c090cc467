"""What a method states of itself, and whether it is so: documentation, hyper-parameters, wire, replies."""

import inspect
import re
import sys
import tomllib
from dataclasses import FrozenInstanceError, asdict
from typing import Any

import tomli_w

from potluck.core.message import Message, Traffic
from potluck.core.method import Method
from potluck.core.schema import Misfit, Schema
from potluck.engine.executors.hearing import Hearing
from potluck.experiment.settings.strict import typed
from potluck.experiment.settings.tables import without_none
from potluck.testing.checks.subjects import Overrides, Subject, engine_for
from potluck.testing.corruptions import corruptions
from potluck.testing.limits import limits_of, section
from potluck.testing.wire import WirePlace, applying, check_size, documented
from potluck.testing.worlds import CLASSES, World, assigned, quick, run_rounds

_SECTIONS = ("Symbols", "Wire", "Limits", "Departures from the paper")
_LEAST_LIMITS = 2


def documentation_is_complete(method: Subject) -> None:
    """Title, source, symbols, wire, at least two limits, departures."""
    text = inspect.cleandoc(sys.modules[method.__module__].__doc__ or "")
    assert re.match(r"\S.*\.$", text.split("\n")[0]), "the first line should name the method and end in a full stop"
    missing = [title for title in _SECTIONS if not section(method, title)]
    assert not missing, f"the module's docstring has no section {', '.join(missing)}"
    stated = len(section(method, "Limits"))
    assert stated >= _LEAST_LIMITS, f"it states {stated} limits; expected at least {_LEAST_LIMITS}"


def is_a_frozen_value(method: Subject) -> None:
    """Nothing can be passed from server to client through `self`."""
    subject = method()
    try:
        subject.cache = 1  # type: ignore[attr-defined]
    except FrozenInstanceError:
        return
    raise AssertionError("attributes can be set; write @dataclass(frozen=True)")


def hyper_parameters_round_trip(method: Subject, overrides: Overrides = ()) -> None:
    """A method's hyper-parameters, written to TOML and read back, are equal."""
    subject = quick(method, overrides)
    tree = tomllib.loads(tomli_w.dumps(without_none(asdict(subject))))
    assert typed(method, tree, "method", "round trip") == subject, "it reads back different"


def names_its_variants(method: Subject) -> None:
    """Every variant differs from the defaults and from the others; otherwise its checks would be redundant."""
    found = {"the defaults": quick(method)}
    for name, variant in method.variants.items():
        subject = quick(method, assigned(variant))
        twin = next((other for other, known in found.items() if known == subject), None)
        assert twin is None, f"the variant {name!r} is the same method as {twin}"
        found[name] = subject


def private_noise_never_repeats(method: Subject) -> None:
    """A method that can make private releases states a limit `never repeats`, which names the hyper-parameters."""
    if method.releases_privately is Method.releases_privately:
        return
    stated = any(limit.verb == "never repeats" for limit in limits_of(method))
    assert stated, "it defines releases_privately, but states no limit `OVERRIDES never repeats`"


def sends_what_it_documents(method: Subject, overrides: Overrides = ()) -> None:
    """The entries that the engine counted are those of the Wire section, and their sizes match its formulas.

    A variant may omit entries; those that it sends are documented for it or for the defaults.
    """
    for wire in (applying(method, overrides),) if overrides else documented(method):
        engine = engine_for(method, wire.overrides, world=World(batchnorm=True, labels=CLASSES - 1))
        ids = sorted(engine.federation.sites)
        state, first = engine.round(1, engine.start(), ids)
        state, second = engine.round(2, state, ids)
        places = [WirePlace(engine, state, site) for site in engine.federation.sites.values()]
        for direction, formulas in (("down", wire.down), ("up", wire.up)):
            seen = _sent(first.traffic, direction) | _sent(second.traffic, direction)
            fits = set(seen) <= set(formulas) if overrides else set(seen) == set(formulas)
            assert fits, f"{direction}: documented {sorted(formulas)}, sent {sorted(seen)}"
            for name, sent in seen.items():
                wrong = check_size(formulas[name], sent, places)
                assert wrong is None, f"{direction}: {name} is {wrong}"


def declares_its_replies(method: Subject, overrides: Overrides = ()) -> None:
    """Every reply fits the declaration in `replies`, and corrupted replies are refused."""
    heard = Hearing()
    engine = engine_for(method, overrides, executor=heard, tolerate_failures=True)  # so that refusals are recorded
    run_rounds(engine, 3)
    roster, server, tried = engine.federation.roster, engine.server(1), set[tuple[Any, ...]]()
    for call, answer in heard.exchanges:
        sent, reply = Message.decode(call.payload), Message.decode(answer.payload)
        declared = engine.method.replies(call.handler, roster[call.client], sent, server)
        assert declared is not None, f"{call.handler} has no declaration of its reply; see `Method.replies`"
        complaint = _complaint(declared, reply)
        assert complaint is None, f"a reply of {call.handler} does not fit its declaration: {complaint}"
        kind = (call.handler, roster[call.client].architecture, *reply)
        for wrong, what in corruptions(reply, declared) if kind not in tried else ():
            assert _complaint(declared, wrong) is not None, f"the reply of {call.handler} may have {what}"
        tried.add(kind)


def _complaint(declared: Schema, reply: Any) -> str | None:
    """Why a reply is refused; None if it is not."""
    try:
        declared.check(reply)
    except Misfit as misfit:
        return str(misfit)
    return None


def _sent(traffic: Traffic, direction: str) -> dict[str, int]:
    return dict(traffic.down if direction == "down" else traffic.up)
