"""What asynchronous rounds must not change."""

from potluck.core.ground.errors import ConfigError
from potluck.core.method import Method
from potluck.engine.rounds.asynchrony.rules import Asynchrony
from potluck.engine.rounds.engine import Engine
from potluck.experiment.running.asynchrony import check_asynchronous
from potluck.experiment.settings.schema import RoundsClose, RunConfig
from potluck.testing.checks.subjects import Overrides, Subject, all_bytes, ran
from potluck.testing.worlds import World, quick, toy_federation
from potluck.twin.clock import AsynchronousTwinClock
from potluck.twin.devices import Fleet, Twin, TwinDevice

_CLIENTS = 4
_DEVICES = (TwinDevice("0", gflops=0.001), TwinDevice())


def can_be_asynchronous(method: Subject, rule: Asynchrony, overrides: Overrides = ()) -> bool:
    """Whether a method's rounds can be, in a toy world of four clients."""
    subject = quick(method, overrides)
    try:
        check_asynchronous(subject, toy_federation(World(batchnorm=True).fit_for(subject)), _config(rule))
    except ConfigError:
        return False
    return True


def merges_together_what_was_asked_apart(method: Subject, overrides: Overrides = ()) -> None:
    """An asynchronous round with a place in the buffer for everybody is the round that waits, to the last bit.

    It is none if the method cannot have asynchronous rounds, and if its private noise never repeats.
    """
    rule = Asynchrony("fedbuff", buffer=_CLIENTS, staleness=0.0)
    subject = quick(method, overrides)
    if subject.releases_privately or not can_be_asynchronous(method, rule, overrides):
        return
    engine = _engine(subject, rule)
    state, ids = engine.start(), sorted(engine.federation.sites)
    for number in (1, 2):
        state, _ = engine.round(number, state, ids)
    assert all_bytes((engine, state)) == all_bytes(ran(method, overrides)), "the replies were merged otherwise"


def _engine(subject: Method[object], rule: Asynchrony) -> Engine:
    federation = toy_federation(World(batchnorm=True).fit_for(subject))
    clock = AsynchronousTwinClock(_config(rule).course(Fleet(_DEVICES, sorted(federation.sites))))
    return Engine(subject, federation, clock=clock, asynchrony=rule, at_once=_CLIENTS)


def _config(rule: Asynchrony) -> RunConfig:
    return RunConfig(rounds_close=RoundsClose(asynchronous=rule), twin=Twin(_DEVICES))
