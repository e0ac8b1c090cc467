"""Answers as a hostile node would give them, put before the engine by an executor that forges one client's."""

import json
import math
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from potluck.core.ground.errors import DivergenceError
from potluck.core.ground.tree import pack
from potluck.core.message import Message
from potluck.core.roles import ClientFailure, Failure
from potluck.engine.client.runtime import EvalResult
from potluck.engine.client.session import Answer
from potluck.engine.executors.sequential import Sequential
from potluck.engine.rounds.engine import Engine
from potluck.methods import get_method
from potluck.testing.checks.clients import Without
from potluck.testing.worlds import World, packed_state, quick, toy_federation

NAN, INF = math.nan, math.inf
WORLD = World(batchnorm=True, architectures=1)
LIAR = 1


class Forging(Sequential):
    """An executor under which one client's answers are forged, and nobody is to be trusted."""

    trusted = False

    def __init__(self, forge):
        self._forge = forge

    def run(self, host, tasks):
        for outcome in super().run(host, tasks):
            yield self._forge(outcome) if outcome.client == LIAR else outcome


def engine(executor, name="fedavg", **options):
    subject = quick(get_method(name))
    return Engine(subject, toy_federation(WORLD), executor=executor, **options)


def entries(change):
    """A forgery that changes the entries of the reply."""

    def forge(answer):
        reply = dict(Message.decode(answer.payload))
        return replace(answer, payload=pack(change(reply)))

    return forge


def entry(name, value):
    return entries(lambda reply: {**reply, name: value})


def weight(change):
    """A forgery of one layer's weights."""

    def changed(reply):
        return {**reply, "weights": {**reply["weights"], "head.bias": change(reply["weights"]["head.bias"])}}

    return entries(changed)


def filled(value):
    return weight(lambda tensor: torch.full_like(tensor, value))


def payload(make):
    return lambda answer: replace(answer, payload=make(answer.payload))


def skeleton(text):
    """A message whose tensors are none and whose tree is this text."""
    return payload(lambda _: safetensors.torch.save({}, metadata={"potluck": text}))


def nested(depth):
    return '{"dict": [["a", ' * depth + '{"value": 1}' + "]]}" * depth


HOSTILE = {
    "examples in words": entry("examples", "many"),
    "no examples": entries(lambda reply: {n: v for n, v in reply.items() if n != "examples"}),
    "examples None": entry("examples", None),
    "1e18 examples": entry("examples", 1e18),
    "10**18 examples": entry("examples", 10**18),
    "10**400 examples": entry("examples", 10**400),
    "one example too many": entry("examples", 49),
    "no example": entry("examples", 0),
    "-5 examples": entry("examples", -5),
    "NaN examples": entry("examples", NAN),
    "infinitely many examples": entry("examples", INF),
    "half an example": entry("examples", 0.5),
    "True examples": entry("examples", True),
    "a tensor of examples": entry("examples", torch.tensor(5)),
    "a dict of examples": entry("examples", {"a": 1}),
    "no weights": entries(lambda reply: {n: v for n, v in reply.items() if n != "weights"}),
    "weights a list": entry("weights", [torch.zeros(3)]),
    "weights a number": entry("weights", 3),
    "weights text": entry("weights", "all"),
    "weights one tensor": entry("weights", torch.zeros(3)),
    "no layer": entry("weights", {}),
    "an unknown layer": entries(lambda reply: {**reply, "weights": {**reply["weights"], "evil": torch.zeros(9)}}),
    "a layer in words": weight(lambda _: "x"),
    "a layer that is a dict": weight(lambda tensor: {"a": tensor}),
    "a layer too long": weight(lambda tensor: torch.cat([tensor, tensor])),
    "a layer of other dimensions": weight(lambda tensor: tensor[None]),
    "an empty layer": weight(lambda tensor: tensor[:0]),
    "integers for floats": weight(lambda tensor: tensor.long()),
    "doubles for floats": weight(lambda tensor: tensor.double()),
    "halves for floats": weight(lambda tensor: tensor.half()),
    "complex for floats": weight(lambda tensor: tensor.to(torch.complex64)),
    "a negative counter": entries(
        lambda reply: {**reply, "buffers": {n: -torch.ones_like(b) for n, b in reply["buffers"].items()}}
    ),
    "no buffers": entries(lambda reply: {n: v for n, v in reply.items() if n != "buffers"}),
    "an entry nobody asked for": entry("x", torch.zeros(3)),
    "twenty thousand entries": entries(lambda reply: {**reply, **{f"x{i}": i for i in range(20_000)}}),
    "a name of a megabyte": entries(lambda reply: {**reply, "x" * 2**20: 1}),
    "a name with escapes": entry("\x1b[2J\nfake", 1),
    "nothing": entries(lambda reply: {}),
    "a list": payload(lambda _: pack([1, 2])),
    "a tensor": payload(lambda _: pack(torch.zeros(3))),
    "no bytes": payload(lambda _: b""),
    "garbage": payload(lambda _: bytes(range(256)) * 40),
    "half a message": payload(lambda good: good[: len(good) // 2]),
    "64 MiB of zeros": payload(lambda _: bytes(2**26)),
    "a header of 2**60 bytes": payload(lambda good: (2**60).to_bytes(8, "little") + good[8:]),
    "a node of no kind": skeleton('{"evil": 1}'),
    "a node that is a number": skeleton("5"),
    "a tensor that is not there": skeleton('{"dict": [["weights", {"tensor": 99}]]}'),
    "nested 50 deep": skeleton(nested(50)),
    "nested 50,000 deep": skeleton(nested(50_000)),
    "infinity in JSON": skeleton('{"dict": [["examples", {"value": Infinity}]]}'),
    "a lone surrogate": skeleton(json.dumps({"dict": [["examples", {"value": "\ud800"}]]})),
    "a list for a key": skeleton('{"dict": [[[1], {"value": 1}]]}'),
    "losses without end": lambda answer: replace(answer, losses=(1.0,) * 10**6),
    "a loss in words": lambda answer: replace(answer, losses=("low",)),
    "a note in words": lambda answer: replace(answer, notes={"loss": "low"}),
    "a note whose name moves the cursor": lambda answer: replace(answer, notes={"\x1b[2J": 1.0}),
    "more notes than may be": lambda answer: replace(answer, notes={f"note{i}": 1.0 for i in range(33)}),
    "a result": lambda answer: EvalResult(answer.client, "model", pack({})),
    "a failure that claims the contract": lambda a: Failure(a.client, "FedAvg.local_update", "ContractError: broken"),
    "a failure with a traceback of 25 MB": lambda a: Failure(a.client, "x" * 10**6, "y" * 10**7, "z\n" * 10**7),
}
DIVERGED = {
    "NaN weights": filled(NAN),
    "one NaN": weight(lambda tensor: torch.cat([tensor[:-1], torch.tensor([NAN])])),
    "infinite weights": filled(INF),
    "negative infinite weights": filled(-INF),
    "weights of 1e30": filled(1e30),
    "weights of -1e30": filled(-1e30),
    "a NaN loss": lambda answer: replace(answer, losses=(NAN,)),
    "an infinite loss": lambda answer: replace(answer, losses=(0.5, INF)),
    "a loss of 1e300": lambda answer: replace(answer, losses=(1e300,)),
}


def two_rounds(subject):
    """Where two rounds lead: state, what clients keep, what was counted."""
    state, seen = subject.start(), []
    for number in (1, 2):
        state, report = subject.round(number, state, [0, 1, 2, 3])
        assert list(report.failures) == [LIAR]
        assert report.lost is None
        assert str(report.failures[LIAR]).isprintable()
        assert len(str(report.failures[LIAR])) < 1000
        seen.append((report.replied, dict(report.traffic.up), report.losses, report.loss_local))
    return packed_state(state), [subject.store.read(id) for id in range(4)], seen


@pytest.fixture(scope="module")
def absent():
    """As `two_rounds`, had the client not answered."""
    return two_rounds(engine(Without(LIAR), tolerate_failures=True))


@pytest.mark.parametrize("name", [*HOSTILE, *DIVERGED])
def test_a_reply_that_does_not_fit_counts_as_if_its_sender_had_not_answered(name, absent):
    forged = engine(Forging({**HOSTILE, **DIVERGED}[name]), tolerate_failures=True)
    assert two_rounds(forged) == absent


@pytest.mark.parametrize("name", list(HOSTILE)[::7])
def test_a_reply_that_does_not_fit_ends_a_run_without_tolerance_in_one_line(name):
    subject = engine(Forging(HOSTILE[name]))
    with pytest.raises(ClientFailure, match=r"^client 1 failed in .*; run\.tolerate_failures = true continues") as told:
        subject.round(1, subject.start(), [0, 1])
    assert str(told.value).isprintable()


@pytest.mark.parametrize("name", DIVERGED)
def test_numbers_that_diverged_end_a_run_with_round_and_client(name):
    subject = engine(Forging(DIVERGED[name]))
    with pytest.raises(DivergenceError, match=r"^round 4: client 1 diverged in FedAvg\.local_update: "):
        subject.round(4, subject.start(), [0, 1])


@pytest.mark.parametrize("name", ["felo", "fedmd", "local"])
def test_nothing_that_a_refused_client_would_keep_is_kept(name):
    def forge(outcome):
        return replace(outcome, payload=b"") if isinstance(outcome, Answer) else outcome

    subject = engine(Forging(forge), name, tolerate_failures=True)
    subject.round(1, subject.start(), [0, 1, 2, 3])
    assert [subject.store.read(id) is None for id in range(4)] == [False, True, False, False]


def test_a_forged_reason_cannot_forge_a_line_of_the_log(caplog):
    lie = "no\n2026-01-01 00:00:00 WARNING potluck: client 0 failed\x1b[1A"
    subject = engine(Forging(lambda a: Failure(a.client, lie, lie, lie)), tolerate_failures=True)
    subject.round(1, subject.start(), [0, 1])
    (message,) = [record.getMessage() for record in caplog.records]
    first, *others = message.split("\n")
    assert first.startswith("client 1 failed in no 2026")
    assert all(line.startswith("  | ") for line in others)
    assert "\x1b" not in message


def test_what_a_method_does_not_declare_is_still_checked_for_numbers_and_size():
    class Silent(get_method("fedavg")):
        def replies(self, handler, member, message, server):
            return None

    def state_under(forge):
        subject = Engine(quick(Silent), toy_federation(WORLD), executor=Forging(forge), tolerate_failures=True)
        _, report = subject.round(1, subject.start(), [0, 1, 2, 3])
        return list(report.failures)

    assert state_under(lambda answer: answer) == []
    for name in ("1e18 examples", "NaN examples", "NaN weights", "weights of 1e30", "integers for floats"):
        assert state_under({**HOSTILE, **DIVERGED}[name]) == [LIAR], name
    assert state_under(payload(lambda good: good + bytes(2**27))) == [LIAR]


# What a client says of its model


def result(**changes):
    """A forgery of what the client says of its model, once it is asked."""
    return lambda outcome: replace(outcome, **changes) if isinstance(outcome, EvalResult) else outcome


def sums(part="own", **changes):
    """A forgery of the sums over some examples."""

    def forge(outcome):
        if not isinstance(outcome, EvalResult):
            return outcome
        said = {name: dict(of) for name, of in outcome.sums.items()}
        said[part] = {**said.get(part, {}), **changes}
        return replace(outcome, payload=pack(said))

    return forge


def shifted(outcome):
    """One more hit than there are examples."""
    table = outcome.sums["own"]["confusion"].clone()
    table[0, 0] += 1
    return sums(confusion=table)(outcome)


def wrapping(outcome):
    """Counts so large that their sum in 64 bits is again the number of examples."""
    table = torch.zeros(4, 4, dtype=torch.int64)
    table[0, 0], table[1, 1], table[2, 2], table[3, 3] = 2**62, 2**62, 2**62, 2**62
    table[0, 1] = int(outcome.sums["own"]["confusion"].sum())
    return sums(confusion=table)(outcome)


def of_result(forge):
    return lambda outcome: forge(outcome) if isinstance(outcome, EvalResult) else outcome


LIES = {
    "more examples than there are": of_result(shifted),
    "counts that wrap around": of_result(wrapping),
    "negative counts": sums(confusion=torch.full((4, 4), -1)),
    "counts in floats": sums(confusion=torch.zeros(4, 4)),
    "counts that are NaN": sums("validation", confusion=torch.full((4, 4), NAN)),
    "counts of other classes": sums(confusion=torch.zeros(3, 3, dtype=torch.int64)),
    "counts of another number of common examples": sums("common", confusion=torch.zeros(4, 4, dtype=torch.int64)),
    "counts in words": sums(confusion="all right"),
    "counts in a number": sums(confusion=True),
    "sums of another name": sums(secret=torch.zeros(3)),
    "an unknown part": sums("secret"),
    "no sums": result(payload=pack({})),
    "sums in words": result(payload=pack("all")),
    "no part": result(payload=pack(None)),
    "garbage for sums": result(payload=b"garbage"),
    "64 MiB of sums": result(payload=bytes(2**26)),
    "a number for a name": result(model=7),
    "a name of a megabyte": result(model="x" * 2**20),
    "a name with escapes": result(model="\x1b[2J"),
    "a reply": lambda outcome: Answer(LIAR, Message().encode(), None, ()),
    "a failure": lambda outcome: Failure(LIAR, "evaluation", "no", kind="divergence"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIES)
def test_a_lie_about_a_model_costs_its_own_row_and_nothing_else(name):
    parts = dict.fromkeys(range(4), ("own", "validation", "common"))
    honest = engine(Sequential())
    state = honest.start()
    expected = [said for said in honest.evaluate(state, parts) if said.client != LIAR]
    assert engine(Forging(LIES[name]), tolerate_failures=True).evaluate(state, parts) == expected
    with pytest.raises(ClientFailure, match=r"^client 1 failed in evaluation: .*") as told:
        engine(Forging(LIES[name])).evaluate(state, parts)
    assert str(told.value).isprintable()
