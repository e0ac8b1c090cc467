"""Whether a method's rounds can be asynchronous, found by one round of a few clients."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from potluck.core.federation import ClientId, Federation, Site
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.text import one_line
from potluck.core.message import Message
from potluck.core.method import Method
from potluck.core.needs import Offer
from potluck.core.requests.examples import Examples
from potluck.engine.executors.sequential import Sequential
from potluck.engine.rounds.asynchrony.asking import NotOneAsk, first_ask, rest_of_round
from potluck.engine.rounds.asynchrony.rules import Asynchrony
from potluck.engine.rounds.engine import Engine
from potluck.engine.rounds.report import ExchangePlace, RoundReport
from potluck.experiment.federation.needs import check_needs, needs_of
from potluck.experiment.running.foresee import stand_ins
from potluck.experiment.settings.schema import Experiment, RunConfig

_AT = "run.rounds_close.asynchronous"
_TRIED = 64  # examples of each client on which it is tried where clients' own are elsewhere


def check_asynchronous(method: Method[Any], federation: Federation, config: RunConfig) -> None:
    """Check that a method's rounds can be asynchronous by the rule of a run; trains a few clients once.

    Raises:
        ConfigError: its round asks clients more than once, its messages are not made of its state alone, or its replies
            have entries that the rule cannot move.
        ClientFailure: a client failed.
    """
    rule, name = config.rounds_close.asynchronous, type(method).__name__
    assert rule is not None
    engine = Engine(method, federation, seed=config.seed, executor=Sequential(), computing=config.computing)
    try:
        _check(engine, rule)
    except NotOneAsk as error:
        raise ConfigError(
            f"{_AT}: {name} cannot have it: {error}; expected a method whose round asks clients once,"
            " with messages made of its state alone"
        ) from error
    finally:
        engine.close()


def check_asynchronous_nodes(experiment: Experiment, base: Federation) -> None:
    """Check, before any node is asked anything, that the rounds of a run with nodes can be asynchronous by its rule.

    It is tried on clients with the models and capacities that the experiment assigns, and examples of the common test
    set.

    Args:
        experiment: the server's.
        base: the server's assembly, without clients.

    Raises:
        ConfigError: they cannot, see `check_asynchronous`, or the server has no examples to try it on.
        ClientFailure: a client failed.
    """
    if base.test is None or not len(base.test):
        raise ConfigError(
            f"{_AT}: whether {experiment.method_name} can have it is tried on examples of federation.dataset, and"
            f" {experiment.federation.dataset} is not on this machine; expected its test part here"
        )
    federation = replace(base, sites=_tried(experiment, base.test))
    check_needs(needs_of(experiment.method), experiment.method_name, Offer.of(federation))
    check_asynchronous(experiment.method, federation, experiment.run)


def _tried(experiment: Experiment, test: Examples) -> dict[ClientId, Site]:
    """A client for each of the experiment's, all with the same few examples."""
    config = experiment.federation
    some = test.take(torch.linspace(0, len(test) - 1, min(len(test), _TRIED)).long())
    validation = some if config.validation_fraction else some.take(torch.arange(0))
    capacities = config.capacities or (1.0,)
    return {
        client: Site(
            client,
            experiment.model_of(client).architecture,
            some,
            validation,
            some,
            capacity=capacities[client % len(capacities)],
        )
        for client in range(config.clients)
    }


def _check(engine: Engine, rule: Asynchrony) -> None:
    """Run one round in two halves, and compare what the next ones would ask of whom.

    Raises:
        NotOneAsk: they cannot be cut there, or depend on more than the state.
        ConfigError: replies have entries that the rule cannot move.
    """
    method, state = engine.method, engine.start()
    clients, _ = stand_ins(engine.federation)
    handler, messages = first_ask(method, state, clients, engine.server(1))
    place = ExchangePlace(1, 1, RoundReport(clients), engine.server(1))
    replies = dict(engine.exchange(handler, messages, place))
    after = rest_of_round(method, state, clients, engine.server(1), lambda client, now: replies[client])
    _, asked = first_ask(method, after, clients, engine.server(2))
    _, later = first_ask(method, after, clients, engine.server(3))
    alone = {client: first_ask(method, after, [client], engine.server(2))[1][client] for client in clients}
    _compare(asked, later, "differ from round to round")
    _compare(asked, alone, "depend on who else takes part")
    if method.revises is None:
        raise NotOneAsk("its server reads a reply beside what it has sent in that round")
    left_out, *others = clients
    try:
        without = rest_of_round(method, after, others, engine.server(2), lambda client, now: replies[client])
    except Exception as error:
        raise NotOneAsk(f"its server cannot read a reply that was asked for earlier: {one_line(str(error))}") from error
    _, sent = first_ask(method, without, [left_out], engine.server(3))
    if list(_tensors(asked[left_out])) != list(_tensors(sent[left_out])):
        raise NotOneAsk("what it sends to a client depends on whether that took part in the round before")
    for client, reply in replies.items():
        _check_movable(type(method).__name__, rule, messages[client], reply, method.revises)


def _compare(asked: Mapping[ClientId, Message], others: Mapping[ClientId, Message], how: str) -> None:
    for client, message in asked.items():
        other = others[client]
        if message.encode() != other.encode():
            names = sorted(message.keys() | other.keys())
            entries = [name for name in names if _encoded(message, name) != _encoded(other, name)]
            raise NotOneAsk(f"its messages {how} ({', '.join(entries)})")


def _encoded(message: Message, name: str) -> bytes:
    return Message(**{name: message.get(name)}).encode()


def _check_movable(name: str, rule: Asynchrony, sent: Message, reply: Message, revised: Collection[str]) -> None:
    """Check that what a reply revises is like what was sent, and is all that it holds if stale replies count less."""
    tensors = {entry: found for entry in reply if (found := list(_tensors(reply[entry])))}
    both = [entry for entry in revised if entry in reply and entry in sent]
    if unlike := [entry for entry in both if not {*tensors.get(entry, ())} <= {*_tensors(sent[entry])}]:
        raise NotOneAsk(f"{', '.join(unlike)} of a reply is not like what was sent")
    own = sorted(tensors.keys() - set(both))
    if rule.moves and (own or not tensors):
        what = f"{', '.join(own)} in them is no new version" if own else "nothing in them is a new version"
        raise ConfigError(
            f"{_AT}: {name}'s stale replies cannot be moved, since {what} of what was sent;"
            " rule = 'fedbuff' with staleness = 0 takes them as they are"
        )


def _tensors(value: Any, where: str = "") -> Iterator[tuple[str, torch.Size]]:
    """The places and shapes of the tensors in an entry."""
    if isinstance(value, Tensor):
        yield where, value.shape
    elif isinstance(value, Mapping | list | tuple):
        children = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, child in sorted(children):
            yield from _tensors(child, f"{where}/{name}")
