"""What clipping, and private weights beside it, need of a method, checked before anything trains."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from potluck.core.ground.errors import ConfigError
from potluck.core.message import Message
from potluck.core.method import Method
from potluck.core.schema import Schema
from potluck.core.summed import blank
from potluck.engine.client.clipping import Clipping, not_private
from potluck.engine.rounds.asynchrony.asking import NotOneAsk, first_ask
from potluck.engine.rounds.engine import Engine
from potluck.experiment.settings.schema import RunConfig

_AT = "run.clip_update"


def check_has_updates(method: Method[Any]) -> None:
    """Check that a method says which tensors of a reply are clients' updates.

    Raises:
        ConfigError: its server reads single replies, so that it does not.
    """
    if why := method.needs_single_replies:
        name = type(method).__name__
        raise ConfigError(
            f"{_AT}: found {name}, which needs single replies: {why}; expected a method that needs sums alone, of which"
            " it is known what updates are: leave it out"
        )


def check_clips(engine: Engine, state: Any, config: RunConfig, clipping: Clipping) -> None:
    """Check that what the first round's clients would send can be clipped, and with noise be private.

    What they send later is checked where it leaves them, see `Clipping.applied`.

    Args:
        engine: of the run.
        state: the method's, before the first round.
        config: of the run.
        clipping: how clients clip.

    Raises:
        ConfigError: it cannot.
    """
    method, server = engine.method, engine.server(1)
    clients = config.cohort(sorted(engine.federation.sites), 1)
    try:
        handler, messages = first_ask(method, state, clients, server)
    except NotOneAsk:
        return
    name, alike = handler.__name__, set[tuple[str, float]]()
    for client in clients:
        member, message = server.roster[client], messages[client]
        if (kind := (member.architecture, member.capacity)) in alike:
            continue
        alike.add(kind)
        expected = method.replies(name, member, message, server)
        if not isinstance(expected, Schema):
            continue
        reply = Message(**blank(expected))
        of = method.summed(name, member, message, reply, replace(engine.server(1), roster={client: member}))
        if of.tensors and not any(isinstance(one.keep, Tensor) for one in of.tensors.values()):
            raise ConfigError(
                f"{_AT}: found {type(method).__name__}, whose clients send what they have measured, such as means of"
                " classes, and no updates; expected none with it: leave it out"
            )
        if clipping.private and (why := not_private(reply, of)):
            raise ConfigError(f"run.private_weights: {why}")
