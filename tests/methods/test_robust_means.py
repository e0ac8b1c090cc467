"""One client of five sends numbers a million times too large; what the others are sent shows whether it mattered."""

from dataclasses import fields, replace
from typing import get_args

import pytest
from torch import Tensor

from potluck.core.ground.errors import DivergenceError
from potluck.core.message import Message
from potluck.core.method import on_client
from potluck.engine.rounds.engine import Engine
from potluck.methods import get_method, list_methods
from potluck.parts.means import Aggregate, MeanRule
from potluck.parts.sharing import Sharing
from potluck.testing.worlds import World, quick, toy_federation

LIAR = 2
HANDLERS = {"fedmd": "score_public", "fccl": "score_public"}  # "local_update" elsewhere
STORED = {"fedin": "features", "velo": "features"}  # what clients send beside means, and nobody takes a mean of
SETTINGS = {  # else not all five count, and 'trimmed' drops none of four
    "slimfl": ("decoded=[1.0,1.0]",),
    "fd": ('averaged="all"', 'exchanged="logits"'),  # probabilities are bounded
    "fedl2g": ("server_rate=100.0", "study=64"),  # gradients are small
    "fedopt": ('optimizer="momentum"', "server_lr=1.0"),  # Adam's steps are as large for a lie as for the truth
    "hypemefed": ("generate=false",),  # hypernetworks learn from every client's matrices
}
AVERAGING = [name for name in list_methods() if name in STORED or not get_method(name).unguarded]


def swollen(node):
    if isinstance(node, Tensor):
        return node * -1e6 if node.is_floating_point() else node
    return {key: swollen(child) for key, child in node.items()} if isinstance(node, dict) else node


def with_a_liar(name, handler):
    """The method, but for what one client replies to be averaged."""
    cls = get_method(name)
    honest = getattr(cls, handler)

    def spoilt(reply):
        return Message(
            **{entry: reply[entry] if entry == STORED.get(name) else swollen(reply[entry]) for entry in reply}
        )

    @on_client
    def lying(self, client, message):
        work = honest(self, client, message)
        reply = (yield from work) if not isinstance(work, Message) else work
        return spoilt(reply) if client.id == LIAR else reply

    lying.__name__ = handler
    return type(cls.__name__, (cls,), {handler: lying})


def largest(node):
    if isinstance(node, Tensor):
        return float(node.abs().max()) if node.is_floating_point() and node.numel() else 0.0
    return max(map(largest, node.values()), default=0.0) if isinstance(node, dict) else 0.0


def largest_sent(name, rule, monkeypatch):
    """The largest number that a client is sent after the liar's first reply; infinity if somebody diverges over it."""
    liar = with_a_liar(name, HANDLERS.get(name, "local_update"))
    method = quick(liar, SETTINGS.get(name, ()), optimizer="sgd", lr=0.01)
    holder = "sharing" if getattr(method, "sharing", Sharing("none")).averages else None
    combine = {"combine": Aggregate(rule)}
    method = replace(method, **({"sharing": replace(method.sharing, **combine)} if holder else combine))
    world = World(clients=5, capacity=1.0).fit_for(method)
    engine = Engine(method, toy_federation(world))
    sent = []
    exchange = engine.exchange

    def watched(handler, messages, place):
        sent.append(messages)
        return exchange(handler, messages, place)

    monkeypatch.setattr(engine, "exchange", watched)
    state = engine.start()
    try:
        for number in (1, 2):
            state, _ = engine.round(number, state, range(5))
    except DivergenceError:
        return float("inf")
    entries = [
        message[entry]
        for messages in sent[1:]
        for message in messages.values()
        for entry in message
        if entry != STORED.get(name)
    ]
    return max(map(largest, entries))


@pytest.mark.slow
@pytest.mark.parametrize("name", AVERAGING)
def test_one_liar_ruins_a_mean_and_no_robust_one(name, monkeypatch):
    assert largest_sent(name, "mean", monkeypatch) > 1e3
    for rule in get_args(MeanRule)[1:]:
        assert largest_sent(name, rule, monkeypatch) < 100


def test_a_method_that_passes_on_what_no_mean_is_taken_of_says_so():
    assert all(get_method(name).unguarded for name in STORED)


def test_a_method_has_a_rule_of_means_unless_it_takes_none():
    """Whoever adds a method that takes means and offers no rule for them is told here."""
    for name in list_methods():
        cls = get_method(name)
        assert {spec.name for spec in fields(cls)} & {"sharing", "combine"} or cls.unguarded, name
